"""What is told to the clients of a store: wake-ups, losses, changes of names that they follow.

It is put into an outbox while the store's mutex is held, and delivered without it: the kernel may hold locks of its own
while it calls us.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial

from multilock.backend import LossReason, Notices

__all__ = ["Outbox"]


class Outbox:
    """All but `deliver` are called with the store's mutex held."""

    def __init__(self) -> None:
        self._followers: dict[str, tuple[Notices, Mapping[str, str]]] = {}  # client -> its names by key
        self._waiting: deque[Callable[[], None]] = deque()

    def follow(self, notices: Notices, names: Mapping[str, str]) -> None:
        self._followers[notices.client] = (notices, names)

    def forget(self, notices: Notices) -> None:
        self._followers.pop(notices.client, None)

    def wake(self, notices: Notices, claim_id: str) -> None:
        self._waiting.append(partial(notices.wake, claim_id))

    def gone(self, notices: Notices, claim_id: str, message: str) -> None:
        self._waiting.append(partial(notices.gone, claim_id, LossReason.TAKEN, message))

    def changed(self, key: str) -> None:
        for notices, names in self._followers.values():
            if key in names:
                self._waiting.append(partial(notices.changed, names[key]))

    def deliver(self) -> None:
        """Tell what is in here. Any thread may deliver what another left."""
        while self._waiting:
            try:
                tell = self._waiting.popleft()
            except IndexError:
                return
            tell()
