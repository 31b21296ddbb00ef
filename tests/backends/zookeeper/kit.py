"""A backend without a kernel, whose claims the test makes, sends and gives back by hand."""

from __future__ import annotations

from multilock.backend import Busy, Claim, Granted
from multilock.testing.conformance.base import SOON
from multilock.testing.conformance.spi import Ear
from multilock_zookeeper import open_backend

__all__ = ["NAME", "Ours"]

NAME = "job"
TTL = 20.0  # seconds: no session ends while a test stands still
WITHIN = 10.0


class Ours:
    """One client, of one session. Nothing happens by itself: who waits asks again when the test says so."""

    def __init__(self, url: str, prefix: str = "multilock/", style: str = "kazoo", ttl: float = TTL) -> None:
        self.ear = Ear()
        self.backend = open_backend(url, {"ttl": ttl, "prefix": prefix, "node_style": style})
        self.backend.open(self.ear)
        self._granted: dict[str, Granted] = {}

    def mutex(self) -> Claim:
        return self.ear.claim(NAME)

    def writer(self) -> Claim:
        return self.mutex()._replace(kind="write", fair=True)

    def reader(self) -> Claim:
        return self.mutex()._replace(kind="read", fair=True)

    def permit(self, permits: int = 3) -> Claim:
        return self.mutex()._replace(kind="permit", fair=True, permits=permits)

    def attempt(self, claim: Claim, join: bool = False) -> Granted | Busy:
        answer = self.backend.attempt(claim, join, WITHIN)
        if isinstance(answer, Granted):
            self._granted[claim.id] = answer
        return answer

    def holds(self, claim: Claim, join: bool = False) -> bool:
        """Asks for it, in the queue if ``join``."""
        return isinstance(self.attempt(claim, join), Granted)

    def take(self, claim: Claim) -> Claim:
        assert self.holds(claim)
        return claim

    def wait(self, claim: Claim) -> Claim:
        """Join the queue, behind somebody who keeps it out."""
        assert not self.holds(claim, join=True)
        return claim

    def grant(self, claim: Claim) -> Granted:
        return self._granted[claim.id]

    def token(self, claim: Claim) -> int:
        token = self._granted[claim.id].token
        assert token is not None
        return token

    def release(self, claim: Claim) -> bool:
        return self.backend.release(claim, self._granted.get(claim.id), False, WITHIN).ours

    def woken(self, claim: Claim, times: int = 1) -> bool:
        """Whether it is told to look again, so often in all."""
        return self.ear.wait(lambda: self.ear.wakes.count(claim.id) >= times, SOON)

    def close(self) -> None:
        self.backend.close()
