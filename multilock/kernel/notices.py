"""Reactions to the reports of backends: wake-ups for waiters, losses of leases, changes of the holder for observers.

A lease is lost exactly once, by the thread that notices first. The loss may be noticed by the watchdog's timer, by
is_held() when it reads the clock, by a notice from the server, or by a release that finds the lock gone.

A claim is the demand of one caller for one name. A bell wakes the waiter of a claim. A session is a group of leases
that the server keeps alive together.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from multilock import system
from multilock.kernel import validity
from multilock.kernel.holding import AnyHeld, Holding
from multilock.kernel.interrupts import surely
from multilock.kernel.runtime import wait_until
from multilock.log_thread import logger
from multilock.model import Busy, Claim, Granted, Loss, LossReason

if TYPE_CHECKING:
    from multilock.kernel.client import Kernel
    from multilock.kernel.runtime import Bell

__all__ = ["Monitor", "UngrantedClaim"]


class UngrantedClaim:
    """A claim that has no lease yet, with the notices that arrived for the claim since its last request.

    A server may report the end of a claim or of its session while the grant is still on its way to the kernel. That
    grant is then refused, because the server would not report the end again.
    """

    __slots__ = ("bell", "claim", "ended", "gone", "granted", "told")

    def __init__(self, claim: Claim, bell: Bell) -> None:
        self.claim = claim
        self.bell = bell
        self.granted: Granted | None = None
        self.told: Busy | None = None  # the last answer to this claim, or None if the claim was woken since
        self.gone = False  # the server has revoked this claim
        self.ended: frozenset[Hashable] = frozenset()  # sessions that ended since the claim was made

    def is_contradicted(self, granted: Granted) -> bool:
        """Return whether a notice has ended this claim, or the session of ``granted``."""
        return self.gone or granted.group in self.ended


class Monitor:
    """The kernel's implementation of `multilock.backend.Notices`.

    Only this class calls the transitions to LOST in `multilock.kernel.holding`.
    """

    def __init__(self, kernel: Kernel, client: str) -> None:
        self._kernel = kernel
        self.client = client
        self.now = kernel.runtime.now
        self.waiting: dict[str, UngrantedClaim] = {}  # by claim id
        self._telling: dict[AnyHeld, int] = {}  # lost leases being reported, each with the id of the thread

    # Notices

    def wake(self, claim_id: str | None) -> None:
        """See `multilock.backend.Notices.wake`."""
        waiting = list(self.waiting.values()) if claim_id is None else [self.waiting.get(claim_id)]
        for one in waiting:
            if one:
                if claim_id is not None:
                    one.told = None
                one.granted = None  # cleared before the bell rings: a grant pushed earlier may have been revoked
                one.bell.ring()

    def granted(self, claim_id: str, granted: Granted) -> None:
        """See `multilock.backend.Notices.granted`."""
        if one := self.waiting.get(claim_id):
            one.granted = granted  # stored before the bell rings, because the waiter reads this when it wakes
            one.bell.ring()

    def gone(self, claim_id: str, reason: LossReason, message: str) -> None:
        """See `multilock.backend.Notices.gone`."""
        with self._kernel.lock:  # under the lock, the claim is always either a waiter or a lease
            lease = self._kernel.held.get(claim_id)
            one = None if lease else self.waiting.get(claim_id)
            if one:
                one.gone, one.granted = True, None
        if lease:
            self.lose(lease, reason, message, confirmed=True)
        elif one:
            one.bell.ring()

    def group(self, group: Hashable, ttl: float, renew_every: float) -> None:
        """See `multilock.backend.Notices.group`."""
        self._kernel.watchdog.sessions.add(group, ttl, renew_every)

    def shortened(self, group: Hashable, ttl: float, valid_until: float, renew_every: float) -> None:
        """See `multilock.backend.Notices.shortened`."""
        kernel = self._kernel
        before = kernel.watchdog.sessions.shorten(group, ttl, valid_until, renew_every)
        if before is not None:
            logger.warning(
                "%s grants sessions of %g s instead of %g s from now on: the leases held in them are shortened as well",
                kernel.scheme,
                ttl,
                before,
            )

    def group_gone(self, group: Hashable, message: str) -> None:
        """See `multilock.backend.Notices.group_gone`."""
        kernel = self._kernel
        with kernel.lock:  # done before a bell rings, because a grant pushed earlier may have been revoked since
            if kernel.watchdog.sessions.drop(group):
                for one in list(self.waiting.values()):
                    one.ended |= {group}
            leases = kernel.leases_of(group)
        for lease in leases:
            self.lose(lease, LossReason.SESSION_LOST, message, confirmed=True)
        self.wake(None)

    def silent(self, group: Hashable) -> None:
        """See `multilock.backend.Notices.silent`."""
        self._kernel.watchdog.hurry(group)

    def changed(self, name: str | None) -> None:
        """See `multilock.backend.Notices.changed`."""
        self._kernel.followers.changed(name)

    def pushes(self, connection: str, trouble: str | None, *, refused: bool = False) -> None:
        """See `multilock.backend.Notices.pushes`."""
        self._kernel.pushes.report(connection, trouble, refused)

    # Losses

    def expire(self, lease: Holding) -> bool:
        """Lose a lease whose deadline has passed: no renewal was acknowledged, or its max_hold is over.

        Returns False if the lease was already over.
        """
        late = self.now() - lease.lost_at
        reason = validity.loss_reason(self.now(), lease.lost_at, lease.granted.ttl, lease.hold_until)
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

        ``give_back``: Have the background cancel release the claim at the server. If False, the caller releases
        the claim. ``released``: The caller is a release that found the lock gone.
        """
        if confirmed and not released and self.now() >= lease.valid_until:
            return self.expire(lease)
        loss = Loss(lease, reason, confirmed, message, self.now(), lease.valid_until)
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
        """Report a loss: callbacks, hooks, background cancel, event and log line. A second call changes nothing."""
        kernel = self._kernel
        for callback in lease._callbacks or ():  # started before any call that could block
            kernel.callbacks.start(callback, loss)
        lease._call_hooks()
        lease._callbacks = None
        # for a lease of several locks, the steps below are done for the part that was lost
        if not isinstance(lease, Holding):
            return
        if give_back:
            # The server may still have the claim, so release it there. If the loss is not confirmed, the release waits
            # until ``valid_until``, so that the callback can stop the work first. It is sent earlier if the work has
            # ended.
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
