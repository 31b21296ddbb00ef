"""The lock on etcd: what is written and compared in one transaction, and what the answers mean.

The queue is that of etcd's own concurrency recipes (client/v3/concurrency, `etcdctl lock` and `elect`, the v3lock
service): a contender is a key ``<prefix><name>/<id>`` on a lease, and the one with the lowest create_revision under
``<prefix><name>/`` holds the lock. That revision is the fencing token. What those recipes lack and is done here:

* one request joins, or takes a free lock, and shows the predecessor;
* nobody holds before its own key was seen, at its own revision, in the same transaction that saw no predecessor;
* a cancel is final: it leaves ``<prefix>!gone/<id>`` on the same lease, and a join compares that to be absent, so a
  request that a stopped server executes after its cancel finds that it is too late;
* validity is that of the lease, from the sending of its last acknowledged keep-alive: a put moves nothing.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from multilock.backend import Held, Notices
from multilock.errors import BackendRejected, BackendUnavailable
from multilock.model import Busy, Claim, Granted, LockInfo, LossReason
from multilock.names import escape, unescape
from multilock.values import decode_value, encode_value
from multilock_etcd import lookup
from multilock_etcd import messages as m
from multilock_etcd.notices import Watcher
from multilock_etcd.sessions import ENDED, Session, Sessions
from multilock_etcd.transport import LeaseMissing, Transport, calls

__all__ = ["Keyspace", "Recipe"]

logger = logging.getLogger("multilock")

TOMBSTONE = 600.0  # seconds; longer than any request can lie in a buffer of a connection that was closed
AT_ONCE = 100  # operations in a transaction; etcd takes 128
PAGE = 500  # keys read at once when all locks are listed
SAFETY_TIMER = 5.0  # seconds, or the ttl if that is more: a waiter looks again although no watch fired


class Keyspace:
    """Names and keys."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix.encode()

    def queue(self, name: str) -> bytes:
        """What the keys of all contenders for this name begin with."""
        return self.prefix + escape(name).encode() + b"/"

    def own(self, claim: Claim) -> bytes:
        return self.queue(claim.name) + claim.id.encode()

    def gone(self, claim: Claim) -> bytes:
        """The tombstone of a cancelled claim. No escaped name begins with ``!``."""
        return self.prefix + b"!gone/" + claim.id.encode()

    def name(self, key: bytes) -> str | None:
        """The lock in whose queue this key stands; None for any other key."""
        escaped, slash, _ = key.removeprefix(self.prefix).partition(b"/")
        if not slash or not escaped or escaped.startswith(b"!"):
            return None
        return unescape(escaped.decode(errors="replace"))

    def contends(self, row: Any) -> bool:
        """Whether this key, of a queue, is a contender's. One without a lease is an application's data, one with a
        further slash belongs to a longer prefix or name: neither is ours to show as a lock, or to take away."""
        _, _, contender = row.key.removeprefix(self.prefix).partition(b"/")
        return bool(row.lease) and b"/" not in contender


