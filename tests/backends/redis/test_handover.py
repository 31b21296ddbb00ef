"""A release makes the first live waiter the holder and notifies it, even after the failures that these tests cause."""

from __future__ import annotations

import threading
from contextlib import suppress

import pytest

import multilock
from multilock import now
from multilock.errors import BackendUnavailable
from multilock.model import Busy, Granted
from multilock.testing import FaultProxy, Helper, hear, say
from multilock_redis.notices import Listener
from multilock_redis.transport import Wire
from tests.backends.redis.conftest import Connect
from tests.backends.redis.kit import Bare, Ours, eventually, holder_of, since, without
from tests.servers import RedisServer
from tests.unit.kit import our_threads

QUEUE, LIVE = "{multilock/a}:queue", "{multilock/a}:live"


def waiting(url: str) -> None:
    """Run a process with one waiter in the queue."""
    ours = Ours(url)
    claim = ours.wait()
    say("waiting", claim.owner)
    while hear() is not None:
        ours.attempt(claim, join=True)
        say("asked")
    ours.close()


def test_the_release_wakes_only_the_first_waiter(us: Ours, them: Ours, connect: Connect) -> None:
    third = connect()
    claim, _ = us.take()
    first, second = them.wait(), third.wait()
    us.release(claim)
    them.ear.hears("wake", first.id)
    assert isinstance(them.attempt(first, join=True), Granted)
    assert third.ear.heard == []
    assert isinstance(third.attempt(second, join=True), Busy)


def test_an_unconfirmed_grant_ends_with_the_waiters_liveness_and_not_with_its_ttl(
    us: Ours, them: Ours, bare: Bare
) -> None:
    claim, _ = us.take()
    them.wait(them.claim(ttl=30))
    us.release(claim)
    assert 3_000 < bare.pttl("multilock/a") <= 6_000


def test_a_killed_waiter_is_skipped_in_the_same_release(us: Ours, them: Ours, server: RedisServer, bare: Bare) -> None:
    claim, _ = us.take()
    with Helper(f"{__name__}:waiting", server.url) as dead:
        dead.wait_for("waiting", within=10)
        alive = them.wait()
        dead.kill()
        subscribers = f"multilock:wake:{alive.id[:16]}"
        eventually(lambda: len(bare.pubsub_channels("multilock:wake:*")) == 1)
        assert bare.pubsub_channels("multilock:wake:*") == [subscribers.encode()]
        us.release(claim)
        them.ear.hears("wake", alive.id)
        assert holder_of(bare) == alive.owner


def test_a_program_subscribed_to_everything_makes_no_dead_waiter_seem_alive(
    us: Ours, them: Ours, server: RedisServer, bare: Bare
) -> None:
    claim, _ = us.take()
    with bare.pubsub() as monitor, Helper(f"{__name__}:waiting", server.url) as dead:
        monitor.psubscribe("*")
        eventually(lambda: bare.pubsub_numpat() == 1)
        dead.wait_for("waiting", within=10)
        alive = them.wait()
        dead.kill()
        eventually(lambda: len(bare.pubsub_channels("multilock:wake:*")) == 1)
        us.release(claim)
        them.ear.hears("wake", alive.id)
        assert holder_of(bare) == alive.owner


def test_a_client_that_may_not_count_subscribers_assumes_that_all_waiters_live(
    server: RedisServer, bare: Bare, connect: Connect
) -> None:
    ours, them = connect(without(bare, server, "pubsub")), connect()
    claim, _ = ours.take()
    waiter = them.wait()
    assert ours.release(claim) is True
    assert holder_of(bare) == waiter.owner
    them.ear.hears("wake", waiter.id)


def test_the_last_holder_of_a_deleted_lock_hands_it_over(server: RedisServer, bare: Bare) -> None:
    """The former holder notices the deletion, and its release hands the name over. The waiter itself would ask only 1.8
    s later."""
    with multilock.connect(server.url) as ours, multilock.connect(server.url) as theirs:
        former = ours.lock("a").acquire()
        waiter = threading.Thread(target=theirs.lock("a").acquire, daemon=True)
        waiter.start()
        eventually(lambda: bare.zcard(QUEUE) == 1)
        eventually(lambda: ours._kernel.backend._node.listener._watched)  # type: ignore[attr-defined]
        bare.delete("multilock/a")
        eventually(lambda: (holder_of(bare) or former.owner) != former.owner, within=1.0)
        waiter.join()


def test_a_frozen_waiter_delays_the_next_one_only_by_its_own_liveness(
    us: Ours, them: Ours, server: RedisServer, bare: Bare
) -> None:
    claim, _ = us.take()
    with Helper(f"{__name__}:waiting", server.url) as stopped:
        _, owner = stopped.wait_for("waiting", within=10)
        alive = them.wait()
        with stopped.paused():
            us.release(claim)
            # The connection of the stopped process is open, so the server cannot know that the process is stopped.
            assert holder_of(bare) == owner
            bare.pexpire("multilock/a", 1)  # the lease of the stopped process expires
            eventually(lambda: holder_of(bare) is None)
            assert isinstance(them.attempt(alive, join=True), Granted)


def test_a_waiter_without_a_subscription_keeps_its_place_until_it_subscribes_again(
    us: Ours, connect: Connect, proxy: FaultProxy, bare: Bare
) -> None:
    away, listening = connect(proxy.url), connect()
    claim, _ = us.take()
    first, second = away.wait(), listening.wait()
    proxy.refuse()
    proxy.cut()
    eventually(lambda: len(bare.pubsub_channels("multilock:wake:*")) == 1)
    us.release(claim)
    assert holder_of(bare) == second.owner
    proxy.accept()
    away.ear.hears("wake", None)  # all waiters must ask again, because a notification may have been lost
    away.wait(first)
    listening.release(second)
    away.ear.hears("wake", first.id)


