"""The background cancel: repeated until answered, with patience, and not for ever."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from multilock import BackendRejected, BackendUnavailable, Client
from multilock.testing import HandRuntime
from tests.unit.kit import Call, Scripted, executed_but_unanswered, refused, silence


def lose_a_reply(client: Client, backend: Scripted, **options: Any) -> None:
    backend.script("attempt", executed_but_unanswered)
    with pytest.raises(BackendUnavailable):
        client.lock("n", **options).acquire(0)


def test_a_cancel_is_repeated_with_growing_pauses_until_it_is_answered(
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
    assert client._kernel.cleanup.wait(0)


@pytest.mark.parametrize(("ttl", "patience"), [(10.0, 60.0), (100.0, 200.0)])
def test_it_gives_up_after_a_minute_or_two_ttls_and_names_the_lock(
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
    assert "gave up giving back the lock 'n'" in caplog.text
    assert client._kernel.cleanup.wait(0)
    assert client._kernel.timers._heap == []


def test_unsure_is_never_forgotten_on_the_way(client: Client, backend: Scripted, runtime: HandRuntime) -> None:
    backend.script("release", silence(unknown=False), silence())
    lose_a_reply(client, backend)
    runtime.advance(30)
    assert [call.details["unsure"] for call in backend.called("release")] == [True] * 3


def test_a_cancel_without_an_answer_makes_the_next_one_unsure(
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


def test_a_request_executed_after_its_cancel_takes_nothing(
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


def test_close_waits_for_the_answer_one_request_timeout(
    client: Client, backend: Scripted, runtime: HandRuntime
) -> None:
    backend.always("release", silence(0.0))
    lose_a_reply(client, backend)
    began = runtime.now()
    client.close()
    assert runtime.now() - began <= 5.1
    assert backend.closed == 1


def test_many_cancels_go_on_side_by_side(client: Client, backend: Scripted, runtime: HandRuntime) -> None:
    backend.always("attempt", executed_but_unanswered)
    for number in range(50):
        with pytest.raises(BackendUnavailable):
            client.lock(f"n{number}", ttl=0.5).acquire(0)
    runtime.advance(1)
    assert backend.holders == {}
