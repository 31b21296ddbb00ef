"""A report in few words: the grid of verdicts, the figures as tables, and the differences from an older report.

The texts fit a terminal, a document or a page. A cell of the grid is one contestant (a lock to be judged) in one
scenario (a fault). A control is a contestant that is known to be weak.
"""

from __future__ import annotations

import os
import platform
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multilock.testing.compare.report import VOID, Report, pieces_of
from multilock.testing.compare.scenarios import SCENARIOS, tells_in_time

__all__ = [
    "LEGEND",
    "Mark",
    "Table",
    "against",
    "aligned",
    "broken_off",
    "describe",
    "face_of",
    "figures",
    "grid",
    "headline",
    "host",
    "in_markdown",
    "markdown",
    "notes",
    "tables",
    "verdicts",
]

LEGEND = "broken/decided, and the worst overlap (negative: apart by so much); ? undecided, – not applicable"

Mark = tuple[str, str]
"""The text of a cell, and its kind: ``kept``, ``broken``, ``undecided``, or ``""`` if it does not exist."""


def headline(report: Report) -> str:
    """Return the result in one sentence."""
    kind = {0: "nothing was broken", 1: "a promise was broken", 3: "VOID: this run has shown nothing"}
    text = kind.get(report.exit_code, "no server could be reached")
    partial = report.data["partial"]
    decided = sum(cell["decided"] for cell in report.data["cells"])
    cycles = sum(cell["cycles"] for cell in report.data["cells"])
    if cycles:
        text += f"; {decided} of {cycles} cycles decided, {report.data['planned']} planned"
    return f"{text}; partial: {partial}" if partial else text


def grid(report: Report) -> tuple[list[str], list[tuple[str, list[Mark]]]]:
    """Return the names of the columns, ours first, and for each scenario its marks."""
    columns = sorted(report.data["columns"], key=lambda column: bool(column["control"]))
    cells = report.cells
    names = [column["name"] for column in columns if any(contestant == column["name"] for contestant, _ in cells)]
    rows = []
    for scenario in report.data["scenarios"]:
        marks = [_mark(cells.get((name, scenario["name"]))) for name in names]
        if any(kind for _, kind in marks):
            rows.append((scenario["name"], marks))
    return names, rows


def _mark(cell: dict[str, Any] | None) -> Mark:
    if cell is None:
        return "–", ""
    if not cell["decided"]:
        return "?", "undecided"
    text = f"{cell['broken']}/{cell['decided']}"
    worst = cell["overlap_worst"]
    if worst is not None and (worst > 0 or not cell["broken"]):
        text += f" {_seconds(worst)}"
    return text, cell["verdict"]


def _seconds(value: float) -> str:
    if abs(value) >= 1:
        return f"{value:.1f}s"
    return f"{value * 1000:.0f}ms" if abs(value) >= 0.01 else f"{value * 1000:.1f}ms"


def notes(report: Report) -> Iterator[Mark]:
    """Yield the notes below the grid, the worst first."""
    for line in report.violations:
        yield line, "broken"
    for line in report.void:  # a violation counts even in a run that otherwise proves nothing
        yield (f"VOID: {line}", "broken") if report.exit_code == VOID else (f"not shown: {line}", "undecided")
    for column in report.data["columns"]:
        if column["gone"] and not column["control"]:
            yield f"{column['name']}: {column['gone']}", "undecided"
        elif set() < {each["name"] for each in report.data["scenarios"]} <= set(column["not_applicable"]):
            yield f"{column['name']}: none of these faults can happen to it", ""
    must_fail = {(each["name"], name) for each in report.data["columns"] for name in each.get("must_fail", ())}
    if report.data["cells"] and not must_fail & report.cells.keys():
        yield "no control ran that must fail in these faults: nothing has shown that a failure would have been seen", ""
    ours = {column["name"] for column in report.data["columns"] if not column["control"]}
    kept = [cell for cell in report.data["cells"] if cell["contestant"] in ours and cell["below"] is not None]
    if kept:
        least = min(kept, key=lambda cell: int(cell["decided"]))
        yield f"0/{least['decided']} means: below {least['below'] * 100:.2g} % with 95 %", ""


