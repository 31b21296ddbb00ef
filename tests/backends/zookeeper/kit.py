"""A backend without a kernel: the test makes the claims, sends the requests and releases the claims itself."""

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
