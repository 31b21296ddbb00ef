"""The figures of a report as rows: losses after faults, and each load. For a terminal and a document."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from multilock.testing.compare.report import Report
from multilock.testing.compare.scenarios import SCENARIOS, tells_in_time

__all__ = ["Table", "aligned", "broken_off", "face_of", "in_markdown", "tables"]

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
    """Return the face of our adapter, or the name of another adapter."""
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


CONTENTION = ("contestant", "waiters", "hold", "grants/s", "wait", "hand-over", "each", "none", "sends")
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
    """Return the name of the contestant, with the face if it is ours."""
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
