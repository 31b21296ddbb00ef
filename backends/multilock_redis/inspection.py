"""The operators' requests: show the holder of a name, list all held names, and release a name by force."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from multilock.backend import LockInfo, parse_owner
from multilock.names import escape
from multilock_redis.acquire_release import RESTS, TOMBSTONE
from multilock_redis.keys import Keyspace
from multilock_redis.transactions import FORCE, INSPECT, Transactions
from multilock_redis.wire import Redirected, bulks, pack

__all__ = ["Inspection"]

SCANNED_AT_ONCE = 1000  # keys that one SCAN visits
NAMED = 100  # the greatest number of holders of a name that inspect() returns
EPOCH = datetime.fromtimestamp(0, UTC)
_MARKER = re.compile(rb"#multilock:(r|p(\d+)):\d+")


class Inspection:
    """The operators' requests to one server."""

    def __init__(self, keys: Keyspace, transactions: Transactions) -> None:
        self._keys = keys
        self._transactions = transactions

    def inspect(self, name: str, within: float) -> LockInfo | None:
        answer, _ = self._transactions.run(INSPECT, self._inspection(name, NAMED), within)
        return None if answer is None else _info(name, *answer)

    def inspect_all(
        self, prefix: str, within: float, elsewhere: Callable[[str], LockInfo | None] | None = None
    ) -> Iterator[LockInfo]:
        """Yield the held names. ``elsewhere`` returns the holder of a name that another node of a cluster serves
        now."""
        seen: set[str] = set()  # SCAN may return a key twice
        # escape() changes the names "." and "..", but not the dots of a longer name. So scan all keys for these two
        # prefixes.
        pattern = self._keys.prefix + ("" if prefix in (".", "..") else escape(prefix)) + "*"
        connections = self._transactions.connections
        cursor = b"0"
        while True:
            scan = pack("SCAN", cursor, "MATCH", pattern, "COUNT", SCANNED_AT_ONCE, "TYPE", "string")
            (cursor, found), _ = connections.call(scan, within)
            # With an empty prefix the pattern also matches our keys of queues and tokens, which begin with a brace.
            listed = dict.fromkeys(self._keys.name(key) for key in found if not key.startswith(b"{"))
            names = [name for name in listed if name is not None and name.startswith(prefix) and name not in seen]
            seen.update(names)
            requests = [self._inspection(name, 1) for name in names]
            answers = self._transactions.run_each({INSPECT}, requests, connections.exchange, within)
            for name, (answer, _) in zip(names, answers, strict=True):
                if isinstance(answer, Redirected) and elsewhere:
                    if info := elsewhere(name):
                        yield info
                elif isinstance(answer, Exception):
                    raise answer
                elif answer is not None:
                    yield _info(name, *answer)
            if cursor == b"0":
                return

    def force_release(self, name: str, within: float, tombstone: int = TOMBSTONE) -> bool:
        """Release a name. With ``tombstone`` 0, the claims of its holders may take it again."""
        keys = self._keys.of(name)
        tombstones = bulks(keys.gone, b"%d" % tombstone)
        holders, _ = self._transactions.run(FORCE, FORCE.head + keys.common + tombstones, within)
        return bool(holders)

    def _inspection(self, name: str, named: int) -> bytes:
        return INSPECT.head + self._keys.of(name).common + bulks(b"%d" % named)


def _info(name: str, text: bytes, token: bytes | None, waiting: int, *rest: Any) -> LockInfo:
    if shared := _MARKER.fullmatch(text):
        holders, now, who = rest
        permits = int(shared[2]) if shared[2] else None
        ends = zip(who[::2], who[1::2], strict=True)
        first, *others = (replace(_holder(name, owner, int(end) - now), permits=permits) for owner, end in ends)
        return replace(first, waiting=waiting, holders=holders, others=tuple(others))
    info = replace(_holder(name, text, *rest), waiting=waiting)
    if info.kind is None or token is None:
        return info  # a plain client holds the lock, and the token is that of an earlier holder
    return replace(info, token=int(token), since=EPOCH + timedelta(microseconds=int(token)))


def _holder(name: str, owner: bytes, left: int) -> LockInfo:
    """Return the `LockInfo` of one holder, without its token, because the server stores only the newest token."""
    info = parse_owner(owner.removeprefix(RESTS).decode(errors="replace"))
    rests = info.kind is not None and owner.startswith(RESTS)
    until = datetime.now(UTC) + timedelta(milliseconds=max(0, left)) if rests else None
    remaining = left / 1000 if left >= 0 else None  # negative if a plain client's key has no expiry
    return replace(info, name=name, resting_until=until, remaining=remaining)
