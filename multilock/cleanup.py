"""The background cancel: gives back what may have been taken, until the backend has answered.

A request without an answer may still be executed. Nobody waits for that: the claim comes here, and is released again
and again, with the backend's own means of making the cancel final, until an answer came.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from multilock.errors import BackendUnavailable
from multilock.model import Claim, Granted
from multilock.runtime import wait_until

if TYPE_CHECKING:
    from multilock.kernel import Kernel

__all__ = ["Cleanup"]

logger = logging.getLogger("multilock")

AT_LEAST = 60.0  # seconds after the last send for which an unanswered cancel is repeated, or 2 × ttl if that is more
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
CARRIERS = 2


class _Cancel:
    __slots__ = ("claim", "granted", "pause", "unsure", "until")

    def __init__(self, claim: Claim, granted: Granted | None, unsure: bool, until: float) -> None:
        self.claim = claim
        self.granted = granted
        self.unsure = unsure
        self.until = until
        self.pause = FIRST_PAUSE


class Cleanup:
    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._workers = kernel.runtime.workers("multilock-cleanup", CARRIERS)
        self._open: set[_Cancel] = set()
        self._lock = threading.Lock()

    def add(self, claim: Claim, granted: Granted | None, unsure: bool, *, not_before: float | None = None) -> None:
        """Give this claim back in the background. ``unsure``: some request of its id was never answered."""
        kernel = self._kernel
        start = kernel.now() if not_before is None else not_before
        cancel = _Cancel(claim, granted, unsure, start + max(AT_LEAST, 2 * claim.ttl))
        with self._lock:
            self._open.add(cancel)
        if start > kernel.now():
            kernel.timers.at(start, lambda: self._submit(cancel))
        else:
            self._submit(cancel)

    def wait(self, timeout: float) -> bool:
        """Whether everything was answered within ``timeout`` seconds."""
        return wait_until(self._kernel.runtime, lambda: not self._open, timeout)

    def take(self) -> list[tuple[Claim, Granted | None, bool]]:
        """What is still open, taken out: the caller releases it himself."""
        with self._lock:
            rest = [(cancel.claim, cancel.granted, cancel.unsure) for cancel in self._open]
            self._open.clear()
        return rest

    def close(self) -> None:
        self._workers.close()

    def _submit(self, cancel: _Cancel) -> None:
        self._workers.submit(lambda: self._try(cancel))

    def _try(self, cancel: _Cancel) -> None:
        if cancel not in self._open:
            return
        kernel = self._kernel
        claim = cancel.claim
        try:
            kernel.backend.release(claim, cancel.granted, cancel.unsure, kernel.request_timeout(claim.ttl))
        except Exception as error:
            if not isinstance(error, BackendUnavailable):
                logger.warning(
                    "giving back the lock %r failed: %s",
                    claim.name,
                    error,
                    extra={"lock_name": claim.name, "lock_owner": claim.owner},
                )
            elif error.unknown:
                cancel.unsure = True
            if kernel.now() + cancel.pause < cancel.until and not kernel.finished:
                kernel.timers.at(
                    kernel.now() + cancel.pause * kernel.runtime.uniform(0.5, 1.0), lambda: self._submit(cancel)
                )
                cancel.pause = min(LONGEST_PAUSE, cancel.pause * 2)
                return
            logger.warning(
                "gave up giving back the lock %r (%s): it may stay taken until its ttl of %g s is over",
                claim.name,
                error,
                claim.ttl,
                extra={"lock_name": claim.name, "lock_owner": claim.owner, "lock_token": None},
            )
        self._done(cancel)

    def _done(self, cancel: _Cancel) -> None:
        with self._lock:
            self._open.discard(cancel)
