"""A push connection that is down for a while is reported once, and once more when it is back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from multilock import Client
from multilock.events import Event, PushesDown, PushesUp
from multilock.testing.hand import HandRuntime
from tests.unit.kit import Scripted, client_on


@pytest.fixture
def runtime() -> HandRuntime:
    return HandRuntime()


@pytest.fixture
def backend(runtime: HandRuntime) -> Scripted:
    return Scripted(runtime)


@pytest.fixture
def client(backend: Scripted, runtime: HandRuntime) -> Iterator[Client]:
    with client_on(backend, runtime, ttl=30.0) as client:
        yield client


def test_a_brief_loss_of_connection_is_not_logged(
    client: Client, backend: Scripted, runtime: HandRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    backend.notices.pushes("subscription to s", "end of file")
    assert [finding.code for finding in client.diagnose()] == ["pushes-down"]
    runtime.advance(2.9)
    backend.notices.pushes("subscription to s", None)
    runtime.advance(10)
    assert client.diagnose() == []
    assert caplog.messages == []


def test_a_connection_that_stays_down_is_logged_once_until_it_is_back(
    client: Client, backend: Scripted, runtime: HandRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[Event] = []
    client.events.subscribe(seen.append)
    for _ in range(4):
        backend.notices.pushes("subscription to s", "end of file")
        runtime.advance(2)
    backend.notices.pushes("subscription to s", "connection refused")
    [finding] = client.diagnose()
    assert (finding.level, "connection refused" in finding.message) == ("warning", True)
    assert len(caplog.messages) == 1
    assert "nothing is pushed over the subscription to s: end of file" in caplog.messages[0]
    backend.notices.pushes("subscription to s", None)
    backend.notices.pushes("subscription to s", None)
    assert caplog.messages[1:] == ["the subscription to s is back"]
    assert client.diagnose() == []
    runtime.settle()
    [down, up] = seen
    assert isinstance(down, PushesDown)
    assert isinstance(up, PushesUp)
    assert (down.connection, down.trouble, up.connection) == ("subscription to s", "end of file", "subscription to s")


def test_a_refusal_is_logged_at_once_even_while_the_connection_is_down(
    client: Client, backend: Scripted, runtime: HandRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    backend.notices.pushes("subscription to s", "end of file")
    backend.notices.pushes("subscription to s", "NOPERM", refused=True)
    backend.notices.pushes("subscription to s", "NOPERM", refused=True)
    assert len(caplog.messages) == 1
    assert "NOPERM" in caplog.messages[0]
