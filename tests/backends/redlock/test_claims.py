"""Single claims on several servers: which votes they get, and which entries remain at the servers."""

from __future__ import annotations

import contextlib
import select
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis

import multilock
from multilock import BackendRejected, BackendUnavailable, ConfigurationError, LossReason, now
from multilock.backend import Busy, Claim, Granted
from multilock_redis import open_backend
from multilock_redis.redlock import RedlockBackend, acquire_release, votes
from multilock_redis.redlock.restarts import Guarded
from multilock_redis.transport import Endpoint
from tests.backends.redis.kit import eventually
from tests.backends.redlock.kit import WITHIN, Contender, holders
from tests.servers_redlock import RedisServers

Contend = Callable[..., Contender]


def places(servers: RedisServers, claim: Claim) -> list[float]:
    """Return the claim's place in the queue of each server."""
    found = []
    for member in servers.members:
        with redis.Redis(port=member.port) as bare:
            place: Any = bare.zscore("{multilock/a}:queue", claim.owner)
            found.append(place)
    return found


def test_a_majority_of_servers_grants_the_lock_and_a_minority_does_not(contend: Contend, servers: RedisServers) -> None:
    us, them = contend(), contend()
    us.cut_off(2)
    claim, _ = us.take()
    refused = them.attempt(them.claim())
    assert isinstance(refused, Busy)
    assert refused.spent  # the claim got the vote of one server, and must be released first
    assert holders(servers)[:2] == [claim.id, claim.id]


def test_a_refused_try_releases_its_votes(contend: Contend, servers: RedisServers) -> None:
    us, them = contend(), contend()
    us.cut_off(2)
    claim, _ = us.take()
    tried = them.claim()
    them.attempt(tried)
    them.give_back(tried)
    assert holders(servers) == [claim.id, claim.id, ""]
    assert not them.backend.rounds.claims


def test_a_release_is_also_sent_to_servers_that_refused(contend: Contend, servers: RedisServers) -> None:
    us, them = contend(), contend()
    held, _ = us.take()
    waits = them.claim()
    assert isinstance(them.attempt(waits, join=True), Busy)
    them.give_back(waits)
    us.give_back(held)
    assert holders(servers) == ["", "", ""]


@pytest.mark.oracle
def test_the_token_is_greater_than_each_that_a_majority_has(contend: Contend, servers: RedisServers) -> None:
    us = contend()
    claim, first = us.take()
    us.give_back(claim)
    ahead = (first.token or 0) + 10**12
    for member in servers.members[1:]:
        with redis.Redis(port=member.port) as bare:
            bare.set("{multilock/a}:token", ahead)
    us.cut_off(2)
    claim, second = us.take()
    assert (second.token or 0) > ahead
    us.give_back(claim)
    us.reach(2)
    other, _ = us.take(us.claim("b"))  # this connects to the third server again
    us.settle(other)
    us.cut_off(1)
    _, third = us.take()
    assert (third.token or 0) > (second.token or 0)


def test_acquire_does_not_wait_for_replies_that_cannot_change_the_result(contend: Contend) -> None:
    us = contend()
    us.proxies[1].black_hole()
    began = now()
    claim, _ = us.take()
    us.release(claim)
    assert now() - began < 2.5  # neither call waits three seconds for the missing reply


def test_a_refusal_by_a_majority_does_not_wait_for_the_other_replies(contend: Contend) -> None:
    them, us = contend(), contend()
    held, _ = them.take()
    them.settle(held)
    us.proxies[1].black_hole()
    began = now()
    assert isinstance(us.attempt(us.claim(ttl=100.0)), Busy)
    assert now() - began < 5.0  # the attempt does not wait ten seconds for the missing reply


def test_all_servers_are_asked_at_the_same_time(contend: Contend, servers: RedisServers) -> None:
    us = contend()
    us.teach()
    claim = us.claim(ttl=100.0)
    faults = [proxy.hold_request(claim.id.encode()) for proxy in us.proxies]
    asking = threading.Thread(target=us.attempt, args=(claim,))
    asking.start()
    for fault in faults:
        fault.wait(5.0)  # each request may take ten seconds
    for fault in faults:
        fault.release()
    asking.join(WITHIN)
    us.settle(claim)
    assert holders(servers) == [claim.id] * 3


