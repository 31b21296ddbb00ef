"""Compute for how long a ZooKeeper session certainly lives. This module does no I/O.

Each server records when it received the last request of a session. The leader ends sessions, and receives these records
only once in half a tick. So when a write is acknowledged, the leader may not have the record of it yet. If the leader
is cut off from the session's server at that moment, it counts the session timeout from an earlier request.

Let T be the session timeout. While requests are sent at most T/3 apart, and half a tick is no longer than T/3, the
leader ends the session no earlier than 2/3 T after the last request was sent. Renewals are sent six times in T. After a
longer pause of the client, the leader may still count from a request before the pause, until T/3 has passed. A
handshake counts at once, because the leader confirms it. Reads prove nothing, because a follower without a leader still
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
    """The proof that a session lives: when its request was sent, the session timeout, and for how many seconds after
    the sending the session certainly lives.

    A handshake may cut the timeout at any moment, so these values must be read together.
    """

    sent_at: float
    valid_for: float
    ttl: float

    @property
    def until(self) -> float:
        """The time at which the proof ends."""
        return self.sent_at + self.valid_for

    @property
    def renew_every(self) -> float:
        """The pause between two renewals, in seconds."""
        return self.ttl / PERIODS


class Session:
    """One session. ``proved_at`` is the time at which the newest acknowledged write was sent. ``over`` is True once the
    server has reported the end of the session."""

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
        """The pause between two renewals, in seconds."""
        return self.ttl / PERIODS

    def shorten(self, ttl: float) -> bool:
        """Record the timeout that a handshake granted. Returns whether the timeout is shorter than before. A shorter
        timeout also ends earlier proofs sooner."""
        with self._lock:
            lower = ttl < self.ttl
            if lower:
                self.ttl = ttl
            return lower

    def touch(self, sent_at: float) -> None:
        """Record the answer to a handshake that was sent at this time or later."""
        with self._lock:
            if sent_at > self._heard_at:
                self._heard_at = sent_at
                self._silent_until = float("-inf")

    def prove(self, sent_at: float) -> None:
        """Record the acknowledgement of a write that was sent at this time or later."""
        with self._lock:
            if sent_at <= self.proved_at:
                return
            if sent_at - self._heard_at > GAP * self.ttl:
                self._silent_from, self._silent_until = self._heard_at, sent_at
            self.proved_at = sent_at
            self._heard_at = max(self._heard_at, sent_at)

    def validity(self) -> Validity:
        """Return the newest proof, and for how long it is valid."""
        with self._lock:
            valid_for = SHARE * self.ttl
            if self.proved_at - self._silent_until < GAP * self.ttl:
                valid_for = min(valid_for, self._silent_from + self.ttl - self.proved_at)
            return Validity(self.proved_at, valid_for, self.ttl)
