"""Readers and permits after failures, beside locks of other programs, and in thousands."""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import pytest
from redis.exceptions import LockNotOwnedError

from multilock import BackendRejected, BackendUnavailable, now
from multilock.backend import Busy, Claim, Granted, Returned
from multilock.testing import FaultProxy
from tests.backends.redis.conftest import Connect
from tests.backends.redis.kit import Bare, Ours, eventually, holder_of, since, without
from tests.servers import RedisServer

LOCK, QUEUE, HOLDERS = "multilock/a", "{multilock/a}:queue", "{multilock/a}:holders"

Make = Callable[[Ours], Claim]

shared = pytest.mark.parametrize(
    "make", [lambda ours: ours.reader(), lambda ours: ours.permit(2)], ids=["reader", "permit"]
)


# other programs


@shared
def test_readers_and_permits_exclude_redis_pys_lock_and_the_reverse(us: Ours, bare: Bare, make: Make) -> None:
    theirs = bare.lock(LOCK, timeout=10)
    claim, granted = us.take(make(us))
    assert theirs.acquire(blocking=False) is False
    assert us.renew((claim, granted)) != [None]
    us.release(claim)
    assert theirs.acquire(blocking=False)
    assert isinstance(us.attempt(make(us)), Busy)
    theirs.release()
    claim, granted = us.take(make(us))
    assert us.renew((claim, granted)) != [None]


@shared
def test_neither_redis_pys_lock_nor_a_shared_holder_can_release_the_other(us: Ours, bare: Bare, make: Make) -> None:
    theirs = bare.lock(LOCK, timeout=10)
    theirs.acquire()
    assert us.release(make(us)) is False
    bare.delete(LOCK)
    us.take(make(us))
    before = holder_of(bare)
    with pytest.raises(LockNotOwnedError):
        theirs.release()
    assert holder_of(bare) == before


def test_redis_pys_lock_enters_at_the_expiry_of_the_key_if_all_readers_died(us: Ours, bare: Bare) -> None:
    us.take(us.reader(ttl=0.2))
    assert bare.lock(LOCK, timeout=10).acquire(blocking_timeout=1)


def test_a_waiter_behind_redis_pys_lock_learns_when_that_lock_ends(us: Ours, bare: Bare) -> None:
    bare.lock(LOCK, timeout=5).acquire()
    answer = us.attempt(us.reader(), join=True)
    assert isinstance(answer, Busy)
    assert answer.expires_in is not None
    assert 4 < answer.expires_in < 5.1


# lost replies and late requests


@pytest.mark.oracle
@shared
def test_a_shared_acquire_whose_reply_is_lost_is_found_by_its_id_with_a_greater_token(
    connect: Connect, proxy: FaultProxy, bare: Bare, make: Make
) -> None:
    us = connect(proxy.url)
    us.release(us.take(make(us))[0])
    claim = make(us)
    proxy.drop_reply(b"EVALSHA")
    with pytest.raises(BackendUnavailable) as caught:
        us.take(claim)
    assert caught.value.unknown is True
    lost = int((holder_of(bare) or "").rpartition(":")[2])
    _, granted = us.take(claim)
    assert granted.token is not None
    assert granted.token > lost
    assert bare.zcard(HOLDERS) == 1


@shared
def test_a_cancel_is_final_however_late_its_request_arrives(
    connect: Connect, proxy: FaultProxy, bare: Bare, make: Make
) -> None:
    us = connect(proxy.url, within=1.0)
    us.release(us.take(make(us))[0])
    claim = make(us)
    held_back = proxy.hold_request(claim.id.encode())
    with pytest.raises(BackendUnavailable):
        us.take(claim)
    assert us.release(claim, unsure=True) is False
    before = bare.info("commandstats")["cmdstat_evalsha"]["calls"]
    held_back.release()
    eventually(lambda: bare.info("commandstats")["cmdstat_evalsha"]["calls"] > before)
    assert holder_of(bare) is None
    assert isinstance(us.attempt(claim, join=True), Busy)
    assert bare.zcard(QUEUE) == 0


@shared
def test_a_cancel_during_the_handover_passes_the_name_on(us: Ours, them: Ours, bare: Bare, make: Make) -> None:
    holder, _ = us.take()
    leaving, staying = us.wait(make(us)), them.wait()
    us.release(holder)
    assert us.release(leaving) is True  # the waiter had not read the notification of its grant
    assert holder_of(bare) == staying.owner


