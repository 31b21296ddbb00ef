"""The lock on etcd: what is written and compared in one transaction, and what the answers mean.

The queue is that of etcd's own concurrency recipes (client/v3/concurrency, `etcdctl lock` and `elect`, the v3lock
service): a contender is a key ``<prefix><name>/<id>`` on a lease, and the one with the lowest create_revision under
``<prefix><name>/`` holds the lock. That revision is the fencing token.

1. put our key; 2. if no key there was created before it, we hold the lock; 3. else watch the one created just before
ours; 4. when that is deleted, go to 2. To release is to delete the key.

Who is near enough does not go to 2 again: 1 and 2 have read who is ahead, and one watch of the whole name counts
them down (`multilock_etcd.counting`). At nobody ahead our claim is told that it holds.

Readers, writers and permits stand in the same queue, below ``read/``, ``write/`` and ``permit/<n>/`` of the name, the
first two as in etcd's own read-write lock. For a reader only those count who do not read, for a permit those who have
none of the same number; and where n of its like are before it, the n newest of these are watched.

What those recipes lack and is done here:

* one request joins, or takes a free lock, and shows the predecessor;
* nobody holds before its own key was put or seen, at its own revision, in the transaction that saw no predecessor;
* a cancel is final: it leaves ``<prefix>!gone/<id>`` on the same lease, and a join compares that to be absent, so a
  request that a stopped server executes after its cancel finds that it is too late;
* validity is that of the lease, from the sending of its last acknowledged keep-alive: a put moves nothing;
* a name that is to rest has its key put on a lease of its own: it stays first in the queue until that has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import chain
from typing import Any

from multilock import BackendRejected, BackendUnavailable, LossReason, MultilockError
from multilock.backend import Busy, Claim, Granted, Held, Notices, other_number
from multilock.telling import logger
from multilock.values import encode_resting
from multilock_etcd.counting import Standing
from multilock_etcd.keys import Ahead, Keyspace, Range, rests
from multilock_etcd.notices import Watcher
from multilock_etcd.places import Place, Places
from multilock_etcd.sessions import ENDED, RENEWALS, REVOKE_WITHIN, Session, Sessions
from multilock_etcd.sweep import Sweep
from multilock_etcd.transactions import (
    Part,
    Transactions,
    absent,
    created,
    delete,
    last_of,
    modified,
    nobody,
    number_of,
    oldest_of,
    put,
    read,
    read_key,
)
from multilock_etcd.transport import LeaseMissing, Transport

__all__ = ["Recipe"]

CLOSE_WITHIN = 0.5  # seconds for all leases and keys that are left when a client is closed
NEAR = (
    32  # with more to go, or to enter, before it a claim watches one key only: not each release is told to all who wait
)
FRESH = 0.05  # of the ttl: an own lease older than that is renewed before its claim looks again
TRIES = 3  # an operator who writes our key again and again must not keep a release for ever
WATCHED = 16  # keys that one permit waits for, each by itself; more of them are watched as one range
SAFETY_TIMER = 5.0  # seconds, or the ttl if that is more: a waiter looks again although no watch fired


class Recipe:
    def __init__(
        self,
        keys: Keyspace,
        transport: Transport,
        transactions: Transactions,
        sessions: Sessions,
        watcher: Watcher,
        notices: Notices,
    ) -> None:
        self._keys = keys
        self._transport = transport
        self._transactions = transactions
        self._sessions = sessions
        self._watcher = watcher
        self._notices = notices
        self._now: Callable[[], float] = notices.now
        self._places = Places(notices.now)
        self._sweep = Sweep(keys, transactions, notices.now)

    # ---- acquire

    def attempt(self, claim: Claim, join: bool, within: float) -> Granted | Busy:
        deadline = self._now() + within
        place = self._places.enter(claim)
        if place is None:
            return _busy(claim)
        answer = None
        try:
            self._keep_own_session(claim, place, deadline)
            if place.revision:
                self._watcher.count_no_more(claim.id)
                answer = self._stand(claim, place, deadline)
            while answer is None:
                answer = self._enter(claim, place, join, deadline)
        finally:
            self._attempted(claim, place, answer, deadline)
        return answer

    def _enter(self, claim: Claim, place: Place, join: bool, deadline: float) -> Granted | Busy | None:
        """Ask once, on a lease that is alive. None: it was not, or our key vanished; nothing is written, ask again."""
        session = place.session
        if session is None or not self._sessions.is_alive(session.lease):
            session = self._sessions.of(claim, self._left(deadline))
        before = place.lease
        with self._places.lock:
            place.session = session
            if place.cancelled:  # meanwhile: no request that names the claim has been sent, nor will be
                return _busy(claim)
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
            if not getattr(error, "unknown", False) and not place.revision:
                place.lease = before
            raise

    def _join(self, claim: Claim, place: Place, session: Session, deadline: float) -> Granted | Busy | None:
        """1 and 2: see whom our key will stand behind, and put it at the end of the queue. Sent again, it finds what it
        did. Who is refused for its number of permits is never in the queue: it would be the first of all permits, and
        refuse those with the right number, as soon as those before it have left."""
        own, ahead = self._keys.own(claim), self._keys.ahead(claim)
        said = self._transactions.execute(
            [absent(own), absent(self._keys.gone(claim)), *map(nobody, ahead.strangers)],
            [*_last_of(ahead), put(own, claim, session.lease)],
            [*map(oldest_of, ahead.strangers), read_key(own)],
            deadline,
        )
        if said.succeeded:
            place.revision = said.header.revision
            return self._hold_or_wait(claim, place, said, said.responses[:-1])
        found = said.responses[-1].response_range.kvs
        if not found:
            self._refuse_another_number(claim, said.responses[:-1])
            return _busy(claim)  # it was cancelled
        place.revision = found[0].create_revision
        return self._stand(claim, place, deadline)

    def _stand(self, claim: Claim, place: Place, deadline: float) -> Granted | Busy | None:
        """2: with our key still there at its revision, whom does it stand behind? None: it is not there.

        What it may have been told before that is not to be believed then, and so the id is given up.
        """
        assert place.revision is not None
        said = self._transactions.execute(
            [created(self._keys.own(claim), place.revision)],
            _last_of(self._keys.ahead(claim), before=place.revision),
            [],
            deadline,
        )
        if not said.succeeded:
            place.revision = None
            return Busy(0.0, spent=True) if place.pushed else None
        return self._hold_or_wait(claim, place, said, said.responses)

    def _take_if_free(self, claim: Claim, place: Place, session: Session, deadline: float) -> Granted | Busy:
        """1 without a queue: put our key only where nobody stands who does not fit. Refused, it leaves nothing. Whether
        there is room among its like no comparison tells: a permit puts its key, and takes it back."""
        own, ahead = self._keys.own(claim), self._keys.ahead(claim)
        look = _last_of(ahead) if ahead.like else []
        said = self._transactions.execute(
            [*map(nobody, ahead.others), absent(own), absent(self._keys.gone(claim))],
            [*look, put(own, claim, session.lease)],
            [*map(oldest_of, ahead.strangers), read_key(own)],
            deadline,
        )
        if said.succeeded:
            place.revision = said.header.revision
            behind = self._behind(claim, said.responses[:-1])
            answer: Granted | Busy | None = _busy(claim) if behind else _granted(place)
        elif found := said.responses[-1].response_range.kvs:  # sent again: it was free the first time
            place.revision = found[0].create_revision
            answer = self._stand(claim, place, deadline)
        else:
            self._refuse_another_number(claim, said.responses[:-1])
            return _busy(claim)
        if isinstance(answer, Busy):
            self._take_back(claim, place, deadline)
        return answer or _busy(claim)

    def _hold_or_wait(self, claim: Claim, place: Place, said: Any, last: Sequence[Any]) -> Granted | Busy:
        """2 and 3: wait from the revision on at which they were seen, or their end in between would be missed."""
        behind = self._behind(claim, last)
        if not behind:
            return _granted(place)
        standing = self._standing(claim, place, last, said.header.revision)
        if self._crowd(claim, standing, last) <= NEAR:
            self._watcher.count(self._keys.queue(claim.name), standing)
        else:
            self._watcher.wait(claim.id, [*behind, (self._keys.own(claim), b"")], said.header.revision + 1)
        return _busy(claim)

    def _behind(self, claim: Claim, last: Sequence[Any]) -> list[Range]:
        """What to watch of those whom our key stands behind: the ``last`` who came before it. Nothing: it holds.

        Of those who do not fit it is the newest. Of its like, who leave in any order, as many as hold the name
        together: while all of them are there, there is no room, and it comes with the first of them that goes.
        """
        ahead = self._keys.ahead(claim)
        found = [answer.response_range.kvs for answer in last]
        others = [rows[0] for rows in found[: len(ahead.others)] if rows]
        if others:
            return [(max(others, key=lambda row: row.create_revision).key, b"")]
        like = [(row.key, b"") for rows in found[len(ahead.others) :] for row in rows[: ahead.room]]
        if len(like) < ahead.room:
            return []
        return like if len(like) <= WATCHED else list(ahead.like)

    def _standing(self, claim: Claim, place: Place, last: Sequence[Any], at: int) -> Standing:
        """As far as ``last`` tells, which is exact if no more than `NEAR` are to go."""
        ahead = self._keys.ahead(claim)
        found = [[row.key for row in answer.response_range.kvs] for answer in last]
        others, like = found[: len(ahead.others)], found[len(ahead.others) :][: len(ahead.like)]
        return Standing(claim, place, self._keys.own(claim), chain(*others), chain(*like), ahead.room, at)

    def _crowd(self, claim: Claim, standing: Standing, last: Sequence[Any]) -> int:
        """How many at most, in its way or of its like, wait before it, as far as that matters: they count as well.
        Never less than have to go."""
        if not standing.others:
            return standing.to_go
        ahead = self._keys.ahead(claim)
        beside = last[len(ahead.others)].response_range.count if ahead.beside else 0
        return len(standing.others) + len(standing.like) + int(beside)

    def _refuse_another_number(self, claim: Claim, strangers: Sequence[Any]) -> None:
        for answer in strangers:
            for row in answer.response_range.kvs:
                kind, permits = self._keys.kind(row) or (None, 0)
                if kind == "permit":
                    raise other_number(claim, permits, "etcd")

    def _take_back(self, claim: Claim, place: Place, deadline: float) -> None:
        """Our key is not to wait."""
        if not place.revision:
            return
        self._watcher.stop(claim.id)
        try:
            self._transactions.delete(self._keys.own(claim), self._left(deadline))
        except MultilockError as error:  # it was put: a cancel has to delete it
            raise BackendUnavailable(f"a refused claim may be left behind: {error}") from error
        place.revision = None

    def _attempted(self, claim: Claim, place: Place, answer: Granted | Busy | None, deadline: float) -> None:
        if place.cancelled:
            self._watcher.stop(claim.id)
            # Its release ended the own lease that there was then; a later one is nobody's.
            self._end_own_session(claim, place, self._now() + REVOKE_WITHIN)
        elif isinstance(answer, Granted):
            self._watcher.stop(claim.id)
        elif place.lease is None or (answer and not answer.spent and not place.revision):
            # Nothing of this claim is at the server, nor will be: its release is not asked for. That of a spent one is:
            # a join of it that had no answer may still come.
            self._places.forget(claim, place)
            self._end_own_session(claim, place, deadline)

    def _keep_own_session(self, claim: Claim, place: Place, deadline: float) -> None:
        """The ttl of a lock that is not renewed counts from its grant: while it waits, its lease is kept, and whoever
        is woken looks with a new one."""
        session = place.session
        if session is not None and not claim.renew and self._now() > session.sent_at + FRESH * session.ttl:
            self._sessions.keep_alive(session.lease, self._left(deadline))

    def _end_own_session(self, claim: Claim, place: Place, deadline: float) -> None:
        if place.session is not None and not claim.renew:
            self._sessions.revoke(place.session, self._left(deadline))

    # ---- renew

    def renew(self, group: Hashable, held: Sequence[Held], within: float) -> Sequence[Granted | None]:
        """One keep-alive for all, which is the proof for all. Keys that no watch covers are looked at as well."""
        deadline = self._now() + within
        session = self._sessions.keep_alive(group, within)
        one = len(held) == 1  # it may be `Lease.renew()`, which asks whether the lock is still ours
        doubtful = [pair for pair in held if one or not self._watcher.covers(pair[0].id)]
        gone, at = self._sweep.missing(session, doubtful, deadline, within) if session else (set(), 0)
        if session is None or (gone and self._sessions.look(group, at, self._left(deadline))):
            for claim, _ in held:
                self._notices.gone(claim.id, LossReason.SESSION_LOST, ENDED)
            return [None] * len(held)
        self._sweep.forget_tombstones(deadline)
        return [None if self._keys.own(claim) in gone else session.granted(granted.token) for claim, granted in held]

    # ---- release

    def release(self, claim: Claim, granted: Granted | None, unsure: bool, within: float) -> bool:
        deadline = self._now() + within
        with self._places.lock:
            place = self._places.cancel(claim, unsure)
            lease = place.lease if granted is None else granted.group
        self._watcher.stop(claim.id)
        if lease is None or not self._sessions.is_alive(lease):  # never sent, or the server has deleted all of it
            deleted = False
        elif self._places.may_rest(claim):
            deleted = self._delete_unless_it_rests(claim, lease, unsure, deadline)
        elif unsure:
            deleted = self._cancel(claim, lease, deadline)
        else:
            deleted = self._transactions.delete(self._keys.own(claim), within)
        self._given_back(claim, place, deadline)
        return deleted

    def _cancel(self, claim: Claim, lease: Any, deadline: float) -> bool:
        """Delete our key, and leave a tombstone for the join that may still come."""
        key, tombstone = delete(self._keys.own(claim)), self._tombstone(claim, lease)
        try:
            said = self._transactions.execute([], [tombstone, key], [], deadline)
        except LeaseMissing:  # what comes later names a lease that does not exist
            self._sessions.end(lease)
            return False
        except BackendRejected:  # etcd is out of space, and takes no tombstone. But the lock can be free.
            self._transactions.execute([], [key], [], deadline)
            raise
        self._sweep.remember_tombstone(self._keys.gone(claim))
        return bool(said.responses[1].response_delete_range.deleted)

    def _tombstone(self, claim: Claim, lease: Any) -> Part:
        return {"request_put": {"key": self._keys.gone(claim), "lease": lease}}

    def _given_back(self, claim: Claim, place: Place, deadline: float) -> None:
        self._places.given_back(claim)
        self._end_own_session(claim, place, deadline)

    # ---- rest

    def rest(self, claim: Claim, granted: Granted, unsure: bool, seconds: float, within: float) -> bool:
        deadline = self._now() + within
        with self._places.lock:
            place = self._places.cancel(claim, unsure=True)
            self._places.will_rest(claim, granted.group)
        self._watcher.stop(claim.id)
        if self._sessions.is_alive(granted.group):
            ours = self._rest(claim, granted, unsure, seconds, deadline)
        else:  # it moved before, or was lost
            row = self._transactions.row(self._keys.own(claim), deadline)
            ours = row is not None and rests(row)
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
        move = {"request_put": {"key": own, "value": encode_resting(claim, granted.token, seconds), "lease": lease}}
        tombstone = [self._tombstone(claim, granted.group)] if unsure else []
        at = granted.token
        for _ in range(TRIES):
            said = self._transactions.execute(
                [modified(own, at)], [move, *tombstone], [read(own), *tombstone], deadline
            )
            if tombstone:
                self._sweep.remember_tombstone(self._keys.gone(claim))
            if said.succeeded:
                return lease
            rows = said.responses[0].response_range.kvs
            if not rows or rows[0].create_revision != granted.token:
                return None
            if rests(rows[0]):
                earlier: int = rows[0].lease
                return earlier
            at = rows[0].mod_revision  # an operator wrote the key
        raise self._restless(claim)

    def _delete_unless_it_rests(self, claim: Claim, lease: Any, unsure: bool, deadline: float) -> bool:
        """A rest that was asked for had no answer, and its time is over; or it came before."""
        own = self._keys.own(claim)
        row = self._transactions.row(own, deadline)
        ours = row is not None and not rests(row)
        still, gone = ([modified(own, row.mod_revision)], [delete(own)]) if ours else ([], [])
        tombstone = [self._tombstone(claim, lease)] if unsure else []
        try:
            said = self._transactions.execute(still, [*gone, *tombstone], [], deadline)
        except LeaseMissing:  # and with it the key, meanwhile
            self._sessions.end(lease)
            return False
        if not said.succeeded:
            raise self._restless(claim)
        if tombstone:
            self._sweep.remember_tombstone(self._keys.gone(claim))
        return ours

    def _restless(self, claim: Claim) -> BackendUnavailable:
        return BackendUnavailable(f"the key {self._keys.own(claim).decode()!r} changes all the time", unknown=False)

    # ---- close

    def close(self) -> None:
        """Nothing is held any more: what there was no time to release goes with its lease. A lock that is not renewed
        has one of its own, and a thousand are not revoked in a moment; so their keys are deleted before that. What
        could not be told to rest keeps its name for what is left of its ttl."""
        if self._transport.silent:
            return
        deadline = self._now() + CLOSE_WITHIN
        places, unheard = self._places.left()
        left = [place.claim for place in places if not place.claim.renew and place.lease]
        try:
            self._transactions.delete_all([self._keys.own(claim) for claim in left], deadline)
        except MultilockError as error:
            logger.debug("locks that are not renewed are left to their ttl: %s", error)
        else:
            self._sessions.revoke_all(deadline, keep=unheard)

    def _left(self, deadline: float) -> float:
        return deadline - self._now()


def _busy(claim: Claim) -> Busy:
    return Busy(max(SAFETY_TIMER, claim.ttl) if claim.renew else claim.ttl / RENEWALS)


def _last_of(ahead: Ahead, before: int = 0) -> list[Part]:
    """Those who came last, of all for whom a claim may have to wait, one more than `NEAR` are; for a reader how many
    readers there are."""
    others = [last_of(each, NEAR + 1, before) for each in ahead.others]
    like = [last_of(each, ahead.room + NEAR, before) for each in ahead.like]
    like += [number_of(ahead.beside)] if ahead.beside else []
    return others + like


def _granted(place: Place) -> Granted:
    assert place.session is not None
    return place.session.granted(place.revision)
