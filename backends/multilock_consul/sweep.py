"""Read keys at each renewal, and delete those that are locked for a claim whose caller has given it up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set

from multilock import BackendRejected, BackendUnavailable, MultilockError
from multilock.backend import Claim
from multilock.log_thread import logger
from multilock_consul.keys import Entry, Keys
from multilock_consul.sessions import Session, Sessions
from multilock_consul.transactions import Transactions
from multilock_consul.transport import TooLarge

__all__ = ["Found", "Sweep"]

LOOK_SHARE = 0.1  # fraction of the ttl after which a renewal reads no further keys

Found = Mapping[str, Entry | None]
"""The keys that were read; None stands for a missing key."""


class Sweep:
    """The reads and deletions that follow the renewals of one client."""

    def __init__(self, keys: Keys, transactions: Transactions, sessions: Sessions, now: Callable[[], float]) -> None:
        self._keys = keys
        self._transactions = transactions
        self._sessions = sessions
        self._now = now

    def sweep(self, claims: Mapping[Session, Iterable[Claim]], until: float) -> tuple[Found, set[str]]:
        """Read the keys of these claims, and keys that may be locked in the same sessions for unwanted claims.

        The sessions have just been renewed. Returns the keys found, and the keys that the token may not read.
        """
        held: dict[str, bool] = {}
        keys: dict[str, bool] = {}
        of_session: dict[Session, Mapping[str, bool]] = {}
        for session, wanted in claims.items():
            own = dict.fromkeys((key for claim in wanted for key in self._keys.places(claim, session.id)), True)
            of_session[session] = self._sessions.to_look_at(session, own)
            # this may be a `Lease.renew()`, whose caller wants to know whether the lock is still held, so read its key
            # first
            if len(own) == 1:
                keys |= own
            held |= own
            keys |= of_session[session]
        end = (self._now() + until) / 2  # a read without a reply must not use up the renewal's time
        enough = self._now() + LOOK_SHARE * min((session.ttl for session in claims), default=0.0)
        found, hidden = self._look(keys, held.keys(), end, enough)
        clean = found.keys() - self._clean({session.id: session for session in claims}, found, end)
        for session, some in of_session.items():
            self._sessions.looked_at(session, some, clean)
        return found, hidden

    def _look(self, keys: Mapping[str, bool], held: Set[str], end: float, enough: float) -> tuple[Found, set[str]]:
        """Read as many of these keys as there is time for. On a slow network, the next renewals read the remaining
        keys.

        The values of ``keys`` say whether a key should exist.
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
        """Return whether the token may read this key. A reply about many keys leaves out the keys that the token may
        not read, while a query for one such key is refused."""
        try:
            self._transactions.read(key, until)
        except BackendRejected:
            return False
        return True

    def _clean(self, sessions: Mapping[str, Session], found: Found, end: float) -> set[str]:
        """Delete keys that are locked for unwanted claims: their acquire was executed late, or a second time.

        Returns the keys that could not be deleted yet.
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
                        logger.debug("the key %r is not deleted yet: %s", key, error)
        return dirty