@shared
def test_a_renewal_whose_reply_is_lost_is_repeated(connect: Connect, proxy: FaultProxy, make: Make) -> None:
    us = connect(proxy.url)
    held = us.take(make(us))
    us.renew(held)
    proxy.drop_reply(b"EVALSHA")
    with pytest.raises(BackendUnavailable):
        us.renew(held)
    assert us.renew(held) != [None]


@shared
def test_a_repeated_release_returns_false(connect: Connect, proxy: FaultProxy, bare: Bare, make: Make) -> None:
    us = connect(proxy.url)
    claim, _ = us.take(make(us))
    us.release(us.claim("b"))
    proxy.drop_reply(b"EVALSHA")
    with pytest.raises(BackendUnavailable):
        us.release(claim)
    assert us.release(claim, unsure=True) is False
    assert holder_of(bare) is None


def test_scripts_that_the_server_lost_are_loaded_again_in_the_same_call(us: Ours, bare: Bare) -> None:
    alone, reader, permit = us.take(us.claim("x")), us.take(us.reader("r")), us.take(us.permit(2, "p"))
    bare.script_flush()
    assert None not in us.renew(alone, reader, permit)
    bare.script_flush()
    us.take(us.reader("r"))


# memory and rights


@shared
def test_a_full_server_admits_no_new_holder_and_keeps_the_shared_ones(
    us: Ours, them: Ours, bare: Bare, make: Make
) -> None:
    held, other = us.take(make(us)), them.take(make(them))
    waiter = them.wait()
    behind = us.wait(make(us))
    bare.config_set("maxmemory", 1)
    try:
        with pytest.raises(BackendRejected, match="OOM"):
            us.take(us.reader("free"))
        assert list(bare.scan_iter("*free*")) == []
        for _ in range(2):
            assert us.renew(held) != [None]
        us.take(held[0])
        assert us.release(held[0], unsure=True) is True
        assert them.release(other[0]) is True
        assert holder_of(bare) == waiter.owner
        them.take(waiter)
        assert them.release(waiter) is True
        us.take(behind)
        assert us.backend.force_release("a", 1) is True
    finally:
        bare.config_set("maxmemory", 0)


def test_a_client_that_may_not_subscribe_is_never_taken_for_dead(
    server: RedisServer, bare: Bare, connect: Connect
) -> None:
    since(bare, "7.0", "rights on channels by default")
    bare.acl_setuser("deaf", enabled=True, nopass=True, keys=["*"], commands=["+@all"], reset=True)
    deaf, them = connect(server.url.replace("redis://", "redis://deaf:x@")), connect()
    reader, _ = them.take(them.reader())
    writer = deaf.wait()
    assert isinstance(them.attempt(them.reader()), Busy), "a reader overtook the writer"
    them.release(reader)
    assert holder_of(bare) == writer.owner
    assert isinstance(deaf.attempt(writer, join=True), Granted)
    deaf.release(writer)
    claim, _ = them.take()
    readers = [deaf.wait(deaf.reader()) for _ in range(2)]
    them.release(claim)
    assert bare.zcard(HOLDERS) == 2
    for reader in readers:
        deaf.take(reader)


@pytest.mark.parametrize("right", ["pubsub", "publish"])
def test_without_channel_permissions_shared_locks_are_still_handed_over(
    server: RedisServer, bare: Bare, connect: Connect, right: str
) -> None:
    lacking, them = connect(without(bare, server, right)), connect()
    claim, _ = lacking.take()
    waiters = [them.wait(them.permit(2)) for _ in range(3)]
    assert lacking.release(claim) is True
    assert bare.zcard(HOLDERS) == 2
    them.take(waiters[0])


@pytest.mark.oracle
@pytest.mark.parametrize(
    "right", ["zadd", "zrem", "zscore", "zcard", "zrange", "zremrangebyscore", "pexpire", "exists", "hset", "publish"]
)
def test_a_missing_permission_leaves_no_key_without_an_expiry(
    server: RedisServer, bare: Bare, connect: Connect, right: str
) -> None:
    whole, lacking = connect(), connect(without(bare, server, right))
    whole.take(whole.permit(2))
    whole.take(whole.claim("alone"))
    names = (lacking.permit(2), lacking.permit(2), lacking.permit(2, "free"), lacking.reader(), lacking.reader("alone"))
    for claim in names:
        held = (claim, Granted(1, 10, 0, 10, 3, "group"))
        calls: list[Callable[[], object]] = [
            partial(lacking.attempt, claim, join=True),
            partial(lacking.renew, held),
            partial(lacking.release, claim, unsure=True),
        ]
        for call in calls:
            with suppress(BackendRejected):
                call()
        assert {key for key in bare.scan_iter() if bare.ttl(key) == -1} == set()


