"""The asyncio face of read-write locks and semaphores. See `multilock.shared`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from multilock.aio.lock import AsyncDistributedLock, AsyncLock, HeldAsyncLease
from multilock.kernel.process import OfThisProcess
from multilock.shared import HeldByMany

if TYPE_CHECKING:
    from multilock.aio.client import AsyncClient

__all__ = ["AsyncReadWriteLock", "AsyncSemaphore", "AsyncSemaphoreLock", "AsyncSharedLock"]


@runtime_checkable
class AsyncSemaphore(AsyncDistributedLock, Protocol):
    """See `multilock.Semaphore`."""

    @property
    def permits(self) -> int:
        """How many may hold it together; all must name the same number."""


class AsyncSharedLock(HeldByMany[HeldAsyncLease], AsyncLock):
    """The `AsyncDistributedLock` of readers."""


class AsyncSemaphoreLock(AsyncSharedLock, AsyncSemaphore):
    """What `AsyncClient.semaphore` returns."""

    @property
    def permits(self) -> int:
        return self._want.permits


class AsyncReadWriteLock(OfThisProcess):
    """See `multilock.ReadWriteLock`."""

    def __init__(self, client: AsyncClient, name: str, cancel_on_lost: bool, **options: Any) -> None:
        self._reader = AsyncSharedLock(client, name, cancel_on_lost, kind="read", **options)
        self._writer = AsyncLock(client, name, cancel_on_lost, kind="write", **options)

    @property
    def name(self) -> str:
        """As given, without the client's prefix."""
        return self._reader.name

    def reader(self) -> AsyncDistributedLock:
        """Held together with other readers; always the same object."""
        return self._reader

    def writer(self) -> AsyncDistributedLock:
        """Held alone; always the same object."""
        return self._writer

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} of {self._reader!r} and {self._writer!r}>"