def end_of(prefix: bytes) -> bytes:
    """The key after all that begin with ``prefix``."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else b"\0"


class _Place:
    """Where a claim stands. ``lease``: a request that puts its key there may have been executed. ``revision``: of its
    key, once seen."""

    __slots__ = ("cancelled", "lease", "revision", "session")

    def __init__(self) -> None:
        self.session: Session | None = None
        self.lease: int | None = None
        self.revision: int | None = None
        self.cancelled = False


@dataclass(frozen=True, slots=True)
class _Tombstone:
    key: bytes
    lease: int
    until: float


class Recipe:
    def __init__(
        self, keys: Keyspace, transport: Transport, sessions: Sessions, watcher: Watcher, notices: Notices
    ) -> None:
        self._keys = keys
        self._transport = transport
        self._sessions = sessions
        self._watcher = watcher
        self._notices = notices
        self._now: Callable[[], float] = notices.now
        self._places: dict[str, _Place] = {}
        self._cancelled: dict[str, float] = {}  # claim id -> when it may be forgotten; in that order
        self._lock = threading.Lock()  # of the places and the cancelled
        self._tombstones: deque[_Tombstone] = deque()

    # ---- acquire

    def attempt(self, claim: Claim, join: bool, within: float) -> Granted | Busy:
        deadline = self._now() + within
        with self._lock:
            if claim.id in self._cancelled:  # this very call comes late
                return self._busy(claim)
            place = self._places.setdefault(claim.id, _Place())
        answer = None
        try:
            if place.revision:
                answer = self._stand(claim, place, deadline)
            while answer is None:
                answer = self._enter(claim, place, join, deadline)
        finally:
            if place.cancelled or isinstance(answer, Granted):
                self._watcher.stop(claim.id)
            elif place.lease is None or (answer and not place.revision):
                self._refused(claim, place, deadline)
        return answer

    def _enter(self, claim: Claim, place: _Place, join: bool, deadline: float) -> Granted | Busy | None:
        """Ask once, on a lease that is alive. None: it was not, or our key vanished; nothing is written, ask again."""
        session = place.session
        if session is None or not self._sessions.is_alive(session.lease):
            session = self._sessions.of(claim, self._left(deadline))
        before = place.lease
        with self._lock:
            place.session = session
            if place.cancelled:  # meanwhile: no request that names the claim has been sent, nor will be
                return self._busy(claim)
            place.lease = session.lease
        try:
            if join:
                return self._join(claim, place, session, deadline)
            return self._take_if_free(claim, place, session, deadline)
        except LeaseMissing:
            self._sessions.end(session.lease)
            place.lease = None
            return None
        except (BackendUnavailable, BackendRejected) as error:
            if not getattr(error, "unknown", False):
                place.lease = before
            raise

    def _join(self, claim: Claim, place: _Place, session: Session, deadline: float) -> Granted | Busy | None:
        """Put our key at the end of the queue, and see whom it stands behind. Sent again, it finds what it did."""
        own, queue = self._keys.own(claim), self._keys.queue(claim.name)
        said, _ = self._txn(
            [_absent(own), _absent(self._keys.gone(claim))],
            [_put(own, claim, session), _last_of(queue, 2)],
            [_range(own)],
            deadline,
        )
        if said.succeeded:
            rows = said.responses[1].response_range.kvs
            place.revision = said.header.revision
            return self._granted(claim, place) if len(rows) == 1 else self._wait(claim, place, rows[1].key, said)
        found = said.responses[0].response_range.kvs
        if not found:
            return self._busy(claim)  # it was cancelled
        place.revision = found[0].create_revision
        return self._stand(claim, place, deadline)

    def _stand(self, claim: Claim, place: _Place, deadline: float) -> Granted | Busy | None:
        """*check*: with our key still there at its revision, whom does it stand behind? None: it is not there."""
        own, queue = self._keys.own(claim), self._keys.queue(claim.name)
        assert place.revision is not None
        said, _ = self._txn([_created(own, place.revision)], [_last_of(queue, 1, before=place.revision)], [], deadline)
        if not said.succeeded:
            place.revision = None
            return None
        before = said.responses[0].response_range.kvs
        return self._wait(claim, place, before[0].key, said) if before else self._granted(claim, place)

    def _take_if_free(self, claim: Claim, place: _Place, session: Session, deadline: float) -> Granted | Busy:
        """Put our key only where nobody stands: refused, it leaves nothing."""
        own, queue = self._keys.own(claim), self._keys.queue(claim.name)
        nobody = {**_absent(queue), "range_end": end_of(queue)}
        said, _ = self._txn(
            [nobody, _absent(self._keys.gone(claim))], [_put(own, claim, session)], [_range(own)], deadline
        )
        if said.succeeded:
            place.revision = said.header.revision
            return self._granted(claim, place)
        if found := said.responses[0].response_range.kvs:  # sent again: it was free the first time
            place.revision = found[0].create_revision
            return self._stand(claim, place, deadline) or self._busy(claim)
        return self._busy(claim)

    def _wait(self, claim: Claim, place: _Place, predecessor: bytes, said: Any) -> Busy:
        self._watcher.wait(claim.id, (predecessor, self._keys.own(claim)), said.header.revision + 1)
        return self._busy(claim)

    def _busy(self, claim: Claim) -> Busy:
        return Busy(max(SAFETY_TIMER, claim.ttl))

    def _granted(self, claim: Claim, place: _Place) -> Granted:
        session = place.session
        assert session is not None
        return session.granted(place.revision)

    def _refused(self, claim: Claim, place: _Place, deadline: float) -> None:
        """Nothing of this claim is at the server, nor will be: its release is not asked for."""
        with self._lock:
            if self._places.get(claim.id) is place and not place.cancelled:
                del self._places[claim.id]
        self._end_own_session(claim, place, deadline)

    def _end_own_session(self, claim: Claim, place: _Place, deadline: float) -> None:
        if place.session is not None and not claim.renew:
            self._sessions.revoke(place.session, self._left(deadline))

    # ---- release

    def release(self, claim: Claim, granted: Granted | None, unsure: bool, within: float) -> bool:
        deadline = self._now() + within
        with self._lock:
            place = self._places.get(claim.id) or _Place()
            place.cancelled = True  # an attempt that runs now in another thread sends nothing more
            lease = place.lease if granted is None else granted.group
            if unsure:
                self._cancel_here(claim.id)
        self._watcher.stop(claim.id)
        if lease is None or not self._sessions.is_alive(lease):  # never sent, or the server has deleted all of it
            deleted = False
        elif unsure:
            deleted = self._cancel(claim, lease, deadline)
        else:
            request = m.DeleteRangeRequest(key=self._keys.own(claim))
            deleted = self._transport.call(calls.DELETE, request, within)[0].deleted == 1
        with self._lock:
            self._places.pop(claim.id, None)
        self._end_own_session(claim, place, deadline)
        return deleted

    def _cancel_here(self, claim_id: str) -> None:
        now = self._now()
        while self._cancelled and next(iter(self._cancelled.values())) < now:
            del self._cancelled[next(iter(self._cancelled))]
        self._cancelled[claim_id] = now + TOMBSTONE

    def _cancel(self, claim: Claim, lease: Any, deadline: float) -> bool:
        """Delete our key, and leave a tombstone for the join that may still come."""
        gone = self._keys.gone(claim)
        tombstone = {"request_put": {"key": gone, "lease": lease}}
        try:
            said, _ = self._txn([], [tombstone, _delete(self._keys.own(claim))], [], deadline)
        except LeaseMissing:  # what comes later names a lease that does not exist
            self._sessions.end(lease)
            return False
        self._tombstones.append(_Tombstone(gone, lease, self._now() + TOMBSTONE))
        return bool(said.responses[1].response_delete_range.deleted)

    # ---- renew

    def renew(self, group: Hashable, held: Sequence[Held], within: float) -> Sequence[Granted | None]:
        """One keep-alive for all. Keys that no watch covers are looked at as well."""
        deadline = self._now() + within
        session = self._sessions.keep_alive(group, within)
        if session is None:
            for claim, _ in held:
                self._notices.gone(claim.id, LossReason.SESSION_LOST, ENDED)
            return [None] * len(held)
        self._forget_tombstones(deadline)
        one = len(held) == 1  # it may be `Lease.renew()`, which asks whether the lock is still ours
        doubtful = [pair for pair in held if one or not self._watcher.covers(pair[0].id)]
        keys = [(self._keys.own(claim), granted.token) for claim, granted in doubtful]
        gone, _ = lookup.missing(self._transport, keys, self._left(deadline), self._now)
        return [None if self._keys.own(claim) in gone else session.granted(granted.token) for claim, granted in held]

    def _forget_tombstones(self, deadline: float) -> None:
        old: list[_Tombstone] = []
        while self._tombstones and self._tombstones[0].until < self._now() and len(old) < AT_ONCE:
            old.append(self._tombstones.popleft())
        if old:
            try:
                self._txn([], [_delete(each.key) for each in old], [], deadline)
            except BackendUnavailable as silence:
                self._tombstones.extendleft(reversed(old))
                logger.debug("old tombstones are deleted later: %s", silence)

    # ---- looking

    def inspect(self, name: str, within: float) -> LockInfo | None:
        said, _ = self._transport.call(calls.RANGE, _first_of(self._keys.queue(name)), within)
        return self._info(name, said.kvs[0], said.count - 1) if said.kvs else None

    def inspect_all(self, prefix: str, within: float) -> Iterator[LockInfo]:
        # A name that is all dots is escaped otherwise than the beginning of a longer one.
        begin = self._keys.prefix + ("" if prefix in (".", "..") else escape(prefix)).encode()
        for name, rows in groupby(self._rows(begin, within), lambda row: self._keys.name(row.key)):
            below = list(rows)
            first = min(below, key=lambda row: row.create_revision)
            if name is not None and name.startswith(prefix) and (info := self._info(name, first, len(below) - 1)):
                yield info

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

    def force(self, name: str, within: float) -> bool:
        deadline = self._now() + within
        while True:
            said, _ = self._transport.call(calls.RANGE, _first_of(self._keys.queue(name)), self._left(deadline))
            if not said.kvs or not self._keys.contends(said.kvs[0]):
                return False
            first = said.kvs[0]
            said, _ = self._txn([_created(first.key, first.create_revision)], [_delete(first.key)], [], deadline)
            if said.succeeded:
                return True

    # ---- requests

    def _txn(
        self, compare: list[_Part], success: list[_Part], failure: list[_Part], deadline: float
    ) -> tuple[Any, float]:
        request = m.TxnRequest(compare=compare, success=success, failure=failure)
        return self._transport.call(calls.TXN, request, self._left(deadline))

    def _left(self, deadline: float) -> float:
        return deadline - self._now()


# The parts of a transaction, as the fields of a `Compare` or a `RequestOp`: made as messages of their own, they would
# be copied into the request, which takes twice as long.
_Part = dict[str, Any]


def _absent(key: bytes) -> _Part:
    return {"target": m.CREATE, "key": key}


def _created(key: bytes, revision: int) -> _Part:
    return {"target": m.CREATE, "key": key, "create_revision": revision}


def _put(key: bytes, claim: Claim, session: Session) -> _Part:
    return {"request_put": {"key": key, "value": encode_value(claim), "lease": session.lease}}


def _delete(key: bytes) -> _Part:
    return {"request_delete_range": {"key": key}}


def _range(key: bytes) -> _Part:
    return {"request_range": {"key": key, "keys_only": True}}


def _last_of(queue: bytes, limit: int, before: int = 0) -> _Part:
    """The contenders who came last, those who came ``before`` a revision."""
    return {
        "request_range": {
            "key": queue,
            "range_end": end_of(queue),
            "limit": limit,
            "sort_order": m.DESCEND,
            "sort_target": m.SORT_BY_CREATION,
            "keys_only": True,
            "max_create_revision": before - 1 if before else 0,
        }
    }


def _first_of(queue: bytes) -> Any:
    """Who holds the lock, if it is a contender."""
    return m.RangeRequest(
        key=queue, range_end=end_of(queue), limit=1, sort_order=m.ASCEND, sort_target=m.SORT_BY_CREATION
    )
