"""Prove that a claim is first in the queue of a name, by counting down the keys ahead of it in one watch.

A request that puts a key, or reads it again, also reads the keys that are ahead of it at the same revision. The watch
of the whole name then reports each deletion after that revision: in order, and either all or none of one revision. A
key that was deleted since is no longer ahead. Once none is left, the watch has proved two things: at this revision
nobody was ahead, and our own key had not been deleted up to it. `tests/models/etcd.cpp` checks this rule exhaustively.

A proof counts until the same watch contradicts it. A client that was paused reads everything at once afterwards: that
its claim became first, and later that its key was deleted. So the watch reports our own key from the proof on.

We count keys, not events: some servers replay events on the same stream, and a replay must not count twice.

Nothing in this module sends requests, waits or locks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import NamedTuple

from multilock.backend import Claim
from multilock_etcd.keys import Range
from multilock_etcd.places import Place
from multilock_etcd.sessions import Session

__all__ = ["Countdown", "Deletion", "Outcome", "Standing", "Verdict"]

REMEMBERED = 256  # deletions; a claim whose read is older than all of them must query the server


class Deletion(NamedTuple):
    """One key that was deleted, at this revision."""

    key: bytes
    revision: int


class Standing:
    """A waiting claim, whose key was created at ``revision`` on the lease of ``session``, and the keys that were ahead
    of it at revision ``at``."""

    __slots__ = ("at", "claim", "like", "others", "own", "place", "revision", "room", "session")

    def __init__(
        self,
        claim: Claim,
        place: Place,
        own: bytes,
        others: Iterable[bytes],
        like: Iterable[bytes],
        room: int,
        at: int,
    ) -> None:
        assert place.revision is not None
        assert place.session is not None
        self.claim = claim
        self.place = place
        self.own = own
        self.others = set(others)  # keys ahead that exclude the claim
        self.like = set(like)  # keys ahead that share the name with it, up to ``room``
        self.room = room
        self.at = at
        self.revision: int = place.revision
        self.session: Session = place.session

    @property
    def to_go(self) -> int:
        """Return the least number of keys that must be deleted before the claim is first."""
        return len(self.others) + max(0, len(self.like) - self.room + 1)

    def hear(self, deletions: Iterable[Deletion]) -> bool | None:
        """Count these deletions down.

        Returns True if the claim is first after the last of them, None if it is not first yet, and False if the claim's
        own key was deleted, so that it must query the server.
        """
        for each in deletions:
            if each.revision <= self.at:
                continue
            if each.key == self.own:
                return False
            self.others.discard(each.key)
            self.like.discard(each.key)
        return True if self.to_go == 0 else None


class Outcome(Enum):
    FIRST = "first"  #: no key is ahead of the claim: the claim holds the name
    LOOK = "look"  #: the watch cannot decide: the claim must query the server
    GONE = "gone"  #: the claim was first, and its own key has been deleted since


class Verdict(NamedTuple):
    """The result of the countdown for one claim."""

    standing: Standing
    outcome: Outcome
    revision: int  #: the revision at which this was so


class Countdown:
    """The claims of one client that wait for one name, and the deletions that the watch of that name has reported."""

    def __init__(self, queue: Range) -> None:
        self.queue = queue
        self.unheeded = 0  # answers in a row that came while no claim waited
        self._after: int | None = None  # the watch reports all deletions after this revision
        self._told: deque[Deletion] = deque()
        self._waiting: dict[str, Standing] = {}
        self._first: dict[str, Standing] = {}  # granted by the watch, which may contradict that later

    def __bool__(self) -> bool:
        """Return whether any claim still needs the watch."""
        return bool(self._waiting or self._first)

    def begins(self, after: int) -> list[Verdict]:
        """Start counting: the server has confirmed that the watch reports all deletions after this revision."""
        self._after = after
        return self._judge([(each, self._catch_up(each)) for each in self._waiting.values()])

    def enter(self, standing: Standing) -> list[Verdict]:
        """Start counting for this claim. Returns its verdict, if the reported deletions already decide."""
        self.unheeded = 0
        self._waiting[standing.claim.id] = standing
        return self._judge([(standing, self._catch_up(standing))])

    def leave(self, claim_id: str) -> None:
        """Stop counting for this claim."""
        self._waiting.pop(claim_id, None)
        self._first.pop(claim_id, None)

    def hear(self, deletions: Sequence[Deletion]) -> list[Verdict]:
        """Count the deletions of one answer of the watch. An answer contains whole revisions only."""
        if not self:
            self.unheeded += 1
        for each in deletions:
            self._told.append(each)
            if len(self._told) > REMEMBERED:
                # The deletions are complete only after the revision of this one. It may be a replay, hence max().
                self._after = max(self._after or 0, self._told.popleft().revision)
        taken = self._taken_back(deletions)
        return taken + self._judge([(each, each.hear(deletions)) for each in self._waiting.values()])

    def _taken_back(self, deletions: Sequence[Deletion]) -> list[Verdict]:
        """Return a verdict for each claim that was first and whose own key is among these deletions."""
        at = {each.key: each.revision for each in deletions}
        taken = [each for each in self._first.values() if at.get(each.own, 0) > each.revision]
        for each in taken:
            del self._first[each.claim.id]
        return [Verdict(each, Outcome.GONE, at[each.own]) for each in taken]

    def _catch_up(self, standing: Standing) -> bool | None:
        """Count down what the watch has reported since the claim read the keys ahead of it; returns as `hear` does."""
        if self._after is None:
            return None
        if standing.at < self._after:
            return False
        return standing.hear(self._told) if self._told else None

    def _judge(self, answers: Sequence[tuple[Standing, bool | None]]) -> list[Verdict]:
        verdicts = []
        for standing, first in answers:
            if first is None:
                continue
            del self._waiting[standing.claim.id]
            if first:
                self._first[standing.claim.id] = standing
            verdicts.append(Verdict(standing, Outcome.FIRST if first else Outcome.LOOK, standing.revision))
        return verdicts
