"""Readers and permits in processes that are stopped or killed. Such a process delays others only until its lease has
ended."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from multilock import LeaseState, now
from multilock.testing import Helper
from multilock.testing.conformance.base import eventually, queued
from tests.backends.etcd.conftest import Connect
from tests.backends.holders import NAME
from tests.backends.in_order import writes_and_reads_are_in_order
from tests.servers_etcd import EtcdServer

TTL = 4.0
STEADY = 20.0  # seconds: ttl of leases that survive an overloaded machine
PREFIX = "multilock/"
START = 30.0  # seconds for a process to start on an overloaded machine
# Seconds by which a process may be late: the server looks for expired leases twice a second, and the machine freezes at
# times.
LATE = 3.0


def test_a_frozen_reader_delays_a_writer_by_its_own_lease_and_other_readers_are_unaffected(
    server: EtcdServer, connect: Connect
) -> None:
    client, other = connect(server.url, ttl=STEADY), connect(server.url, ttl=STEADY)
    with Helper("tests.backends.holders:read", server.url, PREFIX, TTL) as stopped:
        stopped.wait_for("held", START)
        assert other.inspect(NAME)  # connect this client now, because its next request must not take long
        readers = [client.read_write_lock(NAME).reader().acquire() for _ in range(9)]
        with stopped.paused():
            began = now()
            assert other.read_write_lock(NAME).writer().try_acquire(timeout=2.0) is None
            assert [lease.state for lease in readers] == [LeaseState.HELD] * 9
            assert all(lease.release() for lease in readers)
            with other.read_write_lock(NAME).writer().acquire(timeout=START):
                assert now() - began < TTL + LATE
        stopped.tell("end")
        assert stopped.wait_for("state", START)[1:] == ["LOST", "False"]


def test_a_writer_killed_while_it_waits_blocks_readers_until_its_lease_ends(
    server: EtcdServer, connect: Connect
) -> None:
    client = connect(server.url, ttl=TTL)
    reader = client.read_write_lock(NAME).reader()
    with reader.acquire() as held, Helper("tests.backends.holders:write", server.url, PREFIX, TTL) as writer:
        eventually(lambda: queued(client, NAME) == 1, within=START)
        assert reader.try_acquire() is None
        writer.kill()
        began = now()
        with reader.acquire(timeout=START):
            assert now() - began < TTL + LATE
        assert held.is_held()


@pytest.mark.oracle
def test_permits_of_killed_holders_become_free_within_the_takeover_bound(server: EtcdServer, connect: Connect) -> None:
    client = connect(server.url, ttl=TTL)
    with ExitStack() as helpers:
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
def test_a_waiting_writer_enters_before_later_readers_of_four_processes(server: EtcdServer, connect: Connect) -> None:
    client = connect(server.url, ttl=STEADY)
    with ExitStack() as helpers:
        streaming = [Helper("tests.backends.holders:stream", server.url, PREFIX, STEADY) for _ in range(4)]
        for reader in streaming:
            helpers.enter_context(reader)
        writes_and_reads_are_in_order(client, streaming, START)
