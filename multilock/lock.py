"""The blocking face of one lock: `DistributedLock`, and what `Client.lock` makes of it."""

from __future__ import annotations

import math
import sys
from collections.abc import Coroutine
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Never, Protocol, Self, TypeVar, cast, runtime_checkable

from multilock.errors import MultilockError
from multilock.foreign import ForWith, NamesOurs, refuse
from multilock.kernel.acquire import acquire
from multilock.kernel.face import run
from multilock.kernel.handing import Handing
from multilock.kernel.holding import AnyHeld, Holding
from multilock.kernel.process import OfThisProcess
from multilock.kernel.scopes import Entered, Entry, Scope
from multilock.kernel.want import Make, Want, want
from multilock.lease import Lease
from multilock.model import Claim, Granted, Loss
from multilock.names import check_timeout
from multilock.threading_lock import ThreadingLock

if TYPE_CHECKING:
    from multilock.client import Client
    from multilock.kernel.core import Kernel

__all__ = ["AnyLock", "DistributedLock", "HeldLease", "Lock", "LockOfAFace"]

L = TypeVar("L", bound=AnyHeld)


class Waits(ForWith, AnyHeld, Lease):
    """What a blocking lease does, of one lock or of several."""

    __slots__ = ()

    def wait_lost(self, timeout: float | None = None) -> Loss[Self] | None:
        seconds = check_timeout(timeout)
        ended = self._kernel.runtime.bell()
        try:
            if self._at_end(ended.ring):
                ended.wait(math.inf if seconds is None else seconds)
        finally:
            self._not_at_end(ended.ring)
        return self._loss if self._is_lost() else None

    def __enter__(self) -> Self:
        try:
            self._check_at_entry()
        except MultilockError:
            raise
        except BaseException:  # interrupted: there will be no end of this `with`
            self._release_after_interrupt(self._count)
            raise
        return self

    def release(self) -> bool:
        return run(self._kernel.giving_back.release(self))

    def renew(self) -> None:
        run(self._kernel.renew(self))

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

    def _take_back(self) -> None:
        """Its acquire was interrupted before it could be handed out: nobody else would release it."""
        if self._count > 1:
            self.release()  # only counts down
        else:
            self._kernel.giving_back.take_back(self)

    def _release_after_interrupt(self, count: int) -> None:
        """``count``: how often it had been acquired before a release that may not have begun."""
        if self._count != count:
            return
        if count > 1:
            self.release()  # only counts down
        else:
            self._kernel.giving_back.later(self)


class HeldLease(Holding, Waits):
    """The `Lease` of one lock: what `Lock` gives."""

    __slots__ = ()


class AnyLock(Protocol):
    """What the locks of both faces have in common. Nothing of it asks the backend."""

    @property
    def name(self) -> str:
        """As given, without the client's prefix."""

    @property
    def ttl(self) -> float:
        """Seconds, as given or the client's default; a lease tells what was granted."""

    def is_held(self) -> bool:
        """From the clock: does this object hold a lease that is still valid, in whatever thread or task?"""


