"""What servers hand over, one after the other, is a lock only while a majority has it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis

from multilock import BackendUnavailable
from multilock.backend import Busy, Claim, Granted
from tests.backends.redis.kit import eventually
from tests.backends.redlock.kit import WITHIN, Contender, holders
from tests.servers_redlock import RedisServers

Contend = Callable[..., Contender]


class Waiting:
    """``them`` came first and wait at the third server alone, ``us`` at the first and the second."""

    def __init__(self, contend: Contend, servers: RedisServers) -> None:
        self.former, self.us, self.them = contend(), contend(), contend()
        self.servers = servers
        self.held, _ = self.former.take()
        self.former.settle(self.held)
        called = time.time_ns() // 1000  # a ticket that is older than a minute is not believed
        self.first, self.second = self.them.claim(arrived=called), self.us.claim(arrived=called + 1)
        self.them.cut_off(0, 1)
        with pytest.raises(BackendUnavailable):
            self.them.attempt(self.first, join=True)
        self.us.cut_off(2)
        assert isinstance(self.us.attempt(self.second, join=True), Busy)

    def hand_over(self) -> None:
        self.former.give_back(self.held)
        eventually(lambda: holders(self.servers) == [self.second.id, self.second.id, self.first.id], within=WITHIN)

    def first_server_forgets(self) -> None:
        with redis.Redis(port=self.servers.members[0].port) as bare:
            bare.set("multilock/a", "somebody else", px=60_000)

    def they_join_everywhere(self) -> None:
        self.them.reach(0, 1)
        assert isinstance(self.them.attempt(self.first, join=True), Busy)
        self.them.settle(self.first)

    def asks_again(self, claim: Claim) -> Any:
        answer = self.us.attempt(claim, join=True)
        self.us.settle(claim)
        return answer


@pytest.fixture
def waiting(contend: Contend, servers: RedisServers) -> Waiting:
    return Waiting(contend, servers)


def test_a_token_kept_too_late_proves_nothing_that_was_given_away_meanwhile(waiting: Waiting) -> None:
    us, them, second = waiting.us, waiting.them, waiting.second
    kept, answered = threading.Event(), threading.Event()
    agree = us.backend.servers.nodes[1].recipe.agree

    def late(name: str, token: int, within: float) -> Any:
        answer = agree(name, token, within)
        kept.set()
        answered.wait(WITHIN)
        return answer

    us.backend.servers.nodes[1].recipe.agree = late  # type: ignore[method-assign]
    waiting.hand_over()
    assert kept.wait(WITHIN)
    waiting.first_server_forgets()
    assert isinstance(waiting.asks_again(second), Busy)
    waiting.they_join_everywhere()
    assert isinstance(waiting.asks_again(second), Busy)  # it gives way at the second
    assert isinstance(them.attempt(waiting.first, join=True), Granted)
    answered.set()
    standing = us.backend.places.standings[second.id]
    eventually(lambda: not standing.agreeing, within=WITHIN)
    us.ear.hears("wake", second.id, within=WITHIN)
    assert second.id not in us.ear.pushed


def test_an_operator_ends_a_hand_over_whose_token_is_being_written(contend: Contend, servers: RedisServers) -> None:
    former, us = contend(), contend()
    held, _ = former.take()
    former.settle(held)
    waits = us.claim()
    assert isinstance(us.attempt(waits, join=True), Busy)
    us.settle(waits)
    writing, goes_on = threading.Event(), threading.Event()
    for node in us.backend.servers.nodes:

        def late(name: str, token: int, within: float, agree: Any = node.recipe.agree) -> Any:
            writing.set()
            goes_on.wait(WITHIN)
            return agree(name, token, within)

        node.recipe.agree = late  # type: ignore[method-assign]
    former.give_back(held)
    assert writing.wait(WITHIN)
    assert former.backend.force_release("a", WITHIN)
    assert holders(servers) == [""] * 3
    standing = us.backend.places.standings[waits.id]
    eventually(lambda: len(standing.woken) == 3, within=WITHIN)
    goes_on.set()
    eventually(lambda: not standing.agreeing, within=WITHIN)
    assert waits.id not in us.ear.pushed


def test_a_hand_over_whose_token_no_majority_keeps_is_none(contend: Contend) -> None:
    us, them = contend(), contend()
    held, _ = us.take()
    us.settle(held)
    waits = them.claim()
    assert isinstance(them.attempt(waits, join=True), Busy)
    them.settle(waits)
    them.keep_tokens_at(0)
    us.give_back(held)
    them.ear.hears("wake", waits.id, within=WITHIN)  # it is to ask for itself
    assert waits.id not in them.ear.pushed


def test_the_hand_over_of_a_server_that_has_restarted_does_not_count(
    contend: Contend, monkeypatch: pytest.MonkeyPatch
) -> None:
    us, them = contend(), contend(guard=10**9, token=False)
    for endpoint in them.backend._endpoints[1:]:
        endpoint.guard = 0.0  # these have been up for long
    held, _ = us.take()
    us.settle(held)
    waits = them.claim()
    assert isinstance(them.attempt(waits, join=True), Busy)
    them.settle(waits)
    them.cut_off(2)
    told, pushed = set[int](), them.backend.rounds.pushed

    def notes(standing: Any, which: int, granted: Granted) -> None:
        pushed(standing, which, granted)
        told.add(which)

    monkeypatch.setattr(them.backend.rounds, "pushed", notes)
    us.give_back(held)
    eventually(lambda: {0, 1} <= told, within=WITHIN)
    assert waits.id not in them.ear.pushed


def test_nobody_is_told_that_it_holds_after_it_has_given_way(waiting: Waiting) -> None:
    """The thread that tells so stands still, and the kernel asks twice meanwhile."""
    us, second = waiting.us, waiting.second
    tells, goes_on, order = threading.Event(), threading.Event(), list[str]()
    tell = us.ear.granted

    def stands_still(claim_id: str, granted: Granted) -> None:
        tells.set()
        goes_on.wait(WITHIN)
        order.append("told")
        tell(claim_id, granted)

    def ask_twice() -> None:
        for _ in range(2):
            us.attempt(second, join=True)
            order.append("asked")

    us.ear.granted = stands_still  # type: ignore[method-assign]
    waiting.hand_over()
    assert tells.wait(WITHIN)
    waiting.first_server_forgets()
    waiting.they_join_everywhere()
    asking = threading.Thread(target=ask_twice)
    asking.start()
    asking.join(0.5)  # where it can, it asks now
    goes_on.set()
    asking.join(WITHIN)
    assert order == ["told", "asked", "asked"]


def test_who_was_told_just_now_that_it_holds_gives_nothing_away(waiting: Waiting) -> None:
    """The kernel may ask just then, and hears of it after that request, which has not seen a majority any more."""
    us, second = waiting.us, waiting.second
    waiting.hand_over()
    us.ear.hears("wake", second.id, within=WITHIN)
    assert second.id in us.ear.pushed
    waiting.first_server_forgets()
    waiting.they_join_everywhere()
    us.backend.places.standings[second.id].at[0].vote = None  # as by an answer that comes late
    assert isinstance(waiting.asks_again(second), Busy)
    assert holders(waiting.servers)[1] == second.id
    assert isinstance(waiting.asks_again(second), Busy)
    assert holders(waiting.servers)[1] == waiting.first.id
