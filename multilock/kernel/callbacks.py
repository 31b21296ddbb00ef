"""Calls into the user's code, on threads of their own: a callback that hangs or raises harms nothing else."""

from __future__ import annotations

import functools
import inspect
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from multilock import system
from multilock.kernel.runtime import wait_until
from multilock.telling import logger

if TYPE_CHECKING:
    from multilock.kernel.runtime import Runtime
    from multilock.kernel.timers import Timers

__all__ = ["Callbacks", "ThreadCallbacks", "call_in_thread", "call_safely", "check_callback", "runs"]

THREADS = 64  # a thousand losses do not need a thousand threads …
HUNG = 0.1  # … but seconds after which a callback no longer keeps another from starting


class Callbacks(Protocol):
    """Where a face runs its user's callbacks. ``start`` returns at once and never raises."""

    def start(self, callback: Callable[..., object], *args: Any) -> None: ...

    def start_each(self, callback: Callable[..., object], following: Callable[[], object | None]) -> None:
        """Call it with what ``following()`` gives, one after the other, until that is None."""

    def wait(self, timeout: float) -> bool:
        """Whether all that was started had ended within ``timeout`` seconds."""


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
        call_safely(callback, *args)
    except BaseException:
        logger.exception("the callback %r tried to end its thread", callback)


class _Call:
    __slots__ = ("args", "begun", "callback", "started")

    def __init__(self, callback: Callable[..., object], args: tuple[Any, ...]) -> None:
        self.callback = callback
        self.args = args
        self.begun = False
        self.started = 0.0


class ThreadCallbacks:
    """At most 64 young callbacks at once; one that has run for 0.1 s no longer counts."""

    def __init__(self, runtime: Runtime, timers: Timers) -> None:
        self._runtime = runtime
        self._timers = timers
        self._lock = system.RLock()
        self._young: dict[_Call, None] = {}  # running and counted, oldest first
        self._queue: deque[_Call] = deque()
        self._unfinished: set[_Call] = set()
        self._relief_planned = False
        self._closed = False
        self._drains = runtime.workers("multilock-callback", THREADS)  # a busy program has events all the time

    def start(self, callback: Callable[..., object], *args: Any) -> None:
        call = _Call(callback, args)
        try:
            with self._lock:
                self._unfinished.add(call)
                if full := len(self._young) >= THREADS:
                    self._queue.append(call)
                else:
                    self._begin(call)
            if full:
                self._plan_relief()
            else:
                self._spawn(call)
        except BaseException:  # interrupted: its thread may have started or not, and whichever comes first calls it
            self._relief_planned = False  # nor may its timer
            self._put_back(call)
            self._plan_relief()
            raise

    def start_each(self, callback: Callable[..., object], following: Callable[[], object | None]) -> None:
        call = _Call(callback, ())

        def call_each() -> None:
            try:
                while (argument := following()) is not None:
                    call_in_thread(callback, argument)
            finally:
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
        return wait_until(self._runtime, lambda: not self._unfinished, timeout)

    def _begin(self, call: _Call) -> None:
        call.started = self._runtime.now()
        self._young[call] = None

    def _spawn(self, call: _Call) -> None:
        self._runtime.spawn(lambda: self._run(call), "multilock-callback")

    def _put_back(self, call: _Call) -> None:
        with self._lock:
            if call.begun:
                return
            self._unfinished.add(call)
            self._young.pop(call, None)
            self._queue.appendleft(call)
            planned, self._relief_planned = self._relief_planned, True
        if not planned:
            self._timers.at(self._runtime.now() + HUNG, self._relieve)

    def _run(self, first: _Call) -> None:
        call: _Call | None = first
        while call is not None:
            with self._lock:
                again, call.begun = call.begun, True
            if not again:
                call_in_thread(call.callback, *call.args)
            with self._lock:
                counted = self._young.pop(call, self) is None
                if not again:
                    self._unfinished.discard(call)
                # A thread that did not count any more was replaced already: it must not take a second place.
                call = self._queue.popleft() if counted and self._queue else None
                if call:
                    self._begin(call)

    def _plan_relief(self) -> None:
        with self._lock:
            if self._relief_planned or not self._queue or not self._young:
                return
            self._relief_planned = True
            oldest = next(iter(self._young)).started
        self._timers.at(oldest + HUNG, self._relieve)

    def _relieve(self) -> None:
        """Stop counting the callbacks that hang, and start others in their places."""
        started = []
        with self._lock:
            self._relief_planned = False
            limit = self._runtime.now() - HUNG
            while self._young and (oldest := next(iter(self._young))).started <= limit:
                del self._young[oldest]
            while self._queue and len(self._young) < THREADS:
                call = self._queue.popleft()
                self._begin(call)
                started.append(call)
        for call in started:
            self._spawn(call)
        self._plan_relief()
