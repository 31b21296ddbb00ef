"""``replicas=N``: a grant counts once N replicas have acknowledged it. If too few do, the client removes it from all
servers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NoReturn

import pytest
import redis

import multilock
from multilock import ConfigurationError
from multilock.errors import BackendRejected, BackendUnavailable
from multilock.model import Busy, Granted
from multilock_redis import open_backend
from multilock_redis.transport import Answer
from multilock_redis.wire import refusal
from tests.backends.redis.conftest import Connect
from tests.backends.redis.kit import Bare, Ours, eventually, holder_of, without
from tests.servers import RedisServer
from tests.servers_cluster import ClusterNode, RedisCluster
from tests.servers_sentinel import Guarded

WITHIN = 20.0


@pytest.fixture(scope="module")
def module_replica(package_server: RedisServer) -> Iterator[RedisServer]:
    with redis.Redis(port=package_server.port) as bare:
        bare.config_set("repl-diskless-sync-delay", 0)
    with RedisServer("--replicaof", "127.0.0.1", str(package_server.port)) as replica:
        yield replica


@pytest.fixture
def replica(module_replica: RedisServer, bare: Bare) -> RedisServer:
    def online() -> bool:
        facts = bare.info("replication")
        return bool(facts["connected_slaves"] == 1 and facts["slave0"]["state"] == "online")

    eventually(online, within=WITHIN)
    return module_replica


@pytest.fixture
def us(connect: Connect, replica: RedisServer) -> Ours:
    return connect(replicas=1, within=WITHIN)


@pytest.fixture
def them(connect: Connect, replica: RedisServer) -> Ours:
    return connect(replicas="1", within=WITHIN)


def left_of_it(bare: Bare) -> list[bytes]:
    """Return all keys except tokens and tombstones."""
    return [key for key in bare.keys("*") if not key.endswith(b":token") and b":gone:" not in key]


def test_a_grant_is_on_a_replica_when_it_is_returned(us: Ours, replica: RedisServer) -> None:
    with redis.Redis(port=replica.port) as other:
        for claim in (us.claim(), us.reader("r"), us.permit(2, "p")):
            us.take(claim)
            assert other.exists(f"multilock/{claim.name}") == 1


def test_a_lock_on_too_few_replicas_is_not_granted(us: Ours, replica: RedisServer, bare: Bare) -> None:
    us.take(us.claim("warm-up"))
    us.within = 1.0
    with replica.paused():
        for claim in (us.claim(), us.reader("r"), us.permit(2, "p")):
            with pytest.raises(BackendUnavailable, match="0 of the 1 replicas") as caught:
                us.attempt(claim)
            assert caught.value.unknown is True, "the claim may hold the lock, so the kernel cancels it"
            us.release(claim, unsure=True)
        assert left_of_it(bare) == [b"multilock/warm-up"]


def test_a_possibly_granted_request_never_counts_as_unsent(us: Ours, monkeypatch: pytest.MonkeyPatch) -> None:
    """The primary becomes unreachable between the grant and the wait for replicas. The primary keeps the lock, so the
    claim must be cancelled at the primary."""

    def refused(requests: object, within: float) -> NoReturn:
        raise BackendUnavailable("refused", unknown=False)

    us.release(us.take()[0])
    monkeypatch.setattr(us.backend._node.connections, "exchange", refused)
    with pytest.raises(BackendUnavailable) as caught:
        us.attempt(us.claim())
    assert caught.value.unknown is True


def test_a_grant_before_a_move_of_its_slot_may_still_exist(
    us: Ours, bare: Bare, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a cluster the slot moves together with the grant. So the node executes the acquire, and redirects only the
    second request, which waits for replicas."""

    def moved(requests: list[bytes], within: float) -> list[Answer]:
        return [(refusal("MOVED 1 h:1", "redis://h"), 0.0) for _ in requests]

    us.release(us.take()[0])
    monkeypatch.setattr(us.backend._node.connections, "exchange", moved)
    claim = us.claim()
    with pytest.raises(BackendUnavailable, match="MOVED") as caught:
        us.attempt(claim)
    assert caught.value.unknown is True
    assert holder_of(bare) == claim.owner


def test_a_client_whose_request_was_in_time_keeps_its_grant(us: Ours, replica: RedisServer) -> None:
    claim, _ = us.take()
    us.within = 1.0
    with replica.paused(), pytest.raises(BackendUnavailable):
        us.attempt(claim)
    us.within = WITHIN
    assert isinstance(us.attempt(claim), Granted)


