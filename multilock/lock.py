"""The blocking face of one lock: `DistributedLock`, `Lease`, and the adapter to `threading.Lock`."""

from __future__ import annotations

import math
import sys
import threading
from itertools import count
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Never, Protocol, Self, runtime_checkable

from multilock.errors import MultilockError, NotHeld
from multilock.foreign import NamesOurs, refuse
from multilock.kernel.acquire import acquire
from multilock.kernel.face import run
from multilock.kernel.holding import HELD, LOST, Holding
from multilock.kernel.process import OfThisProcess
from multilock.kernel.scopes import Entered, Entry
from multilock.kernel.want import Want, want
from multilock.model import Claim, Granted, Loss
from multilock.names import check_timeout

if TYPE_CHECKING:
    from multilock.client import Client
    from multilock.kernel.core import Kernel

__all__ = ["DistributedLock", "Lease", "Lock", "ThreadingLock"]

_Key = tuple[int, int]  # the thread that acquired, and a number of its own for each acquire


class Lease(Holding):
    """One holding of a lock. A context manager: it is released at the end, and raises LockLost there if it was lost."""

    __slots__ = ()

    def release(self) -> bool:
        """Give it back. True: it was ours until we began to release; False: lost before, or released already.

        Never raises. Waits for one ``request_timeout`` at most; unanswered, it goes on in the background (True). A loss
        that is discovered here is a loss: ``on_lost`` runs and ``with`` raises LockLost. Of a reentrant lock every
        release counts down, and the last gives it back.
        """
        return run(self._kernel.giving_back.release(self))

    def renew(self) -> None:
        """One renewal now, which also asks whether the lock is still ours.

        Raises LockLost if it is not, NotHeld after a release, BackendUnavailable without an answer; the lease then
        goes on until its deadline.
        """
        run(self._kernel.renew(self))

    def wait_lost(self, timeout: float | None = None) -> Loss | None:
        """Block until the lease is lost; None when ``timeout`` seconds are over or it was released."""
        seconds = check_timeout(timeout)
        ended = self._kernel.runtime.bell()
        if self._at_end(ended.ring):
            ended.wait(math.inf if seconds is None else seconds)
            self._not_at_end(ended.ring)
        return self._loss if self._is_lost() else None

    def __enter__(self) -> Self:
        self.check()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        count = self._count
        try:
            self.release()
        except BaseException:
            self._release_after_interrupt(count)
            raise
        if self._is_lost():
            self._raise_lost(error)

    def _release_surely(self) -> None:
        """Release it also where an interrupt comes before that has begun: nobody else would."""
        count = self._count
        try:
            self.release()
        except BaseException:
            self._release_after_interrupt(count)
            raise

    def _release_after_interrupt(self, count: int) -> None:
        """``count``: how often it had been acquired before a release that may not have begun."""
        if self._count != count:
            return
        if count > 1:
            self.release()  # only counts down
        else:
            self._kernel.giving_back.later(self)


