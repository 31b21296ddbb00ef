from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from multilock import Client
from multilock.kernel.runtime import Threads
from multilock.testing import HandRuntime
from tests.unit.kit import Scripted, client_on


@pytest.fixture
def runtime() -> HandRuntime:
    return HandRuntime(start=1000.0)


@pytest.fixture
def backend(runtime: HandRuntime) -> Scripted:
    return Scripted(runtime)


@pytest.fixture
def make(runtime: HandRuntime) -> Iterator[Callable[..., Client]]:
    """Make clients on the hand-driven clock. They are closed after the test."""
    made: list[Client] = []

    def make(backend: Scripted, **options: Any) -> Client:
        client = client_on(backend, runtime, **options)
        made.append(client)
        return client

    yield make
    for client in made:
        client.close()


@pytest.fixture
def client(make: Callable[..., Client], backend: Scripted) -> Client:
    return make(backend)


# ---- on the real clock, with real threads


@pytest.fixture
def server() -> Scripted:
    return Scripted()


@pytest.fixture
def client_in_threads(server: Scripted) -> Iterator[Client]:
    client = client_on(server, Threads(), ttl=25.0)
    yield client
    client.close()
