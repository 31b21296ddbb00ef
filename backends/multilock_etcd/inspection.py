"""The operators' requests: show the holder of a name, list all held names, and release a name by force."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from multilock.backend import LockInfo
from multilock.names import escape
from multilock.values import decode_value
from multilock_etcd import wire
from multilock_etcd.keys import SHARED, EtcdKeyspace, end_of, rests
from multilock_etcd.sessions import EtcdSessions
from multilock_etcd.transactions import EtcdTransactions, created, delete, in_order, read_key
from multilock_etcd.transport import EtcdTransport, calls

__all__ = ["EtcdInspection"]

PAGE = 500  # keys read at once when all locks are listed
SHOWN = 100  # the greatest number of holders of a name that inspect() returns


class EtcdInspection:
    """The operators' requests of one client."""

    def __init__(
        self,
        keys: EtcdKeyspace,
        transport: EtcdTransport,
        transactions: EtcdTransactions,
        sessions: EtcdSessions,
        now: Callable[[], float],
    ) -> None:
        self._keys = keys
        self._transport = transport
        self._transactions = transactions
        self._sessions = sessions
        self._now = now

    def inspect(self, name: str, within: float) -> LockInfo | None:
        queue, deadline = self._keys.queue(name), self._now() + within
        rows, count = self._transactions.first_of(queue, 1, deadline)
        if not self._shared(rows):
            return self._info(name, rows, rows, count)
        said = self._transactions.execute([], [in_order(queue, SHOWN), in_order(queue, keys_only=True)], [], deadline)
        shown, all_ = (answer.response_range.kvs for answer in said.responses)
        return self._info(name, shown, all_, len(all_))

    def inspect_all(self, prefix: str, within: float) -> Iterator[LockInfo]:
        # escape() changes the names "." and "..", but not the dots of a longer name. So read all keys for these two
        # prefixes.
        begin = self._keys.prefix + ("" if prefix in (".", "..") else escape(prefix)).encode()
        for name, rows in groupby(self._rows(begin, within), lambda row: self._keys.name(row.key)):
            if name is None or not name.startswith(prefix):
                continue
            queue = sorted(rows, key=lambda row: row.create_revision)
            if info := self._info(name, queue[:1], queue, len(queue)):
                yield info

    def force_release(self, name: str, within: float) -> bool:
        queue, deadline = self._keys.queue(name), self._now() + within
        while True:
            rows, _ = self._transactions.first_of(queue, 1, deadline)
            if self._shared(rows):
                rows, _ = self._transactions.first_of(queue, 0, deadline)
            holders = self._keys.holders(rows)
            taken = self._take(holders, deadline)
            for row in taken:
                if rests(row):
                    self._sessions.end_rest(row.lease, deadline - self._now())
            if taken or not holders:
                return bool(taken)

    def _take(self, rows: Sequence[Any], deadline: float) -> list[Any]:
        """Delete these keys. Returns the keys that nobody had changed or deleted before."""
        taken: list[Any] = []
        while rows:
            count, still = self._transactions.steps.take(
                rows,
                lambda row: row.key,
                lambda some: self._take_at_once(some, deadline),
                times=3,  # each key is compared, and then deleted or read again
            )
            rows, taken = rows[count:], [*taken, *still]
        return taken

    def _take_at_once(self, rows: Sequence[Any], deadline: float) -> Sequence[Any]:
        while rows:
            still = [created(row.key, row.create_revision) for row in rows]
            said = self._transactions.execute(
                still, [delete(row.key) for row in rows], [read_key(row.key) for row in rows], deadline
            )
            if said.succeeded:
                break
            found = {(row.key, row.create_revision) for answer in said.responses for row in answer.response_range.kvs}
            rows = [row for row in rows if (row.key, row.create_revision) in found]
        return rows

    def _shared(self, queue: Sequence[Any]) -> bool:
        """Return whether the first contender may hold the name together with others."""
        kind = self._keys.kind(queue[0]) if queue else None
        return kind is not None and kind[0] in SHARED

    def _info(self, name: str, shown: Sequence[Any], queue: Sequence[Any], count: int) -> LockInfo | None:
        """Return the holders of a name, or None if nobody holds it. The keys in ``queue`` are in order of arrival.

        If the first key does not belong to a contender, all contenders wait for it, and nobody holds the name.
        """
        holders = len(self._keys.holders(queue))
        if not holders:
            return None
        first, *others = (self._holder(name, row) for row in shown[:holders])
        return replace(
            first,
            waiting=count - holders,
            holders=holders if self._shared(queue) else None,
            others=tuple(others),
        )

    def _holder(self, name: str, row: Any) -> LockInfo:
        info = replace(decode_value(row.value), name=name, token=row.create_revision)
        kind, permits = self._keys.kind(row) or (None, 0)
        # The value of another program's key does not contain its kind. Only the key itself shows the kind.
        return info if kind == "lock" else replace(info, kind=kind, permits=permits or None)

    def _rows(self, begin: bytes, within: float) -> Iterator[Any]:
        """Yield all keys with this beginning, page by page. The keys of one name come together."""
        key, end = begin or b"\0", end_of(begin)
        while True:
            said, _ = self._transport.call(calls.RANGE, wire.RangeRequest(key=key, range_end=end, limit=PAGE), within)
            yield from said.kvs
            if not said.more:
                return
            key = said.kvs[-1].key + b"\0"
