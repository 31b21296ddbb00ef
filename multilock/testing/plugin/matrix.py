"""Tests × backends: what came of each test on each backend. Nothing here knows pytest.

``matrix.json`` follows ``matrix.schema.json`` beside this module. Its ``schema`` is the version of that: one that is
added to keeps it, one that is changed gets the next number.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["AWAY", "BAD", "LACKS", "SCHEMA", "UNDECIDED", "Cell", "Column", "Matrix", "row_of"]

SCHEMA = 1
BAD = ("failed", "error", "crashed")
AWAY = "away"  # its server was not there
LACKS = "lacks"  # skipped for want of a capability
UNDECIDED = "undecided"  # nobody can tell whether two believed at once
SHORT = 160  # characters of a reason in a line


@dataclass(frozen=True, slots=True)
class Column:
    """A backend, by the name that tests have for it, and its URL without secrets."""

    label: str
    url: str


@dataclass(slots=True)
class Cell:
    """What came of one test on one backend. ``seconds``: of the test itself, without its fixtures."""

    outcome: str
    reason: str = ""
    seconds: float | None = None

    @property
    def short(self) -> str:
        return self.outcome if self.seconds is None else f"{self.outcome} {_seconds(self.seconds)}"


@dataclass(slots=True)
class Matrix:
    columns: Sequence[Column]
    rows: dict[str, dict[int, Cell]] = field(default_factory=dict)  #: by test, by number of the column
    partial: str = ""  #: why the run ended before its end

    def cell(self, row: str, column: int) -> Cell | None:
        return self.rows.get(row, {}).get(column)

    def put(self, row: str, column: int, cell: Cell) -> None:
        self.rows.setdefault(row, {})[column] = cell

    def used(self, column: int) -> bool:
        """Whether a test may have left something there."""
        return any(column in cells and cells[column].outcome not in (AWAY, LACKS) for cells in self.rows.values())

    def away(self, column: int) -> str:
        """Why this backend is not there, if a test was told so."""
        cells = (cells[column] for cells in self.rows.values() if column in cells)
        return next((cell.reason for cell in cells if cell.outcome == AWAY), "")

    def differences(self) -> list[tuple[str, str]]:
        """The tests that came out differently, each with what it was where and why. A backend that is away is no
        other outcome, and one on which the test was not run is none."""
        found = []
        for row, cells in sorted(self.rows.items()):
            here = {number: cell for number, cell in cells.items() if cell.outcome != AWAY}
            if len({cell.outcome for cell in here.values()}) > 1:
                found.append((row, self._said(here)))
        return found

    def counts(self) -> dict[str, int]:
        """How many cells have each outcome."""
        counts: dict[str, int] = {}
        for cells in self.rows.values():
            for cell in cells.values():
                counts[cell.outcome] = counts.get(cell.outcome, 0) + 1
        return counts

    def _said(self, cells: dict[int, Cell]) -> str:
        """Who agrees is named together."""
        together: dict[tuple[str, str], list[str]] = {}
        for number, cell in sorted(cells.items()):
            together.setdefault((cell.outcome, cell.reason), []).append(self.columns[number].label)
        return "; ".join(
            f"{outcome} on {', '.join(labels)}{f' ({reason[:SHORT]})' if reason else ''}"
            for (outcome, reason), labels in together.items()
        )

    def data(self) -> dict[str, Any]:
        """What matrix.json holds, without what only a run knows."""
        return {
            "schema": SCHEMA,
            "partial": self.partial or None,
            "backends": [
                {"label": column.label, "url": column.url, "away": self.away(number) or None}
                for number, column in enumerate(self.columns)
            ],
            "tests": [
                {"name": row, "results": [_result(cells.get(number)) for number in range(len(self.columns))]}
                for row, cells in sorted(self.rows.items())
            ],
            "differences": [{"test": row, "what": what} for row, what in self.differences()],
        }


def row_of(nodeid: str, label: str) -> str:
    """The name of a test without that of the backend in it: the same for all of them."""
    head, bracket, ids = nodeid.partition("[")
    if not bracket or "]" not in ids:
        return nodeid
    inside, _, tail = ids.rpartition("]")
    if found := re.search(rf"(^|-){re.escape(label)}(?=-|$)", inside):
        inside = inside[: found.start()] + inside[found.end() + (found.start() == 0) :]
    return f"{head}[{inside}]{tail}" if inside else head + tail


def _result(cell: Cell | None) -> dict[str, Any] | None:
    if cell is None:
        return None
    seconds = None if cell.seconds is None else round(cell.seconds, 6)
    return {"outcome": cell.outcome, "seconds": seconds, "reason": cell.reason or None}


def _seconds(value: float) -> str:
    return f"{value:.2f}s" if value < 10 else f"{value:.0f}s"
