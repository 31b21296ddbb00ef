"""Readers and permits: which claims hold a name together or wait, which tokens they get, and which keys remain."""

from __future__ import annotations

import random

import pytest

from multilock import BackendRejected
from multilock.backend import Busy, Claim, Granted, LossReason
from tests.backends.redis.conftest import Connect
from tests.backends.redis.kit import Bare, Ours, eventually, holder_of

LOCK = "multilock/a"
QUEUE, LIVE, TOKEN = "{multilock/a}:queue", "{multilock/a}:live", "{multilock/a}:token"
HOLDERS = "{multilock/a}:holders"
TAKEN = LossReason.TAKEN


def keys(bare: Bare) -> set[str]:
    return {key.decode() for key in bare.scan_iter()}


def sharing(bare: Bare) -> set[str]:
    return {owner.decode() for owner in bare.zrange(HOLDERS, 0, -1)}


def end_lease(bare: Bare, claim: Claim) -> None:
    """Let the lease of this holder expire. No script has noticed it yet."""
    bare.zadd(HOLDERS, {claim.owner: 1}, xx=True)


# ---- which claims may hold a name together


def test_readers_hold_together_and_exclude_writers_and_permits(us: Ours, them: Ours) -> None:
    us.take(us.reader())
    them.take(them.reader())
    for other in (them.claim(), them.claim(fair=False), them.permit(3)):
        assert isinstance(them.attempt(other), Busy)


def test_permits_hold_together_up_to_their_number_and_exclude_other_modes(us: Ours, them: Ours) -> None:
    first, *_ = [ours.take(ours.permit(3)) for ours in (us, them, us)]
    for other in (them.permit(3), them.claim(), them.claim(fair=False), them.reader()):
        assert isinstance(them.attempt(other), Busy)
    us.release(first[0])
    them.take(them.permit(3))


def test_a_plain_lock_excludes_readers_and_permits(us: Ours, them: Ours) -> None:
    us.take()
    assert isinstance(them.attempt(them.reader()), Busy)
    assert isinstance(them.attempt(them.permit(3)), Busy)


@pytest.mark.oracle
@pytest.mark.parametrize("permits", [2, 5])
def test_a_different_number_of_permits_is_rejected_at_once_and_leaves_nothing(
    us: Ours, them: Ours, bare: Bare, permits: int
) -> None:
    held, _ = us.take(us.permit(3))
    before = keys(bare)
    with pytest.raises(
        BackendRejected, match=f"has 3 permits here, but {permits} were requested: use the same number in every program"
    ):
        them.attempt(them.permit(permits), join=True)
    assert keys(bare) == before
    us.release(held)
    them.take(them.permit(permits))


def test_a_waiter_rejected_for_its_number_of_permits_blocks_no_later_waiter(us: Ours, them: Ours, bare: Bare) -> None:
    alone, _ = us.take()
    first, other, behind = us.wait(us.permit(3)), them.wait(them.permit(5)), us.wait(us.permit(3))
    us.release(alone)
    assert sharing(bare) == {first.owner}
    # The waiter is woken at once, because it would block every claim behind it until its next heartbeat.
    them.ear.hears("wake", other.id)
    with pytest.raises(BackendRejected, match="has 3 permits"):
        them.attempt(other, join=True)
    assert sharing(bare) == {first.owner, behind.owner}
    assert keys(bare) == {LOCK, TOKEN, HOLDERS}


def test_a_semaphore_with_one_permit_is_a_lock_with_a_checked_number(us: Ours, them: Ours) -> None:
    us.take(us.permit(1))
    assert isinstance(them.attempt(them.permit(1)), Busy)
    with pytest.raises(BackendRejected, match="has 1 permit"):
        them.attempt(them.permit(2))


@pytest.mark.oracle
def test_a_repeated_acquire_is_the_same_holder_with_another_token(us: Ours, bare: Bare) -> None:
    claim, granted = us.take(us.permit(2))
    _, again = us.take(claim)
    assert bare.zcard(HOLDERS) == 1
    assert again.token > granted.token  # type: ignore[operator]
    assert again.key == granted.key


# keys


