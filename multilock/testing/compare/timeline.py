"""A drawing of one cycle: what A, B and C believed, what A could prove, and when the fault was."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from multilock.testing.beliefs import Belief
from multilock.testing.compare.charts import Tick, percent
from multilock.testing.compare.evidence import Cycle
from multilock.testing.compare.history import Event, record_of

__all__ = ["Bar", "Point", "Timeline", "timeline_of"]

EDGE = 0.05  # of a ttl, before the first event and after the last
TICKS = 12  # the most ticks


@dataclass(frozen=True, slots=True)
class Bar:
    """A span of time. ``kind`` is belief-A, belief-B, belief-C, valid, fault, stall-A or stall-B.

    Or it is doubt (it may have believed), overlap (both believed, and a promise was broken) or together (both believed,
    but no promise was broken).
    """

    kind: str
    x: str
    width: str
    says: str


@dataclass(frozen=True, slots=True)
class Point:
    """A moment. ``kind`` is callback, release, kill or asks; ``who`` is the role."""

    kind: str
    who: str
    x: str
    says: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """The drawing. Positions are percentages of its width."""

    bars: list[Bar]
    points: list[Point]
    ticks: list[Tick]
    middle: str  #: the position at which the second one begins to believe
    fault: str  #: the position at which the fault begins
    anchor: str  #: of the name of the fault: "start", or "end" if there is too little room
    says: str


def timeline_of(cycle: Cycle) -> Timeline:
    """Return the drawing of a cycle. If nobody got the lock, it may have no bars."""
    return _Drawing(cycle).timeline()


class _Drawing:
    def __init__(self, cycle: Cycle) -> None:
        self.cycle, self.events = cycle, cycle.events
        self.header = self.events[0]
        self.ttl: float = float(self.header["ttl"])
        self.record = record_of(self.events)
        self.beliefs = {id: belief for id, belief in self.record.beliefs.items() if id in "ABC"}
        self.faults = self._of("fault")
        times = [*self._of("asking"), *self._of("got"), *self.faults, *self._of("over"), *self._of("release")]
        seen = [event["at"] for event in times] or [self.header["at"], self.events[-1]["at"]]
        first = min([belief.began for belief in self.beliefs.values()], default=min(seen))
        self.zero = first
        self.start = min([first, *(event["at"] for event in self.faults)], default=first) - EDGE * self.ttl
        self.end = max([*seen, *(event["until"] for event in self.faults)]) + EDGE * self.ttl

    def _of(self, what: str) -> list[Event]:
        return [event for event in self.events if event["what"] == what]

    def timeline(self) -> Timeline:
        b = self.beliefs.get("B")
        fault = self._share(self.faults[0]["at"]) if self.faults else 0.0
        return Timeline(
            bars=list(self._bars()),
            points=list(self._points()),
            ticks=list(self._ticks()),
            middle=self._x(b.began if b else self.start),
            fault=percent(fault),
            anchor="end" if fault > 0.7 else "start",
            says=self._says(),
        )

    def _share(self, at: float) -> float:
        return float((at - self.start) / (self.end - self.start))

    def _x(self, at: float) -> str:
        return percent(self._share(at))

    def _bar(self, kind: str, start: float, until: float, says: str) -> Bar:
        a, b = (min(1.0, max(0.0, self._share(each))) for each in (start, until))
        return Bar(kind, percent(a), percent(max(b - a, 0.0005)), f"{says}: {self._when(start)} to {self._when(until)}")

    def _when(self, at: float) -> str:
        return f"{(at - self.zero) / self.ttl:.3f} ttl"

    def _bars(self) -> Iterator[Bar]:
        for fault in self.faults:
            yield self._bar("fault", fault["at"], fault["until"], f"fault {fault['kind']}")
        processes = {belief.pid: "A" if id == "A" else "B" for id, belief in self.beliefs.items()}
        for stall in self._of("stall"):
            if stall["pid"] in processes and stall["until"] > self.start:
                who = processes[stall["pid"]]
                yield self._bar(f"stall-{who}", stall["at"], stall["until"], f"the process of {who} did not run")
        if (a := self.beliefs.get("A")) is not None:
            if (valid := self._valid_until(a)) is not None:
                yield self._bar("valid", a.began, valid, "the lease of A was valid, as its client counts")
            yield from self._overlap()
        for id, belief in self.beliefs.items():
            until = self._until(belief)
            yield self._bar(f"belief-{id}", belief.began, until, f"{id} believed")
            if belief.over_by is not None and belief.over_by > until:
                yield self._bar(f"doubt-{id}", until, belief.over_by, f"{id} may still have believed")

    def _until(self, belief: Belief) -> float:
        """Return the last yes of a belief, or its release if it was released."""
        if belief.over is None and belief.release is not None:
            return max(belief.release, belief.began)
        return max(belief.until, belief.began)

    def _valid_until(self, a: Belief) -> float | None:
        known = [event["until"] for event in self._of("valid") if event["id"] == "A"]
        if not known:
            return None
        return min(known[-1], a.release) if a.over is None and a.release is not None else float(known[-1])

    def _overlap(self) -> Iterator[Bar]:
        gap = self.cycle.gap
        if gap is not None and gap.seconds < 0 and gap.of == "belief":
            began = self.beliefs["B"].began
            kind = "overlap" if self.cycle.verdict.outcome == "broken" else "together"
            yield self._bar(kind, began, began - gap.seconds, "both believed")

    def _points(self) -> Iterator[Point]:
        for event in self._of("asking"):
            yield Point("asks", event["id"], self._x(event["at"]), f"{event['id']} asks: {self._when(event['at'])}")
        for id, belief in self.beliefs.items():
            for told, *_ in belief.losses:
                yield Point("callback", id, self._x(told), f"callback of {id}: {self._when(told)}")
            if belief.release is not None:
                yield Point("release", id, self._x(belief.release), f"{id} releases: {self._when(belief.release)}")
        for fault in self.faults:
            if fault["kind"] == "kill":
                yield Point("kill", "A", self._x(fault["until"]), f"A is killed: {self._when(fault['until'])}")

    def _ticks(self) -> Iterator[Tick]:
        low, high = ((each - self.zero) / self.ttl for each in (self.start, self.end))
        step = next(each for each in (0.25, 0.5, 1, 2, 5, 10, 50, 100, 1000, 1e9) if (high - low) / each <= TICKS)
        for number in range(math.ceil(low / step), math.floor(high / step) + 1):
            yield Tick(self._share(self.zero + number * step * self.ttl) * 100, f"{number * step:g}")

    def _says(self) -> str:
        said = []
        if (a := self.beliefs.get("A")) is not None:
            said.append(f"A believed from 0 to {self._when(self._until(a))}")
            if a.losses:
                said.append(f"its callback began at {self._when(a.losses[0][0])}")
        if (b := self.beliefs.get("B")) is not None:
            said.append(f"B believed from {self._when(b.began)}")
        for fault in self.faults:
            said.append(f"the fault lasted from {self._when(fault['at'])} to {self._when(fault['until'])}")
        return "; ".join(said) or "nobody got the lock"
