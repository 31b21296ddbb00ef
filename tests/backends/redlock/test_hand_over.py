"""A name is handed over from one claim to the next on several servers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import redis

from multilock import BackendUnavailable, system
from multilock.backend import Busy, Claim, Granted
from multilock_redis.redlock.acquire_release import BETWEEN, Joins, Round
from multilock_redis.redlock.connections import Fan
from multilock_redis.redlock.event_loop import Channel
from multilock_redis.redlock.votes import Evidence
from tests.backends.redis.kit import eventually
from tests.backends.redlock.kit import WITHIN, Contender, holders
from tests.benchmarks.measure import asked_of
from tests.servers_redlock import RedisServers

Contend = Callable[..., Contender]


def waits(contender: Contender, claim: Claim | None = None) -> Claim:
    """Return a claim that waits in the queues of all servers."""
    claim = claim or contender.claim()

    def stands() -> bool:
        """Send an attempt, and return True if the claim waits at all servers. The caller repeats this, because a reply
        may be missing on an overloaded machine."""
        assert isinstance(contender.attempt(claim, join=True), Busy)
        contender.settle(claim)
        return contender.states(claim) == ["waits"] * 3

    eventually(stands, within=WITHIN)
    contender.listen()
    eventually(stands, within=WITHIN)  # every server can then notify the waiter
    return claim


def hand_over(former: Contender, us: Contender) -> tuple[Claim, Granted]:
    """Return a claim of ``us`` to which ``former`` hands the name, and the grant that ``former`` had."""
    held, granted = former.take()
    former.settle(held)
    us.keep_its_votes()
    claim = waits(us)
    former.release(held)
    return claim, granted


def test_a_handover_has_one_stamp_and_needs_no_further_round(contend: Contend) -> None:
    us = contend()
    claim, first = hand_over(contend(), us)
    us.ear.hears("wake", claim.id, within=WITHIN)
    granted = us.ear.pushed[claim.id]
    assert granted.short
    assert granted.valid_for == 6.0
    assert (granted.token or 0) > (first.token or 0)


def test_a_free_lock_takes_two_requests_for_each_server(contend: Contend, servers: RedisServers) -> None:
    """Without contention, acquire and release take two requests for each server. With a handover, they take at most two
    more in all."""
    former, us = contend(), contend()
    former.teach()
    us.listen()
    us.keep_its_votes()
    ports = [member.port for member in servers.members]

    def asked() -> int:
        return asked_of(ports, ["evalsha"])

    before = asked()
    held, _ = former.take()
    former.settle(held)
    former.give_back(held)
    assert asked() - before == 2 * len(ports)
    held, _ = former.take()
    former.settle(held)
    before, claim = asked(), us.claim()
    assert isinstance(us.attempt(claim, join=True), Busy)
    us.settle(claim)
    former.give_back(held)
    eventually(lambda: us.states(claim) == ["votes"] * 3, within=WITHIN)
    us.give_back(claim)
    theirs = len(ports)  # the requests that release the former lock do not count
    assert asked() - before - theirs <= 2 * len(ports) + 2


def test_a_look_after_a_handover_asks_only_servers_that_did_not_report_it(contend: Contend) -> None:
    """When a minority has reported its votes, a timer starts. The other votes arrive before it ends."""
    us = contend()
    claim, _ = hand_over(contend(), us)
    eventually(lambda: us.states(claim) == ["votes"] * 3, within=WITHIN)
    rounds, evidence = us.backend.rounds, us.evidence(claim)
    fan = rounds.pool.take()
    rounds.act(evidence, fan)
    assert not evidence.pending()
    evidence.hinted(1)
    rounds.act(evidence, fan)
    assert [view.pending for view in evidence.views] == [0, 1, 0]
    rounds.give(fan)


def test_a_round_uses_replies_that_another_thread_reads(contend: Contend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread reads the replies just after this thread has found them missing."""
    us = contend()
    rounds, evidence = us.backend.rounds, us.backend.rounds.enter(us.claim())
    assert evidence is not None
    other, fan = rounds.pool.take(), rounds.pool.make()
    rounds.begin(evidence, other, False, Joins.NO)
    said, look, waits = Round.said, Fan.look, list[float]()

    def read_meanwhile(self: Round) -> Any:
        if (result := said(self)) is None:
            while evidence.pending():
                look(other, WITHIN)
        return result

    monkeypatch.setattr(Round, "said", read_meanwhile)
    monkeypatch.setattr(Fan, "look", lambda _, within: waits.append(within))
    granted = rounds._round(evidence, fan, us.ear.now() + WITHIN)
    monkeypatch.undo()
    assert isinstance(granted, Granted)
    assert waits
    assert max(waits) <= BETWEEN
    evidence.asking = False
    rounds.give(other)
    rounds.give(fan)


