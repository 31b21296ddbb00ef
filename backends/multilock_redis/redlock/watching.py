"""Each server tells when a claim does not hold its name there any more; one that lost it tells again once it has it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from multilock.backend import Claim, Held
from multilock_redis.node import Node
from multilock_redis.redlock.places import Places
from multilock_redis.redlock.servers import Servers, limit
from multilock_redis.redlock.standing import Standing

__all__ = ["Watching"]


class Watching:
    def __init__(self, servers: Servers, places: Places) -> None:
        self._servers = servers
        self._places = places

    def begin(self, held: Sequence[Held], within: float) -> None:
        for claim, _ in held:
            if standing := self._places.get(claim.id):
                standing.watched = True

        def watch(node: Node, within: float) -> None:
            self._watch(self._servers.nodes.index(node), held, node, within)

        self._servers.ask_most(watch, within, "watch it")

    def again(self, which: int, held: Sequence[Held]) -> None:
        """Where this server has these and does not tell of them: it lacked them, or could not be asked. Nobody waits
        for it; what fails is tried again after the next renewal."""
        missing = [(claim, granted) for claim, granted in held if self._is_missing(claim, which)]
        if missing:
            claim = min((claim for claim, _ in missing), key=lambda claim: claim.ttl)
            until = self._servers.now() + limit(claim, claim.ttl)
            self._servers.crews[which].ask(partial(self._watch, which, missing), until, _nobody)

    def _is_missing(self, claim: Claim, which: int) -> bool:
        standing = self._places.get(claim.id)
        return standing is not None and standing.watched and not standing.at[which].watched

    def _watch(self, which: int, held: Sequence[Held], node: Node, within: float) -> None:
        """What a release ends meanwhile, the server tells of as lost, and nobody heeds that (`Ear.gone`)."""
        wanted: list[tuple[Standing, Held]] = []
        for each in held:
            if (standing := self._places.get(each[0].id)) and not standing.leaving:
                standing.at[which].watched = True  # before the server is asked: it may tell at once
                wanted.append((standing, each))
        if not wanted:
            return
        try:
            node.listener.watch([each for _, each in wanted], within)
        except BaseException:
            for standing, _ in wanted:
                standing.at[which].watched = False
            raise


def _nobody(said: object) -> None:
    """Nobody waits for it."""
