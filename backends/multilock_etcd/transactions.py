"""Requests about keys: reads, and transactions. A server executes either every step of a transaction or none.

The parts of a transaction are passed as the fields of a `Compare` or a `RequestOp`. Making separate messages would take
twice as long.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import islice, starmap
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

from multilock import BackendUnavailable
from multilock.backend import Claim, other_number
from multilock.values import encode_value
from multilock_etcd import wire
from multilock_etcd.keys import Ahead, EtcdKeyspace, Range
from multilock_etcd.transport import EtcdTransport, TooMuch, calls

__all__ = [
    "AT_ONCE",
    "NEAR",
    "WATCHED",
    "Behind",
    "EtcdTransactions",
    "Joined",
    "Looked",
    "Part",
    "Position",
    "Steps",
    "created",
    "delete",
    "in_order",
    "modified",
    "present_revision",
    "read",
    "read_key",
]

# The limits of one transaction. etcd takes 128 operations and 1.5 MiB by default.
AT_ONCE = 100  # operations
BYTES = 1_000_000
PER_KEY = 64  # bytes that a request needs for each key, besides the key itself
# If more keys than this are ahead of a claim, it watches a single key. So most waiters receive no event when another
# claim is released.
NEAR = 32
WATCHED = 16  # the most keys that a waiting permit watches one by one; otherwise it watches a range

Part = dict[str, Any]
"""One comparison or one operation of a transaction, as the fields of its message."""

Key = tuple[bytes, int | None, Hashable]
"""A key, with the create_revision and the lease that it should have."""

T = TypeVar("T")
R = TypeVar("R")


class Looked(NamedTuple):
    """The result of reading the first ``many`` of some keys: the keys that were ``gone`` at ``revision``."""

    many: int
    gone: set[bytes]
    revision: int


class Behind(NamedTuple):
    """Keys ahead of a claim, with their create_revisions. All of them existed at revision ``at``.

    The claim must wait as long as all these keys exist. So a request only needs to check that they exist. If ``keys``
    is empty, the server must read the queue.
    """

    keys: Mapping[bytes, int]
    at: int


class Position:
    """The keys ahead of a claim's key, which was created at ``revision``, as a reply showed them at revision ``at``.

    The reply shows only the newest keys, so the position is exact only if at most `NEAR` keys are ahead.
    """

    __slots__ = ("_beside", "_ranges", "at", "like", "others", "revision")

    def __init__(self, ranges: Ahead, revision: int, at: int, answers: Iterable[Any]) -> None:
        """Parse the answers to the reads of these ranges."""
        found = [answer.response_range for answer in answers]
        others, like = found[: len(ranges.others)], found[len(ranges.others) :]
        self._ranges, self.revision, self.at = ranges, revision, at
        # Keys ahead of the claim, newest first. `others` exclude the claim. `like` share the name with it if fewer than
        # `room` of them are ahead.
        self.others: dict[bytes, int] = {row.key: row.create_revision for each in others for row in each.kvs}
        self.like: dict[bytes, int] = {row.key: row.create_revision for each in like for row in each.kvs}
        self._beside: int = sum(each.count for each in like) if ranges.beside else 0

    @property
    def to_go(self) -> int:
        """Return the least number of keys that must be deleted before the claim holds the name."""
        return len(self.others) + max(0, len(self.like) - self._ranges.room + 1)

    def is_near(self) -> bool:
        """Return whether so few keys must be deleted that a watch can count them down.

        If a key excludes the claim, keys that share the name with the claim count too, because their deletions are
        reported as well.
        """
        return (len(self.others) + len(self.like) + self._beside if self.others else self.to_go) <= NEAR

    def behind(self) -> Behind:
        """Return the keys that the claim watches while it is not near the front.

        If more than `NEAR` keys exclude the claim, it watches the key whose deletion leaves `NEAR` of them. Then the
        watch of the whole name counts down these keys. If fewer keys exclude the claim, it watches the newest of these.
        If no key excludes it, all n permits are taken. The claim then watches the n newest permits ahead, because a
        permit is free for it once any of these is deleted. If n is too great, no keys are returned, and the claim
        watches the whole range.
        """
        if self.others:
            newest_first = sorted(self.others.items(), key=itemgetter(1), reverse=True)
            return Behind(dict([newest_first[NEAR if len(newest_first) > NEAR else 0]]), self.at)
        room = self._ranges.room
        return Behind(dict(islice(self.like.items(), room if room <= WATCHED else 0)), self.at)


class Joined(NamedTuple):
    """The reply to a claim's request to put its key."""

    revision: int | None  #: the revision of the claim's key, or None if the request was refused
    position: Position | Behind | None = None  #: None if an earlier request put the key: the claim must read the queue


