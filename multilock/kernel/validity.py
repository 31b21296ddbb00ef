"""Formulas for one lease: how long it is valid, when it is renewed, when it is lost.

A proof is a reply of the backend that extends the validity. A watch is a request to the server to report the loss of a
lock. Times are seconds on one clock. No function here reads a clock, waits or takes a lock.
"""

from __future__ import annotations

import math
from functools import lru_cache

from multilock.model import LossReason
from multilock.timing import (
    ARM_AFTER,
    CALLBACK_SHARE,
    DRIFT_FIXED,
    DRIFT_SHARE,
    RENEWALS,
    REQUEST_TIMEOUT_MAX,
    REQUESTS,
)

__all__ = [
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

GRID_SHARE = 1 / 30  # renewals fall on a grid of ttl/30, so that many leases share one request


def valid_until(sent_at: float, valid_for: float, ttl: float) -> float:
    """Return the end of the validity: until then the server cannot have let another holder in.

    The validity counts from the time at which the acknowledged request was sent, never from its answer. The server
    began to count the lease at some time between the request and its answer.
    """
    return sent_at + valid_for - (DRIFT_SHARE * ttl + DRIFT_FIXED)


def lost_at(valid_until: float, ttl: float) -> float:
    """Return when a lease is lost unless a newer proof arrives: early enough for the callback to act before
    ``valid_until``."""
    return valid_until - CALLBACK_SHARE * ttl


def renew_at(sent_at: float, renew_every: float, ttl: float, jitter: float, phase: float) -> float:
    """Return when to renew: ``renew_every`` × ``jitter`` (0.9–1.1) after the last proof, rounded down to the grid.

    ``phase`` (0–1, one for each client) keeps the grids of different processes apart.
    """
    at = sent_at + renew_every * jitter
    grid = GRID_SHARE * ttl
    return max(sent_at, (math.floor(at / grid - phase) + phase) * grid)


def first_renewal_at(granted_at: float, expires_at: float) -> float:
    """Return when to send the first renewal of a lease that was granted for less than its ttl.

    The renewal is not sent at once, because most locks are held briefly. It is sent while most of the time until
    ``expires_at`` is left.
    """
    return granted_at + min(ARM_AFTER, (expires_at - granted_at) / RENEWALS)


def late_at(sent_at: float, renew_every: float) -> float:
    """Return when a lease without a new proof becomes AT_RISK: when a renewal has had no answer for a whole period."""
    return sent_at + 2 * renew_every


def arm_at(granted_at: float) -> float:
    """Return when to set a watch on the key. A lock held for a shorter time costs no watch."""
    return granted_at + ARM_AFTER


def retry_in(failures: int, ttl: float, jitter: float) -> float:
    """Return the seconds until a renewal without an answer is tried again. ``jitter`` is 0.5–1.5."""
    return min(1.0, ttl / 30 * 2.0 ** min(failures, 4)) * jitter


def urgency(left: float, timeout: float) -> int:
    """Return 0 if a whole request fits before the deadline. Otherwise return 1, plus 1 for each halving of the time
    left.

    Only leases of the same urgency share a request, so that a lease near its end does not shorten the timeout of the
    others.
    """
    return 0 if left >= timeout else 1 + int(math.log2(timeout / max(left, 1e-3)))


@lru_cache(maxsize=256)
def request_timeout(option: float | None, ttl: float) -> float:
    """Return the timeout of one request in seconds: the user's ``option``, or ttl/5 but at most 5 s."""
    return min(ttl / REQUESTS, REQUEST_TIMEOUT_MAX) if option is None else option


def half_over(now: float, sent_at: float, valid_for: float) -> bool:
    """Return whether a grant has used up half of its time. Such a grant is renewed once before the caller gets it."""
    return now - sent_at > valid_for / 2


def loss_reason(now: float, lost_at: float, ttl: float, hold_until: float = math.inf) -> LossReason:
    """Return why the deadline ``lost_at`` ended the lease.

    Returns HELD_TOO_LONG if ``max_hold`` was over. Returns PAUSED if this process did not run in time, that is, noticed
    the end more than ttl/10 late. Returns EXPIRED in all other cases.
    """
    if lost_at >= hold_until:
        return LossReason.HELD_TOO_LONG
    return LossReason.PAUSED if now - lost_at > CALLBACK_SHARE * ttl else LossReason.EXPIRED
