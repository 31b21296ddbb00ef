"""The background cancel: gives back what may have been taken, until the backend has answered.

A request without an answer may still be executed. Nobody waits for that: the claim comes here, and is released again
and again, with the backend's own means of making the cancel final, until an answer came.

A lease that nobody renews ends by itself, and so does this patience. But what was taken in a session lives as long as
that session does, which is renewed while the client is open: there a cancel that is given up leaves the lock taken for
ever. So it is tried on for as long as the session is renewed, and, when the server is back after an outage, not later
than the next renewal that would prolong it.

Until it is answered the claim may stand in the queue, or have the name: a single try of the same client lets the answer
come first (`Cleanup.withdraws`).
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from multilock.errors import BackendUnavailable
from multilock.kernel.runtime import call_inside, wait_until
from multilock.model import Claim, Granted
from multilock.telling import logger

if TYPE_CHECKING:
    from multilock.kernel.core import Kernel
    from multilock.kernel.runtime import Bell

__all__ = ["Cleanup"]

AT_LEAST = 60.0  # seconds after the last send, or 2 × ttl if that is more: what nobody renews has ended by then
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0

FAILED = "giving back the lock %r failed: %s"
STILL = (
    "the lock %r is still not given back (%s): it stays taken as long as the session of this client lives, and is "
    "tried on until it is answered"
)
GAVE_UP = "gave up giving back the lock %r (%s): it may stay taken until its ttl of %g s is over"

CARRIERS = 2


class _Cancel:
    __slots__ = ("bells", "claim", "granted", "pause", "rest_until", "told", "under_way", "unsure", "until")

    def __init__(
        self, claim: Claim, granted: Granted | None, unsure: bool, until: float, rest_until: float | None
    ) -> None:
        self.claim = claim
        self.granted = granted
        self.unsure = unsure
        self.until = until
        self.rest_until = rest_until
        self.pause = FIRST_PAUSE
        self.told: list[str] = []
        self.under_way = False  # to be asked now, or being asked; not while it pauses
        self.bells: set[Bell] = set()  # to be rung when it no longer is


class Cleanup:
    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._workers = kernel.runtime.workers("multilock-cleanup", CARRIERS, kernel.later)
        self._open: set[_Cancel] = set()
        self._lock = threading.RLock()

    def add(
        self,
        claim: Claim,
        granted: Granted | None,
        unsure: bool,
        *,
        not_before: float | None = None,
        rest_until: float | None = None,
    ) -> None:
        """Give this claim back in the background. ``unsure``: some request of its id was never answered.
        ``rest_until``: it was held, and leaves its name taken until then."""
        kernel = self._kernel
        start = kernel.now() if not_before is None else not_before
        cancel = _Cancel(claim, granted, unsure, start + max(AT_LEAST, 2 * claim.ttl), rest_until)
        with self._lock:
            self._open.add(cancel)
        if start > kernel.now():
            kernel.timers.at(start, lambda: self._submit(cancel))
        else:
            self._submit(cancel)

    def wait(self, timeout: float) -> bool:
        """Whether everything was answered within ``timeout`` seconds."""
        return wait_until(self._kernel.runtime, lambda: not self._open, timeout)

    def withdraws(self, name: str, bell: Bell) -> bool:
        """Whether a request that gives this name back is under way; then ``bell`` rings when it has ended."""
        if not self._open:
            return False
        with self._lock:
            found = [cancel for cancel in self._open.copy() if cancel.under_way and cancel.claim.name == name]
            for cancel in found:
                cancel.bells.add(bell)
        return bool(found)

    def take(self) -> list[tuple[Claim, Granted | None, bool, float | None]]:
        """What is still open, taken out: the caller releases it himself."""
        with self._lock:
            rest = [(cancel.claim, cancel.granted, cancel.unsure, cancel.rest_until) for cancel in self._open.copy()]
            self._open.clear()
        return rest

    def close(self) -> None:
        self._workers.close()

    def _submit(self, cancel: _Cancel) -> None:
        cancel.under_way = True
        self._workers.submit(lambda: self._try(cancel))

    def _try(self, cancel: _Cancel) -> None:
        if cancel not in self._open:
            return
        kernel = self._kernel
        claim = cancel.claim
        try:
            call, *args = kernel.giving_back(claim, cancel.granted, cancel.unsure, cancel.rest_until)
            if call_inside(call, *args, kernel.request_timeout(claim.ttl)).again:
                raise BackendUnavailable("not all of its servers have confirmed it")
        except Exception as error:
            if not isinstance(error, BackendUnavailable):
                self._tell(cancel, FAILED, error)
            elif error.unknown:
                cancel.unsure = True
            if self._goes_on(cancel, error):
                self._ended(cancel, done=False)  # before it may begin again
                kernel.timers.at(
                    kernel.now() + cancel.pause * kernel.runtime.uniform(0.5, 1.0), lambda: self._submit(cancel)
                )
                cancel.pause = min(cancel.pause * 2, self._longest_pause(cancel))
                return
            self._tell(cancel, GAVE_UP, error, claim.ttl)
        self._ended(cancel, done=True)

    def _goes_on(self, cancel: _Cancel, error: Exception) -> bool:
        kernel = self._kernel
        if kernel.finished:
            return False
        if kernel.now() + cancel.pause < cancel.until:
            return True
        if not self._is_renewed(cancel):
            return False
        self._tell(cancel, STILL, error)
        return True

    def _longest_pause(self, cancel: _Cancel) -> float:
        return min(LONGEST_PAUSE, max(FIRST_PAUSE, cancel.claim.ttl / 3)) if self._is_renewed(cancel) else LONGEST_PAUSE

    def _is_renewed(self, cancel: _Cancel) -> bool:
        return self._kernel.watchdog.renews(cancel.granted.group if cancel.granted else None)

    def _tell(self, cancel: _Cancel, message: str, *about: object) -> None:
        """Each message once: this may go on for hours."""
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
