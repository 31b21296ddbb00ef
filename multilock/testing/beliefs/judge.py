"""Decide whether two holders believed at the same time that they held one name: yes, no, or *undecided*.

`Record.overlaps` reports only certain violations. A case without a violation is not yet a success, because a process
that is frozen cannot record its beliefs. A case in which the end of a belief was not recorded is undecided.

Nothing here reads a clock.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from multilock.testing.beliefs.oracles import Belief

__all__ = ["Apart", "Outcome", "judge"]

Span = tuple[float, float]
"""From and to, in seconds on the clock of the beliefs."""


class Outcome(enum.StrEnum):
    """The verdict on one promise in one case."""

    KEPT = "kept"
    BROKEN = "broken"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class Apart:
    """The time between two beliefs.

    ``overlap`` is the number of seconds for which both were certainly believed. A negative number is the gap between
    the two beliefs, and nan means unknown.
    """

    outcome: Outcome
    overlap: float
    why: str = ""


def judge(
    one: Belief, other: Belief, *, frozen: Sequence[Span] = (), stalls: Iterable[Span] = (), killed: float = math.inf
) -> Apart:
    """Return whether ``one`` ended before ``other`` began.

    ``frozen``: when a fault kept the process of ``one`` from running. The process did nothing during that time. So if
    the record shows when its belief ended, the belief does not count for that time. ``stalls``: the stalls of the
    process of ``other``, which are the times in which it did not run. That process may have received the lock when a
    stall began, and could not record it then. ``killed``: when the process of ``one`` was killed.

    The belief ``one`` ends for certain when its process is killed, calls ``release()``, or receives False from
    ``is_held()``. A belief that was never confirmed does not count.
    """
    if not (one.confirmed and other.confirmed):
        return Apart(Outcome.UNDECIDED, math.nan, "one of the two never believed in it")
    until = min(one.until, killed)
    if until > other.began:
        return Apart(Outcome.BROKEN, until - other.began)
    over = min(killed, _or_never(one.release), _or_never(one.over_by))
    earliest = min([other.began, *(start for start, end in stalls if start < other.began <= end)])
    if over <= earliest:
        return Apart(Outcome.KEPT, over - earliest)
    if any(start <= earliest and other.began <= end for start, end in frozen) and over < math.inf:
        return Apart(Outcome.KEPT, 0.0, "the first one stood still, and knew when it continued")
    if over == math.inf:
        return Apart(Outcome.UNDECIDED, math.nan, "the end of the first holder's belief was not seen")
    if earliest < other.began:
        return Apart(Outcome.UNDECIDED, math.nan, "the second holder stood still as its belief began")
    unclear = "the first holder did not report its belief as the second holder began to believe"
    return Apart(Outcome.UNDECIDED, math.nan, unclear)


def _or_never(time: float | None) -> float:
    return math.inf if time is None else time
