from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import multilock
from multilock.testing import FaultProxy
from tests.servers_etcd import EtcdCluster, EtcdServer

Connect = Callable[..., multilock.Client]


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


@pytest.fixture
def proxy(server: EtcdServer) -> Iterator[FaultProxy]:
    with FaultProxy.before(server.url, server.port) as proxy:
        yield proxy


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Makes clients; all are closed after the test."""
    made: list[multilock.Client] = []

    def make(url: str, **options: Any) -> multilock.Client:
        made.append(multilock.connect(url, **{"ttl": 3.0, **options}))
        return made[-1]

    yield make
    for client in made:
        client.close()
