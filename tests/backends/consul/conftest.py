from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.backends.conftest import Connect
from tests.servers_consul import ConsulCluster, ConsulServer

__all__ = ["Connect"]


@pytest.fixture(autouse=True)
def time_to_explain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss has its reason from a request that the real 0.1 s are too short for on a machine that stands still."""
    monkeypatch.setattr("multilock_consul.notices.EXPLAIN_WITHIN", 2.0)


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
