"""Calls into gRPC, kept out of the thread that an interrupt can reach.

gRPC takes locks in Python code. An interrupt there (Ctrl-C, a signal handler that raises) can leave a lock taken
forever, and then no call of this process ends. CPython interrupts only the main thread. So the main thread hands its
calls to another thread, and waits for it in a way that is safe against interrupts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from multilock import BackendUnavailable, system
from multilock.backend import call_inside, start_worker

__all__ = ["Aside"]

IDLE = 15.0  # seconds until a thread without calls ends
GRACE = 5.0  # seconds after the end of its time limit until a call counts as failed

R = TypeVar("R")


class _Handed(Generic[R]):
    """One call, and its outcome. Only the thread that empties ``left`` first may run or cancel the call."""

    __slots__ = ("bell", "call", "error", "left", "result")

    def __init__(self, call: Callable[[], R]) -> None:
        self.call = call
        self.bell = system.LockBell()
        self.left = [None]
        self.result: R
        self.error: BaseException | None = None

    def is_mine(self) -> bool:
        try:
            self.left.pop()
        except IndexError:
            return False
        return True

    def run(self) -> None:
        if not self.is_mine():
            return
        try:
            # With `call_inside`, a finalizer that runs during the call never waits for a lock of the call.
            self.result = call_inside(self.call)
        except BaseException as error:
            self.error = error
        self.bell.ring()


class Aside:
    """Runs the main thread's calls on another thread. If an interrupt ends the wait for a call, the call may continue
    there.

    A second thread exists only while a signal handler makes a call during another call of the main thread.
    """

    def __init__(self) -> None:
        self._handed: system.SimpleQueue[_Handed[Any] | None] = system.SimpleQueue()
        self._free: set[int] = set()  # the waiting threads; only these threads change the set
        self._closed = False

    def __call__(self, call: Callable[[], R], within: float) -> R:
        """Return ``call()``. The call must end by itself within ``within`` seconds."""
        if not system.is_interruptible():
            return call()
        handed = _Handed(call)
        try:
            self._handed.put(handed)
            if self._handed.qsize() > len(self._free):
                start_worker(self._run, "multilock-etcd-request", once=True, or_here=True)
            rang = handed.bell.wait(max(within, 0.0) + GRACE)
        except BaseException:
            handed.is_mine()  # if the call has not begun, it never will
            raise
        if not rang:
            raise BackendUnavailable("the request has not ended in its time", unknown=not handed.is_mine())
        if handed.error is not None:
            raise handed.error
        return handed.result

    def close(self) -> None:
        """End the waiting thread. A later call starts another thread, which ends after that call."""
        self._closed = True
        self._handed.put(None)

    def _run(self) -> None:
        me, calls, free = system.get_ident(), self._handed, True
        while True:
            if free:
                self._free.add(me)
            waits = free and not (self._closed or system.is_interruptible())
            try:
                handed = calls.get(timeout=IDLE if waits else 0.0)
            except system.Empty:
                if not free:
                    return
                free = False  # check once more, because a new call may rely on this thread
                self._free.discard(me)
                continue
            self._free.discard(me)
            if handed:
                handed.run()
            free = True
            del handed  # otherwise the waiting thread would keep the call's objects alive
