"""The client of a cluster chooses which nodes it asks for the table of slots, and which replies count. No cluster is
needed."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import pytest
import redis
from redis import Connection

from multilock import BackendRejected, BackendUnavailable, MultilockError, now
from multilock.backend import Claim, Granted, Held
from multilock_redis.cluster import ClusterBackend
from multilock_redis.cluster_map import ClusterMap
from multilock_redis.keys import Keyspace
from multilock_redis.slot_table import SLOTS, Address, SlotTable, key_slot
from multilock_redis.transport import Endpoint
from multilock_redis.wire import Redirected, pack
from tests.backends.redis.kit import Ear, eventually, holder_of
from tests.servers import RedisServer

A, B, C, SEED = (Address("10.0.0.1", port) for port in (7000, 7001, 7002, 6379))
HALF = SLOTS // 2
SILENCE = BackendUnavailable("silent", unknown=False)
REFUSAL = BackendRejected("refused", backend="redis")
WITHIN = 5.0


def table(*primaries: Address, replicas: Sequence[Address] = ()) -> SlotTable:
    """Return a table in which each primary serves a part of the slots."""
    owners: list[Address | None] = [primaries[slot * len(primaries) // SLOTS] for slot in range(SLOTS)]
    return SlotTable(owners, {primaries[0]: list(replicas)})


class Nodes:
    """The nodes of a cluster, with the reply of each to a request for the table of slots. A node without an entry does
    not reply."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *seeds: Address) -> None:
        self.say: dict[Address, Any] = {}
        self.epochs: dict[Address, int] = {}
        self.asked: list[tuple[Address, float]] = []
        keys, capabilities = Keyspace("multilock/", key_slot), cast("Any", None)
        self.backend = ClusterBackend("redis+cluster", seeds, self.endpoint_at, keys, capabilities)
        self.backend.open(Ear())
        self.cluster_map: ClusterMap = self.backend._cluster_map
        self.servers: dict[Address, int] = {}

        def exchange(address: Address, within: float) -> Any:
            self.asked.append((address, within))
            said = self.say.get(address, SILENCE)
            if isinstance(said, MultilockError):
                raise said
            return said, b"cluster_state:ok\r\ncluster_current_epoch:%d\r\n" % self.epochs.get(address, 1)

        monkeypatch.setattr(self.cluster_map, "_said_by", exchange)

    def endpoint_at(self, address: Address) -> Endpoint:
        return Endpoint(f"redis://{address}/0", Connection, {"host": "127.0.0.1", "port": self.servers[address]})

    def look(self) -> list[Address]:
        """Make the client doubt its table of slots, and return the nodes that it then asks."""
        self.asked.clear()
        self.cluster_map.forget()
        self.cluster_map.table(WITHIN)
        return [address for address, _ in self.asked]


def lines(*primaries: Address) -> list[Any]:
    """Return a reply to ``CLUSTER SLOTS``."""
    size = SLOTS // len(primaries)
    return [[i * size, i * size + size - 1, [each.host.encode(), each.port]] for i, each in enumerate(primaries)]


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    nodes = Nodes(monkeypatch, SEED)
    nodes.say = dict.fromkeys((A, B), lines(A, B))
    nodes.say[SEED] = lines(A, B)
    nodes.cluster_map.table(WITHIN)
    yield nodes
    nodes.backend.close()


def test_an_empty_slot_table_counts_as_silence(nodes: Nodes) -> None:
    """A node that was reset, or restarted without data, knows no other node. The client keeps its old table."""
    nodes.say[A] = []
    for _ in range(3):
        nodes.look()
        assert nodes.cluster_map.table(WITHIN).primaries == (A, B)
    nodes.say = {SEED: []}
    nodes.cluster_map._table = None
    with pytest.raises(BackendUnavailable, match="knows no node that serves a slot"):
        nodes.cluster_map.table(WITHIN)


def test_the_addresses_of_the_url_are_asked_after_the_learnt_ones(nodes: Nodes) -> None:
    """An address of the URL may belong to another cluster by now, so its reply counts only if no other node replies."""
    nodes.say[SEED] = lines(C)
    for _ in range(6):
        nodes.look()
        assert nodes.cluster_map.table(WITHIN).primaries == (A, B)
    silent = nodes.say.pop(A), nodes.say.pop(B)
    nodes.cluster_map._silent |= {A, B}
    nodes.say[A] = silent[0]
    assert SEED not in nodes.look()
    del nodes.say[A]
    assert nodes.look()[-1] == SEED
    assert nodes.cluster_map.table(WITHIN).primaries == (C,)


def test_an_isolated_node_does_not_lead_back_to_a_former_primary(nodes: Nodes) -> None:
    nodes.say = {A: lines(A, B), B: lines(C, B), C: lines(C, B), SEED: lines(A, B)}
    nodes.epochs = {B: 2, C: 2}
    nodes.cluster_map.redirected(B, Redirected("", f"MOVED 0 {C}"))
    nodes.look()
    assert nodes.cluster_map.table(WITHIN).primaries == (C, B)
    for first in (A, SEED, B):
        nodes.cluster_map._told = first
        nodes.look()
        assert nodes.cluster_map.table(WITHIN).primaries == (C, B)
    del nodes.say[B], nodes.say[C]
    nodes.look()
    assert nodes.cluster_map.table(WITHIN).primaries == (C, B), "the isolated nodes are not a majority"


