"""Single requests to a cluster: which replies count, and what a missing reply means."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import grpc
import pytest

from multilock import BackendRejected, BackendUnavailable, now
from multilock.testing import FaultProxy
from multilock.testing.conformance.base import eventually
from multilock.testing.conformance.faces import background
from multilock_etcd import wire
from multilock_etcd.transport import Cluster, EtcdTransport, LeaseMissing, _translate, calls
from tests.servers import free_port
from tests.servers_etcd import EtcdCluster, EtcdServer

Open = Callable[..., EtcdTransport]


@pytest.fixture
def open_() -> Iterator[Open]:
    made: list[EtcdTransport] = []

    def open_(*endpoints: str) -> EtcdTransport:
        made.append(EtcdTransport(Cluster(endpoints), now))
        return made[-1]

    yield open_
    for transport in made:
        transport.close()


def nowhere() -> str:
    """Return an endpoint at which no server listens."""
    return f"127.0.0.1:{free_port()}"


def test_a_request_counts_from_its_sending(server: EtcdServer, proxy: FaultProxy, open_: Open) -> None:
    transport = open_(f"{proxy.host}:{proxy.port}")
    transport.call(calls.TXN, wire.TxnRequest(), 2.0)
    proxy.delay(0.3, "down")
    before = now()
    _, sent_at = transport.call(calls.TXN, wire.TxnRequest(), 2.0)
    assert now() - sent_at >= 0.3
    assert sent_at >= before


class Throttled(grpc.RpcError):  # type: ignore[misc]
    """The error that gRPC raises if a server replies with this text."""

    def __init__(self, said: str) -> None:
        self._said = said

    def code(self) -> Any:
        return grpc.StatusCode.RESOURCE_EXHAUSTED

    def details(self) -> str:
        return self._said


def test_only_a_status_of_etcd_itself_counts_as_a_refusal() -> None:
    refused = _translate(Throttled("etcdserver: mvcc: database space exceeded"), "etcd")
    assert isinstance(refused, BackendRejected)
    throttled = _translate(Throttled("Received RST_STREAM with error code 11"), "etcd")
    assert isinstance(throttled, BackendUnavailable)
    assert throttled.unknown


def test_a_refused_connection_proves_that_nothing_was_executed(open_: Open) -> None:
    with pytest.raises(BackendUnavailable) as caught:
        open_(nowhere()).call(calls.TXN, wire.TxnRequest(), 2.0)
    assert not caught.value.unknown


def test_a_request_without_a_reply_may_have_been_executed(server: EtcdServer, open_: Open) -> None:
    transport = open_(server.endpoint)
    transport.call(calls.TXN, wire.TxnRequest(), 2.0)
    server.pause()
    began = now()
    with pytest.raises(BackendUnavailable) as caught:
        transport.call(calls.TXN, wire.TxnRequest(), 0.5)
    assert caught.value.unknown
    assert now() - began < 2
    server.resume()


def test_nothing_is_sent_after_the_deadline(shared: EtcdServer, open_: Open) -> None:
    with pytest.raises(BackendUnavailable) as caught:
        open_(shared.endpoint).call(calls.TXN, wire.TxnRequest(), 0.0)
    assert not caught.value.unknown


def test_a_client_that_was_frozen_while_it_connected_sends_nothing_late(
    shared: EtcdServer, open_: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = open_(shared.endpoint)
    stood_still = [0.0]
    prepared = transport._prepared

    def stands_still(*how: Any) -> Any:
        metadata = prepared(*how)
        stood_still.append(120.0)
        return metadata

    monkeypatch.setattr(transport, "_now", lambda: now() + stood_still[-1])
    monkeypatch.setattr(transport, "_prepared", stands_still)
    put = wire.RequestOp(request_put=wire.PutRequest(key=b"stood-still"))
    with pytest.raises(BackendUnavailable, match="no time was left") as caught:
        transport.call(calls.TXN, wire.TxnRequest(success=[put]), 10.0)
    assert not caught.value.unknown
    monkeypatch.undo()
    ask = wire.RequestOp(request_range=wire.RangeRequest(key=b"stood-still"))
    answer, _ = transport.call(calls.TXN, wire.TxnRequest(success=[ask]), 10.0)
    assert not answer.responses[0].response_range.kvs


def test_an_endpoint_that_refuses_connections_is_skipped(shared: EtcdServer, open_: Open) -> None:
    transport = open_(nowhere(), nowhere(), shared.endpoint)
    assert transport.call(calls.TXN, wire.TxnRequest(), 2.0)[0].header.revision > 0
    assert transport.name == f"etcd {shared.endpoint}"


@pytest.mark.timeout(150)
def test_frozen_members_are_skipped_even_with_little_time_left(cluster: EtcdCluster, open_: Open) -> None:
    leader = cluster.leader()
    transport = open_(leader.endpoint, *(member.endpoint for member in cluster.followers()))
    leader.pause()
    eventually(lambda: _answered(transport, 0.2))
    leader.resume()


def _answered(transport: EtcdTransport, within: float) -> bool:
    try:
        transport.call(calls.TXN, wire.TxnRequest(), within)
    except BackendUnavailable:
        return False
    return True


def test_a_dead_connection_is_replaced(server: EtcdServer, proxy: FaultProxy, open_: Open) -> None:
    transport = open_(f"{proxy.host}:{proxy.port}")
    transport.call(calls.TXN, wire.TxnRequest(), 2.0)
    for connection in proxy.connections:
        connection.black_hole()  # these connections stay silent forever, and a new one works
    with pytest.raises(BackendUnavailable):
        transport.call(calls.TXN, wire.TxnRequest(), 0.3)
    transport.call(calls.TXN, wire.TxnRequest(), 2.0)


def test_a_connection_that_takes_longer_than_one_request_is_completed(
    server: EtcdServer, proxy: FaultProxy, open_: Open
) -> None:
    proxy.delay(0.12)
    transport = open_(f"{proxy.host}:{proxy.port}")
    with pytest.raises(BackendUnavailable):
        transport.call(calls.TXN, wire.TxnRequest(), 0.35)
    eventually(lambda: _answered(transport, 0.35))


def test_a_request_with_too_little_time_does_not_mark_its_endpoint_as_down(
    server: EtcdServer, proxy: FaultProxy, open_: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On an overloaded machine, even a request with a timeout of 10 ms may exceed the usual limit.
    monkeypatch.setattr("multilock_etcd.transport.SILENT_AFTER", 5.0)
    transport = open_(f"{proxy.host}:{proxy.port}")
    transport.call(calls.TXN, wire.TxnRequest(), 2.0)
    [connection] = proxy.connections
    proxy.delay(0.05)
    with pytest.raises(BackendUnavailable):
        transport.call(calls.TXN, wire.TxnRequest(), 0.01)
    transport.call(calls.TXN, wire.TxnRequest(), 2.0)
    assert proxy.connections == [connection]


def test_a_missing_lease_does_not_count_as_an_outage(shared: EtcdServer, open_: Open) -> None:
    put = wire.RequestOp(request_put=wire.PutRequest(key=b"k", lease=12345))
    with pytest.raises(LeaseMissing):
        open_(shared.endpoint).call(calls.TXN, wire.TxnRequest(success=[put]), 2.0)


def test_a_refusal_of_etcd_raises_backend_rejected_with_its_text(shared: EtcdServer, open_: Open) -> None:
    put = wire.RequestOp(request_put=wire.PutRequest(key=b"k"))
    with pytest.raises(BackendRejected, match="duplicate key"):
        open_(shared.endpoint).call(calls.TXN, wire.TxnRequest(success=[put, put]), 2.0)


def test_a_server_that_is_not_etcd_is_reported_in_time(open_: Open) -> None:
    from http.server import BaseHTTPRequestHandler, HTTPServer

    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        began = now()
        with pytest.raises((BackendUnavailable, BackendRejected)):
            open_(f"127.0.0.1:{web.server_port}").call(calls.TXN, wire.TxnRequest(), 1.0)
        assert now() - began < 3
        web.shutdown()


def test_a_closed_transport_sends_nothing(shared: EtcdServer, open_: Open) -> None:
    transport = open_(shared.endpoint)
    transport.call(calls.TXN, wire.TxnRequest(), 2.0)
    transport.close()
    transport.close()
    with pytest.raises(BackendUnavailable) as caught:
        transport.call(calls.TXN, wire.TxnRequest(), 2.0)
    assert not caught.value.unknown


@pytest.mark.timeout(150)
def test_a_watch_ends_when_its_member_loses_the_leader(cluster: EtcdCluster, open_: Open) -> None:
    survivor, *others = cluster.members
    transport = open_(survivor.endpoint)
    create = wire.WatchRequest(create_request=wire.WatchCreateRequest(key=b"k", watch_id=1))
    requests: SimpleQueue[Any] = SimpleQueue()
    requests.put(create)
    created = threading.Event()

    def watch() -> None:
        with transport.watch(iter(requests.get, None)) as answers:
            for answer in answers:
                if answer.created:
                    created.set()

    watching = background(watch)
    assert created.wait(5)
    for member in others:
        member.kill()
    began = time.monotonic()
    with pytest.raises(BackendUnavailable, match="no leader"):
        watching.result(10)
    requests.put(None)
    assert time.monotonic() - began < 5


def test_leaving_an_endpoint_ends_its_watches(server: EtcdServer, proxy: FaultProxy, open_: Open) -> None:
    transport = open_(f"{proxy.host}:{proxy.port}")
    requests: SimpleQueue[Any] = SimpleQueue()

    def watch() -> None:
        with transport.watch(iter(requests.get, None)) as answers:
            for _ in answers:
                pass

    transport.call(calls.TXN, wire.TxnRequest(), 2.0)
    watching = background(watch)
    eventually(lambda: (connection := transport._connections[0]) and connection.streams)
    for connection in proxy.connections:
        connection.black_hole()
    with pytest.raises(BackendUnavailable):
        transport.call(calls.TXN, wire.TxnRequest(), 0.3)
    with pytest.raises(BackendUnavailable):
        watching.result(5)
    requests.put(None)
