"""Readers and permits in processes that are stopped or killed. Such a process delays others only until its session has
ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from multilock import Lease, LeaseState, Loss, now
from multilock.testing import Helper
from multilock.testing.conformance.base import Pulse, Recorder, eventually, queued
from multilock.testing.conformance.faces import background
from tests.backends.holders import NAME
from tests.backends.in_order import writes_and_reads_are_in_order
from tests.backends.zookeeper.conftest import Connect
from tests.servers_zookeeper import ZooKeeperServer

QUICK = 2.0  # seconds: ttl of sessions that end during the test
STEADY = 20.0  # seconds: ttl of sessions that survive an overloaded machine
START = 30.0  # seconds for a process to start on an overloaded machine
LATE = 3.0  # seconds by which a process may be late on a machine that freezes at times


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    return f"{request.node.originalname[:40]}/"


@pytest.fixture
def start(shared: ZooKeeperServer, prefix: str) -> Iterator[Callable[..., Helper]]:
    with ExitStack() as helpers:
        yield lambda function, ttl=QUICK: helpers.enter_context(
            Helper(f"tests.backends.holders:{function}", shared.url, prefix, ttl)
        )


def test_a_frozen_reader_delays_a_writer_by_its_own_lease_and_other_readers_are_unaffected(
    shared: ZooKeeperServer, connect: Connect, start: Callable[..., Helper], prefix: str
) -> None:
    lost = Recorder[Loss[Lease]]()
    stopped = start("read")
    stopped.wait_for("held", START)
    client, other = connect(shared.url, prefix=prefix, ttl=STEADY), connect(shared.url, prefix=prefix, ttl=STEADY)
    lock = client.read_write_lock(NAME, on_lost=lost).reader()
    others = [background(lock.acquire).result(START) for _ in range(9)]
    with stopped.paused():
        waits = background(lambda: other.read_write_lock(NAME).writer().acquire(timeout=START))
        eventually(lambda: queued(client, NAME) == 1)
        assert [lease.state for lease in others] == [LeaseState.HELD] * 9
        assert all(lease.release() for lease in others)
        with Pulse() as pulse:
            began = now()
            assert waits.result(START).is_held()
            assert now() - began < QUICK + LATE + pulse.stopped()
    stopped.tell("end")
    assert stopped.wait_for("state", START)[1:] == ["LOST", "False"]
    assert lost.calls == []


def test_a_writer_killed_while_it_waits_blocks_readers_until_its_session_ends(
    shared: ZooKeeperServer, connect: Connect, start: Callable[..., Helper], prefix: str
) -> None:
    client = connect(shared.url, prefix=prefix, ttl=STEADY)
    lock = client.read_write_lock(NAME).reader()
    with lock:
        writer = start("write")
        writer.wait_for("asks", START)
        eventually(lambda: queued(client, NAME) == 1, within=START)
        behind = background(lambda: lock.acquire(timeout=START))
        eventually(lambda: queued(client, NAME) == 2)
        assert not behind.done()
        writer.kill()
        with Pulse() as pulse:
            began = now()
            assert behind.result(START).is_held()
            assert now() - began < QUICK + LATE + pulse.stopped()


@pytest.mark.oracle
def test_permits_of_killed_holders_become_free_within_the_takeover_bound(
    shared: ZooKeeperServer, connect: Connect, start: Callable[..., Helper], prefix: str
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
        held = [semaphore.acquire(timeout=START) for _ in range(3)]
        bound = connect(shared.url, ttl=QUICK).capabilities.takeover_bound
        assert now() - killed < bound + LATE + pulse.stopped()
    assert semaphore.try_acquire() is None
    assert all(lease.release() for lease in held)


@pytest.mark.oracle
def test_a_waiting_writer_enters_before_later_readers_of_four_processes(
    shared: ZooKeeperServer, connect: Connect, start: Callable[..., Helper], prefix: str
) -> None:
    client = connect(shared.url, prefix=prefix, ttl=STEADY)
    readers = [start("stream", STEADY) for _ in range(4)]
    writes_and_reads_are_in_order(client, readers, START)
