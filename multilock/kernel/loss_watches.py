"""Watches for losses: requests to the backend to report, by a push, the loss of locks that are held for a while."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from multilock.kernel.holding import HELD, Holding
from multilock.kernel.inside_backend import call_inside
from multilock.log_thread import logger

if TYPE_CHECKING:
    from multilock.kernel.client import Kernel

__all__ = ["LossWatches"]

WATCHERS = 2  # threads that set watches
WATCH_AGAIN = 1.0  # seconds until a watch that could not be set is tried again


class LossWatches:
    """The requests of one client to report losses, and the threads that send them."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._workers = kernel.runtime.workers("multilock-watch", WATCHERS)

    def ask(self, group: Hashable, leases: Sequence[Holding]) -> None:
        """Have a thread ask the backend to report the loss of these locks."""
        self._workers.submit(partial(self._ask, group, leases))

    def _ask(self, group: Hashable, leases: Sequence[Holding]) -> None:
        kernel = self._kernel
        held = [(lease.claim, lease.granted) for lease in leases if lease.stage == HELD]
        try:
            if held:
                # No deadline depends on a watch, so the request has the longest timeout of these leases, not the
                # shortest.
                within = max(kernel.request_timeout(claim.ttl) for claim, _ in held)
                call_inside(kernel.backend.watch, group, held, within)
        except Exception as error:
            # Without a watch the loss is noticed later, by the next renewal. The watch is tried again.
            logger.debug("no watch on %d locks yet: %s", len(held), error)
            kernel.timers.at(kernel.now() + WATCH_AGAIN, lambda: self.ask(group, leases))

    def close(self) -> None:
        """End the threads that set watches."""
        self._workers.close()
