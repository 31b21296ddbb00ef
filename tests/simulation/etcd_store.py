"""The data of a simulated etcd: keys with revisions, transactions, leases, and the watches of each stream.

The store executes the requests of `multilock_etcd` as etcd does. `test_etcd_model` compares it with a real server.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from multilock_etcd import wire
from multilock_etcd.transport import Code, calls

__all__ = ["LEAST_TTL", "Refused", "Row", "Store", "Stream"]

LEAST_TTL = 2  # seconds: 1.5 election timeouts of 1 s, rounded up
PUT, DELETE = 0, wire.DELETE
NO_LEASE = (Code.NOT_FOUND, "etcdserver: requested lease not found")


class Refused(Exception):
    """The server refuses a request with this status code and this message."""

    def __init__(self, code: Any, details: str) -> None:
        super().__init__(details)
        self.code, self.details = code, details


class Row(NamedTuple):
    """A key with its value and revisions. The fields are those of the message ``KeyValue``."""

    key: bytes
    create_revision: int
    mod_revision: int
    version: int
    value: bytes
    lease: int


class Event(NamedTuple):
    """A change of a key. ``kv`` has the fields of the message ``KeyValue``."""

    type: int
    kv: dict[str, Any]


class Lease:
    """A lease. The server deletes its keys some time after ``until``."""

    def __init__(self, number: int, ttl: int, now: float) -> None:
        self.number, self.ttl = number, ttl
        self.until = now + ttl
        self.keys: dict[bytes, None] = {}


class Watch:
    """A watch of a stream, which reports the events from revision ``start`` on."""

    def __init__(self, request: Any, start: int) -> None:
        self.key, self.end = request.key, request.range_end
        self.only_deletions = wire.NOPUT in request.filters
        self.start = start
        self.is_behind = False  # whether the watch began in the past, and has not reported past events yet

    def heeds(self, event: Event) -> bool:
        return (event.type == DELETE or not self.only_deletions) and _contains(self.key, self.end, event.kv["key"])


class Stream:
    """A watch stream. ``send`` is called with each `WatchResponse`."""

    def __init__(self, send: Callable[[Any], None]) -> None:
        self.send = send
        self.watches: dict[int, Watch] = {}


class Store:
    """All data of one server. ``now`` returns the seconds of its monotonic clock. ``lease`` is the number of the last
    lease that a server before it has granted. etcd never grants a number again, even after it has lost its data."""

    def __init__(self, now: Callable[[], float], lease: int = 1 << 40) -> None:
        self._now = now
        self.revision, self.compacted = 1, 0
        self.rows: dict[bytes, Row] = {}
        self.leases: dict[int, Lease] = {}
        self.streams: dict[Stream, None] = {}
        self.given_at: dict[int, float] = {}  # revision -> the time of its commit
        self._keys: list[bytes] = []  # the keys of `rows` in order
        self._history: list[tuple[int, list[Event]]] = []
        self.lease = lease
        self._events: list[Event] = []  # the events of the present transaction

    # Requests

    def execute(self, path: str, request: Any) -> Any:
        """Execute a request, and return its reply. Raises `Refused`."""
        match path:
            case calls.TXN.path:
                return self._txn(request)
            case calls.RANGE.path:
                return self._range(request)
            case calls.DELETE.path:
                deleted = self._delete_range(request.key, request.range_end)
                return wire.DeleteRangeResponse(header=self._commit(), deleted=deleted)
            case calls.GRANT.path:
                return self._grant(request)
            case calls.REVOKE.path:
                if request.ID not in self.leases:
                    raise Refused(*NO_LEASE)
                self.end_lease(request.ID)
                return wire.LeaseRevokeResponse(header=self._header())
            case calls.KEEP_ALIVE.path:
                return self._keep_alive(request.ID)
            case calls.TIME_TO_LIVE.path:
                return self._time_to_live(request.ID)
            case calls.STATUS.path:
                return wire.StatusResponse(header=self._header(), version="3.5.16", leader=1)
        raise Refused(Code.UNIMPLEMENTED, f"unknown method {path}")

    def _header(self) -> dict[str, int]:
        return {"revision": self.revision}

    def rows_in(self, key: bytes, end: bytes) -> list[Row]:
        """Return the rows of a range, in the order of their keys."""
        if not end:
            return [self.rows[key]] if key in self.rows else []
        first = bisect.bisect_left(self._keys, key)
        last = len(self._keys) if end == b"\0" else bisect.bisect_left(self._keys, end)
        return [self.rows[each] for each in self._keys[first:last]]

    def _range(self, request: Any) -> Any:
        rows = self.rows_in(request.key, request.range_end)
        reply = {"header": self._header(), "count": len(rows)}
        if request.count_only:
            return wire.RangeResponse(**reply)
        if request.max_create_revision:
            rows = [row for row in rows if row.create_revision <= request.max_create_revision]
        if request.sort_target == wire.SORT_BY_CREATION:
            rows.sort(key=lambda row: row.create_revision, reverse=request.sort_order == wire.DESCEND)
        if request.limit and len(rows) > request.limit:
            rows, reply["more"] = rows[: request.limit], True
        if request.keys_only:
            rows = [row._replace(value=b"") for row in rows]
        return wire.RangeResponse(kvs=[row._asdict() for row in rows], **reply)

    def _txn(self, request: Any) -> Any:
        succeeded = all(self.holds(each) for each in request.compare)
        operations = request.success if succeeded else request.failure
        for each in operations:
            if each.request_put.lease and each.request_put.lease not in self.leases:
                raise Refused(*NO_LEASE)
        answers: list[dict[str, Any]] = []
        for each in operations:
            if each.HasField("request_put"):
                self._put(each.request_put)
                answers.append({"response_put": {}})
            elif each.HasField("request_delete_range"):
                deleted = self._delete_range(each.request_delete_range.key, each.request_delete_range.range_end)
                answers.append({"response_delete_range": {"deleted": deleted}})
            else:
                answers.append({"response_range": self._range(each.request_range)})
        return wire.TxnResponse(header=self._commit(), succeeded=succeeded, responses=answers)

    def holds(self, compare: Any) -> bool:
        """Return whether this comparison of a transaction holds. A missing key has revision 0."""
        wanted = compare.mod_revision if compare.target == wire.MODIFY else compare.create_revision
        rows = self.rows_in(compare.key, compare.range_end)
        found = [row.mod_revision if compare.target == wire.MODIFY else row.create_revision for row in rows] or [0]
        return all(each == wanted for each in found)

    # Changes

    def _put(self, request: Any) -> None:
        key, now = request.key, self.revision + 1
        before = self.rows.get(key)
        if before is None:
            bisect.insort(self._keys, key)
        elif before.lease:
            del self.leases[before.lease].keys[key]
        created, version = (before.create_revision, before.version + 1) if before else (now, 1)
        row = self.rows[key] = Row(key, created, now, version, request.value, request.lease)
        if request.lease:
            self.leases[request.lease].keys[key] = None
        self._events.append(Event(PUT, row._asdict()))

    def _delete_range(self, key: bytes, end: bytes) -> int:
        rows = self.rows_in(key, end)
        for row in rows:
            del self.rows[row.key]
            self._keys.remove(row.key)
            if row.lease:
                del self.leases[row.lease].keys[row.key]
            self._events.append(Event(DELETE, {"key": row.key, "mod_revision": self.revision + 1}))
        return len(rows)

    def _commit(self) -> dict[str, int]:
        """Give the changes their revision, report them to the watches, and return the header of the reply."""
        events, self._events = self._events, []
        if events:
            self.revision += 1
            self.given_at[self.revision] = self._now()
            self._history.append((self.revision, events))
            for stream in self.streams:
                for number, watch in stream.watches.items():
                    if not watch.is_behind and watch.start <= self.revision:
                        self._report(stream, number, watch, events)
        return self._header()

    def delete(self, key: bytes, end: bytes = b"") -> None:
        self._delete_range(key, end)
        self._commit()

    def compact(self) -> None:
        """Forget all events before the present revision, and the deletions of this revision.

        Before 3.4.35 and 3.5.17, etcd does not report these deletions to a watch that begins at this revision.
        """
        self.compacted = self.revision
        present = [each for revision, events in self._history if revision == self.revision for each in events]
        self._history = [(self.revision, [each for each in present if each.type == PUT])]

    # Leases

    def _grant(self, request: Any) -> Any:
        self.lease += 1
        number = request.ID or self.lease
        ttl = max(request.TTL, LEAST_TTL)
        self.leases[number] = Lease(number, ttl, self._now())
        return wire.LeaseGrantResponse(header=self._header(), ID=number, TTL=ttl)

    def end_lease(self, number: int) -> None:
        """End a lease, and delete all its keys at one revision."""
        for key in self.keys_of(number):
            self._delete_range(key, b"")
        del self.leases[number]
        self._commit()

    def keys_of(self, number: int) -> list[bytes]:
        """Return the keys of a lease, in order."""
        return sorted(self.leases[number].keys) if number in self.leases else []

    def is_alive(self, number: int) -> bool:
        return number in self.leases and self.leases[number].until > self._now()

    def _keep_alive(self, number: int) -> Any:
        if self.is_alive(number):
            lease = self.leases[number]
            lease.until = self._now() + lease.ttl
            return wire.LeaseKeepAliveResponse(header=self._header(), ID=number, TTL=lease.ttl)
        if number in self.leases:
            self.end_lease(number)  # etcd replies only after it has ended the lease
        return wire.LeaseKeepAliveResponse(header=self._header(), ID=number)

    def _time_to_live(self, number: int) -> Any:
        lease = self.leases.get(number)
        if lease is None:
            return wire.LeaseTimeToLiveResponse(header=self._header(), ID=number, TTL=-1)
        left = math.trunc(lease.until - self._now())
        return wire.LeaseTimeToLiveResponse(header=self._header(), ID=number, TTL=left, grantedTTL=lease.ttl)

    def extend_leases(self, seconds: float) -> None:
        """Extend each lease to its whole ttl and ``seconds`` more, as a new leader does."""
        for lease in self.leases.values():
            lease.until = self._now() + lease.ttl + seconds

    # Watches

    def hear(self, stream: Stream, request: Any) -> None:
        """Receive a `WatchRequest` on a stream."""
        if request.HasField("cancel_request"):
            number = request.cancel_request.watch_id
            if stream.watches.pop(number, None):
                stream.send(wire.WatchResponse(header=self._header(), watch_id=number, canceled=True))
            return
        create = request.create_request
        number = create.watch_id
        watch = stream.watches[number] = Watch(create, create.start_revision or self.revision + 1)
        watch.is_behind = watch.start <= self.revision
        stream.send(wire.WatchResponse(header=self._header(), watch_id=number, created=True))

    def catch_up(self) -> None:
        """Let each watch that began in the past report past events, or end the watch if these were compacted."""
        for stream in self.streams:
            for number, watch in [each for each in stream.watches.items() if each[1].is_behind]:
                if watch.start < self.compacted:
                    del stream.watches[number]
                    lost = {"canceled": True, "compact_revision": self.compacted}
                    stream.send(wire.WatchResponse(header=self._header(), watch_id=number, **lost))
                    continue
                events = [each for revision, some in self._history if revision >= watch.start for each in some]
                watch.is_behind, watch.start = False, self.revision + 1
                self._report(stream, number, watch, events)

    def replay(self) -> None:
        """Let each watch report all its events again, as a member does after it has restored a snapshot."""
        for stream in self.streams:
            for watch in stream.watches.values():
                watch.is_behind = watch.is_behind or watch.start <= self.revision

    def _report(self, stream: Stream, number: int, watch: Watch, events: Iterable[Event]) -> None:
        if heeded := [{"type": each.type, "kv": each.kv} for each in events if watch.heeds(each)]:
            stream.send(wire.WatchResponse(header=self._header(), watch_id=number, events=heeded))


def _contains(key: bytes, end: bytes, other: bytes) -> bool:
    return other == key if not end else other >= key and (end == b"\0" or other < end)
