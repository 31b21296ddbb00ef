"""Replies that prove that the session lives, and nodes that a refused request leaves."""

from __future__ import annotations

import struct
import threading
import time
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from kazoo.exceptions import AuthFailedError, ConnectionDropped
from kazoo.handlers.threading import KazooTimeoutError
from kazoo.protocol.serialization import Exists
from kazoo.security import ACL, CREATOR_ALL_ACL, Id, Permissions

import multilock
from multilock import BackendRejected, BackendUnavailable, Loss, LossReason, now, system
from multilock.testing.conformance.base import Pulse, Recorder, answers, eventually
from multilock.testing.conformance.faces import background
from multilock_zookeeper.sockets import drop_what_is_not_understood
from multilock_zookeeper.transport import Answer
from tests.backends.zookeeper.conftest import Connect, Operator
from tests.backends.zookeeper.kit import Ours
from tests.backends.zookeeper.test_faults import backend_of, contenders, session_of, steal_and_close
from tests.servers_zookeeper import ZooKeeperServer

READ_ONLY = [ACL(Permissions.READ | Permissions.ADMIN, Id("world", "anyone"))]
NOT_READABLE = [ACL(Permissions.CREATE | Permissions.DELETE | Permissions.ADMIN, Id("world", "anyone"))]
ALL = [ACL(Permissions.ALL, Id("world", "anyone"))]
ALL_BUT_READING = [ACL(Permissions.ALL & ~Permissions.READ, Id("world", "anyone"))]


# ---- answers that kazoo does not understand


def test_a_missing_reply_costs_the_connection_and_not_the_session(server: ZooKeeperServer, connect: Connect) -> None:
    """A server that hands a session over to another server may leave out a reply."""
    client = connect(server.url, ttl=10)
    lost = Recorder[Loss]()
    lease = client.lock("job", on_lost=lost).acquire()
    number = session_of(client)[0]
    left_out = Answer(now())
    backend_of(client)._transport._client._pending.appendleft((Exists("/", None), left_out, 77))
    with pytest.raises(BackendUnavailable):
        client.ping()
    eventually(lambda: answers(client))
    assert isinstance(left_out.error, RuntimeError)
    assert session_of(client)[0] == number
    assert client.lock("another").try_acquire(timeout=5) is not None
    assert lease.is_held()
    assert lost.calls == []


@pytest.mark.parametrize("error", [RuntimeError("xids do not match"), IndexError("empty"), struct.error("too short")])
@pytest.mark.parametrize("step", ["_connect", "_send_request", "_send_ping", "_read_socket"])
def test_a_reply_that_kazoo_does_not_expect_drops_the_connection(error: Exception, step: str) -> None:
    with pytest.raises(ConnectionDropped):
        getattr(_connection(error), step)(1.0)


@pytest.mark.parametrize("error", [AuthFailedError(), KazooTimeoutError(), ConnectionResetError()])
def test_a_reply_that_kazoo_expects_is_passed_on_unchanged(error: Exception) -> None:
    with pytest.raises(type(error)):
        _connection(error)._read_socket(1.0)


def _connection(error: Exception) -> Any:
    def step(*_: object) -> None:
        raise error

    handler = SimpleNamespace(timeout_exception=KazooTimeoutError)
    connection = SimpleNamespace(handler=handler, _connect=step, _send_request=step, _send_ping=step, _read_socket=step)
    drop_what_is_not_understood(connection)
    return connection


# ---- threads that the process cannot start


