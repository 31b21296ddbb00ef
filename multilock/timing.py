"""The numbers of seconds, or shares of a ttl, that several parts of multilock share.

The kernel and the backends use these numbers, and third-party backends may use them too. A heartbeat is the request by
which a waiter keeps its place in the queue of the server. A number that only one module uses is defined in that module.
"""

from __future__ import annotations

__all__ = [
    "ARM_AFTER",
    "CALLBACK_SHARE",
    "DRIFT_FIXED",
    "DRIFT_SHARE",
    "FIRST_PAUSE",
    "FRESH_SHARE",
    "HEARTBEATS",
    "JITTER",
    "LATE_REQUEST",
    "LATE_REQUEST_IN_SESSION",
    "LIVENESS_MAX",
    "LIVENESS_MIN",
    "LONGEST_IN_BACKGROUND",
    "LONGEST_PAUSE",
    "REASON_WITHIN",
    "RENEWALS",
    "REQUESTS",
    "REQUEST_TIMEOUT_MAX",
    "SAFETY_TIMER",
    "UNPUSHED",
    "heartbeat",
    "liveness",
    "retry_pause",
]

# A lease
RENEWALS = 3  # renewals in each ttl, so that two may fail
# Renewals and heartbeats come up to 10 % earlier or later, so that many clients do not send them at the same moment.
JITTER = 0.1
DRIFT_SHARE = 0.01  # the clocks of client and server may differ in speed by 1 %
DRIFT_FIXED = 0.002  # seconds, because servers count expiry in whole milliseconds
CALLBACK_SHARE = 0.1  # the last tenth of a lease is kept for the lost callback
ARM_AFTER = 0.25  # seconds; a lock held longer than this is worth a watch on its key
# Share of the ttl. A session for one claim with renew=False is renewed before its use if it is older than this.
FRESH_SHARE = 0.05

# A request
REQUESTS = 5  # request timeouts in each ttl, so that several requests fit before the deadline even if each times out
REQUEST_TIMEOUT_MAX = 5.0  # seconds; no server that works takes longer, whatever the ttl
# Seconds. For this long after a cancel, the server or a thread of this client may still execute an earlier request of
# the claim. Such a request can then block the name for one ttl. No request survives longer in the buffers of a
# connection that was closed.
LATE_REQUEST = 60.0
# Replaces LATE_REQUEST for a backend where a late request could block the name for as long as the client's session
# lives.
LATE_REQUEST_IN_SESSION = 600.0

# A waiter

# Heartbeats in each liveness period. A heartbeat keeps a waiter's place for a whole period, so two may be late.
HEARTBEATS = 3
# Shortest and longest liveness period in seconds. Even with the shortest period, the heartbeats of a thousand waiters
# are a light load. With the longest period, a dead waiter delays the next one by at most 6 s.
LIVENESS_MIN, LIVENESS_MAX = 1.0, 6.0
SAFETY_TIMER = 5.0  # seconds, or the ttl if that is longer, after which a waiter asks again without a push
UNPUSHED = 1.0  # seconds after which a waiter asks again while the server pushes nothing

# A failure
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0  # seconds between tries while a server is silent or refuses a connection
LONGEST_IN_BACKGROUND = 5.0  # seconds; the longest pause of work for which no caller waits
REASON_WITHIN = 0.1  # seconds that the notice of a loss may wait for the reason of the loss


def liveness(ttl: float) -> float:
    """Return for how many seconds one request keeps a waiter's place in the queue of a backend that has no sessions."""
    return min(max(ttl, LIVENESS_MIN), LIVENESS_MAX)


def heartbeat(ttl: float) -> float:
    """Return the seconds between two heartbeats of a waiter, each of which keeps its place in the queue."""
    return liveness(ttl) / HEARTBEATS


def retry_pause(failures: int, longest: float = LONGEST_PAUSE) -> float:
    """Return the seconds until the next try: 0.05 s, doubled for each of the ``failures``, up to ``longest``.

    The caller multiplies the result by a random number, so that clients do not all try at the same time.
    """
    return min(longest, FIRST_PAUSE * 2.0 ** min(failures, 10))
