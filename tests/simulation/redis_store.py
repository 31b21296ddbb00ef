"""The data of a simulated Redis, and the commands that multilock sends or that its scripts call. The method for a
command is named ``do_`` and the command.

Text is latin-1, so that every byte is one character. `test_redis_model` compares the replies with those of a real
server.
"""

from __future__ import annotations

import math
from collections.abc import Callable

__all__ = ["Refused", "Reply", "Sorted", "Status", "Store"]

#: A reply: a bulk string, a status, an integer, a list, or nothing.
Reply = object


class Refused(Exception):
    """An error reply."""


class Status(str):
    __slots__ = ()


class Sorted(dict[str, float]):
    """A sorted set, which maps each member to its score."""

    def in_order(self) -> list[tuple[str, float]]:
        # Latin-1 text is sorted as its bytes are in Redis.
        return sorted(self.items(), key=lambda item: (item[1], item[0]))


Value = str | dict[str, str] | Sorted


def number(text: str) -> int:
    """Convert an argument to an integer. Raises Refused if it is not written as an integer."""
    try:
        value = int(text)
    except ValueError:
        raise Refused("ERR value is not an integer or out of range") from None
    if str(value) != text:
        raise Refused("ERR value is not an integer or out of range")
    return value


def written(score: float) -> str:
    """Return a score as text, as Redis writes it."""
    if score == math.floor(score) and abs(score) < 1e17:
        return str(int(score))
    return f"{score:.17g}"


class Store:
    """The keys of one server. ``touched`` is called with each changed key."""

    def __init__(self, touched: Callable[[str], None]) -> None:
        self.now = 0  # the server's clock in milliseconds
        self._touched = touched
        self.values: dict[str, Value] = {}
        self.ends: dict[str, int] = {}
        self.on_end: Callable[[str, int], None] = lambda key, end: None  # called when a key gets an expiry

    def look(self, key: str) -> Value | None:
        """Return the value of a key, or None if it is missing. Deletes the key if it has expired."""
        if self.ends.get(key, math.inf) <= self.now:
            self.delete(key)
        return self.values.get(key)

    def delete(self, key: str) -> int:
        """Delete a key. Returns 1 if it existed, otherwise 0."""
        if key not in self.values:
            return 0
        del self.values[key]
        self.ends.pop(key, None)
        self._touched(key)
        return 1

    def _typed(self, key: str, kind: type) -> Value | None:
        value = self.look(key)
        if value is not None and type(value) is not kind:
            raise Refused("WRONGTYPE Operation against a key holding the wrong kind of value")
        return value

    def _text(self, key: str) -> str | None:
        value = self._typed(key, str)
        assert value is None or isinstance(value, str)
        return value

    def _hash(self, key: str) -> dict[str, str]:
        value = self._typed(key, dict)
        assert not isinstance(value, str | Sorted)
        return {} if value is None else value

    def _sorted(self, key: str) -> Sorted:
        value = self._typed(key, Sorted)
        return value if isinstance(value, Sorted) else Sorted()

    def _shrunk(self, key: str, value: Value) -> None:
        if value:
            self._touched(key)
        else:
            self.delete(key)

    def _end(self, key: str, end: int) -> None:
        self.ends[key] = end
        self.on_end(key, end)

    # Strings and keys

    def do_get(self, key: str) -> Reply:
        return self._text(key)

    def do_mget(self, *keys: str) -> Reply:
        return [value if isinstance(value := self.look(key), str) else None for key in keys]

    def do_set(self, key: str, value: str, *options: str) -> Reply:
        if "NX" in options and self.look(key) is not None:
            return None
        self.look(key)
        end = None
        if "PX" in options:
            if (life := number(options[options.index("PX") + 1])) <= 0:
                raise Refused("ERR invalid expire time in 'set' command")
            end = self.now + life
        self.values[key] = value
        self.ends.pop(key, None)
        if end is not None:
            self._end(key, end)
        self._touched(key)
        return Status("OK")

    def do_del(self, *keys: str) -> Reply:
        return sum(self.delete(key) for key in keys if self.look(key) is not None)

    def do_exists(self, *keys: str) -> Reply:
        return sum(self.look(key) is not None for key in keys)

    def do_pexpire(self, key: str, life: str) -> Reply:
        milliseconds = number(life)
        if self.look(key) is None:
            return 0
        if milliseconds <= 0:
            return self.delete(key)
        self._end(key, self.now + milliseconds)
        self._touched(key)
        return 1

    def do_pttl(self, key: str) -> Reply:
        if self.look(key) is None:
            return -2
        return self.ends[key] - self.now if key in self.ends else -1

    # Hashes

    def do_hset(self, key: str, field: str, value: str) -> Reply:
        fields = self._hash(key)
        self.values[key] = fields
        new = field not in fields
        fields[field] = value
        self._touched(key)
        return int(new)

    def do_hget(self, key: str, field: str) -> Reply:
        return self._hash(key).get(field)

    def do_hdel(self, key: str, field: str) -> Reply:
        fields = self._hash(key)
        if fields.pop(field, None) is None:
            return 0
        self._shrunk(key, fields)
        return 1

    # Sorted sets

    def do_zadd(self, key: str, *words: str) -> Reply:
        members = self._sorted(key)
        *options, score, member = words
        known = member in members
        if known and "NX" in options:
            return 0
        if not known or members[member] != float(score):
            members[member] = float(score)
            self.values[key] = members
            self._touched(key)
        return int(not known)

    def do_zrem(self, key: str, member: str) -> Reply:
        members = self._sorted(key)
        if members.pop(member, None) is None:
            return 0
        self._shrunk(key, members)
        return 1

    def do_zcard(self, key: str) -> Reply:
        return len(self._sorted(key))

    def do_zscore(self, key: str, member: str) -> Reply:
        members = self._sorted(key)
        return written(members[member]) if member in members else None

    def do_zrank(self, key: str, member: str) -> Reply:
        members = self._sorted(key)
        return [each for each, _ in members.in_order()].index(member) if member in members else None

    def do_zrange(self, key: str, first: str, last: str, *options: str) -> Reply:
        items = self._sorted(key).in_order()
        start, end = int(first), int(last)
        start = max(0, start + len(items)) if start < 0 else start
        end = end + len(items) if end < 0 else end
        return self._listed(items[start : end + 1], options)

    def do_zrangebyscore(self, key: str, low: str, high: str, *options: str) -> Reply:
        items = self._between(key, low, high)
        if "LIMIT" in options:
            at = options.index("LIMIT")
            skipped, most = int(options[at + 1]), int(options[at + 2])
            items = items[skipped : skipped + most]
        return self._listed(items, options)

    def do_zcount(self, key: str, low: str, high: str) -> Reply:
        return len(self._between(key, low, high))

    def do_zremrangebyscore(self, key: str, low: str, high: str) -> Reply:
        members = self._sorted(key)
        gone = self._between(key, low, high)
        for member, _ in gone:
            del members[member]
        if gone:
            self._shrunk(key, members)
        return len(gone)

    def _listed(self, items: list[tuple[str, float]], options: tuple[str, ...]) -> list[str]:
        if "WITHSCORES" in options:
            return [word for member, score in items for word in (member, written(score))]
        return [member for member, _ in items]

    def _between(self, key: str, low: str, high: str) -> list[tuple[str, float]]:
        least, most = (float(bound.removeprefix("(")) for bound in (low, high))
        return [
            (member, score)
            for member, score in self._sorted(key).in_order()
            if (score > least if low[0] == "(" else score >= least)
            and (score < most if high[0] == "(" else score <= most)
        ]