@runtime_checkable
class DistributedLock(AnyLock, Protocol):
    """A name in a place: the interface of every lock, whatever its kind and backend.

    Making one does no I/O; ``with lock as lease:`` waits for it and releases it at the end. Each ``with lock`` ends the
    lease that it began, in whatever thread its end runs (that of a generator may run in another). An exit stack that
    was given the lock object, or an ``__exit__`` called by hand, can only guess: what its thread entered last, else a
    lost lease, else the only one; NotHeld where there are several. Give it a lease:
    ``stack.enter_context(lock.acquire())``.
    """

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

    def as_threading_lock(self) -> ThreadingLock:
        """A drop-in for `threading.Lock` (`threading.RLock` when reentrant): for code that takes one.

        Type checkers refuse it where an annotation says ``threading.Lock``, which is final, as that of
        ``threading.Condition(lock)`` does: write ``cast("threading.Lock", lock.as_threading_lock())``.
        """

    def __enter__(self) -> Lease: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class LockOfAFace(OfThisProcess, NamesOurs, AnyLock, Generic[L]):
    """What the locks of both faces are made of: what they want, and the leases had through them."""

    def __init__(self, kernel: Kernel, name: str, **options: Any) -> None:
        self._begin(kernel, want(kernel, name, cast("Make", self._make), **options))

    def _begin(self, kernel: Kernel, want: Want) -> None:
        self._kernel = kernel
        self._want = want
        self._entered: Entered[L] = Entered()
        self._newest: L | None = None  # at most one lease of a mutex is valid at a time: the one made last

    def _make(self, kernel: Kernel, want: Want, claim: Claim, granted: Granted, unsure: bool) -> L:
        raise NotImplementedError

    @property
    def name(self) -> str:
        return self._want.name

    @property
    def ttl(self) -> float:
        return self._want.ttl

    def is_held(self) -> bool:
        return self._newest is not None and self._newest.is_held()

    def _wait_for(self, timeout: float | None, scope: Scope[L]) -> Coroutine[Any, Any, Any]:
        """Await a new lease, or None if the lock was still taken when ``timeout`` seconds were over."""
        return acquire(self._kernel, self._want, timeout, scope=scope)

    def _reentered(self, held: L) -> None:
        """Note what was acquired once more, perhaps through another lock object before."""
        if not self.is_held():  # else it holds this one, or a newer one of another thread or task
            self._newest = held

    def __repr__(self) -> str:
        held = " held" if self.is_held() else ""
        return f"<{type(self).__name__} {self.name!r} in {self._kernel.scheme} ttl={self.ttl:g}{held}>"


class Lock(ForWith, LockOfAFace[HeldLease], DistributedLock):
    """The `DistributedLock` that is a mutex; what `Client.lock` returns."""

    def __init__(self, client: Client, name: str, **options: Any) -> None:
        self._client = client
        super().__init__(client._kernel, name, **options)

    def _make(self, kernel: Kernel, want: Want, claim: Claim, granted: Granted, unsure: bool) -> HeldLease:
        self._newest = lease = HeldLease(kernel, want, claim, granted, unsure)
        return lease

    def acquire(self, timeout: float | None = None, **theirs: Never) -> Lease:
        if theirs:
            raise refuse("acquire", theirs)
        return self._acquire_or_raise(check_timeout(timeout))

    def _acquire_or_raise(self, timeout: float | None) -> HeldLease:
        if lease := self._acquire(timeout):
            return lease
        raise self._kernel.still_taken(self.name, timeout, self._client._scope().keeps_out(self._want))

    def try_acquire(self, timeout: float = 0, **theirs: Never) -> Lease | None:
        if theirs:
            raise refuse("try_acquire", theirs)
        return self._acquire(check_timeout(timeout))

    def _acquire(self, timeout: float | None) -> HeldLease | None:
        scope = self._client._scope()
        handing: Handing[HeldLease] = Handing(self._kernel)
        try:
            if held := handing.reenter(scope, self._want):
                self._reentered(held)
                return held
            return run(handing.acquire(self._wait_for(timeout, scope), scope))
        except BaseException:
            handing.take_back()
            raise

    def release(self) -> bool:
        lease = self._client._scope().taken_through(self._want)
        if lease is None:
            raise self._kernel.not_held(self.name)
        return lease.release()

    def is_locked(self) -> bool:
        return any(self._client.inspect(name) is not None for name in self._want.names)

    def as_threading_lock(self) -> ThreadingLock:
        return ThreadingLock(self)

    def __enter__(self) -> Lease:
        frame = sys._getframe(1)
        lease = self._acquire_or_raise(None)
        entry: Entry[HeldLease] | None = None
        try:
            entry = Entry(lease, frame)
            self._entered.add(entry)
        except BaseException:  # interrupted: a `with` that has not begun releases nothing
            if entry:
                self._entered.discard(entry)
            lease._take_back()
            raise
        return lease

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        entry: Entry[HeldLease] | None = None
        count = 0
        try:
            frame = sys._getframe(1)
            entry = self._entered.leave(frame, self._client._scope())
            if entry is None:
                raise self._kernel.not_held(self.name)
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
