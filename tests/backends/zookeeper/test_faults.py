"""Failures around a lock on one server: lost or missing replies, restarts, sessions that end, deleted nodes."""

from __future__ import annotations

import shutil
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from multilock import AtRisk, BackendUnavailable, Client, Event, LeaseState, Loss, LossReason, now
from multilock.errors import MultilockError
from multilock.testing import FaultProxy
from multilock.testing.conformance.base import (
    Pulse,
    Recorder,
    answers,
    by_the_clock,
    eventually,
    queued,
    until_renewed,
)
from multilock.testing.conformance.faces import background
from multilock.testing.conformance.spi import Ear
from multilock.timing import REASON_WITHIN
from multilock_zookeeper import ZooKeeperBackend, open_backend
from tests.backends.zookeeper.conftest import Connect, Operator
from tests.servers_zookeeper import TICK, ZooKeeperServer

CLOSE = struct.pack("!iii", 8, 1, -11)  # a request to close the session
LISTING = struct.pack("!ii", 8, 14) + b"/multilock/job"
EXISTS_ROOT = b"\0\0\0\3\0\0\0\1/"


def contenders(operator: Any, name: str = "job") -> list[str]:
    path = f"/multilock/{name}"
    return sorted(operator.get_children(path)) if operator.exists(path) else []


def backend_of(client: Client) -> ZooKeeperBackend:
    backend = client._kernel.backend
    assert isinstance(backend, ZooKeeperBackend)
    return backend


def session_of(client: Client) -> Any:
    """Return the id and the password of the client's session."""
    return backend_of(client)._transport._client.client_id


def watched(client: Client) -> int:
    """Return the number of its own nodes that the client watches for deletion."""
    return len(backend_of(client)._watcher._covered)


def risks(client: Client) -> Recorder[Event]:
    """Return a recorder of all AtRisk events, even of short ones."""
    told = Recorder[Event]()
    client.events.subscribe(lambda event: told(event) if isinstance(event, AtRisk) else None)
    return told


def steal_and_close(server: ZooKeeperServer, client_id: Any) -> None:
    """Close the session from another client that has its id and password.

    The owner reconnects at once and takes the session back. If the owner reconnects before the close, this function
    tries again.
    """
    eventually(lambda: _closed(server, client_id), within=20)


def _closed(server: ZooKeeperServer, client_id: Any) -> bool:
    """Open and close the session. Returns whether the server has ended it."""
    said = b""
    with suppress(ConnectionError), socket.create_connection((server.host, server.port), timeout=20) as thief:
        thief.sendall(struct.pack("!iiqiqi16s?", 45, 0, 0, 10_000, client_id[0], 16, client_id[1], False) + CLOSE)
        while piece := thief.recv(4096):
            said += piece
    if len(said) < 12:
        return False
    length, _, granted = struct.unpack_from("!iii", said)
    # The session had already ended, or the server has replied to the close.
    return bool(granted == 0 or len(said) > 4 + length)


@contextmanager
def outage(proxy: FaultProxy) -> Iterator[None]:
    proxy.refuse()
    proxy.cut()
    try:
        yield
    finally:
        proxy.accept()


# ---- lost replies


@pytest.mark.parametrize("then", ["cut", "hold"])
def test_a_lost_reply_to_an_acquire_leaves_one_holder_and_nothing_else(
    server: ZooKeeperServer, proxy: FaultProxy, connect: Connect, operator: Operator, then: Any
) -> None:
    client = connect(proxy.url, ttl=10)
    client.lock("another").acquire()
    client.lock("job").acquire().release()
    lost = proxy.drop_reply(b"__lock__", then=then)
    lease = client.lock("job").acquire(timeout=10)
    lost.wait(5)
    assert len(contenders(operator(server.endpoint))) == 1
    assert lease.release()
    by = operator(server.endpoint)
    eventually(lambda: contenders(by) == [])


