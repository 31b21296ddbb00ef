"""The lock on one Redis primary: what is asked of its scripts, and what their answers mean.

A lock is a string key with an end (`SET key owner NX PX ttl`, as in the pattern that Redis documents, so that plain
clients and redis-py's Lock exclude us and we them), with what that pattern lacks: a fencing token, a queue in order of
arrival in which the releaser itself makes the next one the holder, and a cancel that is final. Each step is one script
in ``scripts/``, atomic and safe to send again; the invariant stands on top of each. So here is no race: they are all in
there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from multilock.backend import Busy, Claim, Granted, Held
from multilock_redis.keys import Keyspace, token_of
from multilock_redis.transactions import ACQUIRE, RELEASE, RENEW, REST, Exchange, Transactions
from multilock_redis.wire import bulks

__all__ = ["RESTS", "Recipe", "liveness"]

TOMBSTONE = 60_000  # ms; longer than any request can lie in a buffer of a connection that was closed
RESTS = b"#multilock:rest:"  # before the owner of a name that was released and rests: no claim is called so
RENEWED_AT_ONCE = 500  # locks; one script keeps the server for about 1 ms
_LAST, _ORDINARY = bulks(b"%d" % TOMBSTONE), bulks(b"0")


def liveness(ttl: float) -> float:
    """Seconds for which one request keeps a waiter's place. Three heartbeats: two may be late.

    Long enough that a thousand waiters are no load, short enough that a dead one delays the next by no more than this.
    """
    return min(max(ttl, 1.0), 6.0)


class Recipe:
    """What is sent is made by ``to_…`` methods, and what is answered is read by `attempted`, apart from the sending: an
    event loop sends by itself (`multilock_redis.channel`)."""

    def __init__(self, keys: Keyspace, transactions: Transactions, group: str) -> None:
        self._keys = keys
        self._transactions = transactions
        self._group = group

    # ---- acquire

    def attempt(self, claim: Claim, join: bool, within: float) -> Granted | Busy:
        """Take it, or take and keep a place in the queue. Who joins is served in order of arrival, fair or not; an
        unfair one that does not join takes a free lock whoever waits."""
        return self.attempted(claim, *self._transactions.run(ACQUIRE, self.to_attempt(claim, join), within))

    def to_attempt(self, claim: Claim, join: bool) -> bytes:
        keys = self._keys.of(claim.name)
        return b"".join((ACQUIRE.head, keys.first_four, keys.own(claim), _how(claim.ttl, join, claim.fair)))

    def attempted(self, claim: Claim, answer: Any, sent_at: float) -> Granted | Busy:
        ttl = claim.ttl
        if isinstance(answer, int):
            return Granted(answer, ttl, sent_at, ttl, ttl / 3, self._group, claim.owner)
        left, rank = answer
        # A key that ends by itself is worth a look just then, for those whose turn it may be: one after the other.
        # Its own end is pushed late, or never.
        expires_in = left / 1000 + 0.002 + 0.020 * rank if left >= 0 and 0 <= rank < 3 else None
        return Busy(liveness(ttl) / 3, expires_in)

    # ---- renew

    def renew(self, held: Sequence[Held], exchange: Exchange, within: float) -> list[Granted | None]:
        chunks = [held[start : start + RENEWED_AT_ONCE] for start in range(0, len(held), RENEWED_AT_ONCE)]
        answers = self._transactions.run_all(RENEW, [self._renewal(chunk) for chunk in chunks], exchange, within)
        return [
            Granted(granted.token, claim.ttl, sent_at, claim.ttl, claim.ttl / 3, self._group, granted.key)
            if ours
            else None
            for chunk, (flags, sent_at) in zip(chunks, answers, strict=True)
            for (claim, granted), ours in zip(chunk, flags, strict=True)
        ]

    def _renewal(self, held: Sequence[Held]) -> bytes:
        keys: list[bytes] = []
        values: list[bytes] = []
        for claim, _ in held:
            lock = self._keys.lock(claim.name)
            keys += (lock, token_of(lock))
            values += (claim.owner.encode(), b"%d" % round(claim.ttl * 1000))
        return RENEW.head_for(2 * len(keys), len(keys)) + bulks(*keys, *values)

    # ---- release

    def release(self, claim: Claim, unsure: bool, within: float) -> bool:
        answer, _ = self._transactions.run(RELEASE, self.to_release(claim, unsure), within)
        return bool(answer)

    def to_release(self, claim: Claim, unsure: bool) -> bytes:
        keys = self._keys.of(claim.name)
        return b"".join((RELEASE.head, keys.first_four, keys.own(claim), _LAST if unsure else _ORDINARY))

    # ---- rest

    def rest(self, claim: Claim, unsure: bool, seconds: float, within: float) -> bool:
        keys = self._keys.of(claim.name)
        last, how = _LAST if unsure else _ORDINARY, bulks(b"%d" % max(1, math.ceil(seconds * 1000)), RESTS)
        request = b"".join((REST.head, keys.first_four, keys.own(claim), last, how))
        answer, _ = self._transactions.run(REST, request, within)
        return bool(answer)


@lru_cache(maxsize=256)
def _how(ttl: float, join: bool, fair: bool) -> bytes:
    """Packed: ttl, liveness, whether a free lock may be taken past the queue."""
    wait = round(liveness(ttl) * 1000) if join else 0
    return bulks(b"%d" % round(ttl * 1000), b"%d" % wait, b"%d" % (not join and not fair))
