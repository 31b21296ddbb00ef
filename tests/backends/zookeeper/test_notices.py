"""Watches that are set while the connection breaks, and threads that do not start. No server is needed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any

import pytest
from kazoo.protocol.states import EventType, KeeperState, WatchedEvent

from multilock import BackendRejected, BackendUnavailable, now
from multilock.testing.conformance.base import eventually
from multilock.testing.conformance.spi import Ear
from multilock_zookeeper.notices import Watcher
from multilock_zookeeper.session_validity import Session
from multilock_zookeeper.transport import Answer, NodeMissing

GONE = object()


class Server:
    """A replacement for `multilock_zookeeper.transport.Transport`. It calls `before_answer`, and then replies at
    once."""

    connected = True
    name = "zookeeper of the test"

    def __init__(self) -> None:
        self.before_answer: Callable[[], None] = lambda: None
        self.missing: set[str] = set()
        self.below: dict[str, list[str]] = {}
        self.asked: list[str] = []
        self.session = Session(1, 6.0, now())

    def present(self) -> Session:
        return self.session

    def children(self, path: str, watch: Any = None) -> Answer:
        return self._answer(path, GONE if path in self.missing else self.below.get(path, []))

    def stripped(self, path: str) -> str:
        return path

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


def test_a_watch_from_an_earlier_connection_does_not_count(server: Server, watcher: Watcher) -> None:
    """The reply that confirms the watch comes just before the connection breaks, and is read just after that."""
    server.before_answer = lambda: watcher.suspended(server.session)
    watcher.hold({"/job/1": "claim"}, now() + 1)
    assert not watcher.covers("/job/1")
    server.before_answer = lambda: None
    watcher.hold({"/job/1": "claim"}, now() + 1)
    assert watcher.covers("/job/1")


def test_a_name_that_changes_before_its_watch_is_recorded_is_read_again(
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


def test_a_reconnect_does_not_wait_for_the_retry_of_a_failed_read(
    server: Server, watcher: Watcher, ear: Ear, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multilock_zookeeper.notices.LOOK_AGAIN", 3600.0)
    failing = threading.Event()

    def fail() -> None:
        failing.set()
        raise BackendUnavailable("no answer in time")

    watcher.hold({"/job/1": "claim"}, now() + 1)
    watcher.suspended(server.session)
    server.before_answer = fail
    watcher.resumed(server.session)
    assert failing.wait(10)
    eventually(lambda: watcher._look_at > now() + 1000)
    server.before_answer = lambda: None
    watcher.suspended(server.session)
    watcher.resumed(server.session)
    eventually(lambda: watcher.covers("/job/1"))
    watcher.close()


def test_a_session_is_renewed_once_its_connection_is_back(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last renewal may have failed, and the next regular one would come too late."""
    renewed: list[Hashable] = []
    ear = Ear()
    monkeypatch.setattr(ear, "silent", renewed.append)
    watcher = Watcher(ear)
    watcher.attach(server)  # type: ignore[arg-type]
    watcher.suspended(server.session)
    watcher.resumed(server.session)
    assert renewed == [1, 1]
    watcher.close()


def test_a_broken_connection_is_reported_until_all_watches_are_set_again(server: Server, watcher: Watcher) -> None:
    told = Told()
    watcher._notices = told
    watcher.hold({"/job/1": "claim"}, now() + 1)
    watcher.suspended(server.session)
    assert told.trouble == ("the connection broke", False)
    server.before_answer = refuse
    watcher.resumed(server.session)
    eventually(lambda: told.trouble == ("you may not", True))
    server.before_answer = lambda: None
    eventually(lambda: told.trouble == (None, False), 10)
    watcher.close()


class Told(Ear):
    """A recorder that keeps the newest state of the push connection."""

    trouble: tuple[str | None, bool] = (None, False)

    def pushes(self, connection: str, trouble: str | None, *, refused: bool = False) -> None:
        self.trouble = (trouble, refused)


def refuse() -> None:
    raise BackendRejected("you may not")


@pytest.mark.parametrize("many", [3, 40])
def test_a_watched_node_deleted_before_its_watch_was_set_is_noticed(
    server: Server, watcher: Watcher, many: int
) -> None:
    ahead = [f"/job/{number}" for number in range(many)]
    server.below["/job"] = [*(str(number) for number in range(1, many)), "own"]
    server.missing = {"/job/0"}
    assert not watcher.wait("claim", ahead, "/job/own", now() + 1)
    assert watcher.wait("claim", ahead[1:], "/job/own", now() + 1)


def test_a_waiter_behind_many_nodes_watches_their_parent_and_each_change_wakes_it(
    server: Server, watcher: Watcher, ear: Ear
) -> None:
    ahead = [f"/job/{number}" for number in range(40)]
    server.below["/job"] = [*(str(number) for number in range(40)), "own"]
    for turn in range(2):
        assert watcher.wait("claim", ahead[turn:], "/job/own", now() + 1)
        assert server.asked[turn:] == ["/job"]
        watcher._event(WatchedEvent(EventType.CHILD, KeeperState.CONNECTED, "/job"))
        assert ear.wakes == ["claim"] * (turn + 1)
    # No further wake-up, because the waiter has not asked again.
    watcher._event(WatchedEvent(EventType.CHILD, KeeperState.CONNECTED, "/job"))
    assert len(ear.wakes) == 2


def test_a_waiter_is_not_woken_by_nodes_that_it_no_longer_waits_for(server: Server, watcher: Watcher, ear: Ear) -> None:
    """The first deleted node of several wakes the waiter. Later deletions must not wake it again."""
    assert watcher.wait("claim", ["/job/0", "/job/1"], "/job/own", now() + 1)
    for path in ("/job/0", "/job/1", "/job/own"):
        watcher._event(WatchedEvent(EventType.DELETED, KeeperState.CONNECTED, path))
    assert ear.wakes == ["claim"]
    assert (watcher._waiters, watcher._waiting) == ({}, {})
