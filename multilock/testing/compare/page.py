"""Make ``report.html``, which shows a report and its history, and a picture of them to share.

The page shows neither a score nor a winner: no common unit compares a failure after a pause with one after a partition.
A cell of its grid is one contestant (a lock to be judged) in one scenario (a fault). A control is a contestant that is
known to be weak.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from multilock.testing.compare import summary
from multilock.testing.compare.charts import Plot, Timeline, ecdf, scatter, strip, timeline_of, trend
from multilock.testing.compare.history import Event
from multilock.testing.compare.report import Cycle, Gathered, Measured, Report
from multilock.testing.compare.scenarios import SCENARIOS
from multilock.testing.compare.summary import describe, face_of
from multilock.testing.render import render

__all__ = ["Shown", "card", "page", "shown", "worst_of"]

LOOKS = 8
ACQUIRES, DISTURBED, PINGS = 0, -2, -1  # colour numbers of `charts.scatter`
# The capabilities that matter to a user who chooses a backend; report.json has the others.
TOLD = {
    "fencing": "fencing tokens", "fencing_scope": "they grow within", "fair": "served in order of arrival",
    "cross_host": "for several hosts", "survives_failover": "survives a failover", "push_wait": "waiters are notified",
    "push_loss": "holders are notified of a loss",
}  # fmt: skip


def page(report: Report, evidence: Gathered) -> str:
    """Return the page."""
    return render("page.html.j2", page=_Page(report, evidence), data=report.data)


@dataclass(frozen=True, slots=True)
class GridCell:
    """A cell of the grid. ``kind`` is that of `summary.Mark`; ``cycle`` is the number of the shown cycle, or None."""

    kind: str
    count: str
    overlap: str
    below: str
    cycle: int | None
    says: str


@dataclass(frozen=True, slots=True)
class Shown:
    """A cycle on the page."""

    who: str
    control: bool
    scenario: str
    ttl: float
    cycle: Cycle
    timeline: Timeline

    @property
    def number(self) -> int:
        """The number of the cycle."""
        return int(self.cycle.events[0]["cycle"])

    @property
    def face(self) -> str:
        """The API of multilock ("blocking" or "asyncio"), or the name of another adapter."""
        return face_of(str(self.cycle.events[0]["adapter"]))

    @property
    def outcome(self) -> str:
        """The verdict of the cycle."""
        return self.cycle.verdict.outcome

    @property
    def why(self) -> str:
        """The reasons of the verdict."""
        return "; ".join(self.cycle.verdict.why)

    @property
    def apart(self) -> str:
        """The time between the beliefs of A and B that they held the lock."""
        gap = self.cycle.gap
        if gap is None:
            return ""
        if gap.seconds < 0:
            allowed = "" if self.outcome == "broken" else ", which is allowed until A is notified"
            return f"both believed for {_ms(-gap.seconds)}{allowed}" if gap.of == "belief" else ""
        return f"B began {_ms(gap.seconds)} after {GAPS[gap.of]}"

    @property
    def told(self) -> list[tuple[float, str, str, str]]:
        """The events, except repeated beliefs. Each has its time in ttls, its role, its kind, and its other values."""
        zero = self.cycle.events[0]["at"]
        return [
            (
                (_begins(event) - zero) / self.ttl,
                str(event.get("id", event.get("kind", ""))),
                event["what"],
                _rest(event),
            )
            for event in sorted(self.cycle.events, key=_begins)
            if event["what"] not in ("held", "valid", "ttl", "stall")
        ]


GAPS = {
    "belief": "A last believed",
    "lease": "A's lease had ended",
    "release": "A released it",
    "kill": "A was killed",
}
HIDDEN = ("cycle", "what", "at", "id", "pid", "seed", "name", "kind")


def _begins(event: Event) -> float:
    return float(event["at"] if "at" in event else event.get("until", 0.0))


def _rest(event: Event) -> str:
    return ", ".join(f"{key} {json.dumps(value)}" for key, value in event.items() if key not in HIDDEN)


def worst_of(cells: Iterable[tuple[tuple[str, str], Cycle]]) -> tuple[tuple[str, str], Cycle] | None:
    """Return the worst cycle, or None if there are no cycles."""
    return max(cells, key=lambda cell: cell[1].badness, default=None)


def shown(key: tuple[str, str], cycle: Cycle, *, control: bool) -> Shown:
    """Return a cycle as the page shows it. ``key`` is contestant and scenario."""
    return Shown(key[0], control, key[1], float(cycle.events[0]["ttl"]), cycle, timeline_of(cycle))


class _Page:
    """The values that the page's template uses."""

    def __init__(self, report: Report, evidence: Gathered) -> None:
        self.report, self.evidence = report, evidence
        data = report.data
        self.columns = sorted(data["columns"], key=lambda column: bool(column["control"]))
        self.ours = [column["name"] for column in self.columns if not column["control"]]
        self.controls = [column for column in self.columns if column["control"]]
        self.looks = {column["name"]: number % LOOKS for number, column in enumerate(self.columns)}
        self.says = {each["name"]: each["says"] for each in data["scenarios"]}
        self.end = evidence.end - evidence.begin if evidence.ran else 1.0

    # ---- the verdicts

    @property
    def headline(self) -> str:
        said = summary.headline(self.report)
        return said[:1].upper() + said[1:] + "."

    @property
    def notes(self) -> list[tuple[str, str]]:
        report = self.report
        shown = {*report.violations, *(f"{lead}: {line}" for lead in ("VOID", "not shown") for line in report.void)}
        return [(text, kind) for text, kind in summary.notes(report) if text not in shown]

    def grid(self, *, controls: bool) -> tuple[list[str], list[tuple[str, str, list[GridCell]]]]:
        """Return the names of the columns, and for each fault its name, its description and its cells."""
        cells = self.report.cells
        names = [
            column["name"]
            for column in self.columns
            if bool(column["control"]) is controls and any(who == column["name"] for who, _ in cells)
        ]
        rows = [
            (name, says, [self._cell(cells.get((who, name))) for who in names])
            for name, says in self.says.items()
            if any((who, name) in cells for who in names)
        ]
        return names, rows

    def _cell(self, cell: dict[str, Any] | None) -> GridCell:
        if cell is None:
            return GridCell("absent", "–", "", "", None, "not applicable")
        shown = self.evidence.worst.get((cell["contestant"], cell["scenario"]))
        number = None if shown is None else int(shown.events[0]["cycle"])
        worst = cell["overlap_worst"]
        overlap = _ms(worst) if cell["broken"] and worst is not None and worst > 0 else ""
        if not cell["decided"]:
            return GridCell("undecided", f"0 of {cell['cycles']}", "", "", number, "undecided")
        below = "" if cell["below"] is None else f"< {cell['below'] * 100:.2g} %"
        return GridCell(
            cell["verdict"], f"{cell['broken']} of {cell['decided']}", overlap, below, number, cell["verdict"]
        )

    def control_rows(self) -> Iterator[tuple[str, str, GridCell, bool]]:
        """Yield each control with a fault of this run in which it must fail, the cell, and whether it failed."""
        cells = self.report.cells
        for column in self.controls:
            for scenario in (each for each in self.says if each in column["must_fail"]):
                cell = cells.get((column["name"], scenario))
                yield column["name"], scenario, self._cell(cell), cell is not None and cell["verdict"] == "broken"

    # ---- the worst cycles

    def faults(self) -> Iterator[tuple[str, str, list[Shown], list[Shown]]]:
        """Yield for each fault: its name, its description, the worst cycle of multilock's locks and that of the
        controls, and the worst cycles of the other contestants."""
        for name, says in self.says.items():
            mine = {key: cycle for key, cycle in self.evidence.worst.items() if key[1] == name}
            if not mine:
                continue
            first = [
                found
                for control in (False, True)
                if (found := worst_of(each for each in mine.items() if (each[0][0] not in self.ours) is control))
            ]
            rest = [(key, mine[key]) for who in self.looks if (key := (who, name)) in mine and key not in dict(first)]
            yield name, says, [self._shown(*each) for each in first], [self._shown(*each) for each in rest]

    def _shown(self, key: tuple[str, str], cycle: Cycle) -> Shown:
        return shown(key, cycle, control=key[0] not in self.ours)

    # ---- notice and takeover

    def ecdfs(self) -> list[Plot]:
        found = self.evidence
        plots = []
        for title, samples in (
            ("Notice: from the fault until the holder knows", found.notice),
            ("Takeover: from the fault until the next one holds", found.takeover),
        ):
            rows = [(self.looks[who], who, samples[who]) for who in self.ours if samples.get(who)]
            if rows:
                plots.append(ecdf(title, "ttl after the beginning of the fault", rows))
        return plots

    def delays(self) -> Iterator[tuple[str, int, list[tuple[int, float, float, float] | None]]]:
        """Yield a row for each contestant that is not a control: its name, its style, and the spreads of notice and of
        takeover. A spread is the number of samples, their p50, p99 and maximum, or None without samples."""
        for who in self.ours:
            rows = [_spread(self.evidence.notice.get(who, [])), _spread(self.evidence.takeover.get(who, []))]
            if any(rows):
                yield who, self.looks[who], rows

    # ---- costs

    def latencies(self) -> Iterator[tuple[str, Plot | None, list[Plot]]]:
        """Yield for each contestant that is not a control: its name, the chart of its acquires over the run, and the
        charts of its separate measurements."""
        found = self.evidence
        seconds = [
            value
            for who in self.ours
            for points in (found.acquires.get(who, []), found.disturbed.get(who, []))
            for _, value in points
        ]
        seconds += [value for each in found.measured for points in (each.pairs, each.pings) for _, value in points]
        if not seconds:
            return
        low, high = max(min(seconds), 1e-6), max(seconds)
        for who in self.ours:
            free, hit = self._since(found.acquires.get(who, [])), self._since(found.disturbed.get(who, []))
            over_run = None
            if free or hit:
                over_run = scatter(
                    "while its faults happen", "seconds since the run began",
                    [(self.looks[who], "acquire", free), (DISTURBED, "acquire, hit by the fault", hit)],
                    bands=self._spans(found.faults.get(who, [])), end=self.end, low=low, high=high,
                )  # fmt: skip
            mine = [each for each in found.measured if each.header["contestant"] == who]
            alone = [self._alone(each, low, high) for each in sorted(mine, key=_face, reverse=True)]
            if over_run or alone:
                yield who, over_run, alone

    def _alone(self, measured: Measured, low: float, high: float) -> Plot:
        who = measured.header["contestant"]
        end = max((at for at, _ in (*measured.pairs, *measured.pings)), default=1.0)
        return scatter(
            f"alone, {_face(measured)}", "seconds since it began",
            [(PINGS, "ping", measured.pings), (self.looks[who], "acquire + release", measured.pairs)],
            bands=measured.faults, end=end, low=low, high=high,
        )  # fmt: skip

    def _since(self, points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
        return [(at - self.evidence.begin, value) for at, value in points]

    def _spans(self, spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
        return [(start - self.evidence.begin, until - self.evidence.begin) for start, until in spans]

    def costs(self) -> Iterator[dict[str, Any]]:
        rows = [self._load(row) for row in self.report.data["loads"] if row["kind"] == "cost"]
        yield from sorted(rows, key=lambda row: (self.order(row["contestant"]), row["face"] != "blocking"))

    def scales(self) -> list[dict[str, Any]]:
        rows = [self._load(row) for row in self.report.data["loads"] if row["kind"] == "scale"]
        return sorted(rows, key=lambda row: (self.order(row["contestant"]), row["face"] != "blocking"))

    def contentions(self) -> list[dict[str, Any]]:
        rows = [self._load(row) for row in self.report.data["loads"] if row["kind"] == "contention"]
        return sorted(
            rows, key=lambda row: (row["hold"], row["contenders"], row["face"], self.order(row["contestant"]))
        )

    def order(self, who: str) -> int:
        return list(self.looks).index(who)

    def _load(self, row: dict[str, Any]) -> dict[str, Any]:
        return {**row, "face": face_of(str(row["adapter"])), "look": self.looks[row["contestant"]]}

    def trends(self) -> Iterator[tuple[str, list[Plot]]]:
        """Yield a title with two plots over the number of contenders: grants per second, and the p99 of the wait.

        There is one such pair for each API (blocking or asyncio) and each time for which the contenders hold the lock.
        """
        rows = [row for row in self.contentions() if row.get("wait")]
        for face, hold in dict.fromkeys(map(_way, rows)):
            mine = [row for row in rows if _way(row) == (face, hold)]
            title = f"{face}, each holds it for {hold * 1000:g} ms" if hold else f"{face}, released at once"
            samples: list[list[tuple[int, str, list[tuple[float, float]]]]] = [[], []]
            for who in sorted({row["contestant"] for row in mine}, key=self.order):
                its = [row for row in mine if row["contestant"] == who]
                samples[0].append((self.looks[who], who, [(row["contenders"], row["per_second"]) for row in its]))
                samples[1].append(
                    (self.looks[who], who, [(row["contenders"], row["wait"]["p99"] * 1000) for row in its])
                )
            yield (
                title,
                [
                    trend("Grants a second", "grants/s", samples[0]),
                    trend("p99 of the wait", "milliseconds", samples[1]),
                ],
            )

    # ---- the order of tokens

    def tokens(self) -> Iterator[tuple[str, int, int, tuple[int, int], str, str]]:
        """Yield for each contestant: its name, the number of its tokens, the number of tokens that did not grow, the
        numbers of accepted and refused fenced writes, and two strips.

        The first strip shows the tokens that grew, the second one those that did not.
        """
        for who in self.looks:
            if points := self.evidence.tokens.get(who):
                thin = self.end / 2000
                good = self._strip((at, at + thin) for at, fine in points if fine)
                bad = self._strip((at, at + 3 * thin) for at, fine in points if not fine)
                yield who, len(points), sum(not fine for _, fine in points), self._writes(who), good, bad

    def _writes(self, who: str) -> tuple[int, int]:
        cells = [cell for cell in self.report.data["cells"] if cell["contestant"] == who]
        return sum(cell.get("writes", 0) for cell in cells), sum(cell.get("writes_refused", 0) for cell in cells)

    def runs(self) -> Iterator[tuple[str, int, str]]:
        for who in self.looks:
            if spans := self.evidence.ran.get(who):
                yield who, len(spans), self._strip(spans)

    def _strip(self, spans: Iterable[tuple[float, float]]) -> str:
        return strip(self._spans(spans), self.end)

    # ---- the servers

    @property
    def servers(self) -> list[dict[str, Any]]:
        return [column for column in self.columns if not column["control"]]

    def facts(self) -> Iterator[tuple[str, list[str]]]:
        """Yield the rows of the table of servers, each with one fact."""
        servers = self.servers
        yield "address", [str(column["url"]) for column in servers]
        for label in dict.fromkeys(label for column in servers for label in column.get("versions") or {}):
            yield label, [str((column.get("versions") or {}).get(label, "–")) for column in servers]
        yield "faces", [self.faces(column) for column in servers]
        yield "ttl as granted", [f"{column['ttl']:g} s" for column in servers]
        yield "takeover within", [f"{column['bound']:.3g} s" for column in servers]
        for name, label in TOLD.items():
            said = [_said((column.get("capabilities") or {}).get(name, "–")) for column in servers]
            if any(each != "–" for each in said):
                yield label, said

    @property
    def machine(self) -> str:
        return describe(self.report.data["host"])

    def faces(self, column: dict[str, Any]) -> str:
        return ", ".join(face_of(str(path)) for path in column["adapters"])

    @property
    def sources(self) -> list[tuple[str, str, int, int, int]]:
        """Each contestant with each fault, and the lines of their worst cycle in the history."""
        return [
            (who, scenario, int(cycle.events[0]["cycle"]), cycle.first_line, cycle.last_line)
            for scenario in SCENARIOS
            for who in self.looks
            if (cycle := self.evidence.worst.get((who, scenario))) is not None
        ]


def _way(row: dict[str, Any]) -> tuple[str, float]:
    """Return the API (blocking or asyncio) and the seconds for which each contender holds the lock. Rows are grouped by
    these two. Locks of other libraries count as blocking."""
    return "asyncio" if row["face"] == "asyncio" else "blocking", row["hold"]


def _face(measured: Measured) -> str:
    return face_of(str(measured.header["adapter"]))


def _spread(values: list[float]) -> tuple[int, float, float, float] | None:
    known = sorted(values)
    if not known:
        return None
    return len(known), known[(len(known) - 1) // 2], known[-(len(known) // 100) - 1], known[-1]


def _said(value: object) -> str:
    return ("no", "yes")[value] if isinstance(value, bool) else str(value)


def _ms(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1000:.0f} ms" if seconds >= 0.01 else f"{seconds * 1000:.1f} ms"


# ---- ``--card FILE``: the grid and the worst cycles as one picture of 1200 × 630, to share

EDGE, TOP, HEAD, BOTTOM = 48.0, 118.0, 34.0, 438.0
NAMES = 150.0  # width of the names of the faults
WIDEST, HIGHEST = 112.0, 30.0
LETTER = 0.62  # the width of a letter, roughly, as a share of its size
MARKS = {"kept": "✓", "broken": "✗", "undecided": "?", "": "–"}


@dataclass(frozen=True, slots=True)
class Box:
    """One cell of the grid, in the picture."""

    x: float
    y: float
    kind: str
    sign: str
    text: str


def card(report: Report, evidence: Gathered) -> str:
    """Return the picture, as SVG."""
    names, rows = summary.grid(report)
    controls = {column["name"] for column in report.data["columns"] if column["control"]}
    width = min(WIDEST, (1200 - 2 * EDGE - NAMES) / max(1, len(names)))
    height = min(HIGHEST, (BOTTOM - TOP - HEAD) / max(1, len(rows)))
    boxes = [
        Box(
            EDGE + NAMES + column * width,
            TOP + HEAD + row * height,
            kind or "absent",
            MARKS[kind],
            _room(text, kind, width),
        )
        for row, (_, marks) in enumerate(rows)
        for column, (text, kind) in enumerate(marks)
    ]
    headline = summary.headline(report)
    return render(
        "card.svg.j2",
        data=report.data,
        headline=headline[:1].upper() + headline[1:],
        size=min(34.0, (1200 - 2 * EDGE) / (len(headline) * LETTER)),
        names=[(_cut(name, width - 8, 13), EDGE + NAMES + n * width, name in controls) for n, name in enumerate(names)],
        rows=[(name, TOP + HEAD + number * height) for number, (name, _) in enumerate(rows)],
        boxes=boxes,
        width=width,
        height=height,
        edge=EDGE,
        top=TOP,
        cycles=_cycles(report, evidence, controls),
    )


def _cycles(report: Report, evidence: Gathered, controls: set[str]) -> list[Shown]:
    """Return the worst cycle of our locks, and that of the controls.

    Faults after which the holder cannot be notified in time are left out if there are other faults.
    """
    found = []
    told = [each for each in evidence.worst.items() if SCENARIOS[each[0][1]].hears] or list(evidence.worst.items())
    for weak in (False, True):
        worst = worst_of(each for each in told if (each[0][0] in controls) is weak)
        if worst is not None:
            found.append(shown(*worst, control=weak))
    return found


def _room(text: str, kind: str, width: float) -> str:
    """Return the text beside the sign, as far as there is room for it."""
    if not kind or kind == "undecided":
        return ""
    short = text.partition(" ")[0]
    wanted = (text, short) if kind == "broken" else (short,)
    return next((each for each in wanted if (len(each) + 2) * 14 * LETTER < width - 6), "")


def _cut(text: str, width: float, size: float) -> str:
    most = max(1, int(width / (size * LETTER)))
    return text if len(text) <= most else f"{text[: most - 1]}…"
