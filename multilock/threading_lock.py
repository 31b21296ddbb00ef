"""A distributed lock for code that expects a `threading.Lock`; ``DistributedLock.as_threading_lock()`` returns it."""

from __future__ import annotations

import sys
from itertools import count
from types import FrameType, TracebackType
from typing import TYPE_CHECKING
from weakref import ref

from multilock import system
from multilock.errors import MultilockError, NotHeld
from multilock.kernel.holding import HELD, LOST, EndOfBody
from multilock.kernel.no_pickling import OfThisProcess
from multilock.kernel.scopes import WithEntry
from multilock.names import check_timeout

if TYPE_CHECKING:
    from multilock.lock import HeldLease, Lock

__all__ = ["ThreadingLock"]

TIDY_AT = 32  # entries; a lock that has so many drops the entries of threads that have ended


class _Thread:
    """Identifies a thread. This object ends with its thread, while the number of an ended thread may be used again for
    another thread."""

    __slots__ = ("__weakref__",)


_here = system.local()


def _this_thread() -> ref[_Thread]:
    thread: _Thread | None = getattr(_here, "thread", None)
    if thread is None:
        thread = _here.thread = _Thread()
    return ref(thread)


_Key = tuple[ref[_Thread], int]  # the thread that acquired, and a number for each acquire


class ThreadingLock(OfThisProcess):
    """A `threading.Lock` over a distributed lock: any thread may release. Over a reentrant lock it works as a
    `threading.RLock`.

    The loss of the lock is never hidden: ``release()`` and the end of ``with`` raise LockLost in the thread that
    acquired it, even if another thread has acquired it since.
    """

    def __init__(self, lock: Lock) -> None:
        self._lock = lock
        self._reentrant = lock._want.reentrant
        self._numbers = count()
        # One entry for each acquire without a release. There may be more entries than holders, because the entry of a
        # lost lease stays until its thread releases the lock.
        self._taken: dict[_Key, WithEntry[HeldLease]] = {}
        self._tidy_at = TIDY_AT

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Acquire the lock as `threading.Lock.acquire` does, with ``timeout`` in seconds; -1 waits forever.

        Unlike that method it may raise BackendUnavailable, BackendRejected and ClientClosed.
        """
        if not isinstance(timeout, (int, float)):
            raise TypeError(f"timeout must be a number of seconds, not {timeout!r:.60}: give -1 to wait forever")
        if not blocking and timeout != -1:
            raise ValueError("can't specify a timeout for a non-blocking call")
        if timeout < 0 and timeout != -1:
            raise ValueError("timeout value must be a non-negative number")
        if timeout > system.TIMEOUT_MAX:
            raise OverflowError("timeout value is too large")
        return self._take(0 if not blocking else None if timeout == -1 else timeout)

    def _take(self, timeout: float | None, frame: FrameType | None = None) -> bool:
        """Acquire the lock. ``frame`` is that of the ``with`` statement."""
        key = _this_thread(), next(self._numbers)
        lease = self._lock._acquire(check_timeout(timeout))
        if lease is None:
            return False
        try:
            self._taken[key] = WithEntry(lease, frame)
            if len(self._taken) >= self._tidy_at:
                self._tidy()
        except BaseException:  # interrupted: no caller has the lease to release it
            self._taken.pop(key, None)
            self._lock._kernel.releases.take_back(lease)
            raise
        lease._open += 1  # each acquire counts as the body of a `with`, whose end releases the lease
        return True

    def _tidy(self) -> None:
        """Drop the lost leases of threads that ended without a release."""
        for key, entry in list(self._taken.items()):
            if key[0]() is None and entry.lease._is_lost():
                self._taken.pop(key, None)
        self._tidy_at = max(TIDY_AT, 2 * len(self._taken))

    def release(self) -> None:
        """Release the lock. Raises NotHeld (a RuntimeError) if it is not acquired, and LockLost if it was lost."""
        self.__exit__(None, None, None)  # `__exit__` raises LockLost, and finds no `with` statement in this frame

    def locked(self) -> bool:
        """Return whether anybody holds the lock. Asks the backend, unless it is held through this object."""
        return self._is_held() or self._lock.is_locked()

    def __enter__(self) -> bool:
        return self._take(None, sys._getframe(1))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        key: _Key | None = None
        lease: HeldLease | None = None
        end: EndOfBody | None = None
        try:
            end = EndOfBody()
            for key, entry in self._mine(sys._getframe(1)):
                lease = entry.lease
                if self._taken.pop(key, None):  # two threads that release at the same time release different entries
                    break
                lease = None
            if lease is None:
                raise self._not_acquired()
            lease._exit(end, error)
        except MultilockError:
            raise
        except BaseException:  # interrupted, perhaps before the release has begun: nothing else would release it
            if lease is None and (mine := self._mine(sys._getframe(1))):
                key, entry = mine[0]
                lease = entry.lease
            if lease and key:
                self._taken.pop(key, None)
                lease._release_after_interrupt(end or EndOfBody())
            raise

    def _mine(self, frame: FrameType | None = None) -> list[tuple[_Key, WithEntry[HeldLease]]]:
        """Return the entries that a release now applies to, newest first.

        These are the entries of the ``with`` statement in ``frame``, or else those of the calling thread. If there is
        none and the lock is not reentrant, an entry of any thread is returned. A ``with`` of another thread ends its
        own entry, so entries without a ``with`` come first. Among these entries, a lost lease is preferred to a held
        one.
        """
        taken = list(self._taken.items())[::-1]
        thread = _this_thread()
        mine = [(key, entry) for key, entry in taken if frame and entry.frame is frame]
        mine = mine or [(key, entry) for key, entry in taken if key[0] is thread]
        if mine or self._reentrant:
            return mine
        others = [(key, entry) for key, entry in taken if entry.lease.stage in (HELD, LOST)]
        others = [each for each in others if each[1].frame is None] or others
        return ([(key, entry) for key, entry in others if entry.lease._is_lost()] or others)[:1]

    def _not_acquired(self) -> NotHeld:
        return NotHeld(
            f"the lock {self._lock.name!r} cannot be released, because it is not acquired",
            name=self._lock.name,
            backend=self._lock._kernel.scheme,
        )

    def _is_held(self) -> bool:
        return any(entry.lease.is_held() for entry in list(self._taken.values()))

    def __repr__(self) -> str:
        held = " held" if self._is_held() else ""
        return f"<ThreadingLock {self._lock.name!r} in {self._lock._kernel.scheme}{held}>"

    # The private methods of an RLock that threading.Condition calls

    def _is_owned(self) -> bool:
        mine = self._mine()
        if mine and sys._getframe(1).f_code.co_name == "wait":
            # Raise LockLost here, before the Condition has added a waiter. Otherwise the Condition would keep that
            # waiter forever, and notify it in place of another waiter.
            mine[0][1].lease.check()
        return bool(mine)

    def _release_save(self) -> list[_Key]:
        """Release every level.

        The leases stay in ``_taken`` until `_acquire_restore` replaces them. So if a wait() cannot reacquire the lock,
        the ``with`` around it still ends with its own lease, not with a lease of another thread.
        """
        mine = self._mine()
        for _, entry in mine:
            entry.lease.__exit__(None, None, None)
        return [key for key, _ in mine]

    def _acquire_restore(self, keys: list[_Key]) -> None:
        for key in keys:
            self.acquire()
            self._taken.pop(key, None)
