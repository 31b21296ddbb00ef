"""A Redis Cluster: all keys of a name are in one slot, so each lock is on the primary that serves its slot.

A `Node` stands for each primary, as for the only primary of ``redis://``. This module sends each request to the right
node, and follows redirections. A node replies that another node now serves the slot (``MOVED``), or serves this one
request (``ASK``). In both cases the request was not executed, so it is sent to the other node. While a slot is being
moved, its locks can still be renewed. If only some of a request's keys have arrived, the node replies ``TRYAGAIN``,
which counts as no reply.

A script only hands a lock over to a waiter that is subscribed at the same node. So a client subscribes at a node before
it joins a queue there. If the slot moves to another node, a waiter's place in the queue moves too. The new node skips
the waiter until it subscribes there with its next heartbeat, but does not remove it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from typing import TypeVar
from weakref import WeakSet

from multilock import BackendRejected, BackendUnavailable, MultilockError, system
from multilock.backend import Busy, Capabilities, Claim, Finding, Granted, Held, LockInfo, Notices, Returned
from multilock_redis.acquire_release import Replicas
from multilock_redis.cluster_map import ClusterMap
from multilock_redis.connections import Connections
from multilock_redis.diagnosis import diagnose_cluster
from multilock_redis.inspection import Inspection
from multilock_redis.keys import Keyspace
from multilock_redis.node import Node
from multilock_redis.slot_table import Address
from multilock_redis.transactions import Transactions
from multilock_redis.transport import Answer, Endpoint
from multilock_redis.wire import Redirected, pack, refused

__all__ = ["ClusterBackend"]

T = TypeVar("T")
HOPS = 5  # redirections of one request; if there are more, the nodes contradict each other
ASKING = pack("ASKING")  # the next request may then use a slot that is still moving to this node
LOOK_WITHIN = 1.0  # seconds for which a node that does not reply may delay the wake-ups from another node


class ClusterBackend:
    """The `multilock.backend.Backend` for one cluster."""

    spi_version = 1

    def __init__(
        self,
        scheme: str,
        seeds: Sequence[Address],
        endpoint_at: Callable[[Address], Endpoint],
        keys: Keyspace,
        capabilities: Capabilities,
        replicas: Replicas | None = None,
    ) -> None:
        self.scheme = scheme
        self.capabilities = capabilities
        self._name = f"{scheme}://{','.join(map(str, seeds))}"
        self._seeds = seeds
        self._make = endpoint_at
        self._keys = keys
        self._replicas = replicas or Replicas()
        self._endpoints: WeakSet[Endpoint] = WeakSet()

    def __repr__(self) -> str:
        return f"<ClusterBackend {self._name}>"

    def open(self, notices: Notices) -> None:
        inherited, self._endpoints = self._endpoints, WeakSet()
        for endpoint in inherited:
            endpoint.forget()
        self._now = notices.now
        # Nodes that did not reply to a renewal, each with a mutex: only its holder may wait for the node (see
        # `_renew_at`).
        self._hanging: dict[Address, system.Lock] = {}
        # Ids of all watched claims. The set needs no mutex, because each id is added or removed in one atomic step.
        self._wanted: set[str] = set()
        self._cluster_map = ClusterMap(self._name, self._seeds, self._endpoint_at, self._keys, notices, self._replicas)
        self._cluster_map.hand_on = self._hand_on

    def _endpoint_at(self, address: Address) -> Endpoint:
        endpoint = self._make(address)
        self._endpoints.add(endpoint)
        return endpoint

    # ---- one name

    def attempt(self, claim: Claim, join: bool, within: float) -> Granted | Busy:
        return self._at(claim.name, lambda node, left: node.attempt(claim, join, left), within)

    def release(self, claim: Claim, granted: Granted | None, unsure: bool, within: float) -> Returned:
        self._unwatch(claim.id)  # before the request is sent, so that the release is not reported as a loss
        return Returned(self._at(claim.name, lambda node, left: node.release(claim, unsure, left), within))

    def rest(self, claim: Claim, granted: Granted, unsure: bool, seconds: float, within: float) -> Returned:
        self._unwatch(claim.id)
        until = self._now() + seconds

        def rest(node: Node, left: float) -> bool:
            return node.rest(claim, unsure, until - self._now(), left)

        return Returned(self._at(claim.name, rest, within))

    def inspect(self, name: str, within: float) -> LockInfo | None:
        return self._at(name, lambda node, left: node.inspection.inspect(name, left), within)

    def force_release(self, name: str, within: float) -> bool:
        return self._at(name, lambda node, left: node.inspection.force_release(name, left), within)

    def _at(self, name: str, ask: Callable[[Node, float], T], within: float) -> T:
        """Call ``ask`` with the node that serves this name, and follow redirections."""
        cluster_map, deadline = self._cluster_map, self._now() + within
        address = cluster_map.owner(name, within)
        once = False
        for _ in range(HOPS):
            node = cluster_map.node(address)
            try:
                return ask(_Importing(node, self._keys, self._now) if once else node, deadline - self._now())
            except Redirected as told:
                address, once = cluster_map.redirected(address, told), told.once
            except BackendUnavailable as silence:
                cluster_map.doubt(address)
                # After an ASK redirection the request went to a node that does not own the slot, so no other node has
                # replaced that node.
                elsewhere = None if silence.unknown or once else self._taken_over(name, address, deadline)
                if elsewhere is None:
                    raise
                address, once = elsewhere, False
        raise self._in_a_circle(name)

    def _taken_over(self, name: str, address: Address, deadline: float) -> Address | None:
        """Return the primary that has replaced the node at ``address`` for the name, or None if no other node reports
        one."""
        try:
            owner = self._cluster_map.owner(name, deadline - self._now())
        except MultilockError:
            return None
        return owner if owner != address else None

    def _in_a_circle(self, name: str) -> BackendUnavailable:
        return BackendUnavailable(
            f"{self._name}: its nodes send the request for {name!r} from one to another", unknown=False, backend="redis"
        )

    # ---- many names

    def renew(
        self, group: Hashable, held: Sequence[Held], within: float
    ) -> Sequence[Granted | BackendUnavailable | None]:
        """Renew all leases of one node in one round trip.

        If the slot of a lease has moved to another node, the lease is renewed there, and from then on together with the
        other leases of that node. The node of ``group`` is asked first. So the leases of this group do not expire while
        the client waits for another node.
        """
        cluster_map, deadline = self._cluster_map, self._now() + within
        answers: list[Granted | BackendUnavailable | None] = [None] * len(held)
        asked: dict[tuple[Address, bool], list[int]] = {}
        for i, (claim, _) in enumerate(held):
            try:
                asked.setdefault((cluster_map.owner(claim.name, deadline - self._now()), False), []).append(i)
            except BackendUnavailable as error:
                answers[i] = error
        for _ in range(HOPS):
            redirected: dict[tuple[Address, bool], list[int]] = {}
            for (address, once), places in sorted(
                asked.items(), key=lambda one: cluster_map.node(one[0][0]).group != group
            ):
                some = [held[i] for i in places]
                for i, answer in zip(places, self._renew_at(group, address, once, some, deadline), strict=True):
                    answers[i] = answer
                    if not isinstance(answer, BackendUnavailable) or answer.unknown:
                        continue
                    if isinstance(told := answer.__cause__, Redirected):
                        redirected.setdefault((cluster_map.redirected(address, told), told.once), []).append(i)
                    elif (
                        not isinstance(told, BackendRejected)
                        and not once
                        and (owner := self._taken_over(held[i][0].name, address, deadline))
                    ):
                        redirected.setdefault((owner, False), []).append(i)
            asked = redirected
        causes = [answer.__cause__ for answer in answers if isinstance(answer, BackendUnavailable)]
        refusals = [error for error in causes if isinstance(error, BackendRejected)]
        if refusals and len(refusals) == len(answers):
            raise refusals[0]
        return answers

    def _renew_at(
        self, group: Hashable, address: Address, once: bool, held: Sequence[Held], deadline: float
    ) -> Sequence[Granted | BackendUnavailable | None]:
        """Renew the leases of one node.

        If a lease has moved to another node, the threads of its former group send its next renewal to that node. Once
        that node has renewed it, the lease belongs to that node's group. While that node does not reply, only one of
        these threads may wait for it, and only for half of the time left.
        """
        node, left = self._cluster_map.node(address), deadline - self._now()
        hanging = None
        if node.group != group:
            left /= 2
            hanging = self._hanging.get(address)
        taken: list[bool] = []
        try:
            if hanging is not None:
                system.take(hanging.acquire, 0.0, taken)
                if taken != [True]:
                    why = f"{address} has not answered another renewal yet"
                    return [BackendUnavailable(why, unknown=False, backend="redis")] * len(held)
            if once:
                importing = _Importing(node, self._keys, self._now)
                answers = importing.recipe.renew(held, importing.connections.exchange, left)
            else:
                answers = node.renew(held, left)
        except BackendUnavailable as error:
            self._cluster_map.doubt(address)
            self._hanging.setdefault(address, system.Lock())
            return [error] * len(held)
        except BackendRejected as error:
            return [refused(error)] * len(held)
        finally:
            if hanging is not None and taken == [True]:
                hanging.release()
        self._hanging.pop(address, None)
        return answers

    def watch(self, group: Hashable, held: Sequence[Held], within: float) -> None:
        deadline = self._now() + within
        self._wanted.update(claim.id for claim, _ in held)
        some: dict[Address, list[Held]] = {}
        for each in held:
            some.setdefault(self._cluster_map.owner(each[0].name, deadline - self._now()), []).append(each)
        for address, those in some.items():
            self._cluster_map.node(address).listener.watch(those, deadline - self._now())

    def _unwatch(self, claim_id: str) -> None:
        """Stop watching this claim at every node. If its slot is just moving to another node, that node's listener
        checks ``_wanted`` before it watches the claim."""
        if claim_id in self._wanted:
            self._wanted.discard(claim_id)
            for node in self._cluster_map.known().values():
                node.listener.unwatch(claim_id)

    def follow(self, names: frozenset[str], within: float) -> bool:
        deadline = self._now() + within
        some: dict[Address, set[str]] = {}
        for name in names:
            some.setdefault(self._cluster_map.owner(name, deadline - self._now()), set()).add(name)
        nodes = self._cluster_map.known() | {address: self._cluster_map.node(address) for address in some}
        # Call every node even if one returns False, because each node needs its new set of names.
        pushed = [
            node.listener.follow(frozenset(some.get(address, ())), deadline - self._now())
            for address, node in nodes.items()
        ]
        return all(pushed)

    def _hand_on(self, address: Address, node: Node, names: set[str]) -> set[str]:
        """Watch these names at the nodes that serve them now. The thread of this node's listener calls this.

        Returns the names that have not moved, or whose new node does not reply.
        """
        cluster_map = self._cluster_map
        cluster_map.doubt()
        try:
            table = cluster_map.table(LOOK_WITHIN)
        except MultilockError:
            return names  # the listener tries again later
        left: set[str] = set()
        moved: dict[Address, set[str]] = {}
        for name in names:
            owner = table.owner(self._keys.slot(name))
            if owner is None or owner == address:
                left.add(name)
            else:
                moved.setdefault(owner, set()).add(name)
        for owner, those in moved.items():
            listener = cluster_map.node(owner).listener
            try:
                listener.listen(LOOK_WITHIN)
            except MultilockError:
                left |= those
                continue
            # the other listener has the names now, and repeats the read until it has a reply
            with suppress(MultilockError):
                listener.take_over(*node.listener.leave(those), self._wanted, LOOK_WITHIN)
        if address not in table.primaries and not node.listener.watches():
            cluster_map.retire(address, node)
        return left

    # ---- all names, all nodes

    def inspect_all(self, prefix: str, within: float) -> Iterator[LockInfo]:
        """Ask one primary after the other. A name whose slot is moved meanwhile may be missed."""
        self._cluster_map.forget()  # a new node may have names
        seen: set[str] = set()
        for _, node in list(self._cluster_map.primaries(within)):
            for info in node.inspection.inspect_all(prefix, within, lambda name: self.inspect(name, within)):
                if info.name not in seen:
                    seen.add(info.name)
                    yield info

    def diagnose(self, within: float) -> list[Finding]:
        deadline = self._now() + within
        self._cluster_map.forget()
        table = self._cluster_map.table(within)
        nodes = list(self._cluster_map.primaries(within))
        return list(diagnose_cluster(table, nodes, lambda: deadline - self._now(), self._replicas.of_grants))

    def ping(self, within: float) -> None:
        """Ping all primaries, one after the other, since a lock may be on any primary."""
        deadline = self._now() + within
        try:
            for _, node in self._cluster_map.primaries(within):
                node.connections.call(pack("PING"), deadline - self._now())
        except BackendUnavailable:
            self._cluster_map.doubt()
            raise

    def close(self) -> None:
        self._cluster_map.close()


class _Importing(Node):
    """A node to which another node has redirected one request with ``ASK``. ``ASKING`` precedes each request.

    Such an object uses the connections and the notices of the node itself.
    """

    def __init__(self, node: Node, keys: Keyspace, now: Callable[[], float]) -> None:
        self._now = now
        self.connections = _Asking(node.connections)
        transactions = Transactions(self.connections, now)
        self.recipe = node.recipe.over(transactions)
        self.inspection = Inspection(keys, transactions)
        self.listener = node.listener


class _Asking(Connections):
    """Connections that send ``ASKING`` before each request."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    def call(self, request: bytes, within: float) -> Answer:
        [(answer, sent_at)] = self.exchange([request], within)
        if isinstance(answer, Exception):
            raise answer
        return answer, sent_at

    def exchange(self, requests: Sequence[bytes], within: float) -> list[Answer]:
        return self._connections.exchange([each for one in requests for each in (ASKING, one)], within)[1::2]
