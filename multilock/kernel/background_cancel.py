"""The background cancel: it releases a claim, and repeats that until the backend has answered.

A request without an answer may still be executed later. No caller waits until a late execution is impossible. Instead,
the claim goes to the background cancel. The backend makes the cancel final, for example with a tombstone, so that a
late request has no effect.

A lease that nobody renews expires, so its cancel may give up after a while. A lock in a session lives as long as the
session, which is renewed while the client is open. If the cancel of a lock in a session gave up, the lock would stay
taken forever. So this cancel continues for as long as the session is renewed. After an outage it tries again before the
next renewal would prolong the session.

Until the cancel is answered, the claim may be in the queue or hold the name. A single try by the same client waits for
that answer first (`Cancels.withdraws`). When the answer arrives, a bell wakes the waiting try. The ticking thread is
the thread of a client that runs timers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from multilock import system
from multilock.errors import BackendUnavailable
from multilock.kernel.inside_backend import call_inside
from multilock.kernel.runtime import wait_until
from multilock.log_thread import logger
from multilock.model import Claim, Granted, Returned
from multilock.timing import FIRST_PAUSE, LONGEST_IN_BACKGROUND, RENEWALS, retry_pause

if TYPE_CHECKING:
    from multilock.backend import Backend, Rests
    from multilock.kernel.client import Kernel
    from multilock.kernel.runtime import Bell

__all__ = ["Cancels", "call_to_give_back"]

# The least number of seconds for which a cancel tries, or 2 × ttl if that is more. After this time a lease that nobody
# renews has expired.
AT_LEAST = 60.0

FAILED = "releasing the lock %r failed: %s"
STILL = (
    "the lock %r is still not released (%s): it stays taken as long as the session of this client lives. The client "
    "continues trying until the backend answers"
)
GAVE_UP = "gave up releasing the lock %r (%s): it may stay taken until its ttl of %g s is over"

CARRIERS = 2


def call_to_give_back(
    backend: Backend, now: float, claim: Claim, granted: Granted | None, unsure: bool, rest_until: float | None
) -> tuple[Callable[..., Returned], *tuple[Any, ...]]:
    """Return the backend's function that releases the claim, and all its arguments except the last, the timeout."""
    if rest_until and granted and (seconds := rest_until - now) > 0:
        return cast("Rests", backend).rest, claim, granted, unsure, seconds
    return backend.release, claim, granted, unsure


class _Cancel:
    """One claim that the background cancel releases.

    ``until`` is the time from which the cancel may give up. ``told`` has the messages logged so far. ``under_way`` is
    True from the moment at which a request is handed to a thread until the request has ended, and False during a pause.
    The ``bells`` ring when the request has ended. ``begun`` is True once the first request was handed to a thread.
    """

    __slots__ = ("begun", "bells", "claim", "failures", "granted", "rest_until", "told", "under_way", "unsure", "until")

    def __init__(
        self, claim: Claim, granted: Granted | None, unsure: bool, until: float, rest_until: float | None
    ) -> None:
        self.claim = claim
        self.granted = granted
        self.unsure = unsure
        self.until = until
        self.rest_until = rest_until
        self.failures = 0
        self.told: list[str] = []
        self.under_way = False
        self.begun = False
        self.bells: set[Bell] = set()