def test_a_new_primary_that_was_silent_before_is_asked_first(nodes: Nodes) -> None:
    """A node that the failover has not reached yet replies with the old table, whose epoch the client knows."""
    nodes.say[C], nodes.epochs[C] = lines(C, B), 2
    nodes.cluster_map.doubt(C)
    nodes.cluster_map.redirected(B, Redirected("", f"MOVED 0 {C}"))
    assert nodes.look() == [C]


def test_a_recreated_cluster_with_lower_epochs_is_followed(nodes: Nodes) -> None:
    nodes.epochs = dict.fromkeys((A, B, SEED), 7)
    nodes.look()
    nodes.epochs.clear()
    nodes.say = dict.fromkeys((A, B, C, SEED), lines(B, C))
    nodes.look()
    assert nodes.cluster_map.table(WITHIN).primaries == (B, C)


def test_many_silent_nodes_leave_time_for_the_others(nodes: Nodes) -> None:
    """A node without a reply may use only a part of the remaining time. No time passes in this test, so the remaining
    time does not change."""
    replicas = [Address("10.0.0.2", port) for port in range(7000, 7009)]
    nodes.cluster_map._table = table(A, B, replicas=replicas)
    nodes.say = {SEED: lines(C)}
    nodes.cluster_map._silent |= {A, B, *replicas}
    nodes.look()
    assert all(0.1 <= within <= WITHIN for _, within in nodes.asked), nodes.asked


def test_a_removed_node_is_not_remembered_as_silent(nodes: Nodes) -> None:
    nodes.cluster_map.doubt(C)
    nodes.look()
    assert nodes.cluster_map._silent == set()


@pytest.mark.parametrize("order", [(SILENCE, REFUSAL), (REFUSAL, SILENCE)])
def test_a_node_that_refuses_is_not_confused_with_silent_nodes(
    monkeypatch: pytest.MonkeyPatch, order: tuple[MultilockError, MultilockError]
) -> None:
    nodes = Nodes(monkeypatch, A, B)
    nodes.say = dict(zip((A, B), order, strict=True))
    with pytest.raises(BackendUnavailable, match="refused"):
        nodes.cluster_map.table(WITHIN)
    nodes.say = {A: REFUSAL, B: REFUSAL}
    with pytest.raises(BackendRejected):
        nodes.cluster_map.table(WITHIN)


@pytest.fixture
def hanging() -> Iterator[socket.socket]:
    """Start a server that never replies."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def test_a_late_reply_of_a_former_primary_does_not_count(nodes: Nodes, hanging: socket.socket) -> None:
    """When a new table names another primary, the pending request fails, and its late reply does not count."""
    nodes.servers[A] = hanging.getsockname()[1]
    ended: list[BackendUnavailable] = []

    def ask() -> None:
        try:
            nodes.cluster_map.node(A).connections.call(pack("PING"), 60)
        except BackendUnavailable as error:
            ended.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    it, _ = hanging.accept()
    with it:
        it.recv(100)
        nodes.say = {B: lines(B)}
        nodes.look()
        asking.join(10)
        assert not asking.is_alive()
    assert [error.unknown for error in ended] == [True], "it may have been executed"


def test_an_unread_reply_of_a_former_primary_does_not_count_either(hanging: socket.socket) -> None:
    """The primary was replaced after the reply arrived and before the client read it."""
    endpoint = Endpoint("redis://h", Connection, {"host": "127.0.0.1", "port": hanging.getsockname()[1]})
    wire = endpoint.connect(WITHIN, now)
    it, _ = hanging.accept()
    with it:
        assert wire.begin(pack("PING"))
        it.sendall(b":1\r\n")
        eventually(wire.stale, within=WITHIN)
        endpoint.interrupt()
        with pytest.raises(BackendUnavailable) as caught:
            wire.finish()
    assert caught.value.unknown is True


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("step", ["owner", "node"])
def test_a_client_that_left_a_former_primary_no_longer_asks_it(
    nodes: Nodes,
    monkeypatch: pytest.MonkeyPatch,
    redis_server: RedisServer,
    server: RedisServer,
    step: str,
    watched: bool,
) -> None:
    """The table changes after the client has chosen the node, and before it connects. The former primary does not know
    this, and would grant the lock."""
    nodes.servers = {A: redis_server.port, B: server.port}
    if watched:
        nodes.cluster_map.node(A).listener._watched.add("claim", "other", b"")
    take = getattr(nodes.cluster_map, step)

    def taken(*about: Any) -> Any:
        it = take(*about)
        if A in nodes.cluster_map.table(WITHIN).primaries:
            nodes.say = {B: lines(B)}
            nodes.look()
        return it

    monkeypatch.setattr(nodes.cluster_map, step, taken)
    claim = Claim(name_on(A), "lock", "id", "owner", 6.0, True, True, "me", 0)
    assert isinstance(nodes.backend.attempt(claim, False, WITHIN), Granted)
    held_at = []
    for each in (redis_server, server):
        with redis.Redis(port=each.port) as bare:
            held_at.append(holder_of(bare, claim.name))
    assert held_at == [None, "owner"]


def test_one_node_that_hangs_delays_no_watch_on_other_nodes(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Watched names have moved from one node to two others, one of which hangs. The healthy node gets the watches of
    its names, and the client retries those of the node that hangs. Each of the two nodes hangs once."""
    to = {"first": B, "second": C}
    owners: list[Address | None] = [A] * SLOTS
    for name, owner in to.items():
        owners[key_slot(f"multilock/{name}".encode())] = owner
    nodes.servers = dict.fromkeys((A, B, C), 1)
    nodes.cluster_map._table = SlotTable(owners, {})
    nodes.cluster_map._looked_at = nodes.cluster_map._now()
    node = nodes.cluster_map.node(A)
    for hung, other in (("first", "second"), ("second", "first")):
        for name in to:
            node.listener._watched.add(f"claim-{name}", name, b"")
        nodes.backend._wanted = {f"claim-{name}" for name in to}
        for name, owner in to.items():
            listener = nodes.cluster_map.node(owner).listener
            monkeypatch.setattr(listener, "listen", silent if name == hung else answers)
            monkeypatch.setattr(listener, "_look", answers)
        monkeypatch.setattr(nodes.cluster_map, "table", lambda within: nodes.cluster_map._table)
        assert nodes.backend._hand_on(A, node, set(to)) == {hung}
        assert node.listener._watched.names() == {hung}
        assert f"claim-{other}" in nodes.cluster_map.node(to[other]).listener._watched


