"""The notification (push) of a handover is a grant. The tests check its contents and the time from which the lease
counts. Some waiters must still ask the server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

import multilock
from multilock import BackendRejected, now
from multilock.backend import Busy
from multilock.kernel.validity import valid_until
from multilock.model import Claim, Granted
from multilock.testing import FaultProxy
from tests.backends.redis.kit import Bare, Ours, eventually, holder_of
from tests.servers import RedisServer

LOCK, LIVE, TOKEN = "multilock/a", "{multilock/a}:live", "{multilock/a}:token"
GIVEN = 64  # claims that can get a shared name in one script (queue.lua)
Connect = Callable[..., Ours]


def handed_over(us: Ours, them: Ours, claim: Claim) -> Granted | None:
    """Hand the name over to this claim of ``them``, and return the grant that the notification contains."""
    held, _ = us.take()
    them.wait(claim)
    us.release(held)
    them.ear.hears("wake", claim.id)
    return them.ear.pushed.get(claim.id)


def test_the_push_of_a_handover_grants_the_lock_as_a_reply_would(us: Ours, them: Ours, bare: Bare) -> None:
    claim = them.claim(ttl=30)
    granted = handed_over(us, them, claim)
    assert granted
    assert granted.token == int(bare.get(TOKEN))
    assert granted.key == claim.owner == holder_of(bare)
    assert granted.short
    assert (granted.ttl, granted.valid_for, granted.renew_every) == (6.0, 6.0, 2.0)
    [renewed] = them.renew((claim, granted))
    assert renewed
    assert (renewed.ttl, renewed.short, renewed.token) == (30, False, granted.token)
    assert them.release(claim)


def test_a_pushed_grant_counts_from_the_request_whose_deadline_the_handover_uses(
    us: Ours, them: Ours, bare: Bare
) -> None:
    held, _ = us.take()
    claim = them.claim(ttl=30)
    for _ in range(2):
        before = now()
        assert isinstance(them.attempt(claim, join=True), Busy)
        after = now()
    us.release(held)
    left = bare.pttl(LOCK) / 1000
    them.ear.hears("wake", claim.id)
    granted = them.ear.pushed[claim.id]
    assert before - 1e-6 <= granted.sent_at <= after
    assert valid_until(granted.sent_at, granted.valid_for, granted.ttl) <= now() + left


def test_an_older_request_executed_last_shortens_a_pushed_grant(us: Ours, them: Ours, bare: Bare) -> None:
    held, _ = us.take()
    claim = them.claim(ttl=30)
    recipe = them.backend._node.recipe
    late, sent_at = recipe.to_attempt(claim, True), now()
    assert isinstance(them.attempt(claim, join=True), Busy)
    newest = now()
    them.backend._node.connections.call(late, 2.0)
    us.release(held)
    them.ear.hears("wake", claim.id)
    assert them.ear.pushed[claim.id].sent_at <= sent_at < newest


@pytest.mark.parametrize("how", ["renew=False", "a ttl below a liveness"])
def test_a_waiter_that_would_hold_too_briefly_only_gets_a_hint_to_look(us: Ours, them: Ours, how: str) -> None:
    claim = them.claim(ttl=0.9) if how != "renew=False" else them.claim()._replace(renew=False)
    assert handed_over(us, them, claim) is None
    assert isinstance(them.attempt(claim, join=True), Granted)


def test_a_reader_and_a_permit_are_granted_by_a_push_too(us: Ours, them: Ours, bare: Bare) -> None:
    for claims in ([them.reader(), them.reader()], [them.permit(2), them.permit(2)]):
        held, exclusive = us.take()
        for claim in claims:
            them.wait(claim)
        us.release(held)
        for claim in claims:
            them.ear.hears("wake", claim.id)
        first, second = [them.ear.pushed[claim.id] for claim in claims]
        assert exclusive.token is not None
        assert first.token is not None
        assert second.token is not None
        assert exclusive.token < first.token < second.token == int(bare.get(TOKEN))
        assert first.key == second.key == holder_of(bare)
        assert all(them.renew(*zip(claims, (first, second), strict=True)))
        assert [them.release(claim) for claim in claims] == [True, True]


def test_the_last_of_many_readers_admitted_by_one_script_admits_the_next_ones(us: Ours, them: Ours) -> None:
    held, _ = us.take()
    readers = [them.wait(them.reader()) for _ in range(GIVEN + 10)]
    us.release(held)
    last = readers[GIVEN - 1]
    them.ear.hears("wake", last.id)
    assert [claim.id in them.ear.pushed for claim in readers] == [True] * (GIVEN - 1) + [False] * 11
    assert isinstance(them.attempt(last, join=True), Granted)
    for claim in readers[GIVEN:]:
        them.ear.hears("wake", claim.id)


def test_force_release_sends_the_holder_a_hint_and_the_next_waiter_a_grant(us: Ours, them: Ours) -> None:
    held, granted = us.take()
    waiter = them.wait()
    us.watch((held, granted))
    assert us.backend.force_release("a", 2.0)
    them.ear.hears("wake", waiter.id)
    assert waiter.id in them.ear.pushed
    assert held.id not in us.ear.pushed


def test_a_waiter_without_a_subscription_is_pushed_no_grant(us: Ours, them: Ours, connect: Connect, bare: Bare) -> None:
    """A replica forwards notifications to its own subscribers. So the server must not notify a waiter that has no
    subscription at the server itself."""
    held, _ = us.take()
    dead, alive = them.wait(), connect().wait()
    them.close()
    channel = f"multilock:wake:{dead.id[:16]}"
    eventually(lambda: bare.pubsub_numsub(channel)[0][1] == 0)
    bare.execute_command("CONFIG", "RESETSTAT")
    us.release(held)
    assert holder_of(bare) == alive.owner
    assert bare.info("commandstats")["cmdstat_publish"]["calls"] == 1


def test_no_grant_is_pushed_if_a_full_server_refuses_the_handover(us: Ours, them: Ours, bare: Bare) -> None:
    held, _ = us.take()
    waiter = them.wait()
    bare.delete(LOCK)
    bare.config_set("maxmemory", 1)
    try:
        with pytest.raises(BackendRejected, match="OOM"):
            us.attempt(us.claim())
    finally:
        bare.config_set("maxmemory", 0)
    assert holder_of(bare) is None
    us.release(held)  # this release hands the free name over to the waiter
    bare.publish(f"multilock:wake:{them.ear.client}", "after")
    them.ear.hears("wake", "after")
    assert them.ear.heard == [("wake", waiter.id)]


@pytest.mark.parametrize(
    "published",
    [
        "{} 1/2",
        "{} a/b 3 k",
        "{} 1/2 x k",
        "{} 1 2 3",
        "{} 1/2/3 4 k",
        "{} 1/2 3 k more",
        "{} " + "9" * 5000 + "/1 1 k",
    ],
)
def test_anything_else_published_on_the_channel_is_only_a_hint(
    us: Ours, them: Ours, bare: Bare, published: str
) -> None:
    us.take()
    waiter = them.wait()
    bare.publish(f"multilock:wake:{them.ear.client}", published.format(waiter.id))
    bare.publish(f"multilock:wake:{them.ear.client}", b"\xff\xfe 1/6000 1 k")
    them.ear.hears("wake", waiter.id)
    assert waiter.id not in them.ear.pushed
    bare.publish(f"multilock:wake:{them.ear.client}", "after")
    them.ear.hears("wake", "after")  # the client still reads notifications


def client(server: RedisServer, url: str | None = None, **options: Any) -> multilock.Client:
    return multilock.connect(url or server.url, ttl=10.0, **options)


def test_a_waiter_sends_one_request_until_its_push(
    server: RedisServer, bare: Bare, monkeypatch: pytest.MonkeyPatch
) -> None:
    with client(server) as one, client(server) as two:
        backend: Any = two._kernel.backend
        attempt, asked = backend.attempt, []

        def counted(*args: Any) -> Any:
            asked.append(args)
            return attempt(*args)

        monkeypatch.setattr(backend, "attempt", counted)
        held = one.lock("a").acquire()
        with acquiring(two.lock("a", fair=True)) as acquired:
            eventually(lambda: bare.zcard("{multilock/a}:queue") == 1)
            held.release()
            lease = acquired()
            assert held.token is not None
            assert lease.token is not None
            assert lease.token > held.token
        assert len(asked) == 1


def test_a_late_push_for_a_taken_name_is_not_believed(server: RedisServer, bare: Bare) -> None:
    with (
        FaultProxy.before(server.url) as proxy,
        client(server) as one,
        client(server, proxy.url, request_timeout=1) as two,
    ):
        held = one.lock("a").acquire()
        with acquiring(two.lock("a", fair=True)) as acquired:
            eventually(lambda: bare.zcard("{multilock/a}:queue") == 1)
            proxy.black_hole()  # the proxy now loses the notification and all heartbeats
            held.release()
            assert str(holder_of(bare)).startswith(two._kernel.client)
            third = one.lock("a").acquire(timeout=15)  # granted once the lease of the handover has expired
            proxy.heal()
            eventually(lambda: bare.zcard("{multilock/a}:queue") == 1, within=10)
            assert third.is_held()
            third.release()
            last = acquired()
            assert third.token is not None
            assert last.token is not None
            assert last.token > third.token


def test_a_push_before_a_hint_of_a_force_release_is_checked_by_a_request(
    server: RedisServer, bare: Bare, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The notification and the hint arrive during a heartbeat, whose reply is older."""
    with FaultProxy.before(server.url) as proxy, client(server) as one, client(server, proxy.url) as two:
        held = one.lock("a").acquire()
        with acquiring(two.lock("a", fair=True)) as acquired:
            eventually(lambda: bare.zcard("{multilock/a}:queue") == 1)
            [waiting] = two._kernel.monitor.waiting.values()
            heartbeat = proxy.hold_request(waiting.claim.id.encode())
            channel, hints = f"multilock:wake:{two._kernel.client}", []
            wake = two._kernel.monitor.wake

            def hinted(claim_id: str | None) -> None:
                wake(claim_id)
                hints.append(claim_id)

            monkeypatch.setattr(two._kernel.monitor, "wake", hinted)
            bare.publish(channel, waiting.claim.id)
            heartbeat.wait(10)
            hints.clear()
            held.release()
            assert holder_of(bare) == waiting.claim.owner
            assert one.force_release("a")
            eventually(lambda: hints)
            third = one.lock("a").acquire()
            heartbeat.release()
            eventually(lambda: bare.zcard("{multilock/a}:queue") == 1)
            bare.publish(channel, "after")
            eventually(lambda: "after" in hints)
            assert [holding.name for holding in two._kernel.held.values()] == []
            third.release()
            last = acquired()
            assert third.token is not None
            assert last.token is not None
            assert last.token > third.token