class Cancels:
    """The background cancel of one client: releases each claim until the backend has answered."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._workers = kernel.runtime.workers("multilock-cleanup", CARRIERS)
        self._open: set[_Cancel] = set()
        self._hurried: deque[Claim] = deque()
        self._lock = system.RLock()

    def add(
        self,
        claim: Claim,
        granted: Granted | None,
        unsure: bool,
        *,
        not_before: float | None = None,
        rest_until: float | None = None,
    ) -> None:
        """Release this claim in the background.

        ``unsure``: Some request of the claim was never answered. ``not_before``: When to send the first release, None
        for now. ``rest_until``: The time until which hold_at_least keeps the name of the claim taken, if the claim was
        held.
        """
        kernel = self._kernel
        start = kernel.now() if not_before is None else not_before
        cancel = _Cancel(claim, granted, unsure, start + max(AT_LEAST, 2 * claim.ttl), rest_until)
        with self._lock:
            self._open.add(cancel)
        if start > kernel.now():
            kernel.timers.at(start, lambda: self._begin(cancel))
        else:
            self._begin(cancel)

    def hurry(self, claim: Claim) -> None:
        """Release this claim now, without waiting for its ``not_before``. A second call changes nothing.

        The caller may hold any lock, so this only wakes the ticking thread, which begins the release.
        """
        self._hurried.append(claim)
        self._kernel.nudge()

    def step(self) -> None:
        """Begin the cancels that `hurry` asked for. Called on the ticking thread."""
        while self._hurried:
            claim = self._hurried.popleft()
            with self._lock:
                found = [cancel for cancel in self._open if cancel.claim is claim]
            for cancel in found:
                self._begin(cancel)

    def wait(self, timeout: float) -> bool:
        """Wait until every claim is released. Returns False after ``timeout`` seconds."""
        return wait_until(self._kernel.runtime, lambda: not self._open, timeout)

    def withdraws(self, name: str, bell: Bell) -> bool:
        """Return whether a request that releases this name is under way. If so, ``bell`` rings when the request
        ends."""
        if not self._open:
            return False
        with self._lock:
            found = [cancel for cancel in self._open.copy() if cancel.under_way and cancel.claim.name == name]
            for cancel in found:
                cancel.bells.add(bell)
        return bool(found)

    def take(self) -> list[tuple[Claim, Granted | None, bool, float | None]]:
        """Remove and return all open claims. The caller releases them itself."""
        with self._lock:
            rest = [(cancel.claim, cancel.granted, cancel.unsure, cancel.rest_until) for cancel in self._open.copy()]
            self._open.clear()
        return rest

    def close(self) -> None:
        """End the threads, after the requests that were submitted already."""
        self._workers.close()

    def _begin(self, cancel: _Cancel) -> None:
        """Have a thread send the first request. A second call does nothing."""
        with self._lock:
            again, cancel.begun = cancel.begun, True
        if not again:
            self._submit(cancel)

    def _submit(self, cancel: _Cancel) -> None:
        cancel.under_way = True
        self._workers.submit(lambda: self._try(cancel))

    def _try(self, cancel: _Cancel) -> None:
        if cancel not in self._open:
            return
        kernel = self._kernel
        claim = cancel.claim
        try:
            call, *args = call_to_give_back(
                kernel.backend, kernel.now(), claim, cancel.granted, cancel.unsure, cancel.rest_until
            )
            if call_inside(call, *args, kernel.request_timeout(claim.ttl)).again:
                raise BackendUnavailable("not all of its servers have confirmed it")
        except Exception as error:
            if not isinstance(error, BackendUnavailable):
                self._tell(cancel, FAILED, error)
            elif error.unknown:
                cancel.unsure = True
            cancel.failures += 1
            if self._goes_on(cancel, error):
                # `_ended` is called before the timer is set, because the timer may start the next request at once.
                self._ended(cancel, done=False)
                pause = self._pause(cancel) * kernel.runtime.uniform(0.5, 1.0)
                kernel.timers.at(kernel.now() + pause, lambda: self._submit(cancel))
                return
            self._tell(cancel, GAVE_UP, error, claim.ttl)
        self._ended(cancel, done=True)

    def _goes_on(self, cancel: _Cancel, error: Exception) -> bool:
        """Return whether to try again after ``error``."""
        kernel = self._kernel
        if kernel.finished:
            return False
        if kernel.now() + self._pause(cancel) < cancel.until:
            return True
        if not self._is_renewed(cancel):
            return False
        self._tell(cancel, STILL, error)
        return True

    def _pause(self, cancel: _Cancel) -> float:
        """Return the seconds until the next try. If a renewed session keeps the name taken, the result is at most one
        renewal period."""
        longest = LONGEST_IN_BACKGROUND
        if self._is_renewed(cancel):
            longest = min(longest, max(2 * FIRST_PAUSE, cancel.claim.ttl / RENEWALS))
        return retry_pause(cancel.failures, longest)

    def _is_renewed(self, cancel: _Cancel) -> bool:
        """Return whether a renewed session may keep this claim alive."""
        return self._kernel.watchdog.sessions.renews(cancel.granted.group if cancel.granted else None)

    def _tell(self, cancel: _Cancel, message: str, *about: object) -> None:
        """Log each message only once for a claim, because the attempts may continue for hours."""
        if message not in cancel.told:
            cancel.told.append(message)
            claim = cancel.claim
            extra = {"lock_name": claim.name, "lock_owner": claim.owner, "lock_token": None}
            logger.warning(message, claim.name, *about, extra=extra)

    def _ended(self, cancel: _Cancel, *, done: bool) -> None:
        with self._lock:
            if done:
                self._open.discard(cancel)
            cancel.under_way = False
            bells, cancel.bells = cancel.bells, set()
        for bell in bells:
            bell.ring()
