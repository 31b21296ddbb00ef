"""A Redis Cluster that is resharded, loses nodes, or is incomplete."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import redis
import valkey

import multilock
from multilock import BackendRejected, BackendUnavailable, Client, ConfigurationError, LossReason, now
from multilock_redis import open_backend
from tests.backends.redis.conftest import Connect
from tests.backends.redis.kit import Ours, eventually, holder_of
from tests.servers import RedisServer
from tests.servers_cluster import ClusterNode, RedisCluster

ROUNDS = 20


@pytest.fixture
def client(cluster: RedisCluster) -> Iterator[Client]:
    with multilock.connect(cluster.url, ttl=8) as client:
        yield client


@pytest.fixture
def other(cluster: RedisCluster) -> Iterator[Client]:
    with multilock.connect(cluster.url, ttl=8) as client:
        yield client


# ---- a slot moves back and forth


def test_a_held_lock_whose_slot_moves_back_and_forth_is_never_lost_nor_shared(
    client: Client, cluster: RedisCluster
) -> None:
    """Under contention no two holders overlap, and no loss is reported that did not happen."""
    here, there, _ = cluster.primaries()
    held, read, contended = names = list(islice(cluster.names_on(here), 3))
    slots = [cluster.slot_of(name) for name in names]
    lost: list[object] = []
    lease = client.lock(held, ttl=4, on_lost=lost.append).acquire()
    shared = client.read_write_lock(read, ttl=4, on_lost=lost.append).reader().acquire()
    over = threading.Event()
    inside = threading.Lock()
    overlaps: list[str] = []
    entered = [0] * 4

    def contend(number: int) -> None:
        with multilock.connect(cluster.url, ttl=4) as mine:
            lock = mine.lock(contended, fair=number % 2 == 0, on_lost=lost.append)
            while not over.is_set():
                with lock.acquire(timeout=30) as got:
                    if not inside.acquire(blocking=False):
                        overlaps.append(f"{number} at {now()}")
                        continue
                    entered[number] += got.is_held()
                    inside.release()

    contenders = [threading.Thread(target=contend, args=(number,)) for number in range(4)]
    for each in contenders:
        each.start()
    try:
        for number in range(ROUNDS):
            before = sum(entered)
            for slot in slots:
                cluster.migrate(slot, here if number % 2 else there)
            eventually(lambda before=before: sum(entered) > before, within=20)  # type: ignore[misc]
    finally:
        over.set()
        for each in contenders:
            each.join()
        for slot in slots:
            if cluster.owner(slot) is there:
                cluster.migrate(slot, here)
    assert overlaps == []
    assert lost == []
    lease.renew()
    shared.renew()
    assert lease.release()
    assert shared.release()


# ---- a shard's primary ends


def test_locks_work_again_when_the_replica_of_a_killed_primary_takes_over(
    client: Client, other: Client, cluster: RedisCluster
) -> None:
    primary = cluster.primaries()[0]
    names = cluster.names_on(primary)
    kept, waited_for = next(names), next(names)
    elsewhere = client.lock(cluster.name_on(cluster.primaries()[1])).acquire()
    lease, first = client.lock(kept).acquire(), client.lock(waited_for).acquire()
    waiting = threading.Thread(target=lambda: other.lock(waited_for).acquire(timeout=30).release())
    waiting.start()
    eventually(lambda: (info := other.inspect(waited_for)) and info.waiting == 1)
    replicated(primary)
    primary.kill()
    cluster.fail_over(primary)
    eventually(lambda: renewed(lease), within=20)
    assert first.release()
    waiting.join(30)
    assert not waiting.is_alive()
    assert lease.is_held()
    assert elsewhere.is_held()
    assert client.lock(next(names)).acquire(timeout=20)


def test_a_holder_is_notified_if_the_new_primary_lacks_its_lock(client: Client, cluster: RedisCluster) -> None:
    """The failover loses a lock that had not reached the replica. The client watches the key at the new primary, and so
    notices the loss without a renewal."""
    primary = cluster.primaries()[0]
    lost: list[multilock.Loss] = []
    told = threading.Event()

    def on_lost(loss: multilock.Loss) -> None:
        lost.append(loss)
        told.set()

    lease = client.lock(cluster.name_on(primary), ttl=60, renew=False, on_lost=on_lost).acquire()
    replicated(primary)
    replica = cluster.replica_of(primary)
    watched = threading.Event()
    watched.wait(0.5)  # a lock is watched 0.25 s after the grant
    primary.kill()
    cluster.fail_over(primary)
    replica.bare.flushall()
    assert told.wait(20)
    assert lost[0].reason is LossReason.TAKEN
    assert lost[0].confirmed
    assert not lease.is_held()


def test_a_release_that_a_failover_lost_is_repeated_at_the_new_primary(cluster: RedisCluster) -> None:
    primary = cluster.primaries()[0]
    name = cluster.name_on(primary)
    replica = cluster.replica_of(primary)
    with multilock.connect(cluster.url, ttl=60, request_timeout=1) as client:
        lease = client.lock(name).acquire()
        replicated(primary)
        with primary.paused():
            lease.release()
            assert not lease.is_held()
            replica.bare.execute_command("CLUSTER", "FAILOVER", "TAKEOVER")
            eventually(lambda: holder_of(replica.bare, name) is None, within=20)


def test_a_client_reaches_a_cluster_although_no_node_of_its_url_lives(connect: Connect, cluster: RedisCluster) -> None:
    """The client uses the nodes that the node of its URL has named."""
    first, second, _ = cluster.primaries()
    ours = connect(f"redis+cluster://{first.endpoint}")
    gone = cluster.name_on(first)
    held = ours.take(ours.claim(cluster.name_on(second)))
    first.kill()
    cluster.fail_over(first)
    eventually(lambda: answers(ours, gone), within=20)
    ours.be_patient(20)
    assert ours.renew(held) != [None]
    eventually(lambda: answers(ours, cluster.name_on(second, "m")), within=10)


def renewed(lease: multilock.Lease) -> bool:
    """Try a renewal. The other nodes learn of the new primary a moment later, so the renewal may fail at first."""
    try:
        lease.renew()
    except BackendUnavailable:
        return False
    return True


def replicated(primary: ClusterNode) -> None:
    assert primary.bare.wait(1, 5000) == 1


def answers(ours: Ours, name: str) -> bool:
    try:
        ours.backend.inspect(name, 2)
    except BackendUnavailable:
        return False
    return True


# ---- parts of the cluster are missing


@pytest.mark.parametrize("full", ["yes", "no"])
def test_a_slot_without_a_node_raises_backend_unavailable(connect: Connect, cluster: RedisCluster, full: str) -> None:
    primary, other, _ = cluster.primaries()
    name = cluster.name_on(primary)
    slot = cluster.slot_of(name)
    ours = connect(cluster.url)
    with uncovered(cluster, slot, full):
        with pytest.raises(BackendUnavailable) as caught:
            ours.take(ours.claim(name))
        assert not caught.value.unknown
        if full == "no":
            ours.take(ours.claim(cluster.name_on(other)))
        findings = {finding.code: finding for finding in ours.backend.diagnose(5)}
        assert findings["uncovered"].message.startswith("1 of 16384 slots")
        assert ("coverage" in findings) is (full == "yes")
    eventually(lambda: answers(ours, name), within=10)
    ours.be_patient(20)
    ours.take(ours.claim(name))


class uncovered:
    """A context manager: inside its block no node serves this slot."""

    def __init__(self, cluster: RedisCluster, slot: int, full: str) -> None:
        self._cluster, self._slot, self._full = cluster, slot, full
        self._owner = cluster.owner(slot)

    def __enter__(self) -> None:
        for node in self._cluster.members:
            node.bare.config_set("cluster-require-full-coverage", self._full)
            node.bare.execute_command("CLUSTER", "DELSLOTS", self._slot)

    def __exit__(self, *_: object) -> None:
        for node in self._cluster.members:
            node.bare.config_set("cluster-require-full-coverage", "yes")
        self._owner.bare.execute_command("CLUSTER", "ADDSLOTS", self._slot)
        self._owner.bare.execute_command("CLUSTER", "BUMPEPOCH")
        self._cluster.agree()


def test_a_cluster_without_a_reachable_node_counts_as_silence() -> None:
    backend = Ours("redis+cluster://127.0.0.1:1,127.0.0.1:2")
    for ask in (backend.take, lambda: backend.backend.ping(1), lambda: backend.backend.diagnose(1)):
        with pytest.raises(BackendUnavailable, match=r"127\.0\.0\.1:[12]") as caught:
            ask()
        assert not caught.value.unknown
    backend.close()


def test_a_server_outside_any_cluster_is_refused_with_the_remedy(server: RedisServer) -> None:
    ours = Ours(f"redis+cluster://{server.endpoint}")
    with pytest.raises(BackendRejected, match="give redis://"):
        ours.take()
    ours.close()


def test_a_cluster_grows_from_one_shard_to_two_and_shrinks_again() -> None:
    with RedisCluster(shards=1, replicas=False, idle=1) as cluster:
        old, new = cluster.members
        ours = Ours(cluster.url, ttl=5.0)
        held, more = ours.take(), ours.take(ours.claim("b"))
        assert "alone" in [finding.code for finding in ours.backend.diagnose(2)]
        cluster.migrate(cluster.slot_of("a"), new)
        renewed = ours.renew(held, more)
        assert [each.group for each in renewed] == [f"redis+cluster://{node.endpoint}/0" for node in (new, old)]
        assert sorted(info.name for info in ours.backend.inspect_all("", 2)) == ["a", "b"]
        cluster.migrate(cluster.slot_of("a"), old)
        new.kill()
        ours.be_patient(20)
        assert None not in ours.renew(held, more)
        assert sorted(info.name for info in ours.backend.inspect_all("", 2)) == ["a", "b"]
        assert ours.release(held[0])
        ours.close()


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("redis+cluster://h/1", {}, "database 0 only"),
        ("redis+cluster://h", {"db": 2}, "database 0 only"),
        ("redis+cluster://", {}, "h1:6379,h2:6379"),
        ("redis+cluster://h:x", {}, "not a node"),
        ("redis+cluster://h", {"ca": "ca.pem"}, "rediss\\+cluster://"),
        (
            "redis+cluster://",
            {"client": redis.Redis()},
            "takes a redis.RedisCluster or valkey.ValkeyCluster, not redis.client.Redis: give redis://",
        ),
        ("redis+cluster://h", {"prefix": "{a}"}, "prefix"),
    ],
)
def test_an_invalid_configuration_is_refused_before_any_request(
    url: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        open_backend(url, options)


def test_a_server_without_tls_is_reported_with_the_scheme_of_a_cluster(cluster: RedisCluster) -> None:
    ours = Ours(cluster.url.replace("redis", "rediss", 1))
    with pytest.raises(BackendUnavailable, match=r"write redis\+cluster:// in the URL"):
        ours.take()
    ours.close()


def test_passwords_are_not_shown() -> None:
    shown = repr(open_backend("redis+cluster://user:s3cret@h:7000,[::1]/0", {}))
    assert shown == "<ClusterBackend redis+cluster://h:7000,[::1]:6379>"


# ---- the whole cluster


@pytest.mark.parametrize("library", [redis.RedisCluster, valkey.ValkeyCluster])
def test_a_client_object_passed_to_connect_is_used_and_not_closed(cluster: RedisCluster, library: type[Any]) -> None:
    theirs = library(host="127.0.0.1", port=cluster.members[0].port)
    scheme = library.__name__.lower().replace("cluster", "+cluster")
    with multilock.connect(f"{scheme}://", client=theirs) as client, client.lock("a") as lease:
        assert theirs.get("multilock/a") == lease.owner.encode()
    assert theirs.ping()
    theirs.close()


def test_all_primaries_are_listed_pinged_and_diagnosed(connect: Connect, cluster: RedisCluster) -> None:
    ours = connect(cluster.url)
    names = [cluster.name_on(primary) for primary in cluster.primaries()]
    for name in names:
        ours.take(ours.claim(name))
    assert sorted(info.name for info in ours.backend.inspect_all("", 2)) == sorted(names)
    ours.backend.ping(2)
    findings = ours.backend.diagnose(2)
    assert {"failover", "coverage"} <= {finding.code for finding in findings}
    assert len(findings) == len(set(findings)), "what all say is said once"


def test_the_keys_are_those_that_other_programs_lock(connect: Connect, cluster: RedisCluster) -> None:
    ours = connect(cluster.url)
    claim, _ = ours.take()
    assert holder_of(cluster.owner(cluster.slot_of("a")).bare) == claim.owner
