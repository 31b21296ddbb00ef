"""Each connection negotiates the session timeout again, because its server may have other limits than the last one."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from multilock import Client, Lease, Loss, now
from multilock.testing import FaultProxy
from multilock.testing.conformance.base import Pulse, Recorder, answers, believed_until, eventually
from multilock.testing.conformance.faces import background
from multilock.testing.conformance.spi import Ear
from multilock_zookeeper import open_backend
from multilock_zookeeper.session_validity import Session
from tests.backends.zookeeper.conftest import Connect, Operator
from tests.servers_zookeeper import ZooKeeperCluster, ZooKeeperServer

LONG, SHORT = 15.0, 5.0


def session_ttl(client: Client) -> float:
    session = client._kernel.backend._transport.present()  # type: ignore[attr-defined]
    return float(session.ttl) if session else 0.0


def restart_with(server: ZooKeeperServer, **settings: object) -> None:
    server.settings.update(settings)
    server.restart()


def gap(lease: Lease, lost: Recorder[Loss], other: Client, proxy: FaultProxy) -> float:
    """Cut the holder off. Return how many seconds after the end of its belief another client acquires the lock.

    The belief ends when `is_held()` is False and the lost callback has begun. The pauses of this process are added to
    the result.
    """
    waits = background(lambda: (other.lock("job").acquire(timeout=30), now())[1])
    with Pulse() as pulse:
        proxy.black_hole()
        believed = believed_until(lease)
        lost.wait(within=20)
        found = waits.result(30) - max(believed, lost.times[0]) + pulse.stopped()
    proxy.heal()
    return found


def test_a_server_restarted_with_a_lower_limit_has_one_holder(
    server: ZooKeeperServer, proxy: FaultProxy, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    lost = Recorder[Loss]()
    client = connect(proxy.url, ttl=LONG)
    lease = client.lock("job", on_lost=lost).acquire()
    assert lease.ttl == LONG
    assert "zookeeper-short-session" not in [finding.code for finding in client.diagnose()]
    caplog.set_level(logging.WARNING, "multilock")
    restart_with(server, maxSessionTimeout=int(SHORT * 1000))
    other = connect(server.url, ttl=LONG)
    eventually(lambda: answers(other) and answers(client), within=20)
    if lease.is_held():  # it is lost if the restart took longer than the shorter ttl
        assert lease.ttl == SHORT
        assert lease.remaining() < SHORT * 2 / 3
        assert gap(lease, lost, other, proxy) > 0
    eventually(lambda: "5 s instead of 15 s" in caplog.text)
    assert caplog.text.count("instead of 15 s") == 1
    assert "zookeeper-short-session" in [finding.code for finding in client.diagnose()]


@pytest.fixture
def unequal() -> Iterator[ZooKeeperCluster]:
    """Start three servers. The last one grants a shorter session timeout than the others."""
    cluster = ZooKeeperCluster()
    cluster.members[2].settings["maxSessionTimeout"] = int(SHORT * 1000)
    with cluster:
        yield cluster


@pytest.mark.oracle
@pytest.mark.timeout(150)
def test_moving_to_a_server_with_a_lower_limit_causes_no_second_holder(
    unequal: ZooKeeperCluster, connect: Connect
) -> None:
    generous, _, mean = unequal.members
    lost = Recorder[Loss]()
    with (
        FaultProxy.before(f"zookeeper://{generous.endpoint}") as first,
        FaultProxy.before(f"zookeeper://{mean.endpoint}") as second,
    ):
        second.refuse()
        client = connect(f"zookeeper://{first.host}:{first.port},{second.host}:{second.port}", ttl=LONG)
        other = connect(f"zookeeper://{unequal.members[1].endpoint}", ttl=LONG)
        lease = client.lock("job", on_lost=lost).acquire(timeout=20)
        assert lease.ttl == LONG
        second.accept()
        first.refuse()
        first.cut()
        eventually(lambda: session_ttl(client) == SHORT, within=20)
        assert lease.ttl == SHORT
        first.accept()  # the longer timeout of this server does not count in this session
        second.cut()
        first.black_hole()
        assert gap(lease, lost, other, second) > 0


@pytest.mark.parametrize("renew", [True, False])
def test_held_leases_are_shortened_before_anything_is_sent_on_the_new_connection(
    server: ZooKeeperServer, proxy: FaultProxy, connect: Connect, renew: bool
) -> None:
    client = connect(proxy.url, ttl=LONG, request_timeout=1.0)
    lease = client.lock("job", renew=renew).acquire()
    server.settings["maxSessionTimeout"] = int(SHORT * 1000)
    held = proxy.hold_request(b"\0\0\0\5\0\0\0")  # operation 5 is setData, so the proxy stops every renewal
    server.restart()
    eventually(lambda: session_ttl(client) == SHORT, within=20)
    eventually(lambda: lease.remaining() < SHORT * 2 / 3)
    # If the restart took long, the lease was lost with the shortened session.
    assert lease.ttl == SHORT or not lease.is_held()
    held.release()


@pytest.mark.parametrize("renew", [True, False])
def test_a_shortened_session_also_shortens_a_grant_under_way(
    server: ZooKeeperServer, connect: Connect, monkeypatch: pytest.MonkeyPatch, renew: bool
) -> None:
    client = connect(server.url, ttl=LONG)
    client.ping()
    listener = client._kernel.backend._watcher  # type: ignore[attr-defined]
    really = Session.validity

    def cut_afterwards(session: Session) -> Any:
        """Shorten the session just after the proof, as kazoo's thread may do with a new connection."""
        proof = really(session)
        if session.shorten(SHORT):
            listener.shortened(session)
        return proof

    monkeypatch.setattr(Session, "validity", cut_afterwards)
    lease = client.lock("job", renew=renew).acquire()
    assert lease.ttl == SHORT
    assert lease.remaining() < SHORT * 2 / 3


def test_the_kernel_is_told_of_a_session_before_anything_is_granted_in_it(
    server: ZooKeeperServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = open_backend(server.url, {"ttl": LONG})
    ear = Ear()
    known: list[object] = []
    monkeypatch.setattr(ear, "group", lambda *_: known.append(backend._transport.present()))
    monkeypatch.setattr(ear, "group_gone", lambda *_: None)
    backend.open(ear)
    backend.ping(10)
    assert known == [None]
    assert backend._transport.present() is not None
    backend.close()


def test_the_timeout_is_read_from_the_handshake_itself(server: ZooKeeperServer, connect: Connect) -> None:
    before = server.metric("zk_packets_received")
    connect(server.url, ttl=LONG).ping()
    # The requests are a handshake, an `exists`, and one of this test.
    assert server.metric("zk_packets_received") - before <= 4


def test_a_kazoo_client_object_is_asked_for_its_timeout_at_each_connection(
    server: ZooKeeperServer, connect: Connect, operator: Operator
) -> None:
    theirs: Any = operator(server.endpoint, timeout=LONG)
    client = connect("zookeeper://", ttl=LONG, client=theirs)
    lease = client.lock("job").acquire()
    assert lease.ttl == LONG
    restart_with(server, maxSessionTimeout=int(SHORT * 1000))
    eventually(lambda: answers(client) and session_ttl(client) == SHORT, within=30)
    assert lease.ttl == SHORT or not lease.is_held()  # kazoo may be slow to return
