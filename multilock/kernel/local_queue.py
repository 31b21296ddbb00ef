"""The queue inside a client, called the local gate: of all its waiters for one name, only the first sends requests.

Waiters with ``fair=True``, readers and permits join the server's own queue, and ``timeout=0`` asks the server at once.
None of these uses the gate. A line is the queue of waiters for one name. A bell wakes one waiter.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from multilock import system
from multilock.errors import BackendUnavailable

if TYPE_CHECKING:
    from multilock.kernel.runtime import Bell

__all__ = ["SHORT", "Gate", "Line"]

SHORT = 0.05  # seconds; an unanswered request with a shorter timeout is no evidence that the backend is silent


class Line:
    """The waiters for one name, and when the backend last answered. The first waiter is the one that sends requests."""

    __slots__ = ("answered_at", "asked_at", "bells", "silence", "silent_since")

    def __init__(self) -> None:
        self.bells: list[Bell] = []
        self.asked_at = self.answered_at = -math.inf  # times of the last request and of the last answer
        self.silent_since: float | None = None  # when the first request of the present outage was sent
        self.silence: BackendUnavailable | None = None  # the error of the present outage

    def answered(self, now: float) -> None:
        """Record an answer, which ends an outage."""
        self.answered_at = now
        self.silent_since = self.silence = None

    def not_asked(self, why: BackendUnavailable) -> None:
        """Record that no request for this name was sent, although the backend answers other requests. That is not an
        outage, but a waiter whose time ends now must not report that the name is taken."""
        self.silent_since, self.silence = None, why

    def heard_since(self, started: float) -> bool:
        """Return whether the backend has answered since ``started``."""
        return self.answered_at >= started

    def unheard(self, started: float, now: float) -> bool:
        """Return whether a waiter that began at ``started`` has no evidence that the name is taken.

        Returns True if the backend has not replied since ``started``, although the present request has had enough time
        for a reply. Before the backend's very first reply, returns True however recent the request is.
        """
        if self.heard_since(started):
            return False
        return self.answered_at == -math.inf or now - SHORT >= self.asked_at > self.answered_at

    def unanswered(self, sent_at: float, silence: BackendUnavailable) -> None:
        """Record a request without an answer. The first one begins an outage."""
        self.silence = silence
        if self.silent_since is None:
            self.silent_since = sent_at

    def patience_ends(self, started: float, outage_timeout: float) -> float:
        """Return the earliest time at which the present outage is too long for a waiter that began at ``started``."""
        return max(started, math.inf if self.silent_since is None else self.silent_since) + outage_timeout


class Gate:
    """The waiters of one client, in one queue for each name."""

    def __init__(self) -> None:
        self._lines: dict[str, Line] = {}
        self._lock = system.RLock()

    def enter(self, name: str, bell: Bell) -> Line:
        """Join the queue for ``name``. The waiter whose bell is the first in ``line.bells`` may send requests. When
        that waiter leaves, the next bell rings."""
        with self._lock:
            line = self._lines.get(name)
            if line is None:
                line = self._lines[name] = Line()
            line.bells.append(bell)
            return line

    def leave(self, name: str, bell: Bell) -> None:
        """Leave the queue, and wake the next waiter. If this call is interrupted, call it again.

        The interrupt may have come before the next waiter was woken.
        """
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
        """Return the names for which waiters wait behind the first one. A name occurs once for each of these
        waiters."""
        with self._lock:
            return [name for name, line in self._lines.items() for _ in line.bells[1:]]

    def clear(self) -> None:
        """Forget all waiters, because their event loop was closed. A later `leave` of a forgotten waiter changes
        nothing."""
        with self._lock:
            self._lines.clear()

    def wake_all(self) -> None:
        """Wake every waiter, because the client is being closed."""
        with self._lock:
            bells = [bell for line in self._lines.values() for bell in line.bells]
        for bell in bells:
            bell.ring()