# ---- renewals


class Renewing:
    """Two leases in the group of node A. The second lease has just moved to node B."""

    def __init__(self, nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
        nodes.servers = dict.fromkeys((A, B), 1)
        self.backend, self.asked = nodes.backend, list[tuple[Address, float]]()
        self.group = f"redis://{A}/0"
        self.held = {address: self._held(name) for address, name in ((B, name_on(B)), (A, name_on(A)))}
        self.say: dict[Address, Callable[[], object]] = {A: answers, B: answers}
        for address in (A, B):
            renew = partial(self._renew, address)
            monkeypatch.setattr(nodes.cluster_map.node(address), "renew", renew)

    def _held(self, name: str) -> Held:
        claim = Claim(name, "lock", "id", "owner", 6.0, True, True, "me", 0)
        return claim, Granted(1, 6.0, 0.0, 6.0, 2.0, self.group, "owner")

    def _renew(self, address: Address, held: Sequence[Held], within: float) -> list[Granted]:
        self.asked.append((address, within))
        self.say[address]()
        return [granted for _, granted in held]

    def __call__(self, *of: Address) -> list[object]:
        """Renew the leases of these nodes, and return the results."""
        return list(self.backend.renew(self.group, [self.held[address] for address in of], WITHIN))


@pytest.fixture
def renewing(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> Renewing:
    return Renewing(nodes, monkeypatch)


def name_on(address: Address) -> str:
    places = table(A, B)
    return next(
        name for name in map(str, range(100)) if places.owner(key_slot(b"multilock/" + name.encode())) == address
    )


def test_if_one_node_refuses_a_renewal_the_others_are_still_renewed(renewing: Renewing) -> None:
    renewing.say[B] = refuses
    moved, kept = renewing(B, A)
    assert isinstance(kept, Granted)
    assert isinstance(moved, BackendUnavailable)
    assert not moved.unknown
    with pytest.raises(BackendRejected):
        renewing(B)


def test_the_first_node_of_a_group_is_asked_first_and_leaves_time_for_its_replies(renewing: Renewing) -> None:
    renewing.say[B] = silent
    moved, kept = renewing(B, A)
    assert isinstance(kept, Granted)
    assert isinstance(moved, BackendUnavailable)
    (first, whole), (second, half) = renewing.asked
    assert (first, second) == (A, B)
    assert half < whole * 0.6


def test_at_most_one_thread_of_a_group_waits_for_a_node_that_hangs(renewing: Renewing) -> None:
    """While one thread waits for the node that hangs, the other threads skip its leases. When the node replies, all
    threads use it again."""
    asked, over = threading.Event(), threading.Event()

    def hangs() -> None:
        asked.set()
        assert over.wait(20)

    renewing.say[B] = silent
    renewing(B)
    renewing.say[B] = hangs
    waits = threading.Thread(target=renewing, args=(B,))
    waits.start()
    assert asked.wait(20)
    renewing.asked.clear()
    moved, kept = renewing(B, A)
    assert isinstance(kept, Granted)
    assert isinstance(moved, BackendUnavailable)
    assert [address for address, _ in renewing.asked] == [A]
    over.set()
    waits.join(20)
    assert all(isinstance(each, Granted) for each in renewing(B, A))


def refuses(*_: object) -> None:
    raise REFUSAL


def silent(*_: object) -> None:
    raise SILENCE


def answers(*_: object) -> None: ...
