"""A Redis Cluster: the primary of a name's slot keeps the name, even after the slot has moved to another primary."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest

from multilock import BackendUnavailable
from multilock.backend import Busy, Granted
from multilock.model import LossReason
from multilock_redis.slot_table import Address
from tests.backends.redis.conftest import Connect
from tests.backends.redis.kit import Ours, eventually
from tests.servers_cluster import ClusterNode, RedisCluster

TAKEN = LossReason.TAKEN


class Moving:
    """A name whose slot moves from one node to another."""

    def __init__(self, cluster: RedisCluster) -> None:
        self.cluster = cluster
        self.here, self.there, self.elsewhere = cluster.primaries()
        self.name = cluster.name_on(self.here)
        self.slot = cluster.slot_of(self.name)

    def whole(self) -> None:
        self.cluster.migrate(self.slot, self.there)

    def begin(self) -> None:
        self.cluster.begin_migration(self.slot, self.there)

    def keys(self) -> None:
        self.cluster.move_keys(self.slot, self.here, self.there)

    def end(self) -> None:
        self.cluster.end_migration(self.slot, self.here, self.there)

    def holder(self, node: ClusterNode) -> str | None:
        """Return the holder according to the key on this node, even if the node does not serve the slot yet."""
        pipeline = node.bare.pipeline(transaction=False)
        pipeline.execute_command("ASKING")
        owner = pipeline.get(f"multilock/{self.name}").execute()[1]
        return owner.decode() if owner else None


@pytest.fixture
def moving(cluster: RedisCluster) -> Iterator[Moving]:
    moving = Moving(cluster)
    yield moving
    for node in cluster.primaries():
        node.bare.execute_command("CLUSTER", "SETSLOT", moving.slot, "STABLE")
    if cluster.owner(moving.slot) is not moving.here:
        cluster.migrate(moving.slot, moving.here)


@pytest.fixture
def us(connect: Connect, cluster: RedisCluster) -> Ours:
    return connect(cluster.url)


@pytest.fixture
def them(connect: Connect, cluster: RedisCluster) -> Ours:
    return connect(cluster.url)


def slots_asked(cluster: RedisCluster) -> int:
    """Return how many requests for the table of slots all nodes have received, without those of this test."""
    said = [node.bare.info("commandstats") for node in cluster.members]
    # Before 7.0 the server counts all CLUSTER commands together, and the client sends a CLUSTER INFO with each CLUSTER
    # SLOTS.
    names = (("cmdstat_cluster|slots", 1), ("cmdstat_cluster", 2))
    return sum(stats.get(name, {}).get("calls", 0) // each for stats in said for name, each in names)


def test_all_keys_of_a_name_are_on_the_primary_of_its_slot(us: Ours, them: Ours, cluster: RedisCluster) -> None:
    for primary in cluster.primaries():
        name = cluster.name_on(primary)
        held = us.take(us.claim(name))
        them.wait(them.claim(name))
        reader = us.take(us.reader(cluster.name_on(primary, "r")))
        us.release(us.claim(name), unsure=True)
        assert len(primary.bare.keys("*")) == 8, "lock, queue, live, token, tombstone; lock, token, holders"
        assert us.renew(held, reader) != [None, None]


@pytest.mark.parametrize("kind", ["lock", "read"])
def test_each_request_follows_a_moved_slot(us: Ours, moving: Moving, kind: str) -> None:
    claim, granted = us.take(us.claim(moving.name, kind=kind))
    moving.whole()
    [renewed] = us.renew((claim, granted))
    assert renewed.group != granted.group, "the lease is renewed with those of the new node"
    moving.cluster.migrate(moving.slot, moving.here)
    assert us.attempt(claim).token >= granted.token
    moving.whole()
    info = us.backend.inspect(moving.name, 2)
    assert info
    assert info.owner == claim.owner
    moving.cluster.migrate(moving.slot, moving.here)
    assert us.backend.rest(claim, granted, False, 60.0, 2).ours
    moving.whole()
    assert us.backend.force_release(moving.name, 2)
    again, _ = us.take(us.claim(moving.name, kind=kind))
    moving.cluster.migrate(moving.slot, moving.here)
    assert us.release(again)


def test_a_waiter_follows_a_moved_slot_and_subscribes_there(us: Ours, them: Ours, moving: Moving) -> None:
    held, _ = us.take(us.claim(moving.name))
    waiting = them.wait(them.claim(moving.name))
    moving.whole()
    them.wait(waiting)  # the second attempt of the waiter is a heartbeat
    us.release(held)
    them.ear.hears("wake", waiting.id)
    granted = them.attempt(waiting, join=True)
    assert granted.group == f"redis+cluster://{moving.there.endpoint}/0"


def test_many_redirections_at_once_cause_one_request_for_the_table(us: Ours, cluster: RedisCluster) -> None:
    here, there, _ = cluster.primaries()
    names = list(islice(cluster.names_on(here), 5))
    moved = [cluster.slot_of(name) for name in names]
    held = [us.take(us.claim(name)) for name in names]
    try:
        for slot in moved:
            cluster.migrate(slot, there)
        before = slots_asked(cluster)
        assert None not in us.renew(*held)
        assert all(us.release(claim) for claim, _ in held)
        assert slots_asked(cluster) - before <= 1
        eventually(lambda: us.release(held[0][0]) or slots_asked(cluster) > before)
        us.renew(*held)
        assert slots_asked(cluster) - before == 1
    finally:
        for slot in moved:
            cluster.migrate(slot, here)


# ---- while a slot is being moved


@pytest.mark.parametrize("kind", ["lock", "read"])
def test_a_held_lock_is_renewed_at_every_step_of_a_move(us: Ours, moving: Moving, kind: str) -> None:
    held = us.take(us.claim(moving.name, kind=kind))
    for step in (moving.begin, moving.keys, moving.end):
        step()
        [renewed] = us.renew(held)
        assert isinstance(renewed, Granted), (step, renewed)


@pytest.mark.parametrize("moved", [False, True])
def test_a_request_for_a_missing_key_counts_as_silence_until_the_move_ends(
    us: Ours, moving: Moving, moved: bool
) -> None:
    held, granted = us.take(us.claim(moving.name))
    moving.begin()
    if moved:
        moving.keys()
    asks: list[Callable[[], object]] = [
        lambda: us.attempt(us.claim(moving.name)),
        lambda: us.attempt(us.claim(moving.name), join=True),
        lambda: us.release(held),
        lambda: us.backend.rest(held, granted, False, 5.0, 2),
        lambda: us.backend.inspect(moving.name, 2),
        lambda: us.backend.force_release(moving.name, 2),
    ]
    for ask in asks:
        with pytest.raises(BackendUnavailable, match="TRYAGAIN") as caught:
            ask()
        assert not caught.value.unknown, "the request was certainly not executed"
    assert moving.holder(moving.there if moved else moving.here) == held.owner
    if not moved:
        moving.keys()
    moving.end()
    assert us.release(held)
    assert isinstance(us.attempt(us.claim(moving.name)), Granted)


def test_a_request_whose_keys_have_all_moved_is_answered_by_the_new_node(us: Ours, them: Ours, moving: Moving) -> None:
    """A node refuses an acquire only if one of its six keys is missing. So the test creates all six: lock, holders,
    queue, live, token and tombstone."""
    us.take(us.reader(moving.name))
    them.wait(them.claim(moving.name))
    late = us.reader(moving.name)
    us.release(late, unsure=True)  # this makes the tombstone, the last of the six keys
    moving.begin()
    moving.keys()
    assert isinstance(us.attempt(late), Busy)


def test_a_waiter_whose_place_was_moved_is_overtaken_only_until_its_heartbeat(
    us: Ours, them: Ours, moving: Moving
) -> None:
    """The waiter has not subscribed at the new node yet, so no script hands the name to it there. But it keeps its
    place."""
    held, _ = us.take(us.claim(moving.name))
    waiting = them.wait(them.claim(moving.name))
    moving.whole()
    us.release(held)
    assert moving.holder(moving.there) is None
    later, _ = us.take(us.claim(moving.name))  # a new claim may get the name until the waiter has subscribed
    assert isinstance(them.attempt(waiting, join=True), Busy)
    us.release(later)
    them.ear.hears("wake", waiting.id)
    assert isinstance(them.attempt(waiting, join=True), Granted)


def test_a_push_is_only_a_hint_because_every_node_forwards_it(us: Ours, them: Ours, moving: Moving) -> None:
    """The waiter's deadline comes from the clock of one node, and after the move another node hands the name over. The
    nodes forward the notification to each other, so it reaches subscribers at both."""
    held, _ = us.take(us.claim(moving.name))
    waiting = them.wait(them.claim(moving.name))
    other = moving.cluster.name_on(moving.there)
    us.take(us.claim(other))
    them.wait(them.claim(other))  # so that the waiter subscribes there too
    moving.whole()
    us.release(held)
    them.ear.hears("wake", waiting.id)
    assert moving.holder(moving.there) == waiting.owner
    assert waiting.id not in them.ear.pushed
    assert isinstance(them.attempt(waiting, join=True), Granted)


# ---- losses, and watches that move


def test_after_a_move_only_a_deletion_at_the_new_node_is_a_loss(us: Ours, moving: Moving) -> None:
    held = us.take(us.claim(moving.name))
    us.watch(held)
    moving.begin()
    moving.keys()  # the old node reports that its key is gone
    moving.end()
    witness = us.take(us.claim(moving.cluster.name_on(moving.here, "w")))
    us.watch(witness)
    moving.here.bare.delete(f"multilock/{witness[0].name}")
    us.ear.hears("gone", witness[0].id, TAKEN)  # all earlier notifications were handled before this one
    assert us.ear.heard == []
    # The client watches the lock at the new node as soon as it knows of the move, without a renewal.
    eventually(lambda: held[0].id in listener_at(us, moving.there)._watched, within=10)
    moving.there.bare.delete(f"multilock/{moving.name}")
    us.ear.hears("gone", held[0].id, TAKEN)


def test_a_lock_released_during_its_move_is_not_watched_at_the_new_node(us: Ours, moving: Moving) -> None:
    held = us.take(us.claim(moving.name))
    us.watch(held)
    moving.whole()
    assert us.release(held[0])
    witness = us.take(us.claim(moving.name))
    us.watch(witness)
    moving.there.bare.delete(f"multilock/{moving.name}")
    us.ear.hears("gone", witness[0].id, TAKEN)
    assert ("gone", held[0].id, TAKEN) not in us.ear.heard


def test_an_observed_name_is_followed_to_its_new_node(us: Ours, them: Ours, moving: Moving) -> None:
    names = frozenset({moving.name, moving.cluster.name_on(moving.elsewhere)})
    assert us.backend.follow(names, 2)
    held, _ = them.take(them.claim(moving.name))
    us.ear.hears("changed", moving.name)
    moving.whole()
    eventually(lambda: moving.name in listener_at(us, moving.there)._followed, within=10)
    us.ear.heard.clear()
    them.release(held)
    us.ear.hears("changed", moving.name)


def listener_at(us: Ours, node: ClusterNode) -> Any:
    backend: Any = us.backend
    return backend._cluster_map.node(Address(node.host, node.port)).listener
