"""A ZooKeeper session, and for how long it certainly lives: the argument, without I/O.

A server notes when it hears of a session; the leader, which ends sessions, is told of that once in half a tick. So when
a write was acknowledged, the leader need not know yet how fresh the session is: cut off from its follower right then,
it counts from an earlier request. With requests a third of the session timeout T apart or less, and half a tick no
longer than that, it ends the session no earlier than 2/3 T after the sending of the last one. Renewals come six times
in T. After a longer silence the leader may count from before that silence, until a third of T has passed; a handshake
counts at once, for it is the leader that confirms a session. Reads prove nothing: a follower that has lost its leader
answers them.
"""

from __future__ import annotations

from typing import NamedTuple

from multilock import system

__all__ = ["PERIODS", "SHARE", "Session", "Validity"]

SHARE = 2 / 3
PERIODS = 6
GAP = 1 / 3


class Validity(NamedTuple):
    """When the newest proof was sent, the seconds from then on for which nobody ends the session, and by which timeout
    that is: a handshake may cut it at any moment, and half of before and half of after is worth nothing."""

    sent_at: float
    valid_for: float
    ttl: float

    @property
    def until(self) -> float:
        return self.sent_at + self.valid_for

    @property
    def renew_every(self) -> float:
        return self.ttl / PERIODS


class Session:
    """``proved_at`` is when the newest acknowledged write was sent; ``over`` is set when the server said so."""

    def __init__(self, number: int, ttl: float, touched_at: float) -> None:
        self.number = number
        self.ttl = ttl
        self.over = False
        self.proved_at = touched_at
        self._heard_at = touched_at
        self._silent_from = self._silent_until = float("-inf")
        self._lock = system.Lock()

    @property
    def renew_every(self) -> float:
        return self.ttl / PERIODS

    def shorten(self, ttl: float) -> bool:
        """A handshake granted this timeout. Whether it is less than before: then every proof is worth less, since the
        server counts anew, and by the new timeout, from each request on."""
        with self._lock:
            lower = ttl < self.ttl
            if lower:
                self.ttl = ttl
            return lower

    def touch(self, sent_at: float) -> None:
        """A handshake that was sent at this time, or later, was answered."""
        with self._lock:
            if sent_at > self._heard_at:
                self._heard_at = sent_at
                self._silent_until = float("-inf")

    def prove(self, sent_at: float) -> None:
        """A write that was sent at this time, or later, was acknowledged."""
        with self._lock:
            if sent_at <= self.proved_at:
                return
            if sent_at - self._heard_at > GAP * self.ttl:
                self._silent_from, self._silent_until = self._heard_at, sent_at
            self.proved_at = sent_at
            self._heard_at = max(self._heard_at, sent_at)

    def validity(self) -> Validity:
        with self._lock:
            valid_for = SHARE * self.ttl
            if self.proved_at - self._silent_until < GAP * self.ttl:
                valid_for = min(valid_for, self._silent_from + self.ttl - self.proved_at)
            return Validity(self.proved_at, valid_for, self.ttl)
