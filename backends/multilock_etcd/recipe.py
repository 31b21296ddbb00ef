"""The lock on etcd: what is written and compared in one transaction, and what the answers mean.

The queue is that of etcd's own concurrency recipes (client/v3/concurrency, `etcdctl lock` and `elect`, the v3lock
service): a contender is a key ``<prefix><name>/<id>`` on a lease, and the one with the lowest create_revision under
``<prefix><name>/`` holds the lock. That revision is the fencing token. What those recipes lack and is done here:

* one request joins, or takes a free lock, and shows the predecessor;
* nobody holds before its own key was seen, at its own revision, in the same transaction that saw no predecessor;
* a cancel is final: it leaves ``<prefix>!gone/<id>`` on the same lease, and a join compares that to be absent, so a
  request that a stopped server executes after its cancel finds that it is too late;
* validity is that of the lease, from the sending of its last acknowledged keep-alive: a put moves nothing;
* a name that is to rest has its key put on a lease of its own: it stays first in the queue until that has ended.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from multilock.backend import Held, Notices
from multilock.errors import BackendRejected, BackendUnavailable, MultilockError
from multilock.model import Busy, Claim, Granted, LockInfo, LossReason
from multilock.names import escape, unescape
from multilock.telling import logger
from multilock.values import decode_value, encode_resting, encode_value
from multilock_etcd import lookup
from multilock_etcd import messages as m
from multilock_etcd.lookup import AT_ONCE
from multilock_etcd.notices import Watcher
from multilock_etcd.sessions import ENDED, RENEWALS, REVOKE_WITHIN, Session, Sessions
from multilock_etcd.transport import LeaseMissing, Transport, calls

__all__ = ["Keyspace", "Recipe"]

TOMBSTONE = 600.0  # seconds; longer than any request can lie in a buffer of a connection that was closed
CLOSE_WITHIN = 0.5  # seconds for all leases and keys that are left when a client is closed
PAGE = 500  # keys read at once when all locks are listed
FRESH = 0.05  # of the ttl: an own lease older than that is renewed before its claim looks again
TRIES = 3  # an operator who writes our key again and again must not keep a release for ever
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

    __slots__ = ("cancelled", "claim", "lease", "revision", "session")

    def __init__(self, claim: Claim) -> None:
        self.claim = claim
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
        self._rests: dict[str, Hashable] = {}  # of those the claims that are to rest, and their lease until they do
        self._lock = threading.Lock()  # of the places, the cancelled and the resting
        self._tombstones: deque[_Tombstone] = deque()

    # ---- acquire

    def attempt(self, claim: Claim, join: bool, within: float) -> Granted | Busy:
        deadline = self._now() + within
        with self._lock:
            if claim.id in self._cancelled:  # this very call comes late
                return self._busy(claim)
            place = self._places.setdefault(claim.id, _Place(claim))
        answer = None
        try:
            self._keep_own_session(claim, place, deadline)
            if place.revision:
                answer = self._stand(claim, place, deadline)
            while answer is None:
                answer = self._enter(claim, place, join, deadline)
        finally:
            if place.cancelled:
                self._watcher.stop(claim.id)
                # Its release ended the own lease that there was then; a later one is nobody's.
                self._end_own_session(claim, place, self._now() + REVOKE_WITHIN)
            elif isinstance(answer, Granted):
                self._watcher.stop(claim.id)
            elif place.lease is None or (answer and not place.revision):
                self._refused(claim, place, deadline)
        return answer

    def _keep_own_session(self, claim: Claim, place: _Place, deadline: float) -> None:
        """The ttl of a lock that is not renewed counts from its grant: while it waits, its lease is kept, and whoever
        is woken looks with a new one."""
        session = place.session
        if session is not None and not claim.renew and self._now() > session.sent_at + FRESH * session.ttl:
            self._sessions.keep_alive(session.lease, self._left(deadline))

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
        return Busy(max(SAFETY_TIMER, claim.ttl) if claim.renew else claim.ttl / RENEWALS)

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
            place = self._places.get(claim.id) or _Place(claim)
            place.cancelled = True  # an attempt that runs now in another thread sends nothing more
            lease = place.lease if granted is None else granted.group
            if unsure:
                self._cancel_here(claim.id)
        self._watcher.stop(claim.id)
        if lease is None or not self._sessions.is_alive(lease):  # never sent, or the server has deleted all of it
            deleted = False
        elif claim.id in self._rests:
            deleted = self._delete_unless_it_rests(claim, lease, unsure, deadline)
        elif unsure:
            deleted = self._cancel(claim, lease, deadline)
        else:
            request = m.DeleteRangeRequest(key=self._keys.own(claim))
            deleted = self._transport.call(calls.DELETE, request, within)[0].deleted == 1
        self._given_back(claim, place, deadline)
        return deleted

    def _given_back(self, claim: Claim, place: _Place, deadline: float) -> None:
        with self._lock:
            self._places.pop(claim.id, None)
            if claim.id in self._rests:
                self._rests[claim.id] = None
        self._end_own_session(claim, place, deadline)

    def _cancel_here(self, claim_id: str) -> None:
        now = self._now()
        while self._cancelled and next(iter(self._cancelled.values())) < now:
            oldest = next(iter(self._cancelled))
            del self._cancelled[oldest]
            self._rests.pop(oldest, None)
        self._cancelled[claim_id] = now + TOMBSTONE

    def _cancel(self, claim: Claim, lease: Any, deadline: float) -> bool:
        """Delete our key, and leave a tombstone for the join that may still come."""
        try:
            said, _ = self._txn([], [self._tombstone(claim, lease), _delete(self._keys.own(claim))], [], deadline)
        except LeaseMissing:  # what comes later names a lease that does not exist
            self._sessions.end(lease)
            return False
        except BackendRejected:  # etcd is out of space, and takes no tombstone. But the lock can be free.
            self._txn([], [_delete(self._keys.own(claim))], [], deadline)
            raise
        self._remember_tombstone(claim, lease)
        return bool(said.responses[1].response_delete_range.deleted)

    def _tombstone(self, claim: Claim, lease: Any) -> _Part:
        return {"request_put": {"key": self._keys.gone(claim), "lease": lease}}

    def _remember_tombstone(self, claim: Claim, lease: Any) -> None:
        self._tombstones.append(_Tombstone(self._keys.gone(claim), lease, self._now() + TOMBSTONE))

    # ---- rest

    def rest(self, claim: Claim, granted: Granted, unsure: bool, seconds: float, within: float) -> bool:
        deadline = self._now() + within
        with self._lock:
            place = self._places.get(claim.id) or _Place(claim)
            place.cancelled = True
            self._cancel_here(claim.id)
            self._rests[claim.id] = granted.group
        self._watcher.stop(claim.id)
        if self._sessions.is_alive(granted.group):
            ours = self._rest(claim, granted, unsure, seconds, deadline)
        else:  # it moved before, or was lost
            row = self._own_row(claim, deadline)
            ours = row is not None and _rests(row)
        self._given_back(claim, place, deadline)
        return ours

    def _rest(self, claim: Claim, granted: Granted, unsure: bool, seconds: float, deadline: float) -> bool:
        """Put the key on a lease that only the server's clock ends.

        If the answer to that is lost, the lease is left alone: the key may still be put there, and whoever asks again
        finds that it was.
        """
        lease, seconds = self._sessions.new_rest(seconds, self._left(deadline))
        try:
            try:
                found = self._move(claim, granted, unsure, lease, seconds, deadline)
            except LeaseMissing:
                if not unsure:
                    raise
                # It may be the tombstone's, which needs none then.
                found = self._move(claim, granted, False, lease, seconds, deadline)
        except LeaseMissing as error:  # this process stood still for longer than it lived
            raise BackendUnavailable("it was to rest, too late", unknown=False) from error
        except BackendRejected:
            self._sessions.end_rest(lease, self._left(deadline))
            raise
        if found != lease:
            self._sessions.end_rest(lease, self._left(deadline))
        return found is not None

    def _move(
        self, claim: Claim, granted: Granted, unsure: bool, lease: int, seconds: float, deadline: float
    ) -> int | None:
        """On which lease the key rests now: this one, or an earlier one. None: it was not this claim's any more."""
        own = self._keys.own(claim)
        put = {"request_put": {"key": own, "value": encode_resting(claim, granted.token, seconds), "lease": lease}}
        tombstone = [self._tombstone(claim, granted.group)] if unsure else []
        revision = granted.token
        for _ in range(TRIES):
            said, _ = self._txn([_modified(own, revision)], [put, *tombstone], [_read(own), *tombstone], deadline)
            if tombstone:
                self._remember_tombstone(claim, granted.group)
            if said.succeeded:
                return lease
            rows = said.responses[0].response_range.kvs
            if not rows or rows[0].create_revision != granted.token:
                return None
            if _rests(rows[0]):
                earlier: int = rows[0].lease
                return earlier
            revision = rows[0].mod_revision  # an operator wrote the key
        raise self._restless(claim)

    def _delete_unless_it_rests(self, claim: Claim, lease: Any, unsure: bool, deadline: float) -> bool:
        """A rest that was asked for had no answer, and its time is over; or it came before."""
        row = self._own_row(claim, deadline)
        own = self._keys.own(claim)
        ours = row is not None and not _rests(row)
        still, delete = ([_modified(own, row.mod_revision)], [_delete(own)]) if ours else ([], [])
        tombstone = [self._tombstone(claim, lease)] if unsure else []
        try:
            said, _ = self._txn(still, [*delete, *tombstone], [], deadline)
        except LeaseMissing:  # and with it the key, meanwhile
            self._sessions.end(lease)
            return False
        if not said.succeeded:
            raise self._restless(claim)
        if tombstone:
            self._remember_tombstone(claim, lease)
        return ours

    def _own_row(self, claim: Claim, deadline: float) -> Any:
        request = m.RangeRequest(key=self._keys.own(claim))
        said, _ = self._transport.call(calls.RANGE, request, self._left(deadline))
        return said.kvs[0] if said.kvs else None

    def _restless(self, claim: Claim) -> BackendUnavailable:
        return BackendUnavailable(f"the key {self._keys.own(claim).decode()!r} changes all the time", unknown=False)

    def close(self) -> None:
        """Nothing is held any more: what there was no time to release goes with its lease. A lock that is not renewed
        has one of its own, and a thousand are not revoked in a moment; so their keys are deleted before that."""
        if self._transport.silent:
            return
        deadline = self._now() + CLOSE_WITHIN
        # What could not be told to rest keeps its name for what is left of its ttl.
        unheard = {claim_id: lease for claim_id, lease in self._rests.copy().items() if lease}
        places = [place for id_, place in self._places.copy().items() if id_ not in unheard]
        left = [place.claim for place in places if not place.claim.renew and place.lease]
        try:
            for start in range(0, len(left), AT_ONCE):
                deletes = [_delete(self._keys.own(claim)) for claim in left[start : start + AT_ONCE]]
                self._txn([], deletes, [], deadline)
        except MultilockError as error:
            logger.debug("locks that are not renewed are left to their ttl: %s", error)
        else:
            self._sessions.revoke_all(deadline, keep=set(unheard.values()))

    # ---- renew

    def renew(self, group: Hashable, held: Sequence[Held], within: float) -> Sequence[Granted | None]:
        """One keep-alive for all, which is the proof for all. Keys that no watch covers are looked at as well."""
        deadline = self._now() + within
        session = self._sessions.keep_alive(group, within)
        one = len(held) == 1  # it may be `Lease.renew()`, which asks whether the lock is still ours
        doubtful = [pair for pair in held if one or not self._watcher.covers(pair[0].id)]
        gone, revision = self._missing(session, doubtful, deadline, within) if session else (set(), 0)
        if session is None or (gone and self._sessions.look(group, revision, self._left(deadline))):
            for claim, _ in held:
                self._notices.gone(claim.id, LossReason.SESSION_LOST, ENDED)
            return [None] * len(held)
        self._forget_tombstones(deadline)
        return [None if self._keys.own(claim) in gone else session.granted(granted.token) for claim, granted in held]

    def _missing(
        self, session: Session, doubtful: Sequence[Held], deadline: float, within: float
    ) -> tuple[set[bytes], int]:
        """Those of these keys that are gone, as far as there was time to look at them; and a revision at which they
        were. A single one is looked at, or this raises; of many the others are looked at the next time: they need no
        look to be ours, and an answer that comes too late is no proof of any."""
        gone: set[bytes] = set()
        revision = 0
        longest = 0.0
        turn = session.turn % len(doubtful) if doubtful else 0
        in_turn = [*doubtful[turn:], *doubtful[:turn]]
        keys = [(self._keys.own(claim), granted.token, granted.group) for claim, granted in in_turn]
        if len(keys) > 1:
            deadline -= within / 4
        for start in range(0, len(keys), AT_ONCE):
            began = self._now()
            if start and deadline - began < 2 * longest:  # cut short, it would say that the server is silent
                break
            try:
                missing, revision = lookup.missing(self._transport, keys[start : start + AT_ONCE], deadline - began)
            except MultilockError as error:
                if len(keys) == 1:
                    raise
                logger.debug("keys that no watch covers are looked at later: %s", error)
                break
            gone |= missing
            if len(keys) > 1:
                session.turn = turn + start + AT_ONCE
            longest = max(longest, self._now() - began)
        return gone, revision

    def _forget_tombstones(self, deadline: float) -> None:
        old: list[_Tombstone] = []
        while self._tombstones and self._tombstones[0].until < self._now() and len(old) < AT_ONCE:
            old.append(self._tombstones.popleft())
        if old:
            try:
                self._txn([], [_delete(each.key) for each in old], [], deadline)
            except MultilockError as error:
                self._tombstones.extendleft(reversed(old))
                logger.debug("old tombstones are deleted later: %s", error)

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
                if _rests(first):
                    self._sessions.end_rest(first.lease, self._left(deadline))
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


def _modified(key: bytes, revision: int | None) -> _Part:
    return {"target": m.MODIFY, "key": key, "mod_revision": revision}


def _put(key: bytes, claim: Claim, session: Session) -> _Part:
    return {"request_put": {"key": key, "value": encode_value(claim), "lease": session.lease}}


def _delete(key: bytes) -> _Part:
    return {"request_delete_range": {"key": key}}


def _range(key: bytes) -> _Part:
    return {"request_range": {"key": key, "keys_only": True}}


def _read(key: bytes) -> _Part:
    return {"request_range": {"key": key}}


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


def _rests(row: Any) -> bool:
    """Its claim was released, and left the name taken for a while."""
    return bool(row.lease) and decode_value(row.value).resting_until is not None