@contextmanager
def acquiring(lock: multilock.DistributedLock) -> Iterator[Callable[[], multilock.Lease]]:
    """Acquire in another thread. Yields a function that waits for the lease, which is released at the end."""
    with ThreadPoolExecutor(1) as pool:
        lease = pool.submit(lock.acquire, 30)
        yield lease.result
        lease.result().release()


def test_a_refused_waiter_does_not_believe_an_older_push(server: RedisServer, bare: Bare) -> None:
    """An operator deletes a name that was just handed over, another client acquires it, and the server refuses the
    waiter. The notification of the handover arrives only after that."""
    with (
        multilock.connect(server.url, ttl=1) as us,
        multilock.connect(server.url, ttl=1) as them,
        us.lock("a").acquire(),
        ThreadPoolExecutor() as pool,
    ):
        waiting = pool.submit(them.lock("a").try_acquire, 1.5)
        eventually(lambda: bare.hlen(LIVE))
        [(owner, first)] = bare.hgetall(LIVE).items()
        eventually(lambda: bare.hget(LIVE, owner) != first)  # the waiter has sent its next request, which was refused
        claim_id, echo = owner.decode().partition("@")[0], first.decode().rpartition(":")[2]
        token = int(bare.get(TOKEN)) + 1
        bare.publish(f"multilock:wake:{claim_id[:16]}", f"{claim_id} {echo} {token} {owner.decode()}")
        assert waiting.result() is None
