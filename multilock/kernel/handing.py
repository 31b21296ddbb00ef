"""Handing a lease over to whoever asked for it: until the caller has it, an interrupt gives it back."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from multilock.kernel.holding import AnyHeld

if TYPE_CHECKING:
    from multilock.kernel.core import Kernel
    from multilock.kernel.scopes import Scope
    from multilock.kernel.want import Want

__all__ = ["Handing"]

L = TypeVar("L", bound=AnyHeld)


class Handing(Generic[L]):
    """One acquire. The frame that hands the lease over makes it first, and calls `take_back` in its ``except``.

    So the lease is noted here before any function could be interrupted that has it in a variable only. From the return
    of that frame on, CPython delivers no interrupt until the caller has stored the lease, or entered it.
    """

    __slots__ = ("_before", "_kernel", "lease")

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._before = 0  # how often the lease had been acquired before this
        self.lease: L | None = None

    def reenter(self, scope: Scope[L], want: Want) -> L | None:
        """Acquire once more what ``scope`` holds of a reentrant lock."""
        held = scope.newest(lambda lease: lease._may_reenter(want)) if want.reentrant else None
        if held is None:
            return None
        self._before, self.lease = held._count, held
        if held._reenter(want):
            return held
        self._before, self.lease = 0, None
        return None

    async def acquire(self, acquiring: Coroutine[Any, Any, Any], scope: Scope[L] | None = None) -> L | None:
        """Await a new lease. It is in ``scope`` then."""
        lease: L | None = await acquiring  # no call before the next line, not even cast()
        self.lease = lease
        if lease is not None and scope is not None:
            scope.push(lease)
        return lease

    def take_back(self) -> None:
        """The caller was interrupted, and has nothing. Twice is harmless."""
        lease, self.lease = self.lease, None
        if lease is None:
            return
        if not self._before:
            self._kernel.giving_back.take_back(lease)
            return
        with self._kernel.lock:
            if lease._count > self._before:
                lease._count_down()
