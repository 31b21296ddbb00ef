"""Watches that are set while the connection breaks, and threads that do not start: by hand, without a server."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from multilock import now
from multilock.testing.conformance.spi import Ear
from multilock_zookeeper.notices import Watcher
from multilock_zookeeper.sessions import Session
from multilock_zookeeper.transport import Answer, NodeMissing

GONE = object()


class Server:
    """A `multilock_zookeeper.transport.Transport` whose every answer is there at once, unless the test does something
    first."""

    connected = True

    def __init__(self) -> None:
        self.before_answer: Callable[[], None] = lambda: None
        self.missing: set[str] = set()
        self.asked: list[str] = []
        self.session = Session(1, 6.0, now())

    def present(self) -> Session:
        return self.session

    def children(self, path: str, watch: Any = None) -> Answer:
        return self._answer(path, GONE if path in self.missing else [])

    def exists(self, path: str, watch: Any = None) -> Answer:
        return self._answer(path, None if path in self.missing else object())

    def wait(self, answer: Answer, deadline: float) -> Any:
        if answer.value is GONE:
            raise NodeMissing
        self.before_answer()
        return answer.value

    def _answer(self, path: str, value: object) -> Answer:
        self.asked.append(path)
        answer = Answer(now())
        answer.set(value)
        return answer


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def ear() -> Ear:
    return Ear()


@pytest.fixture
def watcher(server: Server, ear: Ear) -> Watcher:
    watcher = Watcher(ear)
    watcher.attach(server)  # type: ignore[arg-type]
    return watcher


def test_a_watch_that_was_set_on_the_connection_before_is_none(server: Server, watcher: Watcher) -> None:
    """Its answer came just before the connection broke, and is read just after."""
    server.before_answer = lambda: watcher.suspended(server.session)
    watcher.hold({"/job/1": "claim"}, now() + 1)
    assert not watcher.covers("/job/1")
    server.before_answer = lambda: None
    watcher.hold({"/job/1": "claim"}, now() + 1)
    assert watcher.covers("/job/1")


def test_a_name_that_changes_before_its_watch_is_noted_is_looked_at_again(
    server: Server, watcher: Watcher, ear: Ear
) -> None:
    server.before_answer = lambda: watcher.suspended(server.session)
    watcher.follow({"/job": "job"}, now() + 1)
    assert list(watcher._unwatched) == ["/job"]
    server.before_answer = lambda: None
    watcher.resumed(server.session)
    assert ear.wait(lambda: ear.changes == ["job"])
    assert watcher._unwatched == {}
    watcher.close()


def test_a_thread_that_was_refused_is_started_by_the_next_notice(
    server: Server, watcher: Watcher, ear: Ear, monkeypatch: pytest.MonkeyPatch
) -> None:
    watcher.hold({f"/job/{number}": f"claim-{number}" for number in range(2)}, now() + 1)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refuse)
        watcher._deleted("/job/0")
    assert ear.losses == []
    watcher._deleted("/job/1")
    assert ear.wait(lambda: {claim for claim, _ in ear.losses} == {"claim-0", "claim-1"})
    assert server.asked.count("/") == 1
    watcher.close()
