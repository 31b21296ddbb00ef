"""Run the user's callbacks on separate threads, so that a callback that hangs or raises affects nothing else.

A face is the blocking or the asyncio API. The ticking thread is the thread of a client that watches deadlines, so
nothing may delay it.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

from multilock import system
from multilock.kernel.runtime import wait_until
from multilock.log_thread import logger
from multilock.model import Loss

if TYPE_CHECKING:
    from multilock.kernel.runtime import Runtime
    from multilock.kernel.timers import Timers

__all__ = ["CALLED", "Callbacks", "ThreadCallbacks", "call_in_thread", "call_safely", "check_callback", "runs"]

THREADS = 64  # the most callbacks that run at once: a thousand losses do not need a thousand threads
HUNG = 0.1  # seconds after which a running callback no longer counts towards THREADS
MOST = 1000  # the most callbacks that run at once while a queued callback must not wait longer

CALLED: ContextVar[object] = ContextVar("multilock_callback", default=None)
"""The callback call that this thread or task runs. If it closes the client, `Callbacks.wait` does not wait for it."""


class Callbacks(Protocol):
    """The methods by which a face runs the user's callbacks."""

    def start(self, callback: Callable[..., object], *args: Any) -> None:
        """Have another thread or a task call ``callback(*args)``, and return at once. `start` raises only if it is
        interrupted."""

    def start_each(self, callback: Callable[..., object], following: Callable[[], object | None]) -> None:
        """Call ``callback(argument)`` for each argument that ``following()`` returns, until it returns None. Only one
        call runs at a time, on another thread or task. `start_each` itself returns at once."""

    def gathering(self) -> AbstractContextManager[None]:
        """Return a context manager in which the ticking thread calls `start` many times. Callbacks started in it may
        share threads."""

    def wait(self, timeout: float) -> bool:
        """Wait until every callback has ended, except a callback from which this is called. Returns False at the
        timeout."""


def runs(kind: Callable[[Any], bool], function: Any) -> bool:
    """Return whether calling ``function`` runs a function of this kind.

    Looks through partials and static methods, and at the ``__call__`` of an object.
    """
    while isinstance(function, (functools.partial, staticmethod)):
        function = function.func if isinstance(function, functools.partial) else function.__func__
    return kind(function) or kind(type(function).__call__)


def check_callback(what: str, callback: object, *, asynchronous: bool) -> None:
    """Raise TypeError if ``callback`` is not a function that the blocking or asyncio client can call. ``what`` names it
    in the message."""
    if callback is None:
        return
    if not callable(callback):
        raise TypeError(f"{what} takes a function of one argument, not {callback!r:.60}")
    if not asynchronous and runs(inspect.iscoroutinefunction, callback):
        raise TypeError(f"{what} got a coroutine function, which only a client made by connect_async() can call")


def call_safely(callback: Callable[..., object], *args: Any) -> object:
    """Call ``callback(*args)`` and return its result, or None if it raises. The exception is logged."""
    try:
        return callback(*args)
    except Exception:
        logger.exception("the callback %r raised; it is not called again for this event", callback)
        return None


def call_in_thread(callback: Callable[..., object], *args: Any) -> None:
    """Call ``callback(*args)`` in a thread of multilock. The thread survives even a callback that calls sys.exit()."""
    try:
        refuse_awaitable(callback, call_safely(callback, *args))
    except BaseException:
        logger.exception("the callback %r tried to end its thread", callback)


def refuse_awaitable(callback: Callable[..., object], result: object) -> None:
    """Log an error if a callback of a blocking client returns an awaitable, which would never run."""
    if inspect.isawaitable(result):
        logger.error(
            "the callback %r returned %r, which a blocking client cannot await, so it does not run. Make the client "
            "with connect_async(), or give it a plain function",
            callback,
            result,
        )
        if inspect.iscoroutine(result):
            result.close()


def _nothing() -> None:
    """Stand in for a callback that was removed from its call."""


class _Call:
    """One call of a callback. Calls are sorted by the time at which they should begin."""

    __slots__ = ("args", "begin_by", "begun", "callback", "number", "started")

    def __init__(self, callback: Callable[..., object], args: tuple[Any, ...], begin_by: float, number: int) -> None:
        self.callback = callback
        self.args = args
        self.begin_by = begin_by
        self.number = number
        self.begun = False
        self.started = 0.0

    def __lt__(self, other: _Call) -> bool:
        return (self.begin_by, self.number) < (other.begin_by, other.number)


