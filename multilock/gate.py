"""The local gate: of all unfair waiters of one client for one name, one at a time talks to the server.

``fair=True`` waiters take their own places at the server, and ``timeout=0`` asks it itself; neither comes here.
"""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING

from multilock.errors import BackendUnavailable

if TYPE_CHECKING:
    from multilock.acquire import Waiter

__all__ = ["Gate", "Line"]


class Line:
    """The waiters for one name, the one at the server first, and since when that server is silent."""

    __slots__ = ("silence", "silent_since", "waiters")

    def __init__(self) -> None:
        self.waiters: list[Waiter] = []
        self.silent_since: float | None = None
        self.silence: BackendUnavailable | None = None

    def answered(self) -> None:
        self.silent_since = self.silence = None

    def unanswered(self, sent_at: float, silence: BackendUnavailable) -> None:
        self.silence = silence
        if self.silent_since is None:
            self.silent_since = sent_at

    def patience_ends(self, started: float, outage_timeout: float) -> float:
        """When a waiter that came at ``started`` has seen enough of the present silence; at the earliest."""
        return max(started, math.inf if self.silent_since is None else self.silent_since) + outage_timeout


class Gate:
    def __init__(self) -> None:
        self._lines: dict[str, Line] = {}
        self._lock = threading.Lock()

    def enter(self, name: str, waiter: Waiter) -> Line:
        """Take a place. The first in ``line.waiters`` may talk to the server; the others are woken when they are it."""
        with self._lock:
            line = self._lines.get(name)
            if line is None:
                line = self._lines[name] = Line()
            line.waiters.append(waiter)
            return line

    def leave(self, name: str, waiter: Waiter) -> None:
        """Again after an interrupt: it may have come before there was a place, or before the next one was woken."""
        with self._lock:
            line = self._lines.get(name)
            if line is None:
                return
            if waiter in line.waiters:
                first = line.waiters[0] is waiter
                line.waiters.remove(waiter)
                if not first:
                    return
            if not line.waiters:
                del self._lines[name]
            else:
                line.waiters[0].set()

    def wake_all(self) -> None:
        with self._lock:
            waiters = [waiter for line in self._lines.values() for waiter in line.waiters]
        for waiter in waiters:
            waiter.set()
