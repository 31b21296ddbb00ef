"""The cancel in the background is repeated until it gets a reply, but not forever."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest

from multilock import BackendRejected, BackendUnavailable, Client, Lease, LeaseState, LossReason
from multilock.events import AtRisk
from multilock.kernel.holding import RELEASING
from multilock.model import Returned
from multilock.testing import HandRuntime
from multilock.testing.conformance.base import inner
from tests.unit.kit import (
    Call,
    Losses,
    Scripted,
    client_on,
    executed_but_unanswered,
    interrupted_at,
    refused,
    silence,
    state_of,
)


def lose_a_reply(client: Client, backend: Scripted, **options: Any) -> None:
    backend.script("attempt", executed_but_unanswered)
    with pytest.raises(BackendUnavailable):
        client.lock("n", **options).acquire(0)


def test_a_cancel_is_repeated_with_growing_pauses_until_it_gets_a_reply(
    client: Client, backend: Scripted, runtime: HandRuntime
) -> None:
    backend.script("release", *[silence(0.0)] * 6)
    lose_a_reply(client, backend)
    runtime.advance(30)
    times = [call.at for call in backend.called("release")]
    pauses = [later - earlier for earlier, later in pairwise(times)]
    assert len(times) == 7
    assert 0.05 <= pauses[0] <= 0.1
    assert pauses[-1] > pauses[0]
    assert max(pauses) <= 5.0
    assert backend.holders == {}
    assert client._kernel.cancels.wait(0)


@pytest.mark.parametrize(("ttl", "patience"), [(10.0, 60.0), (100.0, 200.0)])
def test_a_cancel_stops_after_a_minute_or_two_ttls_and_names_the_lock(
    make: Callable[..., Client],
    backend: Scripted,
    runtime: HandRuntime,
    caplog: pytest.LogCaptureFixture,
    ttl: float,
    patience: float,
) -> None:
    client = make(backend, request_timeout=1.0)
    backend.always("release", silence(0.0))
    lose_a_reply(client, backend, ttl=ttl)
    began = runtime.now()
    with caplog.at_level(logging.WARNING, "multilock"):
        runtime.advance(1000)
    assert patience - 6 <= backend.called("release")[-1].at - began <= patience + 1
    assert "gave up releasing the lock 'n'" in caplog.text
    assert client._kernel.cancels.wait(0)
    assert client._kernel.timers._heap == []


@pytest.mark.parametrize("granted", [False, True])
def test_a_cancel_never_stops_while_its_session_is_renewed(
    make: Callable[..., Client], runtime: HandRuntime, caplog: pytest.LogCaptureFixture, granted: bool
) -> None:
    backend = Scripted(runtime, sessions=True)
    client = make(backend, request_timeout=1.0)
    backend.always("release", silence(0.0))
    if granted:
        client.lock("n").acquire().release()
    else:
        lose_a_reply(client, backend)
    with caplog.at_level(logging.WARNING, "multilock"):
        runtime.advance(1000)
    assert caplog.text.count("is still not released") == 1, "it says so once"
    assert "gave up" not in caplog.text
    backend.always("release", None)
    runtime.advance(5)
    assert backend.holders == {}, "an orphan would live as long as the session"
    assert client._kernel.cancels.wait(0)


@pytest.mark.parametrize("ttl", [0.6, 2.0, 10.0])
def test_a_cancel_is_repeated_as_often_as_its_session_is_renewed(
    make: Callable[..., Client], runtime: HandRuntime, ttl: float
) -> None:
    backend = Scripted(runtime, sessions=True)
    client = make(backend, ttl=ttl)
    backend.always("release", silence(0.0))
    client.lock("n").acquire().release()
    runtime.advance(60)
    times = [call.at for call in backend.called("release")]
    longest = max(later - earlier for earlier, later in pairwise(times))
    assert longest <= ttl / 3, "after an outage nobody has the name for that long, and its session does not end"


def test_a_cancel_stops_once_its_session_has_ended(make: Callable[..., Client], runtime: HandRuntime) -> None:
    backend = Scripted(runtime, sessions=True)
    client = make(backend, request_timeout=1.0)
    backend.always("release", silence(0.0))
    lease = client.lock("n").acquire()
    lease.release()
    runtime.advance(500)
    backend.notices.group_gone(inner(lease).granted.group, "the test ends it")
    runtime.advance(10)
    assert client._kernel.cancels.wait(0)


def test_a_cancel_that_stays_refused_is_logged_twice(
    make: Callable[..., Client], runtime: HandRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    backend = Scripted(runtime, sessions=True)
    client = make(backend, request_timeout=1.0)
    backend.always("release", refused(BackendRejected("no space")))
    with caplog.at_level(logging.WARNING, "multilock"):
        client.lock("n").acquire().release()
        runtime.advance(1000)
    assert caplog.text.count("releasing the lock 'n' failed: no space") == 1
    assert caplog.text.count("the lock 'n' is still not released (no space)") == 1


def test_an_uncertain_claim_stays_uncertain_in_the_background(
    client: Client, backend: Scripted, runtime: HandRuntime
) -> None:
    backend.script("release", silence(unknown=False), silence())
    lose_a_reply(client, backend)
    runtime.advance(30)
    assert [call.details["unsure"] for call in backend.called("release")] == [True] * 3


def test_a_cancel_without_a_reply_makes_the_next_one_uncertain(
    client: Client, backend: Scripted, runtime: HandRuntime
) -> None:
    backend.holders["n"] = "somebody"
    backend.script("release", silence())
    assert client.lock("n").try_acquire(1) is None
    runtime.advance(30)
    assert [call.details["unsure"] for call in backend.called("release")] == [False, True]


@pytest.mark.parametrize("error", [BackendRejected("READONLY"), RuntimeError("a bug")])
def test_a_refused_cancel_is_repeated_too(
    client: Client, backend: Scripted, runtime: HandRuntime, error: Exception
) -> None:
    backend.script("release", refused(error), refused(error))
    lose_a_reply(client, backend)
    runtime.advance(10)
    assert backend.holders == {}


def test_a_request_executed_after_its_cancel_acquires_nothing(
    client: Client, backend: Scripted, runtime: HandRuntime
) -> None:
    stuck: list[Call] = []

    def in_a_stopped_server(backend: Scripted, call: Call) -> Any:
        stuck.append(call)
        return silence()(backend, call)

    backend.script("attempt", in_a_stopped_server)
    with pytest.raises(BackendUnavailable):
        client.lock("n").acquire(0)
    runtime.settle()
    stuck[0].execute()
    assert backend.holders == {}, "the cancel was final"


def test_close_waits_one_request_timeout_for_the_reply(client: Client, backend: Scripted, runtime: HandRuntime) -> None:
    backend.always("release", silence(0.0))
    lose_a_reply(client, backend)
    began = runtime.now()
    client.close()
    assert runtime.now() - began <= 5.1
    assert backend.closed == 1


def test_many_cancels_run_side_by_side(client: Client, backend: Scripted, runtime: HandRuntime) -> None:
    backend.always("attempt", executed_but_unanswered)
    for number in range(50):
        with pytest.raises(BackendUnavailable):
            client.lock(f"n{number}", ttl=0.5).acquire(0)
    runtime.advance(1)
    assert backend.holders == {}


def answered_after(client: Client, runtime: HandRuntime, seconds: float) -> None:
    """Let the worker threads of the clean-up continue ``seconds`` from now."""
    client._kernel.timers.at(runtime.now() + seconds, runtime.release_jobs)


def test_a_pending_cancel_costs_no_later_try_of_this_client(
    make: Callable[..., Client], backend: Scripted, runtime: HandRuntime
) -> None:
    client = make(backend, request_timeout=1.0)
    runtime.hold_jobs()
    lose_a_reply(client, backend)
    answered_after(client, runtime, 0.25)
    began = runtime.now()
    lease = client.lock("n").try_acquire()
    assert lease is not None, "its own orphan kept it out"
    assert runtime.now() == pytest.approx(began + 0.25)
    assert backend.called("attempt")[-1].within == pytest.approx(0.75), "one request's time in all"


def test_a_try_waits_for_a_pending_cancel_at_most_half_a_request(
    make: Callable[..., Client], backend: Scripted, runtime: HandRuntime
) -> None:
    client = make(backend, request_timeout=1.0)
    runtime.hold_jobs()
    lose_a_reply(client, backend)
    began = runtime.now()
    assert client.lock("n").try_acquire() is None
    assert runtime.now() == pytest.approx(began + 0.5)


def test_a_try_waits_only_for_a_cancel_of_the_same_name_that_is_being_sent(
    client: Client, backend: Scripted, runtime: HandRuntime
) -> None:
    backend.script("release", *[silence(0.0)] * 3)
    lose_a_reply(client, backend)  # the first cancel got no reply, so the next one comes later
    began = runtime.now()
    assert client.lock("n").try_acquire() is None
    assert runtime.now() == began
    runtime.hold_jobs()
    runtime.advance(0.2)
    began = runtime.now()
    assert client.lock("m").try_acquire() is not None
    assert runtime.now() == began


def test_a_cancel_without_a_reply_lets_the_try_continue_at_once(
    make: Callable[..., Client], backend: Scripted, runtime: HandRuntime
) -> None:
    client = make(backend, request_timeout=1.0)
    runtime.hold_jobs()
    backend.script("release", silence(0.0))
    lose_a_reply(client, backend)
    answered_after(client, runtime, 0.25)
    began = runtime.now()
    assert client.lock("n").try_acquire() is None
    assert runtime.now() == pytest.approx(began + 0.25)


def partly(*, ours: bool = True) -> Callable[[Scripted, Call], Returned]:
    """Reply like a backend one of whose servers has not answered."""

    def answer(backend: Scripted, call: Call) -> Returned:
        call.execute()
        return Returned(ours, again=True)

    return answer


def test_an_incomplete_release_returns_at_once_and_continues_until_it_is_complete(
    client: Client, backend: Scripted, runtime: HandRuntime
) -> None:
    lease = client.lock("n").acquire()
    backend.script("release", *[partly()] * 4)
    assert lease.release() is True
    assert lease.state is LeaseState.RELEASED
    assert runtime.now() == 1000, "nobody waits for the rest"
    assert not client._kernel.cancels.wait(0)
    runtime.advance(30)
    assert client._kernel.cancels.wait(0)
    released = backend.called("release")
    assert [call.details["unsure"] for call in released] == [False, True, True, True, True]
    assert {call.claims for call in released} == {(inner(lease).claim,)}
    pauses = [later.at - earlier.at for earlier, later in pairwise(released[1:])]
    assert pauses[0] < pauses[-1], "a server that is down is not asked all the time"


def test_an_incomplete_release_of_a_lost_lease_continues_too(
    client: Client, backend: Scripted, runtime: HandRuntime
) -> None:
    losses = Losses(runtime)
    lease = client.lock("n", on_lost=losses).acquire()
    backend.script("release", partly(ours=False))
    assert lease.release() is False
    assert losses.wait().reason is LossReason.TAKEN
    runtime.advance(30)
    assert [call.details["unsure"] for call in backend.called("release")] == [False, True]
    assert client._kernel.cancels.wait(0)


def test_a_background_cancel_continues_until_it_is_complete(
    client: Client, backend: Scripted, runtime: HandRuntime
) -> None:
    backend.holders["n"] = "somebody"
    backend.script("release", partly(ours=False), partly(ours=False))
    assert client.lock("n").try_acquire(1) is None
    runtime.advance(30)
    assert [call.details["unsure"] for call in backend.called("release")] == [False, True, True]
    assert client._kernel.cancels.wait(0)


def interrupted_everywhere(function: str, end: Callable[[Client, Lease], object]) -> Iterator[Scripted]:
    """Interrupt ``function`` at each possible point while ``end`` releases a lease. Yield the backend if the release
    had begun."""
    step = 0
    while True:
        runtime = HandRuntime()
        backend = Scripted(runtime)
        client = client_on(backend, runtime, ttl=3.0)
        told: list[object] = []
        client.events.subscribe(told.append)
        lease = client.lock("n").acquire()
        runtime.advance(0.2)
        with interrupted_at(step, function) as where, contextlib.suppress(KeyboardInterrupt):
            end(client, lease)
        begun = state_of(lease) is not LeaseState.HELD
        runtime.advance(10)
        if begun:
            assert inner(lease).stage != RELEASING, where
            assert not client._kernel.held, where
            assert not [event for event in told if isinstance(event, AtRisk)], where
            yield backend
        client.close()
        if not where:
            assert step > 20
            return
        step += 1


def test_a_release_interrupted_anywhere_never_reports_the_lock_at_risk() -> None:
    for backend in interrupted_everywhere("Releases._decide", lambda client, lease: lease.release()):
        assert not backend.holders


def test_a_background_release_is_completed_wherever_it_was_interrupted() -> None:
    for backend in interrupted_everywhere(
        "Releases.later", lambda client, lease: client._kernel.releases.later(inner(lease))
    ):
        assert not backend.holders