class ThreadCallbacks:
    """The callbacks of a blocking client. At most 64 run at once, not counting those that have run for more than 0.1 s.

    A lost callback should begin before the validity of its lease ends. If the callback has waited in the queue for half
    of the time until then, it gets a thread even if 64 run. The queue is in the order in which the callbacks reach this
    moment.
    """

    def __init__(self, runtime: Runtime, timers: Timers) -> None:
        self._runtime = runtime
        self._timers = timers
        self._lock = system.RLock()
        self._young: dict[_Call, None] = {}  # calls that have run for less than 0.1 s, the oldest first
        self._queue: list[_Call] = []  # a heap
        self._numbers = count()
        self._unfinished: set[_Call] = set()
        self._relief_at = math.inf  # when a timer calls `_relieve`
        self._gathering = False
        self._closed = False
        # Events come all the time, so the threads of this pool are kept for the next event.
        self._drains = runtime.workers("multilock-callback", THREADS)

    def start(self, callback: Callable[..., object], *args: Any) -> None:
        """See `Callbacks.start`."""
        now = self._runtime.now()
        until = args[0].valid_until if args and isinstance(args[0], Loss) else math.inf
        # If the call is late already, more threads do not help.
        begin_by = (now + until) / 2 if until > now else math.inf
        call = _Call(callback, args, begin_by, next(self._numbers))
        try:
            with self._lock:
                self._unfinished.add(call)
                heappush(self._queue, call)
                waits = self._gathering and self._queue[0].begin_by > now
            if not waits:
                self._relieve()
        except BaseException:
            # After an interrupt, the thread of the call may have started or not. So queue the call again: it still runs
            # only once.
            self._put_back([call])
            raise

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Collect calls of `start` first, so that short callbacks can share threads."""
        self._gathering = True
        try:
            yield
        finally:
            self._gathering = False
            self._relieve()

    def start_each(self, callback: Callable[..., object], following: Callable[[], object | None]) -> None:
        """See `Callbacks.start_each`."""
        call = _Call(callback, (), math.inf, 0)

        def call_each() -> None:
            CALLED.set(call)
            try:
                while (argument := following()) is not None:
                    call_in_thread(callback, argument)
            finally:
                CALLED.set(None)
                with self._lock:
                    self._unfinished.discard(call)

        with self._lock:
            if not self._closed:
                self._unfinished.add(call)
                self._drains.submit(call_each)
                return
        self.start(call_each)  # events that were under way when the client was closed are still delivered

    def close(self) -> None:
        """End the threads that wait for more events. Calls that were started still run to their end."""
        with self._lock:
            self._closed = True
        self._drains.close()

    def wait(self, timeout: float) -> bool:
        """See `Callbacks.wait`."""
        return wait_until(self._runtime, lambda: self._unfinished <= {CALLED.get()}, timeout)

    def _put_back(self, calls: list[_Call]) -> None:
        """After an interrupt, put each call that has not begun back into the queue."""
        with self._lock:
            # The timer must be set again, because the interrupt may have come before it was set.
            self._relief_at = math.inf
            for call in calls:
                if not call.begun:
                    self._unfinished.add(call)
                    self._young.pop(call, None)
                    heappush(self._queue, call)
        self._timers.at(self._runtime.now() + HUNG, self._relieve)

    def _run(self, first: _Call) -> None:
        """Run queued calls on this thread until the queue is empty, or until another thread has replaced this one."""
        call: _Call | None = first
        while call is not None:
            with self._lock:
                again, call.begun = call.begun, True
            if not again:
                CALLED.set(call)
                # Remove the callback from the call here. Otherwise the thread that started this thread could drop the
                # last reference to the callback: see `Once`.
                callback, args, call.callback, call.args = call.callback, call.args, _nothing, ()
                call_in_thread(callback, *args)
                del callback, args
                CALLED.set(None)
            with self._lock:
                counted = self._young.pop(call, self) is None
                if not again:
                    self._unfinished.discard(call)
                # If this call no longer counts as running, another thread has already replaced this one, so this thread
                # ends.
                call = self._next() if counted and self._queue else None

    def _next(self) -> _Call:
        call = heappop(self._queue)
        call.started = self._runtime.now()
        self._young[call] = None
        return call

    def _relieve(self) -> None:
        """Stop counting callbacks that hang. Then start queued callbacks, as long as threads are free or a callback
        must not wait longer."""
        started: list[_Call] = []
        try:
            with self._lock:
                now = self._runtime.now()
                if now >= self._relief_at:
                    self._relief_at = math.inf
                while self._young and (oldest := next(iter(self._young))).started <= now - HUNG:
                    del self._young[oldest]
                while self._queue and len(self._young) < (MOST if self._queue[0].begin_by <= now else THREADS):
                    started.append(self._next())
            for call in started:
                self._runtime.spawn(partial(self._run, call), "multilock-callback")
            self._plan_relief()
        except BaseException:  # interrupted
            self._put_back(started)
            raise

    def _plan_relief(self) -> None:
        """Set a timer for the next call of `_relieve`, if something is queued."""
        with self._lock:
            if not self._queue:
                return
            at = self._queue[0].begin_by
            if self._young:
                hangs_at = next(iter(self._young)).started + HUNG
                at = hangs_at if len(self._young) >= MOST else min(at, hangs_at)
            if at >= self._relief_at:
                return
            self._relief_at = at
        self._timers.at(at, self._relieve)
