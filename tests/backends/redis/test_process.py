"""Two threads, or two processes after a fork, never share a connection."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest
from redis.connection import Connection

import multilock
from multilock import dialling, now
from multilock.errors import BackendUnavailable
from multilock.kernel.exit import EXIT_TIME
from multilock.testing import FaultProxy, Helper, hear, say
from multilock_redis import RedisBackend, open_backend, transport
from multilock_redis.transactions import RELEASE
from tests.backends.redis.conftest import Connect
from tests.backends.redis.kit import Bare, Ear, Ours, eventually, holder_of
from tests.open_files import over_a_thousand
from tests.servers import RedisServer


def forking(url: str) -> None:
    """Hold and watch a lock, wait for another one, fork, and use the backend object in both processes."""
    ours = Ours(url)
    held = ours.take()
    ours.watch(held)
    ours.wait(ours.claim())
    child = os.fork()
    if child == 0:
        ours.ear = Ear()
        ours.backend.open(ours.ear)
        claim, granted = ours.take(ours.claim("child"))
        ours.watch((claim, granted))
        ours.wait(ours.claim("a"))
        ours.release(claim)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    # The connections of the parent must not have changed.
    say("child", os.waitstatus_to_exitcode(status))
    say("parent", ours.renew(held) != [None], ours.backend._node.listener._subscribed is not None)
    hear()
    ours.close()


def test_a_forked_child_opens_its_own_connections_and_leaves_the_parents_alone(server: RedisServer, bare: Bare) -> None:
    with Helper(f"{__name__}:forking", server.url) as helper:
        assert helper.wait_for("child", within=10) == ["child", "0"]
        assert helper.wait_for("parent", within=10) == ["parent", "True", "True"]
        assert bare.get("multilock/child") is None
        client = str(holder_of(bare))[:16]
        assert bare.pubsub_numsub(f"multilock:wake:{client}")[0][1] == 1


def leaving_a_child(url: str) -> None:
    """Open connections of every kind, and fork. The child lives on and uses none of them."""
    ours = Ours(url)
    ours.watch(ours.take(ours.claim("mine")))
    channel = ours.backend.channel(2)
    assert channel is not None  # a channel without a reference would be closed
    waiter = ours.wait()
    if os.fork() == 0:
        ours.backend.open(Ear())
        say("child")
        hear()  # the child lives until the test ends
        os._exit(0)
    say("waiting", waiter.owner)
    threading.Event().wait()


def test_a_forked_child_keeps_no_connection_of_a_killed_parent(
    us: Ours, them: Ours, server: RedisServer, bare: Bare
) -> None:
    held, _ = us.take()
    before = connections(bare)
    with Helper(f"{__name__}:leaving_a_child", server.url) as parent:
        parent.wait_for("waiting", within=10)
        parent.wait_for("child", within=10)
        # The four connections are for requests, for the subscription, for tracking, and for the channel.
        assert len(connections(bare) - before) == 4
        parent.signal(signal.SIGKILL)  # only the parent has these connections
        eventually(lambda: connections(bare) <= before)
        waiter = them.wait()
        us.release(held)
        assert holder_of(bare) == waiter.owner


def forking_while_it_connects(url: str) -> None:
    """Fork while a new connection is open, but not in the list of connections yet."""
    connect = Connection.connect
    children: list[int] = []

    def slowly(connection: Any) -> None:
        connect(connection)  # type: ignore[no-untyped-call]
        if not children:
            children.append(os.fork())
            if children == [0]:
                hear()
                os._exit(0)

    setattr(Connection, "connect", slowly)  # noqa: B010
    ours = Ours(url)
    waiter = ours.wait()
    say("waiting", waiter.owner)
    threading.Event().wait()


def test_a_child_forked_during_a_connect_keeps_no_connection_in_use(
    us: Ours, them: Ours, server: RedisServer, bare: Bare
) -> None:
    held, _ = us.take()
    before = connections(bare)
    with Helper(f"{__name__}:forking_while_it_connects", server.url) as parent:
        parent.wait_for("waiting", within=10)
        assert len(connections(bare) - before) == 2
        parent.signal(signal.SIGKILL)  # only the parent has these connections
        eventually(lambda: connections(bare) <= before)
        waiter = them.wait()
        us.release(held)
        assert holder_of(bare) == waiter.owner


def connections(bare: Bare) -> set[str]:
    return {client["id"] for client in bare.client_list()}


def exiting(url: str) -> None:
    """Hold a lock that another thread of this process waits for, and exit."""
    client = multilock.connect(url, ttl=30)
    client.lock("n").acquire().release()  # this loads the scripts into the server
    client.lock("n").acquire()
    threading.Thread(target=client.lock("n").acquire, daemon=True).start()
    eventually(lambda: (info := client.inspect("n")) and info.waiting == 1)
    say("waiting")
    hear()


@pytest.mark.parametrize("fault", ["reply lost", "executed late", "silent"])
def test_an_ending_process_cancels_its_waiters_even_if_that_request_gets_no_reply(
    server: RedisServer, proxy: FaultProxy, fault: str
) -> None:
    with Helper(f"{__name__}:exiting", proxy.url) as helper, multilock.connect(server.url) as other:
        helper.wait_for("waiting", within=10)
        late = None
        if fault == "reply lost":
            proxy.drop_reply(RELEASE.head)
        elif fault == "executed late":
            late = proxy.hold_request(RELEASE.head)
        else:
            proxy.black_hole()
        began = now()
        helper.tell("end")
        assert helper.wait(10) == 0
        assert now() - began < EXIT_TIME + 2
        if fault == "silent":
            assert other.lock("n").try_acquire() is None, "the ttl ends it"
            return
        if late:
            late.release()
        assert other.lock("n").try_acquire(timeout=2) is not None


def test_simultaneous_threads_use_one_connection_each_and_leave_few_open(us: Ours, bare: Bare) -> None:
    started = threading.Barrier(16)
    errors: list[BaseException] = []

    def cycle(number: int) -> None:
        try:
            started.wait(5)
            for _ in range(50):
                claim, _ = us.take(us.claim(f"n{number}"))
                assert holder_of_name(us, f"n{number}") == claim.owner
                assert us.release(claim)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=cycle, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(us.backend._node.connections._idle) <= 16


def holder_of_name(us: Ours, name: str) -> str | None:
    info = us.backend.inspect(name, 1)
    return info.owner if info else None


def test_reopening_a_backend_forgets_connections_that_its_threads_close(
    us: Ours, monkeypatch: pytest.MonkeyPatch
) -> None:
    wires = [us.backend._endpoint.connect(us.within, now) for _ in range(3)]
    drop = transport.Wire.drop
    dropped: list[transport.Wire] = []

    def drop_while_another_closes_its_own(wire: transport.Wire) -> None:
        for each in wires:
            if each is not wire and each not in dropped:
                each.close()
        dropped.append(wire)
        drop(wire)

    monkeypatch.setattr(transport.Wire, "drop", drop_while_another_closes_its_own)
    us.backend.open(Ear())
    assert {*dropped} >= {*wires}


def test_one_thread_uses_one_connection(us: Ours) -> None:
    for _ in range(20):
        us.release(us.take()[0])
    assert len(us.backend._node.connections._idle) == 1


def test_a_process_with_thousands_of_open_files_is_served(us: Ours) -> None:
    with over_a_thousand():
        held = us.take()
        us.watch(held)
        assert all(us.renew(held))
        assert us.release(held[0])


@pytest.mark.parametrize("ended", ["not used for a minute", "by the server"])
def test_spare_connections_close_by_themselves_after_a_burst(
    us: Ours, bare: Bare, monkeypatch: pytest.MonkeyPatch, ended: str
) -> None:
    monkeypatch.setattr("multilock_redis.connections.TEND_EVERY", 0.05)
    pool = us.backend._node.connections
    wires = [pool._take(1)[0] for _ in range(10)]
    for age, wire in enumerate(wires):
        if ended == "not used for a minute":
            wire.used = us.ear.now() - 100 + age
        pool._give(wire)
    if ended == "by the server":
        bare.client_kill_filter(_type="normal", skipme=True)
    eventually(lambda: sum(wire.alive for wire in wires) <= 4)
    eventually(lambda: not pool._tended)
    assert sum(wire.alive for wire in wires) == len(pool._idle)


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit])
def test_a_connection_is_not_used_again_after_an_interrupted_call(
    us: Ours, monkeypatch: pytest.MonkeyPatch, interruption: type[BaseException]
) -> None:
    us.take()
    [wire] = us.backend._node.connections._idle

    def interrupted(self: object) -> None:
        raise interruption

    with monkeypatch.context() as patch:
        patch.setattr(type(wire), "_read", interrupted)
        with pytest.raises(interruption):
            us.backend.inspect("a", 1)
    assert not wire.alive
    assert us.backend.inspect("b", 1) is None


def test_unsent_bytes_of_an_abandoned_request_never_reach_the_server(
    connect: Connect, proxy: FaultProxy, bare: Bare
) -> None:
    us = connect(proxy.url, within=0.2)
    us.backend.ping(1)
    proxy.black_hole("up")
    with pytest.raises(BackendUnavailable):
        us.take()
    assert len(us.backend._node.connections._idle) == 0
    eventually(lambda: len(proxy.connections) <= 1)
    assert holder_of(bare) is None


def test_a_process_that_forks_faster_than_it_connects_stops_trying(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    really: Any = Connection.connect

    def connect_and_fork(connection: Any) -> None:
        really(connection)
        dialling._count_forks()
        dialling._count_forks()

    monkeypatch.setattr(Connection, "connect", connect_and_fork)
    backend = open_backend(server.url, {})
    assert isinstance(backend, RedisBackend)
    endpoint = backend._endpoint
    with pytest.raises(BackendUnavailable):
        endpoint.connect(0.2, now)
    eventually(lambda: endpoint._dialling.permits.qsize() == transport.CONNECTING_AT_ONCE)
    assert not list(endpoint._open)