def test_after_a_broken_subscription_all_twenty_waiters_look_again(
    us: Ours, connect: Connect, proxy: FaultProxy
) -> None:
    cut = connect(proxy.url)
    claim, _ = us.take()
    queue = [cut.wait() for _ in range(20)]
    proxy.cut()
    cut.ear.hears("wake", None)
    with suppress(BackendUnavailable):  # the connection for requests was closed too
        cut.backend.ping(1)
    us.release(claim)
    for waiter in queue:
        cut.ear.hears("wake", waiter.id)
        assert isinstance(cut.attempt(waiter, join=True), Granted)
        cut.release(waiter)


def test_a_dead_subscription_is_noticed_and_replaced(us: Ours, connect: Connect, proxy: FaultProxy) -> None:
    waiter = connect(proxy.url)
    us.take()
    waiter.wait()
    proxy.half_open("server")
    waiter.ear.hears("wake", None, within=8)


def test_after_the_server_loses_its_data_the_waiter_joins_again(us: Ours, them: Ours, bare: Bare) -> None:
    us.take()
    waiter = them.wait()
    bare.flushall()
    assert isinstance(them.attempt(waiter, join=True), Granted)


def test_a_free_name_needs_no_subscription(us: Ours, bare: Bare) -> None:
    eventually(lambda: bare.pubsub_channels("multilock:wake:*") == [])  # wait until the client of an earlier test ends
    before = clients(bare)
    assert isinstance(us.attempt(us.claim(), join=True), Granted)
    assert bare.pubsub_channels("multilock:wake:*") == []
    assert len(clients(bare) - before) == 1


def test_a_client_that_may_not_subscribe_waits_by_timers_and_is_served(
    server: RedisServer, bare: Bare, connect: Connect
) -> None:
    since(bare, "7.0", "rights on channels by default")
    bare.acl_setuser("deaf", enabled=True, nopass=True, keys=["*"], commands=["+@all"], reset=True)
    url = server.url.replace("redis://", "redis://deaf:x@")
    holder, deaf = connect(), connect(url)
    claim, _ = holder.take()
    waiter = deaf.wait()
    holder.release(claim)
    assert isinstance(deaf.attempt(waiter, join=True), Granted)
    assert "wake-ups" in deaf.backend._node.listener.refused


def test_a_client_that_may_not_publish_still_hands_the_lock_over(
    server: RedisServer, bare: Bare, connect: Connect
) -> None:
    bare.acl_setuser("mute", enabled=True, nopass=True, keys=["*"], commands=["+@all", "-publish"], reset=True)
    mute, them = connect(server.url.replace("redis://", "redis://mute:x@")), connect()
    claim, _ = mute.take()
    waiter = them.wait()
    assert mute.release(claim) is True
    assert holder_of(bare) == waiter.owner


@pytest.mark.oracle
def test_a_waiter_that_cannot_subscribe_fails_at_once_and_leaves_nothing(
    us: Ours, connect: Connect, proxy: FaultProxy, bare: Bare
) -> None:
    us.take()
    them = connect(proxy.url)
    them.backend.ping(1)
    proxy.refuse()
    with pytest.raises(BackendUnavailable) as caught:
        them.attempt(them.claim(), join=True)
    assert caught.value.unknown is False
    assert bare.zcard(QUEUE) == 0


def test_threads_that_begin_to_wait_at_once_share_one_subscription(us: Ours, them: Ours, bare: Bare) -> None:
    before = set(threading.enumerate())
    us.take()
    threads = [threading.Thread(target=them.wait) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert bare.zcard(QUEUE) == 8
    assert bare.pubsub_numsub(f"multilock:wake:{them.ear.client}")[0][1] == 1
    new = set(threading.enumerate()) - before
    assert sum(thread.name == "multilock-redis-notices" for thread in new) == 1


def test_closing_ends_the_thread_and_every_connection(us: Ours, them: Ours, bare: Bare) -> None:
    before = clients(bare)
    threads = our_threads()
    held = us.take()
    us.watch(held)
    them.wait()
    assert len(clients(bare) - before) == 5
    us.close()
    them.close()
    eventually(lambda: our_threads() <= threads)
    eventually(lambda: clients(bare) <= before)


def test_closing_right_after_the_second_connection_was_made_ends_it_too(
    us: Ours, bare: Bare, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = clients(bare)
    held = us.take()
    track = Listener._track
    made, go_on = threading.Event(), threading.Event()

    def slowly(listener: Listener, within: float) -> Wire:
        wire = track(listener, within)
        made.set()
        go_on.wait(5)
        return wire

    monkeypatch.setattr(Listener, "_track", slowly)
    watching = threading.Thread(target=us.watch, args=(held,))
    watching.start()
    assert made.wait(5)
    us.close()
    go_on.set()
    watching.join()
    eventually(lambda: clients(bare) <= before)


def test_closing_does_not_wait_for_a_silent_server(us: Ours, connect: Connect, proxy: FaultProxy) -> None:
    them = connect(proxy.url)
    us.take()
    them.wait()
    proxy.black_hole()
    started = now()
    them.close()
    assert now() - started < 0.9


def clients(bare: Bare) -> set[str]:
    return {client["id"] for client in bare.client_list()}
