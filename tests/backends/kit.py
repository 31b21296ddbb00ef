"""Helpers for tests that call a backend directly: the test makes the claims, and sends their requests and releases."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any, ClassVar

from multilock.backend import Backend, Busy, Claim, Granted
from multilock.testing.conformance.base import SOON
from multilock.testing.conformance.spi import Ear

__all__ = ["NAME", "TTL", "WITHIN", "ByHand", "interrupted"]

NAME = "job"
TTL = 20.0  # seconds: so long that no session ends while a test is paused
WITHIN = 10.0


class ByHand:
    """A client without timers: requests and renewals are sent only when the test calls a method."""

    queues: ClassVar[bool]  #: whether the backend serves readers, writers and permits in order of arrival

    def __init__(self, backend: Backend) -> None:
        self.ear = Ear()
        self.opened = backend
        backend.open(self.ear)
        self._granted: dict[str, Granted] = {}

    def mutex(self, **changes: Any) -> Claim:
        return self.ear.claim(NAME, ttl=TTL)._replace(**changes)

    def writer(self, **changes: Any) -> Claim:
        return self.mutex(kind="write", fair=self.queues, **changes)

    def reader(self, **changes: Any) -> Claim:
        return self.mutex(kind="read", fair=self.queues, **changes)

    def permit(self, permits: int = 3, **changes: Any) -> Claim:
        return self.mutex(kind="permit", fair=self.queues, permits=permits, **changes)

    def attempt(self, claim: Claim, join: bool = False, within: float = WITHIN) -> Granted | Busy:
        answer = self.opened.attempt(claim, join, within)
        if isinstance(answer, Granted):
            self._granted[claim.id] = answer
        return answer

    def holds(self, claim: Claim, join: bool = False) -> bool:
        """Send one attempt, which joins the queue if ``join`` is True. Return True if the claim now holds the name."""
        return isinstance(self.attempt(claim, join), Granted)

    def take(self, claim: Claim) -> Claim:
        assert self.holds(claim)
        return claim

    def wait(self, claim: Claim) -> Claim:
        """Join the queue behind another claim that holds the name."""
        assert not self.holds(claim, join=True)
        return claim

    def grant(self, claim: Claim) -> Granted:
        return self._granted[claim.id]

    def token(self, claim: Claim) -> int:
        token = self._granted[claim.id].token
        assert token is not None
        return token

    def release(self, claim: Claim, *, unsure: bool = False) -> bool:
        return self.opened.release(claim, self._granted.get(claim.id), unsure, WITHIN).ours

    def woken(self, claim: Claim, times: int = 1) -> bool:
        """Wait until the claim was notified at least ``times`` times. Return False if it was not notified in time."""
        return self.ear.wait(lambda: self.ear.wakes.count(claim.id) >= times, SOON)

    def close(self) -> None:
        self.opened.close()


def interrupted(call: Callable[[], object], moment: int, *modules: ModuleType) -> bool:
    """Call ``call`` with an interrupt at the given moment of its run in these modules.

    A moment is a point at which CPython may handle a signal: a Python function begins, or a C function returns. Returns
    False if the run has fewer moments.
    """
    left = moment
    files = {module.__file__ for module in modules}

    def profile(frame: FrameType, event: str, _: object) -> None:
        nonlocal left
        frames = (frame, frame.f_back) if event == "call" else (frame,) if event == "c_return" else ()
        if any(frame and frame.f_code.co_filename in files for frame in frames):
            left -= 1
            if left == 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(before)
    return left <= 0  # True even if the interrupt came in a finalizer, which ignored it
