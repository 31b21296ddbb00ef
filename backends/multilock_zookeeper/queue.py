"""The queue of a name: the order of its contenders, the contenders that hold the name, and those for which a claim
waits."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple

from multilock import BackendRejected
from multilock.backend import Claim, other_number
from multilock_zookeeper.keys import STYLES

__all__ = [
    "LAST_NUMBER",
    "Contender",
    "awaited",
    "contenders",
    "holding",
    "is_last",
    "refusal",
    "refusal_of_permits",
    "relevant",
]

LAST_NUMBER = 2**31 - 1  # once a server's counter has reached this sequence number, every later node gets it
# A number of permits has at most seven digits. A node with more digits excludes every other claim, like a lock.
_CONTENDER = re.compile(r"(?:!(p\d{1,7}))?(__lock__|__rlock__|-lock-|__WRIT__|__READ__)(\d{10}|-\d{9,10})$", re.ASCII)
_LONGEST = 29  # the greatest number of characters that _CONTENDER matches
_DIGITS = 10  # digits of a sequence number that is not negative
_MARKS = {"__lock__": "kazoo", "__rlock__": "kazoo", "-lock-": "curator", "__WRIT__": "curator", "__READ__": "curator"}
_READS = {"__rlock__", "__READ__"}
# Style -> the ending of a plain reader's node, and the endings of all plain nodes (readers, locks and writers).
_PLAIN = {"kazoo": ("__rlock__", ("__rlock__", "__lock__")), "curator": ("__READ__", ("__READ__", "__WRIT__"))}
_SEMAPHORE = re.compile(r"[0-9a-f]{32}|locks|leases")  # a lease of kazoo's Semaphore, or a folder of Curator's


class Contender(NamedTuple):
    """A node in the queue of a name. Contenders are compared by ``number``, their sequence number.

    ``mode`` is the mode of a claim (`Claim.mode`).
    """

    number: int
    node: str
    mode: str
    style: str

    @property
    def permits(self) -> int:
        """The number of permits of the semaphore, or 0 if the contender is not a permit."""
        return int(self.mode[1:]) if self.mode[0] == "p" else 0


def contenders(children: Sequence[str]) -> list[Contender]:
    """Return the contenders of every style, ordered by their sequence numbers.

    As texts, the sequence numbers would be in a wrong order once the server's counter is negative.
    """
    found = [(child, _parse(child)) for child in children]
    return sorted(
        Contender(int(parts[3]), child, parts[1] or ("r" if parts[2] in _READS else "x"), _MARKS[parts[2]])
        for child, parts in found
        if parts
    )


def relevant(style: str, claim: Claim, own: str, children: Sequence[str]) -> Sequence[str]:
    """Leave out most of the children that do not matter to the claim, whose node is ``own``.

    Only plain nodes of ``style`` are left out: locks, readers and writers with an ordinary sequence number. Nodes
    behind ``own`` do not matter. If several ahead exclude the claim, only the last of them matters. Making a
    `Contender` of each of a thousand siblings would take longer than the request.
    """
    mine = own[-_DIGITS:]
    reader, plain = _PLAIN[style]
    kept: list[str] = []
    last, last_number = None, ""
    for child in children:
        number, begin = child[-_DIGITS:], child[:-_DIGITS]
        if number == mine or not begin.endswith(plain) or not number.isdecimal() or "!" in begin:
            kept.append(child)
        elif last_number < number < mine and not (claim.mode == "r" and begin.endswith(reader)):
            last, last_number = child, number
    return kept if last is None else [*kept, last]


def is_last(child: str) -> bool:
    """Return whether this child has the highest possible sequence number. All later children get the same number, so
    they have no order."""
    found = _parse(child)
    return found is not None and int(found[3]) == LAST_NUMBER


def _parse(child: str) -> re.Match[str] | None:
    return _CONTENDER.search(child, max(0, len(child) - _LONGEST))


# ---- which claims exclude each other


def awaited(claim: Claim, ahead: Sequence[Contender]) -> Sequence[Contender]:
    """Return the nodes for which the claim waits: at least one of them must be deleted before the claim holds the name.

    The result is empty if the claim holds the name.
    """
    for one in reversed(ahead):
        if one.mode != claim.mode or claim.mode == "x":
            return [one]
    return ahead[-claim.permits :] if claim.permits and len(ahead) >= claim.permits else ()


def holding(queue: Sequence[Contender]) -> Sequence[Contender]:
    """Return the contenders of a queue that hold the name."""
    if not queue or queue[0].mode == "x":
        return queue[:1]
    equals = list(takewhile(lambda one: one.mode == queue[0].mode, queue))
    return equals[: queue[0].permits or None]


# ---- claims that are refused


def refusal(
    style: str, parent: str, own: Contender, queue: Sequence[Contender], children: Sequence[str]
) -> BackendRejected | None:
    """Return an error if the order of these children, one of which is ours, does not show which of them hold the name.
    Returns None otherwise."""
    if stranger := next((one.node for one in queue if one.style != style), None):
        other = STYLES[style]
        tool = "Curator's recipes" if other == "curator" else "kazoo, or multilock without node_style=curator"
        return BackendRejected(
            f"{parent} is used by {tool} (node {stranger!r}), whose order differs from ours: set node_style={other}"
        )
    if stranger := next((child for child in children if _SEMAPHORE.fullmatch(child)), None):
        return BackendRejected(
            f"{parent} is used by a semaphore of kazoo or of Curator (node {stranger!r}), whose holders do not see "
            "ours: use another name"
        )
    if is_last(own.node):
        return BackendRejected(
            f"{parent} has counted to {LAST_NUMBER}, so the order of arrival is no longer known: "
            "delete that node while nobody holds the lock or waits for it"
        )
    return None


def refusal_of_permits(claim: Claim, ahead: Sequence[Contender]) -> BackendRejected | None:
    """Return an error if the claim and the first permit ahead asked for different numbers of permits.

    The first permit in the queue defines the number of permits. A later claim with a different number is refused and
    deletes its own node, so its number is ignored here.
    """
    first = next((one.permits for one in ahead if one.permits), claim.permits)
    return other_number(claim, first, "zookeeper") if claim.permits not in (0, first) else None
