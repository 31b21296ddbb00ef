"""What operators ask: who holds a name, which names are held; and to take one away."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any

from multilock.backend import LockInfo
from multilock.names import escape
from multilock.values import decode_value
from multilock_etcd import wire as m
from multilock_etcd.keys import Keyspace, end_of, rests
from multilock_etcd.sessions import Sessions
from multilock_etcd.transactions import Transactions, created, delete
from multilock_etcd.transport import Transport, calls

__all__ = ["Inspection"]

PAGE = 500  # keys read at once when all locks are listed


class Inspection:
    def __init__(
        self,
        keys: Keyspace,
        transport: Transport,
        transactions: Transactions,
        sessions: Sessions,
        now: Callable[[], float],
    ) -> None:
        self._keys = keys
        self._transport = transport
        self._transactions = transactions
        self._sessions = sessions
        self._now = now

    def inspect(self, name: str, within: float) -> LockInfo | None:
        first, count = self._transactions.first_of(self._keys.queue(name), self._now() + within)
        return self._info(name, first, count - 1) if first is not None else None

    def inspect_all(self, prefix: str, within: float) -> Iterator[LockInfo]:
        # A name that is all dots is escaped otherwise than the beginning of a longer one.
        begin = self._keys.prefix + ("" if prefix in (".", "..") else escape(prefix)).encode()
        for name, rows in groupby(self._rows(begin, within), lambda row: self._keys.name(row.key)):
            below = list(rows)
            first = min(below, key=lambda row: row.create_revision)
            if name is not None and name.startswith(prefix) and (info := self._info(name, first, len(below) - 1)):
                yield info

    def force_release(self, name: str, within: float) -> bool:
        deadline = self._now() + within
        while True:
            first, _ = self._transactions.first_of(self._keys.queue(name), deadline)
            if first is None or not self._keys.contends(first):
                return False
            still = created(first.key, first.create_revision)
            if self._transactions.execute([still], [delete(first.key)], [], deadline).succeeded:
                if rests(first):
                    self._sessions.end_rest(first.lease, deadline - self._now())
                return True

    def _info(self, name: str, first: Any, others: int) -> LockInfo | None:
        """Of the first key below a name, for which all others wait, whatever it is: if it is no contender, nobody holds
        the lock."""
        if not self._keys.contends(first):
            return None
        return replace(decode_value(first.value), name=name, token=first.create_revision, waiting=others)

    def _rows(self, begin: bytes, within: float) -> Iterator[Any]:
        """All keys with this beginning, page by page in their order, which keeps the keys of one name together."""
        key, end = begin or b"\0", end_of(begin)
        while True:
            said, _ = self._transport.call(calls.RANGE, m.RangeRequest(key=key, range_end=end, limit=PAGE), within)
            yield from said.kvs
            if not said.more:
                return
            key = said.kvs[-1].key + b"\0"
