"""The blocking API of locks that several may hold: read-write locks and semaphores.

Each of these locks is a `DistributedLock` like the mutex, with the same acquire loop and leases. There are two
differences. The backend lets several claims hold the lock together. And one lock object can have several valid leases,
of different threads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable
from weakref import WeakValueDictionary

from multilock.kernel.holding import Holding
from multilock.kernel.lock_options import Want
from multilock.kernel.no_pickling import OfThisProcess
from multilock.lock import DistributedLock, HeldLease, Lock, LockOfAFace
from multilock.model import Claim, Granted

if TYPE_CHECKING:
    from multilock.client import Client
    from multilock.kernel.client import Kernel

__all__ = ["HeldByMany", "ReadWriteLock", "Semaphore", "SemaphoreLock", "SharedLock"]

L = TypeVar("L", bound=Holding)


@runtime_checkable
class Semaphore(DistributedLock, Protocol):
    """A `DistributedLock` that up to ``permits`` holders may hold at a time, each with its own lease.

    Each of its leases has a ``token``, which is greater than those of all earlier grants of this name, also to plain
    locks. If there is more than one permit, ``fence()`` raises CapabilityMissing: tokens cannot show which of several
    holders has lost its permit.
    """

    @property
    def permits(self) -> int:
        """The number of holders allowed at a time. Every program must use the same number for this name."""


class HeldByMany(LockOfAFace[L]):
    """The common part of read-write locks and semaphores, blocking and asyncio. Each lock object has a weak reference
    to each lease that was acquired through it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._leases: WeakValueDictionary[str, L] = WeakValueDictionary()  # by claim id
        super().__init__(*args, **options)

    def _make(self, kernel: Kernel, want: Want, claim: Claim, granted: Granted, unsure: bool) -> L:
        lease = self._leases[claim.id] = super()._make(kernel, want, claim, granted, unsure)
        return lease

    def _reentered(self, held: L) -> None:
        self._leases[held.claim.id] = held

    def is_held(self) -> bool:
        """Return whether one of the leases of this object is held."""
        return any(lease.is_held() for reference in self._leases.valuerefs() if (lease := reference()))


class SharedLock(HeldByMany[HeldLease], Lock):
    """The `DistributedLock` of a reader."""


class SemaphoreLock(SharedLock, Semaphore):
    """The lock that `Client.semaphore` returns."""

    @property
    def permits(self) -> int:
        """The number of holders allowed at a time."""
        return self._want.permits


class ReadWriteLock(OfThisProcess):
    """Two locks of one name: many readers hold the first together, a writer holds the second alone.

    Use ``rw.reader()`` and ``rw.writer()`` like any `DistributedLock`: ``with rw.reader() as lease:``.
    """

    def __init__(self, client: Client, name: str, **options: Any) -> None:
        self._reader = SharedLock(client, name, kind="read", **options)
        self._writer = Lock(client, name, kind="write", **options)

    @property
    def name(self) -> str:
        """The name as given, without the client's prefix."""
        return self._reader.name

    def reader(self) -> DistributedLock:
        """Return the lock that readers hold together. Every call returns the same object."""
        return self._reader

    def writer(self) -> DistributedLock:
        """Return the lock that a writer holds alone. Every call returns the same object."""
        return self._writer

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} of {self._reader!r} and {self._writer!r}>"
