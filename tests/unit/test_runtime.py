"""The production runtime's bell and ticker."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from multilock.runtime import Threads, now
from tests.unit.kit import ctrl_c, eventually

LIMIT = 10.0


@pytest.fixture
def alarm() -> Iterator[None]:
    before = signal.getsignal(signal.SIGALRM)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_a_ring_before_the_wait_is_not_lost_and_several_are_one() -> None:
    bell = Threads().bell()
    bell.set()
    bell.set()
    begun = time.monotonic()
    bell.wait(LIMIT)
    assert time.monotonic() - begun < LIMIT / 2
    bell.wait(0.05)
    assert time.monotonic() - begun >= 0.05


@pytest.mark.parametrize("seconds", [-1.0, 0.0])
def test_a_wait_that_is_over_returns(seconds: float) -> None:
    Threads().bell().wait(seconds)


def test_a_ring_wakes_who_waits_for_ever() -> None:
    bell = Threads().bell()
    waiting = threading.Thread(target=bell.wait, args=(math.inf,), daemon=True)
    waiting.start()
    time.sleep(0.05)
    assert waiting.is_alive()
    bell.set()
    waiting.join(LIMIT)
    assert not waiting.is_alive()


def test_a_signal_handler_may_ring_while_its_thread_waits(alarm: None) -> None:
    """With `threading.Event` it would hang where it met the thread inside that event's own lock."""
    bell = Threads().bell()
    signal.signal(signal.SIGALRM, lambda *_: bell.set())
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    begun = time.monotonic()
    for _ in range(200):
        bell.wait(LIMIT)
    assert time.monotonic() - begun < LIMIT


# The ticker


def test_an_interrupted_poke_leaves_no_deaf_ticker() -> None:
    steps: list[float] = []

    def step() -> float:
        steps.append(now())
        return math.inf

    ticker = Threads().ticker(step, lambda error: None, "test-ticker")
    ticker.start()
    eventually(lambda: ticker.late() == 0 and len(steps) == 1)
    time.sleep(0.1)  # it waits to be woken
    with ctrl_c("_LockBell.set"):
        ticker.poke(now())
    ticker.poke(now() + 1)
    eventually(lambda: len(steps) > 1)
    ticker.close()
