"""One distributed lock over many backends, blocking and asyncio, with a watchdog that warns before a lock is lost.

    client = multilock.connect("redis://localhost:6379/0")      # or etcd://, consul://, zookeeper://, sqlite:///, …

    with client.lock("invoices/42") as lease:                   # waits; kept alive; released at the end
        save(invoice, fencing_token=lease.fence())

    if lease := client.lock("nightly").try_acquire():           # None if it is taken
        lease.on_lost(lambda loss: stop_work())
        lease.release()

    client.election("scheduler").run(work)                      # runs work() each time this node is elected

`connect_async` is `connect` for asyncio. See `Client` for everything else.
"""

from typing import TYPE_CHECKING, Any

from multilock.client import Client, connect
from multilock.database_guard import guard
from multilock.election import Election, Leadership
from multilock.errors import (
    BackendRejected,
    BackendUnavailable,
    CapabilityMissing,
    ClientClosed,
    ConfigurationError,
    LockLost,
    LockTimeout,
    MultilockError,
    NotHeld,
)
from multilock.kernel.runtime import now
from multilock.keywords import ConnectOptions
from multilock.lease import AsyncLease, Lease
from multilock.lock import DistributedLock
from multilock.model import Capabilities, Finding, LeaderInfo, LeaseState, LockInfo, Loss, LossReason
from multilock.registry import register_backend
from multilock.shared import ReadWriteLock, Semaphore

if TYPE_CHECKING:
    from multilock.aio import (
        AsyncClient,
        AsyncDistributedLock,
        AsyncElection,
        AsyncLeadership,
        AsyncReadWriteLock,
        AsyncSemaphore,
        connect_async,
    )
    from multilock.events import (
        Acquired,
        AtRisk,
        Elected,
        Event,
        LeaderChanged,
        Lost,
        NotAcquired,
        Released,
        Renewed,
        RenewFailed,
        Waiting,
    )

__version__ = "0.1.0"

__all__ = [
    "Acquired",
    "AsyncClient",
    "AsyncDistributedLock",
    "AsyncElection",
    "AsyncLeadership",
    "AsyncLease",
    "AsyncReadWriteLock",
    "AsyncSemaphore",
    "AtRisk",
    "BackendRejected",
    "BackendUnavailable",
    "Capabilities",
    "CapabilityMissing",
    "Client",
    "ClientClosed",
    "ConfigurationError",
    "ConnectOptions",
    "DistributedLock",
    "Elected",
    "Election",
    "Event",
    "Finding",
    "LeaderChanged",
    "LeaderInfo",
    "Leadership",
    "Lease",
    "LeaseState",
    "LockInfo",
    "LockLost",
    "LockTimeout",
    "Loss",
    "LossReason",
    "Lost",
    "MultilockError",
    "NotAcquired",
    "NotHeld",
    "ReadWriteLock",
    "Released",
    "RenewFailed",
    "Renewed",
    "Semaphore",
    "Waiting",
    "connect",
    "connect_async",
    "guard",
    "now",
    "register_backend",
]

if not TYPE_CHECKING:  # a type checker would otherwise accept every name

    def __getattr__(name: str) -> Any:
        """Import the asyncio classes and the events when the program first uses one of them."""
        if name.startswith("Async") or name == "connect_async":
            from multilock import aio

            return getattr(aio, name)
        if name in __all__:
            from multilock import events

            return getattr(events, name)
        raise AttributeError(f"module 'multilock' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
