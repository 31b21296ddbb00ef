"""The one seam to threads, queues, clocks and chance.

No other module imports threading, queue, time, random, select or selectors (an architecture test says so), and all use
these names through this module: ``system.Lock()``. So a simulation that replaces them here runs the whole library in
virtual time. Threads are started by `multilock.kernel.worker` alone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from queue import Empty, Queue, SimpleQueue
from random import choice, uniform
from select import POLLIN, POLLOUT, poll
from selectors import EVENT_READ, DefaultSelector
from threading import TIMEOUT_MAX, Condition, Event, Lock, RLock, Thread, get_ident, local
from time import sleep

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
    "get_ident",
    "host",
    "local",
    "now",
    "pid",
    "poll",
    "sleep",
    "uniform",
    "urandom",
    "wall",
]

CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""The clock of every deadline. time.monotonic() stops while the machine sleeps, and a server's clock does not."""

now: Callable[[], float] = partial(time.clock_gettime, CLOCK)
"""Return the seconds on the clock of every deadline: it counts suspended time, and no step of the wall clock."""

pid = os.getpid
urandom = os.urandom


def host() -> str:
    """Return the name of this machine."""
    return os.uname().nodename


def wall() -> int:
    """Return the microseconds of the wall clock, which hosts can compare. No deadline depends on it."""
    return time.time_ns() // 1000
