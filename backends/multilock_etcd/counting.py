"""Who is ahead in the queue of a name, counted down by one watch of it: a proof that a claim is first, without a look.

A request that puts a key, or looks at it, also counts who is ahead, at its revision. The watch of the whole name tells
of each deletion after that, in order and of each revision all or nothing, with the create_revision of what was deleted;
who was created before the key leaves the count. At nobody it has proved that at this revision nobody was ahead, and
that the key had not been deleted up to it. `tests/models/etcd.cpp` is this rule, exhausted.

Nothing here asks, waits or locks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from multilock.backend import Claim
from multilock_etcd.keys import Ahead, Range
from multilock_etcd.places import Place

__all__ = ["Deletion", "Line", "Standing", "Verdict"]

REMEMBERED = 256  # deletions; who comes later than that has to look


class Deletion(NamedTuple):
    """``born`` is the create_revision of what was deleted; None: the server does not know it any more."""

    key: bytes
    revision: int
    born: int | None


class Standing:
    """A claim whose key was created at ``revision``; and how many, ``at`` a revision, were ahead of it."""

    __slots__ = ("ahead", "at", "claim", "like", "others", "own", "place", "revision")

    def __init__(
        self, claim: Claim, place: Place, own: bytes, ahead: Ahead, others: int, like: int, revision: int, at: int
    ) -> None:
        self.claim = claim
        self.place = place
        self.own = own
        self.ahead = ahead
        self.others = others  # who do not fit
        self.like = like  # who hold the name together with it
        self.revision = revision
        self.at = at

    @property
    def to_go(self) -> int:
        """How many at least have to go before it is first."""
        return self.others + max(0, self.like - self.ahead.room + 1)

    def hear(self, deletions: Sequence[Deletion]) -> bool | None:
        """Whether it is first at the last of them. False: that cannot be told. None: it is not first yet."""
        for each in deletions:
            if each.revision <= self.at:
                continue
            if each.key == self.own or each.born is None:
                return False
            if each.born < self.revision:
                self._without(each.key)
        return True if self.to_go == 0 else None

    def _without(self, key: bytes) -> None:
        if any(begin <= key < end for begin, end in self.ahead.like):
            self.like -= 1
        elif any(begin <= key < end for begin, end in self.ahead.others):
            self.others -= 1


Verdict = tuple[Standing, bool]
"""It is first; or it has to look. It is counted no more."""


class Line:
    """Those of one client who wait for a name, and what the watch of that name has told."""

    def __init__(self, queue: Range) -> None:
        self.queue = queue
        self.unheeded = 0  # answers in a row that nobody waited for
        self._after: int | None = None  # the revision after which everything was told; None: not known yet
        self._told: deque[Deletion] = deque()
        self._waiting: dict[str, Standing] = {}

    def __bool__(self) -> bool:
        """Whether anybody waits."""
        return bool(self._waiting)

    def begins(self, after: int) -> list[Verdict]:
        """The server has said after which revision the watch tells everything."""
        self._after = after
        return self._judge([(each, self._catch_up(each)) for each in self._waiting.values()])

    def enter(self, standing: Standing) -> list[Verdict]:
        self.unheeded = 0
        self._waiting[standing.claim.id] = standing
        return self._judge([(standing, self._catch_up(standing))])

    def leave(self, claim_id: str) -> None:
        self._waiting.pop(claim_id, None)

    def hear(self, deletions: Sequence[Deletion]) -> list[Verdict]:
        """What one answer of the watch tells: whole revisions."""
        self.unheeded += 1
        for each in deletions:
            self._told.append(each)
            if len(self._told) > REMEMBERED:
                self._after = self._told.popleft().revision
        return self._judge([(each, each.hear(deletions)) for each in self._waiting.values()])

    def _catch_up(self, standing: Standing) -> bool | None:
        """With what was told since it counted."""
        if self._after is None:
            return None
        if standing.at < self._after:
            return False
        return standing.hear(self._told) if self._told else None

    def _judge(self, answers: Sequence[tuple[Standing, bool | None]]) -> list[Verdict]:
        verdicts = [(standing, first) for standing, first in answers if first is not None]
        for standing, _ in verdicts:
            del self._waiting[standing.claim.id]
        return verdicts
