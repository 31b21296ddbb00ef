"""Readers and permits in processes that are stopped or killed: each costs the others no more than its own lease."""

from __future__ import annotations

import time
from contextlib import ExitStack

import multilock
from multilock import LeaseState, now
from multilock.testing import Helper, hear, say
from multilock.testing.conformance.base import eventually, queued
from tests.backends.etcd.conftest import Connect
from tests.servers_etcd import EtcdServer

TTL = 4.0
START = 30.0  # seconds for a process to start on a busy machine
LATE = 3.0  # by which somebody may be: the server looks twice a second, and the machine stands still at times
NAME = "job"


def reading(url: str) -> None:
    with multilock.connect(url, ttl=TTL) as client:
        lease = client.read_write_lock(NAME).reader().acquire()
        say("held")
        while hear() is not None:
            say("state", lease.state.name, lease.release())


def writing(url: str) -> None:
    with multilock.connect(url, ttl=TTL) as client:
        client.read_write_lock(NAME).writer().acquire()
        say("held")
        hear()


def permitted(url: str) -> None:
    with multilock.connect(url, ttl=TTL) as client:
        client.semaphore(NAME, 3).acquire()
        say("held")
        hear()


def streaming(url: str, how: str) -> None:
    """Read again and again, all the time."""
    with multilock.connect(url, ttl=TTL) as client:
        lock = client.read_write_lock(NAME).reader()
        said = False
        while True:
            if lease := lock.acquire() if how == "waits" else lock.try_acquire():
                if not said:
                    say("held")
                said = True
                time.sleep(0.02)
                lease.release()


def test_a_reader_that_is_stopped_delays_a_writer_by_its_own_lease_and_the_others_lose_nothing(
    server: EtcdServer, connect: Connect
) -> None:
    client, other = connect(server.url, ttl=TTL), connect(server.url, ttl=TTL)
    with Helper(f"{__name__}:reading", server.url) as stopped:
        stopped.wait_for("held", START)
        readers = [client.read_write_lock(NAME).reader().acquire() for _ in range(9)]
        with stopped.paused():
            began = now()
            assert other.read_write_lock(NAME).writer().try_acquire(timeout=0.5) is None
            assert [lease.state for lease in readers] == [LeaseState.HELD] * 9
            assert all(lease.release() for lease in readers)
            with other.read_write_lock(NAME).writer().acquire(timeout=START):
                assert now() - began < TTL + LATE
        stopped.tell("end")
        assert stopped.wait_for("state", START)[1:] == ["LOST", "False"]


def test_a_writer_that_is_killed_while_it_waits_keeps_readers_out_until_its_lease_ends(
    server: EtcdServer, connect: Connect
) -> None:
    client = connect(server.url, ttl=TTL)
    reader = client.read_write_lock(NAME).reader()
    with reader.acquire() as held, Helper(f"{__name__}:writing", server.url) as writer:
        eventually(lambda: queued(client, NAME) == 1, within=START)
        assert reader.try_acquire() is None
        writer.kill()
        began = now()
        with reader.acquire(timeout=START):
            assert now() - began < TTL + LATE
        assert held.is_held()


def test_permits_of_killed_holders_are_free_within_the_takeover_bound_and_never_more_than_there_are(
    server: EtcdServer, connect: Connect
) -> None:
    client = connect(server.url, ttl=TTL)
    with ExitStack() as helpers:
        holders = [helpers.enter_context(Helper(f"{__name__}:permitted", server.url)) for _ in range(3)]
        for holder in holders:
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


def test_a_writer_is_not_starved_by_processes_that_read_all_the_time(server: EtcdServer, connect: Connect) -> None:
    client = connect(server.url, ttl=TTL)
    with ExitStack() as helpers:
        for how in ("waits", "waits", "tries", "tries"):
            helpers.enter_context(Helper(f"{__name__}:streaming", server.url, how)).wait_for("held", START)
        for _ in range(5):
            with client.read_write_lock(NAME).writer().acquire(timeout=START) as lease:
                assert lease.is_held()
