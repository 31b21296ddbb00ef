"""How the kernel waits and starts threads: a `Runtime`, so that unit tests drive its clock by hand.

The threads, locks and clocks themselves are those of `multilock.system`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar

from multilock import system
from multilock.errors import BackendUnavailable
from multilock.kernel.fence import Killer, KillingTimer
from multilock.kernel.worker import SOON, begin_thread, helpers, is_any_missing, start_worker, try_again
from multilock.kernel.workers import ThreadWorkers
from multilock.system import now

__all__ = [
    "Bell",
    "Event",
    "Runtime",
    "ThreadBell",
    "Threads",
    "Ticker",
    "Workers",
    "call_inside",
    "inside",
    "now",
    "wait_until",
]

R = TypeVar("R")

LONGEST_WAIT = 1.0  # seconds of a ticker at a time: those for which the machine sleeps do not count for the system


class Event(Protocol):
    """The part of threading.Event that is used."""

    def set(self) -> None: ...
    def clear(self) -> None: ...
    def is_set(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> bool: ...


class Bell(Protocol):
    """Wakes the one who waits for it, from any thread. A ring between two waits is not lost; several are one."""

    def ring(self) -> None: ...


class ThreadBell(Bell, Protocol):
    """The bell of a thread. It may be rung by a signal handler."""

    def wait(self, seconds: float) -> bool:
        """At most so many seconds, which may be inf; whether it rang."""


class Workers(Protocol):
    """A few threads that carry jobs. Jobs must not raise."""

    def submit(self, job: Callable[[], None]) -> None: ...
    def close(self) -> None: ...


class Ticker(Protocol):
    """A thread that calls a step function again and again, each time at the moment the last call returned."""

    def start(self) -> str | None:
        """Return why the process refuses it a thread, or None: it runs."""

    def poke(self, at: float) -> None:
        """See to it that the next step comes at ``at`` at the latest."""

    def late(self) -> float:
        """Seconds by which the next step is overdue; 0.0 while it is on time, inf after the thread ended."""

    def close(self) -> None: ...


class Runtime(Protocol):
    def now(self) -> float: ...
    def wall(self) -> int:
        """µs of the wall clock: what hosts can compare."""

    def event(self) -> Event: ...
    def bell(self) -> ThreadBell: ...
    def uniform(self, low: float, high: float) -> float: ...
    def spawn(self, run: Callable[[], None], name: str) -> None:
        """Run ``run()`` once, on a thread of its own, as soon as there is one. Never raises for want of a thread."""

    def workers(self, name: str, limit: int) -> Workers: ...
    def ticker(self, step: Callable[[], float], died: Callable[[BaseException], None], name: str) -> Ticker: ...
    def killer(self) -> Killer:
        """Raises CapabilityMissing."""


inside: set[int] = set()
"""Threads that call a backend now, and so may hold what is its own, and those that keep time."""


def call_inside(call: Callable[..., R], *args: Any) -> R:
    """The only way into a backend. That the process can have no more threads (one of the backend's own, before its
    request or after) is BackendUnavailable."""
    thread = system.get_ident()
    if thread in inside:
        return call(*args)
    try:
        inside.add(thread)  # within: an interrupt just after it must not leave this thread marked for ever
        return call(*args)
    except RuntimeError as error:
        if "new thread" not in str(error):
            raise
        raise BackendUnavailable(str(error)) from error
    finally:
        inside.discard(thread)


def wait_until(runtime: Runtime, ended: Callable[[], bool], seconds: float) -> bool:
    """Whether ``ended()`` within so many seconds. For what ends a client: it polls, so that those who are waited for
    set no event, in which an interrupt can leave a lock taken for ever."""
    end = runtime.now() + seconds
    pause = runtime.event()
    while not ended():
        if runtime.now() >= end:
            return False
        pause.wait(0.002)
    return True


class Threads:
    """The production runtime: daemon threads, so that none keeps the process alive."""

    now = staticmethod(system.now)
    wall = staticmethod(system.wall)
    uniform = staticmethod(system.uniform)

    def event(self) -> Event:
        return system.Event()

    def bell(self) -> ThreadBell:
        return _LockBell()

    def spawn(self, run: Callable[[], None], name: str) -> None:
        start_worker(run, name, once=True)

    def workers(self, name: str, limit: int) -> Workers:
        return ThreadWorkers(self.spawn, name, limit)

    def killer(self) -> Killer:
        return KillingTimer(system.CLOCK)

    def ticker(self, step: Callable[[], float], died: Callable[[BaseException], None], name: str) -> Ticker:
        return _ThreadTicker(step, died, name)


class _LockBell:
    """A lock that is free while the bell has rung: two thirds of the time of `threading.Event`, and safe in a signal
    handler."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = system.Lock()
        self._lock.acquire()

    def ring(self) -> None:
        try:
            self._lock.release()
        except RuntimeError:
            return  # it has rung already

    def wait(self, seconds: float) -> bool:
        return self._lock.acquire(timeout=max(min(seconds, system.TIMEOUT_MAX), 0.0))


class _ThreadTicker:
    def __init__(self, step: Callable[[], float], died: Callable[[BaseException], None], name: str):
        self._step = step
        self._died = died
        self._wakeup = _LockBell()
        self._planned = math.inf  # what a poke is compared with; inf while the step decides, so that none is lost
        self._due = now()  # when the present or next step should have begun
        self._closed = False
        self._name = name

    def start(self) -> str | None:
        return begin_thread(partial(call_inside, self._run), self._name)  # inside: a finalizer must not wait in it

    def poke(self, at: float) -> None:
        if at < self._planned:
            try:
                self._planned = at
                self._wakeup.ring()
            except BaseException:  # interrupted: it may not have rung
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
                    # A machine that wakes up goes on with the wait that it slept in, and ours may be over.
                    if self._wakeup.wait(rest if rest == math.inf else min(rest, LONGEST_WAIT)):
                        self._due = min(at, now())
                        break
        except BaseException as error:
            self._due = -math.inf
            if not self._closed:
                self._died(error)
        finally:
            helpers.pop(self, None)
