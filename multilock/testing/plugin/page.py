"""``matrix.html``: the matrix as a page in one file, in the style of a comparison's page."""

from __future__ import annotations

from typing import Any

from multilock.testing.plugin.matrix import BAD, Matrix
from multilock.testing.render import render

__all__ = ["page"]


def page(matrix: Matrix, data: dict[str, Any]) -> str:
    """Return the page. ``data`` is the content of matrix.json."""
    rows = sorted(matrix.rows.items())
    return render("matrix.html.j2", data=data, rows=rows, columns=matrix.columns, counts=matrix.counts(), kind=_kind)


def _kind(outcome: str) -> str:
    if outcome in BAD:
        return "broken"
    return "kept" if outcome == "passed" else "undecided"
