"""Which primary a client follows, out of what the Sentinels say. Pure: no request, no thread.

A greater epoch counts at once: one Sentinel that knows of a failover is enough. A lower epoch, or another primary with
the same epoch, may be the word of a Sentinel that was cut off, or of Sentinels that were made anew or were told of
another primary. The client follows it only after a doubt. A doubt begins when no answer that counts names the primary
which is followed, or when some name another one with the same epoch. The answers to later questions decide: as many
Sentinels as a failover needs must name the new primary, and all Sentinels must have answered. Where some are silent,
the client waits for `COUNTS_FOR`: a silent Sentinel may have led a failover of which the others learn within seconds.

An answer counts for `COUNTS_FOR`, and no longer once its Sentinel has said something else or is silent.
tests/models/sentinel.cpp tries every order of events.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from multilock_redis.slots import Address

__all__ = ["COUNTS_FOR", "Following", "Told"]

# In seconds; a doubt lasts as long while some are silent. Sentinels tell each other what they know every 2 s.
COUNTS_FOR = 10.0
KNOWN_FOR = 600.0  # seconds after a Sentinel was last said to be there; until then it is asked


class Told(NamedTuple):
    """What one Sentinel answers."""

    epoch: int  #: greater after each failover
    primary: Address
    facts: Mapping[str, str]
    id: str  #: of the Sentinel: another one when it is made anew
    others: tuple[Address, ...]  #: the Sentinels that it knows
    place: Address  #: where it was reached; several Sentinels may be reached at one
    asked_at: float
    hidden: str = ""  #: what it refuses to tell of the Sentinels

    @property
    def needed(self) -> int:
        """How many Sentinels have to agree before there is a failover."""
        return max(int(self.facts.get("quorum", 1)), self.number // 2 + 1)

    @property
    def number(self) -> int:
        """Of the Sentinels, as far as this one knows."""
        return int(self.facts.get("num-other-sentinels", 0)) + 1

    def agrees_with(self, other: Told) -> bool:
        return (self.epoch, self.primary) == (other.epoch, other.primary)


class Following:
    """The caller lets one thread at a time in."""

    def __init__(self, sentinels: int) -> None:
        """``sentinels``: how many the URL names."""
        self._sentinels = sentinels
        self.told: Told | None = None  #: the last answer that named the primary which is followed
        self.look_again = False  #: all Sentinels are to be asked now; whoever reads that takes it back
        self._answers: list[Told] = []  # one for each Sentinel
        self._others: dict[Address, float] = {}  # the addresses of Sentinels, each with when it was named last
        self._doubted_at: float | None = None  # since then nobody names the primary, or some name another one

    def note(self, told: Told, own: bool, now: float) -> bool:
        """Returns True if the client follows what this answer says. ``own``: only one Sentinel is reached there."""
        earlier = [each for each in self._answers if each.id == told.id or (own and each.place == told.place)]
        if any(each.asked_at > told.asked_at for each in earlier):
            return self._follows(told)  # it comes late: a later question has been answered
        self._others |= dict.fromkeys(told.others, now)
        self._others = {place: at for place, at in self._others.items() if now - at < KNOWN_FOR}
        counts = [each for each in self._answers if now - each.asked_at < COUNTS_FOR and each not in earlier]
        self._answers = [*counts, told]
        if not any(each.agrees_with(told) for each in earlier):
            self.look_again = not (self.told is None or self._follows(told))
        self._decide(told, now)
        return self._follows(told)

    def silent(self, place: Address) -> None:
        """The Sentinel that was reached there has not answered."""
        self._answers = [each for each in self._answers if each.place != place]

    def is_agreed(self) -> bool:
        """As many Sentinels as a failover needs name the primary."""
        return self.told is not None and self._support() >= self.told.needed

    def others(self) -> list[Address]:
        """The addresses of the Sentinels that some Sentinel has named."""
        return list(self._others)

    def _follows(self, told: Told) -> bool:
        return self.told is not None and told.agrees_with(self.told)

    def _support(self) -> int:
        return sum(map(self._follows, self._answers))

    def _decide(self, told: Told, now: float) -> None:
        if self.told is None or told.epoch > self.told.epoch or self._follows(told):
            self.told = told
        followed, support = self.told, self._support()
        if support and not any(
            each.epoch == followed.epoch and each.primary != followed.primary for each in self._answers
        ):
            self._doubted_at = None
            return
        if self._doubted_at is None:
            self._doubted_at = now
            self.look_again = True
            return
        later = [each for each in self._answers if each.asked_at > self._doubted_at]
        all_of_them = max(self._sentinels, followed.number, *(each.number for each in self._answers))
        if len(later) < all_of_them and now - self._doubted_at < COUNTS_FOR:
            return  # who has not answered may know more
        best = max(each.epoch for each in self._answers)
        named: defaultdict[Address, list[Told]] = defaultdict(list)
        for each in later:
            if each.epoch == best:
                named[each.primary].append(each)
        for those in named.values():
            if len(those) >= max(each.needed for each in those) and len(those) > support:
                self.told, self._doubted_at = those[-1], None
