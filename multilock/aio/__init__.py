"""The asyncio API. It is imported when a program first uses one of its names, because importing asyncio takes 100
ms."""

from multilock.aio.client import AsyncClient, connect_async
from multilock.aio.election import AsyncElection, AsyncLeadership
from multilock.aio.lock import AsyncDistributedLock
from multilock.aio.shared import AsyncReadWriteLock, AsyncSemaphore
from multilock.lease import AsyncLease

__all__ = [
    "AsyncClient",
    "AsyncDistributedLock",
    "AsyncElection",
    "AsyncLeadership",
    "AsyncLease",
    "AsyncReadWriteLock",
    "AsyncSemaphore",
    "connect_async",
]
