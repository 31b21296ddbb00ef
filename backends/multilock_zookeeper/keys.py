"""Names and nodes: where a lock's contenders are, what ours is called there, and in which order they stand."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from multilock import BackendRejected
from multilock.backend import Claim
from multilock.names import escape, unescape

__all__ = ["LAST_NUMBER", "STYLES", "Contender", "Nodes"]

STYLES = {"kazoo": "curator", "curator": "kazoo"}  # each, and the one that does not see it
LAST_NUMBER = 2**31 - 1  # a server that has come there gives it to everybody from then on
_CONTENDER = re.compile(r"(?:!(p\d+))?(__lock__|__rlock__|-lock-|__WRIT__|__READ__)(\d{10}|-\d{9,10})$")
_MARKS = {"__lock__": "kazoo", "__rlock__": "kazoo", "-lock-": "curator", "__WRIT__": "curator", "__READ__": "curator"}
_READS = {"__rlock__", "__READ__"}
_SEMAPHORE = re.compile(r"[0-9a-f]{32}|locks|leases")  # a lease of kazoo's; what Curator's has below its path


class Contender(NamedTuple):
    """A node that stands in a queue; so many are in order. ``mode`` is as that of a claim."""

    number: int
    node: str
    mode: str
    style: str

    @property
    def permits(self) -> int:
        return int(self.mode[1:]) if self.mode[0] == "p" else 0


class Nodes:
    """Names and nodes."""

    def __init__(self, prefix: str, style: str) -> None:
        self._base = "/" + prefix.lstrip("/")
        self.style = style
        self.directory = self._base[: self._base.rindex("/")] or "/"
        self._begin = self._base[self._base.rindex("/") + 1 :]

    def parent(self, name: str) -> str:
        """Of the nodes that contend for this name."""
        return self._base + escape(name)

    def name(self, child: str) -> str | None:
        """The lock that this child of `directory` is the parent of."""
        if not child.startswith(self._begin) or child[len(self._begin) :].startswith("!"):
            return None
        return unescape(child[len(self._begin) :])

    def begin(self, claim: Claim) -> str:
        """What the claim's own node is called, before the server puts a number to it. Every recipe of the style takes
        a permit for a lock, and so waits for it."""
        permit = f"!{claim.mode}" if claim.permits else ""
        if self.style == "kazoo":
            return f"{claim.id}{permit}{'__rlock__' if claim.mode == 'r' else '__lock__'}"
        digits = claim.id[-32:]
        uuid = "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
        if claim.mode == "r":
            return f"_c_{uuid}-__READ__"
        return f"_c_{uuid}-__WRIT__" if claim.kind == "write" else f"_c_{uuid}-{permit and permit + '-'}lock-"

    def queue(self, children: Sequence[str]) -> list[Contender]:
        """The contenders in their order, whatever their style: by number, which is no text when it gets negative."""
        found = [(child, _CONTENDER.search(child)) for child in children]
        return sorted(
            Contender(int(parts[3]), child, parts[1] or ("r" if parts[2] in _READS else "x"), _MARKS[parts[2]])
            for child, parts in found
            if parts
        )

    def refusal(
        self, parent: str, own: Contender, queue: Sequence[Contender], children: Sequence[str]
    ) -> BackendRejected | None:
        """Why the order among these children, one of which is ours, tells nobody who holds."""
        if stranger := next((one.node for one in queue if one.style != self.style), None):
            other = STYLES[self.style]
            tool = "Curator's recipes" if other == "curator" else "kazoo, or multilock without node_style=curator"
            return BackendRejected(
                f"{parent} is used by {tool} (node {stranger!r}), whose order differs from ours: set node_style={other}"
            )
        if stranger := next((child for child in children if _SEMAPHORE.fullmatch(child)), None):
            return BackendRejected(
                f"{parent} is used by a semaphore of kazoo or of Curator (node {stranger!r}), whose holders do not see "
                "ours: use another name"
            )
        if self.is_last(own.node):
            return BackendRejected(
                f"{parent} has counted to {LAST_NUMBER} and cannot tell any more who came first: "
                "delete that node while nobody holds or awaits the lock"
            )
        return None

    def is_last(self, child: str) -> bool:
        """Whether its number is the one that all who come later get as well: no order is left among them."""
        found = _CONTENDER.search(child)
        return found is not None and int(found[3]) == LAST_NUMBER
