"""The positions of all points and lines in the page's charts and timelines. Markup and colours are in the templates.

A plot has a canvas of fixed size, which the browser scales to the column of the page. Positions on a timeline are in
percent of its width, so that stretching a timeline does not stretch its text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from multilock.testing.beliefs import Belief
from multilock.testing.compare.history import Event, record_of
from multilock.testing.compare.report import Cycle

__all__ = [
    "HEIGHT",
    "WIDTH",
    "Band",
    "Bar",
    "Mark",
    "Moment",
    "Plot",
    "Series",
    "Tick",
    "Timeline",
    "ecdf",
    "percent",
    "scatter",
    "strip",
    "timeline_of",
    "trend",
]

WIDTH, HEIGHT = 360.0, 208.0
LEFT, RIGHT, TOP, BOTTOM = 46.0, 10.0, 10.0, 34.0
GRAIN, COARSE = 4, 2  # positions are rounded to this fraction of a pixel; points at the same position are drawn once

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Tick:
    """A tick of an axis."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class Mark:
    """A point with a text."""

    x: float
    y: float
    text: str = ""


@dataclass(frozen=True, slots=True)
class Band:
    """A span of time behind the points."""

    x: float
    width: float


@dataclass(frozen=True, slots=True)
class Series:
    """The data of one colour in a chart. ``path`` is a line (``kind`` line) or many dots (dots), and ``marks`` are
    single points. ``look`` is the number of the colour."""

    look: int
    path: str = ""
    kind: str = "line"
    marks: Sequence[Mark] = ()


@dataclass(frozen=True, slots=True)
class Plot:
    """One chart. ``says`` is its text for readers who cannot see the chart."""

    title: str
    says: str
    x_label: str
    y_label: str
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]
    series: Sequence[Series] = ()
    bands: Sequence[Band] = field(default=())
    left: float = LEFT
    right: float = WIDTH - RIGHT
    top: float = TOP
    bottom: float = HEIGHT - BOTTOM
    width: float = WIDTH
    height: float = HEIGHT


Scale = Callable[[float], float]


def _linear(low: float, high: float, start: float, end: float) -> Scale:
    span = (high - low) or 1.0
    return lambda value: start + (value - low) / span * (end - start)


def _log(low: float, high: float, start: float, end: float) -> Scale:
    bottom, top = math.log10(low), math.log10(high)
    span = (top - bottom) or 1.0
    return lambda value: start + (math.log10(max(value, low)) - bottom) / span * (end - start)


def _steps(high: float, most: int = 6) -> list[float]:
    """Return round numbers from 0 to at least ``high``."""
    if not high > 0:
        return [0.0, 1.0]
    raw = high / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(each * power for each in (1, 2, 2.5, 5, 10) if each * power >= raw * 0.999)
    return [number * step for number in range(math.ceil(high / step - 1e-9) + 1)]


