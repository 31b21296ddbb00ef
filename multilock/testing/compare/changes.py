"""Compare a report with an older one: which verdicts differ, and how the figures changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from multilock.testing.compare.report import Report
from multilock.testing.compare.tables import face_of

__all__ = ["against", "figures", "verdicts"]

TO = "→"


def against(old: Report, new: Report) -> list[str]:
    """Return the differences from an older report: first the verdicts, cell by cell, then the figures."""
    return [*verdicts(old, new), *figures(old, new)]


def verdicts(old: Report, new: Report) -> Iterator[str]:
    """Yield one line for each cell whose verdict differs, or that only one report has."""
    for key in sorted(old.cells.keys() | new.cells.keys()):
        before, after = old.cells.get(key), new.cells.get(key)
        where = ", ".join(key)
        if before is None or after is None:
            yield f"{where}: {'new' if before is None else 'not in this run'}"
        elif before["verdict"] != after["verdict"]:
            yield f"{where}: {before['verdict']} {TO} {after['verdict']}"


def figures(old: Report, new: Report) -> Iterator[str]:
    """Yield one line for each difference in the figures.

    There is one for each contestant whose server, library or findings differ; for each cell whose printed counts, worst
    overlap or latest notice differ; and for each cost whose printed median differs.
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
    """Yield the rows that both have."""
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
