"""The asyncio API of read-write locks and semaphores. See `multilock.shared`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from multilock.aio.lock import AsyncDistributedLock, AsyncLock, HeldAsyncLease
from multilock.kernel.no_pickling import OfThisProcess
from multilock.shared import HeldByMany

if TYPE_CHECKING:
    from multilock.aio.client import AsyncClient

__all__ = ["AsyncReadWriteLock", "AsyncSemaphore", "AsyncSemaphoreLock", "AsyncSharedLock"]


@runtime_checkable
class AsyncSemaphore(AsyncDistributedLock, Protocol):
    """A lock that up to ``permits`` tasks or processes may hold at a time. The asyncio twin of `multilock.Semaphore`.

    Its leases have a ``token``, which distinguishes grants. With more than one permit ``fence()`` raises
    CapabilityMissing, because no token shows which of several holders is outdated.
    """

    @property
    def permits(self) -> int:
        """The number of holders allowed at a time. Every program must use the same number for this name."""


class AsyncSharedLock(HeldByMany[HeldAsyncLease], AsyncLock):
    """The `AsyncDistributedLock` that readers share."""


class AsyncSemaphoreLock(AsyncSharedLock, AsyncSemaphore):
    """The `AsyncSemaphore` that `AsyncClient.semaphore` returns."""

    @property
    def permits(self) -> int:
        return self._want.permits


class AsyncReadWriteLock(OfThisProcess):
    """Two locks with one name: readers share the first, and a writer holds the second alone.

    Use each like any `AsyncDistributedLock`: ``async with rw.reader() as lease:``. See `multilock.ReadWriteLock`.
    """

    def __init__(self, client: AsyncClient, name: str, cancel_on_lost: bool, **options: Any) -> None:
        self._reader = AsyncSharedLock(client, name, cancel_on_lost, kind="read", **options)
        self._writer = AsyncLock(client, name, cancel_on_lost, kind="write", **options)

    @property
    def name(self) -> str:
        """The name as given to the client, without the client's prefix."""
        return self._reader.name

    def reader(self) -> AsyncDistributedLock:
        """Return the lock that readers hold together. Every call returns the same object."""
        return self._reader

    def writer(self) -> AsyncDistributedLock:
        """Return the lock that a writer holds alone. Every call returns the same object."""
        return self._writer

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} of {self._reader!r} and {self._writer!r}>"