@runtime_checkable
class DistributedLock(Protocol):
    """A name in a place. Making one does no I/O; ``with lock as lease:`` waits for it and releases it at the end.

    Each ``with lock`` ends the lease that it began, in whatever thread its end runs (that of a generator may run in
    another). An exit stack that was given the lock object, or an ``__exit__`` called by hand, can only guess: what its
    thread entered last, else a lost lease, else the only one; NotHeld where there are several. Give it a lease:
    ``stack.enter_context(lock.acquire())``.
    """

    @property
    def name(self) -> str: ...

    @property
    def ttl(self) -> float:
        """Seconds, as given or the client's default; a lease tells what was granted."""

    def acquire(self, timeout: float | None = None) -> Lease:
        """Wait for the lock, ``timeout`` seconds in all (None or inf: for ever; 0: one try).

        Raises LockTimeout if it was still taken then; BackendUnavailable if the backend was silent for the client's
        ``outage_timeout`` or at the end of ``timeout``; BackendRejected; ClientClosed.
        """

    def try_acquire(self, timeout: float = 0) -> Lease | None:
        """Like `acquire`, with None instead of LockTimeout."""

    def release(self) -> bool:
        """Release the newest lease that this thread took through this object and has not given back.

        False if that was lost. Raises NotHeld if there is none.
        """

    def is_locked(self) -> bool:
        """Ask the backend: does anyone hold it?"""

    def is_held(self) -> bool:
        """From the clock: does this object hold a lease that is still valid, in whatever thread?"""

    def as_threading_lock(self) -> ThreadingLock:
        """A drop-in for `threading.Lock` (`threading.RLock` when reentrant)."""

    def __enter__(self) -> Lease: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Lock(OfThisProcess, NamesOurs):
    """A mutex; what `Client.lock` returns."""

    def __init__(self, client: Client, name: str, **options: Any) -> None:
        self._client = client
        self._kernel = client._kernel
        self._want = want(self._kernel, name, self._make, **options)
        self._entered: Entered[Lease] = Entered()
        self._newest: Lease | None = None

    def _make(self, kernel: Kernel, want: Want, claim: Claim, granted: Granted, unsure: bool) -> Lease:
        # At most one lease of a mutex is valid at a time, and it is the one made last.
        self._newest = lease = Lease(kernel, want, claim, granted, unsure)
        return lease

    @property
    def name(self) -> str:
        return self._want.name

    @property
    def ttl(self) -> float:
        return self._want.ttl

    def acquire(self, timeout: float | None = None, **theirs: Never) -> Lease:
        if theirs:
            raise refuse("acquire", theirs)
        seconds = check_timeout(timeout)
        if lease := self._acquire(seconds):
            return lease
        raise self._kernel.still_taken(self.name, seconds, self._client._scope().holds(self.name))

    def try_acquire(self, timeout: float = 0, **theirs: Never) -> Lease | None:
        if theirs:
            raise refuse("try_acquire", theirs)
        return self._acquire(check_timeout(timeout))

    def _acquire(self, timeout: float | None) -> Lease | None:
        scope = self._client._scope()
        want = self._want
        if want.reentrant and (held := scope.reenter(want)):
            if not self.is_held():  # else it holds this one, or a newer one of another thread
                self._newest = held
            return held
        lease = run(acquire(self._kernel, want, timeout, scope=scope))
        if lease is None:
            return None
        try:
            assert isinstance(lease, Lease)
            scope.push(lease)
        except BaseException:  # interrupted: nobody has it to release it
            self._kernel.giving_back.take_back(lease)
            raise
        return lease

    def release(self) -> bool:
        lease = self._client._scope().taken_through(self._want)
        if lease is None:
            raise self._kernel.not_held(self.name, "thread")
        return lease.release()

    def is_locked(self) -> bool:
        return self._client.inspect(self.name) is not None

    def is_held(self) -> bool:
        return self._newest is not None and self._newest.is_held()

    def as_threading_lock(self) -> ThreadingLock:
        return ThreadingLock(self)

    def __enter__(self) -> Lease:
        frame = sys._getframe(1)
        lease = self.acquire()
        entry: Entry[Lease] | None = None
        try:
            entry = Entry(lease, frame)
            self._entered.add(entry)
        except BaseException:  # interrupted: a `with` that has not begun releases nothing
            if entry:
                self._entered.discard(entry)
            if lease._count == 1:
                self._kernel.giving_back.take_back(lease)
            else:
                lease.release()  # only counts down
            raise
        return lease

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        entry: Entry[Lease] | None = None
        count = 0
        try:
            frame = sys._getframe(1)
            entry = self._entered.leave(frame, self._client._scope())
            if entry is None:
                raise self._kernel.not_held(self.name, "thread")
            count = entry.lease._count
            entry.lease.__exit__(kind, error, trace)
        except MultilockError:
            raise
        except BaseException:  # interrupted, perhaps before the release has begun: nobody else would do it
            entry = entry or self._entered.begun_by(sys._getframe(1))
            if entry:
                entry.lease._release_after_interrupt(count or entry.lease._count)
            raise
        finally:
            if entry:
                self._entered.discard(entry)

    def __repr__(self) -> str:
        return f"<Lock {self.name!r} in {self._kernel.scheme} ttl={self.ttl:g}{' held' if self.is_held() else ''}>"


