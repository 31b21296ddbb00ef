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
from typing import Protocol

from multilock.workers import ThreadWorkers

__all__ = ["Bell", "Event", "Runtime", "Threads", "Ticker", "Workers", "now", "wait_until"]

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
    """Wakes the one thread that waits for it. A ring between two waits is not lost; several are one."""

    def set(self) -> None: ...
    def wait(self, seconds: float) -> None:
        """At most so many seconds, which may be inf."""


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
    def event(self) -> Event: ...
    def bell(self) -> Bell: ...
    def uniform(self, low: float, high: float) -> float: ...
    def spawn(self, run: Callable[[], None], name: str) -> None: ...
    def workers(self, name: str, limit: int) -> Workers: ...
    def ticker(self, step: Callable[[], float], died: Callable[[BaseException], None], name: str) -> Ticker: ...


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
    uniform = staticmethod(random.uniform)

    def event(self) -> Event:
        return threading.Event()

    def bell(self) -> Bell:
        return _LockBell()

    def spawn(self, run: Callable[[], None], name: str) -> None:
        threading.Thread(target=run, name=name, daemon=True).start()

    def workers(self, name: str, limit: int) -> Workers:
        return ThreadWorkers(self.spawn, name, limit)

    def ticker(self, step: Callable[[], float], died: Callable[[BaseException], None], name: str) -> Ticker:
        return _ThreadTicker(self, step, died, name)


class _LockBell:
    """A lock that is free while the bell has rung: two thirds of the time of `threading.Event`, and safe in a signal
    handler."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        try:
            self._lock.release()
        except RuntimeError:
            return  # it has rung already

    def wait(self, seconds: float) -> None:
        self._lock.acquire(timeout=max(min(seconds, threading.TIMEOUT_MAX), 0.0))


class _ThreadTicker:
    def __init__(self, runtime: Threads, step: Callable[[], float], died: Callable[[BaseException], None], name: str):
        self._step = step
        self._died = died
        self._wakeup = _LockBell()
        self._planned = math.inf  # what a poke is compared with; inf while the step decides, so that none is lost
        self._due = now()  # when the present or next step should have begun
        self._closed = False
        self._spawn = partial(runtime.spawn, self._run, name)

    def start(self) -> None:
        self._spawn()

    def poke(self, at: float) -> None:
        if at < self._planned:
            try:
                self._planned = at
                self._wakeup.set()
            except BaseException:  # interrupted: it may not have rung
                self._planned = math.inf
                raise

    def late(self) -> float:
        return max(0.0, now() - self._due)

    def close(self) -> None:
        self._closed = True
        self._wakeup.set()

    def _run(self) -> None:
        try:
            while not self._closed:
                self._planned = math.inf
                at = self._step()
                self._planned = self._due = at
                if (rest := at - now()) > 0:
                    self._wakeup.wait(rest)
                    self._due = min(at, now())
        except BaseException as error:
            self._due = -math.inf
            if not self._closed:
                self._died(error)