def test_an_event_loop_looks_often_for_replies_that_another_thread_reads(contend: Contend) -> None:
    us = contend()
    us.teach()
    rounds, claim = us.backend.rounds, us.claim()
    evidence = rounds.enter(claim)
    assert evidence is not None
    other, channel = rounds.pool.take(), us.backend.channel(WITHIN)
    assert isinstance(channel, Channel)
    rounds.begin(evidence, other, False, Joins.NO)
    assert channel.attempt(claim, False)
    with pytest.raises(BlockingIOError):
        channel.answer()
    assert (channel.look_in() or WITHIN) <= BETWEEN
    while evidence.pending():
        other.look(WITHIN)
    assert isinstance(channel.answer(), Granted)
    channel.close()
    rounds.give(other)


def test_claims_with_a_minority_give_way_and_one_of_them_gets_the_name(contend: Contend, servers: RedisServers) -> None:
    """Each of three claims has the vote of one server. Each then sends only one request, which gives this vote up."""
    contenders = [contend() for _ in range(3)]
    arrived = time.time_ns() // 1000
    claims = [each.claim(arrived=arrived + n) for n, each in enumerate(contenders)]
    for n, (each, claim) in enumerate(zip(contenders, claims, strict=True)):
        each.cut_off(*{0, 1, 2} - {n})
        with pytest.raises(BackendUnavailable):
            each.attempt(claim, join=True)
        each.settle(claim)
        each.reach(0, 1, 2)
    for each, claim in zip(contenders, claims, strict=True):
        assert isinstance(each.attempt(claim, join=True), Busy)
    first = contenders[0]
    first.ear.hears("wake", claims[0].id, within=WITHIN)
    eventually(lambda: holders(servers) == [claims[0].id] * 3, within=WITHIN)


def test_a_force_release_undoes_a_handover_that_nobody_has_confirmed(contend: Contend, servers: RedisServers) -> None:
    former, us = contend(), contend()
    claim, _ = hand_over(former, us)
    us.ear.hears("wake", claim.id, within=WITHIN)
    assert us.evidence(claim).proof(int(us.ear.now() * 1e6))
    assert former.backend.force_release("a", WITHIN)
    us.ear.hears("wake", claim.id, within=WITHIN)
    eventually(lambda: "votes" not in us.states(claim), within=WITHIN)
    assert holders(servers) == [""] * 3


@pytest.mark.oracle
def test_votes_with_two_stamps_get_one_common_token(contend: Contend, servers: RedisServers) -> None:
    ahead = time.time_ns() // 1000 + 10**9
    for member, token in zip(servers.members, (ahead, ahead + 1, ahead + 2), strict=True):
        with redis.Redis(port=member.port) as bare:
            bare.set("{multilock/a}:token", token)
    us = contend()
    claim, granted = us.take()
    assert (granted.token or 0) > ahead + 2
    us.settle(claim)
    us.give_back(claim)
    _, second = us.take()
    assert (second.token or 0) > (granted.token or 0)


