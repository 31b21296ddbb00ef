"""What a renewal does besides: it looks at keys, and deletes what is locked for nobody."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set

from multilock import BackendRejected, BackendUnavailable, MultilockError
from multilock.backend import Claim
from multilock.telling import logger
from multilock_consul.keys import Entry, Keys
from multilock_consul.sessions import Session, Sessions
from multilock_consul.transactions import Transactions
from multilock_consul.transport import TooLarge

__all__ = ["Found", "Sweep"]

LOOK_SHARE = 0.1  # of the ttl: a renewal begins no further look at its keys after so long

Found = Mapping[str, Entry | None]
"""The keys that were looked at; None: not there."""


class Sweep:
    def __init__(self, keys: Keys, transactions: Transactions, sessions: Sessions, now: Callable[[], float]) -> None:
        self._keys = keys
        self._transactions = transactions
        self._sessions = sessions
        self._now = now

    def sweep(self, claims: Mapping[Session, Iterable[Claim]], until: float) -> tuple[Found, set[str]]:
        """Look at the keys of these claims of sessions that were renewed, and at others of the same sessions that may
        be locked for nobody. Returns what was found, and the keys that the token may not look at."""
        held: dict[str, bool] = {}
        keys: dict[str, bool] = {}
        of_session: dict[Session, Mapping[str, bool]] = {}
        for session, wanted in claims.items():
            own = dict.fromkeys((key for claim in wanted for key in self._keys.places(claim, session.id)), True)
            of_session[session] = self._sessions.to_look_at(session, own)
            if len(own) == 1:  # it may be `Lease.renew()`, which asks whether the lock is still ours
                keys |= own
            held |= own
            keys |= of_session[session]
        end = (self._now() + until) / 2  # or a look without an answer would take the proof's time
        enough = self._now() + LOOK_SHARE * min((session.ttl for session in claims), default=0.0)
        found, hidden = self._look(keys, held.keys(), end, enough)
        clean = found.keys() - self._clean({session.id: session for session in claims}, found, end)
        for session, some in of_session.items():
            self._sessions.looked_at(session, some, clean)
        return found, hidden

    def _look(self, keys: Mapping[str, bool], held: Set[str], end: float, enough: float) -> tuple[Found, set[str]]:
        """At those of these keys that there is time for: many keys over a long way take more than one renewal.

        ``keys`` tells of each whether it should be there.
        """
        found: dict[str, Entry | None] = {}
        hidden: set[str] = set()
        left = list(keys)
        while left:
            now = self._now()
            if now >= end or (found and now >= enough):
                break
            step = self._transactions.portion(left)
            try:
                entries = self._transactions.read_all(step, end)
                missing = [key for key in step if entries[key] is None and keys[key]]
                if missing and not self._may_look_at(next((key for key in missing if key in held), missing[0]), end):
                    hidden.update(missing)
                found.update((key, entry) for key, entry in entries.items() if key not in hidden)
            except TooLarge as refusal:
                if self._transactions.ask_for_less(step):
                    continue
                logger.debug("a session was renewed, a look at %r was refused: %s", step[0], refusal)
                hidden.update(step)
            except BackendUnavailable as silence:
                logger.debug("a session was renewed, its key %r was not looked at: %s", step[0], silence)
                break
            except BackendRejected as refusal:
                logger.debug("a session was renewed, a look at %r and others was refused: %s", step[0], refusal)
                hidden.update(step)
            del left[: len(step)]
        return found, hidden

    def _may_look_at(self, key: str, until: float) -> bool:
        """What the token may not read is left out of an answer about many keys; a question for one is refused."""
        try:
            self._transactions.read(key, until)
        except BackendRejected:
            return False
        return True

    def _clean(self, sessions: Mapping[str, Session], found: Found, end: float) -> set[str]:
        """Delete what is locked for nobody: an acquire that nobody wants any more was executed after all, or again.

        The keys for which that is not done yet. That is nobody's concern who holds another lock of this session.
        """
        dirty = set()
        for key, entry in found.items():
            session = sessions.get(entry.session) if entry else None
            if entry and session and not self._sessions.wanted(session, entry.claim_id):
                dirty.add(key)
                if self._now() < end:
                    try:
                        self._transactions.delete(key, session.id, entry.index, end)
                        dirty.discard(key)
                    except MultilockError as error:
                        logger.debug("the key %r is not given back yet: %s", key, error)
        return dirty
