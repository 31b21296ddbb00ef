"""The keys of names, below one prefix."""

from __future__ import annotations

from functools import lru_cache

from multilock.names import escape, unescape

__all__ = ["LockKeys", "after"]


class LockKeys:
    """The mapping between names and keys, below one prefix."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        # The cache is for names that are acquired repeatedly.
        self.of = lru_cache(maxsize=1024)(self._key)

    def name(self, key: str) -> str | None:
        """Return the name of the lock whose key this is, or None for any other key."""
        return unescape(key.removeprefix(self.prefix)) if key.startswith(self.prefix) else None

    def beginning(self, prefix: str) -> str:
        """Return the text with which the keys of all names with this ``prefix`` begin. Keys of other names may begin
        with it as well."""
        # escape() changes the names "." and "..", but not the dots of a longer name. So all keys are possible for these
        # two prefixes.
        return self.prefix + ("" if prefix in (".", "..") else escape(prefix))

    def _key(self, name: str) -> bytes:
        return (self.prefix + escape(name)).encode()


def after(beginning: str) -> str | None:
    """Return the least key after all keys that begin with ``beginning``. Returns None if no such key exists."""
    return beginning[:-1] + chr(ord(beginning[-1]) + 1) if beginning else None
