"""What operators ask: who holds a name, which names are held; and to take one away."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from multilock.backend import LockInfo, parse_owner
from multilock.names import escape
from multilock_redis.keys import Keyspace
from multilock_redis.recipe import RESTS
from multilock_redis.transactions import FORCE, INSPECT, Transactions
from multilock_redis.wire import pack

__all__ = ["Inspection"]

SCANNED_AT_ONCE = 1000  # keys looked at by one SCAN
EPOCH = datetime.fromtimestamp(0, UTC)


class Inspection:
    def __init__(self, keys: Keyspace, transactions: Transactions) -> None:
        self._keys = keys
        self._transactions = transactions

    def inspect(self, name: str, within: float) -> LockInfo | None:
        answer, _ = self._transactions.run(INSPECT, self._inspection(name), within)
        return None if answer is None else _info(name, *answer)

    def inspect_all(self, prefix: str, within: float) -> Iterator[LockInfo]:
        seen: set[str] = set()  # SCAN may show a key twice
        # A name that is all dots is escaped otherwise than the beginning of a longer one.
        pattern = self._keys.prefix + ("" if prefix in (".", "..") else escape(prefix)) + "*"
        connections = self._transactions.connections
        cursor = b"0"
        while True:
            scan = pack("SCAN", cursor, "MATCH", pattern, "COUNT", SCANNED_AT_ONCE, "TYPE", "string")
            (cursor, found), _ = connections.call(scan, within)
            # With an empty prefix the pattern meets our other keys too.
            listed = dict.fromkeys(self._keys.name(key) for key in found if not key.startswith(b"{"))
            names = [name for name in listed if name is not None and name.startswith(prefix) and name not in seen]
            seen.update(names)
            requests = [self._inspection(name) for name in names]
            answers = self._transactions.run_all(INSPECT, requests, connections.exchange, within)
            for name, (answer, _) in zip(names, answers, strict=True):
                if answer is not None:
                    yield _info(name, *answer)
            if cursor == b"0":
                return

    def force_release(self, name: str, within: float) -> bool:
        owner, _ = self._transactions.run(FORCE, FORCE.head + self._keys.of(name).first_four, within)
        return owner is not None

    def _inspection(self, name: str) -> bytes:
        return INSPECT.head + self._keys.of(name).first_four


def _info(name: str, owner: bytes, token: bytes | None, waiting: int, left: int) -> LockInfo:
    rests = owner.startswith(RESTS)
    info = parse_owner(owner.removeprefix(RESTS).decode(errors="replace"))
    remaining = left / 1000 if left >= 0 else None  # below: a plain client's key that never ends
    if info.kind is None:
        return replace(
            info, name=name, waiting=waiting, remaining=remaining
        )  # a plain client's: the token is that of another holder
    micros = None if token is None else int(token)
    since = None if micros is None else EPOCH + timedelta(microseconds=micros)
    until = datetime.now(UTC) + timedelta(milliseconds=max(0, left)) if rests else None
    return replace(
        info, name=name, token=micros, since=since, waiting=waiting, resting_until=until, remaining=remaining
    )
