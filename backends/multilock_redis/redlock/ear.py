"""What one server pushes, counted to a majority before the kernel hears of it."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from multilock import LossReason
from multilock.backend import Granted, Notices
from multilock_redis.redlock.places import Places
from multilock_redis.redlock.quorum import Quorum
from multilock_redis.redlock.servers import limit
from multilock_redis.redlock.standing import Standing

__all__ = ["Ear"]


class Ear:
    """The kernel's ear, for what one server tells."""

    def __init__(
        self,
        which: int,
        quorum: Quorum,
        places: Places,
        notices: Notices,
        pushed: Callable[[Standing, int, Granted], None],
    ) -> None:
        self._which = which
        self._quorum = quorum
        self._places = places
        self._notices = notices
        self._pushed = pushed
        self.client = notices.client
        self.now = notices.now

    def wake(self, claim_id: str | None) -> None:
        if claim_id is None:
            self._notices.wake(None)
        elif standing := self._places.get(claim_id):
            with standing.lock:
                standing.at[self._which].is_hinted()
                standing.woken.add(self._which)
                ours = standing.woken | {which for which, at in enumerate(standing.at) if at.vote}
                enough = len(ours) >= self._quorum.needed
            if enough:
                self._notices.wake(claim_id)

    def granted(self, claim_id: str, granted: Granted) -> None:
        if standing := self._places.get(claim_id):
            self._pushed(standing, self._which, granted)

    def gone(self, claim_id: str, reason: LossReason, message: str) -> None:
        if standing := self._places.get(claim_id):
            now, claim = self.now(), standing.claim
            with standing.lock:
                if standing.leaving:  # what a release ends is no loss
                    return
                at = standing.at[self._which]
                at.watched, at.taken = False, now
                at.is_gone()
                lacking = standing.lacking(now, limit(claim, claim.ttl))
                lost = self._quorum.lost(lacking) and not standing.told_gone
                standing.told_gone |= lost
            if lost:
                self._notices.gone(claim_id, reason, f"{message}, on a majority")

    def changed(self, name: str | None) -> None:
        self._notices.changed(name)  # each: the last of a majority is not known to be the last

    def pushes(self, connection: str, trouble: str | None, *, refused: bool = False) -> None:
        self._notices.pushes(connection, trouble, refused=refused)

    # No server of this kind has sessions.

    def group(self, group: Hashable, ttl: float, renew_every: float) -> None:
        raise NotImplementedError

    def shortened(self, group: Hashable, ttl: float, valid_until: float, renew_every: float) -> None:
        raise NotImplementedError

    def group_gone(self, group: Hashable, message: str) -> None:
        raise NotImplementedError

    def silent(self, group: Hashable) -> None:
        raise NotImplementedError
