from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.backends.conftest import Connect
from tests.backends.etcd.kit import Ours
from tests.servers_etcd import EtcdCluster, EtcdServer

__all__ = ["Connect"]


@pytest.fixture(autouse=True)
def time_to_explain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow more time for the request that explains a loss. An overloaded machine needs more than the usual 0.1 s."""
    monkeypatch.setattr("multilock_etcd.notices.REASON_WITHIN", 2.0)


@pytest.fixture(scope="package")
def shared() -> Iterator[EtcdServer]:
    """Start one server for all tests that only send requests to it. Each test uses a different prefix."""
    with EtcdServer() as server:
        yield server


@pytest.fixture
def server() -> Iterator[EtcdServer]:
    """Start a server for one test, which may stop, pause or empty it."""
    with EtcdServer() as server:
        yield server


@pytest.fixture
def cluster() -> Iterator[EtcdCluster]:
    with EtcdCluster() as cluster:
        yield cluster


# ---- two clients of the shared server, whose backends the tests call directly


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    return f"{request.node.name}/"


@pytest.fixture
def clients(shared: EtcdServer, prefix: str) -> Iterator[tuple[Ours, Ours]]:
    both = Ours(shared.url, prefix), Ours(shared.url, prefix)
    yield both
    for ours in both:
        ours.backend.close()


@pytest.fixture
def us(clients: tuple[Ours, Ours]) -> Ours:
    return clients[0]


@pytest.fixture
def them(clients: tuple[Ours, Ours]) -> Ours:
    return clients[1]
