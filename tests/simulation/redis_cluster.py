"""A simulated Redis Cluster: nodes that serve slots, redirections, failovers, and slots that move to another node.

`test_redis_cluster` compares its nodes with real ones. `Clustered` replaces the messages between nodes: it decides when
a replica takes over, and when each node learns of a change.
"""

from __future__ import annotations

import math
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import multilock_redis
from multilock_redis.keys import Keyspace
from multilock_redis.slot_table import SLOTS, Address, key_slot
from multilock_redis.transport import Endpoint
from tests.simulation.oracles import Held, Oracle
from tests.simulation.plan import Fault
from tests.simulation.redis_replicas import DELAY, FAILOVER, FAULTS, PORT, Promoting, Replicating, replicas_of, runs
from tests.simulation.redis_server import Client, Connection, settings_of
from tests.simulation.redis_store import Refused, Reply, Status
from tests.simulation.scheduler import Process
from tests.simulation.server import PREFIX, Server, Simulated

if TYPE_CHECKING:
    from multilock import Loss
    from tests.simulation.world import World

__all__ = ["SIMULATED", "ClusterNode", "Clustered", "Table", "table_of"]

SHARDS = 2
NODE_TIMEOUT = 1.5  # seconds without contact after which a node counts as down and stops serving
TEND_EVERY = 0.2  # seconds between two messages of a node to the others
LEARNS = 0.5  # probability that a message to another node contains a change
BETWEEN_KEYS = 0.02  # seconds at most between two keys of a slot that moves
IS_DOWN = "CLUSTERDOWN The cluster is down"
OF_ONE_KEY = {"GET", "SET", "PTTL", "PEXPIRE", "HDEL", "HSET", "ZADD"}
OF_KEYS = {"MGET", "DEL"}


class Table(NamedTuple):
    """The slots of a cluster, as one node knows them."""

    epoch: int
    ranges: tuple[tuple[int, int, ClusterNode], ...]

    def owner(self, slot: int) -> ClusterNode:
        return next(node for first, last, node in self.ranges if first <= slot <= last)

    def replaced(self, former: ClusterNode, new: ClusterNode) -> Table:
        """Return the next table, in which ``new`` has all slots of ``former``."""
        ranges = [(first, last, new if node is former else node) for first, last, node in self.ranges]
        return Table(self.epoch + 1, tuple(ranges))

    def moved(self, slot: int, to: ClusterNode) -> Table:
        """Return the next table, in which ``to`` has this slot besides its other slots."""
        ranges = [(slot, slot, to)]
        for first, last, node in self.ranges:
            ranges += [(first, min(last, slot - 1), node), (max(first, slot + 1), last, node)]
        return Table(self.epoch + 1, tuple(sorted(each for each in ranges if each[0] <= each[1])))


