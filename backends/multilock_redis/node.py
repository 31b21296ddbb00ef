"""One primary: the connections to it, the recipe of its locks, its notices, and the requests of operators."""

from __future__ import annotations

from collections.abc import Sequence

from multilock import BackendUnavailable
from multilock.backend import Busy, Claim, Granted, Held, Notices
from multilock_redis.acquire_release import Recipe, Replicas
from multilock_redis.connections import Connections
from multilock_redis.event_loop import Channel
from multilock_redis.inspection import Inspection
from multilock_redis.keys import Keyspace
from multilock_redis.notices import Listener
from multilock_redis.transactions import Transactions
from multilock_redis.transport import Endpoint

__all__ = ["Node"]


class Node:
    """The parts of one primary. A method does what the method of `multilock.backend.Backend` with the same name
    does."""

    def __init__(
        self,
        endpoint: Endpoint,
        keys: Keyspace,
        notices: Notices,
        replicas: Replicas | None = None,
    ) -> None:
        """Make the parts. Sends no request. A forked child makes its own parts."""
        endpoint.forget()
        self._now = notices.now
        self._endpoint = endpoint
        self.group = endpoint.name  #: the group of the leases at this primary
        self.connections = Connections(endpoint, notices.now)
        transactions = Transactions(self.connections, notices.now)
        self.recipe = Recipe(keys, transactions, endpoint.name, replicas)
        self.inspection = Inspection(keys, transactions)
        self.listener = Listener(endpoint, self.connections, keys, self.recipe, notices)

    def attempt(self, claim: Claim, join: bool, within: float) -> Granted | Busy:
        if join and not self.listener.listening:
            # A free lock needs no subscription. But the scripts skip a waiter that is not subscribed, so the claim
            # joins the queue only after subscribing.
            deadline = self._now() + within
            answer = self.recipe.attempt(claim, False, within)
            if isinstance(answer, Granted):
                return answer
            self.listener.listen(deadline - self._now())
            within = deadline - self._now()
        return self.recipe.attempt(claim, join, within)

    def attempt_all(self, claims: Sequence[Claim], within: float) -> list[Granted | Busy | Exception]:
        deadline = self._now() + within
        self.listener.listen(within)  # these claims will wait, so subscribe first
        return self.recipe.attempt_all(claims, deadline - self._now())

    def channel(self, within: float) -> Channel | None:
        if self.recipe.replicas.of_grants:
            return None  # a channel cannot send the two requests that replicas= needs, so use a thread
        wire = self.connections.channel(within)
        return Channel(wire, self.recipe, self.listener) if wire else None

    def release(self, claim: Claim, unsure: bool, within: float) -> bool:
        self.listener.unwatch(claim.id)  # before the request is sent, so that the release does not look like a loss
        return self.recipe.release(claim, unsure, within)

    def renew(self, held: Sequence[Held], within: float) -> list[Granted | BackendUnavailable | None]:
        names = [claim.name for claim, _ in held]
        return self.listener.tracking(names, lambda exchange: self.recipe.renew(held, exchange, within))

    def rest(self, claim: Claim, unsure: bool, seconds: float, within: float) -> bool:
        self.listener.unwatch(claim.id)  # before the request is sent, so that the release does not look like a loss
        return self.recipe.rest(claim, unsure, seconds, within)

    def interrupt(self) -> None:
        """End all connections. Requests that wait for a reply then fail with BackendUnavailable."""
        self._endpoint.interrupt()

    def close(self) -> None:
        self.listener.close()
        self.connections.close()
