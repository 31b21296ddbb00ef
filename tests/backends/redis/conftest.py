from __future__ import annotations

from collections.abc import Callable, Generator, Iterator

import pytest
import redis

from multilock.testing import FaultProxy
from tests.backends.redis.kit import Bare, Ours
from tests.servers import RedisServer
from tests.servers_cluster import RedisCluster, cluster_of_all_tests
from tests.servers_sentinel import Guarded

Connect = Callable[..., Ours]


@pytest.fixture(scope="package")
def package_server() -> Iterator[RedisServer]:
    server = RedisServer()
    try:
        server.start()
        yield server
    finally:
        server.stop()


@pytest.fixture
def server(package_server: RedisServer) -> RedisServer:
    """Return an empty Redis. A test that stops or pauses its server uses `redis_server` instead."""
    with redis.Redis(port=package_server.port) as bare:
        bare.flushall()
        bare.script_flush()
    return package_server


@pytest.fixture
def bare(server: RedisServer) -> Iterator[Bare]:
    """Return a plain redis-py client, as another program would use it."""
    with redis.Redis(port=server.port) as client:
        yield client


@pytest.fixture
def connect(server: RedisServer) -> Iterator[Connect]:
    """Return a function that makes clients of this server or of a given URL."""
    made: list[Ours] = []

    def make(url: str | None = None, **options: object) -> Ours:
        made.append(Ours(url or server.url, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def us(connect: Connect) -> Ours:
    return connect()


@pytest.fixture
def them(connect: Connect) -> Ours:
    return connect()


@pytest.fixture
def proxy(server: RedisServer) -> Iterator[FaultProxy]:
    with FaultProxy.before(server.url) as proxy:
        yield proxy


@pytest.fixture
def cluster() -> Iterator[RedisCluster]:
    """Return a healthy, empty cluster of three shards. Nodes that the test ends are started again afterwards."""
    cluster = cluster_of_all_tests()
    for primary in cluster.primaries():
        primary.bare.flushall()
    with cluster.whole():
        yield cluster


@pytest.fixture(scope="package")
def package_guarded() -> Iterator[Guarded]:
    with Guarded() as guarded:
        yield guarded


@pytest.fixture
def guarded(package_guarded: Guarded) -> Guarded:
    """Start a primary, its replicas and their Sentinels. The test may stop or configure any of them."""
    package_guarded.heal()
    return package_guarded


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Function) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add what the Sentinels and their servers report to the report of a failed test."""
    report = yield
    guarded = item.funcargs.get("package_guarded") if report.failed else None
    if isinstance(guarded, Guarded):
        report.sections.append(("Sentinels and servers", guarded.report()))
    return report
