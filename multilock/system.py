"""The only module that imports threads, queues, clocks and random numbers.

No other module imports threading, queue, time, random, select or selectors: an architecture test checks that. All use
these names through this module: ``system.Lock()``. So a simulation that replaces them here runs the whole library in
virtual time. Only `multilock.kernel.worker` starts threads.
"""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable
from functools import partial
from operator import methodcaller
from queue import Empty, Queue, SimpleQueue
from random import choice, uniform
from selectors import EVENT_READ, EVENT_WRITE, DefaultSelector
from threading import TIMEOUT_MAX, Condition, Event, Lock, RLock, Thread, current_thread, get_ident, local
from time import sleep
from typing import Any

__all__ = [
    "CLOCK",
    "EVENT_READ",
    "POLLIN",
    "POLLOUT",
    "TIMEOUT_MAX",
    "Condition",
    "DefaultSelector",
    "Empty",
    "Event",
    "Lock",
    "Queue",
    "RLock",
    "SimpleQueue",
    "Thread",
    "choice",
    "current_thread",
    "get_ident",
    "host",
    "is_owned",
    "local",
    "now",
    "patched_by",
    "patched_late",
    "pid",
    "poll",
    "sleep",
    "uniform",
    "urandom",
    "wall",
]

CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""The clock of every deadline. time.monotonic() stops while the machine sleeps, but a server's clock does not."""

now: Callable[[], float] = partial(time.clock_gettime, CLOCK)
"""Return the seconds on the clock of every deadline. It counts suspended time, and ignores steps of the wall clock."""

is_owned: Callable[[RLock], bool] = methodcaller("_is_owned")
"""Return whether the calling thread holds this RLock, as `threading.Condition` asks it."""

POLLIN, POLLOUT = getattr(select, "POLLIN", 1), getattr(select, "POLLOUT", 4)


class Poll:
    """The part of select.poll that we use, for an interpreter from which eventlet has removed it."""

    def __init__(self) -> None:
        self._selector = DefaultSelector()

    def register(self, file: Any, events: int) -> None:
        """Watch ``file`` for ``events``, or change its events."""
        wanted = EVENT_READ * bool(events & POLLIN) | EVENT_WRITE * bool(events & POLLOUT)
        try:
            self._selector.register(file, wanted)
        except KeyError:
            self._selector.modify(file, wanted)

    def poll(self, milliseconds: float | None = None) -> list[tuple[int, int]]:
        """Return the ready descriptors with their events, after at most so many milliseconds (None: no limit)."""
        ready = self._selector.select(None if milliseconds is None else milliseconds / 1000)
        return [
            (key.fd, POLLIN * bool(events & EVENT_READ) | POLLOUT * bool(events & EVENT_WRITE)) for key, events in ready
        ]


poll: Callable[[], Any] = getattr(select, "poll", Poll)


def patched_by() -> str | None:
    """Return the library that replaced threads by greenlets in this interpreter, or None."""
    gevent: Any = sys.modules.get("gevent.monkey")
    if gevent is not None and gevent.is_module_patched("threading"):
        return "gevent"
    eventlet: Any = sys.modules.get("eventlet.patcher")
    return "eventlet" if eventlet is not None and eventlet.is_monkey_patched("thread") else None


_PATCHED_BY = patched_by()


def patched_late() -> str | None:
    """Return the library that did so after this module was imported, or None.

    With it, all greenlets would wait in one real lock.
    """
    by = patched_by()
    return None if by == _PATCHED_BY else by


pid = os.getpid
urandom = os.urandom


def host() -> str:
    """Return the name of this machine."""
    return os.uname().nodename


def wall() -> int:
    """Return the microseconds of the wall clock, for comparisons between hosts. No deadline depends on it."""
    return time.time_ns() // 1000
