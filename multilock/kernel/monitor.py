"""What the backends report, turned into states: wake-ups for waiters, losses for leases, changes for followers.

A lease is lost exactly once, by whoever notices first: the watchdog's timer, a look at the clock by is_held(), a notice
from the server, a release that finds the lock gone.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from multilock import system
from multilock.kernel import validity
from multilock.kernel.holding import AnyHeld, Holding
from multilock.kernel.interrupts import surely
from multilock.kernel.runtime import wait_until
from multilock.model import Busy, Claim, Granted, Loss, LossReason
from multilock.telling import logger

if TYPE_CHECKING:
    from multilock.kernel.core import Kernel
    from multilock.kernel.runtime import Bell

__all__ = ["Monitor", "Waiting"]


class Waiting:
    """A claim before its lease is made: what was pushed to it since it last asked, and what was told against it.

    A server may say that a claim or its session is over while the grant is still on its way to the kernel. That grant
    is refused then: nobody would tell its holder again.
    """

    __slots__ = ("bell", "claim", "ended", "gone", "granted", "told")

    def __init__(self, claim: Claim, bell: Bell) -> None:
        self.claim = claim
        self.bell = bell
        self.granted: Granted | None = None
        self.told: Busy | None = None  # what it was answered last, unless it was woken since
        self.gone = False  # the server took the name back from this claim
        self.ended: frozenset[Hashable] = frozenset()  # sessions that ended since the claim was made

    def is_contradicted(self, granted: Granted) -> bool:
        return self.gone or granted.group in self.ended


class Monitor:
    """The kernel's side of `multilock.backend.Notices`, and the only caller of the transitions to LOST in
    `multilock.kernel.holding`."""

    def __init__(self, kernel: Kernel, client: str) -> None:
        self._kernel = kernel
        self.client = client
        self.now = kernel.runtime.now
        self.waiting: dict[str, Waiting] = {}  # by claim id
        self._telling: dict[AnyHeld, int] = {}  # lost, and not all of it is told yet; by which thread

    # Notices

    def wake(self, claim_id: str | None) -> None:
        waiting = list(self.waiting.values()) if claim_id is None else [self.waiting.get(claim_id)]
        for one in waiting:
            if one:
                if claim_id is not None:
                    one.told = None
                one.granted = None  # before the bell: what was pushed earlier may have been taken back since
                one.bell.ring()

    def granted(self, claim_id: str, granted: Granted) -> None:
        if one := self.waiting.get(claim_id):
            one.granted = granted  # before the bell: who is woken looks for it
            one.bell.ring()

    def gone(self, claim_id: str, reason: LossReason, message: str) -> None:
        with self._kernel.lock:  # the claim either waits or has its lease, and this notice meets the one or the other
            lease = self._kernel.held.get(claim_id)
            one = None if lease else self.waiting.get(claim_id)
            if one:
                one.gone, one.granted = True, None
        if lease:
            self.lose(lease, reason, message, confirmed=True)
        elif one:
            one.bell.ring()

    def group(self, group: Hashable, ttl: float, renew_every: float) -> None:
        self._kernel.watchdog.sessions.add(group, ttl, renew_every)

    def shortened(self, group: Hashable, ttl: float, valid_until: float, renew_every: float) -> None:
        kernel = self._kernel
        before = kernel.watchdog.sessions.shorten(group, ttl, valid_until, renew_every)
        if before is not None:
            logger.warning(
                "%s grants sessions of %g s instead of %g s from now on: what is held is valid for that much less",
                kernel.scheme,
                ttl,
                before,
            )

    def group_gone(self, group: Hashable, message: str) -> None:
        kernel = self._kernel
        with kernel.lock:  # as in `gone`
            if kernel.watchdog.sessions.drop(group):
                for one in list(self.waiting.values()):
                    one.ended |= {group}
            leases = kernel.leases_of(group)
        for lease in leases:
            self.lose(lease, LossReason.SESSION_LOST, message, confirmed=True)
        self.wake(None)

    def silent(self, group: Hashable) -> None:
        self._kernel.watchdog.hurry(group)

    def changed(self, name: str | None) -> None:
        self._kernel.followers.changed(name)

    def pushes(self, connection: str, trouble: str | None, *, refused: bool = False) -> None:
        self._kernel.pushes.report(connection, trouble, refused)

    # Losses

    def expire(self, lease: Holding) -> None:
        """No acknowledged renewal in time: the deadline has passed."""
        late = self.now() - lease._lost_at
        reason = validity.loss_reason(self.now(), lease._lost_at, lease._granted.ttl)
        if reason is LossReason.PAUSED:
            message = f"this process did not run: its deadline was noticed {late:.3f} s late"
        elif lease._claim.renew:
            message = "no renewal was acknowledged in time"
        else:
            message = "its ttl is over, and it is not renewed (renew=False)"
        self.lose(lease, reason, message, confirmed=False)

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
        """Once, and have its callbacks called. ``give_back=False``: the caller releases it. ``released``: that did,
        and found it gone."""
        loss = Loss(lease, reason, confirmed, message, self.now(), lease._valid_until)
        return surely(self._lose, lease, loss, give_back, released)

    def lose_with_a_part(self, lease: AnyHeld, loss: Loss[Any], released: bool) -> None:
        """The same for the lease of several locks, of which one was lost, as ``loss`` says."""
        surely(self._lose, lease, loss, False, released)

    def _lose(self, lease: AnyHeld, loss: Loss[Any], give_back: bool, released: bool) -> bool:
        """Twice is harmless: a lease that has this very loss was interrupted before all of it was told."""
        kernel = self._kernel
        with kernel.lock:
            if lease._loss is not loss and not (lease._lose_released(loss) if released else lease._lose(loss)):
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
        """Twice is harmless."""
        kernel = self._kernel
        for callback in lease._callbacks or ():  # before anything that could block
            kernel.callbacks.start(callback, loss)
        lease._call_hooks()
        lease._callbacks = None
        if not isinstance(lease, Holding):  # it has no claim, and its part is in the events and in the log
            return
        if give_back:
            # What may still stand at the server is given back, but not while the callback has its time.
            not_before = None if loss.confirmed else lease._valid_until
            kernel.cancels.add(lease._claim, lease._granted, lease._unsure, not_before=not_before)
        if tell := kernel.events.tell:
            tell.lost(lease, loss)
        logger.warning(
            "lost the lock %r (%s): %s", lease.name, loss.reason.value, loss.message, extra=kernel.extra(lease)
        )

    def wait(self, seconds: float) -> bool:
        """Whether all losses were told within so many seconds: a callback may have ended before the log has its line.
        One that this thread is about to tell is not waited for."""
        me = system.get_ident()
        return wait_until(self._kernel.runtime, lambda: all(by == me for by in list(self._telling.values())), seconds)

    def lose_all(self, reason: LossReason, message: str) -> None:
        for lease in list(self._kernel.held.values()):
            self.lose(lease, reason, message, confirmed=False)
