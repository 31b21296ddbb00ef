"""Requests whose reply is lost, or that arrive late: a *raise* of stamps, a *top-up* of a holder's votes, and a
release."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import redis

import multilock
from multilock import BackendUnavailable, now
from multilock.backend import Busy, Claim, Granted
from multilock.testing import FaultProxy
from multilock.testing.conformance.base import Recorder
from multilock_redis.redlock import acquire_release
from multilock_redis.redlock.acquire_release import RAISE, TOP_UP, Round
from multilock_redis.wire import bulks
from tests.backends.redis.kit import eventually
from tests.backends.redlock.kit import WITHIN, Contender, holders
from tests.servers_redlock import RedisServers, url_of

Contend = Callable[..., Contender]
IN_A_RAISE, IN_A_TOP_UP = bulks(RAISE), bulks(TOP_UP)  # bytes that only a request of this kind contains
FREE = [""] * 3


@pytest.fixture
def proxies(servers: RedisServers) -> Iterator[list[FaultProxy]]:
    with ExitStack() as stack:
        yield [stack.enter_context(FaultProxy.before(member.url)) for member in servers.members]


def before(proxies: list[FaultProxy]) -> str:
    return url_of([f"{each.host}:{each.port}" for each in proxies])


def make_stamps_differ(servers: RedisServers) -> int:
    """Let the servers give different stamps to the next claim, so that it must raise them to one number. Returns the
    greatest stamp."""
    ahead = time.time_ns() // 1000 + 10**9
    for n, member in enumerate(servers.members):
        with redis.Redis(port=member.port) as bare:
            bare.set("{multilock/a}:token", ahead + n)
    return ahead + len(servers.members)


def executed(servers: RedisServers) -> list[int]:
    """Return how many scripts each server has executed."""
    found = []
    for member in servers.members:
        with redis.Redis(port=member.port) as bare:
            stats: Any = bare.info("commandstats")
            found.append(stats["cmdstat_evalsha"]["calls"])
    return found


def hold_a_bare_majority(us: Contender) -> tuple[Claim, Granted]:
    """Acquire a lease while the third server is cut off, and connect to that server again. Returns the lease."""
    us.teach()
    us.cut_off(2)
    held = us.take()
    us.settle(held[0])
    us.reach(2)
    return held


@pytest.mark.oracle
@pytest.mark.parametrize("lost", [1, 2, 3])
def test_lost_replies_to_a_raise_leave_one_token_and_no_lease(
    contend: Contend, servers: RedisServers, lost: int
) -> None:
    us = contend()
    us.teach()
    greatest, claim = make_stamps_differ(servers), us.claim()
    faults = [proxy.drop_reply(IN_A_RAISE) for proxy in us.proxies[:lost]]
    said = us.attempt(claim)
    assert isinstance(said, Granted if lost == 1 else Busy)
    for fault in faults:
        fault.wait(WITHIN)
    us.give_back(claim)
    assert holders(servers) == FREE
    us.reach(0, 1, 2)
    _, second = us.take()
    assert (second.token or 0) > max(greatest, getattr(said, "token", 0))


def test_a_raise_has_as_much_time_as_a_round(contend: Contend) -> None:
    """The first two replies shorten the round. Then the third reply shows that the stamps differ."""
    us = contend()
    rounds, fan = us.backend.rounds, us.backend.rounds.pool.take()
    evidence, sent = rounds.enter(us.claim()), now()
    assert evidence is not None
    evidence.asking, evidence.round_at = True, sent
    asked = Round(rounds, evidence, fan, sent + WITHIN)
    for which in range(3):
        evidence.asks(which, int(sent * 1e6), None, gives_way=False)
    for which in range(3):
        evidence.answered(which, int(sent * 1e6), which + 1, 0, gives_way=False, joins=False)
        assert asked.said() is None
    assert evidence.pending() == 3
    assert asked.end == sent + WITHIN
    rounds.give(fan)


@pytest.mark.oracle
def test_a_raise_without_a_reply_proves_no_token_and_takes_nothing_later(
    contend: Contend, servers: RedisServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acquire_release, "LATEST", 0.5)
    us = contend()
    us.teach()
    make_stamps_differ(servers)
    claim = us.claim(ttl=2.5)  # with this ttl a round of requests has 0.25 s
    faults = [proxy.hold_request(IN_A_RAISE) for proxy in us.proxies[:2]]
    with pytest.raises(BackendUnavailable):
        us.attempt(claim)
    us.settle(claim)
    assert us.evidence(claim).spent()
    assert claim.id not in us.ear.pushed
    us.give_back(claim)
    former = executed(servers)
    for fault in faults:
        fault.release()
    eventually(lambda: [now > then for now, then in zip(executed(servers), former, strict=True)][:2] == [True] * 2)
    assert holders(servers) == FREE


def test_a_lock_whose_raise_has_no_reply_is_taken_once_and_given_back(
    proxies: list[FaultProxy], servers: RedisServers
) -> None:
    with multilock.connect(before(proxies), ttl=30) as client:
        client.lock("b").acquire().release()  # this connects to the servers and loads the scripts
        greatest = make_stamps_differ(servers)
        faults = [proxy.drop_reply(IN_A_RAISE) for proxy in proxies[:2]]
        lease = client.lock("a").acquire(timeout=WITHIN)
        for fault in faults:
            fault.wait(WITHIN)
        assert lease.fence() > greatest
        eventually(lambda: set(holders(servers)) <= {lease.owner.partition("@")[0], ""}, within=WITHIN)
        assert lease.release()
        eventually(lambda: holders(servers) == FREE, within=WITHIN)


def test_a_lost_reply_to_a_top_up_is_no_vote_and_leaves_nothing(contend: Contend, servers: RedisServers) -> None:
    us = contend()
    held = hold_a_bare_majority(us)
    fault = us.proxies[2].drop_reply(IN_A_TOP_UP)
    assert isinstance(us.renew(held)[0], Granted)
    fault.wait(WITHIN)
    evidence = us.evidence(held[0])
    eventually(lambda: evidence.views[2].unsure, within=WITHIN)
    assert us.states(held[0]) == ["votes", "votes", "out"]
    assert holders(servers) == [held[0].id] * 3
    us.reach(2)
    assert isinstance(us.renew(held)[0], Granted)
    # the third server also reports a vote
    eventually(lambda: us.states(held[0]) == ["votes"] * 3, within=WITHIN)
    us.give_back(held[0])
    assert holders(servers) == FREE


def test_a_top_up_that_comes_after_the_release_takes_nothing(contend: Contend, servers: RedisServers) -> None:
    us = contend()
    held = hold_a_bare_majority(us)
    fault = us.proxies[2].hold_request(IN_A_TOP_UP)
    assert isinstance(us.renew(held)[0], Granted)
    fault.wait(WITHIN)
    us.give_back(held[0])
    former = executed(servers)[2]
    fault.release()
    eventually(lambda: executed(servers)[2] > former, within=WITHIN)
    assert holders(servers) == FREE


def test_a_holder_outlives_a_lost_reply_to_a_top_up(proxies: list[FaultProxy], servers: RedisServers) -> None:
    losses: Recorder[multilock.Loss] = Recorder()
    with multilock.connect(before(proxies), ttl=6) as client:
        client.lock("b").acquire().release()
        proxies[2].refuse()
        proxies[2].cut()
        lease = client.lock("a", on_lost=losses).acquire(timeout=WITHIN)
        fault = proxies[2].drop_reply(IN_A_TOP_UP)
        proxies[2].accept()

        def renew() -> bool:
            lease.renew()
            return fault.happened

        eventually(renew, within=WITHIN)
        lease.renew()
        assert losses.stays_at(0, during=0.2)
        assert lease.release()
        eventually(lambda: holders(servers) == FREE, within=WITHIN)


def test_the_clerk_repeats_a_release_until_a_reply_comes(contend: Contend, servers: RedisServers) -> None:
    us = contend()
    us.teach()
    claim, _ = us.take()
    us.settle(claim)
    evidence = us.evidence(claim)
    faults = [proxy.drop_reply(claim.id.encode(), nth=n) for proxy in us.proxies[:2] for n in (1, 2, 3)]
    with pytest.raises(BackendUnavailable) as silence:
        us.release(claim)
    assert silence.value.unknown
    for fault in faults:
        fault.wait(WITHIN)
    eventually(lambda: not us.backend.rounds.claims, within=WITHIN)
    # The repeated releases found nothing, which does not prove that the lock was lost.
    assert evidence.was_ours() is None
    assert holders(servers) == FREE