def test_the_key_is_a_marker_and_each_holder_has_an_expiry_of_its_own(us: Ours, them: Ours, bare: Bare) -> None:
    short, granted = us.take(us.reader(ttl=5))
    long, _ = them.take(them.reader(ttl=20))
    assert holder_of(bare) == f"#multilock:r:{granted.token}"
    assert granted.key == holder_of(bare)
    seconds, micros = bare.time()
    ends = {owner.decode(): score / 1000 - seconds - micros / 1e6 for owner, score in bare.zscan_iter(HOLDERS)}
    assert 4 < ends[short.owner] <= 5
    assert 19 < ends[long.owner] <= 20
    assert 29_000 < bare.pttl(LOCK) <= 30_000
    assert 29_000 < bare.pttl(HOLDERS) <= 30_000


def test_the_marker_contains_the_number_of_permits(us: Ours, bare: Bare) -> None:
    _, granted = us.take(us.permit(3))
    assert holder_of(bare) == f"#multilock:p3:{granted.token}"


def test_after_the_last_holder_only_the_token_counter_is_left(us: Ours, them: Ours, bare: Bare) -> None:
    first, last = us.take(us.reader())[0], them.take(them.reader())[0]
    assert us.release(first) is True
    assert us.release(first) is False
    assert them.release(last) is True
    assert keys(bare) == {TOKEN}


def test_the_expiry_of_the_key_is_extended_only_when_it_is_near(us: Ours, bare: Bare) -> None:
    held = us.take(us.reader(ttl=10))
    bare.pexpire(LOCK, 12_000)
    us.renew(held)
    us.take(us.reader(ttl=10))
    assert 11_000 < bare.pttl(LOCK) <= 12_000
    bare.pexpire(LOCK, 9_000)
    us.renew(held)
    assert 14_000 < bare.pttl(LOCK) <= 15_000


@pytest.mark.oracle
def test_a_refused_try_leaves_nothing_behind(us: Ours, them: Ours, bare: Bare) -> None:
    us.take()
    before = keys(bare)
    them.attempt(them.reader())
    them.attempt(them.permit(2))
    assert keys(bare) == before


# ---- the end of one holder's lease


def test_a_permit_becomes_free_at_its_own_end(us: Ours, them: Ours, bare: Bare) -> None:
    dead, _ = us.take(us.permit(2))
    us.take(us.permit(2))
    end_lease(bare, dead)
    them.take(them.permit(2))
    assert us.release(dead) is False


def test_a_writer_enters_when_the_last_readers_lease_has_ended_although_the_key_exists(
    us: Ours, them: Ours, bare: Bare
) -> None:
    dead, _ = us.take(us.reader())
    end_lease(bare, dead)
    assert bare.exists(LOCK) == 1
    claim, _ = them.take(them.claim())
    assert holder_of(bare) == claim.owner
    assert bare.exists(HOLDERS) == 0


def test_an_ended_lease_is_not_renewed(us: Ours, bare: Bare) -> None:
    dead, alive = us.take(us.reader()), us.take(us.reader())
    end_lease(bare, dead[0])
    lost, renewed = us.renew(dead, alive)
    assert lost is None
    assert renewed is not None


def test_a_waiter_is_told_when_the_last_reader_or_the_first_permit_ends(us: Ours, them: Ours) -> None:
    for ttl in (3, 6):
        us.take(us.reader("r", ttl))
        us.take(us.permit(2, "p", ttl))
    for claim, about in ((them.claim("r"), 6), (them.claim("p"), 6), (them.reader("p"), 6), (them.permit(2, "p"), 3)):
        answer = them.attempt(claim, join=True)
        assert isinstance(answer, Busy)
        assert answer.expires_in is not None
        assert about - 1 < answer.expires_in < about + 0.1
        them.release(claim)


# order


def test_no_newcomer_overtakes_a_waiting_writer(us: Ours, them: Ours, bare: Bare) -> None:
    reader, _ = us.take(us.reader())
    writer = them.wait()
    behind = us.reader()
    assert isinstance(us.attempt(behind), Busy)
    assert isinstance(us.attempt(behind, join=True), Busy)
    assert us.release(reader)
    assert holder_of(bare) == writer.owner
    them.take(writer)
    assert them.release(writer)
    us.take(behind)


