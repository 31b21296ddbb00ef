"""The lock on Consul: what is asked of the servers, and what their answers mean.

A lock is the key ``<prefix><name>/.lock`` with the flags of the lock of Consul's own Go client, held by a session, so
that ``consul lock`` and that client exclude us and we them (https://developer.hashicorp.com/consul/docs/dynamic-app-
config/sessions/application-leader-election):

1. make a session; 2. lock the key for it; 3. if another session has it, wait until the key changes and go to 2;
4. renew the session for as long as the lock is held; 5. to release, give the key up.

Two things differ. A free lock has no key: a release deletes it, and so does the server when the session ends. And a
lock is taken by a transaction that creates the key; the bare verb ``lock`` would succeed again for our own session, and
overwrite a key that is used for something else.
"""

from __future__ import annotations

import random
from base64 import b64decode, b64encode
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from multilock import BackendRejected, BackendUnavailable
from multilock.backend import Busy, Claim, Granted, Held
from multilock.values import encode_resting, encode_value
from multilock_consul.keys import LOCK_FLAGS, SEMAPHORE_FLAGS, Entry, Keys
from multilock_consul.sessions import OWN, Session, Sessions
from multilock_consul.sweep import Found, Sweep
from multilock_consul.transactions import Refused, Transactions, operation

__all__ = ["Recipe"]

SAFETY = 10.0  # seconds after which a waiter looks again, although nothing was pushed
UNPUSHED = 1.0  # … where no push can come: too many keys are waited for
DELAYED = 0.25  # seconds between tries during a lock delay, whose end is not pushed; a refusal costs the servers little
AT_ONCE_AGAIN = 0.02  # seconds over which those are spread who found the key taken, and gone a moment later
TRIES = 3  # an operator who writes our key again and again must not keep a release for ever


