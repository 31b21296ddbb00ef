"""`Runtime`: the kernel's clock, waits and threads. `Threads` is the real runtime. Unit tests use a runtime with a fake
clock.

A bell wakes the thread or task that waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from multilock import system
from multilock.kernel.hard_fence import Killer, KillingTimer
from multilock.kernel.thread_pool import ThreadPool
from multilock.kernel.ticking_thread import Ticker, TickingThread
from multilock.kernel.worker import start_worker
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


class Runtime(Protocol):
    """The clock, waits and threads of the kernel."""

    def now(self) -> float:
        """Return the time in seconds, on the clock of all deadlines."""

    def wall(self) -> int:
        """Return the time of the wall clock in µs, for comparisons between hosts."""

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
        """Make a ticking thread: it calls ``step()`` at planned times, and ``died(error)`` if ``step`` raises."""

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
        return TickingThread(step, died, name)
