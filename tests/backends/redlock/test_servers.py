"""Clients of servers that die, restart without data, are slow, or are down for long."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import redis

import multilock
from multilock import BackendUnavailable, CapabilityMissing, Client, now
from multilock.names import escape
from multilock.testing import FaultProxy
from multilock.testing.conformance.base import Pulse, Recorder, by_the_clock, queued
from multilock.testing.conformance.faces import background
from tests.backends.redis.kit import eventually
from tests.backends.redlock.kit import Contender, holders
from tests.servers_redlock import RedisServers, url_of

NAME = "orders/42"
Contend = Callable[..., Contender]


@pytest.fixture(scope="module")
def five_for_all() -> Iterator[RedisServers]:
    with RedisServers(5) as servers:
        yield servers


@pytest.fixture
def five(five_for_all: RedisServers) -> RedisServers:
    """Return five servers that all run and have no data."""
    for member in five_for_all.members:
        if not member.alive:
            member.start()
        with redis.Redis(port=member.port) as bare:
            bare.flushall()
    return five_for_all


@pytest.fixture
def three(five: RedisServers) -> RedisServers:
    some = RedisServers(0)
    some.members = five.members[:3]
    return some


@pytest.fixture
def client(five: RedisServers) -> Iterator[Client]:
    with multilock.connect(five.url, ttl=30) as client:
        yield client


def test_locks_continue_to_work_when_two_of_five_servers_are_killed(five: RedisServers, client: Client) -> None:
    def all_have_it() -> bool:
        lease.renew()  # the client waits a moment before it asks the server again
        return all(holders(five, escape(NAME)))

    with client.lock(NAME) as lease:
        eventually(all_have_it, within=10)
        for member in five.members[:2]:
            member.kill()
        lease.renew()
        first = lease.fence()
    with client.lock(NAME) as lease:
        assert lease.fence() > first
        lease.renew()


def test_a_lock_is_lost_with_three_of_five_servers_and_a_waiter_continues_afterwards(
    five: RedisServers,
) -> None:
    losses: Recorder[multilock.Loss] = Recorder()
    with (
        multilock.connect(five.url, ttl=6) as holder,
        multilock.connect(five.url, ttl=6, outage_timeout=None) as waiter,
    ):
        lease = holder.lock(NAME, on_lost=losses).acquire()
        waiting = background(lambda: waiter.lock(NAME).acquire())
        eventually(lambda: queued(holder, NAME) == 1, within=10)
        with Pulse() as pulse:
            for member in five.members[:3]:
                member.kill()
            loss = losses.wait(within=30)
            assert losses.times[0] < loss.valid_until + pulse.stopped()
            assert by_the_clock(loss)
        assert not lease.is_held()
        with pytest.raises(BackendUnavailable):
            holder.lock(NAME).try_acquire()
        assert not waiting.done()
        five.members[0].start()
        with waiting.result(30) as following:
            assert following.is_held()
            following.renew()
            assert following.fence() > (lease.token or 0)


@pytest.mark.parametrize("guard", [0.0, 60.0])
def test_a_server_that_lost_its_data_counts_only_after_its_former_grants_ended(
    contend: Contend, three: RedisServers, guard: float
) -> None:
    us, them = contend(three, ttl=60.0), contend(three, guard=guard, ttl=60.0)
    for endpoint in them.backend._endpoints[::2]:
        endpoint.guard = 0.0  # let the votes of these servers count at once
    us.cut_off(2)
    ours, granted = us.take(us.claim(ttl=60.0))
    three.members[1].restart()
    claim = them.claim(ttl=60.0)
    if not guard:  # without the restart guard, both clients now believe that they hold the lock
        them.connect()
        them.take(claim)
        assert granted.sent_at + granted.valid_for > now()
        return
    assert them.attempt(claim, join=True).spent is False
    assert holders(three)[0] == ours.id
    [renewed] = them.renew((claim, granted))
    assert not isinstance(renewed, multilock.backend.Granted)
    assert "restarted" in [finding.code for finding in them.backend.diagnose(5.0)]


def test_a_slow_server_delays_no_client(three: RedisServers) -> None:
    with FaultProxy.before(three.members[2].url) as proxy:
        proxy.delay(4.0)
        places = [member.endpoint for member in three.members[:2]]
        with multilock.connect(url_of([*places, f"{proxy.host}:{proxy.port}"]), ttl=60) as client:
            for _ in range(3):
                began = now()
                client.lock(NAME).acquire().release()
                assert now() - began < 4.0


def test_an_absent_server_builds_up_no_backlog_and_no_warnings(
    three: RedisServers, caplog: pytest.LogCaptureFixture
) -> None:
    three.members[0].kill()
    with caplog.at_level(logging.WARNING, "multilock"), multilock.connect(three.url, ttl=30) as client:
        for _ in range(100):
            client.lock(NAME).acquire().release()
        eventually(lambda: not client._kernel.cancels._open, within=10)
        eventually(lambda: not client._kernel.backend.rounds.claims, within=10)  # type: ignore[attr-defined]
    assert not caplog.records


def test_waiters_are_served_in_the_order_of_their_calls(five: RedisServers) -> None:
    def queued(many: int) -> bool:
        info = holder.inspect(NAME)
        return info is not None and info.waiting == many

    served: list[int] = []
    clients = [multilock.connect(five.url, ttl=30) for _ in range(4)]
    holder = multilock.connect(five.url, ttl=30)

    def wait(n: int) -> None:
        with clients[n].lock(NAME, fair=True):
            served.append(n)

    try:
        with ThreadPoolExecutor(4) as pool, holder.lock(NAME):
            for n in range(4):
                pool.submit(wait, n)
                eventually(partial(queued, n + 1), within=20)
        assert served == [0, 1, 2, 3]
    finally:
        for client in [*clients, holder]:
            client.close()


def test_readers_and_permits_are_refused(client: Client) -> None:
    with pytest.raises(CapabilityMissing, match="no server knows both"):
        client.read_write_lock(NAME)
    with pytest.raises(CapabilityMissing, match="no server knows both"):
        client.semaphore(NAME, 3)


def test_a_redis_py_lock_on_a_majority_excludes_ours(five: RedisServers, client: Client) -> None:
    for member in five.members[:3]:
        with redis.Redis(port=member.port) as bare:
            bare.set("multilock/theirs", "them", px=60_000)
    assert client.lock("theirs").try_acquire() is None


def test_inspect_waits_only_a_moment_for_a_frozen_server(three: RedisServers) -> None:
    with multilock.connect(three.url, ttl=30) as client:
        client.lock(NAME).acquire()
        three.members[2].pause()
        try:
            began = now()
            assert [info.name for info in client.inspect_all()] == [NAME]
            assert client.force_release(NAME)
            assert now() - began < 8.0  # each request may take five seconds
        finally:
            three.members[2].resume()


def test_changes_are_pushed_once_a_server_is_back(three: RedisServers, monkeypatch: pytest.MonkeyPatch) -> None:
    three.members[2].kill()
    with multilock.connect(three.url, ttl=30) as client:
        followers, backend = client._kernel.followers, client._kernel.backend
        follow, ended = backend.follow, threading.Event()

        def noted(names: frozenset[str], within: float) -> bool:
            try:
                return follow(names, within)
            finally:
                ended.set()

        monkeypatch.setattr(backend, "follow", noted)
        client.election(NAME, on_leader_changed=lambda leader: None).start()
        assert ended.wait(20)
        three.members[2].start()
        eventually(lambda: NAME in followers._pushed, within=20)


def test_a_refused_login_is_logged_once_and_reported_by_diagnose(
    three: RedisServers, caplog: pytest.LogCaptureFixture
) -> None:
    with redis.Redis(port=three.members[2].port) as bare:
        bare.config_set("requirepass", "of-others")
        try:
            with (
                caplog.at_level(logging.WARNING, "multilock"),
                multilock.connect(three.url, ttl=30, restart_guard=0) as client,
            ):
                before: Any = bare.info("stats")
                for _ in range(50):
                    client.lock(NAME).acquire().release()
                after: Any = bare.info("stats")
                codes = [finding.code for finding in client.diagnose()]
        finally:
            bare.config_set("requirepass", "")
    told = [each for each in caplog.records if "locks are taken without this server" in each.getMessage()]
    assert len(told) == 1
    assert "refused" in codes
    assert after["total_connections_received"] - before["total_connections_received"] < 25
