"""A Redis Cluster under test. Its servers are real, and faults are injected between the servers and the kernel."""

from __future__ import annotations

from multilock.names import escape
from multilock.testing.conformance import Place
from tests.servers_cluster import RedisCluster, cluster_of_all_tests

__all__ = ["RedisClusters"]


class RedisClusters(Place):
    scheme = "redis+cluster"

    @property
    def url(self) -> str:
        return cluster_of_all_tests().url

    def delete(self, name: str) -> None:
        key = self.prefix + escape(name)
        assert cluster_of_all_tests().owner(RedisCluster.slot_of_key(key)).bare.delete(key) == 1

    def leftovers(self) -> list[str]:
        """Return every key of multilock, except keys that may stay until they expire."""
        return sorted(
            key.decode()
            for primary in cluster_of_all_tests().primaries()
            for key in primary.bare.scan_iter(f"*{self.prefix}*", count=1000)
            if not (key.endswith(b":token") or b":gone:" in key) or primary.bare.pttl(key) < 0
        )
