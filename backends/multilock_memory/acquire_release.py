"""The lock algorithm of ``memory://``. A `Store` has the names of one such URL, with their holders and waiters.

A name has holders and a queue. All holders of a name have the same mode, and each has a time when its lease ends. A
release wakes the waiters that can enter, in order. A waiter becomes a holder by its next `attempt`. Until then the
waiter keeps its place, but only while it shows that it is alive: each attempt keeps the place for `liveness` seconds.
After that the waiter is skipped. A fair claim waits for every earlier claim that excludes it. An unfair claim waits
only for the fair ones among these earlier claims. No lease ends by itself: the next call about the name finds that the
lease has ended.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import islice, takewhile
from math import inf

from multilock import system
from multilock.backend import Busy, Claim, LockInfo, Notices, other_number, parse_owner
from multilock.timing import LATE_REQUEST, heartbeat, liveness
from multilock_memory.notices import Outbox

__all__ = ["Store"]

SHOWN = 100  # the greatest number of holders of one name that inspect() returns


@dataclass(slots=True)
class Holder:
    """A claim that holds a name, or a released claim that still keeps the name taken because of ``hold_at_least``."""

    claim: Claim
    notices: Notices
    token: int
    since: datetime
    until: float  # when the lease ends
    rests: bool = False  # whether the claim was released, but keeps the name taken until ``until``


@dataclass(slots=True)
class WaitingClaim:
    """A claim that waits for a name."""

    claim: Claim
    notices: Notices
    until: float  # when the claim is skipped, unless it makes another attempt


@dataclass(slots=True)
class Name:
    """One name: its holders and its queue."""

    holders: dict[str, Holder] = field(default_factory=dict)  # by claim id, the oldest first; all of one mode
    queue: dict[str, WaitingClaim] = field(default_factory=dict)  # by claim id, in order of arrival
    none_ends_before: float = inf  # no holder's lease ends earlier, so a call need not check thousands of readers

    def held_by(self, claim_id: str) -> Holder | None:
        """Return the `Holder` of this claim. Returns None if the claim does not hold the name. A released claim does
        not hold it, even if its name stays taken for a while."""
        holder = self.holders.get(claim_id)
        return holder if holder and not holder.rests else None

    def extend(self, holder: Holder, until: float) -> None:
        """Let this holder's lease end at ``until``."""
        holder.until = until
        self.none_ends_before = min(self.none_ends_before, until)

    def ended(self, now: float) -> list[Holder]:
        """Return the holders whose leases have ended."""
        if now < self.none_ends_before:
            return []
        self.none_ends_before = min(
            (holder.until for holder in self.holders.values() if holder.until > now), default=inf
        )
        return [holder for holder in self.holders.values() if holder.until <= now]

    def mode(self) -> str | None:
        """Return the mode of all holders, or None if the name is free."""
        holder = next(iter(self.holders.values()), None)
        return holder.claim.mode if holder else None

    def other_number(self, claim: Claim) -> int | None:
        """Return the number of permits that the name has, if ``claim`` asks for a different number of permits."""
        if not claim.permits or not self.holders:
            return None
        permits = next(iter(self.holders.values())).claim.permits
        return permits if permits != claim.permits else None  # 0 if the holders have no permits

    def awaits(self, claim: Claim) -> float | None:
        """Return None if this claim can hold the name now. Otherwise return when a holder that excludes the claim loses
        its lease, or a waiter that excludes it loses its place.

        Readers may overtake waiting readers. Otherwise many readers would enter one by one.
        """
        if not self.holders and not self.queue:
            return None
        if self.holders and not self.mode() == claim.mode != "x":
            return max(holder.until for holder in self.holders.values())
        ends = [holder.until for holder in self.holders.values()] if claim.permits else []
        for waiter in self._before(claim):
            if waiter.claim.mode == claim.mode != "x":
                ends.append(waiter.until)
            elif claim.fair or waiter.claim.fair:
                return waiter.until
        return min(ends) if len(ends) >= _room(claim) else None

    def _before(self, claim: Claim) -> Iterator[WaitingClaim]:
        """Yield the waiters that came before the claim; all of them if the claim is not in the queue."""
        return takewhile(lambda waiter: waiter.claim.id != claim.id, self.queue.values())

    def next_in(self) -> Iterator[WaitingClaim]:
        """Yield the waiters that can hold the name together with the holders and with each other, strictly in order.

        Then yield a waiter whose number of permits differs from the holders' number, so that it can be refused.
        """
        mode, taken = self.mode(), len(self.holders)
        for waiter in self.queue.values():
            claim = waiter.claim
            if mode not in (None, claim.mode) or taken >= _room(claim):
                if self.other_number(claim):
                    yield waiter
                return
            mode, taken = claim.mode, taken + 1
            yield waiter


