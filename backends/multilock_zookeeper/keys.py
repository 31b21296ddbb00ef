"""Names and nodes: where a lock's contenders are, what ours is called there, and in which order they stand."""

from __future__ import annotations

import re
from collections.abc import Sequence

from multilock import BackendRejected
from multilock.backend import Claim
from multilock.names import escape, unescape

__all__ = ["LAST_NUMBER", "STYLES", "Nodes"]

STYLES = {"kazoo": "curator", "curator": "kazoo"}  # each, and the one that does not see it
LAST_NUMBER = 2**31 - 1  # a server that has come there gives it to everybody from then on
_CONTENDER = re.compile(r"(__lock__|-lock-)(\d{10}|-\d{9,10})$")
_MARKS = {"__lock__": "kazoo", "-lock-": "curator"}


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
        """What the claim's own node is called, before the server puts a number to it."""
        if self.style == "kazoo":
            return f"{claim.id}__lock__"
        digits = claim.id[-32:]
        uuid = "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
        return f"_c_{uuid}-lock-"

    def queue(self, children: Sequence[str]) -> list[str]:
        """The contenders in their order, whatever their style: by number, which is no text when it gets negative."""
        numbered = [(int(found[2]), child) for child in children if (found := _CONTENDER.search(child))]
        return [child for _, child in sorted(numbered)]

    def refusal(self, parent: str, own: str, children: Sequence[str]) -> BackendRejected | None:
        """Why the order among these children, one of which is ours, tells nobody who holds."""
        if stranger := self._stranger(children):
            other = STYLES[self.style]
            tool = "Curator's recipes" if other == "curator" else "kazoo, or multilock without node_style=curator"
            return BackendRejected(
                f"{parent} is used by {tool} (node {stranger!r}), whose order differs from ours: set node_style={other}"
            )
        if self.is_last(own):
            return BackendRejected(
                f"{parent} has counted to {LAST_NUMBER} and cannot tell any more who came first: "
                "delete that node while nobody holds or awaits the lock"
            )
        return None

    def is_last(self, child: str) -> bool:
        """Whether its number is the one that all who come later get as well: no order is left among them."""
        found = _CONTENDER.search(child)
        return found is not None and int(found[2]) == LAST_NUMBER

    def _stranger(self, children: Sequence[str]) -> str | None:
        """A contender of the style that ours does not exclude."""
        for child in children:
            if (found := _CONTENDER.search(child)) and _MARKS[found[1]] != self.style:
                return child
        return None
