"""Whether two holders of one name believed in it at the same time: yes, no, or *undecided*.

`Record.overlaps` calls out what is certain, and is silent about all else. Whoever counts how often nothing happened has
to know how often nothing could be seen: a process that did not run could not say what it believed meanwhile. Here
silence is never taken for a no.

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
"""From and to, on the clock of the beliefs."""


class Outcome(enum.StrEnum):
    """What became of one promise in one case."""

    KEPT = "kept"
    BROKEN = "broken"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class Apart:
    """How two beliefs lie to each other.

    ``overlap``: seconds for which both were certainly believed in; negative: they were apart by so much, nan: unknown.
    """

    outcome: Outcome
    overlap: float
    why: str = ""


def judge(
    one: Belief, other: Belief, *, frozen: Sequence[Span] = (), stalls: Iterable[Span] = (), killed: float = math.inf
) -> Apart:
    """Did ``one`` end before ``other`` began?

    ``frozen``: when a fault kept the process of ``one`` from running, which therefore did nothing; what it believes
    counts from when it runs again. ``stalls``: when the process of ``other`` did not run: it may have been given the
    lock at the beginning of one, and have been unable to say so. ``killed``: when the process of ``one`` was.

    A belief of ``one`` ends for certain when its process was killed, called ``release()``, or was told no. One that
    was never confirmed is nobody's.
    """
    if not (one.confirmed and other.confirmed):
        return Apart(Outcome.UNDECIDED, math.nan, "one of them never believed in it")
    until = min(one.until, killed)
    if until > other.began:
        return Apart(Outcome.BROKEN, until - other.began)
    over = min(killed, _or_never(one.release), _or_never(one.over_by))
    earliest = min([other.began, *(start for start, end in stalls if start < other.began <= end)])
    if over <= earliest:
        return Apart(Outcome.KEPT, over - earliest)
    if any(start <= earliest and other.began <= end for start, end in frozen) and over < math.inf:
        return Apart(Outcome.KEPT, 0.0, "the first one stood still, and knew when it went on")
    if over == math.inf:
        return Apart(Outcome.UNDECIDED, math.nan, "nobody saw the belief of the first one end")
    if earliest < other.began:
        return Apart(Outcome.UNDECIDED, math.nan, "the second one stood still as it began to believe")
    return Apart(Outcome.UNDECIDED, math.nan, "the first one did not say what it believed as the second began to")


def _or_never(time: float | None) -> float:
    return math.inf if time is None else time
