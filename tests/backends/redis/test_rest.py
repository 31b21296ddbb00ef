"""With ``hold_at_least`` a released name rests: nobody may take it until the server ends the rest."""

from __future__ import annotations

import asyncio

import pytest

import multilock
from multilock.model import Busy, Claim, Granted
from tests.backends.redis.conftest import Connect
from tests.backends.redis.kit import WITHIN, Bare, Ours, connected, eventually, holder_of, without
from tests.servers import RedisServer

LOCK, QUEUE, TOKEN = "multilock/a", "{multilock/a}:queue", "{multilock/a}:token"
HOUR = 3600.0


def rest(ours: Ours, held: tuple[Claim, Granted], seconds: float = HOUR, *, unsure: bool = False) -> bool:
    return ours.backend.rest(*held, unsure, seconds, WITHIN).ours


def resting(held: tuple[Claim, Granted]) -> str:
    return f"#multilock:rest:{held[0].owner}"


def test_a_resting_name_is_a_key_with_an_expiry_and_no_owner(us: Ours, bare: Bare) -> None:
    held = us.take()
    assert rest(us, held) is True
    assert holder_of(bare) == resting(held)
    assert 3_599_000 < bare.pttl(LOCK) <= 3_600_000
    assert sorted(key.decode() for key in bare.scan_iter()) == sorted([LOCK, TOKEN])


def test_a_late_request_of_the_last_holder_cannot_change_its_rest(us: Ours, bare: Bare) -> None:
    held = us.take()
    rest(us, held, 60)
    assert us.renew(held) == [None]
    assert isinstance(us.attempt(held[0]), Busy)
    assert us.release(held[0]) is False
    assert us.release(held[0], unsure=True) is False
    assert isinstance(us.attempt(held[0], join=True), Busy)
    assert bare.zcard(QUEUE) == 0
    assert holder_of(bare) == resting(held)
    assert bare.pttl(LOCK) <= 60_000


def test_a_repeated_or_late_rest_can_only_end_earlier(us: Ours, bare: Bare) -> None:
    held = us.take()
    assert rest(us, held, 60) is True
    assert rest(us, held, HOUR, unsure=True) is True
    assert bare.pttl(LOCK) <= 60_000
    assert rest(us, held, 30, unsure=True) is True
    assert bare.pttl(LOCK) <= 30_000
    assert bare.exists(f"{{multilock/a}}:gone:{held[0].id}") == 1


def test_the_token_counter_outlives_a_long_rest(us: Ours, bare: Bare) -> None:
    rest(us, us.take(), 24 * HOUR)
    assert bare.pttl(TOKEN) - bare.pttl(LOCK) > 599_000


def test_a_short_rest_does_not_shorten_the_life_of_the_token_counter(us: Ours, bare: Bare) -> None:
    held = us.take()
    bare.expire(TOKEN, 5000)
    rest(us, held, 1)
    assert bare.ttl(TOKEN) > 4990


def test_the_first_waiters_receive_the_end_of_the_rest_but_not_the_name(us: Ours, them: Ours, bare: Bare) -> None:
    held = us.take(us.claim(ttl=2))
    waiters = [them.wait() for _ in range(4)]
    rest(us, held, 4)
    for waiter in waiters[:3]:
        them.ear.hears("wake", waiter.id)
        answer = them.attempt(waiter, join=True)
        assert isinstance(answer, Busy)
        assert answer.expires_in is not None
        assert answer.expires_in > 2
    assert them.ear.heard == []  # each claim was notified only once
    assert holder_of(bare) == resting(held)
    them.release(waiters[0])
    assert holder_of(bare) == resting(held)
    bare.delete(LOCK)
    them.take(waiters[1])


def test_a_rest_requested_for_a_name_of_another_holder_changes_nothing(us: Ours, them: Ours, bare: Bare) -> None:
    late = us.take()
    bare.delete(LOCK)
    claim, _ = them.take()
    assert rest(us, late) is False
    assert holder_of(bare) == claim.owner
    assert bare.pttl(LOCK) <= 10_000


