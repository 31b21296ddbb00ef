"""Fixtures for clients and for a proxy. Each backend's folder defines a fixture ``server``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import multilock
from multilock.testing import FaultProxy
from tests.servers import Server

Connect = Callable[..., multilock.Client]


@pytest.fixture
def proxy(server: Server) -> Iterator[FaultProxy]:
    with FaultProxy.before(server.url, server.port) as proxy:
        yield proxy


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Make clients, and close all of them after the test."""
    made: list[multilock.Client] = []

    def make(url: str, **options: Any) -> multilock.Client:
        made.append(multilock.connect(url, **{"ttl": 10.0, **options}))
        return made[-1]

    yield make
    for client in made:
        client.close()
