"""Names and keys: the queue of a name, our own key in it, and whose the other keys there are."""

from __future__ import annotations

import re
from typing import Any

from multilock.backend import Claim
from multilock.names import escape, unescape
from multilock.values import decode_value

__all__ = ["Keyspace", "end_of", "rests"]

_CONTENDER = re.compile(rb"(?:read/|write/|permit/\d+/)?[^/]+", re.DOTALL)


class Keyspace:
    """Names and keys."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix.encode()

    def queue(self, name: str) -> bytes:
        """What the keys of all contenders for this name begin with."""
        return self.prefix + escape(name).encode() + b"/"

    def own(self, claim: Claim) -> bytes:
        return self.queue(claim.name) + claim.id.encode()

    def gone(self, claim: Claim) -> bytes:
        """The tombstone of a cancelled claim. No escaped name begins with ``!``."""
        return self.prefix + b"!gone/" + claim.id.encode()

    def name(self, key: bytes) -> str | None:
        """The lock in whose queue this key stands; None for any other key."""
        escaped, slash, _ = key.removeprefix(self.prefix).partition(b"/")
        if not slash or not escaped or escaped.startswith(b"!"):
            return None
        return unescape(escaped.decode(errors="replace"))

    def contends(self, row: Any) -> bool:
        """Whether this key, of a queue, is a contender's. One without a lease is an application's data. One with a
        further slash belongs to a longer prefix or name, but for the readers, writers and permits of this one, which
        stand below it as those of etcd's own recipe do. Neither is ours to show as a lock, or to take away."""
        _, _, contender = row.key.removeprefix(self.prefix).partition(b"/")
        return bool(row.lease) and _CONTENDER.fullmatch(contender) is not None


def end_of(prefix: bytes) -> bytes:
    """The key after all that begin with ``prefix``."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else b"\0"


def rests(row: Any) -> bool:
    """Its claim was released, and left the name taken for a while."""
    return bool(row.lease) and decode_value(row.value).resting_until is not None
