"""The asyncio face of several locks at once. See `multilock.many`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

from multilock.aio.lock import AsyncLock, Enters
from multilock.kernel.scopes import Entered, Scope
from multilock.lease import AsyncLease
from multilock.many import HeldSet, acquire_all, in_order, newest_of

if TYPE_CHECKING:
    from multilock.aio.client import AsyncClient

__all__ = ["AsyncLeaseSet", "AsyncLockSet"]


class AsyncLeaseSet(HeldSet, Enters):
    """The `AsyncLease` of several locks: held as long as all of them are, and lost when one is."""

    def __init__(self, *args: Any, cancel_on_lost: bool) -> None:
        self._bodies = None
        self._cancel_on_lost = cancel_on_lost
        super().__init__(*args)

    @property
    def leases(self) -> tuple[AsyncLease, ...]:
        return cast("tuple[AsyncLease, ...]", self._parts)

    async def release(self) -> bool:
        return await self._release()

    async def renew(self) -> None:
        await self._renew()


class AsyncLockSet(AsyncLock):
    """What `AsyncClient.lock_all` returns: an `AsyncDistributedLock` that has no name of its own at the backend."""

    def __init__(
        self, client: AsyncClient, names: Iterable[str], cancel_on_lost: bool, on_lost: Any, **options: Any
    ) -> None:
        client._kernel.check_callback("on_lost", on_lost)
        self._client = client
        self._kernel = client._kernel
        self._on_lost = on_lost
        self._cancel_on_lost = cancel_on_lost
        self._locks = [AsyncLock(client, name, cancel_on_lost, **options) for name in in_order(names)]
        self._want = self._locks[0]._want
        self._entered: Entered[Any] = Entered()
        self._sets: list[AsyncLeaseSet] = []  # not given back

    @property
    def name(self) -> str:
        return ", ".join(lock.name for lock in self._locks)

    def is_held(self) -> bool:
        return any(lease.is_held() for lease in list(self._sets))

    async def is_locked(self) -> bool:
        return any([await lock.is_locked() for lock in self._locks])

    async def _acquire_or_raise(self, timeout: float | None, scope: Scope[Any] | None) -> Any:
        if lease := await self._acquire(timeout, scope):
            return lease
        scope = scope or self._client._scope() or Scope()
        raise self._kernel.still_taken(self.name, timeout, any(scope.keeps_out(lock._want) for lock in self._locks))

    async def _acquire(self, timeout: float | None, scope: Scope[Any] | None) -> Any:
        scope = scope or self._client._scope() or Scope()
        parts = await acquire_all(self._kernel, [lock._want for lock in self._locks], timeout, scope)
        if parts is None:
            return None
        lease = AsyncLeaseSet(self._kernel, parts, self._on_lost, scope, cancel_on_lost=self._cancel_on_lost)
        self._sets = [*(other for other in self._sets if not other._ended), lease]
        return lease

    async def _release(self, scope: Scope[Any] | None) -> bool:
        scope = scope or self._client._scope()
        lease = newest_of(self._sets, scope) if scope else None
        if lease is None:
            raise self._kernel.not_held(self.name)
        self._sets = [other for other in self._sets if other is not lease]
        return bool(await lease.release())
