"""The fan (one connection to each server): which thread handles the replies, and what remains of a call that ends
early."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import multilock
from multilock import BackendUnavailable, MultilockError, now
from multilock.testing import FaultProxy
from multilock.testing.proxy import Fault
from multilock_redis.redlock import background_thread
from multilock_redis.redlock import connections as fan_module
from multilock_redis.redlock.acquire_release import Joins
from multilock_redis.redlock.connections import AT_ONCE, Fan, Lane, Link, Owed, Pool
from multilock_redis.redlock.event_loop import Channel
from multilock_redis.redlock.restarts import Guarded
from multilock_redis.transport import Wire
from multilock_redis.wire import ScriptMissing
from tests.backends.redis.kit import eventually
from tests.backends.redlock.kit import WITHIN, Contender, holders
from tests.servers_redlock import RedisServers, url_of

Contend = Callable[..., Contender]


class Broken:
    """A connection that accepts no requests."""

    alive = True
    used = 0.0
    unread = False

    def put(self, request: bytes, patience: float) -> bool:
        return False

    def close(self) -> None: ...

    def fileno(self) -> int:
        return -1


def lane_of(wire: Any, now: Callable[[], float]) -> tuple[Fan, Lane]:
    endpoint = Guarded("redis://h", None, {})  # type: ignore[arg-type]
    fan = Fan([Link(endpoint, now, lambda: None)])
    fan.lanes[0].wire = wire
    return fan, fan.lanes[0]


def test_sending_a_request_handles_no_reply() -> None:
    """The sending thread holds the lock of its claim. A reply may need another claim's lock, and waiting for it could
    be a deadlock."""
    wire: Wire | Broken = Broken()
    fan, lane = lane_of(wire, lambda: 0.0)
    handled: list[Any] = []
    lane.owed.append(Owed(handled.append, 1.0))
    assert not lane.send(b"x", [], 0.0)
    assert not handled
    assert fan.owes()
    fan.look(0)
    assert isinstance(handled[0], BackendUnavailable)
    assert not fan.owes()
    fan.close()


@pytest.mark.parametrize("at", ["put", "finish"])
def test_an_interrupt_ends_the_connection_so_that_no_reply_is_taken_for_another(at: str) -> None:
    class Interrupted(Broken):
        def put(self, request: bytes, patience: float) -> bool:
            if at == "put":
                raise KeyboardInterrupt  # the request was sent
            return True

        def finish(self) -> Any:
            raise KeyboardInterrupt

    fan, lane = lane_of(Interrupted(), lambda: 0.0)
    handled: list[Any] = []
    with contextlib.suppress(KeyboardInterrupt):
        lane.send(b"x", [Owed(handled.append, 1.0)], 0.0)
        lane.read()
    assert lane.wire is None
    assert not handled  # the reply is not handled here, because the caller may hold the lock of a claim
    fan.settle()
    assert handled[0].unknown
    fan.close()


def test_a_connection_that_took_a_part_of_a_repeated_request_is_not_used_again() -> None:
    class Full(Broken):
        closed = False

        def finish(self) -> Any:
            raise ScriptMissing("no such script")

        def close(self) -> None:
            self.closed = True

    wire = Full()
    fan, lane = lane_of(wire, lambda: 0.0)
    first: list[Any] = []
    second: list[Any] = []
    lane.owed += (Owed(first.append, 1.0, lambda: b"load and lock"), Owed(second.append, 1.0))
    fan.lanes[0].read()
    assert wire.closed
    assert lane.wire is None
    fan.settle()
    assert [error.unknown for error in (*first, *second)] == [False, True]
    fan.close()


def test_a_spare_connection_that_has_ended_is_not_used() -> None:
    class Spare(Broken):
        def __init__(self, *, ended: bool) -> None:
            self.ended = ended

        def stale(self) -> bool:
            return self.ended

        def close(self) -> None:
            self.alive = False

    fan, lane = lane_of(None, lambda: 0.0)
    spares: list[Any] = [Spare(ended=True), Spare(ended=False)]
    lane.link._spares.extend(spares)
    assert lane.link.take() is spares[1]
    assert not spares[0].alive
    fan.close()


def test_a_late_reply_ends_its_connection_and_marks_the_server_as_down() -> None:
    class Silent(Broken):
        def finish(self) -> Any:
            raise BlockingIOError

    fan, lane = lane_of(Silent(), lambda: 2.0)
    handled: list[Any] = []
    lane.owed.append(Owed(handled.append, 1.0))
    assert fan.late_in(0.5) == 0.5
    fan.expire(0.9)
    assert not handled
    fan.expire(1.1)
    assert handled[0].unknown
    assert lane.link.down
    assert lane.wire is None
    fan.close()


def test_a_late_reply_during_a_request_does_not_keep_the_event_loop_busy(contend: Contend) -> None:
    us = contend()
    us.teach()
    channel = us.backend.channel(WITHIN)
    assert isinstance(channel, Channel)
    for proxy in us.proxies:
        proxy.black_hole()
    assert channel.attempt(us.claim(), False)
    lane = channel._fan.lanes[0]
    lane.owed[0] = lane.owed[0]._replace(until=now() - 0.01)
    with pytest.raises(BlockingIOError):
        channel.answer()
    assert channel.look_in() != 0.0
    assert lane.wire is None
    channel.close()


def test_a_closing_pool_sends_again_the_script_that_a_server_lost() -> None:
    ours, server = socket.socketpair()
    sent: list[bytes] = []
    answers: list[Any] = [ScriptMissing("no such script"), 1, 1]

    class Forgetful(Broken):
        def put(self, request: bytes, patience: float) -> bool:
            sent.append(request)
            return True

        def finish(self) -> Any:
            return answers.pop(0)

        def fileno(self) -> int:
            return ours.fileno()

    clock = iter(range(10**6))
    endpoint = Guarded("redis://h", None, {})  # type: ignore[arg-type]
    pool = Pool([Link(endpoint, lambda: 0.0, lambda: None)], lambda: next(clock) / 10**4)
    fan = pool.take()
    lane = fan.lanes[0]
    lane.wire = Forgetful()  # type: ignore[assignment]
    fan.watch(lane, lane.wire)  # type: ignore[arg-type]
    handled: list[Any] = []
    lane.send(b"release", [Owed(handled.append, 9.0, lambda: b"load and release")], 0.0)
    pool.give(fan)
    server.send(b"!")
    pool.close()
    assert sent == [b"release", b"load and release"]
    assert handled == [1]
    ours.close()
    server.close()


def test_callers_never_make_connections_themselves(contend: Contend, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that hangs while the client connects would delay the caller, and all threads that wait for the
    caller."""
    connected: set[int] = set()
    connect = Guarded.connect

    def noted(self: Guarded, within: float, now: Callable[[], float]) -> Wire:
        connected.add(threading.get_ident())
        return connect(self, within, now)

    monkeypatch.setattr(Guarded, "connect", noted)
    us = contend()
    claim, _ = us.take()
    us.give_back(claim)
    assert connected
    assert threading.get_ident() not in connected