class Steps:
    """The number of keys that one transaction may name.

    Clients cannot read the limits of a server. So if the server refuses a request as too large, the request is halved,
    and later requests are not larger.
    """

    def __init__(self) -> None:
        self._operations = AT_ONCE
        self._bytes = BYTES

    def take(
        self, items: Sequence[T], key: Callable[[T], bytes], ask: Callable[[Sequence[T]], R], *, times: int = 1
    ) -> tuple[int, R]:
        """Send a request about the first items, as many as one transaction can name. Each item needs ``times``
        operations.

        Returns the number of these items, and the reply.
        """
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
        """Return how many of these keys fit into one transaction (at least one), and the bytes that those keys need."""
        count = size = 0
        for key in keys:
            more = times * (len(key) + PER_KEY)
            if count and size + more > self._bytes:
                break
            count, size = count + 1, size + more
        return count, size


class EtcdTransactions:
    """Requests about keys, sent through one transport."""

    def __init__(self, keys: EtcdKeyspace, transport: EtcdTransport, now: Callable[[], float]) -> None:
        self._keys = keys
        self._transport = transport
        self._now = now
        self.steps = Steps()

    def execute(
        self, compare: Sequence[Part], success: Sequence[Part], failure: Sequence[Part], deadline: float
    ) -> Any:
        """Execute all of ``success`` if every comparison holds, else all of ``failure``. Returns the reply."""
        request = wire.TxnRequest(compare=compare, success=success, failure=failure)
        return self._transport.call(calls.TXN, request, deadline - self._now())[0]

    def put(self, claim: Claim, lease: int, join: bool, behind: Mapping[bytes, int], deadline: float) -> Joined:
        """Put the claim's key on this lease: with ``join`` at the end of the queue, otherwise only if no key excludes
        the claim.

        The caller may know keys for which a claim that joins has to wait, and pass them as ``behind``. The server then
        only compares that they exist, and reads no key ahead.

        If the request is sent again, the reply shows the key that the first request put. Raises if that key is on
        another lease, which may end earlier. The request is refused if a tombstone of the claim exists, or if a key in
        ``behind`` does not exist. If ``join`` is False, it is also refused if a key excludes the claim.

        Raises if the queue contains a permit of a claim that asked for a different number of permits. This claim could
        otherwise become the first permit in the queue, and make the right number look wrong.

        No comparison can check whether a permit is free. So without ``join`` the reply shows the other permits.
        """
        own, ahead = self._keys.own(claim), self._keys.ahead(claim)
        look = _newest_of(ahead) if (join or ahead.like) and not behind else []
        vacant = map(nobody, ahead.strangers if join else ahead.others)
        said = self.execute(
            [absent(own), absent(self._keys.gone(claim)), *starmap(created, behind.items()), *vacant],
            [*look, {"request_put": {"key": own, "value": encode_value(claim), "lease": lease}}],
            [*map(_oldest_of, ahead.strangers), read_key(own)],
            deadline,
        )
        *answers, last = said.responses
        revision: int = said.header.revision
        if said.succeeded:
            place = Behind(behind, revision) if behind else Position(ahead, revision, revision, answers)
            return Joined(revision, place)
        if found := last.response_range.kvs:
            if found[0].lease not in (lease, 0):  # the lease is 0 if an operator has put the key again
                raise BackendUnavailable(
                    f"the key of this claim still has another lease: {found[0].lease:x}", unknown=True
                )
            return Joined(found[0].create_revision)
        for row in (row for answer in answers for row in answer.response_range.kvs):
            kind, permits = self._keys.kind(row) or (None, 0)
            if kind == "permit":
                raise other_number(claim, permits, "etcd")
        return Joined(None)

    def look(
        self, claim: Claim, revision: int, behind: Mapping[bytes, int], deadline: float
    ) -> Position | Behind | None:
        """Read which keys are ahead of the claim's key. Returns None if the key does not exist at this revision.

        If ``behind`` has keys, the server first checks that they and the claim's key exist. Only if one of these is
        gone does it read the keys ahead, because for that etcd reads every key of the name.
        """
        ahead, own = self._keys.ahead(claim), self._keys.own(claim)
        still = [created(own, revision), *starmap(created, behind.items())]
        read = _newest_of(ahead, revision)
        said = self.execute(still, [] if behind else read, [read_key(own), *read] if behind else [], deadline)
        at: int = said.header.revision
        if said.succeeded:
            return Behind(behind, at) if behind else Position(ahead, revision, at, said.responses)
        if not behind:
            return None
        mine, *answers = said.responses
        found = mine.response_range.kvs
        return Position(ahead, revision, at, answers) if found and found[0].create_revision == revision else None

    def row(self, key: bytes, deadline: float) -> Any:
        """Return the row of this key, or None if the key is missing."""
        said, _ = self._transport.call(calls.RANGE, wire.RangeRequest(key=key), deadline - self._now())
        return said.kvs[0] if said.kvs else None

    def delete(self, key: bytes, within: float) -> bool:
        """Delete this key, whatever its value. Returns False if it was missing."""
        said, _ = self._transport.call(calls.DELETE, wire.DeleteRangeRequest(key=key), within)
        return bool(said.deleted)

    def delete_all(self, keys: Sequence[bytes], deadline: float) -> None:
        """Delete these keys, in as many transactions as it takes."""
        while keys:
            count, _ = self.steps.take(keys, bytes, lambda some: self.execute([], [*map(delete, some)], [], deadline))
            keys = keys[count:]

    def missing(self, keys: Sequence[Key], deadline: float) -> Looked:
        """Read the first of these keys, as many as one request can name, and return which of them are gone.

        A key is gone if it does not exist at its create_revision, or has moved to another lease. The result contains
        the reply's revision: a watch that starts after it misses nothing.
        """
        count, said = self.steps.take(
            keys, itemgetter(0), lambda some: self.execute([], [read_key(key) for key, _, _ in some], [], deadline)
        )
        gone: set[bytes] = set()
        for (key, made, lease), answer in zip(keys[:count], said.responses, strict=True):
            found = answer.response_range.kvs
            # A key that an operator put again has no lease, but its claim still holds the name.
            if not found or found[0].create_revision != made or found[0].lease not in (lease, 0):
                gone.add(key)
        return Looked(count, gone, said.header.revision)

    def first_of(self, queue: Range, limit: int, deadline: float) -> tuple[Sequence[Any], int]:
        """Return the oldest ``limit`` keys of this range (0: all) in order of arrival, and the number of all its
        keys."""
        request = wire.RangeRequest(**_sorted(queue, wire.ASCEND, limit))
        said, _ = self._transport.call(calls.RANGE, request, deadline - self._now())
        return said.kvs, said.count


