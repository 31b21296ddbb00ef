"""Harm that a program can do to its own leases: a callback hangs, threads are blocked, ttls differ, the client
closes."""

from __future__ import annotations

import ctypes
import threading

import pytest

import multilock
from multilock import ClientClosed, LeaseState, Loss, LossReason, now
from multilock.testing import Helper, hear, say
from multilock.testing.conformance.base import Recorder, eventually
from multilock.testing.conformance.faces import background
from tests.faults.conftest import Connect, Operator


# Under asyncio, a callback that blocks would block the program's own event loop.
@pytest.mark.parametrize("face", ["blocking"], indirect=True)
def test_a_callback_that_hangs_delays_no_other_callback_and_no_renewal(connect: Connect, operator: Operator) -> None:
    go_on, hanging = threading.Event(), threading.Event()

    def hang(loss: Loss) -> None:
        hanging.set()
        go_on.wait(20)

    losses: Recorder[Loss] = Recorder()
    client = connect(ttl=3.0)
    stays = client.lock("stays", on_lost=losses).acquire(timeout=5)
    # More callbacks than the 64 that may run at once.
    hangs = [client.lock(f"hangs/{n}", on_lost=hang).acquire(timeout=5) for n in range(70)]
    last = client.lock("last", on_lost=losses).acquire(timeout=5)
    try:
        operator.delete(*(f"multilock/hangs%2F{n}" for n in range(70)))
        assert hanging.wait(5)
        eventually(lambda: not any(lease.is_held() for lease in hangs))
        operator.delete("multilock/last")
        losses.wait()
        assert losses.calls[0].lease is last
        assert losses.stays_at(1, during=3.5)
        eventually(lambda: stays.state is LeaseState.HELD)
    finally:
        go_on.set()


def test_a_blocked_interpreter_loses_the_lease_and_reports_it_afterwards(connect: Connect) -> None:
    """C code does not release the interpreter's lock, so no other thread runs. Right after it, is_held() must return
    False."""
    losses: Recorder[Loss] = Recorder()
    lease = connect(ttl=0.6).lock("n", on_lost=losses).acquire(timeout=5)
    ctypes.PyDLL(None).usleep(900_000)
    assert not lease.is_held()
    assert losses.wait().reason is LossReason.PAUSED
    assert not lease.release()
    assert losses.stays_at(1)


def test_a_busy_thread_costs_no_lease(connect: Connect) -> None:
    losses: Recorder[Loss] = Recorder()
    lease = connect(ttl=3.0).lock("n", on_lost=losses).acquire(timeout=5)
    until = now() + 4.0
    while now() < until:
        sum(range(1000))
    assert lease.is_held()
    assert losses.calls == []


def test_close_ends_the_wait_of_every_waiter_and_leaves_nothing(connect: Connect, operator: Operator) -> None:
    client, other = connect(), connect()
    lease = other.lock("n").acquire(timeout=5)
    waiting = [background(lambda fair=fair: client.lock("n", fair=fair).acquire()) for fair in (True, False) * 10]  # type: ignore[misc]
    eventually(lambda: (info := other.inspect("n")) and info.waiting == 11)  # ten fair waiters, and one unfair waiter
    began = now()
    client.close()
    for one in waiting:
        with pytest.raises(ClientClosed):
            one.result(5)
    assert now() - began < 4.0
    assert operator.zcard("{multilock/n}:queue") == 0
    assert lease.release()
    assert operator.get("multilock/n") is None


def test_close_ends_every_connection(connect: Connect, operator: Operator) -> None:
    client = connect(ttl=3.0)
    losses: Recorder[Loss] = Recorder()
    client.lock("n", on_lost=losses).acquire(timeout=5)
    background(lambda: client.lock("n", fair=True).try_acquire(timeout=5))
    eventually(lambda: operator.info("stats")["tracking_total_keys"])
    client.close()
    assert losses.wait().reason is LossReason.CLOSED
    eventually(lambda: len(operator.client_list()) == 1)
    assert operator.get("multilock/n") is None


def hold_two(url: str) -> None:
    client = multilock.connect(url, ttl=10.0)
    client.lock("short", ttl=0.8).acquire()
    client.lock("long", ttl=5.0).acquire()
    say("held")
    hear()


# the holder is another process, which uses the blocking API
@pytest.mark.parametrize("face", ["blocking"], indirect=True)
def test_of_two_locks_of_a_killed_process_the_one_with_the_shorter_ttl_is_free_first(
    connect: Connect, operator: Operator
) -> None:
    client = connect()
    with Helper(
        "tests.faults.test_holders:hold_two",
        f"redis://127.0.0.1:{operator.connection_pool.connection_kwargs['port']}/0",
    ) as helper:
        helper.wait_for("held", within=10)
        killed = now()
        helper.kill()
    with client.lock("short").acquire(timeout=5):
        assert now() - killed <= 0.8 + 1.0
        assert client.lock("long").try_acquire() is None
    with client.lock("long").acquire(timeout=10):
        assert 2.8 <= now() - killed <= 5.0 + 1.0
