"""`Handing`: how a new lease gets to the caller of acquire(). If an interrupt comes before the caller has the lease,
the lease is released.

A scope has the leases of one thread or task.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from multilock.kernel.holding import AnyHeld

if TYPE_CHECKING:
    from multilock.kernel.client import Kernel
    from multilock.kernel.lock_options import Want
    from multilock.kernel.scopes import Scope

__all__ = ["Handing"]

L = TypeVar("L", bound=AnyHeld)


class Handing(Generic[L]):
    """The new lease of one acquire(), as long as the caller of acquire() does not have it yet.

    The function that returns the lease creates this object first, and calls `take_back` in its ``except``. So the lease
    is recorded here before an interrupt can hit a function that has it only in a local variable. Once that function has
    returned, CPython delivers no interrupt until the caller has stored the lease, or entered it with ``with``.
    """

    __slots__ = ("_kernel", "lease")

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self.lease: L | None = None

    def reenter(self, scope: Scope[L], want: Want) -> L | None:
        """Acquire a reentrant lease of ``scope`` once more. Returns None if ``scope`` has no such lease that is still
        held."""
        held = scope.newest(lambda lease: lease._may_reenter(want)) if want.reentrant else None
        return held if held is not None and held._reenter(want, self) else None

    async def acquire(self, acquiring: Coroutine[Any, Any, Any], scope: Scope[L] | None = None) -> L | None:
        """Await a new lease, and add it to ``scope``."""
        lease: L | None = await acquiring
        # No call may come between these two lines, not even cast(), because an interrupt could come at the call.
        self.lease = lease
        if lease is not None and scope is not None:
            scope.push(lease)
        return lease

    def take_back(self) -> None:
        """Undo the acquire, because the caller was interrupted and has no lease. A second call changes nothing."""
        lease, self.lease = self.lease, None
        if lease is not None:
            self._kernel.releases.take_back(lease)