def present_revision(transport: EtcdTransport, within: float) -> int:
    """Return the cluster's present revision, confirmed by a majority."""
    said, _ = transport.call(calls.TXN, wire.TxnRequest(), within)
    now: int = said.header.revision
    return now


# ---- comparisons


def absent(key: bytes) -> Part:
    """Require that this key does not exist."""
    return {"target": wire.CREATE, "key": key}


def nobody(there: Range) -> Part:
    """Require that no key is in this range."""
    return {**absent(there[0]), "range_end": there[1]}


def created(key: bytes, at: int) -> Part:
    """Require that this key exists and was created at this revision."""
    return {"target": wire.CREATE, "key": key, "create_revision": at}


def modified(key: bytes, at: int | None) -> Part:
    """Require that this key was last written at this revision."""
    return {"target": wire.MODIFY, "key": key, "mod_revision": at}


# ---- operations


def delete(key: bytes) -> Part:
    """Delete this key."""
    return {"request_delete_range": {"key": key}}


def read_key(key: bytes) -> Part:
    """Read a key without its value."""
    return {"request_range": {"key": key, "keys_only": True}}


def read(key: bytes) -> Part:
    """Read a key with its value."""
    return {"request_range": {"key": key}}


def in_order(queue: Range, limit: int = 0, keys_only: bool = False) -> Part:
    """Read the contenders in order of arrival."""
    return {"request_range": {**_sorted(queue, wire.ASCEND, limit), "keys_only": keys_only}}


def _oldest_of(there: Range) -> Part:
    """Read the contender that came first, without its value."""
    return in_order(there, 1, keys_only=True)


def _newest_of(ahead: Ahead, before: int = 0) -> list[Part]:
    """Read the newest keys for which a claim may have to wait, one more than `NEAR`, without their values.

    If ``before`` is not 0, only keys that were created before this revision are read. For a reader, the number of
    readers is read as well.
    """
    most = {"keys_only": True, "max_create_revision": before - 1 if before else 0}
    limits = [*((there, NEAR + 1) for there in ahead.others), *((there, ahead.room + NEAR) for there in ahead.like)]
    parts = [{"request_range": {**_sorted(there, wire.DESCEND, limit), **most}} for there, limit in limits]
    if ahead.beside:
        begin, end = ahead.beside
        parts.append({"request_range": {"key": begin, "range_end": end, "count_only": True}})
    return parts


def _sorted(there: Range, order: int, limit: int) -> Part:
    begin, end = there
    return {
        "key": begin,
        "range_end": end,
        "limit": limit,
        "sort_order": order,
        "sort_target": wire.SORT_BY_CREATION,
    }
