"""``--card FILE``: the grid and the worst cycles as one picture of 1200 × 630, to share. The file is self-contained."""

from __future__ import annotations

from dataclasses import dataclass

from multilock.testing.compare import summary
from multilock.testing.compare.evidence import Evidence
from multilock.testing.compare.page import Shown, shown, worst_of
from multilock.testing.compare.render import render
from multilock.testing.compare.report import Report
from multilock.testing.compare.scenarios import SCENARIOS

__all__ = ["card"]

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


def card(report: Report, evidence: Evidence) -> str:
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


def _cycles(report: Report, evidence: Evidence, controls: set[str]) -> list[Shown]:
    """Return the worst cycle of our locks, and that of the controls.

    Faults after which the holder cannot be notified in time are left out if there are others.
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
