from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import redis

from tests.backends.redlock.kit import Contender
from tests.servers_redlock import RedisServers


@pytest.fixture(scope="package")
def package_servers() -> Iterator[RedisServers]:
    with RedisServers(3) as servers:
        yield servers


@pytest.fixture
def servers(package_servers: RedisServers) -> RedisServers:
    """Return three empty servers. Tests must not stop or pause them."""
    for member in package_servers.members:
        with redis.Redis(port=member.port) as bare:
            bare.flushall()
    return package_servers


@pytest.fixture
def contend(servers: RedisServers) -> Iterator[Callable[..., Contender]]:
    made: list[Contender] = []

    def make(among: RedisServers | None = None, **options: float) -> Contender:
        made.append(Contender(among or servers, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()
