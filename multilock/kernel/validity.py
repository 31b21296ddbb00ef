"""Pure decisions about one lease: how long it is valid, when it is renewed, when it is over.

Times are seconds on one clock; nothing here reads a clock, waits or locks.
"""

from __future__ import annotations

import math
from functools import lru_cache

from multilock.model import LossReason

__all__ = [
    "CALLBACK_SHARE",
    "arm_at",
    "first_renewal_at",
    "half_over",
    "late_at",
    "loss_reason",
    "lost_at",
    "renew_at",
    "request_timeout",
    "retry_in",
    "urgency",
    "valid_until",
]

DRIFT_SHARE = 0.01  # two clocks may differ in speed by 1 % …
DRIFT_FIXED = 0.002  # … and a server counts expiry in whole milliseconds
CALLBACK_SHARE = 0.1  # the last tenth of a lease belongs to the lost callback
ARM_AFTER = 0.25  # a lock held longer than this is worth a watch on its key
GRID_SHARE = 1 / 30  # renewals fall on a grid of ttl/30, so that thousands come due together
REQUEST_TIMEOUT_MAX = 5.0


def valid_until(sent_at: float, valid_for: float, ttl: float) -> float:
    """The last moment at which the server cannot yet have let another in.

    Counted from the sending of the acknowledged request, never from its answer: the server's clock for this lease
    started somewhere between the two.
    """
    return sent_at + valid_for - (DRIFT_SHARE * ttl + DRIFT_FIXED)


def lost_at(valid_until: float, ttl: float) -> float:
    """When the lease is lost for good: early enough for the callback to do something before ``valid_until``."""
    return valid_until - CALLBACK_SHARE * ttl


def renew_at(sent_at: float, renew_every: float, ttl: float, jitter: float, phase: float) -> float:
    """When to renew: ``renew_every`` after the last proof, times ``jitter`` (0.9–1.1), down to the grid.

    ``phase`` (0–1, one per client) keeps the grids of different processes apart.
    """
    at = sent_at + renew_every * jitter
    grid = GRID_SHARE * ttl
    return max(sent_at, (math.floor(at / grid - phase) + phase) * grid)


def first_renewal_at(granted_at: float, lost_at: float) -> float:
    """When a lease that was granted for less than its ttl is renewed: not at once, since most locks are held briefly,
    and with most of what it has still left."""
    return granted_at + min(ARM_AFTER, (lost_at - granted_at) / 3)


def late_at(sent_at: float, renew_every: float) -> float:
    """From when on a lease without a new proof is AT_RISK: a whole period went by unanswered."""
    return sent_at + 2 * renew_every


def arm_at(granted_at: float) -> float:
    """When the loss of its key is worth watching for; shorter holdings cost no watch."""
    return granted_at + ARM_AFTER


def retry_in(failures: int, ttl: float, jitter: float) -> float:
    """Seconds until the next try of a renewal that was not answered; ``jitter`` 0.5–1.5."""
    return min(1.0, ttl / 30 * 2.0 ** min(failures, 4)) * jitter


def urgency(left: float, timeout: float) -> int:
    """0 while a whole request fits before the deadline, else one more for each halving of what is left.

    Leases renewed in one request are of one urgency, so that one about to end does not cut the others' time short.
    """
    return 0 if left >= timeout else 1 + int(math.log2(timeout / max(left, 1e-3)))


@lru_cache(maxsize=256)
def request_timeout(option: float | None, ttl: float) -> float:
    """Seconds for one request: what the user set, else a fifth of the ttl, so that several fit before the deadline."""
    return min(ttl / 5, REQUEST_TIMEOUT_MAX) if option is None else option


def half_over(now: float, sent_at: float, valid_for: float) -> bool:
    """A grant that has lived through half of its time is renewed once before it is handed out."""
    return now - sent_at > valid_for / 2


def loss_reason(now: float, lost_at: float, ttl: float) -> LossReason:
    """A deadline noticed more than ttl/10 late means that this process did not run."""
    return LossReason.PAUSED if now - lost_at > CALLBACK_SHARE * ttl else LossReason.EXPIRED
