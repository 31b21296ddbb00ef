"""The lock on etcd: what each transaction compares and writes, and what its reply means.

The queue is that of etcd's own concurrency recipes (client/v3/concurrency, `etcdctl lock` and `elect`, the v3lock
service). A contender is a key ``<prefix><name>/<id>`` on a lease, and the contender with the lowest create_revision
under ``<prefix><name>/`` holds the lock. That revision is the fencing token.

1. Put our key. 2. If no key of the name was created before it, we hold the lock. 3. Otherwise watch the key created
just before ours. 4. When that key is deleted, go to 2. A release deletes our key.

A waiter near the front does not repeat step 2. Steps 1 and 2 have read which keys are ahead, and one watch of the whole
name counts these down (`multilock_etcd.counting`). Once no key is ahead, the watcher grants the claim.

Readers, writers and permits wait in the same queue, below ``read/``, ``write/`` and ``permit/<n>/`` of the name. The
first two are those of etcd's own read-write lock. A reader waits for every older key that is not a reader's. A permit
waits for every older key that is not a permit of the same number n. If n permits of that number are ahead, it also
watches the n newest of them.

Compared with those recipes, this one adds:

* One request joins the queue or takes a free lock, and its reply shows the predecessor.
* A claim holds the lock only on proof: a transaction put or read its own key, at its own revision, and saw no
  predecessor; or the countdown has ended.
* A cancel is final. It leaves the tombstone ``<prefix>!gone/<id>`` on the same lease, and a join requires that this key
  is absent. So a join that a paused server executes after its cancel changes nothing.
* A grant is valid for the lease's ttl, counted from when the last acknowledged keep-alive was sent. A put extends
  nothing.
* The key of a name that rests is put on a separate lease. It stays first in the queue until that lease has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import chain
from typing import Any

from multilock import BackendRejected, BackendUnavailable, LossReason, MultilockError
from multilock.backend import Busy, Claim, Granted, Held, Notices, other_number
from multilock.log_thread import logger
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
# A claim with more keys than this ahead of it, or beside them, watches a single key: most waiters then receive nothing
# when some other claim is released.
NEAR = 32
# fraction of the ttl: an older lease of a lock that is not renewed is extended before its claim looks again
FRESH = 0.05
TRIES = 3  # an operator who writes our key again and again must not block a release forever
WATCHED = 16  # keys that a waiting permit watches one by one; more are watched as one range
SAFETY_TIMER = 5.0  # seconds, or the ttl if that is longer, after which a waiter looks again although no watch fired


class Recipe:
    """The algorithm of the module's docstring, for all claims of one client."""

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
        """Send one request, on a lease that is alive. Returns None if the lease had ended or our key had vanished:
        nothing was written then, and the caller tries again."""
        session = place.session
        if session is None or not self._sessions.is_alive(session.lease):
            session = self._sessions.of(claim, self._left(deadline))
        before = place.lease
        with self._places.lock:
            place.session = session
            if place.cancelled:  # since this attempt began; no request naming this lease was sent, nor will be
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
        """Steps 1 and 2: read which keys ours will be behind, and put our key at the end of the queue.

        Idempotent: if it is sent again, the reply shows the key that the first one put. A claim with another number of
        permits never enters the queue. If it did, it would be the first permit once the keys before it were gone, and
        claims with the right number would then be refused.
        """
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
            return _busy(claim)  # the claim was cancelled: its tombstone refused the join
        place.revision = found[0].create_revision
        return self._stand(claim, place, deadline)

    def _stand(self, claim: Claim, place: Place, deadline: float) -> Granted | Busy | None:
        """Step 2: read which keys ours is behind, if ours still exists at its revision. Returns None if it is missing.

        If the watch had already granted the claim, that grant must not be believed now, so the id is given up.
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
        """Step 1 without a queue: put our key only if no key excludes it. A refused claim leaves nothing behind.

        For a permit, no comparison can check that there is room among its like. So a permit puts its key, and deletes
        it again if there is none.
        """
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
        elif found := said.responses[-1].response_range.kvs:  # sent again: the first request had put our key
            place.revision = found[0].create_revision
            answer = self._stand(claim, place, deadline)
        else:
            self._refuse_another_number(claim, said.responses[:-1])
            return _busy(claim)
        if isinstance(answer, Busy):
            self._take_back(claim, place, deadline)
        return answer or _busy(claim)

    def _hold_or_wait(self, claim: Claim, place: Place, said: Any, last: Sequence[Any]) -> Granted | Busy:
        """Steps 2 and 3: hold the lock, or watch the keys ahead from the revision at which they were read. A later
        start could miss a deletion in between."""
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
        """Return which keys to watch, given the newest keys ahead of ours (``last``). Returns [] if the claim holds.

        If any key excludes the claim, watch the newest of these. Otherwise watch as many of its like as can hold the
        name together: the claim has room as soon as one of them is deleted, whichever it is.
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
        """Return the state for the countdown, as far as ``last`` shows it: exact with at most `NEAR` keys ahead."""
        ahead = self._keys.ahead(claim)
        found = [[row.key for row in answer.response_range.kvs] for answer in last]
        others, like = found[: len(ahead.others)], found[len(ahead.others) :][: len(ahead.like)]
        return Standing(claim, place, self._keys.own(claim), chain(*others), chain(*like), ahead.room, at)

    def _crowd(self, claim: Claim, standing: Standing, last: Sequence[Any]) -> int:
        """Return the size of the crowd before this claim, never less than the number of keys that must be deleted.

        If a key excludes the claim, the crowd also contains the keys of its like, whose deletions are reported to it
        too.
        """
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
        """Delete our key after a refused try: it must not wait in the queue."""
        if not place.revision:
            return
        self._watcher.stop(claim.id)
        try:
            self._transactions.delete(self._keys.own(claim), self._left(deadline))
        except MultilockError as error:  # the key was put: only a cancel can delete it now
            raise BackendUnavailable(f"a refused claim may be left behind: {error}") from error
        place.revision = None

    def _attempted(self, claim: Claim, place: Place, answer: Granted | Busy | None, deadline: float) -> None:
        if place.cancelled:
            self._watcher.stop(claim.id)
            # The release revoked the separate lease that existed then. One made since then must be revoked here.
            self._end_own_session(claim, place, self._now() + REVOKE_WITHIN)
        elif isinstance(answer, Granted):
            self._watcher.stop(claim.id)
        elif place.lease is None or (answer and not answer.spent and not place.revision):
            # Nothing of this claim is at the server, nor will be, so the kernel asks for no release. For a spent claim
            # it does ask: a join of that claim whose reply was lost may still be executed.
            self._places.forget(claim, place)
            self._end_own_session(claim, place, deadline)

    def _keep_own_session(self, claim: Claim, place: Place, deadline: float) -> None:
        """Extend the separate lease of a lock that is not renewed, if it is not fresh.

        The ttl of such a lock must count from its grant. So its lease is kept alive while the claim waits, and a waiter
        that was woken extends it before it looks.
        """
        session = place.session
        if session is not None and not claim.renew and self._now() > session.sent_at + FRESH * session.ttl:
            self._sessions.keep_alive(session.lease, self._left(deadline))

    def _end_own_session(self, claim: Claim, place: Place, deadline: float) -> None:
        if place.session is not None and not claim.renew:
            self._sessions.revoke(place.session, self._left(deadline))

    # ---- renew

    def renew(self, group: Hashable, held: Sequence[Held], within: float) -> Sequence[Granted | None]:
        """Send one keep-alive: its reply is the proof for all these claims. Look at keys that no watch covers, too."""
        deadline = self._now() + within
        session = self._sessions.keep_alive(group, within)
        one = len(held) == 1  # it may be `Lease.renew()`, whose caller asks whether the lock is still held
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
        if lease is None or not self._sessions.is_alive(lease):  # no key was ever sent, or the server deleted it
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
        """Delete our key, and leave a tombstone against a join that may be executed later."""
        key, tombstone = delete(self._keys.own(claim)), self._tombstone(claim, lease)
        try:
            said = self._transactions.execute([], [tombstone, key], [], deadline)
        except LeaseMissing:  # the key went with the lease, and a later join names a lease that does not exist
            self._sessions.end(lease)
            return False
        except BackendRejected:
            # etcd is out of space and refuses the tombstone. Deleting the key still frees the lock.
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
        else:  # an earlier request moved the key, or the lock was lost
            row = self._transactions.row(self._keys.own(claim), deadline)
            ours = row is not None and rests(row)
        self._given_back(claim, place, deadline)
        return ours

    def _rest(self, claim: Claim, granted: Granted, unsure: bool, seconds: float, deadline: float) -> bool:
        """Put the key on a lease of its own, which only the server's clock ends.

        If the reply to that put is lost, the new lease is left alone: the key may be on it, and a repeated request
        finds it there.
        """
        lease, seconds = self._sessions.new_rest(seconds, self._left(deadline))
        try:
            try:
                found = self._move(claim, granted, unsure, lease, seconds, deadline)
            except LeaseMissing:
                if not unsure:
                    raise
                # The missing lease may be the tombstone's. Without that lease no tombstone is needed.
                found = self._move(claim, granted, False, lease, seconds, deadline)
        except LeaseMissing as error:  # this process was paused for longer than the new lease lived
            raise BackendUnavailable("the key was moved too late: its new lease has expired", unknown=False) from error
        except BackendRejected:
            self._sessions.end_rest(lease, self._left(deadline))
            raise
        if found != lease:
            self._sessions.end_rest(lease, self._left(deadline))
        return found is not None

    def _move(
        self, claim: Claim, granted: Granted, unsure: bool, lease: int, seconds: float, deadline: float
    ) -> int | None:
        """Return the lease on which the key rests now: this one, or that of an earlier request. Returns None if the key
        was no longer this claim's."""
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
        """Release a claim that was asked to rest, unless its key rests: the reply to that request was lost."""
        own = self._keys.own(claim)
        row = self._transactions.row(own, deadline)
        ours = row is not None and not rests(row)
        still, gone = ([modified(own, row.mod_revision)], [delete(own)]) if ours else ([], [])
        tombstone = [self._tombstone(claim, lease)] if unsure else []
        try:
            said = self._transactions.execute(still, [*gone, *tombstone], [], deadline)
        except LeaseMissing:  # the lease ended meanwhile, and the key with it
            self._sessions.end(lease)
            return False
        if not said.succeeded:
            raise self._restless(claim)
        if tombstone:
            self._sweep.remember_tombstone(self._keys.gone(claim))
        return ours

    def _restless(self, claim: Claim) -> BackendUnavailable:
        return BackendUnavailable(
            f"another program changes the key {self._keys.own(claim).decode()!r} again and again", unknown=False
        )

    # ---- close

    def close(self) -> None:
        """Revoke the leases that are left, so that locks not yet released become free at once.

        Each lock that is not renewed has a separate lease. A thousand of these cannot be revoked in half a second, so
        their keys are deleted first. A name whose request to rest had no reply stays taken for what is left of its ttl.
        """
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
    """Read the newest keys that a claim may have to wait for, one more than `NEAR` allows. A reader also reads the
    number of readers."""
    others = [last_of(each, NEAR + 1, before) for each in ahead.others]
    like = [last_of(each, ahead.room + NEAR, before) for each in ahead.like]
    like += [number_of(ahead.beside)] if ahead.beside else []
    return others + like


def _granted(place: Place) -> Granted:
    assert place.session is not None
    return place.session.granted(place.revision)
