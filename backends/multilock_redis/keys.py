"""Names and keys, as they go over the wire."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from multilock.backend import Claim
from multilock.names import escape, unescape
from multilock_redis.wire import bulks, pack

__all__ = ["Keys", "Keyspace", "holders_of", "token_of"]


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one name, as they go over the wire."""

    common: bytes  # packed: lock, queue, live, token, holders
    gone: bytes  # what the key of a tombstone begins with

    def own(self, claim: Claim) -> bytes:
        """Packed: the claim's tombstone, its owner text."""
        gone = self.gone + claim.id.encode()
        owner = claim.owner.encode()
        return b"$%d\r\n%b\r\n$%d\r\n%b\r\n" % (len(gone), gone, len(owner), owner)


class Keyspace:
    """Names and keys. ``{lock}:x`` is in the lock's slot of a cluster, and no lock can be called so: no escaped name
    and no prefix has a brace."""

    def __init__(self, prefix: str, slot_of: Callable[[bytes], int] | None = None) -> None:
        """``slot_of``: the slot of a key, where keys of two slots may not stand in one request."""
        self.prefix = prefix
        self._slot_of = slot_of
        self.in_slots = slot_of is not None
        # For names that are taken again and again; a renewal of thousands, each once in a while, would only flush it.
        self.of = lru_cache(maxsize=1024)(self._keys)

    def lock(self, name: str) -> bytes:
        return (self.prefix + escape(name)).encode()

    def primary_only(self, name: str) -> bytes:
        """A write that changes nothing, on a key of this name: a replica says READONLY to it."""
        return pack("HDEL", b"{%b}:live" % self.lock(name), "")

    def slot(self, name: str) -> int:
        """That of all keys of this name; always 0 where there are none."""
        return self._slot_of(self.lock(name)) if self._slot_of else 0

    def name(self, key: bytes) -> str | None:
        """The lock whose key this is; None for any other key."""
        text = key.decode(errors="replace")
        return unescape(text.removeprefix(self.prefix)) if text.startswith(self.prefix) else None

    def _keys(self, name: str) -> Keys:
        lock = self.lock(name)
        queue, live, gone = (b"{%b}:%b" % (lock, part) for part in (b"queue", b"live", b"gone:"))
        return Keys(bulks(lock, queue, live, token_of(lock), holders_of(lock)), gone)


def token_of(lock: bytes) -> bytes:
    return b"{%b}:token" % lock


def holders_of(lock: bytes) -> bytes:
    return b"{%b}:holders" % lock
