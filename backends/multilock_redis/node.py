"""One primary: connections to it, the recipe of its locks, what it pushes, what operators ask of it."""

from __future__ import annotations

from multilock.backend import Busy, Claim, Granted, Notices
from multilock_redis.channel import Channel
from multilock_redis.inspection import Inspection
from multilock_redis.keys import Keyspace
from multilock_redis.notices import Listener
from multilock_redis.recipe import Recipe, Replicas
from multilock_redis.transactions import Transactions
from multilock_redis.transport import Connections, Endpoint

__all__ = ["Node"]


class Node:
    """Its methods promise what those of `multilock.backend.Backend` do; what needs one part only is asked of that."""

    def __init__(
        self,
        endpoint: Endpoint,
        keys: Keyspace,
        notices: Notices,
        replicas: Replicas | None = None,
    ) -> None:
        """No I/O. Made anew in a forked child. ``replicas``: see `Recipe`."""
        endpoint.forget()
        self._now = notices.now
        self._endpoint = endpoint
        self.group = endpoint.name  #: of what it grants
        self.connections = Connections(endpoint, notices.now)
        transactions = Transactions(self.connections, notices.now)
        self.recipe = Recipe(keys, transactions, endpoint.name, replicas)
        self.inspection = Inspection(keys, transactions)
        self.listener = Listener(endpoint, self.connections, keys, self.recipe, notices)

    def attempt(self, claim: Claim, join: bool, within: float) -> Granted | Busy:
        if join and not self.listener.listening:
            # A free lock needs no subscription. But who joins without one is taken for dead, and passed over.
            deadline = self._now() + within
            answer = self.recipe.attempt(claim, False, within)
            if isinstance(answer, Granted):
                return answer
            self.listener.listen(deadline - self._now())
            within = deadline - self._now()
        return self.recipe.attempt(claim, join, within)

    def channel(self, within: float) -> Channel | None:
        if self.recipe.replicas.of_grants:
            return None  # a channel has one request under way, and no time limit of its own: threads wait
        wire = self.connections.channel(within)
        return Channel(wire, self.recipe, self.listener) if wire else None

    def release(self, claim: Claim, unsure: bool, within: float) -> bool:
        self.listener.unwatch(claim.id)  # before it is sent: what follows is no loss
        return self.recipe.release(claim, unsure, within)

    def rest(self, claim: Claim, unsure: bool, seconds: float, within: float) -> bool:
        self.listener.unwatch(claim.id)  # as before a release
        return self.recipe.rest(claim, unsure, seconds, within)

    def interrupt(self) -> None:
        """End all connections, those too on which an answer is awaited: that is silence."""
        self._endpoint.interrupt()

    def close(self) -> None:
        self.listener.close()
        self.connections.close()
