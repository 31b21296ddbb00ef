"""Prove that a claim is first in the queue of a name, by counting down the keys ahead of it in one watch.

A request that puts or reads a key also reads the keys ahead of it, at the same revision. The watch of the whole name
then reports every later deletion in order. All deletions of one revision come together. When the deletion of the last
key ahead is reported, no key was ahead of ours at that revision, and our own key still existed. `tests/models/etcd.cpp`
checks this rule exhaustively.

A proof counts until the same watch contradicts it. A client that was paused receives all events at once afterwards:
first that its claim became first in the queue, then that its key was deleted. So after the proof the watch also reports
the deletion of our own key.

We count keys, not events: some servers replay events on the same stream, and a replay must not count twice.

This module sends no requests, and takes no locks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import NamedTuple

from multilock_etcd.claims import Waiter
from multilock_etcd.keys import Range
from multilock_etcd.transactions import Position

__all__ = ["Admission", "Decision", "Deletion", "Queue"]

REMEMBERED = 256  # deletions that are remembered; a claim that read the queue before all of these must ask the server


class Admission(Enum):
    ADMITTED = "admitted"  #: no key is ahead of the claim, so it holds the name
    ASK_AGAIN = "ask again"  #: the watch cannot decide, so the claim must ask the server
    WAIT = "wait"  #: some key is still ahead of the claim
    TAKEN_BACK = "taken back"  #: the claim was admitted, and its own key has been deleted since


class Deletion(NamedTuple):
    """One key that was deleted, at this revision."""

    key: bytes
    revision: int


class Decision(NamedTuple):
    """The queue's answer to one waiter."""

    waiter: Waiter
    admission: Admission
    revision: int  #: the revision of the waiter's key, or of its deletion if the name is taken back


class Queue:
    """The claims of one client that wait for one name, and the deletions that the watch of that name has reported."""

    def __init__(self, keys: Range) -> None:
        self.keys = keys
        self.unheeded = 0  # answers of the watch since the last claim waited
        self._after: int | None = None  # deletions after this revision are in `_told`, or will be
        self._told: deque[Deletion] = deque()
        self._waiting: dict[str, Waiter] = {}  # by claim id
        self._admitted: dict[str, Waiter] = {}  # claims that the watch has admitted, and may still take back

    def __bool__(self) -> bool:
        """Return whether any claim still needs the watch."""
        return bool(self._waiting or self._admitted)

    def begins(self, after: int) -> list[Decision]:
        """Begin to count deletions. The server has confirmed that the watch reports all deletions after this
        revision."""
        self._after = after
        return self._decide([(each, self._catch_up(each)) for each in self._waiting.values()])

    def enter(self, waiter: Waiter, position: Position) -> list[Decision]:
        """Begin to count deletions for this claim. Returns the decision about the claim, or an empty list if there is
        none yet."""
        self.unheeded = 0
        waiter.position = position
        self._waiting[waiter.claim.id] = waiter
        return self._decide([(waiter, self._catch_up(waiter))])

    def leave(self, claim_id: str) -> None:
        """Stop counting deletions for this claim."""
        self._waiting.pop(claim_id, None)
        self._admitted.pop(claim_id, None)

    def hear(self, deletions: Sequence[Deletion]) -> list[Decision]:
        """Count the deletions of one answer of the watch. An answer contains either all deletions of a revision or none
        of them."""
        if not self:
            self.unheeded += 1
        for each in deletions:
            self._told.append(each)
            if len(self._told) > REMEMBERED:
                # The oldest deletion is dropped. A claim that read the queue before the revision of that deletion must
                # read the queue again (`_catch_up`). A replayed deletion has an old revision, which must not lower
                # `_after`.
                self._after = max(self._after or 0, self._told.popleft().revision)
        taken = self._taken_back(deletions)
        return taken + self._decide([(each, _count_down(each, deletions)) for each in self._waiting.values()])

    def _taken_back(self, deletions: Sequence[Deletion]) -> list[Decision]:
        """Return a decision for each claim that was admitted and whose own key is among these deletions."""
        at = {each.key: each.revision for each in deletions}
        taken = [each for each in self._admitted.values() if at.get(each.own, 0) > each.position.revision]
        for each in taken:
            del self._admitted[each.claim.id]
        return [Decision(each, Admission.TAKEN_BACK, at[each.own]) for each in taken]

    def _catch_up(self, waiter: Waiter) -> Admission:
        """Remove from the keys ahead of the claim those whose deletion was reported since the claim read them."""
        if self._after is None:
            return Admission.WAIT
        if waiter.position.at < self._after:
            return Admission.ASK_AGAIN
        return _count_down(waiter, self._told)

    def _decide(self, admissions: Sequence[tuple[Waiter, Admission]]) -> list[Decision]:
        decisions = [
            Decision(waiter, admission, waiter.position.revision)
            for waiter, admission in admissions
            if admission is not Admission.WAIT
        ]
        for waiter, admission, _ in decisions:
            del self._waiting[waiter.claim.id]
            if admission is Admission.ADMITTED:
                self._admitted[waiter.claim.id] = waiter
        return decisions


def _count_down(waiter: Waiter, deletions: Iterable[Deletion]) -> Admission:
    """Remove these deleted keys from those ahead of the claim. If its own key was deleted, the claim must ask again."""
    position = waiter.position
    for each in deletions:
        if each.revision <= position.at:
            continue
        if each.key == waiter.own:
            return Admission.ASK_AGAIN
        position.others.pop(each.key, None)
        position.like.pop(each.key, None)
    return Admission.WAIT if position.to_go else Admission.ADMITTED
