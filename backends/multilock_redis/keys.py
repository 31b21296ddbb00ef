"""The keys of a name, encoded for the network.

``lock`` contains the owner, and ``token`` the last fencing token. ``queue`` has the waiters in order, and ``live`` the
deadline of each waiter's place. ``holders`` has the owners of a shared lock. A tombstone, ``gone:<id>``, shows that a
claim was cancelled. The scripts then refuse late requests of the claim.
"""

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
    """The keys of one name."""

    common: bytes  # encoded: lock, queue, live, token, holders
    gone: bytes  # prefix of the keys of tombstones

    def own(self, claim: Claim) -> bytes:
        """Return the key of the claim's tombstone, and the claim's owner text, both encoded as bytes."""
        gone = self.gone + claim.id.encode()
        owner = claim.owner.encode()
        return b"$%d\r\n%b\r\n$%d\r\n%b\r\n" % (len(gone), gone, len(owner), owner)


class Keyspace:
    """The mapping between names and keys, below one prefix.

    In a cluster, a key ``{lock}:x`` is in the same slot as the key ``lock``. No lock's own key looks like this, because
    neither an escaped name nor a prefix contains a brace.
    """

    def __init__(self, prefix: str, slot_of: Callable[[bytes], int] | None = None) -> None:
        """``slot_of`` returns the slot of a key. It is needed for a cluster, where a request may only use keys of one
        slot."""
        self.prefix = prefix
        self._slot_of = slot_of
        self.in_slots = slot_of is not None
        # The cache is for names that are acquired repeatedly. Renewals do not use it, because thousands of names would
        # flush it.
        self.of = lru_cache(maxsize=1024)(self._keys)

    def lock(self, name: str) -> bytes:
        """Return the key of the lock itself."""
        return (self.prefix + escape(name)).encode()

    def primary_only(self, name: str) -> bytes:
        """Return a write on a key of this name that changes nothing. A replica answers this write with READONLY."""
        return pack("HDEL", b"{%b}:live" % self.lock(name), "")

    def slot(self, name: str) -> int:
        """Return the slot of all keys of this name, or 0 if the server has no slots."""
        return self._slot_of(self.lock(name)) if self._slot_of else 0

    def name(self, key: bytes) -> str | None:
        """Return the name of the lock whose key this is, or None for any other key."""
        text = key.decode(errors="replace")
        return unescape(text.removeprefix(self.prefix)) if text.startswith(self.prefix) else None

    def _keys(self, name: str) -> Keys:
        lock = self.lock(name)
        queue, live, gone = (b"{%b}:%b" % (lock, part) for part in (b"queue", b"live", b"gone:"))
        return Keys(bulks(lock, queue, live, token_of(lock), holders_of(lock)), gone)


def token_of(lock: bytes) -> bytes:
    """Return the key of this lock's token."""
    return b"{%b}:token" % lock


def holders_of(lock: bytes) -> bytes:
    """Return the key of the set that has the holders while this lock is shared."""
    return b"{%b}:holders" % lock
