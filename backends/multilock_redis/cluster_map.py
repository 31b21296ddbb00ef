"""Find the node of a cluster that serves a name. Keep a table of the slots up to date, and a `Node` for each primary.

The table is requested when there is none, and once after each burst of replies that contradict it. A redirection
contradicts the table. A missing reply does too, because a replica may have replaced the primary.

A node that was cut off from the others still replies, but its table is old. The table's epoch shows its age, because
the epoch of a cluster grows with each failover. So a table of a lower epoch counts only if the cluster was created
anew: most primaries in the table reply with its epoch, and no node replies with a greater one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

from multilock import BackendRejected, BackendUnavailable, MultilockError, system
from multilock.backend import Notices
from multilock_redis.acquire_release import Replicas
from multilock_redis.keys import Keyspace
from multilock_redis.node import Node
from multilock_redis.slot_table import Address, SlotTable
from multilock_redis.transport import Answer, Endpoint
from multilock_redis.wire import Redirected, pack

__all__ = ["ClusterMap"]

CLUSTER_SLOTS = pack("CLUSTER", "SLOTS")
CLUSTER_INFO = pack("CLUSTER", "INFO")
BURST = 0.1  # seconds; if several replies contradict the table within this time, it is requested only once
EPOCH = re.compile(rb"cluster_current_epoch:(\d+)")
AT_LEAST = 0.02  # the least number of seconds that each node gets for its reply


class ClusterMap:
    """The table and the nodes of one cluster. Any thread may use them. If a method raises, nothing was executed."""

    def __init__(
        self,
        name: str,
        seeds: Sequence[Address],
        endpoint_at: Callable[[Address], Endpoint],
        keys: Keyspace,
        notices: Notices,
        replicas: Replicas,
    ) -> None:
        """Sends no request. A forked child makes its own map, with other endpoints."""
        self._name = name
        self._seeds = seeds
        self._endpoint_at = endpoint_at
        self._keys = keys
        self._notices = notices
        self._replicas = replicas
        self._now = notices.now
        self._table: SlotTable | None = None
        self._epoch = 0  # the epoch of the table
        self._doubted = False
        self._looked_at = 0.0  # when the table was last requested
        self._looking = system.Lock()  # held by the thread that requests the table
        self._told: Address | None = None  # the new primary of a moved slot, which is asked for the table first
        self._silent: set[Address] = set()
        self._nodes: dict[Address, Node] = {}
        self._served: set[Address] = set()  # the primaries of all tables so far; used without a lock
        self._turns = count()
        self._closed = False
        #: Called in the thread of a node's listener: see `Listener.hand_on`.
        self.hand_on: Callable[[Address, Node, set[str]], set[str]] = lambda address, node, names: names

    # ---- the node to ask

    def owner(self, name: str, within: float) -> Address:
        """Return the primary that serves the slot of this name."""
        slot = self._keys.slot(name)
        address = self.table(within).owner(slot)
        if address is None:
            self.doubt()
            raise BackendUnavailable(f"{self._name}: no node serves slot {slot}", unknown=False, backend="redis")
        return address

    def node(self, address: Address) -> Node:
        """Return the node at this address. If there is none, make it."""
        node = self._nodes.get(address)
        if node is None:
            # The address may come from an older table, and the node may not know yet that another primary has replaced
            # it.
            endpoint = self._endpoint_at(address)
            endpoint.is_left = lambda: self._is_left(address)
            made = Node(endpoint, self._keys, self._notices, self._replicas)
            node = self._nodes.setdefault(address, made)
            node.listener.hand_on = lambda names: self.hand_on(address, node, names)
            if self._closed:
                node.close()
        return node

    def _is_left(self, address: Address) -> bool:
        """Return whether this node was a primary, and is not a primary in the present table."""
        return address in self._served and self._table is not None and address not in self._table.primaries

    def known(self) -> dict[Address, Node]:
        """Return the nodes that were made and not retired."""
        return dict(self._nodes)

    def primaries(self, within: float) -> Iterator[tuple[Address, Node]]:
        """Yield the primaries of the table, with their nodes."""
        for address in self.table(within).primaries:
            yield address, self.node(address)

    def table(self, within: float) -> SlotTable:
        """Return the table. If a reply or a silent node has contradicted the table, request a new one first.

        If another thread is already requesting a table, return the present table, unless there is none yet.
        """
        deadline = self._now() + within
        taken: list[bool] = []
        try:
            if self._good():
                return self._present()
            wait = self._table is None
            system.take(self._looking.acquire, within if wait else 0.0, taken)
            if taken == [True] and not self._good():
                self._look(deadline)
            return self._present()
        finally:
            if taken == [True]:
                self._looking.release()

    # ---- what replies show

    def doubt(self, silent: Address | None = None) -> None:
        """Request the table again at its next use. The node at ``silent``, which did not reply, is then asked last."""
        if silent:
            self._silent.add(silent)
        self._doubted = True

    def forget(self) -> None:
        """Request the table again at its next use, even if it is new. A caller that needs all nodes calls this."""
        self._looked_at = 0.0
        self._doubted = True

    def redirected(self, by: Address, to: Redirected) -> Address:
        """Return the node to which a redirection leads.

        If the slot was moved for good, the table is changed at once, so that all later requests go to the new node. The
        table is also requested again at its next use.
        """
        address = Address(to.host or by.host, to.port)
        if not to.once:
            if self._table is not None:
                self._table.moved(to.slot, address)
            self._told = address
            self._silent.discard(address)
            self.doubt()
        else:
            self._served.discard(address)  # a slot moves to it, so it is a primary, although no table shows that yet
        return address

    def retire(self, address: Address, node: Node) -> None:
        """Close a node that is no longer a primary and at which no name is watched."""
        if self._nodes.get(address) is node:
            self._nodes.pop(address, None)
        node.close()

    def close(self) -> None:
        self._closed = True
        for node in self.known().values():
            node.close()

    # ---- the table

    def _good(self) -> bool:
        return self._table is not None and not (self._doubted and self._now() - self._looked_at > BURST)

    def _present(self) -> SlotTable:
        if self._table is None:
            raise BackendUnavailable(
                f"{self._name}: no node has reported yet which node serves which slot", unknown=False
            )
        return self._table

    def _look(self, deadline: float) -> None:
        """Ask one node after the other until one replies.

        Each node gets half of the time that is left. A node that did not reply before gets only an equal share, so that
        time is left for the others. If a table is known, half of all the time is kept for the request that needs the
        table.
        """
        failures: list[MultilockError] = []
        if self._table is not None:
            deadline -= (deadline - self._now()) / 2
        asked = self._candidates()
        older: dict[Address, tuple[int, SlotTable]] = {}
        for i, address in enumerate(asked):
            left = deadline - self._now()
            if left <= 0:
                break
            try:
                share = left / (len(asked) - i if address in self._silent else min(2, len(asked) - i))
                epoch, table = self._ask(address, max(share, AT_LEAST))
            except (BackendUnavailable, BackendRejected) as failed:
                self._silent.add(address)
                failures.append(failed)
                continue
            self._silent.discard(address)
            if epoch < self._epoch:  # the received table is older than the known one
                older[address] = epoch, table
                asked += [each for each in table.primaries if each not in asked]
                continue
            self._believe(epoch, table)
            return
        else:
            self._begin_afresh(older)
        self._looked_at = self._now()
        if self._table is None:
            raise self._nobody_knows(failures)

    def _believe(self, epoch: int, table: SlotTable) -> None:
        self._epoch = epoch
        self._doubted = False
        self._looked_at = self._now()
        self._install(table)

    def _begin_afresh(self, older: dict[Address, tuple[int, SlotTable]]) -> None:
        """After all nodes were asked, accept an older table if most primaries in it reply with the epoch of that
        table."""
        epoch, table = max(older.values(), key=lambda each: each[0], default=(0, None))
        if table is None:
            return
        same = [address for address in table.primaries if address in older and older[address][0] == epoch]
        if len(same) > len(table.primaries) // 2:
            self._believe(epoch, table)

    def _nobody_knows(self, failures: list[MultilockError]) -> MultilockError:
        """Return the error to raise if no node gave a table. If some nodes did not reply, a refusal by other nodes does
        not count."""
        rejected = [failed for failed in failures if isinstance(failed, BackendRejected)]
        if rejected and len(rejected) == len(failures):
            return rejected[0]
        why = "; ".join(dict.fromkeys(map(str, failures))) or f"{self._name} was not asked in time"
        silence = BackendUnavailable(why, unknown=False, backend="redis")
        silence.__cause__ = next(iter(failures), None)
        return silence

    def _candidates(self) -> list[Address]:
        """Return the nodes to ask for the table, the best first.

        Each call begins with another node, because a node that was cut off replies with an old table. The addresses of
        the URL come last, because they may belong to another cluster by now.
        """
        learnt: list[Address] = []
        if self._table is not None:
            learnt = [*self._table.primaries, *(each for those in self._table.replicas.values() for each in those)]
            first = next(self._turns) % len(learnt)
            learnt = learnt[first:] + learnt[:first]
        told, self._told = self._told, None
        if told:
            learnt.insert(0, told)
        asked = dict.fromkeys([*learnt, *self._seeds])
        self._silent.intersection_update(asked)
        return sorted(asked, key=lambda address: (address not in learnt, address in self._silent))

    def _ask(self, address: Address, within: float) -> tuple[int, SlotTable]:
        """Return the epoch of the cluster and the table, as this node knows them."""
        try:
            slots, info = self._said_by(address, within)
            table = SlotTable.of(slots, address)
        except ValueError as error:
            raise BackendRejected(f"{address} is not a node of a cluster: {error}", backend="redis") from error
        if not table.primaries:  # the node was reset, and does not know the nodes with the locks
            raise BackendUnavailable(f"{address} knows no node that serves a slot", unknown=False, backend="redis")
        # The epoch may be missing: a user may lack the right to read it, and a proxy may not know the command.
        found = EPOCH.search(info) if isinstance(info, bytes) else None
        return int(found[1]) if found else self._epoch, table

    def _said_by(self, address: Address, within: float) -> list[Any]:
        """Return this node's replies to `CLUSTER_SLOTS` and to `CLUSTER_INFO`."""
        node = self._nodes.get(address)
        if node is not None and not self._is_left(address):
            return _first_counts(node.connections.exchange([CLUSTER_SLOTS, CLUSTER_INFO], within))
        # This address is not one of a known primary, so the connection is not kept.
        deadline = self._now() + within
        endpoint = self._endpoint_at(address)
        try:
            wire = endpoint.connect(within, self._now)
            try:
                return _first_counts(wire.exchange([CLUSTER_SLOTS, CLUSTER_INFO], deadline - self._now()))
            finally:
                wire.close()
        finally:
            endpoint.close()

    def _install(self, table: SlotTable) -> None:
        self._served.update(table.primaries)
        self._table = table
        gone = [(address, node) for address, node in list(self._nodes.items()) if address not in table.primaries]
        for address, node in gone:
            node.interrupt()  # the node may not know that it was replaced, so its replies no longer count
            if node.listener.watches():
                node.listener.doubt()
            else:
                self.retire(address, node)
        if gone:
            self._notices.wake(None)  # the claims that waited at these nodes must ask the new primary


def _first_counts(answers: list[Answer]) -> list[Any]:
    """Return the replies. If the first reply is an error, raise it."""
    said = [answer for answer, _ in answers]
    if isinstance(said[0], Exception):
        raise said[0]
    return said