def _decades(low: float, high: float) -> list[float]:
    """Return the powers of ten around these values, at least two."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    return [10.0**power for power in range(first, max(last, first + 1) + 1)]


def _on_paper(value: float, grain: int = GRAIN) -> str:
    return f"{round(value * grain) / grain:g}"


def _dots(points: Iterable[Point], x: Scale, y: Scale) -> str:
    """Return all points as one path. Points at the same position are drawn once."""
    seen = {(_on_paper(x(a), COARSE), _on_paper(y(b), COARSE)): None for a, b in points}
    return "".join(f"M{a} {b}h0" for a, b in seen)


def _line(points: Iterable[Point], x: Scale, y: Scale) -> str:
    return "M" + "L".join(f"{_on_paper(x(a))} {_on_paper(y(b))}" for a, b in points)


def ecdf(title: str, x_label: str, samples: Sequence[tuple[int, str, Sequence[float]]]) -> Plot:
    """Return the chart of the share of cases up to each value. Each of ``samples`` is the number of a colour, a name
    and the values."""
    steps = _steps(max((max(values) for _, _, values in samples if values), default=1.0))
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    x, y = _linear(0, steps[-1], LEFT, right), _linear(0, 1, bottom, TOP)
    series = []
    for look, name, values in samples:
        known = sorted(max(0.0, value) for value in values)
        if not known:
            continue
        path, height = [f"M{_on_paper(x(0))} {_on_paper(y(0))}"], 0.0
        for number, value in enumerate(known, 1):
            if number == len(known) or _on_paper(x(known[number])) != _on_paper(x(value)):
                height = number / len(known)
                path.append(f"H{_on_paper(x(value))}V{_on_paper(y(height))}")
        series.append(Series(look, "".join(path), marks=[Mark(x(known[-1]), y(1.0), name)]))
    return Plot(
        title,
        f"{title}: "
        + "; ".join(f"{name}: {len(values)} cases, at most {max(values):.2f}" for _, name, values in samples if values),
        x_label, "share of cycles",
        [Tick(x(each), f"{each:g}") for each in steps], [Tick(y(each), f"{each:.0%}") for each in (0, 0.5, 1)],
        series,
    )  # fmt: skip


def scatter(
    title: str,
    x_label: str,
    samples: Sequence[tuple[int, str, Sequence[Point]]],
    *,
    bands: Sequence[Point] = (),
    end: float,
    low: float,
    high: float,
) -> Plot:
    """Return the chart of all points over time.

    The values are in milliseconds, on a logarithmic axis from ``low`` to ``high`` seconds. Plots with the same two
    limits can be compared.
    """
    decades, steps = _decades(low, high), _steps(end)
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    x, y = _linear(0, steps[-1], LEFT, right), _log(decades[0], decades[-1], bottom, TOP)
    return Plot(
        title,
        f"{title}: " + "; ".join(f"{name}: {len(points)} points" for _, name, points in samples if points),
        x_label, "milliseconds",
        [Tick(x(each), f"{each:g}") for each in steps], [Tick(y(each), f"{each * 1000:g}") for each in decades],
        [Series(look, _dots(points, x, y), "dots") for look, _, points in samples if points],
        [Band(x(start), x(until) - x(start)) for start, until in _merged(bands)],
    )  # fmt: skip


def trend(title: str, y_label: str, samples: Sequence[tuple[int, str, Sequence[Point]]]) -> Plot:
    """Return the chart of a value against the number of contenders. Both axes are logarithmic."""
    every = [point for _, _, points in samples for point in points]
    sizes = sorted({size for size, _ in every})
    values = [value for _, value in every if value > 0] or [1.0]
    decades = _decades(min(values), max(values))
    right, bottom = WIDTH - RIGHT - 14, HEIGHT - BOTTOM
    y = _log(decades[0], decades[-1], bottom, TOP)
    if len(sizes) > 1:
        x = _log(sizes[0], sizes[-1], LEFT + 14, right)
    else:
        x = _linear(0, 2 * max(sizes, default=1), LEFT + 14, right)
    series = []
    for look, name, points in samples:
        if points:
            placed = sorted(points)
            series.append(Series(look, _line(placed, x, y), marks=[Mark(x(a), y(b), name) for a, b in placed]))
    return Plot(
        title,
        f"{title}: "
        + "; ".join(
            f"{name}: " + ", ".join(f"{value:.4g} at {size:g}" for size, value in sorted(points))
            for _, name, points in samples
            if points
        ),
        "contenders", y_label,
        [Tick(x(each), f"{each:g}") for each in sizes], [Tick(y(each), f"{each:g}") for each in decades], series,
    )  # fmt: skip


STRIP_WIDTH = 720.0


def strip(points: Iterable[Point], end: float) -> str:
    """Return spans of time as one path of strokes, from 0 to ``end`` on `STRIP_WIDTH`. Touching spans merge."""
    x = _linear(0, end, 0, STRIP_WIDTH)
    return "".join(
        f"M{_on_paper(x(start))} 0H{_on_paper(max(x(until), x(start) + 1 / GRAIN))}" for start, until in _merged(points)
    )


def _merged(spans: Iterable[Point]) -> list[Point]:
    """Return the spans, after merging spans that overlap."""
    merged: list[Point] = []
    for start, until in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(until, merged[-1][1])
        else:
            merged.append((start, until))
    return merged


def percent(value: float) -> str:
    """Return a position on a timeline as a percentage. A value below 0 counts as 0, a value above 1 as 1."""
    return f"{min(1.0, max(0.0, value)) * 100:.3f}%"


# ---- a timeline of one cycle: when A, B and C believed that they held the lock, and when the fault was

EDGE = 0.05  # margin before the first event and after the last, as a share of a ttl
TICKS = 12  # the greatest number of ticks on an axis


@dataclass(frozen=True, slots=True)
class Bar:
    """A span of time. ``kind`` is belief-A, belief-B, belief-C, valid, fault, stall-A or stall-B.

    Further kinds are doubt (a contender may have believed that it held the lock), overlap (two contenders believed it
    at once, which broke a promise) and together (two believed it at once, which broke none).
    """

    kind: str
    x: str
    width: str
    says: str


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment. ``kind`` is callback, release, kill or asks; ``who`` is the role."""

    kind: str
    who: str
    x: str
    says: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """The timeline of one cycle. Positions are percentages of its width."""

    bars: list[Bar]
    points: list[Moment]
    ticks: list[Tick]
    middle: str  #: the position at which the second holder begins to believe
    fault: str  #: the position at which the fault begins
    anchor: str  #: text-anchor of the fault's name: "start", or "end" if the name has too little room
    says: str


