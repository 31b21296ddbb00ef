from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.backends.conftest import Connect
from tests.servers_etcd import EtcdCluster, EtcdServer

__all__ = ["Connect"]


@pytest.fixture(scope="package")
def shared() -> Iterator[EtcdServer]:
    """One for the tests that only talk to it, each under a prefix of its own."""
    with EtcdServer() as server:
        yield server


@pytest.fixture
def server() -> Iterator[EtcdServer]:
    """One of this test's own, to be stopped, paused and emptied."""
    with EtcdServer() as server:
        yield server


@pytest.fixture
def cluster() -> Iterator[EtcdCluster]:
    with EtcdCluster() as cluster:
        yield cluster