def test_silent_servers_do_not_use_up_the_time(contend: Contend) -> None:
    us = contend()
    for proxy in us.proxies[:2]:
        proxy.black_hole()
    began = now()
    with pytest.raises(BackendUnavailable):
        us.attempt(us.claim(ttl=2.5))
    assert now() - began < 5.0


def test_a_reply_that_is_late_for_its_round_still_counts_and_keeps_its_connection(
    contend: Contend, monkeypatch: pytest.MonkeyPatch
) -> None:
    us = contend()
    us.teach()
    clerk = us.backend.rounds.clerk
    clerk.start()  # the clerk uses its own connections, not those of late replies
    assert clerk._fan is not None
    lanes = clerk._fan.lanes
    eventually(lambda: all(lane.wire or lane.link._spares for lane in lanes), within=WITHIN)
    monkeypatch.setattr(acquire_release, "LATEST", WITHIN)
    [fan] = us.backend.rounds.pool.idle
    wires = [lane.wire for lane in fan.lanes]
    claim = us.claim(ttl=2.0)
    late = [proxy.hold_request(claim.id.encode()) for proxy in us.proxies]
    with pytest.raises(BackendUnavailable):
        us.attempt(claim)  # the round of requests ends after 0.25 s
    time.sleep(0.35)  # long enough for the connection to be closed, if the round closed it
    for each in late:
        each.release()
    eventually(lambda: us.states(claim) == ["votes"] * 3, within=WITHIN)
    assert not us.evidence(claim).spent()
    assert us.evidence(claim).fan is fan
    assert [lane.wire for lane in fan.lanes] == wires


