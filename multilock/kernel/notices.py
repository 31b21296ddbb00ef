"""The kernel's reactions to the notices of a backend: wake-ups and grants for waiters, losses of leases, changes of the
holder for observers.

A claim is the demand of one caller for one name. A bell wakes the waiter of a claim. A session is a group of leases
that the server keeps alive together.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

from multilock.log_thread import logger
from multilock.model import Busy, Claim, Granted, LossReason

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
        self.gone = False  # whether the server has revoked this claim
        self.ended: frozenset[Hashable] = frozenset()  # sessions that ended since the claim was made

    def is_contradicted(self, granted: Granted) -> bool:
        """Return whether a notice has ended this claim, or the session of ``granted``."""
        return self.gone or granted.group in self.ended


class Monitor:
    """The kernel's implementation of `multilock.backend.Notices`."""

    def __init__(self, kernel: Kernel, client: str) -> None:
        self._kernel = kernel
        self.client = client
        self.now = kernel.runtime.now
        self.waiting: dict[str, UngrantedClaim] = {}  # by claim id

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
            self._kernel.losses.lose(lease, reason, message, confirmed=True)
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
            self._kernel.losses.lose(lease, LossReason.SESSION_LOST, message, confirmed=True)
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
