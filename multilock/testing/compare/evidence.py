"""The parts of a history that a page shows, gathered in one pass: a long run has more events than fit in memory."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from multilock.testing.compare.history import Event, read_cycles, record_of
from multilock.testing.compare.report import HISTORY
from multilock.testing.compare.scenarios import SCENARIOS, tells_in_time
from multilock.testing.compare.verdicts import Verdict, judge_cycle

__all__ = ["Cycle", "Evidence", "Gap", "Measured", "gap_of", "gather"]

Point = tuple[float, float]
"""A time and a value, both in seconds."""
Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Cycle:
    """A cycle that is shown in full, and its place in the history."""

    events: list[Event]
    verdict: Verdict
    first_line: int
    last_line: int
    gap: Gap | None

    @property
    def badness(self) -> tuple[bool, bool, float, float]:
        """A key: the worst cycle has the greatest.

        Worst is a broken promise, then a lock that A lost without a release and that B had soonest afterwards, then the
        latest notice.
        """
        gap = self.gap or Gap(math.inf, "release")
        broken = self.verdict.outcome == "broken"
        return broken, gap.of != "release", -gap.seconds, _or_least(self.verdict.notice)


@dataclass(frozen=True, slots=True)
class Gap:
    """The time from the end of A's hold until B believed; negative if both believed for so long.

    ``of`` says what ended: A's ``belief`` (its last yes) or its ``lease`` (as its client counted), or both, by its
    ``release`` or a ``kill``.
    """

    seconds: float
    of: str


@dataclass(slots=True)
class Measured:
    """One measurement: acquire and release, and pings."""

    header: Event
    pairs: list[Point] = field(default_factory=list)
    pings: list[Point] = field(default_factory=list)
    faults: list[Span] = field(default_factory=list)


@dataclass(slots=True)
class Evidence:
    """The gathered data, by contestant; ``worst`` by contestant and scenario.

    Times are on the clock of the history, whose first and last are ``begin`` and ``end``.
    """

    history: str = HISTORY  #: the name of its file
    begin: float = math.inf
    end: float = -math.inf
    worst: dict[tuple[str, str], Cycle] = field(default_factory=dict)
    notice: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))  #: in ttl
    takeover: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))  #: in ttl
    acquires: dict[str, list[Point]] = field(default_factory=lambda: defaultdict(list))
    disturbed: dict[str, list[Point]] = field(default_factory=lambda: defaultdict(list))
    """Acquires during which the fault of their cycle happened."""
    faults: dict[str, list[Span]] = field(default_factory=lambda: defaultdict(list))
    ran: dict[str, list[Span]] = field(default_factory=lambda: defaultdict(list))
    tokens: dict[str, list[tuple[float, bool]]] = field(default_factory=lambda: defaultdict(list))
    """For each token: when it was granted, and whether it was greater than the previous one of the same name."""
    measured: list[Measured] = field(default_factory=list)

    def add(self, events: list[Event], first_line: int) -> None:
        """Add the next cycle or load of the history."""
        header = events[0]
        self.begin, self.end = min(self.begin, header["at"]), max(self.end, events[-1]["at"])
        if header["what"] == "load":
            self._add_load(events)
        else:
            self._add_cycle(events, first_line)

    def _add_cycle(self, events: list[Event], first_line: int) -> None:
        header, verdict = events[0], judge_cycle(events)
        who, scenario = header["contestant"], SCENARIOS[header["scenario"]]
        cycle = Cycle(events, verdict, first_line, first_line + len(events) - 1, gap_of(events))
        before = self.worst.get((who, scenario.name))
        if before is None or cycle.badness > before.badness:
            self.worst[who, scenario.name] = cycle
        self.ran[who].append((header["at"], events[-1]["at"]))
        if tells_in_time(scenario) and not math.isnan(verdict.notice):
            self.notice[who].append(verdict.notice / header["ttl"])
        if not math.isnan(verdict.takeover):
            self.takeover[who].append(verdict.takeover / header["ttl"])
        for event in events:
            if event["what"] == "fault":
                self.faults[who].append((event["at"], event["until"]))
        self._add_acquire(who, events, disturbed=scenario.when == "acquire")
        for _, beliefs in record_of(events).by_name():
            self.tokens[who] += _grown((belief.began, belief.token) for belief in beliefs)

    def _add_acquire(self, who: str, events: list[Event], *, disturbed: bool) -> None:
        """Add the acquire of A, for which the lock is free."""
        asked = next((each["at"] for each in events if each["what"] == "asking" and each["id"] == "A"), None)
        got = next((each["at"] for each in events if each["what"] == "got" and each["id"] == "A"), None)
        if asked is not None and got is not None:
            points = self.disturbed if disturbed else self.acquires
            points[who].append((asked, got - asked))

    def _add_load(self, events: list[Event]) -> None:
        header = events[0]
        self.ran[header["contestant"]].append((header["at"], events[-1]["at"]))
        given = (each for each in events if each["what"] in ("grant", "served"))
        grants = sorted((each for each in given if each["held"]), key=_at)
        self.tokens[header["contestant"]] += _grown((grant["at"], grant["token"]) for grant in grants)
        if not any(event["what"] == "spent" for event in events):
            return
        measured = Measured(header)
        for event in events:
            if event["what"] == "spent":
                at = event["at"] - header["at"]
                measured.pairs.append((at, event["acquire"] + event["release"]))
                if event["ping"] is not None:
                    measured.pings.append((at, event["ping"]))
            elif event["what"] == "fault":
                measured.faults.append((event["at"] - header["at"], event["until"] - header["at"]))
        self.measured.append(measured)


def gap_of(events: list[Event]) -> Gap | None:
    """Return the gap of a cycle. Returns None if A or B never held the lock, or if A got it after B."""
    beliefs = record_of(events).beliefs
    a, b = beliefs.get("A"), beliefs.get("B")
    if a is None or b is None or not (a.confirmed and b.confirmed) or a.began > b.began:
        return None
    if a.until > b.began:
        return Gap(b.began - min(a.until, max(b.until, b.began)), "belief")
    if (killed := next((each["until"] for each in events if each.get("kind") == "kill"), None)) is not None:
        return Gap(b.began - killed, "kill")
    if a.over is None and a.release is not None:
        return Gap(b.began - a.release, "release")
    valid = [event["until"] for event in events if event["what"] == "valid" and event["id"] == "A"]
    if not valid:
        return Gap(b.began - a.until, "belief")
    return Gap(b.began - min(valid[-1], math.inf if a.over_by is None else a.over_by), "lease")


def gather(history: Path) -> Evidence:
    """Gather a whole history."""
    evidence, line = Evidence(history.name), 1
    for events in read_cycles(history):
        evidence.add(events, line)
        line += len(events)
    return evidence


def _grown(given: Iterable[tuple[float, int | None]]) -> Iterator[tuple[float, bool]]:
    """Yield when each holder of a name got its token, and whether it was greater than the previous one."""
    before: int | None = None
    for at, token in given:
        if token is not None:
            yield at, before is None or token > before
        before = token


def _at(event: Event) -> float:
    return float(event["at"])


def _or_least(value: float) -> float:
    return -math.inf if math.isnan(value) else value
