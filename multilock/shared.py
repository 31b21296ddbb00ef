"""The blocking face of what several may hold: read-write locks and semaphores.

Each of their locks is a `DistributedLock` like the mutex, with its one acquire loop and its leases. They differ in what
the backend lets hold together, and in that one lock object can have several valid leases, of different threads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable
from weakref import WeakValueDictionary

from multilock.kernel.holding import Holding
from multilock.kernel.process import OfThisProcess
from multilock.kernel.want import Want
from multilock.lock import DistributedLock, HeldLease, Lock, LockOfAFace
from multilock.model import Claim, Granted

if TYPE_CHECKING:
    from multilock.client import Client
    from multilock.kernel.core import Kernel

__all__ = ["HeldByMany", "ReadWriteLock", "Semaphore", "SemaphoreLock", "SharedLock"]

L = TypeVar("L", bound=Holding)


@runtime_checkable
class Semaphore(DistributedLock, Protocol):
    """A `DistributedLock` that up to ``permits`` may hold at a time, each with a lease of its own.

    Its leases have a ``token``, which tells grants apart and fences them from locks of that name, but no ``fence()``
    unless there is one permit: no number tells which of several holders is over.
    """

    @property
    def permits(self) -> int:
        """How many may hold it together; all must name the same number."""


class HeldByMany(LockOfAFace[L]):
    """What such locks of both faces have in common: their leases, each of which a thread or task of its own may have
    taken."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._leases: WeakValueDictionary[str, L] = WeakValueDictionary()  # by claim id
        super().__init__(*args, **options)

    def _make(self, kernel: Kernel, want: Want, claim: Claim, granted: Granted, unsure: bool) -> L:
        lease = self._leases[claim.id] = super()._make(kernel, want, claim, granted, unsure)
        return lease

    def _reentered(self, held: L) -> None:
        self._leases[held._claim.id] = held

    def is_held(self) -> bool:
        return any(lease.is_held() for reference in self._leases.valuerefs() if (lease := reference()))


class SharedLock(HeldByMany[HeldLease], Lock):
    """The `DistributedLock` of readers."""


class SemaphoreLock(SharedLock, Semaphore):
    """What `Client.semaphore` returns."""

    @property
    def permits(self) -> int:
        return self._want.permits


class ReadWriteLock(OfThisProcess):
    """Two locks of one name: one that many readers may hold together, one that a writer holds alone.

    ``rw.reader()`` and ``rw.writer()`` are used as any `DistributedLock`: ``with rw.reader() as lease:``.
    """

    def __init__(self, client: Client, name: str, **options: Any) -> None:
        self._reader = SharedLock(client, name, kind="read", **options)
        self._writer = Lock(client, name, kind="write", **options)

    @property
    def name(self) -> str:
        """As given, without the client's prefix."""
        return self._reader.name

    def reader(self) -> DistributedLock:
        """Held together with other readers; always the same object."""
        return self._reader

    def writer(self) -> DistributedLock:
        """Held alone; always the same object."""
        return self._writer

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} of {self._reader!r} and {self._writer!r}>"