@pytest.mark.parametrize("then", ["cut", "hold"])
def test_a_single_try_whose_reply_is_lost_is_released_in_the_background(
    server: ZooKeeperServer, proxy: FaultProxy, connect: Connect, then: Any
) -> None:
    client = connect(proxy.url, ttl=10)
    client.lock("another").acquire()
    client.lock("job").acquire().release()
    lost = proxy.drop_reply(b"__lock__", then=then)
    with pytest.raises(BackendUnavailable):
        client.lock("job").try_acquire()
    lost.wait(5)
    assert connect(server.url, ttl=10).lock("job").try_acquire(timeout=5) is not None
    eventually(client.is_healthy)


def test_a_waiter_whose_listing_has_no_reply_gets_the_lock(
    server: ZooKeeperServer, proxy: FaultProxy, connect: Connect
) -> None:
    client, other = connect(proxy.url, ttl=10), connect(server.url, ttl=10)
    held = other.lock("job").acquire()
    waiter = background(client.lock("job").acquire)
    eventually(lambda: queued(other, "job") == 1)
    lost = proxy.drop_reply(LISTING)
    assert held.release()
    lost.wait(10)
    assert waiter.result(10).release()


def test_a_release_whose_reply_is_lost_frees_the_lock(
    server: ZooKeeperServer, proxy: FaultProxy, connect: Connect
) -> None:
    client, other = connect(proxy.url, ttl=10), connect(server.url, ttl=10)
    lease = client.lock("job").acquire()
    lost = proxy.drop_reply(b"__lock__", then="hold")
    assert lease.release()
    lost.wait(5)
    assert other.lock("job").try_acquire(timeout=5) is not None


def test_a_renewal_whose_reply_is_lost_costs_nothing(
    server: ZooKeeperServer, proxy: FaultProxy, connect: Connect
) -> None:
    client = connect(proxy.url, ttl=9)
    lease = client.lock("job").acquire()
    # the request for the watch contains this name too, so wait until the watch is set
    eventually(lambda: watched(client) == 1)
    lost = proxy.drop_reply(b"__lock__", then="hold")
    lost.wait(5)
    eventually(lambda: lease.remaining() > 4.5)  # a later renewal got its reply, on another connection
    assert lease.state is LeaseState.HELD


def test_a_node_created_after_its_timeout_is_found_and_deleted(
    server: ZooKeeperServer, proxy: FaultProxy, operator: Operator
) -> None:
    ear = Ear()
    backend = open_backend(proxy.url, {"ttl": 6.0})
    backend.open(ear)
    backend.ping(5.0)
    operator(server.endpoint).ensure_path("/multilock/job")
    held = proxy.hold_request(b"__lock__")
    claim = ear.claim("job")
    with pytest.raises(BackendUnavailable):
        backend.attempt(claim, True, 1.0)
    held.wait(5)
    held.release()

    def given_back() -> bool:
        with suppress(BackendUnavailable):  # the client closes the connection without replies at about this time
            return backend.release(claim, None, True, 5.0).ours
        return False

    eventually(given_back, within=20)  # longer than one release may take
    assert contenders(operator(server.endpoint)) == []
    backend.close()


