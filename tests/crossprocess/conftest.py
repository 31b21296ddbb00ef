"""Backends that several processes share, and helper processes that use them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import multilock
from multilock import Client
from multilock.testing import Helper

Start = Callable[..., Helper]


@pytest.fixture(params=["sqlite", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the URL of a backend that several processes can share, but no other test uses."""
    if request.param == "sqlite":
        return f"sqlite://{tmp_path}/locks.db"
    server_url: str = request.getfixturevalue("redis_server").url
    return server_url


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    with multilock.connect(url, ttl=1.0) as client:
        yield client


@pytest.fixture
def start(url: str) -> Iterator[Start]:
    """Start a function of ``helpers`` in its own process, with the backend's URL as its first argument."""
    helpers: list[Helper] = []

    def start(function: str, *arguments: object) -> Helper:
        helpers.append(Helper(f"tests.crossprocess.helpers:{function}", url, *arguments))
        return helpers[-1]

    yield start
    for helper in helpers:
        helper.close()
