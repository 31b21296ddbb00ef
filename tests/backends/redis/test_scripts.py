"""The Lua scripts: which claim gets the name and which token, and which keys remain."""

from __future__ import annotations

import pytest

from multilock.errors import BackendRejected
from multilock.model import Busy, Granted
from tests.backends.redis.kit import Bare, Ours, eventually, holder_of

LOCK = "multilock/a"
QUEUE, LIVE, TOKEN = "{multilock/a}:queue", "{multilock/a}:live", "{multilock/a}:token"


def keys(bare: Bare) -> set[str]:
    return {key.decode() for key in bare.scan_iter()}


# acquire


def test_a_second_caller_is_refused_while_the_first_holds_the_lock(us: Ours, them: Ours) -> None:
    us.take()
    assert isinstance(them.attempt(them.claim()), Busy)


def test_the_key_is_prefix_plus_name_and_holds_the_owner_until_the_ttl(us: Ours, bare: Bare) -> None:
    claim, _ = us.take(us.claim(ttl=10))
    assert holder_of(bare) == claim.owner
    assert 9_000 < bare.pttl(LOCK) <= 10_000


@pytest.mark.oracle
def test_a_refused_try_leaves_nothing_behind(us: Ours, them: Ours, bare: Bare) -> None:
    us.take()
    before = keys(bare)
    them.attempt(them.claim())
    assert keys(bare) == before == {LOCK, TOKEN}


@pytest.mark.oracle
def test_repeating_an_acquire_keeps_the_lock_and_token_and_restarts_the_ttl(us: Ours, bare: Bare) -> None:
    claim, granted = us.take()
    bare.pexpire(LOCK, 500)
    assert us.take(claim)[1].token == granted.token
    assert bare.pttl(LOCK) > 9_000


@pytest.mark.oracle
def test_a_holder_whose_token_was_evicted_gets_a_greater_one(us: Ours, bare: Bare) -> None:
    claim, granted = us.take()
    bare.delete(TOKEN)
    assert us.take(claim)[1].token > granted.token  # type: ignore[operator]


def test_waiters_get_the_name_in_order_of_arrival(us: Ours, them: Ours) -> None:
    first, _ = us.take()
    queue = [us.wait(), them.wait(), us.wait()]
    for earlier, later in zip([first, *queue], queue, strict=False):
        assert us.release(earlier)
        (us if later.id.startswith(us.ear.client) else them).take(later)


def test_a_fair_newcomer_does_not_overtake_a_live_waiter(us: Ours, them: Ours, bare: Bare) -> None:
    us.take()
    waiter = us.wait()
    bare.delete(LOCK)  # the name becomes free without a handover, as when a lease expires
    assert isinstance(them.attempt(them.claim()), Busy)
    assert holder_of(bare) == waiter.owner  # the new claim's request has handed the name over


def test_an_unfair_try_takes_a_free_name_despite_waiters(us: Ours, them: Ours, bare: Bare) -> None:
    us.take()
    us.wait()
    bare.delete(LOCK)
    them.take(them.claim(fair=False))


def test_a_heartbeat_keeps_the_place_and_draws_no_second_ticket(us: Ours, them: Ours, bare: Bare) -> None:
    us.take()
    first, second = us.wait(), them.wait()
    tickets = bare.zrange(QUEUE, 0, -1, withscores=True)
    us.wait(first)
    assert bare.zrange(QUEUE, 0, -1, withscores=True) == tickets
    assert [owner.decode() for owner, _ in tickets] == [first.owner, second.owner]


def test_tickets_grow_even_if_the_clock_of_the_server_does_not(us: Ours, bare: Bare) -> None:
    us.take()
    bare.zadd(QUEUE, {"early": 9e15})
    bare.hset(LIVE, "early", "x:9999999999999")
    late = us.wait()
    assert bare.zrange(QUEUE, 0, -1)[-1].decode() == late.owner


def test_a_waiter_is_dropped_after_its_deadline(us: Ours, them: Ours, bare: Bare) -> None:
    holder, _ = us.take()
    dead, alive = us.wait(), them.wait()
    bare.hset(LIVE, dead.owner, "x:1")
    us.release(holder)
    assert holder_of(bare) == alive.owner
    assert bare.zcard(QUEUE) == 0


