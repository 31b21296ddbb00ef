"""One distributed lock over many backends, blocking and asyncio, with a watchdog that tells before a lock is lost."""

from multilock.client import Client, connect
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
from multilock.lock import DistributedLock, Lease
from multilock.model import Capabilities, Finding, LeaderInfo, LeaseState, LockInfo, Loss, LossReason
from multilock.registry import register_backend
from multilock.runtime import now
