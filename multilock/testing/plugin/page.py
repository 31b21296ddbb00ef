"""``matrix.html``: one file that asks nothing of a network; whatever tests and servers say in it is text."""

from __future__ import annotations

from typing import Any

import jinja2

from multilock.testing.plugin.matrix import BAD, Matrix

__all__ = ["page"]


def page(matrix: Matrix, data: dict[str, Any]) -> str:
    """``data`` is what matrix.json holds."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("multilock.testing.plugin"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("matrix.html.j2").render(
        data=data, rows=sorted(matrix.rows.items()), columns=matrix.columns, counts=matrix.counts(), kind=_kind
    )


def _kind(outcome: str) -> str:
    if outcome in BAD:
        return "broken"
    return "kept" if outcome == "passed" else "undecided"