def killed(bare: Bare, count: int, *, until: int = 5000) -> list[str]:
    """Add waiters without a subscription, as if their process had been killed. Returns their owners. Their places last
    for ``until`` ms."""
    seconds, micros = bare.time()
    client, deadline = "d" * 16, seconds * 1000 + micros // 1000 + until
    dead = [f"{client}.{number:032x}@lock:h:1:me:10" for number in range(count)]
    bare.zadd(QUEUE, {owner: seconds * 1_000_000 + number for number, owner in enumerate(dead)})
    bare.hset(LIVE, mapping=dict.fromkeys(dead, f"x:{deadline}"))
    return dead


def test_a_newcomer_never_overtakes_a_waiter_behind_many_dead_ones(us: Ours, them: Ours, bare: Bare) -> None:
    holder, _ = us.take()
    dead = killed(bare, 300)
    waiter = them.wait()
    us.release(holder)
    assert holder_of(bare) is None  # the script checks too few waiters to find the first live one
    answer = us.attempt(us.claim())
    assert isinstance(answer, Busy), "a newcomer was first"
    assert answer.expires_in is None
    bare.hset(LIVE, mapping=dict.fromkeys(dead, "x:1"))
    assert isinstance(us.attempt(us.claim()), Busy)
    assert holder_of(bare) == waiter.owner


def test_a_killed_process_with_fifty_waiters_delays_no_other_waiter(us: Ours, them: Ours, bare: Bare) -> None:
    holder, _ = us.take()
    killed(bare, 50)
    waiter = them.wait()
    us.release(holder)
    assert holder_of(bare) == waiter.owner


def test_a_waiter_keeps_its_liveness_after_the_server_clock_steps_back(us: Ours, them: Ours, bare: Bare) -> None:
    holder, _ = us.take()
    waiter = them.wait(them.claim(ttl=30))
    deadline = bare.hget(LIVE, waiter.owner)
    mode, till, echo = deadline.decode().split(":")
    # Change the entry as if it had been written before the clock was stepped back by an hour.
    bare.hset(LIVE, waiter.owner, f"{mode}:{int(till) + 3_600_000}:{echo}")
    us.release(holder)
    assert holder_of(bare) == waiter.owner
    assert 0 < bare.pttl(LOCK) <= 6_000


def test_a_waiter_that_died_before_a_clock_step_is_dropped_as_soon_as_others(us: Ours, bare: Bare) -> None:
    holder, _ = us.take()
    dead = killed(bare, 3, until=3_600_000)
    us.release(holder)
    seconds, _ = bare.time()
    for owner in dead:
        assert int(bare.hget(LIVE, owner)[2:]) < (seconds + 8) * 1000


def test_only_the_first_three_waiters_are_told_when_the_holders_lease_ends(us: Ours) -> None:
    us.take(us.claim(ttl=5))
    answers = [us.attempt(us.claim(ttl=9), join=True) for _ in range(4)]
    *three, fourth = (answer.expires_in for answer in answers)
    assert all(3 < each < 5.05 for each in three)
    assert fourth is None
    assert answers[0].heartbeat == 2.0  # a third of 6 s, for which a waiter keeps its place without a heartbeat


def test_the_first_three_waiters_look_one_after_the_other(us: Ours) -> None:
    understood = [us.backend._node.recipe.attempted(us.claim(), [5000, rank], 0.0) for rank in range(4)]
    looks = [answer.expires_in for answer in understood if isinstance(answer, Busy)]
    assert looks == [pytest.approx(5.002), pytest.approx(5.022), pytest.approx(5.042), None]


def test_the_queue_expires_a_minute_after_the_last_heartbeat(us: Ours, bare: Bare) -> None:
    us.take()
    us.wait()
    assert 59_000 < bare.pttl(QUEUE) <= 60_000
    assert 59_000 < bare.pttl(LIVE) <= 60_000


# release


def test_release_returns_true_once_and_only_for_its_own_claim(us: Ours, bare: Bare) -> None:
    claim, _ = us.take()
    assert us.release(claim) is True
    assert us.release(claim) is False
    assert keys(bare) == {TOKEN}


