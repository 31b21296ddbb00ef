"""The blocking API of one lock: the interface `DistributedLock`, and `Lock`, the class behind `Client.lock`.

A body is the block of a ``with`` statement.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Coroutine
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Never, Protocol, Self, TypeVar, cast, runtime_checkable

from multilock.api_mistakes import ForWith, NamesOurs, hides_foreign, refuse
from multilock.database_guard import guard_lease
from multilock.errors import MultilockError
from multilock.kernel.acquire import acquire
from multilock.kernel.blocking import run
from multilock.kernel.holding import AnyHeld, EndOfBody, Holding
from multilock.kernel.lease_to_caller import Handing
from multilock.kernel.lock_options import Make, Want, want
from multilock.kernel.no_pickling import OfThisProcess
from multilock.kernel.scopes import Entered, Scope, WithEntry
from multilock.lease import Lease
from multilock.model import Claim, Granted, Loss
from multilock.names import check_timeout
from multilock.threading_lock import ThreadingLock

if TYPE_CHECKING:
    from multilock.client import Client
    from multilock.kernel.client import Kernel

__all__ = ["AnyLock", "DistributedLock", "HeldLease", "Lock", "LockOfAFace"]

L = TypeVar("L", bound=AnyHeld)


class Waits(ForWith, AnyHeld, Lease):
    """The blocking methods of a lease, whether it is a lease of one lock or of several."""

    __slots__ = ()

    def guard(self, connection: Any, *, idle_limit: float | None = None) -> None:
        guard_lease(self, connection, idle_limit)

    def wait_lost(self, timeout: float | None = None) -> Loss[Self] | None:
        seconds = check_timeout(timeout)
        ended = self._kernel.runtime.bell()
        try:
            if self._at_end(ended.ring):
                ended.wait(math.inf if seconds is None else seconds)
        finally:
            self._not_at_end(ended.ring)
        return self.loss if self._is_lost() else None

    def __enter__(self) -> Self:
        self._open += 1  # before the check, so that another body that ends now does not release the lease
        end: EndOfBody | None = None
        try:
            end = EndOfBody()
            self._check_at_entry(end)
        except MultilockError:
            raise
        except BaseException:  # interrupted: Python will not call __exit__ for this `with`
            self._release_after_interrupt(end or EndOfBody())
            raise
        return self

    def release(self) -> bool:
        return run(self._kernel.releases.release(self))

    def renew(self) -> None:
        run(self._kernel.renew(self))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end: EndOfBody | None = None
        try:
            end = EndOfBody()
            self._exit(end, error)
        except MultilockError:
            raise
        except BaseException:
            self._release_after_interrupt(end or EndOfBody())
            raise

    def _exit(self, end: EndOfBody, error: BaseException | None) -> None:
        """End a body, as ``__exit__`` does. After an interrupt the caller must call `_release_after_interrupt`."""
        self._end_body(end)
        if self._is_lost():
            self._raise_lost(error)

    def _end_body(self, end: EndOfBody) -> None:
        """Release the lease at the end of a body, unless that body has nothing to release."""
        run(self._kernel.releases.release(self, body=end))

    def _release_after_interrupt(self, end: EndOfBody) -> None:
        """See `Releases.take_back`."""
        self._kernel.releases.take_back(self, end, worked=True)


class HeldLease(Holding, Waits):
    """The `Lease` of one lock, as `Lock` returns it."""

    __slots__ = ()


class AnyLock(Protocol):
    """The members that `DistributedLock` and `AsyncDistributedLock` share. None of them sends a request."""

    @property
    def name(self) -> str:
        """The name as given to the client, without the client's prefix."""

    @property
    def ttl(self) -> float:
        """The lifetime in seconds as requested, or the client's default. ``lease.ttl`` is what was granted."""

    def is_held(self) -> bool:
        """Return whether any thread or task holds a valid lease through this lock object, by the clock.

        `is_locked` asks the backend whether anybody holds the lock.
        """


