"""The only module that imports threads, queues, clocks and random numbers.

An architecture test checks that no other module imports threading, queue, time, random, select or selectors. Other
modules use ``system.Lock()``, for example. So a simulation that replaces the names here runs the whole library in
virtual time. A bell wakes a thread that waits for it. Only `multilock.kernel.worker` starts threads.
"""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from operator import methodcaller
from queue import Empty, Queue, SimpleQueue
from random import choice, uniform
from selectors import EVENT_READ, EVENT_WRITE, DefaultSelector
from threading import TIMEOUT_MAX, Condition, Event, Lock, RLock, Thread, current_thread, get_ident, local, main_thread
from time import sleep
from typing import Any, TypeVar

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
    "LockBell",
    "PipeBell",
    "Queue",
    "RLock",
    "SimpleQueue",
    "Taking",
    "Thread",
    "choice",
    "current_thread",
    "get_ident",
    "host",
    "is_interruptible",
    "is_owned",
    "local",
    "now",
    "patched_by",
    "patched_late",
    "pid",
    "poll",
    "sleep",
    "take",
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
        """Return the ready descriptors with their events, after at most ``milliseconds`` ms (None: no limit)."""
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
    """Return the library that replaced threads after this module was imported, or None.

    The locks of multilock then block real threads, so a greenlet that waits for one of them stops all other greenlets.
    """
    by = patched_by()
    return None if by == _PATCHED_BY else by


pid = os.getpid
urandom = os.urandom


T = TypeVar("T")


def take(source: Callable[[bool, float], T], seconds: float, into: list[T]) -> None:
    """Append to ``into`` the result of ``source``, which is ``lock.acquire`` or ``queue.get``. Wait at most
    ``seconds``.

    An interrupt (Ctrl-C, a signal handler that raises) arrives when a call returns or a Python function begins. So
    after ``taken = lock.acquire()`` an interrupt could come between the acquire and the ``try`` that releases the lock,
    and the lock would stay taken forever. Here no interrupt comes between the acquire and the record of it, because C
    code does both. So call this inside the ``try``. The ``finally`` must then undo what ``into`` shows, by a single
    call.
    """
    into += map(source, [True], [max(0.0, seconds)])


class Taking:
    """Hold a lock in ``with Taking(lock, seconds, refusal):``. If it is not free in time, raise ``refusal()``.

    An interrupt at any moment leaves the lock either held in the block or free, as with ``with lock:``, which has no
    time limit. `take` explains why no interrupt can leave the lock taken. The release is the lock's own ``__exit__``,
    because an interrupt could also come when a Python function begins.
    """

    __slots__ = ("__exit__", "_lock", "_refusal", "_seconds")

    __exit__: Callable[..., None]

    def __init__(self, lock: Any, seconds: float, refusal: Callable[[], Exception]) -> None:
        self._lock = lock
        self._seconds = seconds
        self._refusal = refusal
        self.__exit__ = lock.__exit__

    def __enter__(self) -> None:
        taken: list[bool] = []
        # `take` is not called here: an interrupt could come after the lock was taken, and before `take` has returned.
        taken += map(self._lock.acquire, [True], [max(0.0, self._seconds)])
        if taken != [True]:
            raise self._refusal()


def is_interruptible() -> bool:
    """Return whether an interrupt can arrive in this thread: CPython runs signal handlers in the main thread only.

    Under gevent or eventlet, signal handlers run in any greenlet. So no greenlet is safer than another, and this
    returns False.
    """
    return get_ident() == main_thread().ident and _PATCHED_BY is None


class LockBell:
    """A bell made of a lock. A ring frees the lock, and the wait that notices the ring takes it.

    A ring and a wait take two thirds of the time that they take with `threading.Event`. A signal handler may ring the
    bell, and an interrupt of the thread that waits cannot break the bell.
    """

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = Lock()
        self._lock.acquire()

    def ring(self) -> None:
        """End the wait. If no thread waits now, end the next wait at once."""
        try:
            self._lock.release()
        except RuntimeError:  # the bell has rung already
            return

    def wait(self, seconds: float) -> bool:
        """Wait until the bell rings, at most ``seconds``. Returns whether it rang."""
        return self._lock.acquire(timeout=max(min(seconds, TIMEOUT_MAX), 0.0))


class PipeBell:
    """A bell for a thread that waits in a selector: register its `fileno`. Any thread may ring it."""

    __slots__ = ("_reads", "_writes")

    def __init__(self) -> None:
        self._reads, self._writes = os.pipe()
        os.set_blocking(self._reads, False)
        os.set_blocking(self._writes, False)

    def fileno(self) -> int:
        """Return the descriptor that is readable once the bell has rung."""
        return self._reads

    def ring(self) -> None:
        """Make the descriptor readable."""
        with suppress(BlockingIOError):  # the pipe is full, so the bell has rung
            os.write(self._writes, b"!")

    def clear(self) -> None:
        """Make the descriptor unreadable until the next ring."""
        with suppress(BlockingIOError):
            os.read(self._reads, 4096)

    def close(self) -> None:
        """Close both descriptors."""
        os.close(self._reads)
        os.close(self._writes)


def host() -> str:
    """Return the name of this machine."""
    return os.uname().nodename


def wall() -> int:
    """Return the microseconds of the wall clock, for comparisons between hosts. No deadline depends on it."""
    return time.time_ns() // 1000
