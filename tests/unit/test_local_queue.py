"""Of all waiters of one client for one name, only one at a time sends requests."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from multilock import BackendUnavailable, Client
from multilock.kernel.acquire import acquire
from multilock.kernel.local_queue import Gate
from multilock.testing import HandRuntime
from tests.unit.kit import Scripted, Step, StepFace, client_on, ctrl_c, silence


class Crowd:
    """Acquires of one client, which all advance by one await at a time."""

    def __init__(self, backend: Scripted, runtime: HandRuntime, **options: Any) -> None:
        self.runtime = runtime
        self.client: Client = client_on(backend, runtime, StepFace, **options)
        self.kernel = self.client._kernel
        self.steps: list[Step] = []

    def acquire(self, name: str = "n", timeout: float | None = None, **options: Any) -> Step:
        step = Step(acquire(self.kernel, self.client.lock(name, **options)._want, timeout))  # type: ignore[attr-defined]
        self.steps.append(step)
        self.settle()
        return step

    def release(self, step: Step) -> None:
        release = Step(self.kernel.releases.release(step.result))
        while release.on():
            pass
        assert release.result is True
        self.settle()

    def settle(self) -> None:
        while sum(step.on() for step in self.steps):
            pass

    def advance(self, seconds: float) -> None:
        until = self.runtime.now() + seconds
        while self.runtime.now() < until:  # requests to a silent server also move the clock
            self.runtime.advance(0.05)
            self.settle()


@pytest.fixture
def crowd(backend: Scripted, runtime: HandRuntime) -> Crowd:
    return Crowd(backend, runtime)


def claims(backend: Scripted) -> set[str]:
    return {call.claims[0].id for call in backend.called("attempt")}


def test_of_many_unfair_waiters_one_sends_requests(crowd: Crowd, backend: Scripted) -> None:
    backend.holders["n"] = "somebody"
    for _ in range(20):
        crowd.acquire()
    crowd.advance(5)
    assert len(claims(backend)) == 1


def test_each_release_admits_the_next_waiter(crowd: Crowd, backend: Scripted, runtime: HandRuntime) -> None:
    waiters = [crowd.acquire() for _ in range(20)]
    for number, holder in enumerate(waiters):
        assert [step.done() for step in waiters] == [True] * (number + 1) + [False] * (19 - number)
        crowd.release(holder)
        crowd.advance(0.1)
    assert runtime.now() < 1010.0, "woken, none waited for its heartbeat"
    assert backend.holders == {}
    assert crowd.kernel.gate._lines == {}


def test_waiters_for_different_names_do_not_wait_for_each_other(crowd: Crowd, backend: Scripted) -> None:
    backend.holders["taken"] = "somebody"
    crowd.acquire("taken")
    assert crowd.acquire("free").done()


def test_a_single_try_sends_its_own_request(crowd: Crowd, backend: Scripted) -> None:
    backend.holders["n"] = "somebody"
    for _ in range(5):
        crowd.acquire()
    once = crowd.acquire(timeout=0)
    assert once.done()
    assert once.result is None
    assert [call.details["join"] for call in backend.called("attempt")] == [True, False]


def test_fair_waiters_each_take_their_own_place_at_the_server(crowd: Crowd, backend: Scripted) -> None:
    backend.holders["n"] = "somebody"
    for _ in range(5):
        crowd.acquire(fair=True)
    assert len(claims(backend)) == 5
    assert len(backend.queues["n"]) == 5


def test_a_waiter_inside_the_client_gives_up_at_its_own_deadline(
    crowd: Crowd, backend: Scripted, runtime: HandRuntime
) -> None:
    backend.holders["n"] = "somebody"
    crowd.acquire()
    impatient = crowd.acquire(timeout=3)
    crowd.advance(2.9)
    assert not impatient.done()
    crowd.advance(0.2)
    assert impatient.done()
    assert impatient.result is None


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_cancelled_waiter_delays_no_other(crowd: Crowd, backend: Scripted, which: int) -> None:
    backend.holders["n"] = "somebody"
    waiters = [crowd.acquire() for _ in range(3)]
    waiters[which].cancel(asyncio.CancelledError())
    assert isinstance(waiters[which].error, asyncio.CancelledError)
    del backend.holders["n"]
    for waiter in waiters:
        if waiter.error is None:
            crowd.advance(2)
            assert waiter.done()
            crowd.release(waiter)
    crowd.advance(2)
    assert backend.holders == {}
    assert backend.queues["n"] == []
    assert crowd.kernel.gate._lines == {}


def test_a_waiter_interrupted_as_it_joins_delays_no_other(
    crowd: Crowd, backend: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter = crowd.kernel.gate.enter

    def interrupted(name: str, waiter: Any) -> Any:
        enter(name, waiter)
        raise KeyboardInterrupt

    monkeypatch.setattr(crowd.kernel.gate, "enter", interrupted)
    assert isinstance(crowd.acquire().error, KeyboardInterrupt)
    monkeypatch.undo()
    assert crowd.acquire().done()


def test_an_outage_ends_the_waits_inside_the_client_too(backend: Scripted, runtime: HandRuntime) -> None:
    crowd = Crowd(backend, runtime, outage_timeout=10.0, request_timeout=0.5)
    backend.holders["n"] = "somebody"
    waiters = [crowd.acquire() for _ in range(3)]
    crowd.advance(20)
    assert not any(waiter.done() for waiter in waiters), (
        "a server that replies is not in an outage, even if it always refuses"
    )
    backend.always("attempt", silence())
    silent_since = runtime.now()
    crowd.advance(5)
    latecomer = crowd.acquire()
    crowd.advance(4)
    assert not any(waiter.done() for waiter in waiters)
    while not all(waiter.done() for waiter in waiters):
        crowd.advance(0.1)
        assert runtime.now() <= silent_since + 14
    assert all(isinstance(waiter.error, BackendUnavailable) for waiter in waiters)
    assert not latecomer.done(), "it has seen less of the silence"
    while not latecomer.done():
        crowd.advance(0.1)
    assert isinstance(latecomer.error, BackendUnavailable)
    assert silent_since + 15 <= runtime.now() <= silent_since + 20


def test_silence_at_the_end_raises_backend_unavailable_inside_the_client_too(
    backend: Scripted, runtime: HandRuntime
) -> None:
    crowd = Crowd(backend, runtime, request_timeout=0.5)
    backend.holders["n"] = "somebody"
    crowd.acquire()
    waiter = crowd.acquire(timeout=8)
    crowd.advance(2)
    backend.always("attempt", silence())
    crowd.advance(10)
    assert isinstance(waiter.error, BackendUnavailable)


def begin(crowd: Crowd, timeout: float | None = None) -> Step:
    """Begin an acquire that advances only when the test steps it."""
    return Step(acquire(crowd.kernel, crowd.client.lock("n")._want, timeout))  # type: ignore[attr-defined]


def test_a_timeout_behind_an_unanswered_request_does_not_mean_taken(crowd: Crowd, runtime: HandRuntime) -> None:
    first = begin(crowd)
    waiter = begin(crowd, timeout=2)
    runtime.advance(2.1)
    waiter.on()
    assert not first.done(), "its request is under way"
    assert isinstance(waiter.error, BackendUnavailable)
    assert not waiter.error.unknown, "nothing was asked for it"


def test_a_waiter_behind_an_unanswered_request_ignores_replies_from_before_it_came(
    crowd: Crowd, backend: Scripted, runtime: HandRuntime
) -> None:
    backend.holders["n"] = "somebody"
    first = crowd.acquire()
    runtime.advance(0.5)
    waiter = begin(crowd, timeout=3)
    runtime.advance(1)
    assert first.on(), "asks again, and gets no reply"
    runtime.advance(2)
    waiter.on()
    assert isinstance(waiter.error, BackendUnavailable)


@pytest.mark.parametrize("asks_again", [False, True])
def test_a_short_wait_between_two_requests_of_the_first_waiter_ends_as_taken(
    crowd: Crowd, backend: Scripted, runtime: HandRuntime, asks_again: bool
) -> None:
    backend.holders["n"] = "somebody"
    backend.heartbeat = 1.0
    first = crowd.acquire()
    runtime.advance(0.5)
    waiter = begin(crowd, timeout=0.63)
    runtime.advance(0.61)
    if asks_again:
        assert first.on(), "a request of a few milliseconds says nothing yet"
    runtime.advance(0.03)
    waiter.on()
    assert waiter.done()
    assert waiter.error is None
    assert waiter.result is None


def test_a_waiter_that_becomes_first_at_its_deadline_sends_the_last_request(
    crowd: Crowd, backend: Scripted, runtime: HandRuntime
) -> None:
    backend.holders["n"] = "somebody"
    backend.heartbeat = 10.0
    first = crowd.acquire(timeout=1.0)
    runtime.advance(0.01)
    waiter = crowd.acquire(timeout=1.0)
    backend.always("attempt", silence())
    runtime.advance(0.99)
    crowd.settle()
    assert first.done()
    assert len(claims(backend)) == 2, "it asks itself, with 10 ms left"
    runtime.advance(0.02)
    crowd.settle()
    assert waiter.done()
    assert waiter.error is None
    assert waiter.result is None


def test_a_waiter_that_becomes_first_without_time_left_does_not_report_taken(
    crowd: Crowd, backend: Scripted, runtime: HandRuntime
) -> None:
    first = begin(crowd)
    waiter = begin(crowd, timeout=2)
    runtime.advance(1.98)
    first.cancel(asyncio.CancelledError())
    backend.always("attempt", silence())
    while waiter.on():
        pass
    assert isinstance(waiter.error, BackendUnavailable)


def test_a_silence_that_ended_is_forgotten(backend: Scripted, runtime: HandRuntime) -> None:
    crowd = Crowd(backend, runtime, outage_timeout=10.0, request_timeout=0.5)
    backend.holders["n"] = "somebody"
    waiters = [crowd.acquire(timeout=60) for _ in range(2)]
    for _ in range(4):
        backend.always("attempt", silence())
        crowd.advance(6)
        backend.always("attempt", None)
        crowd.advance(4)
    assert not any(waiter.done() for waiter in waiters)
    crowd.advance(30)
    assert [waiter.result for waiter in waiters] == [None, None]
    assert [waiter.error for waiter in waiters] == [None, None], "taken, and the server says so"


class Rung:
    def __init__(self) -> None:
        self.times = 0

    def ring(self) -> None:
        self.times += 1

    async def wait(self, seconds: float) -> None:
        raise AssertionError


def test_a_waiter_interrupted_while_it_leaves_still_wakes_the_next() -> None:
    gate, first, second = Gate(), Rung(), Rung()
    gate.enter("n", first)
    gate.enter("n", second)
    with ctrl_c("Gate.leave", "remove"):
        gate.leave("n", first)
    gate.leave("n", first)
    assert second.times == 1
    with ctrl_c("Gate.leave", "remove"):
        gate.leave("n", second)
    gate.leave("n", second)
    assert gate._lines == {}


def test_a_waiter_that_leaves_from_behind_wakes_no_other() -> None:
    gate, first, second = Gate(), Rung(), Rung()
    gate.enter("n", first)
    gate.enter("n", second)
    gate.leave("n", second)
    assert first.times == 0
