"""Readers and permits in processes that are stopped or killed. Such a process delays others only until its lease has
ended."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

import multilock
from multilock import LeaseState, now
from multilock.testing import Helper
from multilock.testing.conformance.base import Pulse
from tests.backends.holders import NAME
from tests.backends.in_order import ORDERS, together, writes_and_reads_are_in_order
from tests.backends.redis.kit import Bare, eventually
from tests.servers import RedisServer

TTL = 1.5
STEADY = 20.0  # seconds: ttl of leases that survive an overloaded machine
PREFIX = "multilock/"
START = 20.0  # seconds for a process to start on an overloaded machine
LATE = 3.0  # seconds by which a process may be late on a machine that freezes at times


def test_a_frozen_reader_delays_a_writer_by_its_own_lease_and_other_readers_are_unaffected(
    server: RedisServer,
) -> None:
    with (
        multilock.connect(server.url, ttl=STEADY) as client,
        multilock.connect(server.url, ttl=STEADY) as writing,
        Helper("tests.backends.holders:read", server.url, PREFIX, TTL) as stopped,
    ):
        stopped.wait_for("held", START)
        assert writing.inspect(NAME)  # connect this client now, because its next request must not take long
        others = [client.read_write_lock(NAME).reader().acquire() for _ in range(9)]
        with stopped.paused(), Pulse() as pulse:
            began = now()
            assert writing.read_write_lock(NAME).writer().try_acquire(2.0) is None
            assert [lease.state for lease in others] == [LeaseState.HELD] * 9
            assert all(lease.release() for lease in others)
            with writing.read_write_lock(NAME).writer().acquire(timeout=START):
                assert now() - began < TTL + LATE + pulse.stopped()
        stopped.tell("end")
        assert stopped.wait_for("state", START)[1:] == ["LOST", "False"]


def test_a_frozen_waiting_writer_blocks_readers_for_its_liveness_and_a_killed_one_never(
    server: RedisServer, bare: Bare
) -> None:
    with (
        multilock.connect(server.url, ttl=STEADY) as client,
        client.read_write_lock(NAME).reader().acquire(),
        Helper("tests.backends.holders:write", server.url, PREFIX, TTL) as writer,
    ):
        writer.wait_for("asks", START)
        eventually(lambda: bare.zcard("{multilock/a}:queue") == 1, within=START)
        reader = client.read_write_lock(NAME).reader()
        with writer.paused(), Pulse() as pulse:
            began = now()
            with reader.acquire(timeout=START):
                assert now() - began < TTL + LATE + pulse.stopped()
        # The writer has joined the queue again.
        eventually(lambda: bare.zcard("{multilock/a}:queue") == 1, within=START)
        assert reader.try_acquire() is None
        writer.kill()
        # Only the subscription of this process is left.
        eventually(lambda: len(bare.pubsub_channels("multilock:wake:*")) == 1, within=START)
        lease = reader.try_acquire()
        assert lease is not None
        lease.release()


@pytest.mark.oracle
def test_permits_of_killed_holders_become_free_within_the_takeover_bound(
    server: RedisServer,
) -> None:
    with ExitStack() as helpers, multilock.connect(server.url, ttl=TTL) as client:
        holders = [Helper("tests.backends.holders:hold_permit", server.url, PREFIX, TTL) for _ in range(3)]
        for holder in holders:
            helpers.enter_context(holder)
            holder.wait_for("held", START)
        semaphore = client.semaphore(NAME, 3)
        assert semaphore.try_acquire() is None
        for holder in holders:
            holder.kill()
        killed = now()
        held = [semaphore.acquire(timeout=START) for _ in range(3)]
        assert now() - killed < client.capabilities.takeover_bound + LATE
        assert semaphore.try_acquire() is None
        assert all(lease.release() for lease in held)


@pytest.mark.oracle
def test_a_waiting_writer_enters_before_later_readers_of_four_processes(server: RedisServer) -> None:
    with ExitStack() as helpers, multilock.connect(server.url, ttl=STEADY) as client:
        streaming = [Helper("tests.backends.holders:stream", server.url, PREFIX, STEADY) for _ in range(4)]
        for reader in streaming:
            helpers.enter_context(reader)
        writes_and_reads_are_in_order(client, streaming, START)


def test_processes_that_name_the_same_locks_in_different_orders_never_deadlock(
    server: RedisServer, tmp_path: Path
) -> None:
    file = tmp_path / "count"
    file.write_text("0")
    with ExitStack() as helpers:
        counters = [
            helpers.enter_context(Helper("tests.backends.holders:count_with_all", server.url, file, 100, *names))
            for names in ORDERS
        ]
        together(counters, START)
    assert file.read_text() == "400"
