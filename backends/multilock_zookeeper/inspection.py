"""What operators ask: who holds a name, which names are held; and to take one away."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from multilock.backend import LockInfo
from multilock.values import decode_value
from multilock_zookeeper.keys import Nodes
from multilock_zookeeper.transport import NodeMissing, Transport

__all__ = ["Inspection"]

LISTED_AT_ONCE = 100  # names asked about at once when all locks are listed


class Inspection:
    def __init__(self, nodes: Nodes, transport: Transport, now: Callable[[], float]) -> None:
        self._nodes = nodes
        self._transport = transport
        self._now = now

    def inspect(self, name: str, within: float) -> LockInfo | None:
        deadline = self._now() + within
        self._transport.session(deadline)
        return self._look([name], deadline).get(name)

    def inspect_all(self, prefix: str, within: float) -> Iterator[LockInfo]:
        deadline = self._now() + within
        self._transport.session(deadline)
        children = self._transport.listed(self._transport.children(self._nodes.directory), deadline) or ()
        found = (self._nodes.name(child) for child in children)
        names = sorted(name for name in found if name is not None and name.startswith(prefix))
        for start in range(0, len(names), LISTED_AT_ONCE):
            yield from self._look(names[start : start + LISTED_AT_ONCE], self._now() + within).values()

    def force_release(self, name: str, within: float) -> bool:
        deadline = self._now() + within
        self._transport.session(deadline)
        parent = self._nodes.parent(name)
        while queue := self._queues([name], deadline)[name]:
            if self._transport.deleted(f"{parent}/{queue[0]}", deadline):
                return True
        return False

    def _look(self, names: Sequence[str], deadline: float) -> Mapping[str, LockInfo]:
        """Who holds each of these names; those that are free are left out."""
        infos: dict[str, LockInfo] = {}
        open_names = list(names)
        while open_names:
            queues = {name: queue for name, queue in self._queues(open_names, deadline).items() if queue}
            asked = [
                (name, self._transport.get(f"{self._nodes.parent(name)}/{queue[0]}")) for name, queue in queues.items()
            ]
            open_names = []
            for name, answer in asked:
                try:
                    value, stat = self._transport.wait(answer, deadline)
                except NodeMissing:  # it was released meanwhile
                    open_names.append(name)
                    continue
                waiting = len(queues[name]) - 1
                infos[name] = replace(decode_value(value or b""), name=name, token=stat.czxid, waiting=waiting)
        return infos

    def _queues(self, names: Sequence[str], deadline: float) -> dict[str, list[str]]:
        """Who stands for each of these names, asked about at once."""
        asked = [(name, self._transport.children(self._nodes.parent(name))) for name in names]
        return {name: self._nodes.queue(self._transport.listed(answer, deadline) or ()) for name, answer in asked}
