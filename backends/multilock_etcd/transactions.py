"""What is asked about keys: transactions, of which all is executed or nothing, and reads.

The parts of a transaction are the fields of a `Compare` or a `RequestOp`: made as messages of their own, they would be
copied into the request, which takes twice as long.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

from multilock.backend import Claim
from multilock.values import encode_value
from multilock_etcd import wire
from multilock_etcd.keys import Range
from multilock_etcd.transport import TooMuch, Transport, calls

__all__ = [
    "AT_ONCE",
    "Looked",
    "Part",
    "Steps",
    "Transactions",
    "absent",
    "created",
    "delete",
    "in_order",
    "last_of",
    "modified",
    "nobody",
    "number_of",
    "oldest_of",
    "present_revision",
    "put",
    "read",
    "read_key",
]

AT_ONCE = 100  # operations in a transaction; etcd takes 128 by default …
BYTES = 1_000_000  # … and 1.5 MiB
PER_KEY = 64  # bytes around a key

Part = dict[str, Any]
Key = tuple[bytes, int | None, Hashable]
"""A key, the create_revision and the lease that it should have."""

T = TypeVar("T")
R = TypeVar("R")


class Looked(NamedTuple):
    """Of some keys the first so ``many``: those that are ``gone``, at this ``revision``."""

    many: int
    gone: set[bytes]
    revision: int


class Steps:
    """How many keys one transaction names.

    The limits of a server are its settings, and no request tells them. So a step that the server refuses is halved, and
    no later one of this client is larger.
    """

    def __init__(self) -> None:
        self._operations = AT_ONCE
        self._bytes = BYTES

    def take(
        self, items: Sequence[T], key: Callable[[T], bytes], ask: Callable[[Sequence[T]], R], *, times: int = 1
    ) -> tuple[int, R]:
        """Ask about as many of the first items as one transaction can name by their keys, each ``times`` times.
        Returns how many these are, and the answer."""
        while True:
            count, size = self._first([key(item) for item in items[: self._operations]], times)
            try:
                return count, ask(items[:count])
            except TooMuch as error:
                if count == 1:
                    raise
                if error.by_bytes:
                    self._bytes = min(self._bytes, size // 2)
                else:
                    self._operations = min(self._operations, count // 2)

    def _first(self, keys: Sequence[bytes], times: int) -> tuple[int, int]:
        """How many of them fit, one at least, and how many bytes these have."""
        count = size = 0
        for key in keys:
            more = times * (len(key) + PER_KEY)
            if count and size + more > self._bytes:
                break
            count, size = count + 1, size + more
        return count, size


class Transactions:
    def __init__(self, transport: Transport, now: Callable[[], float]) -> None:
        self._transport = transport
        self._now = now
        self.steps = Steps()

    def execute(
        self, compare: Sequence[Part], success: Sequence[Part], failure: Sequence[Part], deadline: float
    ) -> Any:
        """If all that is compared is true, all of ``success``; else all of ``failure``."""
        request = wire.TxnRequest(compare=compare, success=success, failure=failure)
        return self._transport.call(calls.TXN, request, deadline - self._now())[0]

    def row(self, key: bytes, deadline: float) -> Any:
        """This key; None: it is not there."""
        said, _ = self._transport.call(calls.RANGE, wire.RangeRequest(key=key), deadline - self._now())
        return said.kvs[0] if said.kvs else None

    def delete(self, key: bytes, within: float) -> bool:
        """Delete this key, whatever it says. False: it was not there."""
        said, _ = self._transport.call(calls.DELETE, wire.DeleteRangeRequest(key=key), within)
        return bool(said.deleted)

    def delete_all(self, keys: Sequence[bytes], deadline: float) -> None:
        """Delete these keys, in as many transactions as it takes."""
        while keys:
            count, _ = self.steps.take(keys, bytes, lambda some: self.execute([], [*map(delete, some)], [], deadline))
            keys = keys[count:]

    def missing(self, keys: Sequence[Key], deadline: float) -> Looked:
        """Of the first of these keys, as many as one request can name: those that do not exist any more at their
        create_revision, or have moved from their lease to another; and the present revision: a watch from there on
        misses nothing."""
        count, said = self.steps.take(
            keys, itemgetter(0), lambda some: self.execute([], [read_key(key) for key, _, _ in some], [], deadline)
        )
        gone: set[bytes] = set()
        for (key, made, lease), answer in zip(keys[:count], said.responses, strict=True):
            found = answer.response_range.kvs
            # An operator's put leaves it without a lease, and takes it from nobody.
            if not found or found[0].create_revision != made or found[0].lease not in (lease, 0):
                gone.add(key)
        return Looked(count, gone, said.header.revision)

    def first_of(self, queue: Range, limit: int, deadline: float) -> tuple[Sequence[Any], int]:
        """Who came first there, in order of arrival, ``limit`` of them (0: all); and how many keys there are."""
        request = wire.RangeRequest(**_sorted(queue, wire.ASCEND, limit))
        said, _ = self._transport.call(calls.RANGE, request, deadline - self._now())
        return said.kvs, said.count


def present_revision(transport: Transport, within: float) -> int:
    """As a majority agrees."""
    said, _ = transport.call(calls.TXN, wire.TxnRequest(), within)
    now: int = said.header.revision
    return now


# ---- what is compared


def absent(key: bytes) -> Part:
    return {"target": wire.CREATE, "key": key}


def nobody(there: Range) -> Part:
    """No key is in this range."""
    return {**absent(there[0]), "range_end": there[1]}


def created(key: bytes, at: int) -> Part:
    return {"target": wire.CREATE, "key": key, "create_revision": at}


def modified(key: bytes, at: int | None) -> Part:
    return {"target": wire.MODIFY, "key": key, "mod_revision": at}


# ---- what is done


def put(key: bytes, claim: Claim, lease: int) -> Part:
    return {"request_put": {"key": key, "value": encode_value(claim), "lease": lease}}


def delete(key: bytes) -> Part:
    return {"request_delete_range": {"key": key}}


def read_key(key: bytes) -> Part:
    """Without its value."""
    return {"request_range": {"key": key, "keys_only": True}}


def read(key: bytes) -> Part:
    return {"request_range": {"key": key}}


def in_order(queue: Range, limit: int = 0, keys_only: bool = False) -> Part:
    """The contenders in order of arrival."""
    return {"request_range": {**_sorted(queue, wire.ASCEND, limit), "keys_only": keys_only}}


def last_of(there: Range, limit: int, before: int = 0) -> Part:
    """The contenders who came last, those who came ``before`` a revision; without their values."""
    ahead = {"keys_only": True, "max_create_revision": before - 1 if before else 0}
    return {"request_range": {**_sorted(there, wire.DESCEND, limit), **ahead}}


def number_of(there: Range) -> Part:
    """How many contenders there are, and nothing else."""
    begin, end = there
    return {"request_range": {"key": begin, "range_end": end, "count_only": True}}


def oldest_of(there: Range) -> Part:
    """The contender who came first; without its value."""
    return in_order(there, 1, keys_only=True)


def _sorted(there: Range, order: int, limit: int) -> Part:
    begin, end = there
    return {
        "key": begin,
        "range_end": end,
        "limit": limit,
        "sort_order": order,
        "sort_target": wire.SORT_BY_CREATION,
    }
