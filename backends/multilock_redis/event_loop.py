"""A connection to Redis for an event loop, which waits for replies without a thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from multilock.backend import Busy, Claim, Granted, Returned
from multilock_redis.acquire_release import Recipe
from multilock_redis.notices import Listener
from multilock_redis.transport import Wire
from multilock_redis.wire import ScriptMissing, Unclear, doubted

__all__ = ["Channel"]


class Channel:
    """The `multilock.backend.Channel` to one primary."""

    def __init__(self, wire: Wire, recipe: Recipe, listener: Listener) -> None:
        self._wire = wire
        self._recipe = recipe
        self._listener = listener
        self._understand: Callable[[Any], Granted | Busy | Returned | None] = _returned
        self.fileno = wire.fileno
        self.close = wire.close

    def attempt(self, claim: Claim, join: bool) -> bool:
        # A free lock needs no subscription. But the scripts skip a waiter that is not subscribed, so without a
        # subscription the claim does not join the queue.
        ready = self._listener.listening

        def understand(answer: Any) -> Granted | Busy | None:
            told = self._recipe.attempted(claim, answer, self._wire.used)
            return told if ready or not join or isinstance(told, Granted) else None

        self._understand = understand
        return self._wire.begin(self._recipe.to_attempt(claim, join and ready))

    def release(self, claim: Claim, granted: Granted | None, unsure: bool) -> bool:
        self._listener.unwatch(claim.id)  # before the request is sent, so that the release does not look like a loss
        self._understand = _returned
        return self._wire.begin(self._recipe.to_release(claim, unsure))

    def answer(self) -> Granted | Busy | Returned | None:
        try:
            answer = self._wire.finish()
        except ScriptMissing:
            return None
        except Unclear as error:
            raise doubted(error) from error
        return self._understand(answer)


def _returned(answer: Any) -> Returned:
    return Returned(bool(answer))
