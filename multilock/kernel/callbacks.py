"""Calls into the user's code, on threads of their own: a callback that hangs or raises harms nothing else."""

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
from multilock.model import Loss
from multilock.telling import logger

if TYPE_CHECKING:
    from multilock.kernel.runtime import Runtime
    from multilock.kernel.timers import Timers

__all__ = ["CALLED", "Callbacks", "ThreadCallbacks", "call_in_thread", "call_safely", "check_callback", "runs"]

THREADS = 64  # a thousand losses do not need a thousand threads …
HUNG = 0.1  # … but seconds after which a callback no longer keeps another from starting
MOST = 1000  # threads at once where deadlines are near

CALLED: ContextVar[object] = ContextVar("multilock_callback", default=None)
"""Which call of a user's callback this thread or task is. Who closes the client from there does not wait for itself."""


class Callbacks(Protocol):
    """Where a face runs its user's callbacks. ``start`` returns at once and never raises."""

    def start(self, callback: Callable[..., object], *args: Any) -> None: ...

    def start_each(self, callback: Callable[..., object], following: Callable[[], object | None]) -> None:
        """Call it with what ``following()`` gives, one after the other, until that is None."""

    def gathering(self) -> AbstractContextManager[None]:
        """Around many calls of `start`, by the ticking thread."""

    def wait(self, timeout: float) -> bool:
        """Whether all that was started had ended within ``timeout`` seconds, but for a call that asks this itself."""


def runs(kind: Callable[[Any], bool], function: Any) -> bool:
    """Whether a call runs a function of this kind: itself, a partial's, a static method's, an object's ``__call__``."""
    while isinstance(function, (functools.partial, staticmethod)):
        function = function.func if isinstance(function, functools.partial) else function.__func__
    return kind(function) or kind(type(function).__call__)


def check_callback(what: str, callback: object, *, asynchronous: bool) -> None:
    """Raise TypeError for what nobody could call with one argument, or await."""
    if callback is None:
        return
    if not callable(callback):
        raise TypeError(f"{what} takes a function of one argument, not {callback!r:.60}")
    if not asynchronous and runs(inspect.iscoroutinefunction, callback):
        raise TypeError(f"{what} got a coroutine function, which only a client of connect_async() can call")


def call_safely(callback: Callable[..., object], *args: Any) -> object:
    try:
        return callback(*args)
    except Exception:
        logger.exception("the callback %r raised; it is not called again for this event", callback)
        return None


def call_in_thread(callback: Callable[..., object], *args: Any) -> None:
    """In a thread of ours: sys.exit() ends no process from here, and must not end who calls."""
    try:
        refuse_awaitable(callback, call_safely(callback, *args))
    except BaseException:
        logger.exception("the callback %r tried to end its thread", callback)


def refuse_awaitable(callback: Callable[..., object], result: object) -> None:
    """A blocking client has no loop: a coroutine that a callback returns would never run, and nobody would know."""
    if inspect.isawaitable(result):
        logger.error(
            "the callback %r returned %r, which a blocking client cannot await: nothing of it runs. Make the client "
            "with connect_async(), or give it a plain function",
            callback,
            result,
        )
        if inspect.iscoroutine(result):
            result.close()


class _Call:
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
    """At most 64 young callbacks at once; one that has run for 0.1 s no longer counts.

    A lost callback has to begin before the validity of its lease ends. The first to end comes first, and one that has
    waited for half of its time begins beside the 64.
    """

    def __init__(self, runtime: Runtime, timers: Timers) -> None:
        self._runtime = runtime
        self._timers = timers
        self._lock = system.RLock()
        self._young: dict[_Call, None] = {}  # running and counted, oldest first
        self._queue: list[_Call] = []  # a heap
        self._numbers = count()
        self._unfinished: set[_Call] = set()
        self._relief_at = math.inf  # a timer is set for then
        self._gathering = False
        self._closed = False
        self._drains = runtime.workers("multilock-callback", THREADS)  # a busy program has events all the time

    def start(self, callback: Callable[..., object], *args: Any) -> None:
        now = self._runtime.now()
        until = args[0].valid_until if args and isinstance(args[0], Loss) else math.inf
        begin_by = (now + until) / 2 if until > now else math.inf  # late already: nothing is won by more threads
        call = _Call(callback, args, begin_by, next(self._numbers))
        try:
            with self._lock:
                self._unfinished.add(call)
                heappush(self._queue, call)
                waits = self._gathering and self._queue[0].begin_by > now
            if not waits:
                self._relieve()
        except BaseException:  # interrupted: its thread may have started or not, and whichever comes first calls it
            self._put_back([call])
            raise

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Many are going to be started: no thread for each of them, if they do nothing for long."""
        self._gathering = True
        try:
            yield
        finally:
            self._gathering = False
            self._relieve()

    def start_each(self, callback: Callable[..., object], following: Callable[[], object | None]) -> None:
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
        self.start(call_each)  # what was under way as the client was closed is told all the same

    def close(self) -> None:
        """Threads that wait for more events end; what was started is still done."""
        with self._lock:
            self._closed = True
        self._drains.close()

    def wait(self, timeout: float) -> bool:
        return wait_until(self._runtime, lambda: self._unfinished <= {CALLED.get()}, timeout)

    def _put_back(self, calls: list[_Call]) -> None:
        with self._lock:
            self._relief_at = math.inf  # its timer may not have been set
            for call in calls:
                if not call.begun:
                    self._unfinished.add(call)
                    self._young.pop(call, None)
                    heappush(self._queue, call)
        self._timers.at(self._runtime.now() + HUNG, self._relieve)

    def _run(self, first: _Call) -> None:
        call: _Call | None = first
        while call is not None:
            with self._lock:
                again, call.begun = call.begun, True
            if not again:
                CALLED.set(call)
                call_in_thread(call.callback, *call.args)
                CALLED.set(None)
            with self._lock:
                counted = self._young.pop(call, self) is None
                if not again:
                    self._unfinished.discard(call)
                # A thread that did not count any more was replaced already: it must not take a second place.
                call = self._next() if counted and self._queue else None

    def _next(self) -> _Call:
        call = heappop(self._queue)
        call.started = self._runtime.now()
        self._young[call] = None
        return call

    def _relieve(self) -> None:
        """Stop counting the callbacks that hang, start others in their places, and whatever may not wait any longer."""
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