def _unknown(report: Report) -> Iterator[str]:
    """Yield for each cell that shows ``?`` the most frequent reason why its cycles are undecided."""
    for cell in report.data["cells"]:
        if not cell["decided"]:
            reasons = Counter("; ".join(each["why"]) for each in cell["not_decided"])
            for why, cycles in reasons.most_common(1):
                yield f"? {cell['contestant']}, {cell['scenario']}, {cycles} of {cell['cycles']} cycles: {why}"


def servers(report: Report) -> Iterator[tuple[str, str]]:
    """Yield the versions of server and client library of each contestant that is not a control."""
    for column in report.data["columns"]:
        its = column.get("versions") or {}
        if its and not column["control"]:
            yield column["name"], ", ".join(f"{what} {said}" for what, said in its.items())


def markdown(report: Report) -> str:
    """Return ``report.md``, for a document."""
    names, rows = grid(report)
    its, pieces = report.data["host"], pieces_of(report.data)
    made = f", run in {len(pieces)} pieces" if len(pieces) > 1 else ""
    lines = [
        f"# Lock backends compared, {report.data['made_at'][:10]}",
        "",
        f"{headline(report)}.",
        "",
    ]
    if rows:
        lines += [f"| fault | {' | '.join(names)} |", f"| --- |{' --- |' * len(names)}"]
    for scenario, marks in rows:
        cells = (f"**{text}**" if kind == "broken" else text for text, kind in marks)
        lines.append(f"| {scenario} | {' | '.join(cells)} |")
    if rows:
        lines += ["", f"{_upper(LEGEND)}.", ""]
    lines += [f"- {text}" for text, _ in notes(report)]
    lines += [f"- {text}" for text in _unknown(report)]
    for table in tables(report):
        said = "; ".join(filter(None, (table.title, table.note)))
        lines += ["", f"{_upper(said)}:", "", *in_markdown(table)]
    last = [*broken_off(report), *(f"{name}: {said}" for name, said in servers(report))]
    lines += ["", *(f"- {line}" for line in last)] if last else []
    lines += [
        "",
        f"multilock {report.data['multilock']}, Python {its['python']}, {describe(its)}, seed "
        f"{report.data['seed']}{made}. One host, one clock, short ttls: see report.json and history.jsonl.",
    ]
    return "\n".join(lines) + "\n"


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]


# ---- the machine on which a comparison ran

PROC = Path("/proc")
GIB = 2**30


def host(proc: Path = PROC) -> dict[str, Any]:
    """Return a description of this machine for the report. It has ``cpu`` (the model) and ``memory`` (bytes) only if
    ``proc`` shows them."""
    found: dict[str, Any] = {
        "system": platform.platform(), "python": platform.python_version(), "cores": os.cpu_count(),
        "machine": platform.machine(),
    }  # fmt: skip
    if cpu := _told(proc / "cpuinfo", r"model name\s*:\s*(.+)"):
        found["cpu"] = cpu
    if memory := _told(proc / "meminfo", r"MemTotal:\s*(\d+) kB"):
        found["memory"] = int(memory) * 1024
    return found


def describe(its: dict[str, Any]) -> str:
    """Return a description of the machine of a report, in words."""
    cpu = f" of {its['cpu']}" if "cpu" in its else ""
    memory = f", {its['memory'] / GIB:.1f} GiB of memory" if "memory" in its else ""
    return f"{its['system']}, {its['cores']} cores{cpu}{memory}"


