"""The Redis servers of compose/cluster.yaml on a real engine: independent servers for Redlock, a server with a replica
and Sentinels, and a Redis Cluster."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis

import multilock
from tests.docker.project import Project, running
from tests.docker.smoke import WELL_WITHIN, Holder, each_grants

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

REDIS = [6381, 6382, 6383, 6384, 6385]
# The servers have just started, so a restart guard would delay the first lock.
REDLOCK = f"redlock://{','.join(f'127.0.0.1:{port}' for port in REDIS)}/0?restart_guard=0"
SENTINELS = [26379, 26380, 26381]
SENTINEL = f"redis+sentinel://{','.join(f'127.0.0.1:{port}' for port in SENTINELS)}/locks"
SHARDS = "redis+cluster://127.0.0.1:7001,127.0.0.1:7002,127.0.0.1:7003"
WAYS = {"redlock": REDLOCK, "sentinel": SENTINEL, "shards": SHARDS}
TTL = 6.0


@pytest.fixture(scope="module")
def project() -> Iterator[Project]:
    with running("cluster.yaml", "redis", "sentinel", "shards") as project:
        for url in WAYS.values():
            each_grants(url)
        for port in SENTINELS:
            until_it_can_fail_over(port)
        yield project


def until_it_can_fail_over(port: int) -> None:
    """Wait until the new Sentinel at ``port`` knows the other Sentinels, and a replica that follows its primary.

    A Sentinel asks the primary for its replicas every ten seconds. If it finds no good replica at a failover, it tries
    again minutes later.
    """
    until = time.monotonic() + WELL_WITHIN
    with redis.Redis(port=port) as guard:
        while not (
            guard.sentinel_master("locks")["num-other-sentinels"] == len(SENTINELS) - 1
            and any(replica["master-link-status"] == "ok" for replica in guard.sentinel_slaves("locks"))
        ):
            assert time.monotonic() < until
            time.sleep(0.05)


def test_every_service_is_healthy_and_reachable_only_from_this_machine(project: Project) -> None:
    project.is_healthy_and_local()


@pytest.mark.parametrize("port", REDIS)
def test_each_redis_is_a_separate_lock_server(project: Project, port: int) -> None:
    with multilock.connect(f"redis://127.0.0.1:{port}") as client, client.lock("alone").acquire(timeout=0):
        assert [info.name for info in client.inspect_all("alone")] == ["alone"]


def waits_until(client: multilock.Client, name: str) -> None:
    """Wait until another claim is in the queue of this lock."""
    until = time.monotonic() + WELL_WITHIN
    while (info := client.inspect(name)) is None or not info.waiting:
        assert time.monotonic() < until
        time.sleep(0.05)


def is_handed_over(holder: Holder, url: str) -> None:
    """Assert that a waiter gets the lock with a greater token when the holder releases it."""
    with multilock.connect(url, ttl=30) as other, ThreadPoolExecutor(1) as pool:
        assert other.lock(holder.name).try_acquire() is None
        waits = pool.submit(other.lock(holder.name).acquire, timeout=WELL_WITHIN)
        waits_until(other, holder.name)
        assert holder.lease.release()
        with waits.result() as lease:
            assert lease.fence() > (holder.lease.token or 0)


def test_redlock_continues_while_two_of_five_servers_are_paused(project: Project) -> None:
    with Holder(REDLOCK, 30.0) as holder, project.paused("redis1", "redis2"):
        holder.lease.renew()
        is_handed_over(holder, REDLOCK)


def test_redlock_continues_while_two_of_five_servers_are_killed_and_afterwards(project: Project) -> None:
    guarded = REDLOCK.replace("guard=0", "guard=30")
    with Holder(REDLOCK, 30.0) as holder:
        with project.killed("redis4", "redis5"):
            holder.lease.renew()
            is_handed_over(holder, REDLOCK)
        with multilock.connect(guarded) as client:
            assert "restarted" in {finding.code for finding in client.diagnose()}
            client.lock("after").acquire(timeout=WELL_WITHIN).release()


def test_a_holder_is_notified_in_time_of_a_lost_redlock_majority(project: Project) -> None:
    with Holder(REDLOCK, TTL) as holder:
        with project.paused("redis1", "redis2", "redis3"):
            holder.hears_in_time()
        holder.has_a_successor(REDLOCK)


def test_a_lock_survives_a_failover(project: Project) -> None:
    def named() -> object:
        with redis.Redis(port=SENTINELS[0], decode_responses=True) as guard:
            return guard.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", "locks")

    with Holder(f"{SENTINEL}?replicas=1", 30.0) as holder:
        former = named()
        with project.paused("primary"):
            until = time.monotonic() + WELL_WITHIN
            while named() == former:
                assert time.monotonic() < until
                time.sleep(0.05)
            renewed_after_failover(holder.lease)
            is_handed_over(holder, SENTINEL)


def renewed_after_failover(lease: multilock.Lease) -> None:
    """Renew the lease. A renewal gets no reply if the client switches to the new primary meanwhile."""
    until = time.monotonic() + WELL_WITHIN
    while True:
        try:
            return lease.renew()
        except multilock.BackendUnavailable:
            assert time.monotonic() < until


def test_a_frozen_shard_affects_only_its_own_names(project: Project) -> None:
    of_first, of_second, *of_third = "1", "3", "2", "6"
    with multilock.connect(SHARDS, ttl=60) as client:
        held, kept = client.lock(of_first).acquire(), client.lock(of_third[0]).acquire()
        with project.paused("shard3"):
            held.renew()
            client.lock(of_second).acquire(timeout=WELL_WITHIN).release()
            with pytest.raises(multilock.BackendUnavailable):
                client.lock(of_third[1]).try_acquire()
        each_grants(SHARDS, of_third[1])
        kept.renew()
    with Holder(SHARDS, 30.0) as holder:
        is_handed_over(holder, SHARDS)


def test_the_demo_runs_on_each_service(project: Project) -> None:
    url = REDLOCK.partition("?")[0]
    shown = subprocess.run(
        [sys.executable, "-m", "multilock", "demo", "--url", url],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
    assert "the terms rose" in shown.stdout
