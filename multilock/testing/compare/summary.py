"""A report in few words: the grid of verdicts, and a line for each figure. For a terminal, a document or a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from multilock.testing.compare.host import describe
from multilock.testing.compare.report import VOID, Report, pieces_of
from multilock.testing.compare.tables import broken_off, in_markdown, tables

__all__ = ["LEGEND", "Mark", "grid", "headline", "markdown", "notes"]

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
    """Yield the notes that belong to the grid, the worst first."""
    for line in report.violations:
        yield line, "broken"
    for line in report.void:  # a violation counts, even if the rest of the run proves nothing
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
    """Yield the most frequent reason of each cell that shows ``?``."""
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
