"""The nodes of a name: where its contenders are, what our own node is called, and their order."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from multilock import BackendRejected
from multilock.backend import Claim
from multilock.names import escape, unescape

__all__ = ["LAST_NUMBER", "STYLES", "Contender", "Nodes"]

STYLES = {"kazoo": "curator", "curator": "kazoo"}  # each style, and the style whose programs do not see it
LAST_NUMBER = 2**31 - 1  # a server whose counter has reached this number gives the same number to every later node
# A number of permits has at most seven digits. A node with more digits excludes every other claim, like a lock.
_CONTENDER = re.compile(r"(?:!(p\d{1,7}))?(__lock__|__rlock__|-lock-|__WRIT__|__READ__)(\d{10}|-\d{9,10})$", re.ASCII)
_LONGEST = 29  # characters that _CONTENDER matches at most; nothing before them needs to be searched
_DIGITS = 10  # of a number that is not negative
_MARKS = {"__lock__": "kazoo", "__rlock__": "kazoo", "-lock-": "curator", "__WRIT__": "curator", "__READ__": "curator"}
_READS = {"__rlock__", "__READ__"}
# By style: the ending of a plain reader, and the endings of a plain reader and of a plain lock or writer
_PLAIN = {"kazoo": ("__rlock__", ("__rlock__", "__lock__")), "curator": ("__READ__", ("__READ__", "__WRIT__"))}
_SEMAPHORE = re.compile(r"[0-9a-f]{32}|locks|leases")  # a lease of kazoo's semaphore; the children of Curator's


class Contender(NamedTuple):
    """A node in the queue of a name, compared by its number. ``mode`` is that of a claim."""

    number: int
    node: str
    mode: str
    style: str

    @property
    def permits(self) -> int:
        """The number of permits, or 0 if the contender is not a permit."""
        return int(self.mode[1:]) if self.mode[0] == "p" else 0


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

        Every recipe of the style takes a permit for a lock, and therefore waits for it.
        """
        permit = f"!{claim.mode}" if claim.permits else ""
        if self.style == "kazoo":
            return f"{claim.id}{permit}{'__rlock__' if claim.mode == 'r' else '__lock__'}"
        digits = claim.id[-32:]
        uuid = "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
        if claim.mode == "r":
            return f"_c_{uuid}-__READ__"
        return f"_c_{uuid}-__WRIT__" if claim.kind == "write" else f"_c_{uuid}-{permit and permit + '-'}lock-"

    def queue(self, children: Sequence[str]) -> list[Contender]:
        """Return the contenders of every style, in order.

        The order is that of the numbers. Sorting their text would be wrong once the server's counter is negative.
        """
        found = [(child, _parse(child)) for child in children]
        return sorted(
            Contender(int(parts[3]), child, parts[1] or ("r" if parts[2] in _READS else "x"), _MARKS[parts[2]])
            for child, parts in found
            if parts
        )

    def relevant(self, claim: Claim, own: str, children: Sequence[str]) -> Sequence[str]:
        """Leave out most of the children that do not matter to the claim, whose node is ``own``.

        Those are plain nodes of our style: locks, readers and writers with an ordinary number. The ones behind ``own``
        do not matter, and of the ones ahead that exclude the claim only the last does. To make a `Contender` of each of
        a thousand siblings would take longer than the request.
        """
        mine = own[-_DIGITS:]
        reader, plain = _PLAIN[self.style]
        kept: list[str] = []
        last, last_number = None, ""
        for child in children:
            number, begin = child[-_DIGITS:], child[:-_DIGITS]
            if number == mine or not begin.endswith(plain) or not number.isdecimal() or "!" in begin:
                kept.append(child)
            elif last_number < number < mine and not (claim.mode == "r" and begin.endswith(reader)):
                last, last_number = child, number
        return kept if last is None else [*kept, last]

    def refusal(
        self, parent: str, own: Contender, queue: Sequence[Contender], children: Sequence[str]
    ) -> BackendRejected | None:
        """Return an error if the order of these children, one of which is ours, does not show which of them hold the
        name. Returns None otherwise."""
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
                f"{parent} has counted to {LAST_NUMBER}, so the order of arrival is no longer known: "
                "delete that node while nobody holds the lock or waits for it"
            )
        return None

    def is_last(self, child: str) -> bool:
        """Return whether this child has the highest number that exists: all later children get the same number, so they
        have no order."""
        found = _parse(child)
        return found is not None and int(found[3]) == LAST_NUMBER


def _parse(child: str) -> re.Match[str] | None:
    return _CONTENDER.search(child, max(0, len(child) - _LONGEST))