def test_a_rest_requested_for_a_free_name_wakes_the_next_waiter(us: Ours, them: Ours, bare: Bare) -> None:
    held = us.take()
    waiter = them.wait()
    bare.delete(LOCK)
    assert rest(us, held, unsure=True) is False
    assert holder_of(bare) == waiter.owner


def test_a_rest_requested_by_a_waiter_removes_it_from_the_queue(us: Ours, them: Ours, bare: Bare) -> None:
    held = us.take()
    bare.delete(LOCK)
    them.take()
    us.wait(held[0])
    assert rest(us, held, unsure=True) is False
    assert bare.zcard(QUEUE) == 0


def test_a_force_release_ends_a_rest_and_notifies_only_waiters(us: Ours, them: Ours, bare: Bare) -> None:
    held = us.take()
    us.watch(held)
    rest(us, held)
    waiter = them.wait()
    assert them.backend.force_release("a", 1) is True
    assert holder_of(bare) == waiter.owner
    them.ear.hears("wake", waiter.id)
    us.watch(us.take(us.claim("another")))  # the client has then received all earlier notifications
    assert us.ear.heard == []


def test_inspect_shows_the_last_holder_and_the_end_of_a_rest(us: Ours, them: Ours) -> None:
    held = us.take()
    before = us.backend.inspect("a", 1)
    rest(us, held)
    info = them.backend.inspect("a", 1)
    assert info is not None
    assert before is not None
    assert before.resting_until is None
    assert (info.kind, info.owner, info.identity, info.token) == ("lock", held[0].owner, "me", held[1].token)
    assert info.since == before.since
    assert info.resting_until is not None
    [listed] = them.backend.inspect_all("", 1)
    assert listed.owner == held[0].owner
    assert listed.resting_until is not None


def test_observers_are_notified_when_a_name_begins_to_rest(us: Ours, them: Ours) -> None:
    held = us.take()
    assert them.backend.follow(frozenset({"a"}), 1) is True
    them.ear.hears("changed", "a")
    rest(us, held)
    them.ear.hears("changed", "a")


def test_a_resting_name_excludes_redis_pys_own_lock(us: Ours, bare: Bare) -> None:
    rest(us, us.take())
    assert bare.lock(LOCK, timeout=10).acquire(blocking=False) is False


def test_a_full_server_can_still_let_a_name_rest(us: Ours, bare: Bare) -> None:
    held = us.take()
    bare.config_set("maxmemory", 1)
    try:
        assert rest(us, held, unsure=True) is True
        assert holder_of(bare) == resting(held)
        assert bare.exists(f"{{multilock/a}}:gone:{held[0].id}") == 1
    finally:
        bare.config_set("maxmemory", 0)


def test_a_user_without_channel_permissions_can_still_let_a_name_rest(
    us: Ours, connect: Connect, bare: Bare, server: RedisServer
) -> None:
    theirs = connect(without(bare, server, "publish"))
    held = theirs.take()
    us.wait()
    assert rest(theirs, held) is True
    assert holder_of(bare) == resting(held)


def test_a_script_that_the_server_lost_is_loaded_again_for_a_rest(us: Ours, bare: Bare) -> None:
    held = us.take()
    bare.script_flush()
    assert rest(us, held) is True


@pytest.mark.parametrize("loops", [1, 2])
def test_a_rest_under_asyncio_uses_the_same_connections(server: RedisServer, bare: Bare, loops: int) -> None:
    before = connected(bare)
    # With this ttl a request has five seconds, enough for a busy machine.
    ours = multilock.connect_async(server.url, ttl=30.0)

    async def main() -> None:
        async with asyncio.timeout(20):
            await (await ours.lock("b").acquire()).release()
            for number in range(5):
                assert await (await ours.lock(f"n{number}", hold_at_least=60).acquire()).release()
                assert await ours.lock(f"n{number}").try_acquire() is None
                assert await (await ours.lock("b").acquire()).release()

    for _ in range(loops):
        asyncio.run(main())
        bare.delete(*(f"multilock/n{number}" for number in range(5)))
    asyncio.run(ours.close())
    eventually(lambda: connected(bare) <= before)
