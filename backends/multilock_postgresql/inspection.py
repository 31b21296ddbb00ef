"""The operators' requests: show who holds a name, list all held names, and take a name away."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from multilock import BackendUnavailable
from multilock.backend import LockInfo, parse_owner
from multilock_postgresql.keys import LockKeys, after
from multilock_postgresql.transactions import Transactions
from multilock_postgresql.wire import LockWait, Row, number, seconds, text

__all__ = ["Inspection"]

PAGE = 1000  # names in one reply of inspect_all()
EPOCH = datetime.fromtimestamp(0, UTC)
RESTS = "#rest."  # prefix of the id of a released claim whose name rests (stays taken for a while)


class Inspection:
    """The operators' requests to one server."""

    def __init__(self, keys: LockKeys, transactions: Transactions) -> None:
        self._keys = keys
        self._transactions = transactions

    def inspect(self, name: str, within: float) -> LockInfo | None:
        steps = self._transactions.steps
        rows, _ = self._transactions.run(steps.inspect, [self._keys.of(name)], within, limited=False)
        return _info(name, rows) if rows else None

    def inspect_all(self, prefix: str, within: float) -> Iterator[LockInfo]:
        beginning = self._keys.beginning(prefix)
        start, end = beginning, after(beginning)
        while True:
            arguments = [start.encode(), None if end is None else end.encode(), b"%d" % PAGE]
            rows, _ = self._transactions.run(self._transactions.steps.inspect_all, arguments, within, limited=False)
            for key, *row in rows:
                name = self._keys.name(text(key))
                if name is not None and name.startswith(prefix):
                    yield _info(name, [tuple(row)])
            if len(rows) < PAGE:
                return
            start = text(rows[-1][0]) + "\x01"  # the least text after this key, since no key has a control character

    def force_release(self, name: str, within: float) -> bool:
        try:
            rows, _ = self._transactions.run(self._transactions.steps.force, [self._keys.of(name)], within)
        except LockWait as error:
            raise BackendUnavailable(
                f"{error}: its holder has a guarded transaction open", unknown=False, backend="postgresql"
            ) from error
        return bool(rows)


def _info(name: str, rows: list[Row]) -> LockInfo:
    """Return the holders of one name. Each row has the columns of the name, then the columns of one holder."""
    marker, who, token, left = rows[0][:4]
    waiting, holders = number(rows[0][8]), number(rows[0][9])
    if left is not None:
        return replace(_holder(name, marker, who, token, left), waiting=waiting)
    mode = text(marker)
    permits = int(mode[2:]) if mode.startswith("#p") else None
    first, *others = (replace(_holder(name, *row[4:8]), permits=permits) for row in rows)
    return replace(first, waiting=waiting, holders=holders, others=tuple(others))


def _holder(name: str, claim_id: bytes | None, who: bytes | None, token: bytes | None, left: bytes | None) -> LockInfo:
    owner, remaining = text(claim_id), max(0.0, seconds(left) or 0.0)
    info = parse_owner(owner.removeprefix(RESTS) + text(who))
    until = datetime.now(UTC) + timedelta(seconds=remaining) if owner.startswith(RESTS) else None
    number_ = number(token) or 0
    return replace(
        info,
        name=name,
        token=number_,
        since=EPOCH + timedelta(microseconds=number_),
        resting_until=until,
        remaining=remaining,
    )
