"""What the answers of several servers amount to. Counting only: no clock, no threads, no requests."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from enum import Enum
from typing import TypeVar

from multilock.backend import Granted

__all__ = ["Quorum", "Verdict"]

H = TypeVar("H", bound=Hashable)


class Verdict(Enum):
    OPEN = "open"  #: the answers that are missing can still decide it
    YES = "yes"  #: a majority says so
    NO = "no"  #: no majority can say so any more
    SILENCE = "silence"  #: too few answer


class Quorum:
    """So many servers, each of which counts once. Two majorities of them have one server in common."""

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes
        self.needed = nodes // 2 + 1
        self.spare = nodes - self.needed  #: so many may be missing

    def asked(self, yes: int, no: int, silent: int) -> Verdict:
        """Of a question that a majority has to answer, with yes or not. NO too where a majority answered, and too few
        with yes."""
        pending = self.nodes - yes - no - silent
        if yes >= self.needed:
            return Verdict.YES
        if yes + pending >= self.needed:
            return Verdict.OPEN
        if yes + no >= self.needed:
            return Verdict.NO
        return Verdict.OPEN if yes + no + pending >= self.needed else Verdict.SILENCE

    def kept(self, yes: int, no: int, silent: int) -> Verdict:
        """Of what a majority had said yes to. NO only where so many said no that it is certainly gone."""
        if yes >= self.needed:
            return Verdict.YES
        if no > self.spare:
            return Verdict.NO
        return Verdict.OPEN if yes + no + silent < self.nodes else Verdict.SILENCE

    def lost(self, gone: int) -> bool:
        return gone > self.spare

    def proof(self, votes: Iterable[Granted]) -> Granted | None:
        """The vote that ends first among a majority of those that end last: until then a majority lets in nobody else.
        None: too few."""
        return self.least(sorted(votes, key=_end, reverse=True))

    def least(self, ordered: Sequence[H]) -> H | None:
        """What a majority has at least, of what is ordered from the best on."""
        return ordered[self.needed - 1] if len(ordered) >= self.needed else None

    def soonest(self, seconds: Iterable[float | None]) -> float | None:
        """When a majority has come, of when each comes; None: never."""
        when = self.least(sorted(math.inf if each is None else each for each in seconds))
        return None if when is None or when == math.inf else when

    def named(self, said: Iterable[H]) -> H | None:
        """What a majority says; None if it says different things."""
        found = Counter(said).most_common(1)
        return found[0][0] if found and found[0][1] >= self.needed else None


def _end(vote: Granted) -> float:
    return vote.sent_at + vote.valid_for
