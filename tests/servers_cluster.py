"""Redis Clusters: three shards, each a primary and a replica, that know each other from the start."""

from __future__ import annotations

import atexit
import contextlib
import os
import time
from collections.abc import Iterator
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any

import redis
from redis.crc import REDIS_CLUSTER_HASH_SLOTS as SLOTS
from redis.crc import key_slot

from tests.servers import Cluster, RedisServer

__all__ = ["ClusterNode", "RedisCluster", "cluster_of_all_tests"]

# This timeout is long, so that a pause of the machine triggers no failover. Tests promote a replica with `fail_over`.
NODE_TIMEOUT = 15_000
# seconds to wait at most until all nodes agree; a primary refuses requests for two seconds after its start
AGREE_WITHIN = 20.0


class ClusterNode(RedisServer):
    """One node of a cluster. Its folder lists the other nodes and outlives `kill`, so the node keeps its identity."""

    name = "redis+cluster"
    keeps = True
    # A node syncs to disk at each change of slot ownership. These tests need no durability, so memory is enough.
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None

    def __init__(self, number: int, *options: str) -> None:
        super().__init__(
            *("--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf"),
            *("--cluster-node-timeout", str(NODE_TIMEOUT), "--cluster-replica-validity-factor", "0"),
            *("--cluster-migration-barrier", "99", "--repl-diskless-sync-delay", "0", *options),
        )
        self.number = number
        self.id = f"{number + 1:040x}"
        self.nodes = ""  # the contents of nodes.conf before the first start
        self._bare: redis.Redis | None = None

    @property
    def url(self) -> str:
        return f"redis://{self.endpoint}"

    @property
    def bare(self) -> Any:
        """A plain client of this node alone, which follows no redirection."""
        if self._bare is None or self._bare.connection_pool.connection_kwargs["port"] != self.port:
            self._bare = redis.Redis(port=self.port, socket_timeout=5.0)
        return self._bare

    def command(self, folder: Path) -> list[str]:
        config = folder / "nodes.conf"
        if self.nodes and not config.exists():
            config.write_text(self.nodes)
        return super().command(folder)

    def stop(self) -> None:
        if self._bare is not None:
            self._bare.close()
        super().stop()


