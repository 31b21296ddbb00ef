"""The loss of a lease: it is recorded once, and then reported to callbacks, subscribers and the log.

A lease is lost exactly once, by the thread that notices first. The loss may be noticed by the watchdog's timer, by
is_held() when it reads the clock, by a notice from the server, or by a release that finds the lock gone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from multilock import system
from multilock.kernel import validity
from multilock.kernel.holding import AnyHeld, Holding
from multilock.kernel.interrupts import surely
from multilock.kernel.runtime import wait_until
from multilock.log_thread import logger
from multilock.model import Loss, LossReason

if TYPE_CHECKING:
    from multilock.kernel.client import Kernel

__all__ = ["Losses"]


class Losses:
    """The lost leases of one client. Only this class calls the transitions to LOST in `multilock.kernel.holding`."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._telling: dict[AnyHeld, int] = {}  # lost leases, each with the id of the thread that reports the loss

    def expire(self, lease: Holding) -> bool:
        """Lose a lease whose deadline has passed: no renewal was acknowledged, or its max_hold is over.

        Returns False if the lease was already over.
        """
        late = self._kernel.now() - lease.lost_at
        reason = validity.loss_reason(self._kernel.now(), lease.lost_at, lease.granted.ttl, lease.hold_until)
        if reason is LossReason.HELD_TOO_LONG:
            message = "its max_hold is over"
        elif reason is LossReason.PAUSED:
            message = f"this process did not run: it noticed the deadline {late:.3f} s late"
        elif lease.claim.renew:
            message = "no renewal was acknowledged in time"
        else:
            message = "its ttl is over, and it is not renewed (renew=False)"
        return self.lose(lease, reason, message, confirmed=False)

    def lose(
        self,
        lease: Holding,
        reason: LossReason,
        message: str,
        *,
        confirmed: bool,
        give_back: bool = True,
        released: bool = False,
    ) -> bool:
        """Lose a lease, and start its callbacks. Returns False if the lease was already over.

        If a server reports the end of a lease whose validity is over, this process did not run in time. The reason is
        then the one that `expire` gives, whichever thread notices the loss first. If the report comes before the
        validity ends, the loss is confirmed: another client may hold the name already, so ``time_left`` is 0.

        ``give_back``: Release the lease at the server in the background. If False, the caller releases the lease.
        ``released``: The caller is a release that found the lock gone.
        """
        if confirmed and not released and self._kernel.now() >= lease.valid_until:
            return self.expire(lease)
        loss = Loss(lease, reason, confirmed, message, self._kernel.now(), lease.valid_until)
        return surely(self._lose, lease, loss, give_back, released)

    def lose_with_a_part(self, lease: AnyHeld, loss: Loss[Any], released: bool) -> None:
        """Lose a lease of several locks, because one of these locks was lost as ``loss`` describes."""
        surely(self._lose, lease, loss, False, released)

    def _lose(self, lease: AnyHeld, loss: Loss[Any], give_back: bool, released: bool) -> bool:
        """Do the work of `lose`. A second call with the same ``loss`` finishes what an interrupt left undone."""
        kernel = self._kernel
        with kernel.lock:
            if lease.loss is not loss and not (lease._lose_released(loss) if released else lease._lose(loss)):
                return False
            self._telling[lease] = system.get_ident()
            kernel.apart.add(lease)
            if isinstance(lease, Holding):
                kernel.forget(lease)
        try:
            self._tell(lease, loss, give_back)
        finally:
            self._telling.pop(lease, None)
        return True

    def _tell(self, lease: AnyHeld, loss: Loss[Any], give_back: bool) -> None:
        """Report a loss to the callbacks, the hooks of `AnyHeld._at_end`, the subscribers and the log. A second call
        changes nothing."""
        kernel = self._kernel
        for callback in lease._callbacks or ():  # the callbacks are started before any call that could block
            kernel.callbacks.start(callback, loss)
        lease._call_hooks()
        lease._callbacks = None
        # for a lease of several locks, the steps below are done for the part that was lost
        if not isinstance(lease, Holding):
            return
        if give_back:
            # The server may still count the lease as held, so release the lease there. If the loss is not confirmed,
            # the release waits until ``valid_until``, so that the callback can stop the work first. If the work ends
            # earlier, the release is sent then.
            not_before = None if loss.confirmed else lease.valid_until
            kernel.cancels.add(lease.claim, lease.granted, lease.unsure, not_before=not_before)
            lease._give_back_early()  # the work may have ended before the cancel was added
        if tell := kernel.events.tell:
            tell.lost(lease, loss)
        logger.warning(
            "lost the lock %r (%s): %s", lease.name, loss.reason.value, loss.message, extra=kernel.extra(lease)
        )

    def wait(self, seconds: float) -> bool:
        """Wait until all losses are reported completely. Returns False after ``seconds``.

        A callback may end before the log line of its loss is written. A loss that this thread itself is reporting does
        not count.
        """
        me = system.get_ident()
        return wait_until(self._kernel.runtime, lambda: all(by == me for by in list(self._telling.values())), seconds)

    def lose_all(self, reason: LossReason, message: str) -> None:
        """Lose every lease of this client."""
        for lease in list(self._kernel.held.values()):
            self.lose(lease, reason, message, confirmed=False)
