from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import multilock
from multilock.testing import FaultProxy
from tests.servers_consul import ConsulCluster, ConsulServer

Connect = Callable[..., multilock.Client]


@pytest.fixture(scope="package")
def shared() -> Iterator[ConsulServer]:
    """One for the tests that only talk to it, each under names of its own."""
    with ConsulServer() as server:
        yield server


@pytest.fixture
def server() -> Iterator[ConsulServer]:
    """One of this test's own, to be stopped, paused and emptied."""
    with ConsulServer() as server:
        yield server


@pytest.fixture
def cluster() -> Iterator[ConsulCluster]:
    with ConsulCluster() as cluster:
        yield cluster


@pytest.fixture
def proxy(server: ConsulServer) -> Iterator[FaultProxy]:
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
