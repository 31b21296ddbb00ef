"""A backend without a kernel: the test makes the claims, sends the requests and releases the claims itself."""

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
    """One client driven by hand. A waiter sends requests only when the test orders it, and nothing is renewed."""

    queues: ClassVar[bool]  #: whether readers, writers and permits keep their order

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
        """Ask once for the name, and stay in the queue if ``join``. Return True if the claim holds it."""
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
        """Return True if the claim is notified at least so many times."""
        return self.ear.wait(lambda: self.ear.wakes.count(claim.id) >= times, SOON)

    def close(self) -> None:
        self.opened.close()


def interrupted(call: Callable[[], object], moment: int, *modules: ModuleType) -> bool:
    """Call the function with an interrupt at one moment of these modules.

    CPython looks for signals where a Python function begins, or where a call of a C function returns. Returns False if
    the call has fewer such moments.
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
    return left <= 0  # Python ignores an interrupt in a finalizer