@pytest.mark.parametrize("nth", range(1, 7))
def test_one_refused_thread_costs_neither_a_notice_nor_an_orderly_close(
    server: ZooKeeperServer, operator: Operator, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    before = connections_of_ours()  # some threads belong to clients of earlier tests
    starts = count(1)
    start = system.Thread.start

    def refuse_one(thread: threading.Thread) -> None:
        if thread.name.startswith("multilock-") and next(starts) == nth:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(system.Thread, "start", refuse_one)
    by = operator(server.endpoint)
    lost = Recorder[Loss]()
    with multilock.connect(server.url, ttl=30) as client:
        client.lock("job", on_lost=lost).acquire(timeout=30)
        waits = background(lambda: client.lock("job").acquire(timeout=30))
        eventually(lambda: len(contenders(by)) == 2)
        time.sleep(1)  # wait until the lock is watched
        first = min(contenders(by), key=lambda node: node[-10:])
        by.delete(f"/multilock/job/{first}")
        assert lost.wait().reason is LossReason.TAKEN
        waits.result(5).release()
    eventually(lambda: connections_of_ours() <= before)


def test_close_needs_no_thread_and_leaves_neither_session_nor_thread(
    server: ZooKeeperServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = connections_of_ours()
    client = multilock.connect(server.url, ttl=60)
    client.lock("job").acquire().release()

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as full:
        full.setattr(system.Thread, "start", refuse)
        client.close()
    eventually(lambda: connections_of_ours() <= before)
    eventually(lambda: server.metric("zk_global_sessions") == 0)


def connections_of_ours() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("multilock-zookeeper")}


# ---- requests that are refused after the server has created a node


@pytest.mark.oracle
def test_an_acquire_that_is_refused_after_creating_its_node_leaves_no_node(
    server: ZooKeeperServer, connect: Connect, operator: Operator
) -> None:
    """A client without the right to list the contenders may still create a node."""
    by = operator(server.endpoint)
    client = connect(server.url, ttl=20)
    client.lock("job").acquire().release()
    by.set_acls("/multilock/job", NOT_READABLE)
    for _ in range(2):
        with pytest.raises(BackendRejected):
            client.lock("job").try_acquire()
        with pytest.raises(BackendRejected):
            client.lock("job").acquire(timeout=10)
    by.set_acls("/multilock/job", ALL)
    eventually(lambda: contenders(by) == [])
    assert connect(server.url, ttl=20).lock("job").try_acquire() is not None


def test_a_waiter_behind_an_unreadable_node_is_woken_by_its_end(
    server: ZooKeeperServer, connect: Connect, operator: Operator
) -> None:
    client = connect(server.url, ttl=60)
    client.lock("job").acquire().release()
    theirs = operator(server.endpoint, auth_data=[("digest", "u:p")], default_acl=CREATOR_ALL_ACL)
    theirs_lock = theirs.Lock("/multilock/job")
    theirs_lock.acquire()
    assert client.lock("job").try_acquire() is None
    waits = background(lambda: (client.lock("job").acquire(timeout=50), now()))
    eventually(lambda: len(contenders(theirs)) == 2)
    time.sleep(0.5)  # wait until the client watches the node
    with Pulse() as pulse:
        released_at = now()
        theirs_lock.release()
        lease, granted_at = waits.result(55)
    # Without the watch, the waiter would ask again after a minute.
    assert granted_at - released_at < 3 + pulse.stopped()
    lease.release()
    eventually(lambda: contenders(theirs) == [])


def test_a_holder_with_an_unreadable_node_is_shown_by_its_number(
    server: ZooKeeperServer, connect: Connect, operator: Operator
) -> None:
    client = connect(server.url, ttl=20)
    client.lock("job").acquire().release()
    client.lock("mine").acquire()
    theirs = operator(server.endpoint, auth_data=[("digest", "u:p")], default_acl=CREATOR_ALL_ACL)
    theirs.Lock("/multilock/job").acquire()
    info = client.inspect("job")
    assert info is not None
    assert info.owner is None
    assert info.token == theirs.exists("/multilock/job/" + contenders(theirs)[0]).czxid
    assert {one.name for one in client.inspect_all()} == {"job", "mine"}


def test_a_used_up_quota_is_refused_at_once_and_costs_no_held_lock(connect: Connect, operator: Operator) -> None:
    with ZooKeeperServer(java=("-Dzookeeper.enforceQuota=true",)) as server:
        client = connect(server.url, ttl=3)
        lease = client.lock("held").acquire()
        by = operator(server.endpoint)
        by.ensure_path("/zookeeper/quota/multilock")
        by.create("/zookeeper/quota/multilock/zookeeper_limits", b"count=-1,bytes=-1=;byteHardLimit=1;countHardLimit=1")
        by.create("/zookeeper/quota/multilock/zookeeper_stats", b"count=9,bytes=999")
        with pytest.raises(BackendRejected, match="quota"):
            client.lock("held").try_acquire()
        assert lease.wait_lost(3) is None


# ---- refusals that prove something


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("acl", [READ_ONLY, ALL_BUT_READING], ids=["read-only", "unreadable"])
def test_a_node_with_another_acl_costs_no_other_lock_of_its_session(
    server: ZooKeeperServer, connect: Connect, operator: Operator, first: bool, acl: Any
) -> None:
    by = operator(server.endpoint)
    client = connect(server.url, ttl=3)
    lost = Recorder[Loss]()
    leases = {name: client.lock(name, on_lost=lost).acquire() for name in ("a", "b")}
    changed = "a" if first else "b"
    by.set_acls(f"/multilock/{changed}/{contenders(by, changed)[0]}", acl)
    time.sleep(4)
    assert lost.calls == []
    assert all(lease.is_held() for lease in leases.values())
    if acl is not READ_ONLY:
        return  # no server notifies a client of a node that it may not read
    by.delete(f"/multilock/{changed}/{contenders(by, changed)[0]}")
    assert lost.wait().reason is LossReason.TAKEN
    assert leases["b" if first else "a"].is_held()


# ---- validity after a renewal by hand


def test_a_renewal_by_hand_gives_the_same_validity_as_a_fresh_grant(server: ZooKeeperServer, connect: Connect) -> None:
    client = connect(server.url, ttl=6)
    lease = client.lock("job", renew=False).acquire()
    fresh = lease.remaining()
    begun = now()
    while now() < begun + 2 * lease.ttl:
        assert lease.wait_lost(lease.ttl / 3) is None
        with Pulse() as pulse:
            lease.renew()
            assert lease.remaining() > 0.8 * fresh - pulse.stopped()
    loss = lease.wait_lost(2 * lease.ttl)
    assert loss is not None
    assert loss.reason is LossReason.EXPIRED
    assert connect(server.url, ttl=6).lock("job").try_acquire(timeout=lease.ttl) is not None


def test_renewals_of_the_session_do_not_extend_a_lease_without_renewal(
    server: ZooKeeperServer, connect: Connect
) -> None:
    client = connect(server.url, ttl=20)
    client.lock("kept").acquire()
    begun = now()
    lease = client.lock("job", ttl=4, renew=False).acquire()
    loss = lease.wait_lost(20)
    assert loss is not None
    assert loss.detected_at - begun <= 4.5


# ---- notifications between the reply and the lease


def test_a_claim_is_notified_if_its_session_ended_before_its_watch(shared: ZooKeeperServer) -> None:
    ours = Ours(shared.url, prefix="ended-unwatched/")
    claim = ours.take(ours.mutex())
    steal_and_close(shared, ours.backend._transport._client.client_id)
    assert ours.ear.wait(lambda: ours.ear.sessions == [])
    ours.backend.watch(ours.grant(claim).group, [(claim, ours.grant(claim))], 5.0)
    assert dict(ours.ear.losses)[claim.id] is LossReason.SESSION_LOST
    ours.close()
