"""The lock on one Redis primary: the calls of the Lua scripts, and what their replies mean.

A lock is a string key with an expiry (`SET key owner NX PX ttl`). Plain clients and redis-py's ``Lock`` use the same
pattern, so their locks and ours exclude one another. The scripts add fencing tokens, a queue in order of arrival, and a
cancel that is final.

While readers or permits share a lock, the string is a marker, and the holders are in a sorted set, each with the end of
its own lease. Each step is one script in ``scripts/``. A script is atomic and safe to send again. The comment at its
top states its invariant.

A release makes the next waiter the holder, and notifies it by one push, which is a grant. Each request of a waiter
contains the time at which it was sent, and a *liveness*: for how long the server keeps the waiter's place. The grant is
valid for one liveness after the sending of the waiter's newest executed request. Until then the server admits no other
claim, however late the waiter reads the push.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from multilock import BackendRejected, BackendUnavailable
from multilock.backend import Busy, Claim, Granted, Held, other_number
from multilock.timing import LATE_REQUEST, RENEWALS, heartbeat, liveness
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

__all__ = ["RESTS", "TOMBSTONE", "Recipe", "Replicas"]

# ms for which the server remembers that a claim was cancelled, and refuses requests of the claim that arrive late
TOMBSTONE = round(1000 * LATE_REQUEST)
CANCELLED = -2  # first word of a reply: the claim was cancelled, or released by an operator
OTHER_NUMBER = -3  # first word of a reply of share.lua: the claim asked for a different number of permits
# Prefix of the owner of a released name that ``hold_at_least`` keeps taken (a rest). No claim's owner has this prefix.
RESTS = b"#multilock:rest:"
# The number of leases that one call of a script renews. Such a call occupies the server for about 1 ms.
AT_ONCE = {RENEW: 500, RENEW_SHARED: 250}
_LAST, _ORDINARY = bulks(b"%d" % TOMBSTONE), bulks(b"0")


@dataclass(frozen=True, slots=True)
class Replicas:
    """The number of replicas that must acknowledge a grant or a renewal before it counts (``WAIT``).

    A failover then loses a lock less often, but it may still promote a replica that has not acknowledged.
    """

    of_grants: int = 0
    of_renewals: int = 0

    def wait(self, wanted: int, within: float) -> bytes:
        """Return the ``WAIT`` request. The server waits for at most three quarters of ``within``, so that time is left
        for the reply."""
        return pack("WAIT", wanted, max(1, int(within * 750)))

    def too_few(self, wanted: int, reached: int) -> BackendUnavailable | None:
        """Return the error to raise if fewer replicas than required have acknowledged."""
        if reached >= wanted:
            return None
        what = f"{reached} of the {wanted} replicas that replicas={wanted} requires have acknowledged the lock in time"
        return BackendUnavailable(what, unknown=True, backend="redis")


class Recipe:
    """The calls of the scripts for one server.

    The ``to_…`` methods make the requests, and `attempted` reads the reply of an attempt. None of these methods sends
    anything, because an event loop sends requests itself (`multilock_redis.event_loop`).
    """

    def __init__(
        self, keys: Keyspace, transactions: Transactions, group: str, replicas: Replicas | None = None
    ) -> None:
        self._keys = keys
        self.replicas = replicas or Replicas()
        self._transactions = transactions
        self._group = group
        self.told = True  #: whether the server notifies our waiters; if False, the scripts must not count them as dead

    def over(self, transactions: Transactions) -> Recipe:
        """Return a copy of this recipe that uses other connections to the same server."""
        recipe = Recipe(self._keys, transactions, self._group, self.replicas)
        recipe.told = self.told
        return recipe

    # ---- acquire

    def attempt(self, claim: Claim, join: bool, within: float) -> Granted | Busy:
        """Take the name, or take and keep a place in the queue.

        Claims in the queue are served in order of arrival, even if they are unfair. An unfair exclusive claim that does
        not join the queue takes a free lock even if others wait.
        """
        deadline = self._transactions.now() + within
        script = ACQUIRE if claim.mode == "x" else SHARE
        answer = self.attempted(claim, *self._transactions.run(script, request := self.to_attempt(claim, join), within))
        if isinstance(answer, Granted) and self.replicas.of_grants:
            return self._acknowledged(claim, script, request, deadline - self._transactions.now())
        return answer

    def attempt_all(self, claims: Sequence[Claim], within: float) -> list[Granted | Busy | Exception]:
        """Call `attempt` with ``join`` for each of these claims, in one pipeline."""
        deadline = self._transactions.now() + within
        scripts = [ACQUIRE if claim.mode == "x" else SHARE for claim in claims]
        requests = [self.to_attempt(claim, True) for claim in claims]
        exchange = self._transactions.connections.exchange
        answers = self._transactions.run_each(set(scripts), requests, exchange, within)
        results: list[Granted | Busy | Exception] = []
        for claim, script, request, (answer, sent_at) in zip(claims, scripts, requests, answers, strict=True):
            try:
                if isinstance(answer, Exception):
                    raise answer
                result = self.attempted(claim, answer, sent_at)
                if isinstance(result, Granted) and self.replicas.of_grants:
                    result = self._acknowledged(claim, script, request, deadline - self._transactions.now())
                results.append(result)
            except (BackendUnavailable, BackendRejected) as error:
                results.append(error)
        return results

    def _acknowledged(self, claim: Claim, script: Script, request: bytes, within: float) -> Granted | Busy:
        """Return a grant only once enough replicas have acknowledged it. Raises BackendUnavailable if too few have.

        WAIT covers the last write of its own connection, and all earlier writes of the server. So this method sends the
        attempt again, followed by WAIT on the same connection. If a request fails here, the server may hold the name
        for us. So the outcome is reported as unknown, and the kernel cancels the claim.
        """
        exchange = self._transactions.connections.exchange
        wanted = self.replicas.of_grants
        requests = [request, self.replicas.wait(wanted, within)]
        try:
            (answer, sent_at), (reached, _) = self._transactions.run_all({script}, requests, exchange, within)
        except (BackendUnavailable, Redirected) as silence:  # after a redirect, the grant has moved with its slot
            raise BackendUnavailable(str(silence), unknown=True, backend="redis") from silence
        except BackendRejected as refusal:
            refusal.unknown = True
            raise
        granted = self.attempted(claim, answer, sent_at)
        if isinstance(granted, Granted) and (too_few := self.replicas.too_few(wanted, reached)):
            raise too_few
        return granted

    def to_attempt(self, claim: Claim, join: bool) -> bytes:
        """Return the request of an attempt."""
        keys, mode = self._keys.of(claim.name), claim.mode
        head = ACQUIRE.head if mode == "x" else SHARE.head
        # With replicas= a push does not count as a grant, because a handover does not wait for the replicas. Nor does
        # it in a cluster: every node forwards a push, so the waiter cannot tell which node's clock ends the lease.
        by_push = claim.renew and not self.replicas.of_grants and not self._keys.in_slots
        how, echo = _how(claim.ttl, join, self.told, mode, claim.fair, by_push)
        if echo:
            how += echo % (self._transactions.now() * 1e6)  # the time, read before the request is sent
        return b"".join((head, keys.common, keys.own(claim), how))

    def attempted(self, claim: Claim, answer: Any, sent_at: float) -> Granted | Busy:
        """Return the result of an attempt from its reply. Raises `BackendRejected` if the claim asked for a different
        number of permits than the name has."""
        ttl = claim.ttl
        if isinstance(answer, int):
            return Granted(answer, ttl, sent_at, ttl, ttl / RENEWALS, self._group, claim.owner)
        if len(answer) == 3:
            _, token, generation = answer
            return Granted(token, ttl, sent_at, ttl, ttl / RENEWALS, self._group, _marker(claim.mode, generation))
        left, rank = answer
        if left == OTHER_NUMBER:
            raise other_number(claim, rank, "redis")
        # Nothing is pushed when the holder's key expires. So the first three waiters ask again just after that time, 20
        # ms apart.
        if left == CANCELLED:
            return Busy(0.0, spent=True)
        expires_in = left / 1000 + 0.002 + 0.020 * rank if left >= 0 and 0 <= rank < 3 else None
        return Busy(heartbeat(ttl), expires_in)

    def pushed(self, payload: bytes) -> tuple[str, Granted | None]:
        """Return the id of the claim that a push concerns, and the grant in the push. The grant is None if the push is
        only a hint, which makes the claim ask again.

        A message of another program on our channel is only a hint.
        """
        claim_id, *words = payload.decode(errors="replace").split(" ")
        try:
            echo, token, key = words
            sent_at, wait = (int(number) for number in echo.split("/"))
            valid_for = wait / 1000
            granted = Granted(
                int(token), valid_for, sent_at / 1e6, valid_for, valid_for / RENEWALS, self._group, key, True
            )
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
                    renewed[i] = too_few or Granted(
                        granted.token, ttl, sent_at, ttl, ttl / RENEWALS, self._group, granted.key
                    )
        return renewed

    def to_renew(self, held: Sequence[Held]) -> list[tuple[Script, list[int], bytes]]:
        """Return the requests that renew these leases, each with its script and the indices of its leases."""
        return [
            (script, places, self._renewal(script, [held[i] for i in places])) for script, places in self._chunks(held)
        ]

    def _of_one_slot(self, error: Exception) -> BackendUnavailable:
        """Return the error of one renewal request as the result for its leases. Raises the error if it may affect
        leases in other slots too."""
        if self._keys.in_slots and isinstance(error, BackendUnavailable):
            return error
        if self._keys.in_slots and isinstance(error, BackendRejected):
            return refused(error)
        raise error

    def _chunks(self, held: Sequence[Held]) -> list[tuple[Script, list[int]]]:
        """Return the requests to send: for each, its script and the indices of its leases."""
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
        """Return the request of a release."""
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
    """Return two encoded parts of an attempt: its last arguments, and the format of the *echo* that follows them. The
    server returns the echo in the push that hands the name over.

    The arguments are the ttl, the liveness, and the mode in which the lock is shared. For an exclusive claim, the third
    argument says instead whether it may take a free lock past the queue. The echo contains the time of sending in µs
    and the liveness in ms.

    If a push can only be a hint, the echo is empty, and is returned with the arguments. For a lock without renewals a
    push is a hint, because only a reply grants the whole ttl. For a ttl below the liveness it is a hint as well: a
    confirmed grant would end before the lease of the handover.
    """
    wait = round(liveness(ttl) * 1000) if join else 0
    last = b"%d" % (not join and not fair) if mode == "x" else mode.encode()
    how = bulks(b"%d" % round(ttl * 1000), b"%d" % (wait if told else -wait), last)
    if not (join and told and renew) or ttl < liveness(ttl):
        return how + bulks(b""), b""
    # Sixteen digits of µs are enough for 300 years of uptime.
    return how, bulks(b"%016d/%d" % (0, liveness(ttl) * 1000)).replace(b"%016d" % 0, b"%016d")


def _marker(mode: str, generation: int) -> str:
    """Return the value of the lock's key while the lock is shared. Each time that sharing begins, the value is
    different."""
    return f"#multilock:{mode}:{generation}"
