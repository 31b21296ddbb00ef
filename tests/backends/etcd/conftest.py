from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.backends.conftest import Connect
from tests.backends.etcd.kit import Ours
from tests.servers_etcd import EtcdCluster, EtcdServer

__all__ = ["Connect"]


@pytest.fixture(autouse=True)
def time_to_explain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss has its reason from a request that the real 0.1 s are too short for on a machine that stands still."""
    monkeypatch.setattr("multilock_etcd.notices.REASON_WITHIN", 2.0)


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


# ---- two clients of the shared one, without a kernel


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
