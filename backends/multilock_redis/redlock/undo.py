"""A claim is given up on every server that a request of it may have reached, until each has confirmed it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from multilock import BackendUnavailable
from multilock.backend import Claim, Returned
from multilock_redis.node import Node
from multilock_redis.redlock.places import Places
from multilock_redis.redlock.quorum import Verdict
from multilock_redis.redlock.servers import Answers, Servers, limit
from multilock_redis.redlock.standing import Standing

__all__ = ["How", "Undo"]

How = Callable[[Node, Claim, bool, float], bool]
"""`Node.release`, or as that."""


class Undo:
    def __init__(self, servers: Servers, places: Places) -> None:
        self._servers = servers
        self._places = places

    def tell(self, claim: Claim, unsure: bool, within: float, how: How) -> Returned:
        """Tell every server where something of it may be, and that has not confirmed it yet."""
        places, now = self._places, self._servers.now
        standing = places.leave(claim, unsure)
        with standing.lock:
            standing.leaving = True
            untold = places.stays_untold(standing)
        for node in self._servers.nodes:
            node.listener.unwatch(claim.id)  # before it is sent: what follows is no loss
        answers = Answers()
        start = now()
        until = start + min(within, limit(claim, within))
        for which in untold:
            self._servers.keepers[which].ask(
                partial(_tell_one, standing, which, how), until, partial(answers.tell, which)
            )
        for _ in untold:
            decided = self._was_ours(standing) is not Verdict.OPEN
            # The others as a rule answer just after; what does not is told again in the background.
            left = until - now() if not decided else 2 * (now() - start) + 0.001
            if answers.get(min(left, until - now())) is None:
                break
        with standing.lock:
            again = bool(places.stays_untold(standing))
        was_ours = self._was_ours(standing)
        if not again:
            places.forget(claim)
            return Returned(was_ours is Verdict.YES)
        places.leave_again(claim)
        if was_ours is not Verdict.YES and was_ours is not Verdict.NO:
            raise BackendUnavailable("too few servers have confirmed the release", unknown=True)
        return Returned(was_ours is Verdict.YES, again)

    def _was_ours(self, standing: Standing) -> Verdict:
        yes = sum(at.released is True for at in standing.at)
        no = sum(at.released is False or not at.touched for at in standing.at)
        return self._servers.quorum.kept(yes, no, 0)


def _tell_one(standing: Standing, which: int, how: How, node: Node, within: float) -> None:
    at = standing.at[which]
    with standing.lock:
        unsure = at.unsure or at.under_way
    ours = how(node, standing.claim, unsure, within)
    with standing.lock:
        at.released = ours
