"""The leases of one thread or task, so that it can ask for its innermost one, and acquire one again (reentrant)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Generic, TypeVar

from multilock.holding import HELD, LOST, Holding

if TYPE_CHECKING:
    from multilock.kernel import Want

__all__ = ["Scope"]

L = TypeVar("L", bound=Holding)


class Scope(Generic[L]):
    """What one thread or task acquired and has not given back, a lost lease included. Any thread may discard."""

    def __init__(self) -> None:
        self._leases: dict[str, L] = {}
        self._tidy_at = 64

    def push(self, lease: L) -> None:
        lease._scope = self
        self._leases[lease._claim.id] = lease
        if len(self._leases) >= self._tidy_at:  # leases that were lost and never released by their owner
            for old in list(self._leases.values()):
                if old._state == LOST:
                    self.discard(old)
            self._tidy_at = max(64, 2 * len(self._leases))

    def discard(self, lease: Holding) -> None:
        self._leases.pop(lease._claim.id, None)

    def reenter(self, want: Want) -> L | None:
        """Acquire once more what is held here of a reentrant lock."""
        held = self.newest(lambda lease: lease._may_reenter(want))
        return held if held and held._reenter(want) else None

    def taken_through(self, want: Want) -> L | None:
        """What a release through the lock object of ``want`` is about: its newest lease, lost ones included."""
        return self.newest(lambda lease: lease._want is want or lease._may_reenter(want))

    def newest(self, suits: Callable[[L], bool]) -> L | None:
        return next((lease for lease in self if suits(lease)), None)

    def __iter__(self) -> Iterator[L]:
        """Newest first, without those that were released."""
        return (lease for lease in reversed(list(self._leases.values())) if lease._state in (HELD, LOST))