class RedisCluster(Cluster[ClusterNode]):
    """``shards`` primaries, a replica of each unless ``replicas`` is False, and ``idle`` primaries that serve no slot
    yet."""

    members: list[ClusterNode]

    def __init__(self, *options: str, shards: int = 3, replicas: bool = True, idle: int = 0) -> None:
        self._shards = shards
        self._serving = shards * (2 if replicas else 1)
        self.members = [ClusterNode(n, *options) for n in range(self._serving + idle)]

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(member.endpoint for member in self.members[: self._shards])

    def introduce(self) -> None:
        """Write for each node the slots and roles of all other nodes, so that the nodes know each other from the
        start."""
        for member in self.members:
            lines = [self._line(other, of=member) for other in self.members]
            member.nodes = "\n".join([*lines, f"vars currentEpoch {len(self.members)} lastVoteEpoch 0", ""])

    def _line(self, node: ClusterNode, of: ClusterNode) -> str:
        shard = node.number % self._shards
        primary = node.number < self._shards or node.number >= self._serving
        first, last = shard * SLOTS // self._shards, (shard + 1) * SLOTS // self._shards - 1
        flags = ("myself," if node is of else "") + ("master" if primary else "slave")
        whose = "-" if primary else self.members[shard].id
        slots = f" {first}-{last}" if node.number < self._shards else ""
        place = f"{node.endpoint}@{node.port + 10_000}"
        return f"{node.id} {place} {flags} {whose} 0 0 {(node.number if primary else shard) + 1} connected{slots}"

    def start(self) -> None:
        super().start()
        self.agree()

    def find_leader(self) -> ClusterNode | None:
        return self.members[0]

    # ---- which node serves what

    def primaries(self) -> list[ClusterNode]:
        """Return the primaries in the order of their first slots, as one live node reports them."""
        by_port = {member.port: member for member in self.members}
        said = next(member for member in self.members if member.alive).bare.execute_command("CLUSTER", "SLOTS")
        return list(dict.fromkeys(by_port[line[2][1]] for line in sorted(said)))

    def owner(self, slot: int) -> ClusterNode:
        """Return the primary that reports itself as the owner of this slot."""
        for member in self.members:
            if member.alive:
                for line in member.bare.execute_command("CLUSTER", "SLOTS"):
                    if line[0] <= slot <= line[1] and line[2][1] == member.port:
                        return member
        raise LookupError(f"no node serves slot {slot}")

    def replica_of(self, primary: ClusterNode) -> ClusterNode:
        for member in self.members:
            if member.alive and member is not primary:
                role = member.bare.role()
                if role[0] == b"slave" and role[2] == primary.port:
                    return member
        raise LookupError(f"{primary.endpoint} has no replica")

    def agree(self) -> None:
        """Wait until every running node is in service and all report the same owner of every slot. Replicas must be
        in sync."""
        until = time.monotonic() + AGREE_WITHIN
        while not self._agrees():
            if time.monotonic() > until:
                raise TimeoutError("the cluster does not come to an agreement")
            time.sleep(0.02)

    def _agrees(self) -> bool:
        said = []
        for member in self.members:
            if not member.alive:
                continue
            try:
                info = member.bare.execute_command("CLUSTER", "INFO")
                lines = member.bare.execute_command("CLUSTER", "SLOTS")
                replication = member.bare.info("replication")
            except redis.RedisError:
                return False
            if b"cluster_state:ok" not in info:
                return False
            if replication["role"] == "slave" and replication["master_link_status"] != "up":
                return False
            said.append(sorted((first, last, primary[1]) for first, last, primary, *_ in lines))
        return all(each == said[0] for each in said)

    # ---- actions of an operator

    def migrate(self, slot: int, to: ClusterNode) -> None:
        """Move the slot with all its keys to another node, as redis-cli does."""
        source = self.owner(slot)
        self.begin_migration(slot, to)
        self.move_keys(slot, source, to)
        self.end_migration(slot, source, to)

    def begin_migration(self, slot: int, to: ClusterNode) -> None:
        source = self.owner(slot)
        to.bare.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", source.id)
        source.bare.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", to.id)

    def move_keys(self, slot: int, source: ClusterNode, to: ClusterNode) -> None:
        while keys := source.bare.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 100):
            source.bare.execute_command("MIGRATE", to.host, to.port, "", 0, 5000, "KEYS", *keys)

    def end_migration(self, slot: int, source: ClusterNode, to: ClusterNode) -> None:
        """End the migration. The new owner is notified first, so that some node serves the slot all the time."""
        to.bare.execute_command("CLUSTER", "SETSLOT", slot, "NODE", to.id)
        try:
            source.bare.execute_command("CLUSTER", "SETSLOT", slot, "NODE", to.id)
        except redis.ResponseError as error:  # the node gave away its last slot and became the new owner's replica
            if "only with masters" not in str(error):
                raise
        # Before Redis 7.0 the new owner notifies the other nodes only gradually. CLUSTER MEET notifies a node at once.
        for member in self.members:
            if member.alive and member is not to:
                to.bare.execute_command("CLUSTER", "MEET", member.host, member.port)
        # If two nodes each change a slot before they learn of each other's change, both use the same epoch, and one
        # change is undone or ignored. The former owner was notified of the move above, but not of the epoch, so wait
        # until each node has the epoch, too.
        until = time.monotonic() + AGREE_WITHIN
        while any(
            self._says(member, slot) != to.port or self._epochs(member)[to.id] < self._epochs(to)[to.id]
            for member in self.members
            if member.alive
        ):
            if time.monotonic() > until:
                raise TimeoutError(f"not all nodes know that slot {slot} has moved")
            time.sleep(0.005)

    @staticmethod
    def _epochs(member: ClusterNode) -> dict[str, int]:
        """Return the epoch of each node's last change, as far as this member knows it."""
        lines = member.bare.execute_command("CLUSTER", "NODES").decode().splitlines()
        return {each[0]: int(each[6]) for each in (line.split() for line in lines)}

    @staticmethod
    def _says(member: ClusterNode, slot: int) -> int:
        said = member.bare.execute_command("CLUSTER", "SLOTS")
        return next((int(line[2][1]) for line in said if line[0] <= slot <= line[1]), 0)

    def fail_over(self, primary: ClusterNode) -> ClusterNode:
        """Promote a replica of this primary at once, without a vote, even if the primary is dead."""
        replica = next(member for member in self.members if member.alive and self._follows(member) == primary.id)
        replica.bare.execute_command("CLUSTER", "FAILOVER", "TAKEOVER")
        return replica

    def _follows(self, member: ClusterNode) -> str:
        """Return the id of the primary that this member follows, according to the member itself."""
        lines = member.bare.execute_command("CLUSTER", "NODES").decode().splitlines()
        return str(next(line.split()[3] for line in lines if "myself" in line.split()[2]))

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """At the end of the context, start every dead node again and wait until all nodes agree."""
        try:
            yield
        finally:
            for member in self.members:
                if not member.alive:
                    member.start()
            self.agree()

    def names_on(self, primary: ClusterNode, prefix: str = "n") -> Iterator[str]:
        """Yield names whose locks this primary serves, with the default prefix. No two names have the same slot."""
        said = primary.bare.execute_command("CLUSTER", "SLOTS")
        mine = {slot for line in said if line[2][1] == primary.port for slot in range(line[0], line[1] + 1)}
        for n in count():
            if (slot := self.slot_of(name := f"{prefix}{n}")) in mine:
                mine.remove(slot)
                yield name

    def name_on(self, primary: ClusterNode, prefix: str = "n") -> str:
        return next(self.names_on(primary, prefix))

    @classmethod
    def slot_of(cls, name: str) -> int:
        """Return the slot of the lock of this name, with the default prefix."""
        return cls.slot_of_key(f"multilock/{name}")

    @staticmethod
    def slot_of_key(key: str) -> int:
        return int(key_slot(key.encode()))


@lru_cache
def cluster_of_all_tests() -> RedisCluster:
    """The cluster that all tests of a process share. Each test must leave it as it was."""
    cluster = RedisCluster()
    with contextlib.ExitStack() as stack:
        stack.enter_context(cluster)
        atexit.register(stack.pop_all().close)
    return cluster
