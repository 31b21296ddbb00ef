"""The nodes of a name: the path of their parent, and the name of a claim's own node."""

from __future__ import annotations

from multilock.backend import Claim
from multilock.names import escape, unescape

__all__ = ["STYLES", "Nodes"]

# style of node names -> the style of the programs that do not see such nodes
STYLES = {"kazoo": "curator", "curator": "kazoo"}


class Nodes:
    """The mapping between names and nodes, below one prefix."""

    def __init__(self, prefix: str, style: str) -> None:
        self._base = "/" + prefix.lstrip("/")
        self.style = style
        self.directory = self._base[: self._base.rindex("/")] or "/"
        self._begin = self._base[self._base.rindex("/") + 1 :]

    def parent(self, name: str) -> str:
        """Return the parent of the nodes that contend for this name."""
        return self._base + escape(name)

    def name(self, child: str) -> str | None:
        """Return the name of the lock whose parent is this child of `directory`, or None for any other child."""
        if not child.startswith(self._begin) or child[len(self._begin) :].startswith("!"):
            return None
        return unescape(child[len(self._begin) :])

    def begin(self, claim: Claim) -> str:
        """Return the name of the claim's node, to which the server appends a number.

        Other programs of the same style take the node of a permit for that of a lock, and wait for it.
        """
        permit = f"!{claim.mode}" if claim.permits else ""
        if self.style == "kazoo":
            return f"{claim.id}{permit}{'__rlock__' if claim.mode == 'r' else '__lock__'}"
        digits = claim.id[-32:]
        uuid = "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
        if claim.mode == "r":
            return f"_c_{uuid}-__READ__"
        return f"_c_{uuid}-__WRIT__" if claim.kind == "write" else f"_c_{uuid}-{permit and permit + '-'}lock-"
