"""A backend without a kernel, whose claims the test makes, sends and gives back by hand."""

from __future__ import annotations

from typing import Any

from multilock import BackendUnavailable
from multilock.backend import Busy, Claim, Granted
from multilock.testing.conformance.base import SOON
from multilock.testing.conformance.spi import Ear
from multilock_consul import open_backend

__all__ = ["NAME", "TTL", "WITHIN", "Ours"]

NAME = "job"
TTL = 20.0  # seconds: no session ends while a test stands still
WITHIN = 10.0


class Ours:
    """One client. Nothing happens by itself: who waits asks again when the test says so, and no session is renewed."""

    def __init__(self, url: str, prefix: str = "multilock/", **options: object) -> None:
        self.ear = Ear()
        self.backend = open_backend(url, {"ttl": TTL, "prefix": prefix, "identity": "kit", **options})
        self.backend.open(self.ear)
        self.prefix = prefix
        self._granted: dict[str, Granted] = {}

    def mutex(self, **changes: Any) -> Claim:
        return self.ear.claim(NAME, ttl=TTL)._replace(**changes)

    def writer(self, **changes: Any) -> Claim:
        return self.mutex(kind="write", **changes)

    def reader(self, **changes: Any) -> Claim:
        return self.mutex(kind="read", **changes)

    def permit(self, permits: int = 3, **changes: Any) -> Claim:
        return self.mutex(kind="permit", permits=permits, **changes)

    def attempt(self, claim: Claim, join: bool = False, within: float = WITHIN) -> Granted | Busy:
        answer = self.backend.attempt(claim, join, within)
        if isinstance(answer, Granted):
            self._granted[claim.id] = answer
        return answer

    def holds(self, claim: Claim, join: bool = False) -> bool:
        """Asks for it, and goes on waiting if ``join``."""
        return isinstance(self.attempt(claim, join), Granted)

    def take(self, claim: Claim) -> Claim:
        assert self.holds(claim)
        return claim

    def wait(self, claim: Claim) -> Claim:
        assert not self.holds(claim, join=True)
        return claim

    def is_over(self, claim: Claim) -> bool:
        """Whether an id that was cancelled takes nothing any more."""
        try:
            return not self.holds(claim, join=True)
        except BackendUnavailable as refused:
            return not refused.unknown

    def grant(self, claim: Claim) -> Granted:
        return self._granted[claim.id]

    def token(self, claim: Claim) -> int:
        token = self._granted[claim.id].token
        assert token is not None
        return token

    def session(self, claim: Claim) -> str:
        return str(self._granted[claim.id].key)

    def renewed(self, *claims: Claim) -> list[bool]:
        """Of which of these, which are in one group, a renewal says that they are held."""
        held = [(claim, self._granted[claim.id]) for claim in claims]
        return [isinstance(each, Granted) for each in self.backend.renew(held[0][1].group, held, WITHIN)]

    def release(self, claim: Claim, *, unsure: bool = False) -> bool:
        return self.backend.release(claim, self._granted.get(claim.id), unsure, WITHIN).ours

    def woken(self, claim: Claim, times: int = 1) -> bool:
        """Whether it is told to look again, so often in all."""
        return self.ear.wait(lambda: self.ear.wakes.count(claim.id) >= times, SOON)

    def close(self) -> None:
        self.backend.close()
