"""The algorithm of the lock on etcd.

The queue is that of etcd's own concurrency recipes (client/v3/concurrency, `etcdctl lock` and `elect`, the v3lock
service). A contender is a key ``<prefix><name>/<id>`` on a lease. The contender with the lowest create_revision holds
the lock, and that revision is the fencing token.

* Step 1: put our key.
* Step 2: if no key of the name was created before ours, we hold the lock.
* Step 3: if there is an older key, watch the key created just before ours. When that key is deleted, go to step 2.
* A release deletes our key.

Even to return a few keys, etcd reads every key of the name. So a waiter far behind only checks that its own key and the
watched key still exist. It reads the queue again when one of the two is gone.

A waiter near the front does not repeat step 2. It knows which keys are ahead, and one watch of the whole name counts
their deletions (`multilock_etcd.queue`). Once no key is ahead, the watcher grants the claim.

Readers, writers and permits wait in the same queue, below ``read/``, ``write/`` and ``permit/<n>/`` of the name. The
first two are those of etcd's own read-write lock. A reader waits for every older key that is not a reader's. A permit
waits for every older key that is not a permit of the same number n. If n permits of the same number n are ahead of it,
it also watches the n newest of these.

This algorithm adds to etcd's own:

* One request joins the queue or takes a free lock, and its reply shows the predecessor.
* A claim holds the lock only on proof: a transaction put or read its own key and saw no predecessor, or the watch has
  reported the deletion of every predecessor.
* A cancel is final. It puts the tombstone ``<prefix>!gone/<id>`` on the same lease, and a join requires that the
  tombstone is absent. So a join that is executed after its cancel changes nothing.
* A grant is valid for the lease's ttl, counted from when the last acknowledged keep-alive was sent. A put extends
  nothing.
* If hold_at_least keeps a name taken after the release, the name rests: its key is moved to a separate lease. The key
  stays first in the queue until that lease has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from multilock import BackendRejected, BackendUnavailable, MultilockError
from multilock.backend import Busy, Claim, Granted, Notices, one_attempt
from multilock.log_thread import logger
from multilock.timing import FRESH_SHARE, RENEWALS, SAFETY_TIMER
from multilock.values import encode_resting
from multilock_etcd.claims import Waiter, Waiters
from multilock_etcd.keys import EtcdKeyspace, rests
from multilock_etcd.notices import EtcdWatcher
from multilock_etcd.sessions import REVOKE_WITHIN, EtcdSession, EtcdSessions
from multilock_etcd.sweep import EtcdSweep
from multilock_etcd.transactions import Behind, EtcdTransactions, Part, Position, delete, modified, read
from multilock_etcd.transport import EtcdTransport, LeaseMissing

__all__ = ["EtcdRecipe"]

CLOSE_WITHIN = 0.5  # seconds that close() may spend on all leases and keys that are left
TRIES = 3  # tries to move a key; an operator may write our key again and again


class EtcdRecipe:
    """The algorithm of the module's docstring, for all claims of one client."""

    def __init__(
        self,
        keys: EtcdKeyspace,
        transport: EtcdTransport,
        transactions: EtcdTransactions,
        sessions: EtcdSessions,
        watcher: EtcdWatcher,
        sweep: EtcdSweep,
        notices: Notices,
    ) -> None:
        self._keys = keys
        self._transport = transport
        self._transactions = transactions
        self._sessions = sessions
        self._watcher = watcher
        self._notices = notices
        self._now: Callable[[], float] = notices.now
        self._waiters = Waiters(keys, notices.now)
        self._sweep = sweep

    # ---- acquire

    def attempt(self, claim: Claim, join: bool, within: float) -> Granted | Busy:
        deadline = self._now() + within
        waiter = self._waiters.enter(claim)
        if waiter is None:
            return _busy(claim)
        with one_attempt(waiter.attempting, within):
            if self._waiters.has(waiter):
                return self._attempt(waiter, join, deadline)
        return self.attempt(claim, join, self._left(deadline))  # the earlier attempt left nothing at the server

    def _attempt(self, waiter: Waiter, join: bool, deadline: float) -> Granted | Busy:
        answer = None
        try:
            self._keep_own_session(waiter, deadline)
            if waiter.revision:
                self._watcher.count_no_more(waiter.claim.id)
                answer = self._look(waiter, waiter.revision, deadline)
            behind = self._waiters.behind(waiter.claim) if join and answer is None else {}
            while answer is None:
                answer = self._enter(waiter, join, behind, deadline)
                behind = {}  # a key in ``behind`` may be gone, so the next try reads the queue
        finally:
            self._attempted(waiter, answer, deadline)
        return answer

    def _enter(self, waiter: Waiter, join: bool, behind: Mapping[bytes, int], deadline: float) -> Granted | Busy | None:
        """Send one request with a living lease. Returns None if the lease had ended, or if our key or a key in
        ``behind`` was gone. Then nothing was written, and the caller tries again."""
        session = waiter.session
        if session is None or not self._sessions.is_alive(session.lease):
            session = self._sessions.of(waiter.claim, self._left(deadline))
        before = waiter.lease
        with self._waiters.lock:
            waiter.session = session
            cancelled = waiter.cancelled
            if not cancelled:
                waiter.lease = session.lease
        if cancelled:  # the claim was cancelled after this attempt began
            return _busy(waiter.claim)
        try:
            if join:
                return self._join(waiter, session, behind, deadline)
            return self._take_if_free(waiter, session, deadline)
        except LeaseMissing:
            self._sessions.end(session.lease)
            waiter.lease = None
            return None
        except (BackendUnavailable, BackendRejected) as error:
            if not getattr(error, "unknown", False) and not waiter.revision:
                waiter.lease = before
            raise

    def _join(
        self, waiter: Waiter, session: EtcdSession, behind: Mapping[bytes, int], deadline: float
    ) -> Granted | Busy | None:
        """Steps 1 and 2: put our key at the end of the queue, and read which keys are ahead of it. If ``behind`` has a
        key for which we must wait, only check that this key still exists."""
        waiter.behind = {}
        waiter.revision, position = self._transactions.put(waiter.claim, session.lease, True, behind, deadline)
        if position:
            return self._hold_or_wait(waiter, position)
        if waiter.revision is None:  # the claim was cancelled, or a key in ``behind`` is gone
            return None if behind else _busy(waiter.claim)
        return self._look(waiter, waiter.revision, deadline)

    def _look(self, waiter: Waiter, revision: int, deadline: float) -> Granted | Busy | None:
        """Step 2: if all watched keys still exist, keep waiting. Otherwise read which keys are ahead of our key.

        Returns None if our key no longer exists at its revision.

        If our key is missing although the watch has admitted the claim, the kernel must drop that grant and the claim.
        """
        if position := self._transactions.look(waiter.claim, revision, waiter.behind, deadline):
            return self._hold_or_wait(waiter, position)
        waiter.revision = None
        return Busy(0.0, spent=True) if waiter.pushed else None

    def _take_if_free(self, waiter: Waiter, session: EtcdSession, deadline: float) -> Granted | Busy:
        """Step 1 without a queue: put our key only if no key excludes it.

        A refused claim leaves no key behind. A permit puts its key, and deletes it again if as many keys are ahead as
        there are permits.
        """
        waiter.revision, position = self._transactions.put(waiter.claim, session.lease, False, {}, deadline)
        if waiter.revision is None:
            return _busy(waiter.claim)
        if position is None:  # this is a repeated request, and the first one put our key
            answer = self._look(waiter, waiter.revision, deadline)
        else:
            first = isinstance(position, Position) and not position.to_go
            answer = waiter.granted() if first else _busy(waiter.claim)
        if isinstance(answer, Busy):
            self._take_back(waiter, deadline)
        return answer or _busy(waiter.claim)

    def _hold_or_wait(self, waiter: Waiter, position: Position | Behind) -> Granted | Busy:
        """Steps 2 and 3: hold the lock, or watch the keys ahead from the revision at which they were read, so that no
        deletion is missed."""
        if isinstance(position, Position) and not position.to_go:
            return waiter.granted()
        self._waiters.waits(waiter)
        if isinstance(position, Position) and position.is_near():
            waiter.behind = {}
            self._watcher.count(self._keys.queue(waiter.claim.name), waiter, position)
            return _busy(waiter.claim)
        behind = position.behind() if isinstance(position, Position) else position
        waiter.behind = behind.keys
        watched = [(key, b"") for key in behind.keys] or self._keys.ahead(waiter.claim).like
        self._watcher.wait(waiter.claim.id, [*watched, (waiter.own, b"")], behind.at + 1)
        return _busy(waiter.claim)

    def _take_back(self, waiter: Waiter, deadline: float) -> None:
        """Delete our key after a refused try, so that the key does not wait in the queue."""
        if not waiter.revision:
            return
        self._watcher.stop(waiter.claim.id)
        try:
            self._transactions.delete(waiter.own, self._left(deadline))
        except MultilockError as error:  # the key exists, and the claim must be cancelled
            raise BackendUnavailable(f"a refused claim may be left behind: {error}") from error
        waiter.revision = None

    def _attempted(self, waiter: Waiter, answer: Granted | Busy | None, deadline: float) -> None:
        if waiter.cancelled:
            self._watcher.stop(waiter.claim.id)
            # If the claim got its separate lease only after the release, the lease must be revoked here. The lease of a
            # key is left to the release: after a revocation without a reply, no release would delete the key.
            if waiter.session is not None and waiter.session.lease != waiter.lease:
                self._end_own_session(waiter, self._now() + REVOKE_WITHIN)
        elif isinstance(answer, Granted):
            self._watcher.stop(waiter.claim.id)
        elif waiter.lease is None or (answer and not answer.spent and not waiter.revision):
            # The server has no key of this claim, and will not get one, so the kernel sends no release. (The kernel
            # does release a spent claim, because a join whose reply was lost may still be executed.)
            self._waiters.forget(waiter)
            self._end_own_session(waiter, deadline)

    def _keep_own_session(self, waiter: Waiter, deadline: float) -> None:
        """Extend the separate lease of a lock that is not renewed, if the lease is not fresh.

        The ttl of such a lock must count from its grant. So a waiter that was woken extends the lease before it reads
        the queue.
        """
        session = waiter.session
        if session is not None and not waiter.claim.renew and self._now() > session.sent_at + FRESH_SHARE * session.ttl:
            self._sessions.keep_alive(session.lease, self._left(deadline))

    def _end_own_session(self, waiter: Waiter, deadline: float) -> None:
        if waiter.session is not None and not waiter.claim.renew:
            self._sessions.revoke(waiter.session, self._left(deadline))

    # ---- release

    def release(self, claim: Claim, granted: Granted | None, unsure: bool, within: float) -> bool:
        deadline = self._now() + within
        with self._waiters.lock:
            waiter = self._waiters.cancel(claim, unsure)
            lease = waiter.lease if granted is None else granted.group
        self._watcher.stop(claim.id)
        if lease is None or not self._sessions.is_alive(lease):  # no key was sent, or it was deleted with its lease
            deleted = False
        elif self._waiters.may_rest(claim):
            deleted = self._delete_unless_it_rests(claim, lease, unsure, deadline)
        elif unsure:
            deleted = self._cancel(claim, lease, deadline)
        else:
            deleted = self._transactions.delete(waiter.own, within)
        self._given_back(waiter, deadline)
        return deleted

    def _cancel(self, claim: Claim, lease: Any, deadline: float) -> bool:
        """Delete our key, and put a tombstone that makes a later execution of the join fail."""
        key, tombstone = delete(self._keys.own(claim)), self._tombstone(claim, lease)
        try:
            said = self._transactions.execute([], [tombstone, key], [], deadline)
        except LeaseMissing:  # the key was deleted with the lease, and a late join is refused
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

    def _given_back(self, waiter: Waiter, deadline: float) -> None:
        self._waiters.given_back(waiter.claim)
        self._end_own_session(waiter, deadline)

    # ---- rest

    def rest(self, claim: Claim, granted: Granted, unsure: bool, seconds: float, within: float) -> bool:
        deadline = self._now() + within
        with self._waiters.lock:
            waiter = self._waiters.cancel(claim, unsure=True)
            self._waiters.will_rest(claim, granted.group)
        self._watcher.stop(claim.id)
        if self._sessions.is_alive(granted.group):
            ours = self._rest(claim, granted, unsure, seconds, deadline)
        else:  # an earlier `rest` without a reply moved the key, or the lock was lost
            row = self._transactions.row(self._keys.own(claim), deadline)
            ours = row is not None and rests(row)
        self._given_back(waiter, deadline)
        return ours

    def _rest(self, claim: Claim, granted: Granted, unsure: bool, seconds: float, deadline: float) -> bool:
        """Keep the name taken for ``seconds``: put the key on a separate lease that is never renewed. Only the server's
        clock ends that lease.

        If the reply to that put is lost, the new lease is not revoked, because the key may already be on it. A repeated
        `rest` then finds the key there.
        """
        lease, seconds = self._sessions.new_rest(seconds, self._left(deadline))
        try:
            try:
                found = self._move(claim, granted, unsure, lease, seconds, deadline)
            except LeaseMissing:
                if not unsure:
                    raise
                # The lease of the tombstone may be missing. Then no tombstone is needed.
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
        """Move the key to ``lease``, which keeps the name taken after the release. Returns the lease that the key has
        now, which an earlier `rest` without a reply may have given to it. Returns None if the key no longer belonged to
        this claim."""
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
        """Release a claim after a `rest` that got no reply, unless that `rest` has moved the key to another lease."""
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

        Locks that are not renewed have separate leases, perhaps too many to be revoked in time, so their keys are
        deleted first. If a `rest` got no reply, its lease is not revoked, so its name stays taken until the ttl ends.
        """
        if self._transport.silent:
            return
        deadline = self._now() + CLOSE_WITHIN
        waiters, unheard = self._waiters.left()
        left = [waiter.own for waiter in waiters if not waiter.claim.renew and waiter.lease]
        try:
            self._transactions.delete_all(left, deadline)
        except MultilockError as error:
            logger.debug("locks that are not renewed are left to their ttl: %s", error)
        else:
            self._sessions.revoke_all(deadline, keep=unheard)

    def _left(self, deadline: float) -> float:
        return deadline - self._now()


def _busy(claim: Claim) -> Busy:
    return Busy(max(SAFETY_TIMER, claim.ttl) if claim.renew else claim.ttl / RENEWALS)
