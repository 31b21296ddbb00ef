"""The local gate: of all unfair waiters of one client for one name, one at a time talks to the server.

``fair=True`` waiters take their own places at the server, and ``timeout=0`` asks it itself; neither comes here.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from multilock import system
from multilock.errors import BackendUnavailable

if TYPE_CHECKING:
    from multilock.kernel.runtime import Bell

__all__ = ["SHORT", "Gate", "Line"]

SHORT = 0.05  # a request that had less than this many seconds says nothing about the backend by its silence


class Line:
    """The waiters for one name, the one at the server first, and what was heard of that server."""

    __slots__ = ("answered_at", "asked_at", "bells", "silence", "silent_since")

    def __init__(self) -> None:
        self.bells: list[Bell] = []
        self.asked_at = self.answered_at = -math.inf  # for the last time
        self.silent_since: float | None = None
        self.silence: BackendUnavailable | None = None

    def answered(self, now: float) -> None:
        self.answered_at = now
        self.silent_since = self.silence = None

    def heard_since(self, started: float) -> bool:
        return self.answered_at >= started

    def unheard(self, started: float, now: float) -> bool:
        """Whether nothing at all says to a waiter that came at ``started`` that the name is taken: no answer since, and
        a request under way that had time for one; before the very first answer, any."""
        if self.heard_since(started):
            return False
        return self.answered_at == -math.inf or now - SHORT >= self.asked_at > self.answered_at

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
        self._lock = system.RLock()

    def enter(self, name: str, bell: Bell) -> Line:
        """Take a place. The first of ``line.bells`` may talk to the server; the others are rung when they are it."""
        with self._lock:
            line = self._lines.get(name)
            if line is None:
                line = self._lines[name] = Line()
            line.bells.append(bell)
            return line

    def leave(self, name: str, bell: Bell) -> None:
        """Again after an interrupt: it may have come before there was a place, or before the next one was woken."""
        with self._lock:
            line = self._lines.get(name)
            if line is None:
                return
            bells = line.bells
            if bell in bells:
                first = bells[0] is bell
                bells.remove(bell)
                if not first:
                    return
            if bells:
                bells[0].ring()
            else:
                del self._lines[name]

    def behind(self) -> list[str]:
        """The name of each waiter that is not the first of its line."""
        with self._lock:
            return [name for name, line in self._lines.items() for _ in line.bells[1:]]

    def clear(self) -> None:
        """Who waits here never wakes. Should one of them leave all the same, it finds no place to give up."""
        with self._lock:
            self._lines.clear()

    def wake_all(self) -> None:
        with self._lock:
            bells = [bell for line in self._lines.values() for bell in line.bells]
        for bell in bells:
            bell.ring()
