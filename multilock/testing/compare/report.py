"""The result of a comparison: `Report`, as data and as files. A report can be judged again from the history of its run.

`gather` collects from the history the data that a page shows. A cell is one contestant (a lock to be judged) in one
scenario (a fault). A control is a contestant that is known to be weak.

``report.json`` follows ``report.schema.json`` in this folder, and its field ``schema`` is the version of that schema.
An addition keeps the version, any other change increases it.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from multilock import ConfigurationError
from multilock.testing.compare.history import HISTORY, Event, read_cycles, record_of
from multilock.testing.compare.loads import rows_of
from multilock.testing.compare.scenarios import SCENARIOS, tells_in_time
from multilock.testing.compare.verdicts import CycleVerdict, cells_of, judge_cycle

__all__ = [
    "HISTORY",
    "REPORT",
    "SCHEMA",
    "Cycle",
    "Gap",
    "Gathered",
    "Measured",
    "Report",
    "conclude",
    "gap_of",
    "gather",
    "history_of",
    "pieces_of",
    "read_report",
    "verify",
    "write_whole",
]

SCHEMA = 1
REPORT = "report.json"
LATER = frozenset({"writes", "writes_refused", "token_regressions"})  # keys of a row that the first reports lack
GREEN, VIOLATION, VOID, UNREACHABLE = 0, 1, 3, 69
DECIDED_SHARE = 0.5  # the run is void if a contestant that is not a control has a smaller share of decided cycles


@dataclass(frozen=True, slots=True)
class Report:
    """A report. ``data`` is the content of report.json."""

    data: dict[str, Any]

    @property
    def cells(self) -> dict[tuple[str, str], dict[str, Any]]:
        """The cells, by contestant and scenario."""
        return {(cell["contestant"], cell["scenario"]): cell for cell in self.data["cells"]}

    @property
    def violations(self) -> list[str]:
        """The violations of all contestants that are not controls."""
        return list(self.data["violations"])

    @property
    def void(self) -> list[str]:
        """The reason why the run proves nothing. Empty if it proves something."""
        return list(self.data["void"])

    @property
    def exit_code(self) -> int:
        """0: no promise was broken. 1: a promise was broken. 3: the report is void. 69: no server could be reached."""
        return int(self.data["exit_code"])

    def write(self, folder: Path) -> None:
        """Write ``report.json`` into this folder."""
        write_whole(folder / REPORT, json.dumps(self.data, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write a file. If the write is interrupted or the disk is full, the old file stays as it was."""
    path = path.resolve()
    if path.exists() and not path.is_file():  # a pipe or a terminal cannot be replaced
        path.write_text(text, encoding="utf-8")
        return
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def conclude(
    columns: list[dict[str, Any]], cells: list[dict[str, Any]], loads: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    """Judge a run as a whole. Returns three fields of the report: ``violations`` (broken promises), ``void`` (why the
    run proves nothing) and ``exit_code``.

    ``columns`` are the contestants, and ``loads`` the rows of the measurements under contention.
    """
    loads = loads or []
    controls = {column["name"] for column in columns if column["control"]}
    violations = [*_violations(columns, cells, controls), *_under_load(loads, controls)]
    void = list(_void(columns, cells, controls)) if cells or not loads else []
    ours = [column for column in columns if not column["control"]]
    if violations:
        code = VIOLATION
    elif ours and all(column["gone"] for column in ours) and not cells and not loads:
        code = UNREACHABLE
    else:
        code = VOID if void else GREEN
    return {"violations": violations, "void": void, "exit_code": code}


def _violations(columns: list[dict[str, Any]], cells: list[dict[str, Any]], controls: set[str]) -> Iterator[str]:
    for cell in cells:
        if cell["contestant"] not in controls:
            for broken in cell["violations"]:
                what = "; ".join(broken["what"])
                yield f"{cell['contestant']}, {cell['scenario']}, cycle {broken['cycle']}: {what}"
    for column in columns:
        if column["leftovers"]:  # locks of a control count too, because the comparison left them
            yield f"{column['name']}: left behind {', '.join(column['leftovers'])}"


def _under_load(loads: list[dict[str, Any]], controls: set[str]) -> Iterator[str]:
    for row in loads:
        if row["contestant"] not in controls:
            for what in row["violations"]:
                yield f"{row['contestant']}, {row['contenders']} contenders: {what}"


def _void(columns: list[dict[str, Any]], cells: list[dict[str, Any]], controls: set[str]) -> Iterator[str]:
    by_key = {(cell["contestant"], cell["scenario"]): cell for cell in cells}
    asked = {cell["scenario"] for cell in cells}
    present = {column["url"] for column in columns if not column["gone"]}
    for column in columns:
        if column["url"] not in present:
            continue
        for scenario in sorted(asked & set(column["must_fail"])):
            cell = by_key.get((column["name"], scenario))
            if cell is None or cell["verdict"] != "broken":
                yield f"the control {column['name']} did not fail in {scenario!r}: there the others have shown nothing"
    if not cells:
        yield "no cycle was run"
    for name in sorted({cell["contestant"] for cell in cells} - controls):
        its = [cell for cell in cells if cell["contestant"] == name]
        cycles, decided = (sum(cell[key] for cell in its) for key in ("cycles", "decided"))
        if decided < DECIDED_SHARE * cycles:
            yield f"{name}: only {decided} of {cycles} cycles could be decided"
            continue
        for cell in its:
            if not cell["decided"]:
                yield f"{name}, {cell['scenario']}: none of {cell['cycles']} cycles could be decided"


def pieces_of(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the pieces of a run, the parts between its interruptions. A report without pieces is one piece."""
    whole = {key: data[key] for key in ("made_at", "seconds", "command")}
    return list(data.get("pieces", [{**whole, "cycles": sum(cell["cycles"] for cell in data["cells"])}]))


def read_report(path: Path) -> Report:
    """Read a report from its file or folder. Raises ConfigurationError if it is missing or of an unknown version."""
    file = path / REPORT if path.is_dir() else path
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"cannot read {file}: {error.strerror}") from error
    except ValueError:
        raise ConfigurationError(f"{file} is not a report: it is not JSON") from None
    version = data.get("schema") if isinstance(data, dict) else None
    if version != SCHEMA:
        raise ConfigurationError(f"{file} has schema {version!r}, and this multilock reads {SCHEMA}")
    return Report(data)


def history_of(folder: Path) -> Path:
    """Return the path of the history in this folder. It may be compressed."""
    compressed = folder / f"{HISTORY}.gz"
    return compressed if compressed.exists() and not (folder / HISTORY).exists() else folder / HISTORY


def verify(folder: Path) -> list[str]:
    """Judge every cycle of the history again. Returns each difference from the report, in words."""
    told = read_report(folder).data
    history = history_of(folder)
    try:
        cycles, loads = [], []
        for events in read_cycles(history):
            if events[0]["what"] == "load":
                loads += rows_of([events])
            else:
                cycles.append((events[0], judge_cycle(events)))
        cells = json.loads(json.dumps(cells_of(cycles)))
        loads = json.loads(json.dumps(loads))
        again = {"cells": cells, "loads": loads, **conclude(told["columns"], cells, loads)}
        if len(cycles) != (said := sum(piece["cycles"] for piece in pieces_of(told))):
            return [f"the report has {said} cycles in its pieces, but the history has {len(cycles)}"]
        return [
            *_row_differences(told["cells"], cells, lambda cell: f"{cell['contestant']}, {cell['scenario']}"),
            *_row_differences(told["loads"], loads, lambda load: f"load {load['cycle']}"),
            *_differences("report", told, again, again.keys() - {"cells", "loads"}),
        ]
    except OSError as error:
        raise ConfigurationError(f"cannot read {history}: {error.strerror or error}") from error
    except (ValueError, LookupError, TypeError, AttributeError, EOFError, zlib.error) as error:
        return [f"{history.name} and {REPORT} cannot be judged ({type(error).__name__}: {error})"]


def _row_differences(
    told: list[dict[str, Any]], again: list[dict[str, Any]], name: Callable[[dict[str, Any]], str]
) -> Iterator[str]:
    """Yield the differences, row by row. An older report may lack the figures in ``LATER``."""
    old, new = ({name(row): row for row in rows} for rows in (told, again))
    for each in sorted(old.keys() | new.keys()):
        if each not in old or each not in new:
            yield f"{each}: only in the {'report' if each in old else 'history'}"
        else:
            keys = old[each].keys() | new[each].keys() - (LATER - old[each].keys())
            yield from _differences(each, old[each], new[each], keys)


def _differences(where: str, told: dict[str, Any], again: dict[str, Any], keys: Iterable[str]) -> Iterator[str]:
    for key in sorted(keys):
        if told.get(key) != again.get(key):
            yield f"{where}: {key} is {again.get(key)!r} by the history, but {told.get(key)!r} in the report"


# ---- the parts of a history that a page shows, because the events of a long run do not fit in memory

Point = tuple[float, float]
"""A time and a value, both in seconds."""
Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Cycle:
    """A cycle that is shown in full, and its lines in the history."""

    events: list[Event]
    verdict: CycleVerdict
    first_line: int
    last_line: int
    gap: Gap | None

    @property
    def badness(self) -> tuple[bool, bool, float, float]:
        """The key by which cycles are sorted: the worse the cycle, the greater the key.

        A broken promise is worst, then a lock that A lost, then the shortest gap between A and B, then the latest
        notice.
        """
        gap = self.gap or Gap(math.inf, "release")
        broken = self.verdict.outcome == "broken"
        return broken, gap.of != "release", -gap.seconds, _or_least(self.verdict.notice)


@dataclass(frozen=True, slots=True)
class Gap:
    """The time from the end of A's hold until B believed that it held the lock.

    The time is negative if A and B believed at once that they held the lock. ``of`` names the event that ended A's
    hold: ``belief`` is A's last is_held() that returned True, ``lease`` the end of the lease that A's client computed.
    """

    seconds: float
    of: str


@dataclass(slots=True)
class Measured:
    """The points of one load: when each acquire + release and each ping was made, and how many seconds it took."""

    header: Event
    pairs: list[Point] = field(default_factory=list)
    pings: list[Point] = field(default_factory=list)
    faults: list[Span] = field(default_factory=list)


@dataclass(slots=True)
class Gathered:
    """The data of a history that the page shows, by contestant. ``worst`` is by contestant and scenario.

    ``begin`` and ``end`` are the first and last time in the history.
    """

    history: str = HISTORY  #: the name of the history file
    begin: float = math.inf
    end: float = -math.inf
    worst: dict[tuple[str, str], Cycle] = field(default_factory=dict)
    notice: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))  #: delays in ttls
    takeover: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))  #: delays in ttls
    acquires: dict[str, list[Point]] = field(default_factory=lambda: defaultdict(list))
    disturbed: dict[str, list[Point]] = field(default_factory=lambda: defaultdict(list))
    """Acquires during which the fault of their cycle happened."""
    faults: dict[str, list[Span]] = field(default_factory=lambda: defaultdict(list))
    ran: dict[str, list[Span]] = field(default_factory=lambda: defaultdict(list))
    tokens: dict[str, list[tuple[float, bool]]] = field(default_factory=lambda: defaultdict(list))
    """For each token, the time of its grant, and whether the token was greater than the previous one of the same
    name."""
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
        """Add the acquire of A. The lock is free at that time."""
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
    """Return the gap of a cycle. Returns None if A or B never held the lock, or if A held it after B."""
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


def gather(history: Path) -> Gathered:
    """Gather a whole history."""
    evidence, line = Gathered(history.name), 1
    for events in read_cycles(history):
        evidence.add(events, line)
        line += len(events)
    return evidence


def _grown(given: Iterable[tuple[float, int | None]]) -> Iterator[tuple[float, bool]]:
    """Yield when each holder of a name got its token, and whether that token was greater than the previous one."""
    before: int | None = None
    for at, token in given:
        if token is not None:
            yield at, before is None or token > before
        before = token


def _at(event: Event) -> float:
    return float(event["at"])


def _or_least(value: float) -> float:
    return -math.inf if math.isnan(value) else value