def test_a_client_that_was_frozen_until_it_had_a_session_creates_nothing_late(
    shared: ZooKeeperServer, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    ear = Ear()
    backend = open_backend(shared.url, {"ttl": 6.0})
    backend.open(ear)
    backend.ping(10.0)
    stood_still = [0.0]
    session = backend._transport.session

    def stands_still(deadline: float) -> Any:
        found = session(deadline)
        stood_still.append(120.0)
        return found

    monkeypatch.setattr(backend._recipe, "_now", lambda: now() + stood_still[-1])
    monkeypatch.setattr(backend._transport, "session", stands_still)
    with pytest.raises(BackendUnavailable, match="no time was left") as caught:
        backend.attempt(ear.claim("stood-still"), True, 10.0)
    assert caught.value.unknown is False
    monkeypatch.undo()
    backend.ping(10.0)
    assert contenders(operator(shared.endpoint), "stood-still") == []
    backend.close()


def test_a_node_of_an_earlier_session_is_deleted_and_never_reused(
    server: ZooKeeperServer, connect: Connect, operator: Operator
) -> None:
    """The node has the id of our claim but belongs to another session, as on a server that has not deleted it yet."""
    ear = Ear()
    backend = open_backend(server.url, {"ttl": 6.0})
    backend.open(ear)
    claim = ear.claim("job")
    stale = operator(server.endpoint)
    path = stale.create(f"/multilock/job/{claim.id}__lock__", b"", ephemeral=True, sequence=True, makepath=True)
    waiter = backend._recipe._waiters.of.setdefault(claim.id, _unsure())
    granted = backend.attempt(claim, True, 5.0)
    assert waiter.path != path
    assert granted.key != path  # type: ignore[union-attr]
    assert len(contenders(stale)) == 1
    backend.close()


def _unsure() -> Any:
    from multilock_zookeeper.claims import ZkWaiter

    waiter = ZkWaiter()
    waiter.unsure = True
    return waiter


# ---- the server


def test_a_lock_survives_a_restart_of_the_server(server: ZooKeeperServer, connect: Connect) -> None:
    client = connect(server.url, ttl=30)
    lease = client.lock("job").acquire()
    server.restart()
    until_renewed(lease, within=15)
    assert lease.state is LeaseState.HELD
    assert connect(server.url, ttl=10).lock("job").try_acquire() is None
    token = lease.fence()
    assert lease.release()
    assert client.lock("job").acquire(timeout=5).fence() > token


def test_a_silent_server_costs_its_holder_the_lock_before_another_client_gets_it(
    server: ZooKeeperServer, connect: Connect
) -> None:
    lost = Recorder[Loss]()
    lease = connect(server.url, ttl=3).lock("job", on_lost=lost).acquire()
    other = connect(server.url, ttl=3)
    eventually(lambda: answers(other))
    server.pause()
    assert by_the_clock(lost.wait(within=5))
    assert not lease.is_held()
    server.resume()
    begun = time.monotonic()
    assert other.lock("job").acquire(timeout=10).is_held()
    assert time.monotonic() - begun < 5
    assert lost.stays_at(1)


def test_a_wait_continues_through_an_outage_and_notices_a_release_during_it(
    server: ZooKeeperServer, proxy: FaultProxy, connect: Connect
) -> None:
    holder = connect(server.url, ttl=10).lock("job").acquire()
    waiter = connect(proxy.url, ttl=10)
    waits = background(lambda: waiter.lock("job").acquire(timeout=20))
    eventually(lambda: queued(waiter, "job") == 1)
    with outage(proxy):
        holder.release()
    begun = time.monotonic()
    assert waits.result(20).is_held()
    assert time.monotonic() - begun < 8  # without the watch, a safety timer would wake the waiter after ten seconds


def test_a_node_deleted_during_a_broken_connection_is_a_loss_after_the_reconnect(
    server: ZooKeeperServer, proxy: FaultProxy, connect: Connect, operator: Operator
) -> None:
    lost = Recorder[Loss]()
    client = connect(proxy.url, ttl=20)
    client.lock("job", on_lost=lost).acquire()
    kept = client.lock("kept").acquire()
    eventually(lambda: watched(client) == 2)
    by = operator(server.endpoint)
    with outage(proxy):
        by.delete(f"/multilock/job/{contenders(by)[0]}")
    assert lost.wait().reason is LossReason.TAKEN
    assert kept.is_held()


def test_a_silent_connection_is_replaced_by_another(
    server: ZooKeeperServer, proxy: FaultProxy, connect: Connect
) -> None:
    """kazoo would keep a connection without replies for minutes while it has requests to send."""
    client = connect(proxy.url, ttl=6)
    at_risk = risks(client)
    lease = client.lock("job").acquire()
    proxy.black_hole(which="present")
    at_risk.wait()
    eventually(lambda: lease.state is LeaseState.HELD)


def test_a_connection_without_a_handshake_reply_is_replaced_by_another(proxy: FaultProxy, connect: Connect) -> None:
    """With one address, kazoo would wait for the handshake's reply until the session timeout."""
    lost = Recorder[Loss]()
    client = connect(proxy.url, ttl=9)
    at_risk = risks(client)
    lease = client.lock("job", on_lost=lost).acquire()
    proxy.refuse()
    proxy.cut()
    handshake = proxy.drop_reply(then="hold")
    proxy.accept()
    handshake.wait(5)
    at_risk.wait()
    eventually(lambda: lease.state is LeaseState.HELD)
    assert lost.calls == []


# ---- a server whose data was replaced


def test_a_server_that_lost_its_data_is_used_again_once_the_session_is_dead(
    server: ZooKeeperServer, connect: Connect
) -> None:
    """The server has older data than the client has seen, and refuses it. kazoo alone would retry forever."""
    client, other = connect(server.url, ttl=4), connect(server.url, ttl=4)
    lost = Recorder[Loss]()
    for _ in range(50):
        client.lock("past").acquire().release()
    lease = client.lock("job", on_lost=lost).acquire()
    led: list[str] = []
    won, deposed = (lambda term: led.append("elected")), (lambda loss: led.append("lost"))
    client.election("lead", on_elected=won, on_lost=deposed).start()
    eventually(lambda: led == ["elected"])
    waits = background(lambda: other.lock("job").acquire(timeout=30))
    eventually(lambda: queued(client, "job") == 1)
    server.stop()
    server.start()
    assert waits.result(30).is_held()
    loss = lost.wait(within=5)
    assert by_the_clock(loss) or loss.reason is LossReason.SESSION_LOST
    assert not lease.is_held()
    eventually(lambda: led == ["elected", "lost", "elected"], within=10)
    assert client.lock("free").acquire(timeout=10).is_held()
    assert lost.stays_at(1)


def test_a_session_revived_by_a_restored_server_is_not_used_again(
    server: ZooKeeperServer, connect: Connect, tmp_path: Path
) -> None:
    """No claim needs the nodes of that session, and they would stay as long as the client used the session."""
    client = connect(server.url, ttl=2)
    client.lock("job").acquire()
    server.kill()
    assert server._folder is not None
    data = Path(server._folder.name, "data")
    shutil.copytree(data, tmp_path / "data")
    server.start()
    for _ in range(50):
        client.lock("past").acquire(timeout=10).release()
    connect(server.url, ttl=20).force_release("job")
    before = session_of(client)
    server.kill()
    shutil.rmtree(data)
    shutil.copytree(tmp_path / "data", data)
    server.start()
    assert client.lock("job").acquire(timeout=20).is_held()
    assert session_of(client) != before


def test_a_lock_survives_an_outage_that_its_session_survives(server: ZooKeeperServer, connect: Connect) -> None:
    """A server that restarts begins the timeout of every session again."""
    client = connect(server.url, ttl=6)
    client.lock("job").acquire()
    before = session_of(client)
    server.kill()
    time.sleep(7)
    server.start()
    assert client.lock("job").acquire(timeout=20).is_held()
    assert session_of(client) == before


# ---- sessions and nodes


def test_a_missing_reason_delays_no_notice_of_a_loss(
    server: ZooKeeperServer,
    proxy: FaultProxy,
    connect: Connect,
    operator: Operator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("multilock_zookeeper.notices.REASON_WITHIN", REASON_WITHIN)
    lost = Recorder[Loss]()
    client = connect(proxy.url, ttl=60)
    client.lock("job", on_lost=lost).acquire()
    eventually(lambda: watched(client) == 1)
    by = operator(server.endpoint)
    asked = proxy.drop_reply(EXISTS_ROOT, then="hold")
    begun = now()
    by.delete(f"/multilock/job/{contenders(by)[0]}")
    assert lost.wait().reason is LossReason.TAKEN
    assert lost.times[0] - begun < 1.5  # an ordinary request would wait for a reply for five seconds
    asked.wait(5)
    proxy.cut()  # so that close() does not wait for replies


def test_a_session_closed_elsewhere_loses_each_of_its_locks_once(server: ZooKeeperServer, connect: Connect) -> None:
    lost = Recorder[Loss]()
    client = connect(server.url, ttl=10)
    held = [client.lock(f"job-{n}", on_lost=lost).acquire() for n in range(20)]
    eventually(lambda: watched(client) == 20)
    steal_and_close(server, session_of(client))
    lost.wait(20)
    assert {loss.reason for loss in lost.calls} == {LossReason.SESSION_LOST}
    assert not any(lease.is_held() for lease in held)
    assert lost.stays_at(20)
    assert client.lock("job-0").acquire(timeout=5) is not None  # this acquire uses a new session


def test_a_waiter_whose_session_expires_joins_again_in_a_new_one(server: ZooKeeperServer, connect: Connect) -> None:
    ours, theirs = connect(server.url, ttl=10), connect(server.url, ttl=10)
    holder = theirs.lock("job").acquire()
    waits = background(lambda: ours.lock("job").acquire(timeout=10))
    eventually(lambda: queued(theirs, "job") == 1)
    steal_and_close(server, session_of(ours))
    eventually(lambda: queued(theirs, "job") == 1)
    holder.release()
    assert waits.result(5).is_held()


def test_a_waiter_whose_node_is_deleted_joins_again(
    server: ZooKeeperServer, connect: Connect, operator: Operator
) -> None:
    ours, theirs = connect(server.url, ttl=10), connect(server.url, ttl=10)
    holder = theirs.lock("job").acquire()
    waits = background(lambda: ours.lock("job").acquire(timeout=10))
    by = operator(server.endpoint)
    eventually(lambda: len(contenders(by)) == 2)
    last = max(contenders(by), key=lambda child: int(child[-10:]))
    by.delete(f"/multilock/job/{last}")
    eventually(lambda: len(contenders(by)) == 2 and last not in contenders(by))
    holder.release()
    assert waits.result(5).is_held()


def test_a_killed_holder_is_succeeded_within_the_session_timeout_and_a_tick(
    server: ZooKeeperServer, proxy: FaultProxy, connect: Connect
) -> None:
    holder = connect(proxy.url, ttl=2).lock("job").acquire()
    other = connect(server.url, ttl=2)
    eventually(lambda: answers(other))
    with outage(proxy):
        cut_at = time.monotonic()
        assert other.lock("job").acquire(timeout=10).is_held()
        assert not holder.is_held()
        assert time.monotonic() - cut_at < 2 + 2 * TICK + 2.0


def test_the_parent_of_a_free_lock_is_a_container_that_the_server_removes(operator: Operator) -> None:
    with ZooKeeperServer(java=["-Dznode.container.checkIntervalMs=200"]) as server:
        by = operator(server.endpoint)
        client = open_client(server)
        try:
            client.lock("job").acquire().release()
            eventually(lambda: by.exists("/multilock/job") is None)
            assert client.lock("job").try_acquire() is not None
        finally:
            client.close()


def open_client(server: ZooKeeperServer) -> Client:
    import multilock

    return multilock.connect(server.url, ttl=6)


def test_sequence_numbers_are_compared_as_numbers() -> None:
    from multilock_zookeeper.queue import contenders

    queue = contenders(["b__lock__0000000002", "a__lock__-000000001", "c", "a-lock-0000000001"])
    assert [one.node for one in queue] == ["a__lock__-000000001", "a-lock-0000000001", "b__lock__0000000002"]


def test_a_shortened_session_timeout_shortens_the_lease(connect: Connect) -> None:
    with ZooKeeperServer(maxSessionTimeout=4000) as server:
        client = connect(server.url, ttl=30)
        lease = client.lock("job", ttl=20).acquire()
        assert lease.ttl == 4.0
        assert 0 < lease.remaining() < 4 * 2 / 3
        assert "zookeeper-short-session" in [finding.code for finding in client.diagnose()]
        time.sleep(5)
        assert lease.is_held()


def test_close_leaves_neither_nodes_nor_a_session(
    server: ZooKeeperServer, connect: Connect, operator: Operator
) -> None:
    by = operator(server.endpoint)
    client = connect(server.url, ttl=30)
    for n in range(3):
        client.lock(f"job-{n}").acquire()
    client.lock("once", renew=False, ttl=2).acquire()
    client.close()
    assert all(contenders(by, name) == [] for name in ("job-0", "job-1", "job-2", "once"))
    eventually(lambda: server.metric("zk_global_sessions") == 1)  # the session of the operator's client


def test_close_does_not_wait_for_a_silent_server(server: ZooKeeperServer, connect: Connect) -> None:
    client = connect(server.url, ttl=10, request_timeout=0.3)
    eventually(lambda: answers(client))
    server.pause()
    begun = time.monotonic()
    client.close()
    assert time.monotonic() - begun < 4
    server.resume()


# ---- cost


def packets(server: ZooKeeperServer) -> int:
    return server.metric("zk_packets_received")


def test_an_uncontended_lock_costs_one_round_trip_to_acquire_and_one_to_release(
    server: ZooKeeperServer, connect: Connect
) -> None:
    lock = connect(server.url, ttl=60).lock("job")
    lock.acquire().release()
    before = packets(server)
    for _ in range(100):
        lock.acquire().release()
    # Each lock costs a create, a listing and a delete, and the test itself sends one request.
    assert packets(server) - before - 1 <= 302


def test_a_release_wakes_one_waiter(server: ZooKeeperServer, connect: Connect) -> None:
    holder = connect(server.url, ttl=60).lock("job").acquire()
    clients = [connect(server.url, ttl=60) for _ in range(5)]
    waits = [background(client.lock("job").acquire) for client in clients]
    eventually(lambda: queued(clients[0], "job") == 5)
    time.sleep(0.3)
    before = packets(server)
    holder.release()
    eventually(lambda: any(each.done() for each in waits))
    time.sleep(0.2)
    # The requests are a delete, a listing, the read of the count, and perhaps a ping.
    assert packets(server) - before <= 3 + 1
    assert sum(each.done() for each in waits) == 1
    while waits:
        eventually(lambda: any(each.done() for each in waits))
        done = next(each for each in waits if each.done())
        waits.remove(done)
        done.result(0).release()


@pytest.mark.timeout(120)
def test_a_thousand_locks_are_renewed_by_one_request(server: ZooKeeperServer, connect: Connect) -> None:
    client = connect(server.url, ttl=6)
    with Pulse() as pulse:
        held = [client.lock(f"job-{n}").acquire() for n in range(1000)]
        eventually(lambda: watched(client) == 1000, within=20)
        before, started = packets(server), time.monotonic()
        time.sleep(4)
        periods = time.monotonic() - started
        if pulse.stopped() < 0.5:  # otherwise a session of 6 s may end, and its locks may be lost
            assert packets(server) - before <= periods * 1.2 + 3
            assert all(lease.is_held() for lease in held)


def test_exceptions_of_kazoo_never_reach_the_caller(server: ZooKeeperServer, connect: Connect) -> None:
    client = connect(server.url, ttl=3, outage_timeout=2)
    lock = client.lock("job")
    lease = lock.acquire()
    server.kill()
    for call in (client.ping, lock.try_acquire, lock.acquire, lock.is_locked, lease.renew, client.diagnose):
        with pytest.raises(MultilockError) as caught:
            call()
        assert "kazoo" not in type(caught.value).__module__
    assert lease.release() in (True, False)
