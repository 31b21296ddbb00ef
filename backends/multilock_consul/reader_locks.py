"""The locks of readers: each reader locks a separate key ``<prefix><name>/!r/<id>.<session>``.

* Step 1: a reader locks its own key. The same transaction proves that the name is free, and that no lock delay blocks
  the name.
* Step 2: a claim that excludes readers locks the key of the name, so that no further reader can enter. The same
  transaction returns the readers that are still there. The claim holds the name only after they have left.
* Step 3: a reader that releases deletes its key. If a reader's session ends, its key stays, but no session locks it.
  The reader may still believe that it holds the name until the lock delay of the key is over. So a later writer waits
  until then.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from multilock import system
from multilock.backend import Busy, Claim
from multilock.timing import RENEWALS, UNPUSHED
from multilock.values import encode_value
from multilock_consul.keys import LOCK_FLAGS, Entry, Keys
from multilock_consul.sessions import Session
from multilock_consul.transactions import Refused, Transactions, operation, whole_tree

__all__ = ["SAFETY", "Readers", "Wait"]

SAFETY = 10.0  # seconds after which a waiter asks again although nothing was pushed

Wait = Callable[[str, str, int], bool]
"""``wait(key, claim_id, index)`` has this claim woken when the key is free. Returns False if too many queries are
open."""


class Readers:
    """The steps of the recipe that concern readers."""

    def __init__(self, keys: Keys, transactions: Transactions, wait: Wait) -> None:
        self._keys = keys
        self._transactions = transactions
        self._wait = wait

    def shown(self, name: str) -> list[dict[str, Any]]:
        """Step 2: return the operations that show all readers, for the transaction that locks the key of the name."""
        return whole_tree(self._keys.readers(name))

    def steps(self, session: Session, claim: Claim) -> list[dict[str, Any]]:
        """Step 1: return the operations that lock a reader's key, for a name that is known to be free."""
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
        """Step 2: wait for one of these readers to leave. Returns None if no reader is left.

        Keys whose sessions have ended are deleted if the operation ``still`` succeeds. Raises `Refused` as long as one
        of these keys has a lock delay.
        """
        if living := {key: entry for key, entry in readers.items() if entry.session}:
            return self.wait_for_one(session, claim, living, join)
        if readers:
            self._transactions.bury(list(readers), still, session.id, until)
        return None

    def wait_for_one(self, session: Session, claim: Claim, holders: Mapping[str, Entry], join: bool) -> Busy:
        """Wait until one of these readers, chosen at random, gives up its key.

        With n readers, a waiter repeats this about ln n times. Without ``join`` the claim waits for no reader.
        """
        if not join:
            return Busy(SAFETY)
        key = system.choice(list(holders))
        if not self._wait(key, claim.id, holders[key].index):
            return Busy(UNPUSHED)
        # Only the claim's attempts renew a separate session, so they must be frequent enough.
        return Busy(SAFETY if session.shared else min(SAFETY, session.ttl / RENEWALS))

    def forget(self, claim: Claim, sessions: Iterable[object], until: float) -> None:
        """Delete the keys that a released reader locked in these sessions, if their sessions have ended."""
        for session_id in sessions:
            key = self._keys.place(claim, session_id)
            entry, _ = self._transactions.read(key, until)
            if entry and not entry.session:
                still = operation("check-index", key, Index=entry.index)
                with suppress(Refused):  # a claim that wanted the name has deleted the key
                    self._transactions.execute([still, operation("delete", key)], until)
