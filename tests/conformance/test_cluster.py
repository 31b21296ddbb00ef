"""The suites on ``redis+cluster://`` in which it matters that names are on several nodes, with three real shards.

The others are in `more_cluster`: for a single name, a cluster behaves like ``redis://``.
"""

from __future__ import annotations

from multilock.testing import conformance
from tests.conformance.cluster import RedisClusters


class TestLockAll(conformance.LockAllConformance):
    backend = RedisClusters


class TestBackend(conformance.BackendConformance):
    backend = RedisClusters
