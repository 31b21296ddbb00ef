"""The matrix in pytest's terminal summary. The table fits the width of the terminal, and has colours only if other
output has them."""

from __future__ import annotations

import pytest

from multilock.testing.plugin.matrix import AWAY, BAD, UNDECIDED, Cell, Matrix

__all__ = ["tell"]

GAP = 2
NOT_RUN = "-"


def tell(terminal: pytest.TerminalReporter, matrix: Matrix, notes: list[str], *, whole: bool) -> None:
    """Print the matrix if ``whole`` is True, and in any case the warnings and notes."""
    heads = [column.label for column in matrix.columns]
    loud = [*_loud(matrix), *notes]
    if not (whole and matrix.rows) and not loud:
        return
    terminal.section("multilock: tests x backends" if whole and matrix.rows else "multilock")
    if whole and matrix.rows:
        for column in matrix.columns:
            terminal.write_line(f"{column.label}: {column.url}")
        terminal.write_line("")
        _table(terminal, matrix, heads)
        differences = matrix.differences()
        if len(heads) > 1:
            terminal.write_line("")
            terminal.write_line("tests with different results:" if differences else "no test differs between them")
        for row, what in differences:
            terminal.write_line(f"  {row}: {what}")
    for line in loud:
        terminal.write_line(line, yellow=True)


def _loud(matrix: Matrix) -> list[str]:
    lines = []
    for number, column in enumerate(matrix.columns):
        if why := matrix.away(number):
            count = sum(cells[number].outcome == AWAY for cells in matrix.rows.values() if number in cells)
            lines.append(f"{column.label}: {count} tests did NOT RUN ({why})")
    for row, cells in sorted(matrix.rows.items()):
        for number, cell in sorted(cells.items()):
            if cell.outcome == UNDECIDED:
                lines.append(f"{row} on {matrix.columns[number].label} is UNDECIDED: {cell.reason}")
    if matrix.partial and matrix.rows:
        lines.append(f"partial: {matrix.partial}")
    return lines


def _table(terminal: pytest.TerminalReporter, matrix: Matrix, heads: list[str]) -> None:
    """Print the table. A test name that is too long gets its own line above its outcomes."""
    cells = {row: [_text(matrix.cell(row, number)) for number in range(len(heads))] for row in sorted(matrix.rows)}
    widths = [max(len(text) for text in texts) for texts in zip(heads, *cells.values(), strict=True)]
    width = terminal._tw.fullwidth
    first = max(0, min(max(map(len, cells)), width - 1 - sum(widths) - GAP * len(widths)))
    _line(terminal, "test"[:first], first, [(head, {}) for head in heads], widths)
    for row, texts in cells.items():
        marked = [(text, _markup(matrix.cell(row, number))) for number, text in enumerate(texts)]
        if len(row) > first:
            terminal.write_line(row)
        _line(terminal, row if len(row) <= first else "", first, marked, widths)


def _line(
    terminal: pytest.TerminalReporter,
    name: str,
    first: int,
    cells: list[tuple[str, dict[str, bool]]],
    widths: list[int],
) -> None:
    terminal.write(name.ljust(first))
    for (text, markup), width in zip(cells, widths, strict=True):
        terminal.write(" " * GAP)
        terminal.write(text.ljust(width), **markup)
    terminal.write("\n")


def _text(cell: Cell | None) -> str:
    return NOT_RUN if cell is None else cell.short


def _markup(cell: Cell | None) -> dict[str, bool]:
    if cell is None:
        return {}
    if cell.outcome in BAD:
        return {"red": True}
    return {"green": True} if cell.outcome == "passed" else {"yellow": True}
