"""Helpers for tests that call the backend directly: the test makes the claims, and sends their requests and
releases."""

from __future__ import annotations

from multilock import BackendUnavailable
from multilock.backend import Claim, Granted
from multilock_consul import open_backend
from tests.backends.kit import TTL, WITHIN, ByHand

__all__ = ["Ours"]


class Ours(ByHand):
    queues = False

    def __init__(self, url: str, prefix: str = "multilock/", **options: object) -> None:
        self.backend = open_backend(url, {"ttl": TTL, "prefix": prefix, "identity": "kit", **options})
        super().__init__(self.backend)
        self.prefix = prefix

    def is_over(self, claim: Claim) -> bool:
        """Try the name with a claim that was cancelled. Return True if the claim cannot get the name any longer."""
        try:
            return not self.holds(claim, join=True)
        except BackendUnavailable as refused:
            return not refused.unknown

    def session(self, claim: Claim) -> str:
        return str(self.grant(claim).key)

    def renewed(self, *claims: Claim) -> list[bool]:
        """Renew these claims of one group. Return for each claim whether the renewal confirmed it."""
        held = [(claim, self.grant(claim)) for claim in claims]
        return [isinstance(each, Granted) for each in self.backend.renew(held[0][1].group, held, WITHIN)]