def timeline_of(cycle: Cycle) -> Timeline:
    """Return the timeline of a cycle. If no contender got the lock, the timeline may have no bars."""
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
            yield from self._overlaps()
        for id, belief in self.beliefs.items():
            until = self._until(belief)
            yield self._bar(f"belief-{id}", belief.began, until, f"{id} believed")
            if belief.over_by is not None and belief.over_by > until:
                yield self._bar(f"doubt-{id}", until, belief.over_by, f"{id} may still have believed")

    def _until(self, belief: Belief) -> float:
        """Return the last confirmation of a belief, or its release if it was released."""
        if belief.over is None and belief.release is not None:
            return max(belief.release, belief.began)
        return max(belief.until, belief.began)

    def _valid_until(self, a: Belief) -> float | None:
        known = [event["until"] for event in self._of("valid") if event["id"] == "A"]
        if not known:
            return None
        return min(known[-1], a.release) if a.over is None and a.release is not None else float(known[-1])

    def _overlaps(self) -> Iterator[Bar]:
        """Yield a bar for each time in which two contenders believed at once that they held the lock."""
        gap = self.cycle.gap
        kind = "overlap" if self.cycle.verdict.outcome == "broken" else "together"
        if gap is not None and gap.seconds < 0 and gap.of == "belief":
            began = self.beliefs["B"].began
            yield self._bar(kind, began, began - gap.seconds, "both believed")
        for id in "AB":
            if (other := self.beliefs.get(id)) and (c := self.beliefs.get("C")):
                start, until = max(other.began, c.began), min(self._until(other), self._until(c))
                if start < until:
                    yield self._bar(kind, start, until, f"{id} and C both believed")

    def _points(self) -> Iterator[Moment]:
        for event in self._of("asking"):
            yield Moment("asks", event["id"], self._x(event["at"]), f"{event['id']} asks: {self._when(event['at'])}")
        for id, belief in self.beliefs.items():
            for told, *_ in belief.losses:
                yield Moment("callback", id, self._x(told), f"callback of {id}: {self._when(told)}")
            if belief.release is not None:
                yield Moment("release", id, self._x(belief.release), f"{id} releases: {self._when(belief.release)}")
        for fault in self.faults:
            if fault["kind"] == "kill":
                yield Moment("kill", "A", self._x(fault["until"]), f"A is killed: {self._when(fault['until'])}")

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