def test_release_does_not_affect_a_lock_of_another_holder(us: Ours, them: Ours, bare: Bare) -> None:
    late, _ = us.take()
    bare.delete(LOCK)
    claim, _ = them.take()
    assert us.release(late) is False
    assert holder_of(bare) == claim.owner


def test_releasing_a_waiter_removes_it_from_the_queue(us: Ours, them: Ours, bare: Bare) -> None:
    us.take()
    waiter = them.wait()
    assert them.release(waiter) is False
    assert keys(bare) == {LOCK, TOKEN}


def test_a_cancel_during_the_handover_passes_the_name_on(us: Ours, them: Ours, bare: Bare) -> None:
    holder, _ = us.take()
    leaving, staying = us.wait(), them.wait()
    us.release(holder)
    assert holder_of(bare) == leaving.owner
    assert us.release(leaving) is True  # the waiter had not read the notification of its grant
    assert holder_of(bare) == staying.owner


def test_a_cancelled_id_never_acquires_the_name_even_if_its_request_is_late(us: Ours, bare: Bare) -> None:
    claim = us.claim()
    assert us.release(claim, unsure=True) is False
    assert isinstance(us.attempt(claim), Busy)
    assert isinstance(us.attempt(claim, join=True), Busy)
    assert holder_of(bare) is None
    assert bare.zcard(QUEUE) == 0
    us.take()  # another id may acquire the name


@pytest.mark.oracle
def test_a_tombstone_ends_after_a_minute_and_an_ordinary_release_leaves_none(us: Ours, bare: Bare) -> None:
    sure, _ = us.take()
    us.release(sure)
    unsure, _ = us.take()
    assert us.release(unsure, unsure=True) is True
    [tombstone] = keys(bare) - {TOKEN}
    assert tombstone == f"{{multilock/a}}:gone:{unsure.id}"
    assert 59_000 < bare.pttl(tombstone) <= 60_000


def test_a_release_of_a_free_name_wakes_the_next_waiter(us: Ours, them: Ours, bare: Bare) -> None:
    former, _ = us.take()
    waiter = them.wait()
    # The name becomes free without a handover, and the next request is the release of the former holder.
    bare.delete(LOCK)
    assert us.release(former) is False
    assert holder_of(bare) == waiter.owner
    them.ear.hears("wake", waiter.id)


def test_a_cancel_for_a_free_name_wakes_the_next_waiter(us: Ours, them: Ours, bare: Bare) -> None:
    us.take()
    leaving, staying = us.wait(), them.wait()
    bare.delete(LOCK)
    assert us.release(leaving, unsure=True) is False
    assert holder_of(bare) == staying.owner


# token


@pytest.mark.oracle
def test_tokens_grow_over_holders_releases_and_handovers(us: Ours, them: Ours) -> None:
    tokens = []
    claim, granted = us.take()
    for _ in range(5):
        tokens.append(granted.token)
        waiter = them.wait()
        us.release(claim)
        claim, granted = them.take(waiter)
        us, them = them, us
    assert tokens == sorted(set(tokens))  # type: ignore[type-var]


@pytest.mark.oracle
def test_a_token_ahead_of_the_clock_is_followed_by_a_greater_one(us: Ours, bare: Bare) -> None:
    seconds, _ = bare.time()
    ahead = (seconds + 3600) * 1_000_000
    bare.set(TOKEN, ahead)
    claim, granted = us.take()
    assert granted.token == ahead + 1
    # The key of the token is kept until ten minutes after the time of the token, so no token is issued twice.
    assert 3600 + 600 < bare.ttl(TOKEN) <= 3600 + 610
    us.release(claim)
    assert us.take()[1].token == ahead + 2


def test_the_token_counter_expires_ten_minutes_after_the_last_lease(us: Ours, bare: Bare) -> None:
    us.take()
    assert 600 < bare.ttl(TOKEN) <= 610


def test_a_renewal_keeps_the_token_counter_of_a_long_held_lock(us: Ours, bare: Bare) -> None:
    held = us.take()
    bare.expire(TOKEN, 100)
    us.renew(held)
    assert 600 < bare.ttl(TOKEN) <= 610
    assert us.backend.inspect("a", 1).token == held[1].token  # type: ignore[union-attr]


