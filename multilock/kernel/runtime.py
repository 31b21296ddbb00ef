"""The one seam to time and threads.

Everything in multilock that reads a clock, waits, or starts a thread does it through a `Runtime`, so that unit tests
drive the clock by hand and a simulator can run the whole library in virtual time.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import Any, Protocol, TypeVar

from multilock.errors import BackendUnavailable
from multilock.kernel.fence import Killer, KillingTimer
from multilock.kernel.workers import ThreadWorkers

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

# time.monotonic() stops while the machine sleeps, and a server's clock does not.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
now: Callable[[], float] = partial(time.clock_gettime, _CLOCK)
"""Seconds on the clock of every deadline in multilock: it counts suspended time and no step of the wall clock."""


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

    def start(self) -> None: ...
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
    def spawn(self, run: Callable[[], None], name: str) -> None: ...
    def workers(self, name: str, limit: int, later: Callable[[Callable[[], None]], None]) -> Workers: ...
    def ticker(self, step: Callable[[], float], died: Callable[[BaseException], None], name: str) -> Ticker: ...
    def killer(self) -> Killer:
        """Raises CapabilityMissing."""


inside: set[int] = set()
"""Threads that call a backend now, and so may hold what is its own, and those that keep time."""


def call_inside(call: Callable[..., R], *args: Any) -> R:
    """The only way into a backend. That the process can have no more threads (one of the backend's own, before its
    request or after) is BackendUnavailable."""
    thread = get_ident()
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

    now = staticmethod(now)
    wall = staticmethod(lambda: time.time_ns() // 1000)
    uniform = staticmethod(random.uniform)

    def event(self) -> Event:
        return threading.Event()

    def bell(self) -> ThreadBell:
        return _LockBell()

    def spawn(self, run: Callable[[], None], name: str) -> None:
        threading.Thread(target=run, name=name, daemon=True).start()

    def workers(self, name: str, limit: int, later: Callable[[Callable[[], None]], None]) -> Workers:
        return ThreadWorkers(self.spawn, name, limit, later)

    def killer(self) -> Killer:
        return KillingTimer(_CLOCK)

    def ticker(self, step: Callable[[], float], died: Callable[[BaseException], None], name: str) -> Ticker:
        return _ThreadTicker(self, step, died, name)


class _LockBell:
    """A lock that is free while the bell has rung: two thirds of the time of `threading.Event`, and safe in a signal
    handler."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def ring(self) -> None:
        try:
            self._lock.release()
        except RuntimeError:
            return  # it has rung already

    def wait(self, seconds: float) -> bool:
        return self._lock.acquire(timeout=max(min(seconds, threading.TIMEOUT_MAX), 0.0))


class _ThreadTicker:
    def __init__(self, runtime: Threads, step: Callable[[], float], died: Callable[[BaseException], None], name: str):
        self._step = step
        self._died = died
        self._wakeup = _LockBell()
        self._planned = math.inf  # what a poke is compared with; inf while the step decides, so that none is lost
        self._due = now()  # when the present or next step should have begun
        self._closed = False
        self._spawn = partial(runtime.spawn, partial(call_inside, self._run), name)  # a finalizer must not wait in it

    def start(self) -> None:
        self._spawn()

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
            while not self._closed:
                self._planned = math.inf
                at = self._step()
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
