"""`Runtime`: the kernel's clock, waits and threads. `Threads` is the real runtime. Unit tests use a runtime with a fake
clock.

The threads, locks and clocks themselves come from `multilock.system`.

A bell wakes the thread or task that waits for it. The ticking thread of a client calls a step function at planned
times, and a poke makes the next step come earlier.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

from multilock import system
from multilock.kernel.hard_fence import Killer, KillingTimer
from multilock.kernel.inside_backend import call_inside
from multilock.kernel.thread_pool import ThreadPool
from multilock.kernel.worker import SOON, begin_thread, helpers, is_any_missing, start_worker, try_again
from multilock.system import now

__all__ = [
    "Bell",
    "Runtime",
    "ThreadBell",
    "ThreadEvent",
    "Threads",
    "Ticker",
    "Workers",
    "now",
    "wait_until",
]

R = TypeVar("R")

# A ticking thread divides a longer wait into waits of this many seconds. A wait does not count the time for which the
# machine sleeps, so without this limit a step could be late by that time.
LONGEST_WAIT = 1.0


class ThreadEvent(Protocol):
    """The part of threading.Event that the kernel uses."""

    def set(self) -> None:
        """Wake every thread in `wait`."""

    def clear(self) -> None:
        """Make `wait` block again."""

    def is_set(self) -> bool:
        """Return whether the event is set."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the event is set, and return whether it is."""


class Bell(Protocol):
    """Wakes the thread or task that waits for it. Any thread may ring it.

    A ring between two waits is not lost. Several rings between two waits count as one.
    """

    def ring(self) -> None:
        """Wake the waiting thread or task."""


class ThreadBell(Bell, Protocol):
    """The bell of a thread. A signal handler may ring it."""

    def wait(self, seconds: float) -> bool:
        """Wait for a ring, at most ``seconds``, which may be inf. Returns whether it rang."""


class Workers(Protocol):
    """A few threads that run jobs: see `multilock.kernel.thread_pool.ThreadPool`."""

    def submit(self, job: Callable[[], None]) -> None:
        """Have a thread run ``job()``, which must not raise."""

    def close(self) -> None:
        """End the threads after the submitted jobs."""


class Ticker(Protocol):
    """A thread that calls a step function again and again. Each call returns the time of the next call."""

    def start(self) -> str | None:
        """Start the thread. Returns the reason if the operating system refuses it, otherwise None."""

    def poke(self, at: float) -> None:
        """Make the next step come no later than ``at``."""

    def late(self) -> float:
        """Return the seconds by which the next step is overdue, 0.0 if it is on time, inf if the thread died."""

    def close(self) -> None:
        """End the thread after the present step."""


class Runtime(Protocol):
    """The clock, waits and threads of the kernel."""

    def now(self) -> float:
        """Return the time in seconds, on the clock of all deadlines."""

    def wall(self) -> int:
        """Return the wall clock in µs, which hosts can compare."""

    def event(self) -> ThreadEvent:
        """Make an event."""

    def bell(self) -> ThreadBell:
        """Make a bell for a thread."""

    def uniform(self, low: float, high: float) -> float:
        """Return a random number between ``low`` and ``high``."""

    def spawn(self, run: Callable[[], None], name: str) -> None:
        """Run ``run()`` once on a new thread. If the operating system refuses the thread, try again until it starts."""

    def workers(self, name: str, limit: int, or_here: bool = False) -> Workers:
        """Make a pool of at most ``limit`` threads: see `multilock.kernel.thread_pool.ThreadPool`."""

    def ticker(self, step: Callable[[], float], died: Callable[[BaseException], None], name: str) -> Ticker:
        """Make a ticking thread that calls ``step()``, and ``died(error)`` if that raises."""

    def killer(self) -> Killer:
        """Return the timer of a hard fence, which kills this process when the validity of a lease ends. Raises
        CapabilityMissing if there is none."""


def wait_until(runtime: Runtime, ended: Callable[[], bool], seconds: float) -> bool:
    """Wait until ``ended()`` is true. Returns False after ``seconds``.

    Used while a client ends. This polls instead of waiting for an event, because an interrupt in `Event.set` can leave
    the event's lock taken forever.
    """
    end = runtime.now() + seconds
    pause = runtime.event()
    while not ended():
        if runtime.now() >= end:
            return False
        pause.wait(0.002)
    return True


class Threads:
    """The real runtime. All threads are daemon threads, so that none keeps the process alive."""

    now = staticmethod(system.now)
    wall = staticmethod(system.wall)
    uniform = staticmethod(system.uniform)

    def event(self) -> ThreadEvent:
        return system.Event()

    def bell(self) -> ThreadBell:
        return system.LockBell()

    def spawn(self, run: Callable[[], None], name: str) -> None:
        start_worker(run, name, once=True)

    def workers(self, name: str, limit: int, or_here: bool = False) -> Workers:
        return ThreadPool(self.spawn, name, limit, or_here)

    def killer(self) -> Killer:
        return KillingTimer(system.CLOCK)

    def ticker(self, step: Callable[[], float], died: Callable[[BaseException], None], name: str) -> Ticker:
        return _ThreadTicker(step, died, name)


class _ThreadTicker:
    """The `Ticker` of the real runtime.

    ``_planned`` is the time of the next step. A `poke` wakes the thread only for an earlier time. While the step runs,
    ``_planned`` is inf, so that every `poke` wakes the thread.
    """

    def __init__(self, step: Callable[[], float], died: Callable[[BaseException], None], name: str):
        self._step = step
        self._died = died
        self._wakeup = system.LockBell()
        self._planned = math.inf
        self._due = now()  # the time at which the present or next step should begin
        self._closed = False
        self._name = name

    def start(self) -> str | None:
        # `call_inside` marks the ticking thread, so that a finalizer that runs on this thread waits for nothing.
        return begin_thread(partial(call_inside, self._run), self._name)

    def poke(self, at: float) -> None:
        if at < self._planned:
            try:
                self._planned = at
                self._wakeup.ring()
            except BaseException:  # after an interrupt the bell may not have rung
                self._planned = math.inf
                raise

    def late(self) -> float:
        return max(0.0, now() - self._due)

    def close(self) -> None:
        self._closed = True
        self._wakeup.ring()

    def _run(self) -> None:
        try:
            helpers[self] = lambda: self.poke(now() + SOON)
            while not self._closed:
                self._planned = math.inf
                at = self._step()
                if is_any_missing() and try_again():
                    at = min(at, now() + SOON)
                self._planned = self._due = at
                while (rest := at - now()) > 0:
                    # A wait does not count the time for which the machine sleeps. So after a sleep of the machine the
                    # planned time may have passed although the wait continues.
                    if self._wakeup.wait(rest if rest == math.inf else min(rest, LONGEST_WAIT)):
                        self._due = min(at, now())
                        break
        except BaseException as error:
            self._due = -math.inf
            if not self._closed:
                self._died(error)
        finally:
            helpers.pop(self, None)
