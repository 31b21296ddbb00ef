"""A reply does not name its claim. So if a request is interrupted, its reply must not be taken for the reply to another
claim's request."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest

from multilock.testing.conformance.base import eventually
from multilock_redis import transport
from multilock_redis.redlock import acquire_release, background_thread, connections
from multilock_redis.redlock.votes import Evidence
from tests.backends.kit import interrupted
from tests.backends.redlock.kit import Contender, holders
from tests.servers_redlock import RedisServers

LONG = 30.0  # seconds to wait at most, on a busy machine
FIRST, STEP = 3, 4  # the third moment of a request is tested first, then every fourth


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt may come in a finalizer
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_an_interrupt_at_any_point_gives_no_vote_to_another_claim(
    contend: Callable[..., Contender], servers: RedisServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    us, them = contend(), contend()
    us.teach()
    them.teach()
    held, _ = them.take(them.claim("held"))
    them.settle(held)
    answered = Evidence.answered
    false_votes: list[int] = []
    moment, more = FIRST - STEP, True

    def note(evidence: Evidence, which: int, at: int, answer: Any, *rest: Any, **options: Any) -> None:
        if evidence.claim.name == "held" and isinstance(answer, int):
            false_votes.append(moment)
        answered(evidence, which, at, answer, *rest, **options)

    monkeypatch.setattr(Evidence, "answered", note)
    while more:
        moment += STEP
        claim = us.claim(f"n{moment}")
        more = interrupted(lambda claim=claim: us.attempt(claim), moment, connections, transport)  # type: ignore[misc]
        refused = us.claim("held")
        us.attempt(refused)
        us.give_back(refused)
        us.give_back(claim, unsure=True)
    gc.collect()  # close the connections of interrupted calls, whose warnings this test ignores
    assert moment > 10
    assert false_votes == []
    assert holders(servers, "held") == [held.id] * 3
    eventually(lambda: all(holders(servers, f"n{n}") == [""] * 3 for n in range(FIRST, moment, STEP)), LONG)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt may come in a finalizer
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_a_close_that_was_interrupted_and_repeated_has_sent_its_last_words(
    servers: RedisServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (background_thread, connections):
        monkeypatch.setattr(module, "LAST_WORDS", LONG)
    moment, more = -1, True
    while more:
        moment += 5
        us = Contender(servers)
        claim, _ = us.take()
        us.settle(claim)
        us.proxies[2].cut()
        us.release(claim)
        more = interrupted(us.backend.close, moment, background_thread, connections, acquire_release)
        us.backend.close()
        eventually(lambda: holders(servers) == [""] * 3, LONG)
        us.close()
    gc.collect()
    assert moment > 10
