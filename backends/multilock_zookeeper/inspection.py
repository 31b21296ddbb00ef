"""The operators' requests: show who holds a name, list all held names, and take a name away."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from multilock import BackendRejected
from multilock.backend import LockInfo
from multilock.values import decode_value
from multilock_zookeeper.keys import Nodes
from multilock_zookeeper.queue import Contender, contenders, holding
from multilock_zookeeper.transport import Answer, NodeMissing, Transport

__all__ = ["Inspection"]

LISTED_AT_ONCE = 100  # names in one round of requests when all locks are listed
DELETED_AT_ONCE = 250  # holders of one name in one round of requests
SHOWN = 100  # the greatest number of holders of one name that inspect() returns


class Inspection:
    """The operators' requests of one client."""

    def __init__(self, nodes: Nodes, transport: Transport, now: Callable[[], float]) -> None:
        self._nodes = nodes
        self._transport = transport
        self._now = now

    def inspect(self, name: str, within: float) -> LockInfo | None:
        deadline = self._now() + within
        self._transport.session(deadline)
        return self._look([name], SHOWN, deadline).get(name)

    def inspect_all(self, prefix: str, within: float) -> Iterator[LockInfo]:
        deadline = self._now() + within
        self._transport.session(deadline)
        children = self._transport.listed(self._transport.children(self._nodes.directory), deadline) or ()
        found = (self._nodes.name(child) for child in children)
        names = sorted(name for name in found if name is not None and name.startswith(prefix))
        for start in range(0, len(names), LISTED_AT_ONCE):
            yield from self._look(names[start : start + LISTED_AT_ONCE], 1, self._now() + within).values()

    def force_release(self, name: str, within: float) -> bool:
        deadline = self._now() + within
        self._transport.session(deadline)
        parent = self._nodes.parent(name)
        while holders := holding(self._queues([name], deadline)[name]):
            taken = 0
            for start in range(0, len(holders), DELETED_AT_ONCE):
                some = holders[start : start + DELETED_AT_ONCE]
                answers = [self._transport.delete(f"{parent}/{one.node}") for one in some]
                taken += sum(self._is_done(answer, deadline) for answer in answers)
            if taken:
                return True
        return False

    def _is_done(self, answer: Answer, deadline: float) -> bool:
        try:
            self._transport.wait(answer, deadline)
        except NodeMissing:
            return False
        return True

    def _look(self, names: Sequence[str], shown: int, deadline: float) -> Mapping[str, LockInfo]:
        """Return up to ``shown`` holders of each of these names. Free names are left out."""
        infos: dict[str, LockInfo] = {}
        open_names = list(names)
        while open_names:
            queues = {name: queue for name, queue in self._queues(open_names, deadline).items() if queue}
            asked = {name: self._ask(name, holding(queue)[:shown]) for name, queue in queues.items()}
            open_names = []
            for name, answers in asked.items():
                first, *others = (self._told(name, one, answer, deadline) for one, answer in answers)
                if first is None:  # the holder's node was deleted between the two requests
                    open_names.append(name)
                    continue
                queue, holders = queues[name], len(holding(queues[name]))
                infos[name] = replace(
                    first,
                    waiting=len(queue) - holders,
                    holders=None if queue[0].mode == "x" else holders,
                    others=tuple(other for other in others if other),
                )
        return infos

    def _ask(self, name: str, holders: Sequence[Contender]) -> list[tuple[Contender, Answer]]:
        return [(one, self._transport.get(f"{self._nodes.parent(name)}/{one.node}")) for one in holders]

    def _told(self, name: str, one: Contender, answer: Answer, deadline: float) -> LockInfo | None:
        """Return the `LockInfo` in this holder's node, or None if the node is gone. If this user may not read the node,
        the result has only its token and its mode."""
        try:
            value, stat = self._transport.wait(answer, deadline)
        except NodeMissing:
            return None
        except BackendRejected:
            exists = self._transport.exists(f"{self._nodes.parent(name)}/{one.node}")  # needs no access right
            value, stat = b"", self._transport.wait(exists, deadline)
            if stat is None:
                return None
        info = decode_value(value or b"")
        kind = info.kind or {"r": "read", "x": None}.get(one.mode, "permit")  # kazoo's readers do not write a kind
        return replace(info, name=name, kind=kind, token=stat.czxid, permits=one.permits or None)

    def _queues(self, names: Sequence[str], deadline: float) -> dict[str, list[Contender]]:
        """Return the queues of these names, which are requested all at once."""
        asked = [(name, self._transport.children(self._nodes.parent(name))) for name in names]
        return {name: contenders(self._transport.listed(answer, deadline) or ()) for name, answer in asked}
