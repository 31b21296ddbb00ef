"""Decide from the replies of the Sentinels which primary a client follows. This module does no I/O.

A reply contains an *epoch*, a number that each failover increases. A reply with a greater epoch counts at once, even if
only one Sentinel has sent it. A reply with a lower epoch, or with another primary and the same epoch, is doubtful. Such
a reply may come from a Sentinel that was cut off, from Sentinels that were set up anew, or from Sentinels that an
operator pointed to another primary. The client follows such a reply only at the end of a *doubt*. A doubt begins when
no counted reply names the followed primary, or when a counted reply names another primary with the same epoch. Then as
many Sentinels as a failover needs must name the new primary, and all Sentinels must have replied. If a Sentinel does
not reply, the client waits for `COUNTS_FOR` seconds, because that Sentinel may have led a failover.

A reply counts for at most `COUNTS_FOR` seconds. A reply no longer counts once the same Sentinel has sent another one,
or has not replied to a question. The model tests/models/sentinel.cpp tries every order of events.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from multilock_redis.slot_table import Address

__all__ = ["COUNTS_FOR", "Following", "Told"]

# Seconds for which a reply counts. If a Sentinel does not reply, a doubt ends only after this time. Sentinels exchange
# their state every 2 s, so by then the others know of a failover that this Sentinel has led.
COUNTS_FOR = 10.0
KNOWN_FOR = 600.0  # seconds for which a Sentinel is still asked after another Sentinel last named it


class Told(NamedTuple):
    """The reply of one Sentinel."""

    epoch: int  #: greater after each failover
    primary: Address
    facts: Mapping[str, str]
    id: str  #: the Sentinel's id, which changes when it is set up anew
    others: tuple[Address, ...]  #: the other Sentinels that this Sentinel knows
    place: Address  #: the address at which the Sentinel was reached; several Sentinels may share an address
    asked_at: float
    hidden: str = ""  #: the errors, if this Sentinel refuses to show its id or the other Sentinels

    @property
    def needed(self) -> int:
        """The number of Sentinels that must agree before a failover."""
        return max(int(self.facts.get("quorum", 1)), self.number // 2 + 1)

    @property
    def number(self) -> int:
        """The number of Sentinels that this Sentinel knows, itself included."""
        return int(self.facts.get("num-other-sentinels", 0)) + 1

    def agrees_with(self, other: Told) -> bool:
        """Return whether both replies name the same primary in the same epoch."""
        return (self.epoch, self.primary) == (other.epoch, other.primary)


class Following:
    """The counted replies, and the primary that the client follows. Only one thread at a time may use this object."""

    def __init__(self, sentinels: int) -> None:
        """``sentinels`` is the number of Sentinels in the URL."""
        self._sentinels = sentinels
        self.told: Told | None = None  #: the last reply that named the followed primary
        self.look_again = False  #: whether all Sentinels must be asked now; the thread that reads this flag clears it
        self._answers: list[Told] = []  # one reply for each Sentinel
        self._others: dict[Address, float] = {}  # address of a Sentinel -> when another Sentinel last named it
        self._doubted_at: float | None = None  # when the present doubt began

    def note(self, told: Told, own: bool, now: float) -> bool:
        """Count this reply. Returns True if the client follows the primary that the reply names.

        ``own`` is True if only one Sentinel is reached at the address ``told.place``.
        """
        earlier = [each for each in self._answers if each.id == told.id or (own and each.place == told.place)]
        if any(each.asked_at > told.asked_at for each in earlier):
            return self._follows(told)  # a later reply of that Sentinel was counted already
        self._others |= dict.fromkeys(told.others, now)
        self._others = {place: at for place, at in self._others.items() if now - at < KNOWN_FOR}
        counts = [each for each in self._answers if now - each.asked_at < COUNTS_FOR and each not in earlier]
        self._answers = [*counts, told]
        if not any(each.agrees_with(told) for each in earlier):
            self.look_again = not (self.told is None or self._follows(told))
        self._decide(told, now)
        return self._follows(told)

    def silent(self, place: Address) -> None:
        """Forget the earlier reply of the Sentinel at this address, because it did not answer the latest question."""
        self._answers = [each for each in self._answers if each.place != place]

    def is_agreed(self) -> bool:
        """Return whether as many Sentinels as a failover needs name the followed primary."""
        return self.told is not None and self._support() >= self.told.needed

    def others(self) -> list[Address]:
        """Return the addresses of the Sentinels that other Sentinels have named."""
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
            return  # a Sentinel that has not replied may know of a failover
        best = max(each.epoch for each in self._answers)
        named: defaultdict[Address, list[Told]] = defaultdict(list)
        for each in later:
            if each.epoch == best:
                named[each.primary].append(each)
        for those in named.values():
            if len(those) >= max(each.needed for each in those) and len(those) > support:
                self.told, self._doubted_at = those[-1], None
