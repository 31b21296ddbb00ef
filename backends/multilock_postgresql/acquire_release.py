"""The lock on PostgreSQL: the calls of its functions, and what their replies mean.

A lock is a row with an expiry time. Readers and permits have further rows. Each step is one function in ``sql/``, one
message and one commit, and safe to send again. Each grant has a fencing token. Waiters queue in order of arrival, and a
cancel is final.

Each function first locks the row of the name, so the values that it reads stay true until it commits.

A release makes the next waiter the holder, and notifies it by NOTIFY, which is a grant. Each request of a waiter
contains the time at which it was sent, and a *liveness*: for how long the server keeps the waiter's place. The grant is
valid for one liveness after the sending of the waiter's newest executed request. Until then the server admits no other
claim, however late the waiter reads the notification.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from multilock import BackendUnavailable, MultilockError
from multilock.backend import Busy, Claim, Granted, Held, other_number
from multilock.timing import RENEWALS, heartbeat, liveness
from multilock_postgresql.keys import LockKeys
from multilock_postgresql.transactions import Transactions
from multilock_postgresql.wire import LockWait, Row, array, number, text

__all__ = ["Recipe"]

CANCELLED, OTHER_NUMBER = -2, -3  # values of ``left`` in the reply to a refused attempt: see acquire_1 in sql/
AT_ONCE = 1000  # leases in one renewal
UNPUSHED_HEARTBEAT = 0.25  # seconds between two requests of a waiter that receives no notifications
SWEEP_EVERY = 60.0  # seconds between two sweeps of one client


class Recipe:
    """The calls of the SQL functions that acquire, release and renew locks on one server.

    The ``to_…`` methods make the arguments, and `attempted` reads the reply of an attempt. None of these methods sends
    anything, because an event loop sends requests itself (`multilock_postgresql.event_loop`).
    """

    def __init__(self, keys: LockKeys, transactions: Transactions, group: str) -> None:
        self._keys = keys
        self._transactions = transactions
        self._group = group
        self._now = transactions.now
        self.told = False  #: whether the server can notify our waiters; if False, it must not count them as dead
        self._swept = self._now()

    # ---- acquire

    def attempt(self, claim: Claim, join: bool, within: float) -> Granted | Busy:
        """Take the name, or take and keep a place in the queue.

        Claims in the queue are served in order of arrival, even if they are unfair. An unfair exclusive claim that does
        not join the queue takes a free lock even if others wait.
        """
        deadline = self._now() + within
        try:
            rows, sent_at = self._transactions.run(
                self._transactions.steps.attempt, self.to_attempt(claim, join), within
            )
        except LockWait:
            if self._is_shut(deadline - self._now()):
                raise
            return Busy(heartbeat(claim.ttl))
        return self.attempted(claim, rows, sent_at)

    def _is_shut(self, within: float) -> bool:
        """Return whether a whole table is locked, as by a migration, so that it is unknown who holds a name.

        If only the row of the name is locked, another claim is about to get the name.
        """
        try:
            return bool(self._transactions.run(self._transactions.steps.shut, [], within, limited=False)[0])
        except MultilockError:
            return True

    def to_attempt(self, claim: Claim, join: bool) -> list[bytes | None]:
        """Return the arguments of an attempt, without the last one."""
        ttl, wait = claim.ttl, liveness(claim.ttl) if join else 0.0
        echo = None
        # Without an echo, the push that hands the name over is only a hint. A lock that is not renewed needs a reply,
        # because only a reply grants the whole ttl. If the ttl is shorter than the liveness, a confirmed lease would
        # end before the lease of the handover.
        if join and self.told and claim.renew and ttl >= wait:
            echo = b"%d/%d" % (self._now() * 1e6, round(wait * 1000))
        return [
            self._keys.of(claim.name),
            claim.id.encode(),
            claim.owner[len(claim.id) :].encode(),
            claim.mode.encode(),
            b"%d" % round(ttl * 1000),
            b"%d" % round(wait * 1000),
            _bool(claim.mode == "x" and not claim.fair and not join),
            _bool(self.told),
            echo,
        ]

    def attempted(self, claim: Claim, rows: list[Row], sent_at: float) -> Granted | Busy:
        """Return the result of an attempt from its reply.

        Raises `BackendRejected` if the claim asked for a different number of permits than the name has.
        """
        [(token, left, rank)] = rows
        ttl = claim.ttl
        if token is not None:
            return Granted(int(token), ttl, sent_at, ttl, ttl / RENEWALS, self._group)
        left_ms, before = number(left) or 0, number(rank) or 0
        if left_ms == OTHER_NUMBER:
            raise other_number(claim, before, "postgresql")
        if left_ms == CANCELLED:
            return Busy(heartbeat(ttl), spent=True)
        # Nothing is pushed when a lease expires. So the first three waiters ask again just after that time, 20 ms
        # apart. If the lease has expired but the name is not free, an open transaction of the holder guards the name,
        # and its end is unknown.
        expires_in = left_ms / 1000 + 0.002 + 0.020 * before if left_ms > 0 and 0 <= before < 3 else None
        return Busy(heartbeat(ttl) if self.told else min(heartbeat(ttl), UNPUSHED_HEARTBEAT), expires_in)

    def pushed(self, payload: str) -> tuple[str, Granted | None]:
        """Return the id of the claim that a push concerns, and the grant in the push. The grant is None if the push is
        only a hint, which makes the claim ask again.

        The payload of another program on our channel is only a hint, unless it forges a grant.
        """
        claim_id, *words = payload.split(" ")
        try:
            echo, token = words
            sent_at, wait = (int(number) for number in echo.split("/"))
            valid_for = wait / 1000
            granted = Granted(
                int(token), valid_for, sent_at / 1e6, valid_for, valid_for / RENEWALS, self._group, short=True
            )
        except (ValueError, OverflowError):
            return claim_id, None
        return claim_id, granted

    # ---- renew

    def renew(self, held: Sequence[Held], within: float) -> list[Granted | BackendUnavailable | None]:
        """Extend leases, a thousand in one request. Raises if the first request fails. If a later request fails, its
        error is the result for its leases."""
        deadline = self._now() + within
        renewed: list[Granted | BackendUnavailable | None] = []
        for start in range(0, len(held), AT_ONCE):
            batch = held[start : start + AT_ONCE]
            try:
                rows, sent_at = self._transactions.renew(self._to_renew(batch), deadline - self._now())
            except BackendUnavailable as silence:
                if not start:
                    raise
                renewed += [silence] * len(batch)
                continue
            told = {text(row[0]) for row in rows}
            renewed += [self._renewed(each, sent_at, told) for each in batch]
        self.sweep(deadline - self._now())
        return renewed

    def _to_renew(self, held: Sequence[Held]) -> list[bytes | None]:
        # The server locks the rows in this order: by name, then by id. Other requests keep to it, so that no deadlock
        # is possible. A request that follows names sorts them by name. The SQL function `force_1` locks the holders of
        # one name, and sorts them by id.
        held = sorted(held, key=lambda each: (each[0].name, each[0].id))
        return [
            array(self._keys.of(claim.name).decode() for claim, _ in held),
            array(claim.id for claim, _ in held),
            array(str(round(claim.ttl * 1000)) for claim, _ in held),
        ]

    def _renewed(self, held: Held, sent_at: float, told: set[str]) -> Granted | BackendUnavailable | None:
        claim, granted = held
        if claim.id in told:
            return None
        if f"?{claim.id}" in told:
            locked = f"{self._group}: another transaction has locked the row of {claim.name!r}"
            return BackendUnavailable(locked, unknown=False, backend="postgresql")
        return Granted(granted.token, claim.ttl, sent_at, claim.ttl, claim.ttl / RENEWALS, self._group)

    # ---- release

    def release(self, claim: Claim, unsure: bool, within: float) -> bool:
        deadline = self._now() + within
        rows, _ = self._transactions.run(self._transactions.steps.release, self.to_release(claim, unsure), within)
        self.sweep(deadline - self._now())
        return rows[0][0] == b"t"

    def to_release(self, claim: Claim, unsure: bool) -> list[bytes | None]:
        """Return the arguments of a release, without the last one."""
        return [self._keys.of(claim.name), claim.id.encode(), _bool(unsure)]

    def rest(self, claim: Claim, unsure: bool, seconds: float, within: float) -> bool:
        arguments = [*self.to_release(claim, unsure), b"%d" % max(1, math.ceil(seconds * 1000))]
        rows, _ = self._transactions.run(self._transactions.steps.rest, arguments, within)
        return rows[0][0] == b"t"

    # ---- sweep

    def sweep(self, within: float) -> None:
        """Delete the rows of names that have been free for a while, at most once a minute."""
        now = self._now()
        if now < self._swept + SWEEP_EVERY or within <= 0:
            return
        self._swept = now
        try:
            self._transactions.run(self._transactions.steps.sweep, [], within, limited=False)
        except MultilockError:
            return


def _bool(value: bool) -> bytes:
    return b"t" if value else b"f"
