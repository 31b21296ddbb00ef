"""Read the keys that no watch covers, and delete old tombstones, at each renewal."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from multilock import MultilockError
from multilock.backend import Held
from multilock.log_thread import logger
from multilock.timing import LATE_REQUEST_IN_SESSION
from multilock_etcd.keys import EtcdKeyspace
from multilock_etcd.sessions import EtcdSession
from multilock_etcd.transactions import AT_ONCE, EtcdTransactions

__all__ = ["EtcdSweep"]


class _Tombstone(NamedTuple):
    """The key of a tombstone, and the time until which the tombstone must stay."""

    key: bytes
    until: float


class EtcdSweep:
    """The reads and deletions that follow the renewals of one client."""

    def __init__(self, keys: EtcdKeyspace, transactions: EtcdTransactions, now: Callable[[], float]) -> None:
        self._keys = keys
        self._transactions = transactions
        self._now = now
        self._tombstones: deque[_Tombstone] = deque()

    def missing(
        self, session: EtcdSession, doubtful: Sequence[Held], deadline: float, within: float
    ) -> tuple[set[bytes], int]:
        """Return which of these keys are gone, and the revision of the last read.

        If there is not enough time for all keys, the next renewal begins with the keys that were not read. Raises if
        there is only one key and it cannot be read.
        """
        gone: set[bytes] = set()
        at = 0
        longest = 0.0
        turn = session.turn % len(doubtful) if doubtful else 0
        in_turn = [*doubtful[turn:], *doubtful[:turn]]
        keys = [(self._keys.own(claim), granted.token, granted.group) for claim, granted in in_turn]
        if len(keys) > 1:
            deadline -= within / 4
        looked = 0
        while looked < len(keys):
            began = self._now()
            # a request with too little time would look like a server that does not reply
            if looked and deadline - began < 2 * longest:
                break
            try:
                step = self._transactions.missing(keys[looked : looked + AT_ONCE], deadline)
            except MultilockError as error:
                if len(keys) == 1:
                    raise
                logger.debug("keys that no watch covers are looked at later: %s", error)
                break
            looked += step.many
            gone |= step.gone
            at = step.revision
            if len(keys) > 1:
                session.turn = turn + looked
            longest = max(longest, self._now() - began)
        return gone, at

    def remember_tombstone(self, key: bytes) -> None:
        """Delete this tombstone later, once it is old enough."""
        self._tombstones.append(_Tombstone(key, self._now() + LATE_REQUEST_IN_SESSION))

    def forget_tombstones(self, deadline: float) -> None:
        """Delete the tombstones that are old enough. If that fails, a later call tries again."""
        old: list[_Tombstone] = []
        while self._tombstones and self._tombstones[0].until < self._now() and len(old) < AT_ONCE:
            old.append(self._tombstones.popleft())
        if old:
            try:
                self._transactions.delete_all([each.key for each in old], deadline)
            except MultilockError as error:
                self._tombstones.extendleft(reversed(old))
                logger.debug("old tombstones are deleted later: %s", error)