def test_both_faces_release_a_lock_that_too_few_replicas_have(
    server: RedisServer, replica: RedisServer, bare: Bare
) -> None:
    options: dict[str, Any] = {"ttl": 20, "replicas": 1, "request_timeout": 1}

    async def main() -> None:
        async with multilock.connect_async(server.url, **options) as client:
            with pytest.raises(BackendUnavailable, match="0 of the 1 replicas"):
                await client.lock("b").acquire(timeout=0)
            eventually(lambda: not left_of_it(bare), within=WITHIN)

    with replica.paused(), multilock.connect(server.url, **options) as client:
        with pytest.raises(BackendUnavailable, match="0 of the 1 replicas"):
            client.lock("a").acquire(timeout=0)
        asyncio.run(main())
        eventually(lambda: not left_of_it(bare), within=WITHIN)
        assert len(bare.keys("{multilock/a}:gone:*")) == len(bare.keys("{multilock/b}:gone:*")) == 1


def test_a_handover_counts_once_the_replicas_have_it(us: Ours, them: Ours, replica: RedisServer, bare: Bare) -> None:
    held = us.take()
    waiter = them.wait()
    with replica.paused():
        us.release(held[0])
        them.ear.hears("wake", waiter.id)
        assert waiter.id not in them.ear.pushed, "the push is a hint"
        them.within = 1.0
        with pytest.raises(BackendUnavailable):
            them.attempt(waiter)
    assert holder_of(bare) == waiter.owner
    them.within = WITHIN
    them.take(waiter)
    assert isinstance(us.attempt(us.claim()), Busy)


def test_a_renewal_waits_for_replicas_if_configured(
    us: Ours, connect: Connect, replica: RedisServer, bare: Bare
) -> None:
    careful = connect(replicas=1, replicas_on_renew="true", within=WITHIN)
    held, lost, plain = careful.take(), careful.take(careful.claim("b")), us.take(us.claim("c"))
    assert all(careful.renew(held, lost))
    bare.delete("multilock/b")
    us.within = careful.within = 1.0
    with replica.paused():
        kept, gone = careful.renew(held, lost)
        assert isinstance(kept, BackendUnavailable)
        assert gone is None, "it is certain that the lock is lost"
        [renewed] = us.renew(plain)
        assert isinstance(renewed, Granted)


@pytest.mark.oracle
def test_a_client_that_may_not_use_wait_is_refused_and_leaves_nothing(
    server: RedisServer, bare: Bare, replica: RedisServer
) -> None:
    with (
        multilock.connect(without(bare, server, "wait"), replicas=1) as client,
        pytest.raises(BackendRejected, match="NOPERM"),
    ):
        client.lock("a").acquire()
    assert left_of_it(bare) == []