def test_a_release_of_a_writer_admits_all_readers_up_to_the_next_writer(us: Ours, them: Ours, bare: Bare) -> None:
    alone, _ = us.take()
    first, second = them.wait(them.reader()), us.wait(us.reader())
    them.wait()
    us.wait(us.reader())
    us.release(alone)
    assert sharing(bare) == {first.owner, second.owner}
    assert bare.zcard(QUEUE) == 2
    them.ear.hears("wake", first.id)
    us.ear.hears("wake", second.id)


def test_a_released_permit_goes_to_the_first_waiter(us: Ours, them: Ours, bare: Bare) -> None:
    held = [us.take(us.permit(2))[0] for _ in range(2)]
    first, second = them.wait(them.permit(2)), them.wait(them.permit(2))
    us.release(held[1])
    assert sharing(bare) == {held[0].owner, first.owner}
    them.take(first)
    us.release(held[0])
    assert sharing(bare) == {first.owner, second.owner}


def test_a_lock_that_was_handed_over_lasts_for_the_waiters_liveness_until_confirmed(
    us: Ours, them: Ours, bare: Bare
) -> None:
    alone, _ = us.take()
    waiter = them.wait(them.reader(ttl=30))
    us.release(alone)
    assert 5_000 < bare.pttl(LOCK) <= 9_000
    them.take(waiter)
    assert 29_000 < bare.pttl(LOCK) <= 45_000


def test_three_hundred_waiting_readers_enter_although_one_script_admits_only_some(us: Ours, bare: Bare) -> None:
    alone, _ = us.take()
    readers = [us.wait(us.reader()) for _ in range(300)]
    us.release(alone)
    assert bare.zcard(HOLDERS) == 64
    for reader in readers[:5]:
        us.take(reader)
    assert bare.zcard(HOLDERS) == 300


def test_three_permits_serve_forty_waiters_in_any_order_of_releases(us: Ours, bare: Bare) -> None:
    order = random.Random(8)
    waiting = [us.permit(3) for _ in range(40)]
    for claim in waiting:
        us.attempt(claim, join=True)  # the first three hold the name at once
    served = 0
    while held := sharing(bare):
        assert len(held) == min(3, 40 - served)
        owner = order.choice(sorted(held))
        us.release(next(claim for claim in waiting if claim.owner == owner))
        served += 1
    assert served == 40


@pytest.mark.parametrize("how", ["cancelled", "over"])
def test_when_a_writer_gives_up_the_readers_behind_it_enter(us: Ours, them: Ours, bare: Bare, how: str) -> None:
    reader, _ = us.take(us.reader())
    writer = them.wait()
    behind = us.wait(us.reader())
    if how == "cancelled":
        them.release(writer)
        assert sharing(bare) == {reader.owner, behind.owner}
        us.ear.hears("wake", behind.id)
    # the writer's process was killed or stopped, so the next request of any client finds that its place has expired
    else:
        bare.hset(LIVE, writer.owner, "x:1")
        us.take(behind)


def test_when_a_writer_gives_up_on_a_name_with_dead_readers_those_behind_it_enter(
    us: Ours, them: Ours, bare: Bare
) -> None:
    dead, _ = us.take(us.reader())
    writer, behind = them.wait(), us.wait(us.reader())
    end_lease(bare, dead)
    them.release(writer)
    assert sharing(bare) == {behind.owner}


def test_a_killed_writer_that_waited_blocks_no_reader(us: Ours, connect: Connect, bare: Bare) -> None:
    us.take(us.reader())
    killed = connect()
    killed.wait()
    killed.close()  # no connection is then subscribed to this client's channel
    eventually(lambda: not bare.pubsub_numsub(f"multilock:wake:{killed.ear.client}")[0][1])
    us.take(us.reader())


def test_on_a_free_name_a_fair_newcomer_does_not_overtake_waiting_readers(us: Ours, them: Ours, bare: Bare) -> None:
    us.take()
    waiter = us.wait(us.reader())
    bare.delete(LOCK)
    assert isinstance(them.attempt(them.claim()), Busy)
    assert sharing(bare) == {waiter.owner}


