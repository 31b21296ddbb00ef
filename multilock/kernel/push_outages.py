"""Reports of push connections that are down, in the log, as events, and as findings of ``diagnose()``.

Over a push connection the server wakes waiters and reports losses without being asked. While the connection is down, a
waiter is woken late, and a loss is noticed only by the next renewal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from multilock import system
from multilock.log_thread import logger
from multilock.model import Finding

if TYPE_CHECKING:
    from multilock.kernel.client import Kernel

__all__ = ["Pushes"]

PATIENCE = 3.0  # seconds until a broken connection is reported; a shorter break delays a waiter only briefly
UNTIL = "Until it is back, waiters ask by timer, and the loss of a lock is noticed only by its next renewal"


class _Down:
    __slots__ = ("told", "trouble")

    def __init__(self, trouble: str) -> None:
        self.trouble = trouble
        self.told = False


class Pushes:
    """The state of each push connection of one client, as its backend reports it (`multilock.backend.Notices`)."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._lock = system.RLock()
        self._down: dict[str, _Down] = {}

    def report(self, connection: str, trouble: str | None, refused: bool) -> None:
        """Record that a connection is down because of ``trouble``, or up again if that is None.

        ``refused``: The server refuses the connection, so report this at once instead of waiting until it works again.
        """
        if trouble is None:
            with self._lock:
                down = self._down.pop(connection, None)
            if down and down.told:
                self._tell_up(connection)
            return
        with self._lock:
            known = self._down.get(connection)
            down = known or _Down(trouble)
            down.trouble = trouble
            self._down[connection] = down
        if refused:
            self._tell_down(connection, down)
        elif known is None:
            kernel = self._kernel
            kernel.timers.at(kernel.now() + PATIENCE, lambda: self._tell_down(connection, down))

    def findings(self) -> list[Finding]:
        """Return a finding for each connection that is down."""
        return [
            Finding(
                "pushes-down",
                "warning",
                f"nothing is pushed over the {connection}: {down.trouble}. {UNTIL}",
                "let this client reach the server, and give its user the right that the message names",
            )
            for connection, down in list(self._down.items())
        ]

    def _tell_down(self, connection: str, down: _Down) -> None:
        with self._lock:
            if down.told or self._down.get(connection) is not down:
                return
            down.told = True
        logger.warning("nothing is pushed over the %s: %s. %s", connection, down.trouble, UNTIL)
        if tell := self._kernel.events.tell:
            tell.pushes_down(connection, down.trouble)

    def _tell_up(self, connection: str) -> None:
        logger.warning("the %s is back", connection)
        if tell := self._kernel.events.tell:
            tell.pushes_up(connection)
