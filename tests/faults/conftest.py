"""Fixtures: a Redis for one test, a proxy in front of it, an operator's client, and blocking and asyncio clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from multilock import Client
from multilock.testing import FaultProxy
from multilock.testing.conformance.faces import FACES, Face
from multilock_redis import open_backend
from tests.faults.chaos import Report
from tests.servers import RedisServer

SHOWN = "shown"
Connect = Callable[..., Client]

Operator = Any
"""A `redis.Redis`: its commands are typed for both of its faces at once."""


@pytest.fixture
def show(
    record_property: Callable[[str, object], None], capsys: pytest.CaptureFixture[str]
) -> Callable[[Report], None]:
    """Print the table of a report at the end of the run, even if the test passes."""

    def show(report: Report) -> None:
        report.show()
        shown = capsys.readouterr().out
        record_property(SHOWN, shown)
        if report.violations:
            print(shown)  # pytest shows this if the test fails

    return show


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the tables at the end of the run, because pytest does not show the output of a worker."""
    for report in terminalreporter.getreports("passed"):
        for text in (str(value) for name, value in report.user_properties if name == SHOWN):
            terminalreporter.write_line(f"{report.nodeid}\n{text}")


@pytest.fixture(params=sorted(FACES))
def face(request: pytest.FixtureRequest) -> Iterator[Face]:
    face = FACES[request.param]()
    yield face
    face.close()


@pytest.fixture
def operator(redis_server: RedisServer) -> Iterator[Operator]:
    with redis.Redis(port=redis_server.port) as client:
        yield client


@pytest.fixture
def proxy(redis_server: RedisServer) -> Iterator[FaultProxy]:
    with FaultProxy.before(redis_server.url) as proxy:
        yield proxy


@pytest.fixture
def connect(face: Face, redis_server: RedisServer) -> Iterator[Connect]:
    """Make clients of this face that have already used their connection. The asyncio clients have blocking methods,
    too."""
    made: list[Client] = []

    def connect(url: str | None = None, *, ttl: float = 10.0, warm: bool = True, **options: Any) -> Client:
        shared = {"ttl": ttl, "prefix": "multilock/", "identity": "test", "request_timeout": None}
        client = face.client(open_backend(url or redis_server.url, shared), ttl=ttl, **options)
        made.append(client)
        if warm:
            client.lock("warm-up").acquire(timeout=5).release()
        return client

    yield connect
    for client in made:
        client.close()