def test_a_late_refusal_of_an_earlier_attempt_releases_no_lock(
    us: Ours, bare: Bare, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller has given up the first attempt. A later attempt of the same claim has been granted."""
    claim = us.claim()

    def granted_meanwhile(requests: list[bytes], within: float) -> list[Answer]:
        monkeypatch.undo()
        us.take(claim)
        return [(refusal("NOPERM this user may not run 'wait'", "redis://h"), 0.0) for _ in requests]

    us.release(us.take()[0])
    monkeypatch.setattr(us.backend._node.connections, "exchange", granted_meanwhile)
    with pytest.raises(BackendRejected, match="NOPERM") as caught:
        us.attempt(claim)
    assert caught.value.unknown is True, "the claim may hold the lock, so the kernel cancels it"
    assert holder_of(bare) == claim.owner


# ---- on a cluster, and with Sentinels


def the_replicas_of(cluster: RedisCluster, name: str) -> tuple[Bare, ClusterNode]:
    """Return a plain client of the primary that keeps the name, and the replica of that primary."""
    primary = cluster.owner(cluster.slot_of(name))
    return primary.bare, cluster.replica_of(primary)


def at_replica(replica: ClusterNode, name: str) -> str | None:
    reading = replica.bare.pipeline(transaction=False)
    reading.execute_command("READONLY")
    owner = reading.get(f"multilock/{name}").execute()[1]
    return owner.decode() if owner else None


def test_on_a_cluster_the_replica_of_the_shard_has_the_grant(cluster: RedisCluster, connect: Connect) -> None:
    us = connect(cluster.url, replicas=1, within=WITHIN)
    for primary in cluster.primaries():
        claim, _ = us.take(us.claim(cluster.name_on(primary)))
        assert at_replica(cluster.replica_of(primary), claim.name) == claim.owner


def test_on_a_cluster_the_shard_of_the_lock_must_have_its_replicas(cluster: RedisCluster, connect: Connect) -> None:
    here, there, _ = (cluster.name_on(primary) for primary in cluster.primaries())
    us, greedy = (connect(cluster.url, replicas=wanted, within=2.0) for wanted in (1, 2))
    bare, replica = the_replicas_of(cluster, here)
    with replica.paused():
        claim = us.claim(here)
        with pytest.raises(BackendUnavailable, match="0 of the 1 replicas") as caught:
            us.attempt(claim)
        assert caught.value.unknown is True
        us.within = WITHIN
        us.release(claim, unsure=True)
        assert left_of_it(bare) == []
        us.take(us.claim(there))
    with pytest.raises(BackendUnavailable, match="1 of the 2 replicas"):
        greedy.attempt(greedy.claim(here))


def test_on_a_cluster_a_lock_on_too_few_replicas_is_released(cluster: RedisCluster) -> None:
    name = cluster.name_on(cluster.primaries()[0])
    bare, replica = the_replicas_of(cluster, name)
    with replica.paused(), multilock.connect(cluster.url, ttl=20, replicas=1, request_timeout=2) as client:
        with pytest.raises(BackendUnavailable, match="0 of the 1 replicas"):
            client.lock(name).acquire(timeout=0)
        eventually(lambda: not left_of_it(bare), within=WITHIN)
        assert len(bare.keys("*:gone:*")) == 1


def test_on_a_cluster_a_handover_counts_once_the_replicas_have_it(cluster: RedisCluster, connect: Connect) -> None:
    us, them = (connect(cluster.url, replicas=1, within=WITHIN) for _ in range(2))
    name = cluster.name_on(cluster.primaries()[0])
    bare, replica = the_replicas_of(cluster, name)
    held, _ = us.take(us.claim(name))
    waiter = them.wait(them.claim(name))
    with replica.paused():
        us.release(held)
        them.ear.hears("wake", waiter.id)
        assert holder_of(bare, name) == waiter.owner
        them.within = 2.0
        with pytest.raises(BackendUnavailable, match="0 of the 1 replicas"):
            them.attempt(waiter)
    them.within = WITHIN
    them.take(waiter)
    assert at_replica(replica, name) == waiter.owner


def test_on_a_cluster_a_renewal_waits_for_the_replicas_of_each_shard(cluster: RedisCluster, connect: Connect) -> None:
    us = connect(cluster.url, replicas=1, replicas_on_renew="true", within=WITHIN)
    here, there, _ = (us.take(us.claim(cluster.name_on(primary))) for primary in cluster.primaries())
    assert all(isinstance(each, Granted) for each in us.renew(here, there))
    _, replica = the_replicas_of(cluster, here[0].name)
    us.within = 2.0
    with replica.paused():
        silent, renewed = us.renew(here, there)
    assert isinstance(silent, BackendUnavailable)
    assert isinstance(renewed, Granted)


@pytest.mark.timeout(120)
def test_with_sentinels_a_lock_on_all_replicas_survives_a_failover(guarded: Guarded, connect: Connect) -> None:
    us, them = (connect(guarded.url, replicas=2, within=WITHIN) for _ in range(2))
    held = us.take()
    for replica in guarded.replicas():
        with redis.Redis(port=replica.port) as bare:
            assert holder_of(bare) == held[0].owner
    one_of_them = guarded.replicas()[0]
    us.within = 2.0
    with one_of_them.paused(), pytest.raises(BackendUnavailable, match="1 of the 2 replicas") as caught:
        us.attempt(us.claim("b"))
    assert caught.value.unknown is True
    us.within = WITHIN
    guarded.await_replicas(guarded.primary())
    guarded.failover()

    def renewed() -> bool:
        with suppress(BackendUnavailable):
            return isinstance(us.renew(held)[0], Granted)
        return False

    eventually(renewed, within=WITHIN)
    eventually(lambda: refused(them), within=WITHIN)


def refused(them: Ours) -> bool:
    with suppress(BackendUnavailable):
        return isinstance(them.attempt(them.claim()), Busy)
    return False


@pytest.mark.parametrize("url", ["redis://h", "redis+sentinel://h/name", "redis+cluster://h"])
def test_the_capabilities_state_that_replicas_are_not_a_consensus(url: str) -> None:
    plain, careful = (open_backend(url, {"replicas": wanted}).capabilities for wanted in (0, 2))
    assert not careful.survives_failover
    assert "not consensus" not in plain.fencing_scope
    assert "replicas=2 makes that rarer, and is not consensus" in careful.fencing_scope


def test_diagnose_compares_the_number_of_replicas(connect: Connect, replica: RedisServer) -> None:
    levels = []
    for wanted in (0, 1, 2):
        findings = {finding.code: finding for finding in connect(replicas=wanted).backend.diagnose(2)}
        levels.append(findings["replicas"].level if "replicas" in findings else None)
    assert levels == [None, None, "error"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replicas": "-1"}, "replicas must be the number"),
        ({"replicas": "two"}, "replicas must be the number"),
        ({"replicas": True}, "replicas must be the number"),
        ({"replicas_on_renew": "true"}, "needs replicas="),
        ({"replicas": 1, "replicas_on_renew": "perhaps"}, "must be true or false"),
    ],
)
def test_an_impossible_number_of_replicas_is_refused_at_once(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        open_backend("redis://h", options)