# tokens


@pytest.mark.oracle
def test_each_writer_has_a_greater_token_than_all_before_it(us: Ours, them: Ours) -> None:
    alone, shared = 0, 0
    for _ in range(3):
        readers = [ours.take(ours.reader()) for ours in (us, them)]
        tokens = [granted.token or 0 for _, granted in readers]
        assert min(tokens) > alone
        assert len({shared, *tokens}) == 3
        shared = max(tokens)
        writer = us.wait()
        us.release(readers[0][0])
        them.release(readers[1][0])
        _, granted = us.take(writer)
        alone = granted.token or 0
        assert alone > shared
        us.release(writer)


@pytest.mark.oracle
def test_a_renewal_keeps_the_token_and_the_life_of_the_token_counter(us: Ours, bare: Bare) -> None:
    held = us.take(us.reader())
    bare.expire(TOKEN, 100)
    [renewed] = us.renew(held)
    assert isinstance(renewed, Granted)
    assert (renewed.token, renewed.key) == (held[1].token, held[1].key)
    assert renewed.sent_at > held[1].sent_at
    assert 600 < bare.ttl(TOKEN) <= 610


# operators


def test_holders_from_before_a_deleted_marker_do_not_count(us: Ours, them: Ours, bare: Bare) -> None:
    former = us.take(us.permit(2))
    bare.delete(LOCK)
    assert us.renew(former) == [None]
    assert us.release(former[0]) is False
    former = us.take(us.permit(2))
    bare.delete(LOCK)
    them.take(them.permit(2))  # this makes a new marker
    assert us.renew(former) == [None]
    them.take(them.permit(2))


def test_force_release_removes_every_holder_and_passes_the_name_on(us: Ours, them: Ours, bare: Bare) -> None:
    held = [ours.take(ours.reader()) for ours in (us, them)]
    us.watch(held[0])
    them.watch(held[1])
    waiter = them.wait()
    assert us.backend.force_release("a", 1) is True
    assert holder_of(bare) == waiter.owner
    us.ear.hears("gone", held[0][0].id, TAKEN)
    them.ear.hears("gone", held[1][0].id, TAKEN)
    them.ear.hears("wake", waiter.id)
    assert us.renew(held[0]) == them.renew(held[1]) == [None]


def test_force_release_of_a_name_with_only_dead_readers_returns_false(us: Ours, bare: Bare) -> None:
    dead, _ = us.take(us.reader())
    end_lease(bare, dead)
    assert us.backend.force_release("a", 1) is False


def test_inspect_shows_the_holder_that_ends_first_and_the_others(us: Ours, them: Ours) -> None:
    long, short = us.take(us.permit(3, ttl=20))[0], them.take(them.permit(3, ttl=10))[0]
    us.take(us.permit(3, ttl=30))
    them.wait()
    info = us.backend.inspect("a", 1)
    assert info is not None
    assert (info.kind, info.owner, info.holders, info.permits, info.waiting) == ("permit", short.owner, 3, 3, 1)
    assert (info.token, info.since) == (None, None)
    assert info.remaining == pytest.approx(10, abs=1)
    assert info.others[0].owner == long.owner
    assert [(other.kind, other.name, other.permits) for other in info.others] == [("permit", "a", 3)] * 2
    [listed] = us.backend.inspect_all("", 1)
    assert (listed.owner, listed.holders, listed.permits, listed.others) == (short.owner, 3, 3, ())


def test_inspect_lists_a_hundred_of_many_readers_and_counts_all(us: Ours) -> None:
    for _ in range(120):
        us.take(us.reader())
    info = us.backend.inspect("a", 1)
    assert info is not None
    assert (info.kind, info.holders, info.permits, len(info.others)) == ("read", 120, None, 99)


def test_a_name_with_only_dead_readers_is_shown_as_free(us: Ours, bare: Bare) -> None:
    dead, _ = us.take(us.reader())
    end_lease(bare, dead)
    assert us.backend.inspect("a", 1) is None
    assert list(us.backend.inspect_all("", 1)) == []


# losses