def test_a_give_way_without_a_reply_ends_the_claim_at_once(contend: Contend) -> None:
    them, us = contend(), contend()
    them.cut_off(2)
    them.take()
    claim = us.claim(ttl=10.0)
    assert isinstance(us.attempt(claim, join=True), Busy)  # the claim has the vote of the third server
    evidence = us.evidence(claim)
    with evidence.lock:
        evidence.asks(2, int(us.ear.now() * 1e6), None, gives_way=True)
        evidence.answered(
            2,
            evidence.views[2].asked,
            BackendUnavailable("lost", unknown=True),
            0,
            gives_way=True,
            joins=True,
        )
    busy = us.attempt(claim, join=True)
    assert busy.spent
    assert busy.heartbeat < 0.1


def test_of_several_single_tries_on_a_free_name_one_succeeds(contend: Contend, servers: RedisServers) -> None:
    """Two claims have the vote of one server each, and the third server is down. The later claim gives its vote to the
    earlier one."""
    first, second = contend(), contend()
    arrived = time.time_ns() // 1000
    later = second.claim(arrived=arrived + 1)
    second.cut_off(0, 2)
    with pytest.raises(BackendUnavailable):
        second.attempt(later, join=True)
    second.settle(later)
    second.reach(0)
    first.cut_off(2)
    claim = first.claim(arrived=arrived)
    assert isinstance(first.attempt(claim, join=True), Busy)  # the claim has the vote of the first server
    granted = second.attempt(later)
    assert isinstance(granted, Granted) or holders(servers)[:2] == [claim.id] * 2


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_wrong_client_clock_moves_a_place_by_at_most_a_second(
    contend: Contend, servers: RedisServers, hours: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    them, us = contend(), contend()
    held, _ = them.take()
    them.settle(held)
    wall, before = system.wall, system.wall()
    monkeypatch.setattr(system, "wall", lambda: wall() + hours * 3600 * 10**6)
    claim = us.claim(arrived=system.wall())
    assert isinstance(us.attempt(claim, join=True), Busy)
    us.settle(claim)
    for member in servers.members:
        with redis.Redis(port=member.port) as bare:
            place: Any = bare.zscore("{multilock/a}:queue", claim.owner)
        assert place is None or -2 * 10**6 < place - before < wall() - before + 2 * 10**6


@pytest.mark.oracle
def test_a_renewal_restores_the_token_on_a_restarted_server(contend: Contend, servers: RedisServers) -> None:
    us = contend()
    held = us.take()
    us.settle(held[0])
    with redis.Redis(port=servers.members[1].port) as bare:
        bare.flushall()
    assert isinstance(us.renew(held)[0], Granted)
    eventually(lambda: holders(servers) == [held[0].id] * 3, within=WITHIN)
    with redis.Redis(port=servers.members[1].port) as bare:
        token: Any = bare.get("{multilock/a}:token")
    assert int(token or 0) == held[1].token
    info = us.backend.inspect("a", WITHIN)
    assert info is not None
    assert info.token == held[1].token


def test_after_a_cold_start_every_request_fails_and_names_the_restart(contend: Contend) -> None:
    us = contend(guard=10**6)
    with pytest.raises(BackendUnavailable, match="3 of 3 servers have restarted"):
        us.attempt(us.claim())
    with pytest.raises(BackendUnavailable, match="have restarted"):
        us.backend.inspect("a", WITHIN)


def test_a_single_try_learns_that_another_try_gave_way_to_it(
    contend: Contend, servers: RedisServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    us, them = contend(), contend()
    them.cut_off(0, 2)
    theirs = them.claim()
    with pytest.raises(BackendUnavailable):
        them.attempt(theirs)
    us.cut_off(2)
    claim = us.claim()
    rounds, gave_way = us.backend.rounds, list[bool]()
    proven = rounds.ask

    def ask(evidence: Evidence, fan: Fan, modes: Mapping[int, bytes], joins: Joins) -> None:
        proven(evidence, fan, modes, joins)
        if joins is Joins.QUIETLY and not gave_way:
            gave_way.append(True)
            with redis.Redis(port=servers.members[1].port) as bare:
                eventually(lambda: bare.zscore("{multilock/a}:queue", claim.owner) is not None, within=WITHIN)
            them.give_back(theirs)

    monkeypatch.setattr(rounds, "ask", ask)
    assert isinstance(us.attempt(claim), Granted)
