"""Readers and permits in processes that are stopped or killed: each costs the others no more than its own session and
lock delay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

import multilock
from multilock import Lease, LeaseState, Loss, now
from multilock.testing import Helper, hear, say
from multilock.testing.conformance.base import Pulse, Recorder, eventually, queued
from multilock.testing.conformance.faces import background
from tests.backends.consul.conftest import Connect
from tests.servers_consul import ConsulServer

QUICK = 2.0  # seconds of the sessions that end
START = 30.0  # seconds for a process to start on a busy machine
LATE = 3.0  # by which somebody may be, on a machine that stands still at times


def reading(url: str, prefix: str) -> None:
    with multilock.connect(url, prefix=prefix, ttl=QUICK) as client:
        lease = client.read_write_lock("a").reader().acquire()
        say("held")
        while hear() is not None:
            say("state", lease.state.name, lease.release())


def writing(url: str, prefix: str) -> None:
    with multilock.connect(url, prefix=prefix, ttl=QUICK) as client:
        say("asks")
        client.read_write_lock("a").writer().acquire()
        say("held")
        hear()


def permitted(url: str, prefix: str) -> None:
    with multilock.connect(url, prefix=prefix, ttl=QUICK) as client:
        client.semaphore("a", 3).acquire()
        say("held")
        hear()


def streaming(url: str, prefix: str) -> None:
    """Reads all the time, by waiting and by trying; says with which token, and from when to when."""
    with multilock.connect(url, prefix=prefix, ttl=20) as client:
        lock = client.read_write_lock("a").reader()
        say("begins")
        ends = background(hear)
        turn = 0
        while not ends.done():
            turn += 1
            lease = lock.acquire() if turn % 2 else lock.try_acquire()
            if lease:
                began = now()
                say("read", lease.fence(), began, now())
                lease.release()


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    return f"{request.node.originalname[:40]}/"


@pytest.fixture
def start(shared: ConsulServer, prefix: str) -> Iterator[Callable[[str], Helper]]:
    with ExitStack() as helpers:
        yield lambda function: helpers.enter_context(Helper(f"{__name__}:{function}", shared.url, prefix))


@pytest.fixture
def bound(shared: ConsulServer, connect: Connect) -> float:
    return connect(shared.url, ttl=QUICK).capabilities.takeover_bound


def test_a_reader_that_is_stopped_delays_a_writer_by_its_own_lease_and_the_others_are_told_nothing(
    shared: ConsulServer, connect: Connect, start: Callable[[str], Helper], prefix: str, bound: float
) -> None:
    lost = Recorder[Loss[Lease]]()
    stopped = start("reading")
    stopped.wait_for("held", START)
    client, other = connect(shared.url, prefix=prefix, ttl=20), connect(shared.url, prefix=prefix, ttl=20)
    lock = client.read_write_lock("a", on_lost=lost).reader()
    others = [background(lock.acquire).result(START) for _ in range(9)]
    with stopped.paused():
        began = now()
        with Pulse() as pulse:
            waits = background(lambda: other.read_write_lock("a").writer().acquire(timeout=START))
            eventually(lambda: queued(client, "a") == 1)
            assert [lease.state for lease in others] == [LeaseState.HELD] * 9
            assert all(lease.release() for lease in others)
            assert waits.result(START).is_held()
            assert now() - began < bound + LATE + pulse.stopped()
    stopped.tell("end")
    assert stopped.wait_for("state", START)[1:] == ["LOST", "False"]
    assert lost.calls == []


def test_a_writer_that_is_killed_while_it_waits_keeps_readers_out_until_its_session_and_its_delay_end(
    shared: ConsulServer, connect: Connect, start: Callable[[str], Helper], prefix: str, bound: float
) -> None:
    client = connect(shared.url, prefix=prefix, ttl=20)
    lock = client.read_write_lock("a").reader()
    with lock:
        writer = start("writing")
        writer.wait_for("asks", START)
        eventually(lambda: queued(client, "a") == 1, within=START)
        behind = background(lambda: lock.acquire(timeout=START))
        writer.kill()
        assert lock.try_acquire() is None
        with Pulse() as pulse:
            began = now()
            assert behind.result(START).is_held()
            assert now() - began < bound + LATE + pulse.stopped()


def test_permits_of_killed_holders_are_free_within_the_takeover_bound_and_never_more_than_there_are(
    shared: ConsulServer, connect: Connect, start: Callable[[str], Helper], prefix: str, bound: float
) -> None:
    client = connect(shared.url, prefix=prefix, ttl=20)
    holders = [start("permitted") for _ in range(3)]
    for holder in holders:
        holder.wait_for("held", START)
    semaphore = client.semaphore("a", 3)
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


def test_a_killed_reader_keeps_a_writer_out_until_its_session_and_its_delay_end_and_nobody_for_ever(
    shared: ConsulServer, connect: Connect, start: Callable[[str], Helper], prefix: str, bound: float
) -> None:
    reader = start("reading")
    reader.wait_for("held", START)
    reader.kill()
    client = connect(shared.url, prefix=prefix, ttl=20)
    with Pulse() as pulse:
        began = now()
        with client.read_write_lock("a").writer().acquire(timeout=START):
            assert QUICK < now() - began < bound + LATE + pulse.stopped()
    assert not [key for key in shared.ask("GET", "kv/?keys&consistent") if key.startswith(prefix)]


def test_a_writer_is_in_before_any_reader_of_four_processes_that_asks_after_it(
    shared: ConsulServer, connect: Connect, start: Callable[[str], Helper], prefix: str
) -> None:
    client = connect(shared.url, prefix=prefix, ttl=20)
    readers = [start("streaming") for _ in range(4)]
    for reader in readers:
        reader.wait_for("read", START)
    writes: list[tuple[int, float, float]] = []
    for _ in range(5):
        with client.read_write_lock("a").writer().acquire(timeout=START) as lease:
            writes.append((lease.fence(), now(), now()))
        readers[0].wait_for("read", START)
    for reader in readers:
        reader.tell("end")
        assert reader.wait(START) == 0
    lines = [line.split() for reader in readers for line in reader.lines if line.startswith("read ")]
    reads = [(int(token), float(began), float(ended)) for _, token, began, ended in lines]
    for number, entered, left in writes:
        assert all(ended <= entered for token, _, ended in reads if token < number)
        assert all(began >= left for token, began, _ in reads if token > number)


def test_forty_waiters_are_served_by_pushes_whoever_leaves(
    shared: ConsulServer, connect: Connect, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No timer helps: each that wakes one would take longer than all of it."""
    monkeypatch.setattr("multilock_consul.recipe.SAFETY", 3600.0)
    clients = [connect(shared.url, prefix=prefix, ttl=20) for _ in range(4)]
    inside: list[int] = []
    most: list[int] = []

    def work(me: int) -> None:
        with clients[me % 4].semaphore("a", 3).acquire(timeout=2 * START):
            inside.append(me)
            most.append(len(inside))
            inside.remove(me)

    for done in [background(lambda n=n: work(n)) for n in range(40)]:  # type: ignore[misc]
        done.result(2 * START)
    assert max(most) <= 3
    assert not [key for key in shared.ask("GET", "kv/?keys&consistent") if key.startswith(prefix)]
