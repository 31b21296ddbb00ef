from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from multilock.model import Claim, Granted
from multilock.testing.conformance.spi import Ear
from multilock_consul import ConsulBackend, open_backend
from tests.backends.conftest import Connect
from tests.servers_consul import ConsulCluster, ConsulServer

__all__ = ["Connect", "Open", "take"]

WITHIN = 5.0
ROOT_TOKEN = "6b4f6a52-0000-4000-8000-a0c1d8f3e111"
GUARDED = {"enabled": True, "default_policy": "deny", "tokens": {"master": ROOT_TOKEN, "agent": ROOT_TOKEN}}
Open = Callable[..., ConsulBackend]


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


@pytest.fixture
def guarded() -> Iterator[ConsulServer]:
    """A server with access control lists, which gives nobody anything."""
    with ConsulServer(token=ROOT_TOKEN, acl=GUARDED) as server:
        yield server


@pytest.fixture
def ear() -> Ear:
    return Ear()


@pytest.fixture
def open_(ear: Ear) -> Iterator[Open]:
    """Makes backends, without a kernel; all are closed after the test."""
    opened: list[ConsulBackend] = []

    def open_(url: str, **options: object) -> ConsulBackend:
        backend = open_backend(url, {"ttl": 3.0, "prefix": "multilock/", "identity": "me", **options})
        backend.open(ear)
        opened.append(backend)
        return backend

    yield open_
    for backend in opened:
        backend.close()


def take(backend: ConsulBackend, claim: Claim) -> Granted:
    granted = backend.attempt(claim, False, WITHIN)
    assert isinstance(granted, Granted), granted
    return granted