class Recipe:
    """``wait(name, claim_id, index)`` is to wake this claim when the key changes; whether it will."""

    def __init__(
        self,
        keys: Keys,
        transactions: Transactions,
        sessions: Sessions,
        now: Callable[[], float],
        wait: Callable[[str, str, int], bool],
    ) -> None:
        self._keys = keys
        self._transactions = transactions
        self._sessions = sessions
        self._sweep = Sweep(keys, transactions, sessions, now)
        self._now = now
        self._wait = wait

    # ---- acquire

    def attempt(self, claim: Claim, join: bool, within: float) -> Granted | Busy:
        until = self._now() + within
        try:
            answer = self._try(claim, join, until)
        except BackendRejected:
            self._leave_nothing(claim, until)
            raise
        if isinstance(answer, Busy) and not join:
            self._leave_nothing(claim, until)
        return answer

    def _try(self, claim: Claim, join: bool, until: float) -> Granted | Busy:
        """1: in the session that there is."""
        for _ in range(2):  # a session found dead is replaced, once
            with self._sessions.trying(claim, until) as session:
                answer = self._take(session, claim, join, until)
            if answer is not None:
                return answer
        raise BackendUnavailable("sessions end as soon as they are made", unknown=False, backend="consul")

    def _leave_nothing(self, claim: Claim, until: float) -> None:
        if own := self._sessions.own(claim):
            with suppress(BackendUnavailable):  # it holds nothing, and ends by itself
                self._sessions.destroy(own, until - self._now())

    def _take(self, session: Session, claim: Claim, join: bool, until: float) -> Granted | Busy | None:
        """2: create the key and lock it. None: the session is gone."""
        created = operation("cas", self._keys.of(claim.name), Index=0, Value="", Flags=LOCK_FLAGS)
        try:
            return self._locked(session, claim, created, until)
        except Refused as refused:
            if refused.first == 1:
                return self._not_lockable(session, claim, refused)
        return self._taken(session, claim, join, until)

    def _locked(self, session: Session, claim: Claim, first: dict[str, Any], until: float) -> Granted | Busy:
        """``first`` is what must be true of the key before it is locked, in the same transaction."""
        key = self._keys.of(claim.name)
        value = b64encode(encode_value(claim)).decode()
        lock = operation("lock", key, Value=value, Flags=LOCK_FLAGS, Session=session.id)
        entry = self._transactions.execute([first, lock], until)
        if entry.session != session.id:
            raise BackendUnavailable("it was locked for another session", backend="consul")
        return self._hold(session, claim, entry.index, until)

    def _hold(self, session: Session, claim: Claim, index: int, until: float) -> Granted | Busy:
        if self._sessions.hold(session, claim):
            return _granted(session, index)
        self._delete(claim, session.id, index, until)  # it was cancelled while it was asked for
        return Busy(SAFETY)

    def _not_lockable(self, session: Session, claim: Claim, refused: Refused) -> Busy | None:
        if "lock delay" in refused.why:
            return Busy(random.uniform(0.5, 1.5) * DELAYED)
        if "invalid session" in refused.why:
            self._sessions.gone(session, "the server does not know it any more")
            return None
        return Busy(random.uniform(0.0, AT_ONCE_AGAIN))  # somebody was faster between the two

    def _taken(self, session: Session, claim: Claim, join: bool, until: float) -> Granted | Busy:
        """3: the key exists; whose is it?"""
        entry, index = self._transactions.read(claim.name, until)
        if entry is None:  # deleted between the two
            return Busy(random.uniform(0.0, AT_ONCE_AGAIN))
        if entry.session and entry.claim_id == claim.id and not entry.rests:
            return self._ours_already(session, claim, entry, until)
        if not entry.session:
            return self._unlocked(session, claim, entry, until)
        if not join:
            return Busy(SAFETY)
        return Busy(SAFETY if self._wait(claim.name, claim.id, index) else UNPUSHED)

    def _ours_already(self, session: Session, claim: Claim, entry: Entry, until: float) -> Granted | Busy:
        """Our own attempt locked it, whose answer was lost."""
        if entry.session == session.id:
            return self._hold(session, claim, entry.index, until)
        self._delete(claim, entry.session, entry.index, until)  # in a session whose time is over
        return Busy(0.0)

    def _unlocked(self, session: Session, claim: Claim, entry: Entry, until: float) -> Granted | Busy:
        """Left behind by the Go client, which keeps the key of a free lock; or no lock at all."""
        key = self._keys.of(claim.name)
        if entry.flags != LOCK_FLAGS:
            what = " (a semaphore of Consul)" if entry.flags == SEMAPHORE_FLAGS else ""
            raise BackendRejected(
                f"the key {key!r} is in use by something else{what}: choose another name",
                name=claim.name,
                backend="consul",
            )
        try:
            return self._locked(session, claim, operation("check-index", key, Index=entry.index), until)
        except Refused as refused:
            return self._not_lockable(session, claim, refused) or Busy(0.0)

    # ---- renew

    def renew(
        self, group: Hashable, held: Sequence[Held], within: float
    ) -> Sequence[Granted | BackendUnavailable | None]:
        """4. The proof is that of the session. A look at a key that has no answer yet takes nothing from anybody."""
        until = self._now() + within
        if group == OWN:
            sessions = [self._sessions.get(granted.key) for _, granted in held]
            return [self._renew(session, [one], until)[0] for session, one in zip(sessions, held, strict=True)]
        return self._renew(self._sessions.get(group), held, until)

    def _renew(
        self, session: Session | None, held: Sequence[Held], until: float
    ) -> list[Granted | BackendUnavailable | None]:
        if session is None or not self._sessions.renew(session, until - self._now()):
            return [None] * len(held)
        found, hidden = self._sweep.sweep(session, (claim for claim, _ in held), until)
        answers: list[Granted | BackendUnavailable | None] = []
        for claim, granted in held:
            if claim.name in hidden:
                answers.append(self._hidden(claim.name))
            else:
                still = _may_be_held(found, claim, session.id)
                answers.append(_granted(session, granted.token) if still else None)
        return answers

    def _hidden(self, name: str) -> BackendUnavailable:
        key = self._keys.of(name)
        return BackendUnavailable(
            f"a look at {key!r} is refused: Consul could not tell whether it is still ours",
            unknown=False,
            backend="consul",
        )

    # ---- release

    def release(self, claim: Claim, granted: Granted | None, within: float) -> bool:
        """5. What was asked for in vain, or has no answer, may still be locked: it is looked for."""
        until = self._now() + within
        doubtful = self._sessions.cancel(claim, granted=granted is not None)
        answered = False
        try:
            ours = self._release(claim, granted, doubtful, until)
            answered = True
        finally:
            self._sessions.left(claim, answered=answered)
        return ours

    def _release(self, claim: Claim, granted: Granted | None, doubtful: Sequence[Session], until: float) -> bool:
        if self._sessions.is_beginning(claim):
            raise BackendUnavailable("its session is not made yet", unknown=False, backend="consul")
        if granted and granted.token is not None:
            over = self._sessions.known_over(granted.key)
            ours = not over and self._delete(claim, granted.key, granted.token, until)
        else:
            ours = bool(doubtful) and self._look_and_delete(claim, [one.id for one in doubtful], until)
        self._end_doubtful(claim, doubtful, until)
        return ours

    def _look_and_delete(self, claim: Claim, sessions: Sequence[str], until: float) -> bool:
        entry, _ = self._transactions.read(claim.name, until)
        if entry is None or entry.session not in sessions or entry.claim_id != claim.id:
            return False
        return self._delete(claim, entry.session, entry.index, until)

    def _delete(self, claim: Claim, session: Hashable, index: int, until: float) -> bool:
        """Whether the key was this claim's until now."""
        for _ in range(TRIES):
            if self._transactions.delete(claim.name, session, index, until):
                return True
            entry, _ = self._transactions.read(claim.name, until)
            if entry is None or not entry.held_by(claim.id, session):
                return False
            index = entry.index  # an operator wrote the key
        raise self._transactions.restless(claim.name)

    def _end_doubtful(self, claim: Claim, doubtful: Sequence[Session], until: float) -> None:
        own = self._sessions.own(claim)
        for session in doubtful:
            # Whatever of it is still on its way finds no session. Where others would lose their locks, the renewals
            # look after it.
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
        """Move the key to a session that only the server's clock ends.

        If the answer to that is lost, the session is left alone: the move may still be executed, and whoever asks again
        finds that it was.
        """
        if self._sessions.known_over(granted.key):  # it moved before, or was lost
            entry, _ = self._transactions.read(claim.name, until)
            return _rests_for(claim, entry)
        session, seconds = self._sessions.new_rest(seconds, until)
        try:
            entry = self._move(claim, granted, session, seconds, until)
        except BackendRejected:
            self._sessions.end_rest(session, until - self._now())
            raise
        if entry is None or entry.session != session:  # nothing can come of it any more
            self._sessions.end_rest(session, until - self._now())
        return _rests_for(claim, entry)

    def _move(self, claim: Claim, granted: Granted, session: str, seconds: float, until: float) -> Entry | None:
        """The key after it was tried: it was moved, had moved before, or is not this claim's."""
        assert granted.token is not None
        index = granted.token
        for _ in range(TRIES):
            try:
                return self._move_at(claim, granted, session, index, seconds, until)
            except Refused as refused:
                if "invalid session" in refused.why:  # this process stood still for longer than it lived
                    raise BackendUnavailable("it was to rest, too late", unknown=False, backend="consul") from refused
            entry, _ = self._transactions.read(claim.name, until)
            if entry is None or not entry.held_by(claim.id, granted.key):
                return entry
            index = entry.index  # an operator wrote the key
        raise self._transactions.restless(claim.name)

    def _move_at(self, claim: Claim, granted: Granted, session: str, index: int, seconds: float, until: float) -> Entry:
        key = self._keys.of(claim.name)
        value = b64encode(encode_resting(claim, granted.token, seconds)).decode()
        steps = [
            operation("check-session", key, Session=granted.key),
            operation("check-index", key, Index=index),
            operation("unlock", key, Value=value, Flags=LOCK_FLAGS, Session=granted.key),
            operation("lock", key, Value=value, Flags=LOCK_FLAGS, Session=session),
        ]
        # A transaction shows no values.
        return replace(self._transactions.execute(steps, until), value=b64decode(value))


def _granted(session: Session, index: int | None) -> Granted:
    ttl = session.ttl
    group = session.id if session.shared else OWN
    return Granted(index, ttl, session.proved_at, ttl, ttl / 3, group, session.id)


def _may_be_held(found: Found, claim: Claim, session_id: str) -> bool:
    """What was not looked at is held as long as its session is."""
    if claim.name not in found:
        return True
    entry = found[claim.name]
    return entry is not None and entry.held_by(claim.id, session_id)


def _rests_for(claim: Claim, entry: Entry | None) -> bool:
    return entry is not None and entry.rests and entry.claim_id == claim.id
