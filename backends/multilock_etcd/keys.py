"""The keys of a name: its queue, our own key, and the keys that exclude ours."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import islice, takewhile
from typing import Any, NamedTuple

from multilock.backend import Claim
from multilock.names import escape, unescape
from multilock.values import decode_value

__all__ = ["SHARED", "Ahead", "EtcdKeyspace", "Range", "end_of", "rests"]

SHARED = ("read", "permit")  # the kinds of claims that can share a name

# A number of permits has at most seven digits.
_CONTENDER = re.compile(rb"(?:(read|write)/|permit/(\d{1,7})/)?[^/]+", re.DOTALL)
# The id of a multilock claim, at the end of a key.
_OURS = re.compile(rb"[0-9a-f]{16}\.[0-9a-f]{32}$")

Range = tuple[bytes, bytes]
"""A key and the end of a range, which is not part of it; or a single key and ``b""``."""


class Ahead(NamedTuple):
    """The ranges of keys for which a claim waits if they are older than its own key."""

    others: tuple[Range, ...]  #: keys that exclude the claim
    like: tuple[Range, ...] = ()  #: keys that share the name with the claim, up to a limit
    room: int = 1  #: the limit: the claim has to wait if ``like`` has at least this many older keys
    beside: Range | None = None  #: keys that share the name with the claim without a limit
    strangers: tuple[Range, ...] = ()  #: permits of claims that asked for a different number of permits


class EtcdKeyspace:
    """The mapping between names and keys, below one prefix."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix.encode()

    def queue(self, name: str) -> Range:
        """Return the range that contains the keys of all contenders for this name."""
        return _below(self._folder(name))

    def own(self, claim: Claim) -> bytes:
        """Return the key of this claim."""
        return self._folder(claim.name) + _kin(claim) + claim.id.encode()

    def ahead(self, claim: Claim) -> Ahead:
        """Return the ranges of keys for which this claim waits.

        A reader only reads the number of other readers, so that thousands of readers cost it nothing.
        """
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
        """Return the key of the tombstone of a cancelled claim. No escaped name begins with ``!``."""
        return self.prefix + b"!gone/" + claim.id.encode()

    def name(self, key: bytes) -> str | None:
        """Return the name of the lock in whose queue this key is, or None for any other key."""
        escaped, slash, _ = key.removeprefix(self.prefix).partition(b"/")
        if not slash or not escaped or escaped.startswith(b"!"):
            return None
        return unescape(escaped.decode(errors="replace"))

    def kind(self, row: Any) -> tuple[str, int] | None:
        """Return the kind of the contender that owns this key of a queue, and its number of permits.

        The kind is ``read``, ``write``, ``permit`` or ``lock``. Returns None if no contender owns the key. A key
        without a lease is an application's data, unless it ends with an id of ours: then an operator has put it again
        (``etcdctl put``), which removes the lease. A key with a further slash belongs to a longer prefix or name,
        unless it is that of a reader, writer or permit. Only keys of contenders may be shown as locks or released by
        force.
        """
        _, _, contender = row.key.removeprefix(self.prefix).partition(b"/")
        found = _CONTENDER.fullmatch(contender) if row.lease or _OURS.search(contender) else None
        if found is None:
            return None
        return ("permit", int(found[2])) if found[2] else ((found[1] or b"lock").decode(), 0)

    def holders(self, queue: Iterable[Any]) -> list[Any]:
        """Return the keys that hold the name, given the keys of its queue in order of arrival."""
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
    """Return the end of the range of all keys that begin with ``prefix``."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else b"\0"


def rests(row: Any) -> bool:
    """Return whether this key's claim was released but keeps the name taken for a while."""
    return bool(row.lease) and decode_value(row.value).resting_until is not None


def _below(prefix: bytes) -> Range:
    return prefix, end_of(prefix)


def _kin(claim: Claim) -> bytes:
    """Return the part between the name and the id in the keys of claims of this kind."""
    if claim.permits:
        return b"permit/%d/" % claim.permits
    return {"read": b"read/", "write": b"write/"}.get(claim.kind, b"")
