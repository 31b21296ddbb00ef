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
    """Allow two seconds for the request that explains a loss. An overloaded machine needs more than the usual 0.1 s."""
    monkeypatch.setattr("multilock_consul.notices.REASON_WITHIN", 2.0)


@pytest.fixture(scope="package")
def shared() -> Iterator[ConsulServer]:
    """Start one server for all tests that only send requests to it. Each test uses different names."""
    with ConsulServer() as server:
        yield server


@pytest.fixture
def server() -> Iterator[ConsulServer]:
    """Start a server for one test, which may stop, pause or empty it."""
    with ConsulServer() as server:
        yield server


@pytest.fixture
def cluster() -> Iterator[ConsulCluster]:
    with ConsulCluster() as cluster:
        yield cluster


@pytest.fixture
def guarded() -> Iterator[ConsulServer]:
    """Start a server with access control lists that grants nothing without a token."""
    with ConsulServer(token=ROOT_TOKEN, acl=GUARDED) as server:
        yield server


@pytest.fixture
def ear() -> Ear:
    return Ear()


@pytest.fixture
def open_(ear: Ear) -> Iterator[Open]:
    """Open backends that the test calls directly. Closes all of them after the test."""
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