class ThreadingLock(OfThisProcess):
    """`threading.Lock` over a distributed lock: any thread may release. `threading.RLock` over a reentrant one.

    A lock that was lost is not passed off as held: ``release()`` and the end of ``with`` raise LockLost, in the thread
    that acquired it, also where another has acquired it since.
    """

    def __init__(self, lock: Lock) -> None:
        self._lock = lock
        self._reentrant = lock._want.reentrant
        self._numbers = count()
        # One for each acquire that was not released. There may be more than the holder's: a thread that lost its lease
        # hears of it only when it releases.
        self._taken: dict[_Key, Entry[Lease]] = {}

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if not isinstance(timeout, (int, float)):
            raise TypeError(f"timeout must be a number of seconds, not {timeout!r:.60}: -1 waits for ever")
        if not blocking and timeout != -1:
            raise ValueError("can't specify a timeout for a non-blocking call")
        if timeout < 0 and timeout != -1:
            raise ValueError("timeout value must be a non-negative number")
        if timeout > threading.TIMEOUT_MAX:
            raise OverflowError("timeout value is too large")
        return self._take(0 if not blocking else None if timeout == -1 else timeout)

    def _take(self, timeout: float | None, frame: FrameType | None = None) -> bool:
        """``frame``: of the ``with`` statement."""
        key = threading.get_ident(), next(self._numbers)
        lease = self._lock._acquire(check_timeout(timeout))
        if lease is None:
            return False
        try:
            self._taken[key] = Entry(lease, frame)
        except BaseException:  # interrupted: nobody has it to release it
            self._taken.pop(key, None)
            lease._release_surely()
            raise
        return True

    def release(self) -> None:
        self._give_back(self._pop())

    def locked(self) -> bool:
        """Whether anybody holds it; asks the backend unless it is held through this object."""
        return self._is_held() or self._lock.is_locked()

    def __enter__(self) -> bool:
        return self._take(None, sys._getframe(1))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pop(sys._getframe(1)).__exit__(kind, error, trace)

    def _mine(self, frame: FrameType | None = None) -> list[tuple[_Key, Entry[Lease]]]:
        """What the ``with`` statement of this frame took; where there is none, what this thread took, newest first; and
        where it took nothing, of a plain lock what any thread took: one that is lost before the one that is held."""
        taken = list(self._taken.items())[::-1]
        thread = threading.get_ident()
        mine = [(key, entry) for key, entry in taken if frame and entry.frame is frame]
        mine = mine or [(key, entry) for key, entry in taken if key[0] == thread]
        if mine or self._reentrant:
            return mine
        others = [(key, entry) for key, entry in taken if entry.lease._state in (HELD, LOST)]
        return ([(key, entry) for key, entry in others if entry.lease._is_lost()] or others)[:1]

    def _pop(self, frame: FrameType | None = None) -> Lease:
        """Before it is given back: two threads that release at the same time do not release the same."""
        for key, _ in self._mine(frame):
            if entry := self._taken.pop(key, None):
                return entry.lease
        raise NotHeld(
            f"release of the lock {self._lock.name!r}, which is not acquired",
            name=self._lock.name,
            backend=self._lock._kernel.scheme,
        )

    def _give_back(self, lease: Lease) -> None:
        lease._release_surely()
        if lease._is_lost():
            raise lease._lock_lost()

    def _is_held(self) -> bool:
        return any(entry.lease.is_held() for entry in list(self._taken.values()))

    def __repr__(self) -> str:
        held = " held" if self._is_held() else ""
        return f"<ThreadingLock {self._lock.name!r} in {self._lock._kernel.scheme}{held}>"

    # What threading.Condition asks of an RLock

    def _is_owned(self) -> bool:
        return bool(self._mine())

    def _release_save(self) -> list[_Key]:
        """Give back every level. The leases stay in ``_taken`` until they are replaced: where a wait() does not get the
        lock back, its ``with`` still ends with what is its own, and not with the lease of another thread."""
        mine = self._mine()
        for _, entry in mine:
            self._give_back(entry.lease)
        return [key for key, _ in mine]

    def _acquire_restore(self, keys: list[_Key]) -> None:
        for key in keys:
            self.acquire()
            self._taken.pop(key, None)
