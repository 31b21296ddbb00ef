"""The lock on one Redis primary: what is asked of its scripts, and what their answers mean.

A lock is a string key with an end (`SET key owner NX PX ttl`, as in the pattern that Redis documents, so that plain
clients and redis-py's Lock exclude us and we them), with what that pattern lacks: a fencing token, a queue in order of
arrival in which the releaser itself makes the next one the holder, and a cancel that is final. While readers or permits
share it the string is a marker, and who shares it stands in a sorted set, each with the end of its own lease. Each step
is one script in ``scripts/``, atomic and safe to send again; the invariant stands on top of each. So here is no race:
they are all in there.

A release makes the next one the holder and tells it so, in one push that is a grant: the waiter's newest executed
request said when it was sent, and until then plus the liveness that it asked for the server lets in nobody else,
whenever the push is read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from multilock import BackendRejected, BackendUnavailable
from multilock.backend import Busy, Claim, Granted, Held, other_number
from multilock_redis.keys import Keyspace, holders_of, token_of
from multilock_redis.transactions import (
    ACQUIRE,
    RELEASE,
    RENEW,
    RENEW_SHARED,
    REST,
    SHARE,
    Exchange,
    Script,
    Transactions,
)
from multilock_redis.wire import Redirected, bulks, pack, refused

__all__ = ["RESTS", "Recipe", "Replicas", "liveness"]

TOMBSTONE = 60_000  # ms; longer than any request can lie in a buffer of a connection that was closed
OTHER_NUMBER = -3  # the first word of an answer of share.lua
RESTS = b"#multilock:rest:"  # before the owner of what was released and rests: no claim is called so
AT_ONCE = {RENEW: 500, RENEW_SHARED: 250}  # locks; one script keeps the server for about 1 ms
_LAST, _ORDINARY = bulks(b"%d" % TOMBSTONE), bulks(b"0")


def liveness(ttl: float) -> float:
    """Seconds for which one request keeps a waiter's place. Three heartbeats: two may be late.

    Long enough that a thousand waiters are no load, short enough that a dead one delays the next by no more than this.
    """
    return min(max(ttl, 1.0), 6.0)


@dataclass(frozen=True, slots=True)
class Replicas:
    """How many replicas must have acknowledged a grant, and a renewal, before it counts (``WAIT``). That narrows what a
    failover can lose, and is no consensus: the replica that is promoted need not be one of them."""

    of_grants: int = 0
    of_renewals: int = 0

    def wait(self, wanted: int, within: float) -> bytes:
        """The last quarter of the time is for the answer."""
        return pack("WAIT", wanted, max(1, int(within * 750)))

    def too_few(self, wanted: int, reached: int) -> BackendUnavailable | None:
        if reached >= wanted:
            return None
        what = f"{reached} of the {wanted} replicas that replicas={wanted} asks for have acknowledged the lock in time"
        return BackendUnavailable(what, unknown=True, backend="redis")


class Recipe:
    """What is sent is made by ``to_…`` methods, and what is answered is read by `attempted`, apart from the sending: an
    event loop sends by itself (`multilock_redis.channel`)."""

    def __init__(
        self, keys: Keyspace, transactions: Transactions, group: str, replicas: Replicas | None = None
    ) -> None:
        self._keys = keys
        self.replicas = replicas or Replicas()
        self._transactions = transactions
        self._group = group
        self.told = True  #: our waiters hear of their turn; where not, the scripts must not take them for dead

    def over(self, transactions: Transactions) -> Recipe:
        """The same, by other connections to its server."""
        recipe = Recipe(self._keys, transactions, self._group, self.replicas)
        recipe.told = self.told
        return recipe

    # ---- acquire

    def attempt(self, claim: Claim, join: bool, within: float) -> Granted | Busy:
        """Take it, or take and keep a place in the queue. Who joins is served in order of arrival, fair or not; an
        unfair one that wants it alone and does not join takes a free lock whoever waits."""
        deadline = self._transactions.now() + within
        script = ACQUIRE if claim.mode == "x" else SHARE
        answer = self.attempted(claim, *self._transactions.run(script, request := self.to_attempt(claim, join), within))
        if isinstance(answer, Granted) and self.replicas.of_grants:
            return self._acknowledged(claim, script, request, deadline - self._transactions.now())
        return answer

    def _acknowledged(self, claim: Claim, script: Script, request: bytes, within: float) -> Granted | Busy:
        """What has just been granted, once enough replicas have it. WAIT counts for what its own connection wrote last,
        and all that the server had written before; so the request is sent again, with WAIT behind it.

        Whatever goes wrong here, the name is held at the server: no answer counts, and the kernel cancels the claim."""
        exchange = self._transactions.connections.exchange
        wanted = self.replicas.of_grants
        requests = [request, self.replicas.wait(wanted, within)]
        try:
            try:
                (answer, sent_at), (reached, _) = self._transactions.run_all({script}, requests, exchange, within)
            except Redirected:
                raise  # its slot has moved, with what was granted
            except BackendRejected:
                self.release(claim, True, within)
                raise
        except (BackendUnavailable, Redirected) as silence:
            raise BackendUnavailable(str(silence), unknown=True, backend="redis") from silence
        granted = self.attempted(claim, answer, sent_at)
        if isinstance(granted, Granted) and (too_few := self.replicas.too_few(wanted, reached)):
            raise too_few
        return granted

    def to_attempt(self, claim: Claim, join: bool) -> bytes:
        keys, mode = self._keys.of(claim.name), claim.mode
        head = ACQUIRE.head if mode == "x" else SHARE.head
        # Nobody has waited for the replicas of what is handed over: who is told of it asks. In a cluster all nodes pass
        # a push on, so that it does not tell which of them handed over, and by whose clock the hand-over ends.
        by_push = claim.renew and not self.replicas.of_grants and not self._keys.in_slots
        how, echo = _how(claim.ttl, join, self.told, mode, claim.fair, by_push)
        if echo:
            how += echo % (self._transactions.now() * 1e6)  # read before the bytes leave
        return b"".join((head, keys.common, keys.own(claim), how))

    def attempted(self, claim: Claim, answer: Any, sent_at: float) -> Granted | Busy:
        ttl = claim.ttl
        if isinstance(answer, int):
            return Granted(answer, ttl, sent_at, ttl, ttl / 3, self._group, claim.owner)
        if len(answer) == 3:
            _, token, generation = answer
            return Granted(token, ttl, sent_at, ttl, ttl / 3, self._group, _marker(claim.mode, generation))
        left, rank = answer
        if left == OTHER_NUMBER:
            raise other_number(claim, rank, "redis")
        # A key that ends by itself is worth a look just then, for those whose turn it may be: one after the other.
        # Its own end is pushed late, or never.
        expires_in = left / 1000 + 0.002 + 0.020 * rank if left >= 0 and 0 <= rank < 3 else None
        return Busy(liveness(ttl) / 3, expires_in)

    def pushed(self, payload: bytes) -> tuple[str, Granted | None]:
        """The claim that a push is for; and what it grants, unless it is a hint. Whatever else may be published there
        is a hint at most."""
        claim_id, *words = payload.decode(errors="replace").split(" ")
        try:
            echo, token, key = words
            sent_at, wait = (int(number) for number in echo.split("/"))
            valid_for = wait / 1000
            granted = Granted(int(token), valid_for, sent_at / 1e6, valid_for, valid_for / 3, self._group, key, True)
        except (ValueError, OverflowError):
            return claim_id, None
        return claim_id, granted

    # ---- renew

    def renew(
        self, held: Sequence[Held], exchange: Exchange, within: float
    ) -> list[Granted | BackendUnavailable | None]:
        chunks = self.to_renew(held)
        requests = [request for _, _, request in chunks]
        wanted, too_few = self.replicas.of_renewals, None
        if wanted:
            requests.append(self.replicas.wait(wanted, within / 2))
        answers = self._transactions.run_each({script for script, _, _ in chunks}, requests, exchange, within)
        if wanted:
            reached, _ = answers.pop()
            if isinstance(reached, Exception):
                raise reached
            too_few = self.replicas.too_few(wanted, reached)
        renewed: list[Granted | BackendUnavailable | None] = [None] * len(held)
        for (_, places, _), (flags, sent_at) in zip(chunks, answers, strict=True):
            if isinstance(flags, Exception):
                silence = self._of_one_slot(flags)
                for i in places:
                    renewed[i] = silence
                continue
            for i, ours in zip(places, flags, strict=True):
                if ours:
                    ttl, granted = held[i][0].ttl, held[i][1]
                    renewed[i] = too_few or Granted(granted.token, ttl, sent_at, ttl, ttl / 3, self._group, granted.key)
        return renewed

    def to_renew(self, held: Sequence[Held]) -> list[tuple[Script, list[int], bytes]]:
        """The requests that renew all of them, and which of them each request renews."""
        return [
            (script, places, self._renewal(script, [held[i] for i in places])) for script, places in self._chunks(held)
        ]

    def _of_one_slot(self, error: Exception) -> BackendUnavailable:
        """What a renewal is answered that does not concern those in other slots; else it is raised."""
        if self._keys.in_slots and isinstance(error, BackendUnavailable):
            return error
        if self._keys.in_slots and isinstance(error, BackendRejected):
            return refused(error)
        raise error

    def _chunks(self, held: Sequence[Held]) -> list[tuple[Script, list[int]]]:
        """Which of these each request renews, and by which script."""
        places: dict[tuple[Script, int], list[int]] = {}
        for i, (claim, _) in enumerate(held):
            script = RENEW if claim.mode == "x" else RENEW_SHARED
            places.setdefault((script, self._keys.slot(claim.name)), []).append(i)
        return [
            (script, those[start : start + AT_ONCE[script]])
            for (script, _), those in places.items()
            for start in range(0, len(those), AT_ONCE[script])
        ]

    def _renewal(self, script: Script, held: Sequence[Held]) -> bytes:
        keys: list[bytes] = []
        values: list[bytes] = []
        for claim, _ in held:
            lock = self._keys.lock(claim.name)
            keys += (lock, token_of(lock)) if script is RENEW else (lock, token_of(lock), holders_of(lock))
            values += (claim.owner.encode(), b"%d" % round(claim.ttl * 1000))
        return script.head_for(len(keys) + len(values), len(keys)) + bulks(*keys, *values)

    # ---- release

    def release(self, claim: Claim, unsure: bool, within: float) -> bool:
        answer, _ = self._transactions.run(RELEASE, self.to_release(claim, unsure), within)
        return bool(answer)

    def to_release(self, claim: Claim, unsure: bool) -> bytes:
        keys = self._keys.of(claim.name)
        return b"".join((RELEASE.head, keys.common, keys.own(claim), _LAST if unsure else _ORDINARY))

    # ---- rest

    def rest(self, claim: Claim, unsure: bool, seconds: float, within: float) -> bool:
        keys = self._keys.of(claim.name)
        last, how = _LAST if unsure else _ORDINARY, bulks(b"%d" % max(1, math.ceil(seconds * 1000)), RESTS)
        request = b"".join((REST.head, keys.common, keys.own(claim), last, how))
        answer, _ = self._transactions.run(REST, request, within)
        return bool(answer)


@lru_cache(maxsize=256)
def _how(ttl: float, join: bool, told: bool, mode: str, fair: bool, renew: bool) -> tuple[bytes, bytes]:
    """Packed: ttl, liveness; in which mode it is shared, or else whether a free lock may be taken past the queue. And
    the format of the echo that follows, of the time of sending in µs; it is in the first part, and empty, where a push
    is a hint only. What is not renewed has its whole ttl by an answer only; and a confirmation for a ttl below a
    liveness would end earlier than the hand-over."""
    wait = round(liveness(ttl) * 1000) if join else 0
    last = b"%d" % (not join and not fair) if mode == "x" else mode.encode()
    how = bulks(b"%d" % round(ttl * 1000), b"%d" % (wait if told else -wait), last)
    if not (join and told and renew) or ttl < liveness(ttl):
        return how + bulks(b""), b""
    # The time has as many digits as fill 300 years of a machine that is up.
    return how, bulks(b"%016d/%d" % (0, liveness(ttl) * 1000)).replace(b"%016d" % 0, b"%016d")


def _marker(mode: str, generation: int) -> str:
    """What the lock's key holds while it is shared: another text each time that it comes to be shared."""
    return f"#multilock:{mode}:{generation}"
