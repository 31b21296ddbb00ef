"""The asyncio API of a lock of several names: `AsyncClient.lock_all`. See `multilock.lock_all`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from multilock.aio.cancel_on_lost import Body
from multilock.aio.lock import AsyncLock, Enters, HeldAsyncLease, check_cancel_on_lost
from multilock.kernel.holding import Holding
from multilock.kernel.lock_options import Want
from multilock.lease import AsyncLease
from multilock.lock_all import HeldSet, SetOfAFace, want_all

if TYPE_CHECKING:
    from multilock.aio.client import AsyncClient
    from multilock.kernel.client import Kernel

__all__ = ["AsyncLeaseSet", "AsyncLockSet"]


class AsyncLeaseSet(HeldSet, Enters):
    """The `AsyncLease` of several locks. The lease is held as long as all these locks are held, and lost when one of
    these locks is lost."""

    def __init__(self, kernel: Kernel, want: Want, parts: Sequence[Holding], cancel_on_lost: bool) -> None:
        self._bodies: list[Body] | None = None
        self._cancel_on_lost = cancel_on_lost
        super().__init__(kernel, want, parts)

    @property
    def leases(self) -> tuple[AsyncLease, ...]:
        return cast("tuple[AsyncLease, ...]", self._parts)


class AsyncLockSet(SetOfAFace[AsyncLeaseSet], AsyncLock):
    """The `AsyncDistributedLock` of several names, as `AsyncClient.lock_all` returns it."""

    def __init__(self, client: AsyncClient, names: Iterable[str], cancel_on_lost: bool, **options: Any) -> None:
        self._client = client
        self._cancel_on_lost = check_cancel_on_lost(cancel_on_lost)
        make = partial(HeldAsyncLease, cancel_on_lost=cancel_on_lost)
        self._begin(client._kernel, want_all(client._kernel, names, make, **options))

    def _make_set(self, kernel: Kernel, want: Want, parts: list[Holding]) -> AsyncLeaseSet:
        return AsyncLeaseSet(kernel, want, parts, self._cancel_on_lost)