def test_a_claim_has_the_same_place_in_every_queue(contend: Contend, servers: RedisServers) -> None:
    them, us = contend(), contend()
    held, _ = them.take()
    them.settle(held)
    us.listen()  # without a subscription, the first requests of the claim would not join the queues
    claim = us.claim(arrived=time.time_ns() // 1000 - 10**6)
    for _ in range(2):
        assert isinstance(us.attempt(claim, join=True), Busy)
        us.settle(claim)
        assert places(servers, claim) == [claim.arrived] * 3


def test_uptime_in_whole_seconds_counts_as_its_smallest_possible_value() -> None:
    """A server that started at 0.9 s may report an uptime of 5 s at 5.1 s, because Redis rounds it."""
    guarded = Guarded.around(Endpoint("redis://h", redis.Connection, {}), 30.0)
    guarded._wait_for_those_before(b"5", 5.1)
    assert guarded.counts_from >= 0.9 + 30.0


def test_a_cancelled_claim_sends_no_further_requests(contend: Contend, servers: RedisServers) -> None:
    us = contend()
    claim = us.claim()
    assert not us.release(claim, unsure=True).ours
    assert us.attempt(claim, join=True).spent
    assert holders(servers) == ["", "", ""]


@pytest.mark.oracle
@pytest.mark.parametrize("lost", [1, 2, 3])
def test_a_lost_reply_to_the_first_request_leaves_nothing(contend: Contend, servers: RedisServers, lost: int) -> None:
    us = contend()
    claim = us.claim(ttl=10.0)
    faults = [proxy.drop_reply(claim.id.encode()) for proxy in us.proxies[:lost]]
    if lost == 1:
        us.take(claim)
    else:
        with pytest.raises(BackendUnavailable) as silence:
            us.attempt(claim)
        assert silence.value.unknown
    for fault in faults:
        fault.wait(WITHIN)
    us.give_back(claim, unsure=True)
    assert holders(servers) == ["", "", ""]
    assert not us.backend.rounds.claims


def test_a_request_that_arrives_after_its_cancel_acquires_nothing(contend: Contend, servers: RedisServers) -> None:
    us = contend()
    claim = us.claim(ttl=10.0)
    fault = us.proxies[0].hold_request(claim.id.encode())
    us.take(claim)
    fault.wait(WITHIN)
    us.give_back(claim)
    fault.release()
    with redis.Redis(port=servers.members[0].port) as bare:
        eventually(lambda: bare.exists(f"{{multilock/a}}:gone:{claim.id}"))
    _, granted = us.take()
    assert granted.token


def test_a_release_whose_reply_is_lost_is_repeated_at_that_server(contend: Contend, servers: RedisServers) -> None:
    us = contend()
    claim, _ = us.take(us.claim(ttl=10.0))
    us.settle(claim)
    fault = us.proxies[1].drop_reply(claim.id.encode())
    assert us.release(claim).ours
    fault.wait(WITHIN)
    eventually(lambda: not us.backend.rounds.claims, within=WITHIN)


def test_one_lost_reply_to_a_renewal_is_harmless_and_two_put_the_lease_at_risk(contend: Contend) -> None:
    us = contend()
    claim, granted = us.take(us.claim(ttl=10.0))
    us.settle(claim)
    us.cut_off(0)
    [renewed] = us.renew((claim, granted))
    assert isinstance(renewed, Granted)
    assert renewed.sent_at > granted.sent_at
    us.cut_off(1)
    [silence] = us.renew((claim, renewed))
    assert isinstance(silence, BackendUnavailable)


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_lost_replies_to_a_renewal_end_no_lease(contend: Contend, servers: RedisServers, lost: int) -> None:
    us = contend()
    us.teach()
    claim, granted = us.take()
    us.settle(claim)
    faults = [proxy.drop_reply(claim.id.encode()) for proxy in us.proxies[:lost]]
    [renewed] = us.renew((claim, granted))
    for fault in faults:
        fault.wait(WITHIN)
    assert isinstance(renewed, Granted if lost == 1 else BackendUnavailable)
    assert holders(servers) == [claim.id] * 3
    us.reach(0, 1, 2)
    [again] = us.renew((claim, granted))
    assert isinstance(again, Granted)
    assert again.token == granted.token


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_lost_replies_to_a_release_leave_nothing(contend: Contend, servers: RedisServers, lost: int) -> None:
    us = contend()
    us.teach()
    claim, _ = us.take()
    us.settle(claim)
    faults = [proxy.drop_reply(claim.id.encode()) for proxy in us.proxies[:lost]]
    if lost == 1:
        assert us.release(claim).ours
    else:
        with pytest.raises(BackendUnavailable) as silence:
            us.release(claim)
        assert silence.value.unknown
    for fault in faults:
        fault.wait(WITHIN)
    assert holders(servers) == ["", "", ""]
    us.reach(0, 1, 2)
    # The claim is removed once every server has confirmed its release.
    eventually(lambda: not us.backend.rounds.claims, within=WITHIN)
    us.give_back(claim, unsure=True)
    assert not us.backend.rounds.claims


def test_a_lost_reply_to_a_release_never_reports_a_lost_lock(contend: Contend) -> None:
    us = contend()
    us.teach()
    claim, _ = us.take()
    us.settle(claim)
    for proxy in us.proxies[:2]:
        proxy.drop_reply(claim.id.encode())
    # While this server delays its reply, the release is repeated at the two others, which have nothing left to release.
    us.proxies[2].delay(1.0)
    with pytest.raises(BackendUnavailable) as silence:
        us.release(claim)
    assert silence.value.unknown


def test_a_server_whose_uptime_is_not_known_receives_no_acquire(contend: Contend) -> None:
    """If it received one, the kernel would have to cancel the claim there for minutes, and would log a warning."""
    us = contend()
    us.proxies[0].black_hole()
    with pytest.raises(BackendUnavailable) as silence:
        us.backend.servers.endpoints[0]._dial(0.1, now)
    assert not silence.value.unknown


def test_a_renewal_counts_although_newer_replies_arrived_first(contend: Contend) -> None:
    """Newer replies may come because the clerk asks for a missing vote, or the watchdog renews."""
    us = contend()
    claim, granted = us.take()
    us.settle(claim)
    evidence, later = us.evidence(claim), int(now() * 1e6) + 5_000_000
    for which in range(3):
        evidence.asks(which, later, None, gives_way=False)
        evidence.answered(which, later, granted.token or 0, later, gives_way=False, joins=True)
    [renewed] = us.renew((claim, granted))
    assert isinstance(renewed, Granted)


def test_renewing_a_released_lease_is_a_loss(contend: Contend) -> None:
    us = contend()
    claim, granted = us.take()
    us.settle(claim)
    us.give_back(claim)
    us.cut_off(2)
    us.release(claim, unsure=True)  # one server has not confirmed the release
    assert us.renew((claim, granted)) == [None]


def test_a_lease_is_lost_once_no_majority_can_have_it(contend: Contend, servers: RedisServers) -> None:
    us = contend()
    held = us.take()
    us.settle(held[0])
    for member, expected in zip(servers.members, (Granted, None, None), strict=True):
        with redis.Redis(port=member.port) as bare:
            bare.flushall()
        us.backend.rounds._to_top_up = lambda evidence: {}  # type: ignore[method-assign]
        [renewed] = us.renew(held)
        assert (renewed is None) if expected is None else isinstance(renewed, expected)


def test_the_next_renewal_repeats_the_acquire_at_a_server_that_lost_the_lease(
    contend: Contend, servers: RedisServers
) -> None:
    us = contend()
    held = us.take()
    us.settle(held[0])
    with redis.Redis(port=servers.members[1].port) as bare:
        bare.delete("multilock/a")
    [renewed] = us.renew(held)
    assert isinstance(renewed, Granted)
    eventually(lambda: holders(servers) == [held[0].id] * 3)


def test_a_holder_whose_votes_are_all_in_doubt_does_not_take_the_name_again(
    contend: Contend, servers: RedisServers
) -> None:
    us = contend()
    held = us.take()
    us.settle(held[0])
    rounds, evidence = us.backend.rounds, us.evidence(held[0])
    for which, member in enumerate(servers.members):
        with redis.Redis(port=member.port) as bare:
            bare.delete("multilock/a")
        evidence.hinted(which)
    fan = rounds.pool.take(evidence.fan)
    fan.ready(now() + WITHIN)
    rounds.act(evidence, fan)
    asked = evidence.pending()
    rounds.give(fan)
    assert not asked
    assert us.renew(held) == [None]


def test_a_deleted_key_is_a_loss_only_on_a_majority(contend: Contend, servers: RedisServers) -> None:
    us = contend()
    claim, granted = us.take()
    us.settle(claim)
    us.backend.watch("redlock", [(claim, granted)], WITHIN)
    eventually(lambda: all(node.listener._tracked for node in us.backend.servers.nodes))
    ports = [member.port for member in servers.members]
    with redis.Redis(port=ports[0]) as bare:
        bare.delete("multilock/a")
    eventually(lambda: us.states(claim)[0] == "out", within=WITHIN)
    assert ("gone", claim.id, LossReason.TAKEN) not in us.ear.heard
    with redis.Redis(port=ports[1]) as bare:
        bare.delete("multilock/a")
    us.ear.hears("gone", claim.id, LossReason.TAKEN, within=WITHIN)


def test_one_server_that_lost_its_data_ends_a_lease_of_a_bare_majority(contend: Contend, servers: RedisServers) -> None:
    us, them = contend(), contend()
    us.cut_off(2)
    held = us.take()
    us.backend.watch("redlock", [held], WITHIN)
    eventually(lambda: all(node.listener._tracked for node in us.backend.servers.nodes[:2]), within=WITHIN)
    with redis.Redis(port=servers.members[1].port) as bare:
        bare.delete("multilock/a")
    us.ear.hears("gone", held[0].id, LossReason.TAKEN, within=WITHIN)
    them.take()


def test_a_renewal_loses_a_lease_that_only_a_minority_keeps(contend: Contend, servers: RedisServers) -> None:
    us = contend()
    us.cut_off(2)
    held = us.take()
    with redis.Redis(port=servers.members[1].port) as bare:
        bare.delete("multilock/a")
    assert us.renew(held) == [None]


def test_a_server_that_granted_the_lease_again_reports_its_next_loss(contend: Contend, servers: RedisServers) -> None:
    """Servers lose the lease one after the other, while a majority always keeps it."""
    us = contend()
    held = us.take()
    us.settle(held[0])
    us.backend.watch("redlock", [held], WITHIN)
    standing = us.evidence(held[0])
    eventually(lambda: all(node.listener._tracked for node in us.backend.servers.nodes), within=WITHIN)
    for which in range(3):
        with redis.Redis(port=servers.members[which].port) as bare:
            bare.delete("multilock/a")
        # Wait for `lost_at`, because the clerk may restore the state of the view before the test reads it.
        eventually(lambda at=standing.views[which]: at.lost_at > 0, within=WITHIN)  # type: ignore[misc]
        standing.views[which].lost_at = -(10**12)  # long ago
        [renewed] = us.renew(held)
        assert isinstance(renewed, Granted)
        eventually(lambda at=standing.views[which]: at.watched, within=WITHIN)  # type: ignore[misc]
        us.settle(held[0])
    assert us.backend.force_release("a", WITHIN)
    us.ear.hears("gone", held[0].id, LossReason.TAKEN, within=WITHIN)


def test_a_server_whose_watch_failed_gets_the_watch_after_a_renewal(contend: Contend, servers: RedisServers) -> None:
    us = contend()
    held = us.take()
    us.settle(held[0])
    us.cut_off(2)
    us.backend.watch("redlock", [held], WITHIN)
    standing = us.evidence(held[0])
    eventually(lambda: [at.watched for at in standing.views] == [True, True, False], within=WITHIN)
    us.reach(2)

    def watches() -> bool:
        assert isinstance(us.renew(held)[0], Granted)
        return standing.views[2].watched and us.backend.servers.nodes[2].listener._tracked is not None

    eventually(watches, within=WITHIN)
    for member in servers.members[1:]:
        with redis.Redis(port=member.port) as bare:
            bare.delete("multilock/a")
    us.ear.hears("gone", held[0].id, LossReason.TAKEN, within=WITHIN)


def test_a_force_release_is_reported_although_a_renewal_arrives_between_two_servers(
    contend: Contend, servers: RedisServers
) -> None:
    us = contend()
    held = us.take(us.claim(ttl=100.0))
    us.backend.watch("redlock", [held], WITHIN)
    us.settle(held[0])
    nodes = us.backend.servers.nodes
    assert nodes[0].inspection.force_release("a", WITHIN, tombstone=0)
    eventually(lambda: us.states(held[0])[0] == "out", within=WITHIN)
    [renewed] = us.renew(held)
    assert isinstance(renewed, Granted)
    # The first server has voted for the lease again.
    eventually(lambda: holders(servers) == [held[0].id] * 3, within=WITHIN)
    assert nodes[1].inspection.force_release("a", WITHIN, tombstone=0)
    us.ear.hears("gone", held[0].id, LossReason.TAKEN, within=WITHIN)


def test_the_later_of_two_claims_gives_its_votes_up(contend: Contend, servers: RedisServers) -> None:
    first, second, third = contend(), contend(), contend()
    arrived = 10**6 * int(time.time())
    claims = [each.claim(arrived=arrived + n) for n, each in enumerate((first, second, third))]
    everybody = list(zip((first, second, third), claims, strict=True))
    for n, (each, claim) in enumerate(everybody):  # each claim gets the vote of one server
        each.cut_off(*{0, 1, 2} - {n})
        with pytest.raises(BackendUnavailable):
            each.attempt(claim, join=True)
        each.settle(claim)
        each.reach(0, 1, 2)
    assert holders(servers) == [claim.id for claim in claims]
    assert isinstance(first.attempt(claims[0], join=True), Busy)
    for each, claim in everybody[1:]:
        assert isinstance(each.attempt(claim, join=True), Busy)
    first.ear.hears("wake", claims[0].id, within=WITHIN)
    granted = first.attempt(claims[0], join=True)
    assert isinstance(granted, Granted)
    assert granted.token
    first.settle(claims[0])
    # Two votes are enough. The third server votes once the last claim has given its vote up.
    eventually(lambda: holders(servers) == [claims[0].id] * 3, within=WITHIN)


def test_a_handover_grants_the_lock_once_a_majority_has_reported_it(contend: Contend) -> None:
    us, them = contend(), contend()
    held, former = us.take()
    us.settle(held)
    them.keep_its_votes()
    waits = them.claim()
    assert isinstance(them.attempt(waits, join=True), Busy)
    them.settle(waits)
    us.release(held)
    them.ear.hears("wake", waits.id, within=WITHIN)
    granted = them.ear.pushed[waits.id]
    assert granted.short
    assert granted.valid_for == 6.0
    assert (granted.token or 0) > (former.token or 0)
    [renewed] = them.renew((waits, granted))
    assert renewed.token == granted.token
    assert not renewed.short
    assert them.attempt(waits, join=True).token == granted.token


@pytest.mark.oracle
def test_a_token_never_falls_back_after_another_holder(contend: Contend) -> None:
    former, us, them = contend(), contend(), contend()
    held, _ = former.take()
    waits = us.claim()
    assert isinstance(us.attempt(waits, join=True), Busy)
    us.settle(waits)
    former.give_back(held)
    us.ear.hears("wake", waits.id, within=WITHIN)
    us.backend.force_release("a", WITHIN)
    until = now() + 4 * WITHIN
    while not isinstance(granted := them.attempt(theirs := them.claim()), Granted):
        them.give_back(theirs)  # on a busy machine, replies may be too late for the round
        assert now() < until
    them.settle(theirs)
    them.give_back(theirs)
    while not isinstance(ours := us.attempt(waits, join=True), Granted):
        assert now() < until
    assert (ours.token or 0) > (granted.token or 0)


def test_inspect_does_not_report_anything_that_a_silent_server_could_change(contend: Contend) -> None:
    us, operator = contend(), contend()
    us.cut_off(1)
    claim, _ = us.take(us.claim(ttl=60.0))
    us.settle(claim)
    operator.cut_off(2)
    for ask in (
        lambda: operator.backend.inspect("a", WITHIN),
        lambda: list(operator.backend.inspect_all("", WITHIN)),
        lambda: operator.backend.force_release("a", WITHIN),
    ):
        with pytest.raises(BackendUnavailable) as silence:
            ask()
    assert silence.value.unknown  # one server has executed the release
    assert operator.backend.inspect("free", WITHIN) is None
    assert not operator.backend.force_release("free", WITHIN)
    operator.cut_off(1)
    claim, _ = us.take(us.claim("b"))
    us.settle(claim)
    with pytest.raises(BackendUnavailable) as silence:
        operator.backend.force_release("b", WITHIN)
    assert silence.value.unknown


def test_a_server_that_refuses_hides_nothing_from_inspect(contend: Contend, servers: RedisServers) -> None:
    us, operator = contend(), contend()
    claim, _ = us.take()
    us.settle(claim)
    with redis.Redis(port=servers.members[0].port) as bare:
        bare.execute_command("ACL", "SETUSER", "default", "-scan")
        try:
            assert [info.name for info in operator.backend.inspect_all("", WITHIN)] == ["a"]
        finally:
            bare.execute_command("ACL", "SETUSER", "default", "+scan")


def test_a_name_rests_if_a_majority_of_servers_lets_it_rest(contend: Contend) -> None:
    us = contend()
    claim, granted = us.take()
    assert us.backend.rest(claim, granted, False, 30.0, WITHIN).ours
    assert isinstance(us.attempt(us.claim()), Busy)
    info = us.backend.inspect("a", WITHIN)
    assert info is not None
    assert info.resting_until is not None
    assert us.backend.force_release("a", WITHIN)
    us.take()


def test_a_rest_is_confirmed_again_and_a_later_release_does_not_end_it(contend: Contend) -> None:
    us = contend()
    claim, granted = us.take()
    us.settle(claim)
    us.cut_off(2)
    for _ in range(2):
        assert us.backend.rest(claim, granted, True, 30.0, WITHIN).ours
    assert not us.release(claim).ours


def test_inspect_reports_the_state_of_a_majority(contend: Contend, servers: RedisServers) -> None:
    us = contend()
    claim, granted = us.take()
    us.settle(claim)
    with redis.Redis(port=servers.members[0].port) as bare:
        bare.set("multilock/a", "somebody else")
        bare.set("multilock/stray", "somebody else")
    info = us.backend.inspect("a", WITHIN)
    assert info is not None
    assert info.owner == claim.owner
    # The two other servers may have different tokens, because one may have voted after the majority's agreement.
    assert info.token in (granted.token, None)
    assert us.backend.inspect("stray", WITHIN) is None
    assert [each.name for each in us.backend.inspect_all("", WITHIN)] == ["a"]


@pytest.mark.parametrize("url", ["redlock://h1", "redlock://h1,h1:6379", "redlock://h1,h2,h1:6379/0"])
def test_a_majority_needs_at_least_three_servers(url: str) -> None:
    with pytest.raises(ConfigurationError):
        open_backend(url, {})


@pytest.mark.parametrize(
    ("options", "ttl", "fits"),
    [({}, 30.0, True), ({}, 30.001, False), ({"restart_guard": 60}, 60.0, True), ({"restart_guard": 0}, 3600.0, True)],
)
def test_no_lease_lasts_longer_than_the_restart_guard(options: dict[str, Any], ttl: float, fits: bool) -> None:
    refused = contextlib.nullcontext() if fits else pytest.raises(ValueError, match="restart_guard is 30 s: give all")
    with multilock.connect("redlock://h1,h2,h3", **options) as client:
        with refused:
            client.lock("a", ttl=ttl)
        with refused:
            client.lock("a", hold_at_least=ttl)


def test_a_restart_guard_shorter_than_the_ttl_raises_an_error() -> None:
    with pytest.raises(ConfigurationError, match="restart_guard is 10 s"):
        multilock.connect("redlock://h1,h2,h3", ttl=30, restart_guard=10)


def test_a_server_with_two_names_has_one_vote(contend: Contend, servers: RedisServers) -> None:
    first, _, third = servers.members
    twice = RedisServers(0)
    twice.members = [first, first, third]
    us = contend(twice)
    claim, _ = us.take()
    us.settle(claim)
    assert "one-server" in [finding.code for finding in us.backend.diagnose(WITHIN)]
    us.give_back(claim)
    us.cut_off(2)
    with pytest.raises((BackendUnavailable, BackendRejected), match="it has one vote"):
        us.attempt(us.claim())


@pytest.mark.parametrize(
    "options", [{"restart_guard": -1}, {"restart_guard": "soon"}, {"token": False}, {"restart": 1}, {"ca": "/x"}]
)
def test_an_option_without_effect_raises_an_error(options: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError):
        open_backend("redlock://h1,h2,h3", options)


def test_each_server_may_have_a_login_of_its_own() -> None:
    backend = open_backend("redlock://u:p%40ss@h1,h2:7000,:w@[::1]:7001/2", {})
    assert isinstance(backend, RedlockBackend)
    assert repr(backend) == "<RedlockBackend redis://h1:6379/2, redis://h2:7000/2, redis://[::1]:7001/2>"
    logins = [(each._settings.get("username"), each._settings.get("password")) for each in backend._endpoints]
    assert [(user or None, password) for user, password in logins] == [("u", "p@ss"), (None, None), (None, "w")]
    assert [each._settings["host"] for each in backend._endpoints] == ["h1", "h2", "::1"]


def test_the_addresses_are_read_from_client_objects_passed_to_connect() -> None:
    clients = [redis.Redis(host=f"h{n}", db=1) for n in range(3)]
    backend = open_backend("redlock://", {"client": clients})
    assert repr(backend) == "<RedlockBackend redis://h0:6379/1, redis://h1:6379/1, redis://h2:6379/1>"
    for wrong in (clients[0], clients[:1]):
        with pytest.raises(ConfigurationError):
            open_backend("redlock://", {"client": wrong})


def test_diagnose_reports_an_even_number_of_servers(contend: Contend, servers: RedisServers) -> None:
    pair = RedisServers(0)
    pair.members = servers.members[:2]
    assert "even" in [finding.code for finding in contend(pair).backend.diagnose(WITHIN)]
    assert "even" not in [finding.code for finding in contend(servers).backend.diagnose(WITHIN)]


def test_a_long_held_lock_is_released_like_any_other(
    servers: RedisServers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(votes, "ENDS_WITHIN", 0)
    with multilock.connect(servers.url, ttl=1.5) as us:
        lease = us.lock("a").acquire()
        begun = now()
        eventually(lambda: now() > begun + 2.5 and lease.remaining() > 1.2, within=WITHIN)
        assert lease.release()
    assert holders(servers) == [""] * 3
    assert [record for record in caplog.records if "continues in the background" in record.getMessage()] == []


def test_a_server_slower_than_the_limit_confirms_every_release(contend: Contend) -> None:
    us = contend()
    us.teach()
    us.proxies[2].delay(0.3)
    for name in "bcdef":
        claim, _ = us.take(us.claim(name, ttl=2.0))
        us.release(claim)
    rounds = us.backend.rounds
    eventually(lambda: not rounds.claims, within=WITHIN)
    assert [each.all() for each in rounds.clerk._unconfirmed] == [[]] * 3


def by_loop(us: Contender, claim: Claim, request: str = "attempt") -> Any:
    """Send a request as an event loop does."""
    channel = us.backend.channel(WITHIN)
    assert channel is not None
    try:
        assert channel.attempt(claim, False) if request == "attempt" else channel.release(claim, None, False)
        until = now() + WITHIN
        while now() < until:
            with contextlib.suppress(BlockingIOError):
                return channel.answer()
            select.select([channel.fileno()], [], [], 0.01)
        raise TimeoutError
    finally:
        channel.close()


@pytest.mark.parametrize("face", ["blocking", "asyncio"])
def test_a_refusal_by_a_majority_leaves_no_vote_at_the_other_server(
    contend: Contend, servers: RedisServers, face: str
) -> None:
    us = contend()
    us.teach()
    bare: list[Any] = [redis.Redis(port=member.port) for member in servers.members[1:]]
    for one in bare:
        one.execute_command("ACL", "SETUSER", "default", "-evalsha")
    try:
        claim = us.claim()
        with pytest.raises(BackendRejected) as caught:
            us.attempt(claim) if face == "blocking" else by_loop(us, claim)
        assert caught.value.unknown  # so the kernel will cancel the claim
    finally:
        for one in bare:
            one.execute_command("ACL", "SETUSER", "default", "+evalsha")
            one.close()
    us.give_back(claim, unsure=True)
    assert holders(servers) == [""] * 3


@pytest.mark.parametrize("request_", ["attempt", "release"])
@pytest.mark.parametrize("lost", [1, 2, 3])
def test_lost_replies_to_an_event_loop_leave_nothing(
    contend: Contend, servers: RedisServers, request_: str, lost: int
) -> None:
    us = contend()
    us.teach()
    claim = us.claim()
    if request_ == "release":
        us.take(claim)
        us.settle(claim)
    faults = [proxy.drop_reply(claim.id.encode()) for proxy in us.proxies[:lost]]
    if lost == 1:
        told = by_loop(us, claim, request_)
        assert isinstance(told, Granted) if request_ == "attempt" else told.ours
    else:
        with pytest.raises(BackendUnavailable) as silence:
            by_loop(us, claim, request_)
        assert silence.value.unknown
    for fault in faults:
        fault.wait(WITHIN)
    us.reach(0, 1, 2)
    us.give_back(claim, unsure=True)
    assert holders(servers) == [""] * 3


def test_a_refused_claim_is_released_although_that_reply_is_lost(contend: Contend, servers: RedisServers) -> None:
    us = contend()
    us.teach()
    bare: list[Any] = [redis.Redis(port=member.port) for member in servers.members[1:]]
    for one in bare:
        one.execute_command("ACL", "SETUSER", "default", "-evalsha")
    claim = us.claim()
    try:
        with pytest.raises(BackendRejected):
            us.attempt(claim)
    finally:
        for one in bare:
            one.execute_command("ACL", "SETUSER", "default", "+evalsha")
            one.close()
    us.settle(claim)
    lost = us.proxies[0].drop_reply(claim.id.encode())
    us.give_back(claim, unsure=True)
    lost.wait(WITHIN)
    assert holders(servers) == [""] * 3
