"""Where each claim of this client stands, and which were given up."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from multilock import system
from multilock.backend import Claim
from multilock_redis.recipe import liveness
from multilock_redis.redlock.standing import At, Standing

__all__ = ["Places"]

REMEMBERED = 60.0  # seconds for which a claim that was given up is known: a thread may not have come to ask for it yet


class Places:
    """Any thread may call."""

    def __init__(self, nodes: int, now: Callable[[], float]) -> None:
        self.nodes = nodes
        self._now = now
        self.standings: dict[str, Standing] = {}  #: by claim id
        self._lock = system.Lock()  # for changes of what follows
        self._left: OrderedDict[str, float] = OrderedDict()  # not to be asked for any more, and since when

    def get(self, claim_id: str) -> Standing | None:
        return self.standings.get(claim_id)

    def forget(self, claim: Claim) -> None:
        self.standings.pop(claim.id, None)

    def enter(self, claim: Claim) -> Standing | None:
        """None: it was given up, and this very attempt comes late."""
        standing = self.standings.setdefault(claim.id, Standing(claim, self.nodes))
        # Looked at second: whoever gives it up notes that first, and looks for its standing second.
        return None if claim.id in self._left else standing

    def leave(self, claim: Claim, unsure: bool) -> Standing:
        """It is given up; if ``unsure``, an attempt may come late. One that nobody knows may be anywhere."""
        self._forget_left()
        if unsure:
            with self._lock:
                self._left[claim.id] = self._now()
        standing = self.standings.get(claim.id)
        if standing is None:  # told again, or nobody knows where it may be
            standing = self.standings[claim.id] = Standing(claim, self.nodes)
            for at in standing.at:
                at.touched, at.unsure, at.asked = True, unsure, self._now()
        return standing

    def leave_again(self, claim: Claim) -> None:
        """It is to be told again that it was given up."""
        with self._lock:
            self._left.setdefault(claim.id, self._now())

    def stays(self, at: At, claim: Claim) -> bool:
        """Whether something of it may be there. What nobody keeps alive has ended by itself after a while; a request
        without an answer may be executed at any time, and is undone for longer than the kernel asks for that."""
        if at.under_way:
            return True
        if at.unsure:
            return self._now() < at.asked + max(REMEMBERED, 2 * claim.ttl) + REMEMBERED
        return at.touched and self._now() < at.asked + claim.ttl + liveness(claim.ttl)

    def stays_untold(self, standing: Standing) -> list[int]:
        """The servers where something of it may be, and which have not confirmed that it is given up."""
        return [which for which, at in enumerate(standing.at) if at.released is None and self.stays(at, standing.claim)]

    def _forget_left(self) -> None:
        """Those that no request is on its way to us for, nor a cancel that was given up."""
        with self._lock:
            for claim_id in list(self._left)[:2]:
                standing = self.standings.get(claim_id)
                if standing and any(self.stays(at, standing.claim) for at in standing.at):
                    self._left.move_to_end(claim_id)  # it is never missing: an attempt may look just now
                elif self._now() - self._left[claim_id] > REMEMBERED:
                    self.standings.pop(claim_id, None)
                    del self._left[claim_id]
