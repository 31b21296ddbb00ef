from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kazoo.client import KazooClient

from tests.backends.conftest import Connect
from tests.servers_zookeeper import ZooKeeperCluster, ZooKeeperServer

__all__ = ["Connect", "Operator"]

Operator = Callable[..., Any]


@pytest.fixture(autouse=True)
def time_to_explain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow more time for the request that explains a loss. An overloaded machine needs more than the usual 0.1 s."""
    monkeypatch.setattr("multilock_zookeeper.notices.REASON_WITHIN", 2.0)


@pytest.fixture(scope="package")
def shared() -> Iterator[ZooKeeperServer]:
    """Start one server for all tests that only send requests to it. Each test uses a different prefix."""
    with ZooKeeperServer() as server:
        yield server


@pytest.fixture
def server() -> Iterator[ZooKeeperServer]:
    """Start a server for one test, which may stop, pause or empty it."""
    with ZooKeeperServer() as server:
        yield server


@pytest.fixture
def cluster() -> Iterator[ZooKeeperCluster]:
    with ZooKeeperCluster() as cluster:
        yield cluster


@pytest.fixture
def operator() -> Iterator[Operator]:
    """Make plain kazoo clients of the given hosts, and stop all of them after the test."""
    made: list[Any] = []

    def make(hosts: str, **options: Any) -> Any:
        client = KazooClient(hosts, **options)
        made.append(client)
        client.start()
        return client

    yield make
    for client in made:
        client.stop()
        client.close()