def test_two_leases_of_one_name_in_one_client_end_independently(us: Ours, bare: Bare) -> None:
    first, second = us.take(us.reader()), us.take(us.reader())
    us.watch(first, second)
    assert us.release(first[0])
    us.watch(us.take(us.claim("another")))  # the client has then received all earlier notifications
    assert us.ear.heard == []
    assert us.renew(second) != [None]
    bare.delete(LOCK)
    us.ear.hears("gone", second[0].id, TAKEN)
    assert us.ear.heard == []


def test_readers_are_notified_of_a_deleted_marker_even_if_another_recreates_it_at_once(
    us: Ours, them: Ours, connect: Connect, bare: Bare
) -> None:
    held = [us.take(us.reader()), us.take(us.reader())]
    us.watch(*held)
    script = "redis.call('DEL', KEYS[1]) redis.call('SET', KEYS[1], '#multilock:r:1', 'PX', 5000)"
    bare.eval(script, 1, LOCK)
    for claim, _ in held:
        us.ear.hears("gone", claim.id, TAKEN)


def test_readers_that_come_and_go_cost_the_others_nothing(us: Ours, them: Ours) -> None:
    held = us.take(us.reader())
    us.watch(held)
    for _ in range(20):
        claim, granted = them.take(them.reader())
        them.renew((claim, granted))
        them.release(claim)
    us.watch(us.take(us.claim("another")))
    assert us.ear.heard == []


def test_the_end_of_one_reader_is_not_reported_to_another(us: Ours, them: Ours, bare: Bare) -> None:
    stopped, alive = us.take(us.reader()), them.take(them.reader())
    us.watch(stopped)
    them.watch(alive)
    end_lease(bare, stopped[0])
    assert isinstance(them.attempt(them.claim()), Busy)  # this request removes holders whose leases have expired
    assert us.renew(stopped) == [None]
    assert them.renew(alive) != [None]
    them.watch(them.take(them.claim("another")))
    assert them.ear.heard == []


# rest


def test_a_resting_permit_stays_taken_and_ignores_late_requests_of_its_holder(us: Ours, them: Ours, bare: Bare) -> None:
    held, other = us.take(us.permit(2)), them.take(them.permit(2))
    assert us.backend.rest(*held, False, 60, 1).ours
    assert us.renew(held) == [None]
    assert us.release(held[0], unsure=True) is False
    assert isinstance(us.attempt(held[0], join=True), Busy)
    assert isinstance(them.attempt(them.permit(2)), Busy)
    assert them.renew(other) != [None]
    info = them.backend.inspect("a", 1)
    assert info is not None
    assert (info.owner, info.others[0].owner) == (other[0].owner, held[0].owner)
    assert info.resting_until is None
    assert info.others[0].resting_until is not None
    assert bare.pttl(TOKEN) > 659_000


def test_a_repeated_rest_of_a_permit_only_ends_earlier(us: Ours, them: Ours, bare: Bare) -> None:
    held = us.take(us.permit(1))
    waiter = them.wait(them.permit(1))
    for seconds in (60, 3600, 30):
        assert us.backend.rest(*held, True, seconds, 1).ours
    them.ear.hears("wake", waiter.id)
    answer = them.attempt(waiter, join=True)
    assert isinstance(answer, Busy)
    assert answer.expires_in is not None
    assert 29 < answer.expires_in < 30.1
    bare.zadd(HOLDERS, {f"#multilock:rest:{held[0].owner}": 1})
    them.take(waiter)


@pytest.mark.oracle
def test_the_last_resting_holder_leaves_no_key_without_an_expiry(us: Ours, bare: Bare) -> None:
    held = us.take(us.permit(1))
    assert us.backend.rest(*held, False, 1, 1).ours
    assert keys(bare) == {LOCK, TOKEN, HOLDERS}
    assert [key for key in keys(bare) if bare.pttl(key) < 0] == []


def test_a_lost_permit_does_not_rest(us: Ours, them: Ours, bare: Bare) -> None:
    held = us.take(us.permit(1))
    end_lease(bare, held[0])
    claim, _ = them.take(them.permit(1))
    assert not us.backend.rest(*held, False, 60, 1).ours
    assert sharing(bare) == {claim.owner}
