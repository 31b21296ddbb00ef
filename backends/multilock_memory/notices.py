"""Notify the clients of a store: wake waiters, report lost locks, and report each new holder of a followed name.

Notices are put into an outbox while the store's mutex is held, and delivered after it is released, because the kernel
may hold its own locks while it calls the store.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial

from multilock.backend import LossReason, Notices

__all__ = ["Outbox"]


class Outbox:
    """The undelivered notices of one store. All methods except `deliver` need the store's mutex."""

    def __init__(self) -> None:
        self._followers: dict[str, tuple[Notices, Mapping[str, str]]] = {}  # client -> its notices, and key -> name
        self._waiting: deque[Callable[[], None]] = deque()

    def follow(self, notices: Notices, names: Mapping[str, str]) -> None:
        self._followers[notices.client] = (notices, names)

    def forget(self, notices: Notices) -> None:
        """Stop following for a client that is closed."""
        self._followers.pop(notices.client, None)

    def wake(self, notices: Notices, claim_id: str) -> None:
        """Notify a waiter, so that it makes another attempt."""
        self._waiting.append(partial(notices.wake, claim_id))

    def gone(self, notices: Notices, claim_id: str, message: str) -> None:
        """Notify a holder that its lock was taken away."""
        self._waiting.append(partial(notices.gone, claim_id, LossReason.TAKEN, message))

    def changed(self, key: str) -> None:
        """Notify all clients that follow this name that its holder has changed."""
        for notices, names in self._followers.values():
            if key in names:
                self._waiting.append(partial(notices.changed, names[key]))

    def deliver(self) -> None:
        """Deliver all notices. Any thread may deliver the notices that another thread put there."""
        while self._waiting:
            try:
                tell = self._waiting.popleft()
            except IndexError:
                return
            tell()