@runtime_checkable
class DistributedLock(AnyLock, Protocol):
    """A lock with a name, shared by every program that uses the same backend and prefix. Made by `Client.lock`.

    This is the interface of every lock, whatever its kind and backend. Making a lock object sends no request.
    ``with lock as lease:`` waits for the lock and releases it at the end.

    Each ``with lock`` ends the lease that it began, even if its body ends in another thread, as the body of a generator
    may. An exit stack that was given the lock object must guess which lease to end, and so must an ``__exit__`` called
    by hand. The newest lease of the calling thread ends. If the thread has none, a lost lease or the only lease ends.
    If other threads have several leases, NotHeld is raised. To avoid the guess, give the stack a lease:
    ``stack.enter_context(lock.acquire())``.
    """

    def acquire(self, timeout: float | None = None) -> Lease:
        """Wait until the lock is ours, and return the `Lease`. A ``with`` that enters the lease releases it at its end.

        ``timeout``: Seconds for the whole wait. Without it, or with ``math.inf``, the wait has no limit. 0 tries once.

        Raises LockTimeout if the lock was still taken at the end of ``timeout``. Raises BackendUnavailable if the
        backend did not answer for the client's ``outage_timeout``, or at the end of ``timeout``. A lock that was taken
        all the same is then released in the background. Raises BackendRejected if the backend refuses the request, and
        ClientClosed. A negative or NaN ``timeout`` is a ValueError, and anything but a number is a TypeError.

        Waiters are served in order of arrival only if the lock was made with ``fair=True``.
        """

    def try_acquire(self, timeout: float = 0) -> Lease | None:
        """Try to acquire the lock: once, or for ``timeout`` seconds. Returns None if the lock is still taken.

        Raises what `acquire` raises, except LockTimeout.
        """

    def release(self) -> bool:
        """Release the newest lease that this thread took through this lock object and has not released.

        Returns True if the lock was ours until this call, False if the lease was lost. Raises NotHeld if this thread
        has no such lease: only ``lease.release()`` works from any thread.
        """

    def is_locked(self) -> bool:
        """Ask the backend whether anybody holds the lock. The answer may be outdated when it arrives.

        Raises BackendUnavailable, BackendRejected or ClientClosed.
        """

    def as_threading_lock(self) -> ThreadingLock:
        """Return an adapter for code that expects a `threading.Lock`. For a reentrant lock it works as a
        `threading.RLock`.

        ``threading.Lock`` is a final class. So type checkers refuse the adapter where an annotation says
        ``threading.Lock``, for example in ``threading.Condition(lock)``. Write ``cast("threading.Lock",
        lock.as_threading_lock())`` there.
        """

    def __enter__(self) -> Lease: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class LockOfAFace(OfThisProcess, NamesOurs, AnyLock, Generic[L]):
    """The state that blocking and asyncio locks share: their options, and the leases acquired through them."""

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
        """Await a new lease. Returns None if the lock was still taken after ``timeout`` seconds."""
        return acquire(self._kernel, self._want, timeout, scope=scope)

    def _reentered(self, held: L) -> None:
        """Record a lease that was acquired once more. Its first acquire may have come through another lock object."""
        # if the lock is held, `_newest` is already this lease, or a newer lease of another thread or task
        if not self.is_held():
            self._newest = held

    def __repr__(self) -> str:
        held = " held" if self.is_held() else ""
        return f"<{type(self).__name__} {self.name!r} in {self._kernel.scheme} ttl={self.ttl:g}{held}>"


class Lock(ForWith, LockOfAFace[HeldLease], DistributedLock):
    """The `DistributedLock` that is a mutex, as `Client.lock` returns it."""

    def __init__(self, client: Client, name: str, **options: Any) -> None:
        self._client = client
        super().__init__(client._kernel, name, **options)

    def _make(self, kernel: Kernel, want: Want, claim: Claim, granted: Granted, unsure: bool) -> HeldLease:
        self._newest = lease = HeldLease(kernel, want, claim, granted, unsure)
        return lease

    @hides_foreign
    def acquire(self, timeout: float | None = None, **theirs: Never) -> Lease:
        if theirs:
            raise refuse("acquire", theirs)
        return self._acquire_or_raise(check_timeout(timeout))

    def _acquire_or_raise(self, timeout: float | None) -> HeldLease:
        if lease := self._acquire(timeout):
            return lease
        raise self._kernel.messages.still_taken(self.name, timeout, self._client._scope().keeps_out(self._want))

    @hides_foreign
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
            raise self._kernel.messages.not_held(self.name)
        return lease.release()

    def is_locked(self) -> bool:
        return any(self._client.inspect(name) is not None for name in self._want.names)

    def as_threading_lock(self) -> ThreadingLock:
        return ThreadingLock(self)

    def __enter__(self) -> Lease:
        frame = sys._getframe(1)
        lease = self._acquire_or_raise(None)
        entry: WithEntry[HeldLease] | None = None
        try:
            entry = WithEntry(lease, frame)
            self._entered.add(entry)
        except BaseException:  # interrupted: Python calls no __exit__ for a `with` that has not begun
            if entry:
                self._entered.discard(entry)
            self._kernel.releases.take_back(lease)
            raise
        lease._open += 1  # no call follows, so no interrupt comes before the body
        return lease

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        entry: WithEntry[HeldLease] | None = None
        end: EndOfBody | None = None
        try:
            end = EndOfBody()
            while entry is None or not entry.close():
                entry = self._entered.ending(sys._getframe(1), self._client._scope())
                if entry is None:
                    raise self._kernel.messages.not_held(self.name)
            entry.lease._exit(end, error)
        except MultilockError:
            raise
        except BaseException:  # interrupted, perhaps before the release has begun: nothing else would release it
            entry = entry or self._entered.ending(sys._getframe(1), self._client._scope())
            if entry:
                entry.lease._release_after_interrupt(end or EndOfBody())
            raise
        finally:
            if entry:
                self._entered.discard(entry)
