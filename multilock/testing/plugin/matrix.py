"""The matrix of tests and backends: the result of each test on each backend. Nothing here depends on pytest.

``matrix.json`` follows ``matrix.schema.json`` in this folder. The field ``schema`` of the file is the version of that
schema. An addition keeps the version, any other change increases it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["AWAY", "BAD", "LACKS", "SCHEMA", "UNDECIDED", "Cell", "Matrix", "MatrixColumn", "row_of"]

SCHEMA = 1
BAD = ("failed", "error", "crashed")
AWAY = "away"  # the test was not run, because the server does not answer
LACKS = "lacks"  # skipped: the backend lacks a capability
UNDECIDED = "undecided"  # it is not certain whether two clients believed at once
SHORT = 160  # the number of characters to which a reason in a line is cut


@dataclass(frozen=True, slots=True)
class MatrixColumn:
    """A backend: its name in test ids, and its URL without secrets."""

    label: str
    url: str


@dataclass(slots=True)
class Cell:
    """The result of one test on one backend. ``seconds`` is for the test itself, without its fixtures."""

    outcome: str
    reason: str = ""
    seconds: float | None = None

    @property
    def short(self) -> str:
        """The outcome, with the time if there is one."""
        return self.outcome if self.seconds is None else f"{self.outcome} {_seconds(self.seconds)}"


@dataclass(slots=True)
class Matrix:
    """The results of all tests on all backends."""

    columns: Sequence[MatrixColumn]
    rows: dict[str, dict[int, Cell]] = field(default_factory=dict)  #: results by test, and by number of the column
    partial: str = ""  #: why the run ended early

    def cell(self, row: str, column: int) -> Cell | None:
        """Return the result of a test on a backend, or None."""
        return self.rows.get(row, {}).get(column)

    def put(self, row: str, column: int, cell: Cell) -> None:
        """Store the result of a test on a backend."""
        self.rows.setdefault(row, {})[column] = cell

    def used(self, column: int) -> bool:
        """Return whether a test ran on this backend, and so may have left something there."""
        return any(column in cells and cells[column].outcome not in (AWAY, LACKS) for cells in self.rows.values())

    def away(self, column: int) -> str:
        """Return why this backend did not answer, or an empty text if it did."""
        cells = (cells[column] for cells in self.rows.values() if column in cells)
        return next((cell.reason for cell in cells if cell.outcome == AWAY), "")

    def differences(self) -> list[tuple[str, str]]:
        """Return the tests whose outcome differs between backends, each with a text about its outcomes.

        Backends that do not answer, or on which the test did not run, do not count.
        """
        found = []
        for row, cells in sorted(self.rows.items()):
            here = {number: cell for number, cell in cells.items() if cell.outcome != AWAY}
            if len({cell.outcome for cell in here.values()}) > 1:
                found.append((row, self._said(here)))
        return found

    def counts(self) -> dict[str, int]:
        """Return how many cells have each outcome."""
        counts: dict[str, int] = {}
        for cells in self.rows.values():
            for cell in cells.values():
                counts[cell.outcome] = counts.get(cell.outcome, 0) + 1
        return counts

    def _said(self, cells: dict[int, Cell]) -> str:
        """Return the outcomes as text. Backends with the same outcome are named together."""
        together: dict[tuple[str, str], list[str]] = {}
        for number, cell in sorted(cells.items()):
            together.setdefault((cell.outcome, cell.reason), []).append(self.columns[number].label)
        return "; ".join(
            f"{outcome} on {', '.join(labels)}{f' ({reason[:SHORT]})' if reason else ''}"
            for (outcome, reason), labels in together.items()
        )

    def data(self) -> dict[str, Any]:
        """Return the content of matrix.json, without the parts that describe the run."""
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
    """Return the name of a test without the name of the backend. The result is the same for all backends."""
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
