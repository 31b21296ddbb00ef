"""Compute the verdict of a cycle from its events, and the verdict of a cell from its cycles.

A cycle is *kept* only if its fault took place, and every belief was seen to end before the next one began. It is
*broken* only if a violation is certain. Any other cycle is *undecided*, or *no fault*. A stall is a time in which a
process did not run. On a machine that is too busy, more cycles are undecided, but none gets a wrong verdict.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from typing import Any

from multilock.testing.beliefs import Apart, Belief, Outcome, Record, judge
from multilock.testing.beliefs.oracles import within
from multilock.testing.compare.history import Event, record_of
from multilock.testing.compare.scenarios import SCENARIOS, tells_in_time

__all__ = ["CycleVerdict", "cells_of", "judge_cycle"]

ROUNDED = 6  # decimal places of a time in seconds
UNSEEN = 0.05  # seconds that stalls too short to be recorded can add to the time between two events
# If a process has run for this time (in seconds) since a loss without a callback, the callback counts as missing.
TOLD_WITHIN = 0.25


@dataclass(frozen=True, slots=True)
class CycleVerdict:
    """The verdict of one cycle. Figures are in seconds; nan means that there is none."""

    cycle: int
    outcome: str  #: kept, broken, undecided, or no-fault
    why: tuple[str, ...]
    #: seconds for which two contenders believed at once; if negative, the gap between two beliefs
    overlap: float = math.nan
    notice: float = math.nan  #: seconds from the fault until A stopped believing
    takeover: float = math.nan  #: seconds from the fault until B believed
    margin: float = math.nan  #: seconds from A's callback until B believed
    tokens: tuple[int, ...] = ()
    regressions: int = 0  #: tokens that were not greater than the one before
    writes: int = 0  #: accepted writes with a token
    refused: int = 0  #: writes with a token that were refused, because a greater token was there before

    @property
    def decided(self) -> bool:
        """Whether the cycle was kept or broken."""
        return self.outcome in DECIDED


@dataclass
class _Cycle:
    """The events of a cycle, sorted."""

    events: list[Event]
    header: Event = field(init=False)
    end: Event = field(init=False)
    faults: list[Event] = field(init=False)
    record: Record = field(init=False)

    def __post_init__(self) -> None:
        self.header = self.events[0]
        self.end = self.events[-1]
        self.faults = [event for event in self.events if event["what"] == "fault"]
        self.record = record_of(self.events)

    @property
    def beliefs(self) -> list[Belief]:
        confirmed = [belief for belief in self.record.beliefs.values() if belief.confirmed]
        return sorted(confirmed, key=lambda belief: belief.began)

    @property
    def writes(self) -> list[Event]:
        return [event for event in self.events if event["what"] == "wrote"]

    def when(self, what: str, role: str) -> float | None:
        """Return when ``role`` first reported ``what``, or None if it never did."""
        return next((event["at"] for event in self.events if event["what"] == what and event["id"] == role), None)

    def spans(self, pid: int) -> list[tuple[float, float]]:
        """Return the times in which a fault kept this process from running."""
        scenario = SCENARIOS[self.header["scenario"]]
        if not scenario.freezes:
            return []
        return [(fault["at"], fault["until"]) for fault in self.faults if fault["pid"] == pid]

    def killed(self, pid: int) -> float:
        kills = [each["until"] for each in self.faults if each["kind"] == "kill" and each["pid"] == pid]
        return min(kills, default=math.inf)


def judge_cycle(events: list[Event]) -> CycleVerdict:
    """Return the verdict of one cycle, from its events in the history."""
    cycle = _Cycle(events)
    number = cycle.header["cycle"]
    scenario = SCENARIOS[cycle.header["scenario"]]
    a, b = cycle.record.beliefs.get("A"), cycle.record.beliefs.get("B")
    pairs = list(_apart(cycle, operator=not scenario.hears))
    told_before = tells_in_time(scenario)
    broken = [*_overlaps(pairs), *_others(cycle, told_before=told_before)]
    if not scenario.hears:
        broken += _deaf(cycle)
    overlap = max((apart.overlap for apart, _ in pairs if not math.isnan(apart.overlap)), default=math.nan)
    lost = a is None or a.release is None or a.over is not None  # False only if A released the lock before losing it
    at = cycle.faults[0]["at"] if cycle.faults else math.nan
    figures: dict[str, Any] = {
        "overlap": overlap,
        "notice": _since(at, a.over_by if a else None),
        "takeover": _since(at, b.began if b else None) if lost else math.nan,
        "margin": b.began - a.losses[0][0] if a and a.losses and b else math.nan,
        "tokens": tuple(belief.token for belief in cycle.beliefs if belief.token is not None),
        "regressions": sum(1 for _ in _regressions(cycle)),
        "writes": sum(event["taken"] for event in cycle.writes),
        "refused": sum(not event["taken"] for event in cycle.writes),
    }
    if broken:
        return CycleVerdict(number, "broken", tuple(broken), **figures)
    if not cycle.end["reached"]:
        return CycleVerdict(number, "undecided", (cycle.end["why"],), **figures)
    if not cycle.end["took_place"]:
        return CycleVerdict(number, "no-fault", ("the fault met nothing",), **figures)
    if scenario.when == "hold" and a is not None and (not a.confirmed or (a.over_by or math.inf) < at):
        return CycleVerdict(number, "no-fault", ("A had lost it before",), **figures)
    unclear = [apart.why for apart, _ in pairs if apart.outcome is Outcome.UNDECIDED]
    unclear += _unclear(cycle, told_before=told_before)
    if not scenario.hears and (a is None or a.over_by is None):
        unclear.append("A did not report that it was notified of it")
    if not unclear and len(cycle.beliefs) < 2:
        unclear = ["fewer than two contenders ever held it"]
    return CycleVerdict(number, "undecided" if unclear else "kept", tuple(unclear), **figures)


def _since(at: float, then: float | None) -> float:
    return math.nan if then is None else then - at


def _apart(cycle: _Cycle, *, operator: bool) -> Iterator[tuple[Apart, str]]:
    """Yield the comparison of each pair of holders.

    After a force release this yields nothing, because only the promise that `_deaf` checks still holds. On a slow
    network, the force release may have hit B too.
    """
    for one, other in () if operator else combinations(cycle.beliefs, 2):
        yield (
            judge(
                one,
                other,
                frozen=cycle.spans(one.pid),
                stalls=cycle.record.stalls[other.pid],
                killed=cycle.killed(one.pid),
            ),
            f"{one.id} and {other.id}",
        )


def _overlaps(pairs: Iterable[tuple[Apart, str]]) -> Iterator[str]:
    for apart, who in pairs:
        if apart.outcome is Outcome.BROKEN:
            yield f"{who} believed at the same time, for {apart.overlap * 1000:.1f} ms"


def _deaf(cycle: _Cycle) -> Iterator[str]:
    """Yield a violation if the holder believed for too long after a force release.

    Exclusion is not promised until the holder is notified of the force release. The holder must learn of it by its next
    renewal, or its lease must end.
    """
    a = cycle.record.beliefs.get("A")
    if a is not None and cycle.faults:
        late = a.until - cycle.faults[0]["until"] - cycle.header["bound"]
        if late > 0:
            yield f"A still believed {late * 1000:.0f} ms after the last moment at which it can have been its own"


def _others(cycle: _Cycle, *, told_before: bool) -> Iterator[str]:
    """Yield violations of the promises about tokens and callbacks."""
    yield from _regressions(cycle)
    values = Counter(event["value"] for event in cycle.writes if event["taken"])
    for value in (value for value, times in values.items() if times > 1):
        who = " and ".join(event["id"] for event in cycle.writes if event["taken"] and event["value"] == value)
        yield f"a fenced write was lost: {who} both wrote {value}, and the tokens let both in"
    for belief in cycle.record.beliefs.values():
        if belief.ended_well and belief.losses:
            yield f"{belief.id} released it, and was also notified of a loss"
        if len(belief.losses) > 1:
            yield f"{belief.id} was notified {len(belief.losses)} times of one loss"
        if _untold(cycle, belief):
            yield f"{belief.id} lost it, and was never notified"
        if told_before and (late := _told_late(cycle, belief)) is not None and not late[1]:
            yield f"{belief.id} was notified of its loss {late[0] * 1000:.0f} ms after the next one believed"


def _regressions(cycle: _Cycle) -> Iterator[str]:
    for one, other in pairwise(cycle.beliefs):
        if one.token is not None and other.token is not None and other.token <= one.token:
            yield f"token {other.token} of {other.id} came after {one.token} of {one.id}"


def _told_late(cycle: _Cycle, belief: Belief) -> tuple[float, bool] | None:
    """Return how long after the next grant a callback came, and whether a busy machine may be the reason."""
    following = [other for other in cycle.beliefs if other.began > belief.began]
    if not (belief.losses and following and belief.confirmed):
        return None
    told = belief.losses[0][0]
    late = told - following[0].began
    if late <= 0:
        return None
    # Only a stall after this time can have delayed the callback.
    since = min(belief.until, following[0].began) - cycle.header["ttl"]
    stood_still = any(end > since and start < told for start, end in cycle.record.stalls[belief.pid])
    return late, late <= UNSEEN or stood_still


def _untold(cycle: _Cycle, belief: Belief) -> bool | None:
    """Return whether a lease was certainly lost without a callback, although there was time for it.

    Returns None if no callback was recorded, but the process had too little time for one: it was paused, or released
    at once. A loss that is found by a release need not have a callback.
    """
    lost_at = belief.over_by
    if belief.losses or not belief.confirmed or lost_at is None or cycle.when("listens", belief.id) is None:
        return False
    closed = cycle.when("closed", belief.id)
    if closed is None:
        return None

    def ran(until: float) -> float:
        return until - lost_at - within(cycle.record.stalls[belief.pid], lost_at, until)

    enough = ran(closed if belief.release is None else belief.release) >= UNSEEN and ran(closed) >= TOLD_WITHIN
    return True if enough else None


def _unclear(cycle: _Cycle, *, told_before: bool) -> Iterator[str]:
    for belief in cycle.record.beliefs.values():
        if told_before and (late := _told_late(cycle, belief)) is not None and late[1]:
            yield f"the process of {belief.id} did not run as its callback was due"
        if _untold(cycle, belief) is None:
            yield f"{belief.id} lost it without notice, but there was too little time for a notice"
        if belief.id != "A" and belief.over is not None:  # A's late release took the lock, or the machine stood still
            yield f"{belief.id} lost it after {belief.over - belief.began:.3f} s, and no fault was meant for it"


# ---- cells


def cells_of(verdicts: Iterable[tuple[Event, CycleVerdict]]) -> list[dict[str, Any]]:
    """Return the cells of the grid, from the headers of all cycles and their verdicts."""
    cells: dict[tuple[str, str], list[tuple[Event, CycleVerdict]]] = defaultdict(list)
    for header, verdict in verdicts:
        cells[header["contestant"], header["scenario"]].append((header, verdict))
    return [_cell(*key, rows) for key, rows in sorted(cells.items())]


def _cell(contestant: str, scenario: str, rows: list[tuple[Event, CycleVerdict]]) -> dict[str, Any]:
    verdicts = [verdict for _, verdict in rows]
    count = {outcome: sum(each.outcome == outcome for each in verdicts) for outcome in OUTCOMES}
    decided = count["kept"] + count["broken"]
    overlaps = [(each.overlap, each.cycle) for each in verdicts if not math.isnan(each.overlap)]
    worst, worst_cycle = max(overlaps, default=(math.nan, None))
    ttl = rows[0][0]["ttl"]
    return {
        "contestant": contestant,
        "scenario": scenario,
        "verdict": "broken" if count["broken"] else "kept" if decided else "undecided",
        "cycles": len(rows),
        "decided": decided,
        **{outcome.replace("-", "_"): number for outcome, number in count.items()},
        "overlap_worst": _number(worst),
        "worst_cycle": worst_cycle,
        "below": _number(1 - 0.05 ** (1 / decided)) if decided and not count["broken"] else None,
        "violations": [{"cycle": each.cycle, "what": list(each.why)} for each in verdicts if each.outcome == "broken"],
        "not_decided": [
            {"cycle": each.cycle, "why": list(each.why)} for each in verdicts if each.outcome in OUTCOMES[2:]
        ],
        "ttl": ttl,
        "notice": _spread([each.notice / ttl for each in verdicts]),
        "takeover": _spread([each.takeover / ttl for each in verdicts]),
        "callback_margin": _spread([each.margin / ttl for each in verdicts]),
        "tokens": sum(len(each.tokens) for each in verdicts),
        "token_regressions": sum(each.regressions for each in verdicts),
        "writes": sum(each.writes for each in verdicts),
        "writes_refused": sum(each.refused for each in verdicts),
    }


DECIDED = ("kept", "broken")
OUTCOMES = (*DECIDED, "undecided", "no-fault")


def _spread(values: Iterable[float]) -> dict[str, float | int | None] | None:
    """Return the distribution, in units of the ttl. A mean is left out, because no user waits for the mean."""
    known = sorted(value for value in values if not math.isnan(value))
    if not known:
        return None
    return {
        "n": len(known),
        "least": _number(known[0]),
        "p50": _number(known[(len(known) - 1) // 2]),
        "p99": _number(known[math.ceil(0.99 * len(known)) - 1]),
        "most": _number(known[-1]),
    }


def _number(value: float) -> float | None:
    return None if math.isnan(value) or math.isinf(value) else round(value, ROUNDED)
