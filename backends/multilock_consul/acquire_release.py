"""The algorithm of the lock on Consul.

An exclusive lock is the key ``<prefix><name>/.lock``, locked by a session. The key has the flags of the lock in
Consul's own Go client, so our locks, those of ``consul lock`` and those of that client exclude one another
(https://developer.hashicorp.com/consul/docs/dynamic-app-config/sessions/application-leader-election):

* Step 1: make a session.
* Step 2: lock the key for it.
* Step 3: if another session has locked the key, wait until the key changes, and go to step 2.
* Step 4: renew the session as long as the lock is held.
* Step 5: to release the lock, delete the key.

A claim that shares the name with other claims locks different keys, which `reader_locks` and `semaphore` describe. In
all other respects it is like an exclusive claim.

Two things differ from Consul's Go client. First, a free lock has no key: a release deletes it, and so does the server
when the session ends. Second, a lock is taken by a transaction that creates the key. The verb ``lock`` alone would
succeed a second time for our own session, and would overwrite a key that an application uses for something else.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from multilock import BackendRejected, BackendUnavailable, system
from multilock.backend import Busy, Claim, Granted, other_number
from multilock.timing import UNPUSHED
from multilock.values import encode_resting, encode_value
from multilock_consul.keys import LOCK_FLAGS, Entry, Keys
from multilock_consul.reader_locks import SAFETY, Readers, Wait
from multilock_consul.semaphore import Permits, State
from multilock_consul.sessions import Cancelled, Session, Sessions
from multilock_consul.transactions import Refused, Transactions, operation

__all__ = ["Recipe"]

# Seconds between attempts during a lock delay, whose end is not pushed. A refusal costs the servers little.
DELAYED = 0.25
AT_ONCE_AGAIN = 0.02  # seconds over which claims that just missed the same key spread their next attempts
# Seconds, from and to, until a claim tries again because another client has changed the semaphore first.
PASSED = 0.02, 0.05
TRIES = 3  # tries; an operator who writes our key again and again must not block a release forever


class Recipe:
    """The algorithm of the module's docstring, for all claims of one client."""

    def __init__(
        self,
        keys: Keys,
        transactions: Transactions,
        sessions: Sessions,
        now: Callable[[], float],
        wait: Wait,
    ) -> None:
        self._keys = keys
        self._transactions = transactions
        self._sessions = sessions
        self._readers = Readers(keys, transactions, wait)
        self._semaphore = Permits(keys, transactions)
        self._now = now
        self._wait = wait
        # Ids of claims that locked the key of the name while readers still held it. Followers may have seen that key
        # too early.
        self._unannounced: set[str] = set()
        # claim id -> sessions in which a late request of the claim may have locked a key
        self._unsettled: dict[str, list[str]] = {}

    # ---- acquire

    def attempt(self, claim: Claim, join: bool, within: float) -> Granted | Busy:
        until = self._now() + within
        had = self._has(claim)
        try:
            answer = self._try(claim, join, until)
            if isinstance(answer, Busy) and not join:
                self._leave_nothing(claim, until)
            return answer
        except Cancelled:
            return Busy(SAFETY)
        except (BackendUnavailable, BackendRejected) as error:
            # Even if this request was not executed, an earlier request of the same attempt may have locked a key or
            # made a session. The kernel then releases the claim. This attempt must not do that: if its caller has given
            # it up, a later attempt of the claim may hold the lock.
            error.unknown = error.unknown or (self._has(claim) and not had)
            raise

    def _has(self, claim: Claim) -> bool:
        """Return whether a key or a session at the servers may belong to this claim."""
        return self._sessions.holds(claim) or self._sessions.own(claim) is not None

    def _try(self, claim: Claim, join: bool, until: float) -> Granted | Busy:
        """Step 1: attempt in the present session, or in a new one if there is none."""
        for _ in range(2):  # a session that turns out to be dead is replaced once
            if not join and claim.kind == "write" and self._is_taken(claim, until):
                return Busy(SAFETY)
            state = self._semaphore.look(claim.name, until) if claim.permits > 1 else None
            if state and not self._sessions.own(claim):
                if not self._semaphore.room(claim, state):
                    return self._wait_for_room(claim, state, join)
                if state.read and not join:  # locking the key would only block other readers
                    return Busy(SAFETY)
            with self._sessions.trying(claim, until) as session:
                answer = self._take(session, claim, state, join, until)
            if answer is not None:
                return answer
        raise BackendUnavailable("sessions end as soon as they are made", unknown=False, backend="consul")

    def _is_taken(self, claim: Claim, until: float) -> bool:
        """Return whether the name is taken, without locking the key.

        Locking the key to find out would block readers for a moment. If this process died at that moment, readers would
        be blocked until the session ends.
        """
        state = self._semaphore.look(claim.name, until)
        if state.lock and state.lock.claim_id == claim.id:  # an earlier attempt, whose reply was lost, took the lock
            return False
        return bool(state.read or state.living or (state.lock and state.lock.session))

    def _leave_nothing(self, claim: Claim, until: float) -> None:
        """Give up what a refused try has taken. A claim tries only once, so no later attempt needs what is given up."""
        if self._sessions.holds(claim):  # the claim has locked the key, but waits for readers
            self._give_back(claim, until)
        if own := self._sessions.own(claim):
            with suppress(BackendUnavailable):  # the session holds nothing, and expires
                self._sessions.destroy(own, until - self._now())

    def _take(
        self, session: Session, claim: Claim, state: State | None, join: bool, until: float
    ) -> Granted | Busy | None:
        """Step 2: create the key and lock it. Returns None if the session has ended."""
        try:
            if state:
                return self._take_permit(session, claim, state, join, until)
            created = operation("cas", self._keys.of(claim.name), Index=0, Value="", Flags=LOCK_FLAGS)
            try:
                return self._locked(session, claim, [created], join, until)
            except Refused as refused:
                if refused.verb == "lock":
                    raise
            return self._taken(session, claim, join, until)
        except Refused as refused:
            return self._not_lockable(session, claim, refused)

    def _locked(
        self, session: Session, claim: Claim, first: list[dict[str, Any]], join: bool, until: float
    ) -> Granted | Busy:
        """Lock the key. The same transaction begins with the operations of ``first``, which must succeed too."""
        if claim.mode == "r":
            steps = self._readers.steps(session, claim)
        else:
            value = b64encode(encode_value(claim)).decode()
            lock = operation("lock", self._keys.of(claim.name), Value=value, Flags=LOCK_FLAGS, Session=session.id)
            steps = [lock, *self._readers.shown(claim.name)]
        return self._entered(session, claim, self._transactions.execute([*first, *steps], until), join, until)

    def _entered(
        self,
        session: Session,
        claim: Claim,
        found: Mapping[str, Entry],
        join: bool,
        until: float,
        *,
        again: bool = False,
    ) -> Granted | Busy:
        """Return the grant for a key that is locked for the claim. If ``again`` is True, an earlier request of the
        claim locked it.

        If ``found`` contains readers that exclude the claim, wait until they have left.
        """
        mine = self._keys.place(claim, session.id)
        entry = found.get(mine)
        if entry is None or entry.session != session.id:
            raise BackendUnavailable("it was locked for another session", backend="consul")
        before = self._sessions.holds(claim)
        if not self._sessions.hold(session, claim):  # the claim was cancelled during the request
            self._free(claim, session.id, entry.index, until)
            return Busy(SAFETY)
        if claim.mode != "r":
            readers = {key: one for key, one in found.items() if key.startswith(self._keys.readers(claim.name))}
            if claim.permits < 2 and (readers or (again and not before)):
                self._unannounced.add(claim.id)
            # Check the index of our key, and not only its session, which other claims of this client use too.
            still = operation("check-index", mine, Index=entry.index)
            if busy := self._readers.wait_for_readers(session, claim, readers, still, join, until):
                return busy
            if claim.id in self._unannounced:
                return session.granted(self._announce(session, claim, still, until))
        return session.granted(entry.index)

    def _announce(self, session: Session, claim: Claim, still: dict[str, Any], until: float) -> int:
        """Lock the key of the name once more, now that the readers have left, and return the new token.

        When this claim first locked the key, clients that follow the name saw the change, but readers still held the
        name. So these clients need a second change of the key. A server ignores a write that changes nothing, so the
        same transaction first unlocks the key.
        """
        key = self._keys.place(claim, session.id)
        value = b64encode(encode_value(claim)).decode()
        steps = [operation(verb, key, Value=value, Flags=LOCK_FLAGS, Session=session.id) for verb in ("unlock", "lock")]
        index = self._transactions.execute([still, *steps], until)[key].index
        self._unannounced.discard(claim.id)
        return index

    def _not_lockable(self, session: Session, claim: Claim, refused: Refused) -> Busy | None:
        own = self._keys.place(claim, session.id)
        if "lock delay" in refused.why and refused.key == own != self._keys.of(claim.name):
            # Only this session ever locks this key. So a lock delay of the key means that this session has ended.
            self._sessions.gone(session, "the server ended it")
            return None
        if "lock delay" in refused.why:
            return Busy(system.uniform(0.5, 1.5) * DELAYED)
        if "invalid session" in refused.why:
            self._sessions.gone(session, "the server no longer has it")
            return None
        # Another client has changed the key between the two requests.
        return Busy(system.uniform(*PASSED) if claim.permits > 1 else system.uniform(0.0, AT_ONCE_AGAIN))

    def _taken(self, session: Session, claim: Claim, join: bool, until: float) -> Granted | Busy:
        """Step 3: the key exists. Find out to which claim or program it belongs."""
        key, mine = self._keys.of(claim.name), self._keys.place(claim, session.id)
        if mine != key and (self._sessions.holds(claim) or self._sessions.asked_before(claim)):
            own, _ = self._transactions.read(mine, until)
            if own and own.session:
                return self._ours_already(session, claim, own, join, until)
        entry, index = self._transactions.read(key, until)
        if entry is None:  # the key was deleted between the two requests
            return Busy(system.uniform(0.0, AT_ONCE_AGAIN))
        if mine == key and entry.session and entry.claim_id == claim.id and not entry.rests:
            return self._ours_already(session, claim, entry, join, until)
        if not entry.session:
            return self._unlocked(session, claim, entry, join, until)
        if not join:
            return Busy(SAFETY)
        return Busy(SAFETY if self._wait(key, claim.id, index) else UNPUSHED)

    def _ours_already(self, session: Session, claim: Claim, entry: Entry, join: bool, until: float) -> Granted | Busy:
        """Deal with a key that an earlier request of this claim locked. Either the reply to that request was lost, or
        the claim waits for readers to leave."""
        if entry.session == session.id:
            still = operation("check-index", self._keys.place(claim, session.id), Index=entry.index)
            shown = [] if claim.mode == "r" else self._readers.shown(claim.name)
            found = self._transactions.look([still, *shown], until)
            return self._entered(session, claim, found, join, until, again=True)
        self._delete(claim, entry.session, entry.index, until)  # an earlier session of this client locks the key
        return Busy(0.0)

    def _unlocked(self, session: Session, claim: Claim, entry: Entry, join: bool, until: float) -> Granted | Busy:
        """Deal with a key that no session locks. It belongs to a free lock of Consul's Go client, to a semaphore, or to
        an application."""
        key = self._keys.of(claim.name)
        first = [operation("check-index", key, Index=entry.index)]
        if entry.flags != LOCK_FLAGS:
            state = self._semaphore.look(claim.name, until)
            if state.limit is None or state.lock != entry:
                return Busy(system.uniform(*PASSED))
            if state.living:
                if claim.permits not in (0, state.limit):
                    raise other_number(claim, state.limit, "consul")
                holders = {self._keys.folder(claim.name) + holder: own for holder, own in state.living.items()}
                return self._readers.wait_for_one(session, claim, holders, join)
            self._transactions.bury(self._semaphore.places(claim.name, state.dead), first[0], session.id, until)
            first += [operation("delete", key), operation("cas", key, Index=0, Value="", Flags=LOCK_FLAGS)]
        return self._locked(session, claim, first, join, until)

    def _take_permit(self, session: Session, claim: Claim, state: State, join: bool, until: float) -> Granted | Busy:
        # an earlier attempt took the permit, but its reply was lost, or readers were still there
        if session.id in state.living:
            found = {self._keys.place(claim, session.id): state.living[session.id], **state.readers}
            return self._entered(session, claim, found, join, until)
        if self._semaphore.room(claim, state):
            return self._entered(session, claim, self._semaphore.join(session, claim, state, until), join, until)
        return self._wait_for_room(claim, state, join)

    def _wait_for_room(self, claim: Claim, state: State, join: bool) -> Busy:
        where, index = self._semaphore.sign(claim, state)
        if not join:
            return Busy(SAFETY)
        return Busy(SAFETY if self._wait(where, claim.id, index) else UNPUSHED)

    # ---- release

    def release(self, claim: Claim, granted: Granted | None, within: float) -> bool:
        """Step 5: delete the key. If an attempt of this claim failed or had no reply, look for keys that the attempt
        may have locked."""
        return self._give_back(claim, self._now() + within, granted, wanted=granted is not None)

    def _give_back(self, claim: Claim, until: float, granted: Granted | None = None, *, wanted: bool = True) -> bool:
        """Release every key that the claim has locked. If ``wanted`` is True, the claim may try again afterwards."""
        self._unannounced.discard(claim.id)
        doubtful = self._sessions.cancel(claim, granted=wanted)
        answered = False
        try:
            ours = self._release(claim, granted, doubtful, until)
            answered = True
        finally:
            self._sessions.left(claim, answered=answered)
        return ours

    def _release(self, claim: Claim, granted: Granted | None, doubtful: Sequence[Session], until: float) -> bool:
        if self._sessions.is_beginning(claim):
            raise BackendUnavailable("the session of this claim is still being made", unknown=False, backend="consul")
        ended = self._sessions.ended_unanswered(claim)
        if ended or any(claim.id in session.open for session in doubtful):
            self._unsettled[claim.id] = [*ended, *(session.id for session in doubtful)]
        ours = self._release_sent(claim, granted, doubtful, until)
        self._unsettled.pop(claim.id, None)
        return ours

    def _release_sent(self, claim: Claim, granted: Granted | None, doubtful: Sequence[Session], until: float) -> bool:
        """Release the claim, and look for keys that a request without a reply may have locked before its session ended.

        Such a key is read after its session has ended, because then no request can lock it again. If this read gets no
        reply, the next release repeats it.
        """
        unanswered = self._unsettled.get(claim.id, ())
        if claim.permits > 1:
            return self._release_permit(claim, granted, doubtful, unanswered, until)
        if granted and granted.token is not None:
            over = self._sessions.known_over(granted.key)
            ours = not over and self._delete(claim, granted.key, granted.token, until)
        else:
            ours = bool(doubtful) and self._look_and_delete(claim, [one.id for one in doubtful], until)
        self._end_doubtful(claim, doubtful, until)
        if claim.mode == "r":
            lost = [granted.key] if granted and not ours else []
            self._readers.forget(claim, dict.fromkeys([*unanswered, *lost]), until)
        return ours

    def _release_permit(
        self,
        claim: Claim,
        granted: Granted | None,
        doubtful: Sequence[Session],
        unanswered: Sequence[str],
        until: float,
    ) -> bool:
        its_own = [str(granted.key)] if granted else []
        sessions = dict.fromkeys([*its_own, *(one.id for one in doubtful), *unanswered])
        were = [self._semaphore.leave(claim, session, until) for session in sessions]
        self._end_doubtful(claim, doubtful, until)
        if unanswered:
            for session in sessions:
                self._semaphore.leave(claim, session, until)
        return any(were)

    def _free(self, claim: Claim, session: str, index: int, until: float) -> None:
        if claim.permits > 1:
            self._semaphore.leave(claim, session, until)
        else:
            self._delete(claim, session, index, until)

    def _look_and_delete(self, claim: Claim, sessions: Sequence[str], until: float) -> bool:
        ours = False
        for key in dict.fromkeys(self._keys.place(claim, session) for session in sessions):
            entry, _ = self._transactions.read(key, until)
            if entry and entry.session in sessions and entry.claim_id == claim.id:
                ours = self._delete(claim, entry.session, entry.index, until) or ours
        return ours

    def _delete(self, claim: Claim, session: Hashable, index: int, until: float) -> bool:
        """Delete the claim's key. Returns whether the claim held the key until now."""
        key = self._keys.place(claim, session)
        for _ in range(TRIES):
            if self._transactions.delete(key, session, index, until):
                return True
            entry, _ = self._transactions.read(key, until)
            if entry is None or not entry.held_by(claim.id, session):
                return False
            index = entry.index  # still our key, but changed: only an operator can have written it
        raise self._transactions.restless(key)

    def _end_doubtful(self, claim: Claim, doubtful: Sequence[Session], until: float) -> None:
        own = self._sessions.own(claim)
        for session in doubtful:
            # End the session, so that a late request of the claim cannot lock a key. A session that holds other locks
            # must not end: its renewals look for such a key.
            if claim.id in session.open and session is not own and self._sessions.end_if_idle(session):
                self._sessions.destroy(session, until - self._now())
        if own:
            self._sessions.destroy(own, until - self._now())

    # ---- rest

    def rest(self, claim: Claim, granted: Granted, seconds: float, within: float) -> bool:
        until = self._now() + within
        doubtful = self._sessions.cancel(claim, granted=True)
        answered = False
        try:
            self._sessions.will_rest(claim, seconds)
            ours = self._rest(claim, granted, seconds, until)
            answered = True
        finally:
            self._sessions.left(claim, answered=answered)
        self._end_doubtful(claim, doubtful, until)
        return ours

    def _rest(self, claim: Claim, granted: Granted, seconds: float, until: float) -> bool:
        """Keep the name taken for ``seconds``: move the key to a session that is never renewed. Only the server's clock
        ends that session. If the reply to the move is lost, the new session is not destroyed, because the move may
        still be executed. A repeated `rest` then finds the key moved."""
        if claim.permits > 1:
            return self._rest_permit(claim, granted, seconds, until)
        if self._sessions.known_over(granted.key):  # an earlier `rest` moved the key, or the lock was lost
            entry, _ = self._transactions.read(self._keys.of(claim.name), until)
            return _rests_for(claim, entry)
        session, seconds = self._sessions.new_rest(seconds, until)
        try:
            entry = self._move(claim, granted, session, seconds, until)
        except BackendRejected:
            self._sessions.end_rest(session, until - self._now())
            raise
        if entry is None or entry.session != session:  # the new session was not used, and no later request can use it
            self._sessions.end_rest(session, until - self._now())
        return _rests_for(claim, entry)

    def _rest_permit(self, claim: Claim, granted: Granted, seconds: float, until: float) -> bool:
        rests, unused = self._semaphore.rest(claim, granted, lambda: self._sessions.new_rest(seconds, until), until)
        if unused:
            self._sessions.end_rest(unused, until - self._now())
        return rests

    def _move(self, claim: Claim, granted: Granted, session: str, seconds: float, until: float) -> Entry | None:
        """Try to move the key to ``session``. Returns the entry of the key after the try. If the key was not moved, it
        no longer belongs to the claim. Returns None if the key is missing."""
        assert granted.token is not None
        index = granted.token
        for _ in range(TRIES):
            try:
                return self._move_at(claim, granted, session, index, seconds, until)
            except Refused as refused:
                if "invalid session" in refused.why:  # this process was paused for longer than the new session lived
                    raise BackendUnavailable(
                        "the key was moved too late: its new session has expired", unknown=False, backend="consul"
                    ) from refused
            entry, _ = self._transactions.read(self._keys.of(claim.name), until)
            if entry is None or not entry.held_by(claim.id, granted.key):
                return entry
            index = entry.index  # still our key, but changed: only an operator can have written it
        raise self._transactions.restless(self._keys.of(claim.name))

    def _move_at(self, claim: Claim, granted: Granted, session: str, index: int, seconds: float, until: float) -> Entry:
        key = self._keys.of(claim.name)
        value = b64encode(encode_resting(claim, granted.token, seconds)).decode()
        steps = [
            operation("check-session", key, Session=granted.key),
            operation("check-index", key, Index=index),
            operation("unlock", key, Value=value, Flags=LOCK_FLAGS, Session=granted.key),
            operation("lock", key, Value=value, Flags=LOCK_FLAGS, Session=session),
        ]
        # The reply to a transaction contains no values, so the value is added here.
        return replace(self._transactions.execute(steps, until)[key], value=b64decode(value))


def _rests_for(claim: Claim, entry: Entry | None) -> bool:
    return entry is not None and entry.rests and entry.claim_id == claim.id