def test_a_renewal_never_shortens_the_life_of_the_token_counter(us: Ours, bare: Bare) -> None:
    held = us.take()
    bare.expire(TOKEN, 5000)
    us.renew(held)
    assert bare.ttl(TOKEN) > 4990


# renew


def test_a_renewal_restarts_the_ttl_and_counts_from_its_own_sending(us: Ours, bare: Bare) -> None:
    claim, granted = us.take()
    bare.pexpire(LOCK, 500)
    [renewed] = us.renew((claim, granted))
    assert 9_000 < bare.pttl(LOCK) <= 10_000
    assert isinstance(renewed, Granted)
    assert renewed.token == granted.token
    assert renewed.sent_at > granted.sent_at


def test_each_renewed_lock_has_its_own_ttl_and_its_own_result(us: Ours, them: Ours, bare: Bare) -> None:
    short, long, lost = (us.take(us.claim(name, ttl)) for name, ttl in (("s", 5.0), ("l", 20.0), ("x", 8.0)))
    bare.delete("multilock/x")
    them.take(them.claim("x"))
    answers = us.renew(short, long, lost)
    assert [answer and answer.ttl for answer in answers] == [5.0, 20.0, None]
    assert 4_000 < bare.pttl("multilock/s") <= 5_000
    assert 19_000 < bare.pttl("multilock/l") <= 20_000
    assert us.renew(lost) == [None]


def test_a_lock_replaced_by_a_hash_is_lost_and_the_others_are_renewed(us: Ours, bare: Bare) -> None:
    broken, whole = us.take(us.claim("broken")), us.take(us.claim("whole"))
    bare.delete("multilock/broken")
    bare.hset("multilock/broken", "redisson", 1)
    lost, renewed = us.renew(broken, whole)
    assert lost is None
    assert renewed is not None


def test_one_call_renews_twelve_hundred_locks(us: Ours) -> None:
    held = [us.take(us.claim(f"n{i}")) for i in range(1200)]
    us.release(held[700][0])
    answers = us.renew(*held)
    assert [i for i, answer in enumerate(answers) if answer is None] == [700]


# force_release, inspect


def test_force_release_frees_the_name_and_the_holder_cannot_renew(us: Ours, them: Ours) -> None:
    held = us.take()
    assert them.backend.force_release("a", 1) is True
    assert them.backend.force_release("a", 1) is False
    assert us.renew(held) == [None]


def test_force_release_passes_the_name_to_the_first_waiter(us: Ours, them: Ours, bare: Bare) -> None:
    us.take()
    waiter = them.wait()
    assert us.backend.force_release("a", 1) is True
    assert holder_of(bare) == waiter.owner
    them.ear.hears("wake", waiter.id)


@pytest.mark.parametrize("kind", ["lock", "read", "permit"])
def test_a_late_request_of_a_holder_that_was_released_by_force_takes_nothing(us: Ours, them: Ours, kind: str) -> None:
    """Otherwise the holder would keep a lease with an old token."""
    claim, _ = us.take(us.claim(kind=kind, permits=2 * (kind == "permit")))
    assert them.backend.force_release("a", 1) is True
    late = us.attempt(claim, join=True)
    assert isinstance(late, Busy)
    assert late.spent
    assert them.backend.force_release("a", 1) is False


def test_inspect_shows_the_holder_the_time_of_its_grant_and_the_number_of_waiters(us: Ours, them: Ours) -> None:
    assert us.backend.inspect("a", 1) is None
    claim, granted = us.take(us.claim(ttl=10))
    them.wait()
    info = them.backend.inspect("a", 1)
    assert info is not None
    assert (info.name, info.kind, info.owner, info.identity) == ("a", "lock", claim.owner, "me")
    assert (info.host, info.pid, info.ttl, info.token, info.waiting) == ("h", 1, 10.0, granted.token, 1)
    assert info.since is not None
    assert int(info.since.timestamp()) == granted.token // 1_000_000  # type: ignore[operator]


