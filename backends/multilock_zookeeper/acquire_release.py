"""The lock on ZooKeeper. Each claim has an ephemeral sequential node. The lowest node holds the lock, and every other
node waits for a node ahead of it.

The recipes are ZooKeeper's own ("Recipes: Locks" and "Shared Locks" in its documentation), in the layout of kazoo's
Lock, ReadLock and WriteLock, or of Curator's. Clients of kazoo or of Curator wait in the same queue as ours:

* Step 1: create an ephemeral sequential node.
* Step 2: list its siblings.
* Step 3: if no node ahead excludes our node, we hold the lock.
* Step 4: if a node ahead excludes our node, watch the last such node. When that node is deleted, go to step 2.
* A release deletes our node.

Readers do not exclude readers. A permit is excluded by other permits only if n permits are ahead of it, where n is the
number of permits. All other claims exclude each other. If only permits are ahead of a permit, it watches the last n
nodes ahead of its own, because one of these is always gone once a permit is free.

In addition to ZooKeeper's recipes:

* Create and listing are sent back to back, so an uncontended acquire takes one round trip. The transaction that created
  the node is the fencing token.
* If a create gets no reply, the client lists the queue after a ``sync``, in the same session. Requests of a session are
  executed in order, so the list shows whether the create made a node. This node is deleted unless it belongs to the
  present session.
* A delete is repeated until it is answered or the session has ended. Ids are unique, so a late delete does no harm.
* A grant is valid for as long as its session certainly lives (`multilock_zookeeper.session_validity`). Only
  acknowledged writes extend that time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from multilock import BackendRejected, BackendUnavailable
from multilock.backend import Busy, Claim, Granted, one_attempt
from multilock.timing import SAFETY_TIMER, UNPUSHED
from multilock.values import encode_value
from multilock_zookeeper.claims import ZkWaiter, ZkWaiters
from multilock_zookeeper.keys import Nodes
from multilock_zookeeper.notices import Watcher
from multilock_zookeeper.queue import awaited, contenders, refusal, refusal_of_permits, relevant
from multilock_zookeeper.renewal import ZkRenewal, granted_once
from multilock_zookeeper.session_validity import Session
from multilock_zookeeper.transport import EPHEMERAL_SEQUENTIAL, NodeMissing, Transport

__all__ = ["Recipe"]


class Recipe:
    """The algorithm of the module's docstring, for all claims of one client."""

    def __init__(
        self,
        nodes: Nodes,
        transport: Transport,
        watcher: Watcher,
        waiters: ZkWaiters,
        renewal: ZkRenewal,
        now: Callable[[], float],
    ) -> None:
        self._nodes = nodes
        self._transport = transport
        self._watcher = watcher
        self._renewal = renewal
        self._waiters = waiters
        self._now = now

    # ---- acquire

    def attempt(self, claim: Claim, join: bool, within: float) -> Granted | Busy:
        deadline = self._now() + within
        waiter = self._waiters.enter(claim)
        if waiter is None:
            return _busy(claim)
        with one_attempt(waiter.attempting, within):
            if self._waiters.of.get(claim.id) is waiter:
                return self._attempt(claim, waiter, join, deadline)
        return self.attempt(claim, join, deadline - self._now())  # the earlier attempt left nothing at the server

    def _attempt(self, claim: Claim, waiter: ZkWaiter, join: bool, deadline: float) -> Granted | Busy:
        answer: Granted | Busy | None = None
        had = waiter.path is not None
        try:
            while answer is None:
                answer = self._step(claim, waiter, join, deadline)
        except (BackendUnavailable, BackendRejected) as error:
            # Even if the failed request was not executed, an earlier request of this attempt may have made our node.
            error.unknown = error.unknown or waiter.unsure or (waiter.path is not None and not had)
            raise
        finally:
            if not waiter.path and not waiter.unsure:
                self._waiters.forget(claim, waiter)
        return answer

    def _step(self, claim: Claim, waiter: ZkWaiter, join: bool, deadline: float) -> Granted | Busy | None:
        """Send one round of requests. Returns None if the node, its session or the parent is missing. The caller then
        tries again."""
        session = self._transport.session(deadline)
        if waiter.unsure:
            self._find(claim, waiter, session, deadline)
        if waiter.path is not None and waiter.session != session.number:
            waiter.path = None  # the server deleted the node with its session
        known = waiter.path is not None
        children = self._list(waiter, deadline) if known else self._create(claim, waiter, session, deadline)
        if waiter.cancelled:
            return _busy(claim)
        return None if children is None else self._judge(claim, waiter, session, children, join, deadline)

    def _create(self, claim: Claim, waiter: ZkWaiter, session: Session, deadline: float) -> Sequence[str] | None:
        """Steps 1 and 2: create our node, and list its siblings."""
        parent = self._nodes.parent(claim.name)
        waiter.value = encode_value(claim)
        with self._waiters.lock:
            if waiter.cancelled:  # the claim was cancelled after this attempt began
                return None
            if self._now() >= deadline:
                raise BackendUnavailable("no time was left to ask ZooKeeper", unknown=False)
            waiter.unsure = True
            node = f"{parent}/{self._nodes.begin(claim)}"
            created = self._transport.create(node, waiter.value, EPHEMERAL_SEQUENTIAL)
            listed = self._transport.children(parent)
        waiter.listed_at = listed.sent_at
        try:
            path, stat = self._transport.wait(created, deadline)
        except NodeMissing:
            waiter.unsure = False
            self._transport.make_parents(parent, deadline)
            return None
        except (BackendUnavailable, BackendRejected) as error:
            waiter.unsure = error.unknown
            raise
        with self._waiters.lock:
            waiter.settle(self._transport.stripped(path), stat)
        if stat.ephemeralOwner != session.number:
            return None  # kazoo has opened another session
        session.prove(created.sent_at)
        return self._transport.listed(listed, deadline)

    def _list(self, waiter: ZkWaiter, deadline: float) -> Sequence[str]:
        """Step 2 again: list the siblings of a node that exists."""
        listed = self._transport.children(waiter.parent)
        waiter.listed_at = listed.sent_at
        return self._transport.listed(listed, deadline) or ()

    def _judge(
        self, claim: Claim, waiter: ZkWaiter, session: Session, children: Sequence[str], join: bool, deadline: float
    ) -> Granted | Busy | None:
        """Steps 3 and 4: hold the lock, or wait for the nodes ahead that exclude the claim.

        Returns None if our own node is missing.
        """
        assert waiter.path is not None
        parent, _, node = waiter.path.rpartition("/")
        children = relevant(self._nodes.style, claim, node, children)
        queue = contenders(children)
        position = next((at for at, one in enumerate(queue) if one.node == node), None)
        if position is None:
            waiter.path = None
            return None
        ahead = queue[:position]
        if error := (
            refusal(self._nodes.style, parent, queue[position], queue, children) or refusal_of_permits(claim, ahead)
        ):
            self._withdraw(claim, waiter, deadline)
            raise error
        rivals = awaited(claim, ahead)
        if not rivals:
            self._watcher.stop(claim.id)
            return self._granted(claim, waiter, session)
        if not join:
            self._withdraw(claim, waiter, deadline)
            return _busy(claim)
        return self._stand_behind(claim, waiter, [f"{parent}/{one.node}" for one in rivals], deadline)

    def _stand_behind(self, claim: Claim, waiter: ZkWaiter, rivals: Sequence[str], deadline: float) -> Busy | None:
        """Step 4: watch the last nodes that exclude the claim, so that a deletion wakes few waiters.

        Returns None if one of these nodes is already gone.
        """
        assert waiter.path is not None
        try:
            watched = self._watcher.wait(claim.id, rivals, waiter.path, deadline)
        except BackendUnavailable:
            return Busy(UNPUSHED)  # the listing has shown that the name is taken
        return _busy(claim) if watched else None

    def _withdraw(self, claim: Claim, waiter: ZkWaiter, deadline: float) -> None:
        """Delete our node, to leave the queue."""
        assert waiter.path is not None
        self._watcher.stop(claim.id)
        self._transport.deleted(waiter.path, deadline)
        waiter.path = None

    # ---- a create whose reply was lost

    def _find(self, claim: Claim, waiter: ZkWaiter, session: Session, deadline: float) -> None:
        """Find out whether a create without a reply made a node. A write to that node then proves that the session
        lives."""
        for path in self._own_nodes(claim, deadline):
            try:
                _, stat = self._transport.wait(self._transport.get(path), deadline)
            except NodeMissing:
                continue
            if stat.ephemeralOwner == session.number and waiter.path is None:
                with self._waiters.lock:
                    waiter.settle(path, stat)
            else:
                self._transport.deleted(path, deadline)
        waiter.unsure = False
        if waiter.path is not None:
            self._prove(waiter, waiter.path, session, deadline)

    def _prove(self, waiter: ZkWaiter, path: str, session: Session, deadline: float) -> None:
        proof = self._transport.put(path, waiter.value)
        if not self._transport.ordered(proof, deadline):
            waiter.path = None
        if not session.over:
            session.prove(proof.sent_at)

    def _own_nodes(self, claim: Claim, deadline: float) -> list[str]:
        """Return the nodes of this claim, whatever their sessions.

        When the reply to the listing arrives, every earlier request of the session has been executed. The sync is for a
        server that lags behind the server which created the node.
        """
        parent, begin = self._nodes.parent(claim.name), self._nodes.begin(claim)
        synced, listed = self._transport.sync(parent), self._transport.children(parent)
        self._transport.wait(synced, deadline)
        children = self._transport.listed(listed, deadline) or ()
        return [f"{parent}/{child}" for child in children if child.startswith(begin)]

    # ---- release

    def release(self, claim: Claim, granted: Granted | None, unsure: bool, within: float) -> bool:
        """Delete the claim's node. If a create got no reply, look for its node first."""
        deadline = self._now() + within
        with self._waiters.lock:  # so that no attempt records its node between the reads below
            waiter = self._waiters.cancel(claim, unsure)
            path, look, end = waiter.path, waiter.unsure, waiter.end
        if end is not None:
            self._watcher.not_at(end)
        self._watcher.stop(claim.id, path)
        deleted = False
        if look:
            self._transport.session(deadline)
            for found in self._own_nodes(claim, deadline):
                deleted |= self._transport.deleted(found, deadline)
        elif path is not None and self._transport.is_present(waiter.session):
            self._transport.connect(deadline)
            deleted = self._transport.deleted(path, deadline)
        self._waiters.given_back(claim, waiter)
        return deleted

    def _granted(self, claim: Claim, waiter: ZkWaiter, session: Session) -> Granted:
        if not claim.renew:
            if waiter.first_at is None:
                waiter.first_at = waiter.listed_at
                self._renewal.plan_end(claim, waiter, waiter.first_at + min(claim.ttl, session.ttl))
            return granted_once(claim, waiter.first_at, waiter.token, waiter.path, session)
        proof = session.validity()
        return Granted(
            waiter.token, proof.ttl, proof.sent_at, proof.valid_for, proof.renew_every, session.number, waiter.path
        )


def _busy(claim: Claim) -> Busy:
    return Busy(max(SAFETY_TIMER, claim.ttl))
