"""Helpers for tests that call the backend directly: the test makes the claims, and sends their requests and
releases."""

from __future__ import annotations

from multilock_zookeeper import open_backend
from tests.backends.kit import TTL, ByHand

__all__ = ["Ours"]


class Ours(ByHand):
    """One client with one session."""

    queues = True

    def __init__(self, url: str, prefix: str = "multilock/", style: str = "kazoo", ttl: float = TTL) -> None:
        self.backend = open_backend(url, {"ttl": ttl, "prefix": prefix, "node_style": style})
        super().__init__(self.backend)