def table_of(primaries: list[ClusterNode]) -> Table:
    """Return the first table of a cluster, whose primaries have equal shares of the slots."""
    bounds = [SLOTS * each // len(primaries) for each in range(len(primaries) + 1)]
    return Table(1, tuple((bounds[n], bounds[n + 1] - 1, node) for n, node in enumerate(primaries)))


@lru_cache(maxsize=1000)
def slot_of(key: str) -> int:
    return int(key_slot(key.encode("latin-1")))


class ClusterNode(Replicating):
    """One node of a cluster, a primary or a replica."""

    def __init__(self, *about: Any) -> None:
        super().__init__(*about)
        self.table = Table(0, ())
        self.nodes: list[ClusterNode] = []
        self.importing: dict[int, ClusterNode] = {}
        self.migrating: dict[int, ClusterNode] = {}
        #: begin and end of a time without contact to the other nodes
        self.apart_since, self.apart_until = math.inf, 0.0

    def execute(self, client: Client, words: list[str]) -> Reply | Refused:
        asking, client.asks = client.asks, words[0] == "ASKING"
        try:
            self._check(self._keys(words), asking)
        except Refused as refused:
            return refused
        return super().execute(client, words)

    def _keys(self, words: list[str]) -> list[str]:
        if words[0] == "EVALSHA":
            return words[3 : 3 + int(words[2])]
        return words[1:] if words[0] in OF_KEYS else words[1:2] if words[0] in OF_ONE_KEY else []

    def _check(self, keys: list[str], asking: bool) -> None:
        """Raise Refused if another node serves these keys."""
        if not keys:
            return
        slot, *others = dict.fromkeys(map(slot_of, keys))
        if others:
            raise Refused("CROSSSLOT Keys in request don't hash to the same slot")
        if self.is_cut_off():
            raise Refused(IS_DOWN)
        owner = self.table.owner(slot)
        moves = slot in self.migrating if owner is self else asking and slot in self.importing
        known = sum(self.store.look(each) is not None for each in keys) if moves else 0
        if moves and known < len(keys) and len(keys) > 1 and (known or owner is not self):
            raise Refused("TRYAGAIN Multiple keys request during rehashing of slot")
        if moves and known < len(keys) and owner is self:
            raise Refused(f"ASK {slot} {self.migrating[slot].name}:{PORT}")
        if not moves and owner is not self:
            raise Refused(f"MOVED {slot} {owner.name}:{PORT}")

    def is_cut_off(self) -> bool:
        """Return whether the node serves no slot because it has had no contact with the others for `NODE_TIMEOUT`."""
        return bool(self.apart_since + NODE_TIMEOUT < self.sim.time < self.apart_until)

    def _do_asking(self) -> Reply:
        return Status("OK")

    def _do_cluster(self, what: str) -> Reply:
        if what.upper() == "INFO":
            state = "fail" if self.is_cut_off() else "ok"
            return f"cluster_state:{state}\r\ncluster_current_epoch:{self.table.epoch}\r\n"
        return [
            [first, last, *([each.name, PORT, each.name, []] for each in (node, *self._replicas(node)))]
            for first, last, node in self.table.ranges
        ]

    def _replicas(self, of: ClusterNode) -> list[ClusterNode]:
        return [each for each in self.nodes if each.leader is of and each.up]

    def _do_publish(self, channel: str, message: str) -> Reply:
        for each in self.nodes:
            if each is not self and each._listeners(channel):
                heard = partial(each.hear, channel, message)
                self.sim.after(self.random.expovariate(1 / DELAY), each.running, heard)
        return super()._do_publish(channel, message)

    def hear(self, channel: str, message: str) -> None:
        """Receive a message from another node, and send it to the subscribers at this node."""
        for each in self._listeners(channel):
            self._push(each, ["message", channel, message])

    def _ends_with_its_role(self) -> list[Client]:
        return list(self._waiting)

    def learn(self, table: Table) -> None:
        """Take over a newer table. A primary that has lost all slots becomes a replica of the node that has them."""
        owners = [table.owner(first) for first, _, node in self.table.ranges if node is self]
        self.table = table
        if self.leader is None and owners and all(node is not self for _, _, node in table.ranges):
            self.follow(owners[0])

    def hand_key(self, slot: int, to: ClusterNode) -> bool:
        """Move one key of a slot to another node (MIGRATE). Returns False if the slot has no key."""
        self.micros()
        to.micros()
        for key in list(self.store.values):
            if slot_of(key) == slot and self.store.look(key) is not None:
                to.change([self._of(key)], to.written)
                to._touched(key)
                if end := to.store.ends.get(key):
                    to._plan_end(key, end)
                to._replicate()
                self.delete(key)
                return True
        return False


class Clustered(Promoting):
    """A cluster of some primaries, each with a replica."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.nodes = [each for each in world.servers if isinstance(each, ClusterNode)]
        self.primaries += self.nodes[:SHARDS]
        self.table = table_of(self.nodes[:SHARDS])
        self._moving: set[int] = set()
        self._down_since: dict[Server, float] = {}
        for number, node in enumerate(self.nodes):
            node.table, node.nodes = self.table, self.nodes
            if number >= SHARDS:
                node.follow(self.nodes[number - SHARDS], at_once=True)
        self.sim.after(TEND_EVERY, self._tend)

    def keeper(self, name: str) -> Server | None:
        slot = slot_of(self.world.key(name))
        return None if slot in self._moving else self.table.owner(slot)

    def calm(self) -> None:
        super().calm()
        for node in self.nodes:
            node.apart_until = 0.0

    # Faults

    def fail_over(self, choice: int) -> None:
        """Let a replica take over, sometimes from a primary that is frozen for a moment."""
        former = self.table.ranges[choice % len(self.table.ranges)][2]
        if choice // 16 % 2:
            former.stop()
            self.sim.after(self.random.uniform(0.2, 2.5), former.go_on)
        self._take_over(former)

    def _take_over(self, former: ClusterNode) -> None:
        """Let a replica take over the slots of a primary. No slot moves at that time, and the other primaries vote.

        Here a voter learns the new table at once. A real one knows the new epoch at once, and the table soon after.
        """
        ready = [each for each in self.ready(former) if isinstance(each, ClusterNode) and not self._is_apart(each)]
        voters = [each for each in self.nodes if each in self.primaries and each is not former]
        if self._moving or not ready or not all(runs(each) and not self._is_apart(each) for each in voters):
            return
        new = ready[0]
        self.sim.note(None, f"{new.name} takes over from {former.name}")
        self.promote(former, new)
        self.table = new.table = self.table.replaced(former, new)
        for each in voters:
            each.learn(self.table)

    def divide(self, choice: int, seconds: float) -> None:
        """Cut a node off from the others. If it is a primary, its replica takes over at once, or after the timeout."""
        node = self.nodes[choice % len(self.nodes)]
        node.apart_since, node.apart_until = self.sim.time, self.sim.time + seconds
        for each in self.nodes:
            if each.leader is node or each is node:
                each.lags_until = node.apart_until
        if node in self.primaries and choice // 16 % 2:
            self._take_over(node)

    def move(self, name: str, seconds: float) -> None:
        """Move the slot of a name to another primary, key by key."""
        slot = slot_of(self.world.key(name))
        source = self.table.owner(slot)
        able = [each for each in self.nodes if each in self.primaries and each is not source]
        if self._moving or not able or any(map(self._is_apart, self.nodes)):
            return
        self.sim.note(None, f"the slot of {name} moves from {source.name} to {able[0].name}")
        self._moving.add(slot)
        able[0].importing[slot], source.migrating[slot] = source, able[0]
        self.sim.after(self.random.uniform(0.0, seconds), self._move, slot, source, able[0], seconds)

    def _move(self, slot: int, source: ClusterNode, target: ClusterNode, seconds: float) -> None:
        """Move one key after the other, and end the move ``seconds`` after the last key."""
        self.world.oracles.disturb(None, seconds + 2.2, "move")
        self.moved |= {name: self.sim.time for name in self.world.kinds if slot_of(self.world.key(name)) == slot}
        if not (runs(source) and runs(target)):
            self.sim.after(TEND_EVERY, self._move, slot, source, target, seconds)
            return
        if source.hand_key(slot, target):
            self.sim.after(self.random.uniform(0.0, BETWEEN_KEYS), self._move, slot, source, target, seconds)
            return
        if seconds:
            self.sim.after(seconds, self._move, slot, source, target, 0.0)
            return
        self.table = target.table = source.table = self.table.moved(slot, target)
        del target.importing[slot], source.migrating[slot]
        self._moving.discard(slot)
        self.sim.note(None, f"the slot {slot} has moved")

    def _is_apart(self, node: ClusterNode) -> bool:
        return node.apart_until > self.sim.time

    def _tend(self) -> None:
        self.sim.after(TEND_EVERY, self._tend)
        now = self.sim.time
        for node in self.nodes:
            if runs(node) and not self._is_apart(node):
                self._down_since.pop(node, None)
                if node.table.epoch < self.table.epoch and self.random.random() < LEARNS:
                    node.learn(self.table)
            elif node in self.primaries and now - self._down_since.setdefault(node, now) > NODE_TIMEOUT:
                self._take_over(node)


class Moved(Oracle):
    """No renewed lease is lost because its slot moves."""

    def lost(self, held: Held, loss: Loss[Any]) -> None:
        excused = any(each.excused for each in held.beliefs) or not held.operation.renew or held.how == "released"
        if self.world.struck and self.world.plan.profile == "moves" and not excused:
            self.bad(f"{held.worker} lost {held.operation.names} while a slot moved: {loss.message}")


ClusterNode.group = Clustered


def move(world: World, fault: Fault, process: Process) -> None:
    """Move the slot of a name to another node."""
    assert isinstance(world.group, Clustered)
    world.group.move("ab"[fault.choice % 2], fault.seconds)


def _open(world: World, ttl: float) -> Any:
    settings, replicas = settings_of(world), replicas_of(world)

    def endpoint_at(address: Address) -> Endpoint:
        return Endpoint(f"redis+cluster://{address}", Connection, {**settings, "host": address.host})

    keys, capabilities = Keyspace(PREFIX, key_slot), multilock_redis._capabilities(ttl, replicas)
    seeds = [Address(server.name, PORT) for server in world.servers[:2]]
    return multilock_redis.ClusterBackend("redis+cluster", seeds, endpoint_at, keys, capabilities, replicas)


PROFILES = {
    "failover": (f"{FAILOVER[0]} move move", f"{FAILOVER[1]} move move"),
    "moves": ("move move", "move"),
}
SIMULATED = {
    "redis+cluster": Simulated(
        _open,
        ClusterNode,
        4,
        {**FAULTS, "move": move},
        PROFILES,
        "failover failover failover moves moves",
        replicas=1,
    )
}
