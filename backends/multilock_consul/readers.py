"""Readers: each locks a key of its own, ``<prefix><name>/!r/<id>.<session>``, while nobody has the key of the name.

1. In one transaction, a reader proves that the name is free and that no lock delay keeps it, and locks its own key.
2. Who wants the name alone, or a permit, takes it as ever: from then on no reader comes in. The same transaction shows
the readers that are there. Until they have gone the name is taken, and nobody has been told that he holds it.
3. A reader that gives up its key deletes it. The key of one whose session ended stays, without a session: its holder
may still believe, as long as the server has a lock delay for that key. So a writer that comes later learns of it.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from multilock import system
from multilock.backend import Busy, Claim
from multilock.values import encode_value
from multilock_consul.keys import LOCK_FLAGS, Entry, Keys
from multilock_consul.sessions import Session
from multilock_consul.transactions import Refused, Transactions, operation, whole_tree

__all__ = ["SAFETY", "UNPUSHED", "Readers", "Wait"]

SAFETY = 10.0  # seconds after which a waiter looks again, although nothing was pushed
UNPUSHED = 1.0  # … where no push can come: too many keys are waited for

Wait = Callable[[str, str, int], bool]
"""``wait(key, claim_id, index)`` is to wake this claim when the key is free; whether it will."""


class Readers:
    def __init__(self, keys: Keys, transactions: Transactions, wait: Wait) -> None:
        self._keys = keys
        self._transactions = transactions
        self._wait = wait

    def shown(self, name: str) -> list[dict[str, Any]]:
        """2, what shows them all in the transaction that shuts the door."""
        return whole_tree(self._keys.readers(name))

    def steps(self, session: Session, claim: Claim) -> list[dict[str, Any]]:
        """1, for a name of which it is known that it is free."""
        lock, mine = self._keys.of(claim.name), self._keys.place(claim, session.id)
        value = b64encode(encode_value(claim)).decode()
        return [
            operation("lock", lock, Session=session.id),
            operation("delete", lock),
            operation("lock", mine, Value=value, Flags=LOCK_FLAGS, Session=session.id),
        ]

    def wait_for_readers(
        self,
        session: Session,
        claim: Claim,
        readers: Mapping[str, Entry],
        still: dict[str, Any],
        join: bool,
        until: float,
    ) -> Busy | None:
        """2. None: nobody reads, while ``still`` is true. Raises `Refused`, also as long as a lock delay lasts."""
        if living := {key: entry for key, entry in readers.items() if entry.session}:
            return self.wait_for_one(session, claim, living, join)
        if readers:
            self._transactions.bury(list(readers), still, session.id, until)
        return None

    def wait_for_one(self, session: Session, claim: Claim, holders: Mapping[str, Entry], join: bool) -> Busy:
        """Wait until any one of these gives up its key. With n of them that is done ln n times, as a rule. A try waits
        for none."""
        if not join:
            return Busy(SAFETY)
        key = system.choice(list(holders))
        if not self._wait(key, claim.id, holders[key].index):
            return Busy(UNPUSHED)
        # A session of its own is renewed by each attempt, and by nothing else.
        return Busy(SAFETY if session.shared else min(SAFETY, session.ttl / 3))

    def forget(self, claim: Claim, sessions: Iterable[object], until: float) -> None:
        """Delete the keys that a reader, which has given up, left in these sessions, if they have ended before."""
        for session_id in sessions:
            key = self._keys.place(claim, session_id)
            entry, _ = self._transactions.read(key, until)
            if entry and not entry.session:
                still = operation("check-index", key, Index=entry.index)
                with suppress(Refused):  # who wanted the name has buried it
                    self._transactions.execute([still, operation("delete", key)], until)
