"""A login takes longer than its request. The next request uses the connection, or the connection is closed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from threading import Event, Thread

import pytest

from multilock import dialling, now
from multilock.dialling import Dialling
from multilock.testing.conformance.base import SOON, eventually

FOREVER = 600.0


class Login:
    """A function that connects when the test allows it."""

    def __init__(self, error: Exception | None = None) -> None:
        self.begun, self.allowed, self.closed = Event(), Event(), Event()
        self.error = error
        self.ended = False  # whether the server has ended the connection

    def __call__(self) -> Login:
        self.begun.set()
        self.allowed.wait(FOREVER)
        if self.error:
            raise self.error
        return self

    def stale(self) -> bool:
        return self.ended

    def close(self) -> None:
        self.closed.set()


def quick() -> Login:
    login = Login()
    login.allowed.set()
    return login


@pytest.fixture
def dials(monkeypatch: pytest.MonkeyPatch) -> Iterator[Dialling[Login]]:
    monkeypatch.setattr(dialling, "KEPT", FOREVER)
    monkeypatch.setattr(dialling, "PROMISING", FOREVER)
    dials = Dialling[Login]("dials", 3)
    permits = dials.permits
    yield dials
    dials.close()
    eventually(lambda: permits.qsize() == 3)


@pytest.fixture
def late(dials: Dialling[Login]) -> Iterator[Login]:
    """Yield a login that is under way, although its request has given up."""
    login = Login()
    assert isinstance(dials.outcome(login, 0.01, now), TimeoutError)
    login.begun.wait(SOON)
    yield login
    login.allowed.set()


def arrive(dials: Dialling[Login], late: Login) -> None:
    """Let the login end before another request begins."""
    late.allowed.set()
    [login] = dials._late
    eventually(lambda: not login.result.empty() or login.settled.is_set())


def test_the_next_request_uses_a_connection_that_came_too_late(dials: Dialling[Login], late: Login) -> None:
    arrive(dials, late)
    other = quick()
    assert dials.outcome(other, SOON, now) is late
    assert not other.begun.is_set()
    assert dials.outcome(other, SOON, now) is other


def test_the_next_request_waits_for_the_login_that_is_under_way(dials: Dialling[Login], late: Login) -> None:
    other = quick()
    with ThreadPoolExecutor(1) as pool:
        outcome = pool.submit(dials.outcome, other, SOON, now)
        eventually(lambda: not dials._late)
        late.allowed.set()
        assert outcome.result() is late
    assert not other.begun.is_set()


def test_a_login_that_two_requests_gave_up_serves_the_third(dials: Dialling[Login], late: Login) -> None:
    assert isinstance(dials.outcome(Login(), 0.01, now), TimeoutError)
    arrive(dials, late)
    assert dials.outcome(quick(), SOON, now) is late


def test_a_login_that_hangs_delays_no_other_login(
    dials: Dialling[Login], late: Login, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dialling, "PROMISING", 0.0)
    other = quick()
    assert dials.outcome(other, SOON, now) is other
    arrive(dials, late)
    assert dials.outcome(quick(), SOON, now) is late


def test_the_failure_of_an_earlier_login_is_not_that_of_the_next_request(dials: Dialling[Login], late: Login) -> None:
    late.error = OSError("refused")
    arrive(dials, late)
    other = quick()
    assert dials.outcome(other, SOON, now) is other


def test_a_late_connection_that_the_server_has_ended_is_not_used(dials: Dialling[Login], late: Login) -> None:
    late.ended = True
    arrive(dials, late)
    other = quick()
    assert dials.outcome(other, SOON, now) is other
    assert late.closed.is_set()


def test_a_late_connection_that_no_request_needs_is_closed(
    dials: Dialling[Login], late: Login, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dialling, "KEPT", 0.0)
    late.allowed.set()
    assert late.closed.wait(SOON)
    other = quick()
    assert dials.outcome(other, SOON, now) is other


@pytest.mark.parametrize("before", [True, False], ids=["arrived before", "arrives after"])
def test_a_client_that_is_closed_keeps_no_late_connection(dials: Dialling[Login], late: Login, before: bool) -> None:
    if before:
        arrive(dials, late)
    dials.close()
    late.allowed.set()
    assert late.closed.wait(SOON)


def test_a_closed_client_keeps_no_login_that_is_late_after_that(dials: Dialling[Login]) -> None:
    dials.close()
    login = Login()
    assert isinstance(dials.outcome(login, 0.01, now), TimeoutError)
    login.allowed.set()
    assert login.closed.wait(SOON)


def test_a_forked_child_does_not_use_the_late_connection_of_its_parent(dials: Dialling[Login], late: Login) -> None:
    arrive(dials, late)
    [login] = dials._late
    dials.forget()
    other = quick()
    assert dials.outcome(other, SOON, now) is other
    login.discard()


class SlowToDrop(Exception):
    """An error that keeps all other threads from running for a while when it is dropped."""

    def __del__(self) -> None:
        until = now() + 0.3
        while now() < until:
            pass


def test_a_request_whose_late_login_fails_at_its_deadline_gives_up(dials: Dialling[Login]) -> None:
    allowed = Event()

    def fails() -> Login:
        allowed.wait(FOREVER)
        raise SlowToDrop

    assert isinstance(dials.outcome(fails, 0.01, now), TimeoutError)
    outcomes: SimpleQueue[object] = SimpleQueue()
    request = Thread(target=lambda: outcomes.put(dials.outcome(quick(), 0.2, now)), daemon=True)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(FOREVER)  # each thread runs until it waits
    try:
        request.start()
        eventually(lambda: not dials._late)
        allowed.set()
        request.join(SOON)
        assert isinstance(outcomes.get_nowait(), TimeoutError)
    finally:
        sys.setswitchinterval(interval)
