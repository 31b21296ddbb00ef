"""The bell and the ticker of the production runtime."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from multilock import LossReason, system
from multilock.kernel import ticking_thread
from multilock.kernel.runtime import Threads, now
from tests.unit.kit import Losses, Scripted, client_on, ctrl_c, eventually

LIMIT = 10.0


@pytest.fixture
def alarm() -> Iterator[None]:
    before = signal.getsignal(signal.SIGALRM)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_a_signal_before_the_wait_is_not_lost_and_several_count_as_one() -> None:
    bell = Threads().bell()
    bell.ring()
    bell.ring()
    begun = time.monotonic()
    bell.wait(LIMIT)
    assert time.monotonic() - begun < LIMIT / 2
    bell.wait(0.05)
    assert time.monotonic() - begun >= 0.05


@pytest.mark.parametrize("seconds", [-1.0, 0.0])
def test_a_wait_that_is_over_returns(seconds: float) -> None:
    Threads().bell().wait(seconds)


def test_a_signal_wakes_a_thread_that_waits_forever() -> None:
    bell = Threads().bell()
    waiting = threading.Thread(target=bell.wait, args=(math.inf,), daemon=True)
    waiting.start()
    time.sleep(0.05)
    assert waiting.is_alive()
    bell.ring()
    waiting.join(LIMIT)
    assert not waiting.is_alive()


def test_a_signal_handler_may_wake_the_thread_that_it_interrupts(alarm: None) -> None:
    """A `threading.Event` would hang if the signal came while the thread held the internal lock of the event."""
    bell = Threads().bell()
    signal.signal(signal.SIGALRM, lambda *_: bell.ring())
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    begun = time.monotonic()
    for _ in range(200):
        bell.wait(LIMIT)
    assert time.monotonic() - begun < LIMIT


# The ticker


def test_an_interrupted_poke_leaves_a_ticker_that_still_reacts() -> None:
    steps: list[float] = []

    def step() -> float:
        steps.append(now())
        return math.inf

    ticker = Threads().ticker(step, lambda error: None, "test-ticker")
    ticker.start()
    eventually(lambda: ticker.late() == 0 and len(steps) == 1)
    time.sleep(0.1)  # by then the ticker waits to be woken
    with ctrl_c("LockBell.ring"):
        ticker.poke(now())
    ticker.poke(now() + 1)
    eventually(lambda: len(steps) > 1)
    ticker.close()


class Sleeper(Threads):
    """A machine that slept: its clock counts the time asleep, but waits in the operating system do not."""

    slept = 0.0

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ticking_thread, "now", self.now)

    def now(self) -> float:
        return now() + self.slept


@pytest.mark.parametrize("renew", [True, False])
def test_a_ticker_notices_a_missed_deadline_after_the_machine_slept(
    monkeypatch: pytest.MonkeyPatch, renew: bool
) -> None:
    machine = Sleeper(monkeypatch)
    client = client_on(Scripted(machine), machine)
    losses = Losses()
    client.lock("n", ttl=300.0, renew=renew, on_lost=losses).acquire()
    time.sleep(1.5)  # time for the steps that are due soon
    machine.slept = 400.0
    assert losses.wait(within=10).reason is LossReason.PAUSED
    client.close()


def test_a_ticker_without_tasks_does_not_wake_up(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    wait = system.LockBell.wait

    def noted(bell: system.LockBell, seconds: float) -> bool:
        if threading.current_thread().name == "test-ticker":  # tickers of other tests may still run
            waits.append(seconds)
        return wait(bell, seconds)

    monkeypatch.setattr(system.LockBell, "wait", noted)
    steps: list[float] = []
    ticker = Threads().ticker(lambda: steps.append(now()) or math.inf, lambda error: None, "test-ticker")  # type: ignore[func-returns-value]
    ticker.start()
    eventually(lambda: waits)
    time.sleep(1.2)
    assert (waits, len(steps)) == ([math.inf], 1)
    ticker.close()
