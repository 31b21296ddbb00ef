"""What all tests share: the servers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.servers import RedisServer, address


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """A Redis shared by all tests: talk to it under names of your own, never stop, pause or empty it."""
    with address("redis") as url:
        yield url


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    """A Redis of this test's own, to be paused, killed and emptied at will."""
    server = RedisServer()
    try:
        server.start()
        yield server
    finally:
        server.stop()
