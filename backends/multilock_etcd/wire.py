"""The few messages of etcd's v3 API that a lock needs, in a separate descriptor pool.

The messages are built from the field numbers of the public API (rpc.proto, kv.proto). So any protobuf from 3.20 on
works, and names cannot clash with another etcd package of the process. Enums are declared as int32 and oneofs as plain
fields, which look the same on the wire.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

__all__ = [
    "ASCEND",
    "CREATE",
    "DELETE",
    "DESCEND",
    "MODIFY",
    "NOPUT",
    "SORT_BY_CREATION",
    "AuthenticateRequest",
    "AuthenticateResponse",
    "Compare",
    "DeleteRangeRequest",
    "DeleteRangeResponse",
    "LeaseGrantRequest",
    "LeaseGrantResponse",
    "LeaseKeepAliveRequest",
    "LeaseKeepAliveResponse",
    "LeaseRevokeRequest",
    "LeaseRevokeResponse",
    "LeaseTimeToLiveRequest",
    "LeaseTimeToLiveResponse",
    "MemberListRequest",
    "MemberListResponse",
    "PutRequest",
    "RangeRequest",
    "RangeResponse",
    "RequestOp",
    "StatusRequest",
    "StatusResponse",
    "TxnRequest",
    "TxnResponse",
    "WatchCancelRequest",
    "WatchCreateRequest",
    "WatchRequest",
    "WatchResponse",
]

ASCEND, DESCEND = 1, 2  # RangeRequest.sort_order
SORT_BY_CREATION = 2  # RangeRequest.sort_target
CREATE, MODIFY = 1, 2  # Compare.target: the create_revision, the mod_revision
DELETE = 1  # Event.type
NOPUT = 0  # WatchCreateRequest.filters: only deletions

_PACKAGE = "etcd"
_FIELDS = {
    "KeyValue": "bytes key 1, int64 create_revision 2, int64 mod_revision 3, int64 version 4, bytes value 5, "
    "int64 lease 6",
    "Event": "int32 type 1, KeyValue kv 2",
    "ResponseHeader": "uint64 cluster_id 1, uint64 member_id 2, int64 revision 3, uint64 raft_term 4",
    "RangeRequest": "bytes key 1, bytes range_end 2, int64 limit 3, int64 revision 4, int32 sort_order 5, "
    "int32 sort_target 6, bool keys_only 8, bool count_only 9, int64 max_create_revision 13",
    "RangeResponse": "ResponseHeader header 1, repeated KeyValue kvs 2, bool more 3, int64 count 4",
    "PutRequest": "bytes key 1, bytes value 2, int64 lease 3",
    "PutResponse": "ResponseHeader header 1",
    "DeleteRangeRequest": "bytes key 1, bytes range_end 2",
    "DeleteRangeResponse": "ResponseHeader header 1, int64 deleted 2",
    "RequestOp": "RangeRequest request_range 1, PutRequest request_put 2, DeleteRangeRequest request_delete_range 3",
    "ResponseOp": "RangeResponse response_range 1, PutResponse response_put 2, "
    "DeleteRangeResponse response_delete_range 3",
    "Compare": "int32 result 1, int32 target 2, bytes key 3, int64 create_revision 5, int64 mod_revision 6, "
    "bytes range_end 64",
    "TxnRequest": "repeated Compare compare 1, repeated RequestOp success 2, repeated RequestOp failure 3",
    "TxnResponse": "ResponseHeader header 1, bool succeeded 2, repeated ResponseOp responses 3",
    "LeaseGrantRequest": "int64 TTL 1, int64 ID 2",
    "LeaseGrantResponse": "ResponseHeader header 1, int64 ID 2, int64 TTL 3, string error 4",
    "LeaseRevokeRequest": "int64 ID 1",
    "LeaseRevokeResponse": "ResponseHeader header 1",
    "LeaseKeepAliveRequest": "int64 ID 1",
    "LeaseKeepAliveResponse": "ResponseHeader header 1, int64 ID 2, int64 TTL 3",
    "LeaseTimeToLiveRequest": "int64 ID 1, bool keys 2",
    "LeaseTimeToLiveResponse": "ResponseHeader header 1, int64 ID 2, int64 TTL 3, int64 grantedTTL 4",
    "WatchCreateRequest": "bytes key 1, bytes range_end 2, int64 start_revision 3, repeated int32 filters 5, "
    "int64 watch_id 7",
    "WatchCancelRequest": "int64 watch_id 1",
    "WatchRequest": "WatchCreateRequest create_request 1, WatchCancelRequest cancel_request 2",
    "WatchResponse": "ResponseHeader header 1, int64 watch_id 2, bool created 3, bool canceled 4, "
    "int64 compact_revision 5, string cancel_reason 6, repeated Event events 11",
    "AuthenticateRequest": "string name 1, string password 2",
    "AuthenticateResponse": "ResponseHeader header 1, string token 2",
    "StatusRequest": "",
    "StatusResponse": "ResponseHeader header 1, string version 2, uint64 leader 4, repeated string errors 8, "
    "bool isLearner 10",
    "Member": "uint64 ID 1, string name 2, repeated string peerURLs 3, repeated string clientURLs 4, bool isLearner 5",
    "MemberListRequest": "",
    "MemberListResponse": "ResponseHeader header 1, repeated Member members 2",
}


def _classes() -> dict[str, Any]:
    """Return the message classes by name."""
    file = descriptor_pb2.FileDescriptorProto(name="etcd.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _FIELDS.items():
        message = file.message_type.add(name=name)
        for field in filter(None, fields.split(", ")):
            _add_field(message, field.split())
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return {name: _class_of(pool, f"{_PACKAGE}.{name}") for name in _FIELDS}


def _add_field(message: Any, words: list[str]) -> None:
    *repeated, kind, name, number = words
    kinds = descriptor_pb2.FieldDescriptorProto
    field = message.field.add(name=name, number=int(number))
    field.label = kinds.LABEL_REPEATED if repeated else kinds.LABEL_OPTIONAL
    if kind in _FIELDS:
        field.type, field.type_name = kinds.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
    else:
        field.type = getattr(kinds, f"TYPE_{kind.upper()}")


def _class_of(pool: Any, name: str) -> Any:
    descriptor = pool.FindMessageTypeByName(name)
    if hasattr(message_factory, "GetMessageClass"):
        return message_factory.GetMessageClass(descriptor)
    return message_factory.MessageFactory(pool).GetPrototype(descriptor)  # protobuf before 4.22


_made = _classes()
AuthenticateRequest, AuthenticateResponse = _made["AuthenticateRequest"], _made["AuthenticateResponse"]
Compare, RequestOp = _made["Compare"], _made["RequestOp"]
DeleteRangeRequest, DeleteRangeResponse = _made["DeleteRangeRequest"], _made["DeleteRangeResponse"]
LeaseGrantRequest, LeaseGrantResponse = _made["LeaseGrantRequest"], _made["LeaseGrantResponse"]
LeaseKeepAliveRequest, LeaseKeepAliveResponse = _made["LeaseKeepAliveRequest"], _made["LeaseKeepAliveResponse"]
LeaseRevokeRequest, LeaseRevokeResponse = _made["LeaseRevokeRequest"], _made["LeaseRevokeResponse"]
LeaseTimeToLiveRequest, LeaseTimeToLiveResponse = _made["LeaseTimeToLiveRequest"], _made["LeaseTimeToLiveResponse"]
MemberListRequest, MemberListResponse = _made["MemberListRequest"], _made["MemberListResponse"]
PutRequest = _made["PutRequest"]
RangeRequest, RangeResponse = _made["RangeRequest"], _made["RangeResponse"]
StatusRequest, StatusResponse = _made["StatusRequest"], _made["StatusResponse"]
TxnRequest, TxnResponse = _made["TxnRequest"], _made["TxnResponse"]
WatchCancelRequest, WatchCreateRequest = _made["WatchCancelRequest"], _made["WatchCreateRequest"]
WatchRequest, WatchResponse = _made["WatchRequest"], _made["WatchResponse"]