def _told(file: Path, pattern: str) -> str:
    """Return the first match in the file, or an empty text."""
    try:
        found = re.search(f"^{pattern}$", file.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    except OSError:
        return ""
    return found[1].strip() if found else ""


# ---- the differences from an older report: verdicts, and how the figures changed

TO = "→"


def against(old: Report, new: Report) -> list[str]:
    """Return the differences from an older report: first the verdicts, cell by cell, then the figures."""
    return [*verdicts(old, new), *figures(old, new)]


def verdicts(old: Report, new: Report) -> Iterator[str]:
    """Yield one line for each cell whose verdict differs, and for each cell that only one report has."""
    for key in sorted(old.cells.keys() | new.cells.keys()):
        before, after = old.cells.get(key), new.cells.get(key)
        where = ", ".join(key)
        if before is None or after is None:
            yield f"{where}: {'new' if before is None else 'not in this run'}"
        elif before["verdict"] != after["verdict"]:
            yield f"{where}: {before['verdict']} {TO} {after['verdict']}"


def figures(old: Report, new: Report) -> Iterator[str]:
    """Yield one line for each difference in the figures.

    A contestant has a line if its server, library or findings differ. A cell has a line if its printed counts, worst
    overlap or latest notice differ. A cost has a line if its printed median differs.
    """
    for where, before, after in _pairs(_by_name(old), _by_name(new)):
        yield from _line(where, _of_column(before), _of_column(after))
    for where, before, after in _pairs(_cells(old), _cells(new)):
        yield from _line(where, _of_cell(before), _of_cell(after))
    for where, before, after in _pairs(_costs(old), _costs(new)):
        yield from _line(f"{where}, acquire and release", _of_cost(before), _of_cost(after))


Rows = dict[str, dict[str, Any]]


def _by_name(report: Report) -> Rows:
    return {column["name"]: column for column in report.data["columns"]}


def _cells(report: Report) -> Rows:
    return {", ".join(key): cell for key, cell in sorted(report.cells.items())}


def _costs(report: Report) -> Rows:
    return {
        f"{row['contestant']} {face_of(row['adapter'])}": row
        for row in report.data["loads"]
        if row["kind"] == "cost" and row.get("acquire_release")
    }


def _pairs(old: Rows, new: Rows) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yield the rows that both reports have."""
    for where in (each for each in old if each in new):
        yield where, old[where], new[where]


def _line(where: str, before: dict[str, str], after: dict[str, str]) -> Iterator[str]:
    names = (name for name in {**before, **after} if before.get(name) != after.get(name))
    differ = [f"{name} {before.get(name, '–')} {TO} {after.get(name, '–')}" for name in names]
    if differ:
        yield f"{where}: {', '.join(differ)}"


def _of_column(column: dict[str, Any]) -> dict[str, str]:
    found = {"finding " + each["code"]: each["level"] for each in column.get("findings") or ()}
    return {**(column.get("versions") or {}), **found}


def _of_cell(cell: dict[str, Any]) -> dict[str, str]:
    said = {"broken": f"{cell['broken']}/{cell['decided']}"}
    if cell["overlap_worst"] is not None:
        said["overlap"] = f"{cell['overlap_worst'] * 1000:.1f} ms"
    if cell["notice"]:
        said["known after"] = f"{cell['notice']['most']:.2f} ttl"
    return said


def _of_cost(row: dict[str, Any]) -> dict[str, str]:
    return {"p50": f"{row['acquire_release']['p50'] * 1000:.2f} ms"}


# ---- the figures of a report as rows: losses after faults, and each load

FACES = {"Blocking": "blocking", "Asyncio": "asyncio"}
NONE = "–"
BAR = "\\|"  # a bar inside a cell of Markdown

Row = Sequence[str]


@dataclass(frozen=True, slots=True)
class Table:
    """A table with one row for each measurement. ``title`` names the figures and their units."""

    title: str
    head: Row
    rows: Sequence[Row]
    note: str = ""


def tables(report: Report) -> Iterator[Table]:
    """Yield the tables that have rows."""
    names = [column["name"] for column in sorted(report.data["columns"], key=lambda each: bool(each["control"]))]
    loads = sorted(
        (row for row in report.data["loads"] if not row["why"]),
        key=lambda row: (row["hold"], row["contenders"], names.index(row["contestant"]), _face(row) == "asyncio"),
    )
    for table in (
        Table("after faults, in units of the ttl", LOST, list(_lost(report)), TOLD),
        Table("acquire and release of a free lock, ms", COST, list(_cost(loads))),
        Table("contention, ms as p50/p99/max", CONTENTION, list(_contention(loads)), CROWD),
        Table("many locks held by one client", SCALE, list(_scale(loads))),
    ):
        if table.rows:
            yield table


def broken_off(report: Report) -> Iterator[str]:
    """Yield one line for each load that ended early. The traceback is only in report.json."""
    for row in report.data["loads"]:
        if row["why"]:
            yield f"{_who(row)}: {row['kind']} broke off: {str(row['why']).strip().splitlines()[-1].strip()}"


def aligned(table: Table) -> Iterator[str]:
    """Yield the head and the rows, for a font of fixed width."""
    widths = [max(map(len, column)) for column in zip(table.head, *table.rows, strict=True)]
    for row in (table.head, *table.rows):
        first, *rest = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join([first.strip().ljust(widths[0]), *rest]).rstrip()


def in_markdown(table: Table) -> Iterator[str]:
    """Yield the head and the rows in Markdown."""
    yield f"| {' | '.join(table.head)} |"
    yield f"| --- |{' ---: |' * (len(table.head) - 1)}"
    for row in table.rows:
        yield f"| {' | '.join(cell.replace('|', BAR) for cell in row)} |"


def face_of(adapter: str) -> str:
    """Return "blocking" or "asyncio" for an adapter of multilock, and the name of any other adapter."""
    name = adapter.rpartition(":")[2]
    return FACES.get(name, name)


LOST = ("contestant", "ttl", "known after", "told before", "takeover", "tokens", "regressed", "writes", "late refused")
TOLD = "≤ from the fault until the holder knew, and until the next one held; ≥ from its callback until then"


def _lost(report: Report) -> Iterator[Row]:
    """Yield a row for each contestant that is not a control."""
    for column in report.data["columns"]:
        cells = [cell for cell in report.data["cells"] if cell["contestant"] == column["name"]]
        if column["control"] or not cells:
            continue
        lost = [cell for cell in cells if tells_in_time(SCENARIOS[cell["scenario"]])]
        known = [cell["notice"]["most"] for cell in lost if cell["notice"]]
        margins = [cell["callback_margin"]["least"] for cell in lost if cell["callback_margin"]]
        taken = [cell["takeover"]["most"] for cell in cells if cell["takeover"]]
        yield (
            column["name"],
            f"{column['ttl']:g} s",
            f"≤ {max(known):.2f}" if known else NONE,
            f"≥ {min(margins):.2f}" if margins else NONE,
            f"≤ {max(taken):.2f}" if taken else NONE,
            *(_sum(cells, name) for name in ("tokens", "token_regressions", "writes", "writes_refused")),
        )


def _sum(cells: Sequence[dict[str, Any]], name: str) -> str:
    known = [cell[name] for cell in cells if name in cell]
    return str(sum(known)) if known else NONE


COST = ("contestant", "p50", "p99", "max", "× ping")


def _cost(loads: Sequence[dict[str, Any]]) -> Iterator[Row]:
    for row in loads:
        if row["kind"] == "cost" and (spread := row["acquire_release"]):
            ping = row["times_ping"]
            yield _who(row), *map(_ms, _of(spread)), NONE if ping is None else f"{ping:.1f}"


CONTENTION = ("contestant", "waiters", "hold", "grants/s", "wait", "handover", "each", "none", "sends")
CROWD = "waiters/processes; each: of one waiter, least to most; none: so many got none; sends: for each grant"


def _contention(loads: Sequence[dict[str, Any]]) -> Iterator[Row]:
    for row in loads:
        if row["kind"] == "contention" and row["wait"]:
            yield (
                _who(row),
                f"{row['contenders']}/{row['processes']}",
                f"{row['hold'] * 1000:g}",
                f"{row['per_second']:.0f}",
                "/".join(map(_ms, _of(row["wait"]))),
                "/".join(map(_ms, _of(row["hand_over"]))) if row["hand_over"] else NONE,
                str(row["most"]) if row["contenders"] == 1 else f"{row['least']}-{row['most']}",
                str(row["starved"]),
                NONE if row.get("sends_per_grant") is None else f"{row['sends_per_grant']:.1f}",
            )


SCALE = ("contestant", "locks", "kept", "threads", "KiB each", "% of a core", "sends/s")


def _scale(loads: Sequence[dict[str, Any]]) -> Iterator[Row]:
    for row in loads:
        if row["kind"] == "scale" and row["kept"] is not None:
            sends = row["sends_per_second"]
            yield (
                _who(row),
                *(str(row[name]) for name in ("locks", "kept", "threads")),
                f"{row['bytes_each'] / 1024:.1f}",
                f"{row['cpu_share'] * 100:.1f}",
                NONE if sends is None else f"{sends:g}",
            )


def _who(row: dict[str, Any]) -> str:
    """Return the name of the contestant. For multilock, "blocking" or "asyncio" is added."""
    name, face = str(row["contestant"]), _face(row)
    return f"{name} {face}" if face in FACES.values() else name


def _face(row: dict[str, Any]) -> str:
    return face_of(str(row["adapter"]))


def _of(spread: dict[str, Any]) -> tuple[float, float, float]:
    return spread["p50"], spread["p99"], spread["most"]


def _ms(seconds: float) -> str:
    """Return milliseconds, with three significant digits."""
    ms = seconds * 1000
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}"