def test_a_connection_that_is_dropped_while_it_is_made_ends_no_thread(
    contend: Contend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backend that is opened again also drops connections that a thread is making."""
    dropped: list[Wire] = []
    connect = Guarded.connect

    def drop_the_first(self: Guarded, within: float, now: Callable[[], float]) -> Wire:
        wire = connect(self, within, now)
        if not dropped:
            dropped.append(wire)
            wire.drop()
        return wire

    monkeypatch.setattr(Guarded, "connect", drop_the_first)
    us = contend()
    claim, _ = us.take()
    us.give_back(claim)
    assert dropped


def test_a_try_that_does_not_join_leaves_nothing_in_any_queue(contend: Contend) -> None:
    """The client is subscribed, so the claim could join the queues, but its request says ``Joins.NO``."""
    them, us = contend(), contend()
    held, _ = them.take()
    them.settle(held)
    rounds, claim = us.backend.rounds, us.claim()
    rounds.servers.listen(WITHIN)
    assert rounds.servers.listening()
    evidence = rounds.enter(claim)
    assert evidence is not None
    fan = rounds.pool.take()
    rounds.begin(evidence, fan, True, Joins.NO)
    eventually(lambda: fan.look(0.01) or not evidence.pending(), within=WITHIN)
    assert us.states(claim) == ["out"] * 3
    evidence.asking = False
    rounds.give(fan)


# A call that ends early, on real servers


@pytest.fixture
def proxies(servers: RedisServers) -> Iterator[list[FaultProxy]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(FaultProxy.before(member.url)) for member in servers.members]


def before(proxies: list[FaultProxy]) -> str:
    return url_of([f"{each.host}:{each.port}" for each in proxies])


def held_back(proxies: list[FaultProxy]) -> list[Fault]:
    """Let the proxies delay the next requests to their servers."""
    return [proxy.hold_request(b"EVALSHA") for proxy in proxies]


def nothing_comes_of(faults: list[Fault], servers: RedisServers) -> None:
    """Let the servers execute the delayed requests now, and check that no lock remains."""
    for fault in faults:
        fault.release()
    eventually(lambda: holders(servers) == [""] * 3, within=WITHIN)
    with multilock.connect(servers.url, ttl=30) as them:
        them.lock("a").acquire(timeout=WITHIN).release()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a client more time for its last requests at close(), for an overloaded machine."""
    for module in (background_thread, fan_module):
        monkeypatch.setattr(module, "LAST_WORDS", WITHIN)


def test_a_cancel_while_all_servers_are_asked_leaves_nothing(proxies: list[FaultProxy], servers: RedisServers) -> None:
    async def main() -> None:
        async with multilock.connect_async(before(proxies), ttl=30) as client:
            async with client.lock("a"):
                pass  # from now on the loop has a connection to each server
            faults = held_back(proxies)
            asks = asyncio.create_task(client.lock("a").acquire())
            for fault in faults:
                await asyncio.to_thread(fault.wait, WITHIN)
            asks.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asks
            await asyncio.to_thread(nothing_comes_of, faults, servers)

    asyncio.run(main())


@pytest.mark.usefixtures("patient")
def test_closing_the_client_while_all_servers_are_asked_leaves_nothing(
    proxies: list[FaultProxy], servers: RedisServers
) -> None:
    async def main() -> None:
        client = multilock.connect_async(before(proxies), ttl=30)
        async with client.lock("a"):
            pass
        faults = held_back(proxies)
        asks = asyncio.create_task(client.lock("a").acquire())
        for fault in faults:
            await asyncio.to_thread(fault.wait, WITHIN)
        closing = asyncio.create_task(client.close())
        with pytest.raises(MultilockError):
            await asks
        for fault in faults:
            fault.release()
        await closing
        await asyncio.to_thread(nothing_comes_of, [], servers)

    asyncio.run(main())


@pytest.mark.usefixtures("patient")
def test_closing_the_client_while_a_thread_asks_all_servers_leaves_nothing(
    proxies: list[FaultProxy], servers: RedisServers
) -> None:
    client = multilock.connect(before(proxies), ttl=30)
    with client.lock("a"):
        pass
    faults = held_back(proxies)
    failed: list[BaseException] = []

    def ask() -> None:
        try:
            client.lock("a").acquire()
        except MultilockError as error:
            failed.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    for fault in faults:
        fault.wait(WITHIN)
    client.close()
    asking.join(WITHIN)
    assert failed
    nothing_comes_of(faults, servers)


@pytest.mark.usefixtures("patient")
def test_a_client_that_closes_releases_at_a_server_that_was_cut_off_just_now(
    proxies: list[FaultProxy], servers: RedisServers
) -> None:
    with multilock.connect(before(proxies), ttl=30) as client:
        lease = client.lock("a").acquire()
        eventually(lambda: "" not in holders(servers), within=WITHIN)
        proxies[2].cut()
        lease.release()
    nothing_comes_of([], servers)


@pytest.mark.usefixtures("patient")
def test_a_client_whose_last_words_have_no_reply_is_closed_all_the_same(
    proxies: list[FaultProxy], servers: RedisServers
) -> None:
    with multilock.connect(servers.url) as them, them.lock("a"):
        pass  # this loads the script of a release into each server
    with multilock.connect(before(proxies), ttl=30) as client:
        lease = client.lock("a").acquire()
        eventually(lambda: "" not in holders(servers), within=WITHIN)
        proxies[2].cut()
        lost = proxies[2].drop_reply(lease.owner.partition("@")[0].encode())
        lease.release()
    lost.wait(WITHIN)
    nothing_comes_of([], servers)


def test_a_client_that_closes_does_not_wait_for_a_server_that_accepts_no_connection(
    proxies: list[FaultProxy], servers: RedisServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fan_module, "CONNECT_WITHIN", 60.0)
    with multilock.connect(before(proxies), ttl=30) as client:
        lease = client.lock("a").acquire()
        eventually(lambda: "" not in holders(servers), within=WITHIN)
        proxies[2].black_hole(which="new")
        proxies[2].cut()
        lease.release()
    assert proxies[2].connections  # the client is still connecting to the third server
    proxies[2].heal()
    eventually(lambda: not proxies[2].connections, within=WITHIN)


def test_callers_that_wait_for_a_connection_do_not_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    monkeypatch.setattr(fan_module, "start_worker", lambda run, name, **_: begun.append(name))
    link = Link(Guarded("redis://h", None, {}), lambda: 0.0, lambda: None)  # type: ignore[arg-type]
    assert link.take() is None
    link.wants(1)
    assert [link.take(again=True) for _ in range(3)] == [None] * 3
    assert len(begun) == 1
    link.wants(2)
    assert [link.take(again=True) for _ in range(3)] == [None] * 3
    assert len(begun) == 3
    link.wants(97)
    assert [link.take(again=True) for _ in range(9)] == [None] * 9
    assert len(begun) == AT_ONCE
