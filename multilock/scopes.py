"""The leases of one thread or task, so that it can ask for its innermost one, and acquire one again (reentrant)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from multilock.holding import HELD, LOST, Holding

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

    def newest(self, suits: Callable[[L], bool]) -> L | None:
        return next((lease for lease in self if suits(lease)), None)

    def __iter__(self) -> Iterator[L]:
        """Newest first, without those that were released."""
        return (lease for lease in reversed(list(self._leases.values())) if lease._state in (HELD, LOST))