def test_a_key_of_another_type_is_rejected_and_loses_the_lease(us: Ours, bare: Bare) -> None:
    held, other = us.take(us.reader()), us.take(us.reader("b"))
    bare.delete(LOCK)
    bare.hset(LOCK, "redisson", 1)
    with pytest.raises(BackendRejected, match="WRONGTYPE"):
        us.take(us.reader())
    lost, renewed = us.renew(held, other)
    assert lost is None
    assert renewed is not None


# over a channel, as an event loop does


def test_a_channel_asks_for_readers_and_permits_refuses_and_releases_them(us: Ours) -> None:
    us.take(us.claim("b"))  # this loads the scripts
    us.release(us.take(us.reader())[0])
    channel = us.backend.channel(1)
    assert channel is not None

    def answer() -> object:
        while True:
            select.select([channel], [], [], 2)
            with suppress(BlockingIOError):
                return channel.answer()

    claim = us.permit(3)
    assert channel.attempt(claim, False)
    granted = answer()
    assert isinstance(granted, Granted)
    assert isinstance(granted.key, str)
    assert channel.attempt(us.reader(), False)
    assert isinstance(answer(), Busy)
    assert channel.attempt(us.permit(2), False)
    with pytest.raises(BackendRejected, match="has 3 permits"):
        answer()
    assert channel.release(claim, granted, False)
    assert answer() == Returned(True)
    channel.close()


# many


def test_few_requests_renew_a_thousand_readers_and_a_writer_enters_after_the_last(
    us: Ours, them: Ours, bare: Bare
) -> None:
    held = [us.take(us.reader()) for _ in range(1000)]
    us.watch(*held)
    us.renew(*held)
    before = bare.info("commandstats")["cmdstat_evalsha"]["calls"]
    assert None not in us.renew(*held)
    assert bare.info("commandstats")["cmdstat_evalsha"]["calls"] - before == 4
    writer = them.wait()
    for number, (claim, _) in enumerate(held):
        if number % 100 == 0:
            # On an overloaded machine the loop takes so long that the writer needs a heartbeat to keep its place.
            them.wait(writer)
        assert holder_of(bare) != writer.owner
        us.release(claim)
    assert holder_of(bare) == writer.owner
    assert us.ear.heard == []
    bare.delete(LOCK)


def test_a_reader_sends_as_many_requests_beside_a_thousand_readers_as_beside_one(
    us: Ours, them: Ours, bare: Bare
) -> None:
    def commands() -> int:
        bare.config_resetstat()
        held = them.take(them.reader())
        them.renew(held)
        them.release(held[0])
        stats = bare.info("commandstats")
        return sum(stats[name]["calls"] for name in stats if name not in ("cmdstat_info", "cmdstat_config|resetstat"))

    us.take(us.reader())
    commands()  # loads the scripts
    beside_one = commands()
    for _ in range(1000):
        us.take(us.reader())
    assert commands() == beside_one


def test_renewals_of_readers_rarely_notify_the_other_readers(connect: Connect, bare: Bare) -> None:
    since(bare, "7.0", "NOLOOP for scripts: renewals are looked at")
    clients = [connect() for _ in range(10)]
    ttl = 4.0
    held = [ours.take(ours.reader(ttl=ttl)) for ours in clients]
    for ours, each in zip(clients, held, strict=True):
        ours.watch(each)
    begun = now()
    before = int(bare.info("commandstats")["cmdstat_mget"]["calls"])
    rounds = 6
    for _ in range(rounds):
        time.sleep(0.5)
        for ours, each in zip(clients, held, strict=True):
            assert ours.renew(each) != [None]
    time.sleep(0.2)  # by then the client has handled all notifications
    looks = int(bare.info("commandstats")["cmdstat_mget"]["calls"]) - before
    pushed = looks - rounds * len(clients)  # each renewal itself reads the keys once
    assert pushed <= 3 * (1 + (now() - begun) / ttl) * len(clients)
    assert [ours.ear.heard for ours in clients] == [[]] * len(clients)
