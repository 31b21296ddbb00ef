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
    """A loss has its reason from a request that the real 0.1 s are too short for on a machine that stands still."""
    monkeypatch.setattr("multilock_zookeeper.notices.REASON_WITHIN", 2.0)


@pytest.fixture(scope="package")
def shared() -> Iterator[ZooKeeperServer]:
    """One for the tests that only talk to it, each under a prefix of its own."""
    with ZooKeeperServer() as server:
        yield server


@pytest.fixture
def server() -> Iterator[ZooKeeperServer]:
    """One of this test's own, to be stopped, paused and emptied."""
    with ZooKeeperServer() as server:
        yield server


@pytest.fixture
def cluster() -> Iterator[ZooKeeperCluster]:
    with ZooKeeperCluster() as cluster:
        yield cluster


@pytest.fixture
def operator() -> Iterator[Operator]:
    """Makes kazoo clients of hosts, none of ours; all are stopped after the test."""
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
