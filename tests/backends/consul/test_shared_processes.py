"""Readers and permits in processes that are stopped or killed. Such a process delays others only until its session and
the following lock delay are over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from multilock import Lease, LeaseState, Loss, now
from multilock.testing import Helper
from multilock.testing.conformance.base import Pulse, Recorder, eventually, queued
from multilock.testing.conformance.faces import background
from tests.backends.consul.conftest import Connect
from tests.backends.holders import NAME
from tests.backends.in_order import writes_and_reads_are_in_order
from tests.servers_consul import ConsulServer

QUICK = 2.0  # seconds: ttl of the sessions that end
STEADY = 20.0  # seconds: ttl of sessions that survive an overloaded machine
START = 30.0  # seconds for a process to start on an overloaded machine
LATE = 3.0  # seconds by which a process may be late on a machine that freezes at times


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    return f"{request.node.originalname[:40]}/"


@pytest.fixture
def start(shared: ConsulServer, prefix: str) -> Iterator[Callable[..., Helper]]:
    with ExitStack() as helpers:
        yield lambda function, ttl=QUICK: helpers.enter_context(
            Helper(f"tests.backends.holders:{function}", shared.url, prefix, ttl)
        )


@pytest.fixture
def bound(shared: ConsulServer, connect: Connect) -> float:
    return connect(shared.url, ttl=QUICK).capabilities.takeover_bound


def test_a_frozen_reader_delays_a_writer_by_its_own_lease_and_other_readers_are_unaffected(
    shared: ConsulServer, connect: Connect, start: Callable[..., Helper], prefix: str, bound: float
) -> None:
    lost = Recorder[Loss[Lease]]()
    stopped = start("read")
    stopped.wait_for("held", START)
    client, other = connect(shared.url, prefix=prefix, ttl=STEADY), connect(shared.url, prefix=prefix, ttl=STEADY)
    lock = client.read_write_lock(NAME, on_lost=lost).reader()
    others = [background(lock.acquire).result(START) for _ in range(9)]
    with stopped.paused():
        began = now()
        with Pulse() as pulse:
            waits = background(lambda: other.read_write_lock(NAME).writer().acquire(timeout=START))
            eventually(lambda: queued(client, NAME) == 1)
            assert [lease.state for lease in others] == [LeaseState.HELD] * 9
            assert all(lease.release() for lease in others)
            assert waits.result(START).is_held()
            assert now() - began < bound + LATE + pulse.stopped()
    stopped.tell("end")
    assert stopped.wait_for("state", START)[1:] == ["LOST", "False"]
    assert lost.calls == []


def test_a_writer_killed_while_it_waits_blocks_readers_until_its_session_and_delay_end(
    shared: ConsulServer, connect: Connect, start: Callable[..., Helper], prefix: str, bound: float
) -> None:
    client = connect(shared.url, prefix=prefix, ttl=STEADY)
    lock = client.read_write_lock(NAME).reader()
    with lock:
        writer = start("write")
        writer.wait_for("asks", START)
        eventually(lambda: queued(client, NAME) == 1, within=START)
        behind = background(lambda: lock.acquire(timeout=START))
        writer.kill()
        assert lock.try_acquire() is None
        with Pulse() as pulse:
            began = now()
            assert behind.result(START).is_held()
            assert now() - began < bound + LATE + pulse.stopped()


@pytest.mark.oracle
def test_permits_of_killed_holders_become_free_within_the_takeover_bound(
    shared: ConsulServer, connect: Connect, start: Callable[..., Helper], prefix: str, bound: float
) -> None:
    client = connect(shared.url, prefix=prefix, ttl=STEADY)
    holders = [start("hold_permit") for _ in range(3)]
    for holder in holders:
        holder.wait_for("held", START)
    semaphore = client.semaphore(NAME, 3)
    assert semaphore.try_acquire() is None
    for holder in holders:
        holder.kill()
    with Pulse() as pulse:
        killed = now()
        waiting = [background(lambda: semaphore.acquire(timeout=START)) for _ in range(3)]
        held = [each.result(START) for each in waiting]
        assert now() - killed < bound + LATE + pulse.stopped()
    assert semaphore.try_acquire() is None
    assert all(lease.release() for lease in held)


def test_a_killed_reader_blocks_a_writer_until_its_session_and_delay_end(
    shared: ConsulServer, connect: Connect, start: Callable[..., Helper], prefix: str, bound: float
) -> None:
    reader = start("read")
    reader.wait_for("held", START)
    reader.kill()
    client = connect(shared.url, prefix=prefix, ttl=STEADY)
    with Pulse() as pulse:
        began = now()
        with client.read_write_lock(NAME).writer().acquire(timeout=START):
            assert QUICK < now() - began < bound + LATE + pulse.stopped()
    assert not [key for key in shared.ask("GET", "kv/?keys&consistent") if key.startswith(prefix)]


@pytest.mark.oracle
def test_a_waiting_writer_enters_before_later_readers_of_four_processes(
    shared: ConsulServer, connect: Connect, start: Callable[..., Helper], prefix: str
) -> None:
    client = connect(shared.url, prefix=prefix, ttl=STEADY)
    readers = [start("stream", STEADY) for _ in range(4)]
    writes_and_reads_are_in_order(client, readers, START)


def test_pushes_serve_forty_waiters_in_any_order_of_releases(
    shared: ConsulServer, connect: Connect, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The timers of waiters are longer than this test, so each waiter must be woken by a notification."""
    monkeypatch.setattr("multilock_consul.acquire_release.SAFETY", 3600.0)
    clients = [connect(shared.url, prefix=prefix, ttl=STEADY) for _ in range(4)]
    inside: list[int] = []
    most: list[int] = []

    def work(me: int) -> None:
        with clients[me % 4].semaphore(NAME, 3).acquire(timeout=2 * START):
            inside.append(me)
            most.append(len(inside))
            inside.remove(me)

    for done in [background(lambda n=n: work(n)) for n in range(40)]:  # type: ignore[misc]
        done.result(2 * START)
    assert max(most) <= 3
    assert not [key for key in shared.ask("GET", "kv/?keys&consistent") if key.startswith(prefix)]
