"""Names and keys: the queue of a name, our own key in it, which others exclude it, and whose they are."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import islice, takewhile
from typing import Any, NamedTuple

from multilock.backend import Claim
from multilock.names import escape, unescape
from multilock.values import decode_value

__all__ = ["SHARED", "Ahead", "Keyspace", "Range", "end_of", "rests"]

SHARED = ("read", "permit")  # kinds of which several hold a name

# No number of permits has more than seven digits; one that has is somebody else's.
_CONTENDER = re.compile(rb"(?:(read|write)/|permit/(\d{1,7})/)?[^/]+", re.DOTALL)

Range = tuple[bytes, bytes]
"""From one key up to another, which is not in it; or one key and ``b""``."""


class Ahead(NamedTuple):
    """Whom a claim waits for, among the keys that are older than its own."""

    others: tuple[Range, ...]  #: whoever does not fit
    like: tuple[Range, ...] = ()  #: those who hold the name together with it, where there may be too many
    room: int = 1  #: … which they are from this number on
    beside: Range | None = None  #: those who hold the name together with it, however many
    strangers: tuple[Range, ...] = ()  #: permits of another number: the claim does not come in while there are any


class Keyspace:
    """Names and keys."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix.encode()

    def queue(self, name: str) -> Range:
        """The keys of all contenders for this name."""
        return _below(self._folder(name))

    def own(self, claim: Claim) -> bytes:
        return self._folder(claim.name) + _kin(claim) + claim.id.encode()

    def ahead(self, claim: Claim) -> Ahead:
        """Readers never look at readers, but for their number, so that thousands of them cost another nothing."""
        begin, end = self.queue(claim.name)
        if claim.mode == "x":
            return Ahead(((begin, end),))
        like = _below(begin + _kin(claim))
        others = (begin, like[0]), (like[1], end)
        if not claim.permits:
            return Ahead(others, beside=like)
        first, last = _below(begin + b"permit/")
        return Ahead(others, (like,), claim.permits, None, ((first, like[0]), (like[1], last)))

    def gone(self, claim: Claim) -> bytes:
        """The tombstone of a cancelled claim. No escaped name begins with ``!``."""
        return self.prefix + b"!gone/" + claim.id.encode()

    def name(self, key: bytes) -> str | None:
        """The lock in whose queue this key stands; None for any other key."""
        escaped, slash, _ = key.removeprefix(self.prefix).partition(b"/")
        if not slash or not escaped or escaped.startswith(b"!"):
            return None
        return unescape(escaped.decode(errors="replace"))

    def kind(self, row: Any) -> tuple[str, int] | None:
        """As what the owner of this key, of a queue, contends for the name: ``read``, ``write``, ``permit`` and of how
        many, or ``lock``. None: it is no contender's. One without a lease is an application's data. One with a further
        slash belongs to a longer prefix or name, but for the readers, writers and permits of this one, which stand
        below it as those of etcd's own recipe do. Neither is ours to show as a lock, or to take away."""
        _, _, contender = row.key.removeprefix(self.prefix).partition(b"/")
        found = _CONTENDER.fullmatch(contender) if row.lease else None
        if found is None:
            return None
        return ("permit", int(found[2])) if found[2] else ((found[1] or b"lock").decode(), 0)

    def holders(self, queue: Iterable[Any]) -> list[Any]:
        """Those who hold the name, of the keys of its queue in order of arrival."""
        rows = list(queue)
        first = self.kind(rows[0]) if rows else None
        if first is None:
            return []
        kind, permits = first
        room = (permits or None) if kind in SHARED else 1
        return list(takewhile(lambda row: self.kind(row) == first, islice(rows, room)))

    def _folder(self, name: str) -> bytes:
        return self.prefix + escape(name).encode() + b"/"


def end_of(prefix: bytes) -> bytes:
    """The key after all that begin with ``prefix``."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else b"\0"


def rests(row: Any) -> bool:
    """Its claim was released, and left the name taken for a while."""
    return bool(row.lease) and decode_value(row.value).resting_until is not None


def _below(prefix: bytes) -> Range:
    return prefix, end_of(prefix)


def _kin(claim: Claim) -> bytes:
    """What the keys of its kind begin with, below the name."""
    if claim.permits:
        return b"permit/%d/" % claim.permits
    return {"read": b"read/", "write": b"write/"}.get(claim.kind, b"")