def test_inspect_shows_a_value_of_another_program_unchanged_and_without_a_token(us: Ours, bare: Bare) -> None:
    claim, _ = us.take()
    us.release(claim)
    bare.set(LOCK, b"cron on \xff")
    info = us.backend.inspect("a", 1)
    assert info is not None
    assert info.identity == "cron on �"
    assert (info.kind, info.token, info.since) == (None, None, None)


@pytest.mark.parametrize("prefix", ["multilock/", ""])
def test_inspect_all_lists_exactly_the_names_with_the_prefix(us: Ours, bare: Bare, prefix: str) -> None:
    ours = Ours(us.backend._endpoint.name, prefix=prefix)
    names = ["jobs/1", "jobs/2", "jobs*", "other", ".", "..", ".x", "ü"]
    for name in names:
        ours.take(ours.claim(name))
    ours.wait(ours.claim("other"))
    bare.rpush(f"{prefix}jobs%2Flist", "no lock")

    def listed(beginning: str) -> list[str]:
        return sorted(info.name for info in ours.backend.inspect_all(beginning, 1))

    assert listed("") == sorted(names)
    assert listed("jobs/") == ["jobs/1", "jobs/2"]
    assert listed("jobs*") == ["jobs*"]
    assert listed(".") == [".", "..", ".x"]
    assert listed("..") == [".."]
    assert listed("nobody") == []
    ours.close()


def test_inspect_all_finds_each_of_two_thousand_locks_once(us: Ours, bare: Bare) -> None:
    bare.mset({f"multilock/n{i}": "x" for i in range(2000)})
    assert sorted(info.name for info in us.backend.inspect_all("", 1)) == sorted(f"n{i}" for i in range(2000))


# the scripts on the server


def test_scripts_that_the_server_lost_are_loaded_again_in_the_same_call(us: Ours, bare: Bare) -> None:
    claim, granted = us.take()
    for call in (
        lambda: us.take(claim),
        lambda: us.renew((claim, granted)),
        lambda: us.backend.inspect("a", 1),
        lambda: list(us.backend.inspect_all("", 1)),
        lambda: us.release(claim),
        lambda: us.backend.force_release("a", 1),
    ):
        bare.script_flush()
        assert call() is not None


def test_a_handover_costs_the_same_with_five_and_with_five_hundred_waiters(us: Ours, them: Ours, bare: Bare) -> None:
    def cost(waiters: int) -> int:
        claim, _ = us.take()
        queue = [us.wait() for _ in range(waiters)]
        before = commands(bare)
        us.release(claim)
        spent = commands(bare) - before
        for waiter in queue:
            us.release(waiter)
        eventually(lambda: holder_of(bare) is None)
        return spent

    cost(1)  # this loads the scripts
    assert cost(500) == cost(5) <= 14


def commands(bare: Bare) -> int:
    """Return the number of commands executed so far, including those inside scripts."""
    stats = bare.info("commandstats")
    return sum(entry["calls"] for name, entry in stats.items() if name not in ("cmdstat_info", "cmdstat_ping"))


@pytest.mark.oracle
def test_the_token_outlives_a_lease_longer_than_ten_minutes(us: Ours, bare: Bare) -> None:
    for claim in (us.claim("a", ttl=3600), us.reader("r", ttl=3600), us.permit(2, "p", ttl=3600)):
        token = f"{{multilock/{claim.name}}}:token"
        held = us.take(claim)
        assert bare.pttl(token) > 4_100_000
        bare.pexpire(token, 1_000_000)
        assert all(us.renew(held))
        assert bare.pttl(token) > 4_100_000
        bare.pexpire(token, 1_000_000)
        us.take(claim)
        assert bare.pttl(token) > 4_100_000


def test_a_waiter_keeps_its_place_while_the_server_is_full(us: Ours, them: Ours, bare: Bare) -> None:
    held, _ = us.take()
    waiter = them.wait()
    before = bare.config_get("maxmemory")["maxmemory"]
    bare.config_set("maxmemory", 1)
    try:
        them.wait(waiter)
        with pytest.raises(BackendRejected):
            them.wait(them.claim())
        us.release(held)
        them.ear.hears("wake", waiter.id)
        assert holder_of(bare) == waiter.owner
    finally:
        bare.config_set("maxmemory", before)
