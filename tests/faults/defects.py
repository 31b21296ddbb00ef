"""Three classic defects of lock clients, built into a running contender: the chaos harness must see each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import multilock_redis.recipe as recipe
from multilock import Lease, now
from multilock.aio import AsyncLease
from multilock.holding import HELD, Holding
from multilock.model import Claim, Granted
from multilock_redis.transport import pack

__all__ = ["DEFECTS"]


def deadline_from_receipt() -> None:
    """The validity of a lease counts from the answer to its request, not from its sending."""

    def granted(token: int | None, ttl: float, sent_at: float, *rest: Any) -> Granted:
        return Granted(token, ttl, now(), *rest)

    vars(recipe)["Granted"] = granted


def plain_del() -> None:
    """A release deletes the key, whoever holds it by now."""

    def release(self: recipe.Recipe, claim: Claim, unsure: bool, within: float) -> bool:
        answer, _ = self._connections.call(pack("DEL", self._keys.lock(claim.name)), within)
        return bool(answer)

    recipe.Recipe.release = release  # type: ignore[method-assign]


def cached_is_held() -> None:
    """``is_held()`` tells what some thread stored last, and does not look at the clock."""

    def is_held(self: Holding) -> bool:
        return self._state == HELD

    for face in (Lease, AsyncLease):
        face.is_held = is_held  # type: ignore[method-assign]


DEFECTS: dict[str, Callable[[], None]] = {
    "deadline from receipt": deadline_from_receipt,
    "plain DEL": plain_del,
    "cached is_held": cached_is_held,
}
