"""Which primary a client follows, out of what the Sentinels say. Pure: no request, no thread.

A greater epoch counts at once: one Sentinel that knows of a failover is enough. A lower epoch, or another primary with
the same epoch, may be the word of a Sentinel that was cut off, or of Sentinels that were made anew or were told of
another primary. The client follows it only after a doubt. A doubt begins when no answer that counts names the primary
which is followed, or when some name another one with the same epoch. The answers to later questions decide: as many
Sentinels as a failover needs must name the new primary, and all Sentinels must have answered. Where some are silent, the
client waits for `COUNTS_FOR`: a silent Sentinel may have led a failover of which the others learn within seconds.

An answer counts until its Sentinel says something else, or has been silent for `COUNTS_FOR`.
tests/models/sentinel.cpp tries every order of events.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from multilock_redis.slots import Address

__all__ = ["COUNTS_FOR", "Following", "Told"]

COUNTS_FOR = 10.0  # seconds; Sentinels that reach each other tell each other what they know every 2 s


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
        self._missed: set[str] = set()  # the ids of Sentinels that were asked again, and have not answered
        self._doubted_at: float | None = None  # since then nobody names the primary, or some name another one

    def note(self, told: Told, own: bool, now: float) -> bool:
        """Returns True if the client follows what this answer says. ``own``: only one Sentinel is reached there."""
        earlier = [each for each in self._answers if each.id == told.id or (own and each.place == told.place)]
        if any(each.asked_at > told.asked_at for each in earlier):
            return self._follows(told)  # it comes late: a later question has been answered
        self.missed(told.place, now)
        self._missed.discard(told.id)
        self._answers = [each for each in self._answers if each not in earlier] + [told]
        if not any(each.agrees_with(told) for each in earlier):
            self.look_again = not (self.told is None or self._follows(told))
        self._decide(told, now)
        return self._follows(told)

    def missed(self, place: Address, now: float) -> None:
        """The Sentinels that were reached there before have not answered."""
        self._missed |= {each.id for each in self._answers if each.place == place}
        self._answers = [
            each for each in self._answers if each.id not in self._missed or now - each.asked_at < COUNTS_FOR
        ]
        self._missed &= {each.id for each in self._answers}

    def is_agreed(self) -> bool:
        """As many Sentinels as a failover needs name the primary."""
        return self.told is not None and self._support() >= self.told.needed

    def others(self) -> dict[Address, None]:
        """The addresses of all Sentinels that some Sentinel knows, each once."""
        return dict.fromkeys(other for each in self._answers for other in each.others)

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
        later = [each for each in self._answers if each.asked_at >= self._doubted_at]
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
