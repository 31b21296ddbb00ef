"""Who is ahead in the queue of a name, counted down by one watch of it: a proof that a claim is first, without a look.

A request that puts a key, or looks at it, also reads the keys that are ahead, at its revision. The watch of the whole
name tells of each deletion after that, in order and of each revision all or nothing; a key that was deleted since is no
more ahead. With none of them left it has proved that at this revision nobody was ahead, and that the key had not been
deleted up to it. `tests/models/etcd.cpp` is this rule, exhausted.

A proof counts until the same watch contradicts it. A client that stood still reads at once what happened meanwhile: its
claim was first, and after that its key was deleted. So the own key is listened to from the proof on.

Keys, and not how many: some servers tell a watch again, on the same stream, what they have told it before.

Nothing here asks, waits or locks.
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

REMEMBERED = 256  # deletions; who comes later than that has to look


class Deletion(NamedTuple):
    key: bytes
    revision: int


class Standing:
    """A claim whose key was created at ``revision``, on the lease of ``session``; and whose keys, ``at`` a revision,
    were ahead of it."""

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
        self.others = set(others)  # of who do not fit
        self.like = set(like)  # of who hold the name together with it
        self.room = room
        self.at = at
        self.revision: int = place.revision
        self.session: Session = place.session

    @property
    def to_go(self) -> int:
        """How many at least have to go before it is first."""
        return len(self.others) + max(0, len(self.like) - self.room + 1)

    def hear(self, deletions: Iterable[Deletion]) -> bool | None:
        """Whether it is first at the last of them. False: that cannot be told. None: it is not first yet."""
        for each in deletions:
            if each.revision <= self.at:
                continue
            if each.key == self.own:
                return False
            self.others.discard(each.key)
            self.like.discard(each.key)
        return True if self.to_go == 0 else None


class Outcome(Enum):
    FIRST = "first"  #: nobody is ahead of the claim: it holds the name
    LOOK = "look"  #: the watch cannot tell: the claim has to ask
    GONE = "gone"  #: the claim was first, and its own key has been deleted since


class Verdict(NamedTuple):
    standing: Standing
    outcome: Outcome
    revision: int  #: at which this was so


class Countdown:
    """Those of one client who wait for a name, and what the watch of that name has told."""

    def __init__(self, queue: Range) -> None:
        self.queue = queue
        self.unheeded = 0  # answers in a row that nobody waited for
        self._after: int | None = None  # the revision after which everything was told; None: not known yet
        self._told: deque[Deletion] = deque()
        self._waiting: dict[str, Standing] = {}
        self._first: dict[str, Standing] = {}  # they hold by what the watch told: it may tell the opposite later

    def __bool__(self) -> bool:
        """Whether anybody needs the watch."""
        return bool(self._waiting or self._first)

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
        self._first.pop(claim_id, None)

    def hear(self, deletions: Sequence[Deletion]) -> list[Verdict]:
        """What one answer of the watch tells: whole revisions."""
        if not self:
            self.unheeded += 1
        for each in deletions:
            self._told.append(each)
            if len(self._told) > REMEMBERED:
                # What is told again is older than what was told before.
                self._after = max(self._after or 0, self._told.popleft().revision)
        taken = self._taken_back(deletions)
        return taken + self._judge([(each, each.hear(deletions)) for each in self._waiting.values()])

    def _taken_back(self, deletions: Sequence[Deletion]) -> list[Verdict]:
        """Of those that were first, the ones whose own keys are deleted here."""
        at = {each.key: each.revision for each in deletions}
        taken = [each for each in self._first.values() if at.get(each.own, 0) > each.revision]
        for each in taken:
            del self._first[each.claim.id]
        return [Verdict(each, Outcome.GONE, at[each.own]) for each in taken]

    def _catch_up(self, standing: Standing) -> bool | None:
        """With what was told since it counted."""
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
