"""A holder is notified at once if its key is deleted or taken."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis

from multilock import now
from multilock.errors import BackendUnavailable
from multilock.model import Claim, Granted, LossReason
from multilock.testing import FaultProxy
from multilock_redis.watched_claims import Watched
from tests.backends.redis.conftest import Connect
from tests.backends.redis.kit import Bare, Ours, busy, eventually, since
from tests.servers import RedisServer

TAKEN = LossReason.TAKEN
LOCK = "multilock/a"


@pytest.mark.parametrize("renewed", [False, True])
def test_a_deleted_key_is_reported_within_50_ms(us: Ours, bare: Bare, renewed: bool) -> None:
    delays = []
    for number in range(10):
        held = us.take(us.claim(f"n{number}"))
        us.watch(held)
        if renewed:
            assert us.renew(held, held) != [None, None]
        started = now()
        bare.delete(f"multilock/n{number}")
        delays.append(us.ear.hears("gone", held[0].id, TAKEN) - started)
    assert min(delays) < 0.05, "the others may have met a machine that stood still"


def test_a_key_overwritten_by_another_program_is_reported(us: Ours, bare: Bare) -> None:
    held = us.take()
    us.watch(held)
    bare.set(LOCK, "operator", px=60_000)
    us.ear.hears("gone", held[0].id, TAKEN)


def test_a_flushed_database_is_reported(us: Ours, bare: Bare) -> None:
    many = [us.take(us.claim(f"n{i}")) for i in range(20)]
    us.watch(*many)
    bare.flushdb()
    for claim, _ in many:
        us.ear.hears("gone", claim.id, TAKEN)


def test_force_release_is_reported_to_the_holder(us: Ours, them: Ours) -> None:
    held = us.take()
    us.watch(held)
    them.backend.force_release("a", 1)
    us.ear.hears("gone", held[0].id, TAKEN)


def test_a_loss_before_the_watch_began_is_reported_by_the_watch(us: Ours, bare: Bare) -> None:
    held = us.take()
    bare.delete(LOCK)
    us.watch(held)
    us.ear.hears("gone", held[0].id, TAKEN)


def test_a_release_is_not_a_loss(us: Ours, bare: Bare) -> None:
    for _ in range(50):
        held = us.take()
        us.watch(held)
        us.renew(held)
        us.release(held[0])
    witness = us.take()
    us.watch(witness)
    bare.delete(LOCK)  # its notification comes after all earlier ones
    us.ear.hears("gone", witness[0].id, TAKEN)
    assert us.ear.heard == []


def test_a_renewal_over_another_connection_is_not_a_loss_and_keeps_the_watch(us: Ours, bare: Bare) -> None:
    held = us.take()
    us.watch(held)
    bare.pexpire(LOCK, 20_000)  # this changes the key as a renewal over another connection does
    us.backend._node.listener._using_tracked.acquire()
    us.renew(held)
    us.backend._node.listener._using_tracked.release()
    time.sleep(0.05)
    assert us.ear.heard == []
    bare.delete(LOCK)
    us.ear.hears("gone", held[0].id, TAKEN)


def test_renewals_over_the_tracked_connection_cause_no_notification(us: Ours, bare: Bare) -> None:
    since(bare, "7.0", "NOLOOP for scripts: renewals are looked at")
    held = us.take()
    us.watch(held)
    us.renew(held)  # this loads the script
    before = reads(bare)
    for _ in range(10):
        us.renew(held)
    time.sleep(0.1)
    assert reads(bare) - before == 10  # each renewal reads its key once, and no notification causes a further read


def reads(bare: Bare) -> int:
    return int(bare.info("commandstats")["cmdstat_mget"]["calls"])


@pytest.mark.parametrize("which", ["normal", "pubsub"])
def test_a_killed_connection_is_replaced_and_the_watch_continues(us: Ours, bare: Bare, which: str) -> None:
    held = us.take()
    us.watch(held)
    listener = us.backend._node.listener
    before = listener._tracked
    bare.client_kill_filter(_type=which, skipme=True)
    # The next renewal, notification or two-second check finds that the connection has ended. The client then reads
    # every key again.
    eventually(lambda: listener._tracked is not before and listener._tracked.alive, within=6)  # type: ignore[union-attr]
    us.ear.heard.clear()
    bare.delete(LOCK)
    us.ear.hears("gone", held[0].id, TAKEN)


def test_a_key_deleted_during_a_broken_connection_is_reported_after_the_reconnect(
    connect: Connect, proxy: FaultProxy, bare: Bare
) -> None:
    us = connect(proxy.url)
    held = us.take()
    us.watch(held)
    proxy.refuse()
    proxy.cut()
    bare.delete(LOCK)
    proxy.accept()
    us.ear.hears("gone", held[0].id, TAKEN, within=5)


def test_acquiring_a_name_again_in_the_same_client_ends_the_old_claim(us: Ours, bare: Bare) -> None:
    old = us.take()
    us.backend._node.listener._watched.add(old[0].id, "a", old[0].owner.encode())
    bare.delete(LOCK)
    new = us.take()
    us.watch(new)
    us.ear.hears("gone", old[0].id, TAKEN)
    assert us.ear.heard == []


def two_leases_of_one_name(us: Ours) -> tuple[tuple[Claim, Granted], tuple[Claim, Granted]]:
    """Make two leases of one name that have the same value in the key, as two readers do."""
    first = us.take()
    second = us.claim(), first[1]
    us.watch(first)
    us.watch(second)
    return first, second


def test_a_second_lease_of_a_name_is_not_a_loss_of_the_first(us: Ours, bare: Bare) -> None:
    first, second = two_leases_of_one_name(us)
    witness = us.take(us.claim("witness"))
    us.watch(witness)
    bare.delete("multilock/witness")
    us.ear.hears("gone", witness[0].id, TAKEN)
    assert us.ear.heard == []
    bare.delete(LOCK)
    us.ear.hears("gone", first[0].id, TAKEN)
    us.ear.hears("gone", second[0].id, TAKEN)


@pytest.mark.parametrize("released", [0, 1])
def test_a_released_lease_ends_only_its_own_watch(us: Ours, bare: Bare, released: int) -> None:
    leases = two_leases_of_one_name(us)
    us.backend._node.listener.unwatch(leases[released][0].id)
    us.renew(leases[0])  # the server does not notify a connection of its own changes
    bare.delete(LOCK)
    us.ear.hears("gone", leases[1 - released][0].id, TAKEN)
    time.sleep(0.05)
    assert us.ear.heard == []


def test_a_loss_is_reported_once(us: Ours, bare: Bare) -> None:
    held = us.take()
    us.watch(held)
    bare.delete(LOCK)
    us.ear.hears("gone", held[0].id, TAKEN)
    us.backend._node.listener._look(None, 1.0)
    assert us.ear.heard == []
    assert not us.backend._node.listener._watched


def test_without_permission_to_track_the_watch_reports_force_releases_and_the_missing_permission(
    server: RedisServer, bare: Bare, connect: Connect
) -> None:
    since(bare, "6.2", "rights on channels")
    bare.acl_setuser(
        "managed", enabled=True, nopass=True, keys=["*"], channels=["*"], commands=["+@all", "-client"], reset=True
    )
    us, them = connect(server.url.replace("redis://", "redis://managed:x@")), connect()
    held = us.take()
    us.watch(held)
    us.watch(held)
    assert us.backend.follow(frozenset({"a"}), 1) is False
    assert us.ear.refused
    [trouble] = us.ear.down.values()
    assert "noticed at the next renewal" in trouble
    them.backend.force_release("a", 1)
    us.ear.hears("gone", held[0].id, TAKEN)


def test_without_permission_for_mget_renewals_continue(server: RedisServer, bare: Bare, connect: Connect) -> None:
    rights = {"keys": ["*"], "channels": ["*"], "commands": ["+@all"]}
    since(bare, "6.2", "rights on channels")
    bare.acl_setuser("app", enabled=True, nopass=True, reset=True, **rights)
    us = connect(server.url.replace("redis://", "redis://app:x@"))
    held = us.take()
    us.watch(held)
    bare.execute_command("ACL", "SETUSER", "app", "-mget")
    assert all(us.renew(held))
    us.watch(held)
    assert "changes" in us.backend._node.listener.refused


def test_a_server_busy_during_the_subscription_counts_as_silence_and_not_as_refusal(
    redis_server: RedisServer, connect: Connect
) -> None:
    us = connect(redis_server.url)
    held = us.take()
    with busy(redis_server), pytest.raises(BackendUnavailable, match="BUSY"):
        us.watch(held)
    us.watch(held)
    assert us.backend._node.listener.refused == {}
    with redis.Redis(port=redis_server.port) as bare:
        bare.delete(LOCK)
    us.ear.hears("gone", held[0].id, TAKEN)


def test_a_server_that_was_busy_during_a_reconnect_pushes_later_losses(
    redis_server: RedisServer, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "multilock")
    with FaultProxy.before(redis_server.url) as proxy:
        us = connect(proxy.url)
        held = us.take()
        us.watch(held)
        with busy(redis_server):
            proxy.cut()
            eventually(lambda: "BUSY" in caplog.text, within=5)  # the client has requested a subscription again
        us.ear.hears("wake", None, within=6)
        assert us.backend._node.listener.refused == {}
        with redis.Redis(port=redis_server.port) as bare:
            bare.delete(LOCK)
        us.ear.hears("gone", held[0].id, TAKEN, within=5)
        us.close()


SUBSCRIBING = ("-client", "-subscribe")
TRACKING = ("-client", "+client|id", "+client|caching")


@pytest.mark.parametrize("rights", [SUBSCRIBING, TRACKING])
def test_a_refused_permission_is_used_once_a_later_subscription_is_allowed_it(
    server: RedisServer, bare: Bare, connect: Connect, rights: tuple[str, ...]
) -> None:
    since(bare, "6.2", "rights on channels")

    def allow(*commands: str) -> None:
        bare.execute_command("ACL", "SETUSER", "healed", "reset", "on", "nopass", "~*", "&*", "+@all", *commands)

    def cut() -> None:
        us.ear.heard.clear()
        bare.execute_command("CLIENT", "KILL", "USER", "healed")
        us.ear.hears("wake", None, within=5)  # subscribed again

    allow(*rights)
    us = connect(server.url.replace("redis://", "redis://healed:x@"))
    held = us.take()
    us.watch(held)
    refused = set(us.backend._node.listener.refused)
    cut()
    eventually(lambda: set(us.backend._node.listener.refused) == refused, within=5)
    assert len(us.ear.down) == len(refused) > 0
    allow()
    cut()
    eventually(lambda: us.backend._node.listener._tracked and us.backend._node.listener._tracked.alive, within=5)
    eventually(lambda: us.ear.down == {}, within=5)
    bare.delete(LOCK)
    us.ear.hears("gone", held[0].id, TAKEN)


def test_a_loss_during_an_outage_of_a_server_without_tracking_is_found_at_once(
    server: RedisServer, bare: Bare, connect: Connect
) -> None:
    since(bare, "6.2", "rights on subcommands")
    bare.execute_command("ACL", "SETUSER", "untracked", "reset", "on", "nopass", "~*", "&*", "+@all", *TRACKING)
    us = connect(server.url.replace("redis://", "redis://untracked:x@"))
    held = us.take()
    us.watch(held)
    assert "changes" in us.backend._node.listener.refused
    bare.delete(LOCK)
    bare.execute_command("CLIENT", "KILL", "USER", "untracked")
    us.ear.hears("gone", held[0].id, TAKEN, within=5)


def test_an_observed_name_is_reported_when_its_holder_changes_and_not_when_it_renews(us: Ours, them: Ours) -> None:
    assert us.backend.follow(frozenset({"a", "b"}), 1) is True
    us.ear.heard.clear()
    held = them.take()
    us.ear.hears("changed", "a")
    for _ in range(5):
        them.renew(held)
    them.release(held[0])
    us.ear.hears("changed", "a")
    assert us.ear.heard == []


def test_only_names_of_the_last_observation_are_reported(us: Ours, them: Ours) -> None:
    us.backend.follow(frozenset({"a", "b"}), 1)
    us.backend.follow(frozenset({"b"}), 1)
    us.ear.heard.clear()
    them.take(them.claim("a"))
    them.take(them.claim("b"))
    us.ear.hears("changed", "b")
    assert us.ear.heard == []
    assert us.backend.follow(frozenset(), 1) is True


def test_observers_and_holders_are_both_notified_of_a_handover(us: Ours, them: Ours, connect: Connect) -> None:
    watcher = connect()
    watcher.backend.follow(frozenset({"a"}), 1)
    held = us.take()
    us.watch(held)
    watcher.ear.hears("changed", "a")
    waiter = them.wait()
    us.release(held[0])
    watcher.ear.hears("changed", "a")
    info = watcher.backend.inspect("a", 1)
    assert info is not None
    assert info.owner == waiter.owner
    assert us.ear.heard == []


def test_the_cost_of_a_look_depends_only_on_its_own_names(us: Ours) -> None:
    held = us.take()
    us.watch(held)
    listener = us.backend._node.listener

    def cost(step: Callable[[], object]) -> float:
        """Return the least processor time that this thread needed in thirty runs of ``step``."""
        begun = [(time.thread_time(), step(), time.thread_time()) for _ in range(30)]
        return min(end - start for start, _, end in begun)

    steps = [lambda: listener._look(["a"], 1.0), lambda: us.renew(held)]
    alone = [cost(step) for step in steps]
    for number in range(20_000):
        listener._watched.add(f"reader {number}", "another", b"")
    for step, before in zip(steps, alone, strict=True):
        assert cost(step) < 4 * before


def test_removing_claims_skips_none_that_other_threads_add() -> None:
    """The last watched claim of a name is removed while another one is added. The entry of the name must then contain
    the new claim."""
    watched = Watched()

    def work(me: int) -> None:
        for turn in range(2_000):
            claim_id = f"{me} {turn}"
            watched.add(claim_id, "n", b"")
            assert claim_id in watched.of_name("n")
            assert watched.take(claim_id)

    often = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(work, range(4)))
    finally:
        sys.setswitchinterval(often)
    assert not watched
    assert watched.names() == set()


def test_ten_thousand_watched_locks_need_one_thread_and_three_connections(connect: Connect, bare: Bare) -> None:
    us = connect(within=30.0)
    before, threads = len(bare.client_list()), set(threading.enumerate())
    held = [us.take(us.claim(f"n{i}", ttl=60)) for i in range(10_000)]
    us.watch(*held)
    assert all(us.renew(*held))
    new = set(threading.enumerate()) - threads
    assert sum(thread.name.startswith("multilock-redis") for thread in new) == 1
    assert len(bare.client_list()) <= before + 3
    bare.delete("multilock/n5000")
    us.ear.hears("gone", held[5000][0].id, TAKEN, within=30.0)


def test_the_next_renewal_finds_what_a_full_tracking_table_dropped(connect: Connect) -> None:
    with RedisServer() as server, redis.Redis(port=server.port) as bare:
        bare.config_set("tracking-table-max-keys", 5)
        us = connect(server.url)
        held = [us.take(us.claim(f"n{number}")) for number in range(30)]
        us.watch(*held)
        eventually(lambda: bare.info("stats")["tracking_total_keys"] <= 5)
        bare.delete(*(f"multilock/{claim.name}" for claim, _ in held))
        assert us.renew(*held) == [None] * 30