class Store:
    """The names of one store, and all decisions about them.

    Every method is called with ``mutex`` held. The method leaves its notices in the outbox, and the caller delivers
    them after it has released the mutex.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.mutex = system.Lock()
        self.names: dict[str, Name] = {}
        self._token = 0
        self._cancelled: dict[str, float] = {}  # claim id -> when it may be forgotten
        self.outbox = Outbox()

    def attempt(self, key: str, claim: Claim, join: bool, notices: Notices, now: float) -> int | Busy:
        """Return the token if ``claim`` holds the name now, otherwise the answer that says when to ask again."""
        name = self.names.setdefault(key, Name())
        if waiter := name.queue.get(claim.id):
            waiter.until = now + liveness(claim.ttl)
        self._end(key, name, now)
        if holder := name.held_by(claim.id):
            name.extend(holder, now + claim.ttl)
            return holder.token
        try:
            return self._ask(key, name, claim, join, notices, now)
        finally:
            self._settle(key, name)

    def _ask(self, key: str, name: Name, claim: Claim, join: bool, notices: Notices, now: float) -> int | Busy:
        """Answer a claim that does not hold the name yet."""
        if claim.id in self._cancelled:
            return Busy(heartbeat(claim.ttl))
        if number := name.other_number(claim):
            name.queue.pop(claim.id, None)
            raise other_number(claim, number, "memory")
        if (until := name.awaits(claim)) is None:
            return self._take(key, name, claim, notices, now)
        if join:
            name.queue.setdefault(claim.id, WaitingClaim(claim, notices, now + liveness(claim.ttl)))
        return Busy(heartbeat(claim.ttl), until - now)

    def renew(self, key: str, claim: Claim, now: float) -> int | None:
        """Extend the claim's lease. Returns the token, or None if the claim no longer holds the name."""
        name = self.look(key, now)
        holder = name.held_by(claim.id)
        if holder is None:
            return None
        name.extend(holder, now + claim.ttl)
        return holder.token

    def leave(self, key: str, claim_id: str, now: float) -> bool:
        """Release the name, or leave the queue. Returns True if this claim held the name until now."""
        name = self.look(key, now)
        was_held = name.held_by(claim_id) is not None
        if was_held:
            self._drop(key, name, claim_id)
        name.queue.pop(claim_id, None)
        self._settle(key, name)
        return was_held

    def rest(self, key: str, claim_id: str, until: float, now: float) -> bool:
        """Keep the name taken until ``until``, without a holder. Returns True if this claim held the name until now."""
        name = self.look(key, now)
        holder = name.holders.get(claim_id)
        if holder is None:
            return False
        if holder.rests:
            name.extend(holder, min(holder.until, until))  # this is a repeated request
            return True
        holder.rests = True
        name.extend(holder, until)
        self.outbox.changed(key)
        if first := next(iter(name.queue.values()), None):
            self._wake(first)
        return True

    def cancel(self, claim_id: str, now: float) -> None:
        """Refuse this id from now on. A call with this id may still run in a thread that was paused, and must not take
        the name."""
        for old in [old for old, until in self._cancelled.items() if until <= now]:
            del self._cancelled[old]
        self._cancelled[claim_id] = now + LATE_REQUEST

    def force(self, key: str, now: float) -> bool:
        """Take the name from its holders. Returns whether there were any."""
        name = self.look(key, now)
        holders = list(name.holders.values())
        for holder in holders:
            self._take_from(key, name, holder, "it was released by force")
        self._settle(key, name)
        return bool(holders)

    def inspect(self, key: str, now: float) -> LockInfo | None:
        name = self.look(key, now)
        holders = list(islice(name.holders.values(), SHOWN))
        if not holders:
            return None
        first, *others = (_shown(holder, now) for holder in holders)
        return replace(
            first,
            waiting=sum(waiter.until > now for waiter in name.queue.values()),
            holders=None if name.mode() == "x" else len(name.holders),
            others=tuple(others),
        )

    def forget(self, notices: Notices) -> None:
        """Remove a closed client, so that it no longer follows or waits. The client's locks end with their ttl."""
        self.outbox.forget(notices)
        for key, name in list(self.names.items()):
            name.queue = {id_: waiter for id_, waiter in name.queue.items() if waiter.notices is not notices}
            self._settle(key, name)

    def look(self, key: str, now: float) -> Name:
        """Remove the ended leases of this name, and return it. Only `attempt` adds a missing name."""
        name = self.names.get(key) or Name()
        self._end(key, name, now)
        self._settle(key, name)
        return name

    def _end(self, key: str, name: Name, now: float) -> None:
        """Remove the leases that have expired. Unless the name is held exclusively, also remove waiters that no longer
        show that they are alive."""
        for holder in name.ended(now):
            self._take_from(key, name, holder, "its lease had ended")
        if name.queue and name.mode() != "x":
            name.queue = {id_: waiter for id_, waiter in name.queue.items() if waiter.until > now}

    def _take(self, key: str, name: Name, claim: Claim, notices: Notices, now: float) -> int:
        self._token += 1
        holder = name.holders[claim.id] = Holder(claim, notices, self._token, datetime.now(UTC), inf)
        name.extend(holder, now + claim.ttl)
        name.queue.pop(claim.id, None)
        self.outbox.changed(key)
        return self._token

    def _take_from(self, key: str, name: Name, holder: Holder, message: str) -> None:
        if not holder.rests:
            self.outbox.gone(holder.notices, holder.claim.id, message)
        self._drop(key, name, holder.claim.id)

    def _drop(self, key: str, name: Name, claim_id: str) -> None:
        del name.holders[claim_id]
        self.outbox.changed(key)

    def _settle(self, key: str, name: Name) -> None:
        """Wake every waiter that can enter. Delete a name that has no holder and no waiter."""
        if name.queue:
            for waiter in name.next_in():
                self._wake(waiter)
        elif not name.holders:
            self.names.pop(key, None)

    def _wake(self, waiter: WaitingClaim) -> None:
        self.outbox.wake(waiter.notices, waiter.claim.id)


def _room(claim: Claim) -> float:
    """Return how many claims of this mode may hold a name together."""
    if claim.mode == "r":
        return inf
    return claim.permits or 1


def _shown(holder: Holder, now: float) -> LockInfo:
    left = holder.until - now
    return replace(
        parse_owner(holder.claim.owner),
        token=holder.token,
        since=holder.since,
        resting_until=datetime.now(UTC) + timedelta(seconds=left) if holder.rests else None,
        remaining=left,
        permits=holder.claim.permits or None,
    )
