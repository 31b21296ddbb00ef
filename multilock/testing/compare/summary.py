"""A report in few words: the grid of verdicts, and a line for each figure. For a terminal, a design record, a page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from multilock.testing.compare.report import Report, pieces_of
from multilock.testing.compare.scenarios import SCENARIOS, tells_in_time

__all__ = ["LEGEND", "Mark", "figures", "grid", "headline", "loads", "markdown", "notes"]

LEGEND = "broken / decided cycles, and the worst overlap of two believers; ? nothing could be decided, – not applicable"

Mark = tuple[str, str]
"""What a cell says, and whether it is ``kept``, ``broken``, ``undecided`` or (``""``) not there."""


def headline(report: Report) -> str:
    """One sentence."""
    kind = {0: "nothing was broken", 1: "a promise was broken", 3: "VOID: this run has shown nothing"}
    text = kind.get(report.exit_code, "no server could be reached")
    partial = report.data["partial"]
    decided = sum(cell["decided"] for cell in report.data["cells"])
    cycles = sum(cell["cycles"] for cell in report.data["cells"])
    if cycles:
        text += f"; {decided} of {cycles} cycles decided, {report.data['planned']} planned"
    return f"{text}; partial: {partial}" if partial else text


def grid(report: Report) -> tuple[list[str], list[tuple[str, list[Mark]]]]:
    """The names of the columns, ours first, and for each scenario its marks."""
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
    if cell["broken"] and worst is not None and worst > 0:
        text += f" {_seconds(worst)}"
    return text, cell["verdict"]


def _seconds(value: float) -> str:
    return f"{value * 1000:.0f}ms" if value < 1 else f"{value:.1f}s"


def notes(report: Report) -> Iterator[Mark]:
    """What must be read with the grid, the worst first."""
    for line in report.void:
        yield f"VOID: {line}", "broken"
    for line in report.violations:
        yield line, "broken"
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


def figures(report: Report) -> Iterator[str]:
    """One line for each contestant that is no control: of what it lost, in units of the ttl."""
    controls = {column["name"] for column in report.data["columns"] if column["control"]}
    for column in report.data["columns"]:
        cells = [cell for cell in report.data["cells"] if cell["contestant"] == column["name"]]
        if column["name"] in controls or not cells:
            continue
        lost = [cell for cell in cells if tells_in_time(SCENARIOS[cell["scenario"]])]
        margins = [cell["callback_margin"]["least"] for cell in lost if cell["callback_margin"]]
        told = [cell["notice"]["most"] for cell in lost if cell["notice"]]
        taken = [cell["takeover"]["most"] for cell in cells if cell["takeover"]]
        said = [f"ttl {column['ttl']:g} s"]
        if told:
            said.append(f"a loss was known after at most {max(told):.2f} ttl")
        if margins:
            said.append(f"and told at least {min(margins):.2f} ttl before the next holder")
        if taken:
            said.append(f"takeover after at most {max(taken):.2f} ttl")
        writes, refused = (sum(cell.get(key, 0) for cell in cells) for key in ("writes", "writes_refused"))
        if writes or refused:
            said.append(f"{writes} fenced writes taken, {refused} late ones refused")
        yield f"{column['name']}: {', '.join(said)}, {sum(cell['tokens'] for cell in cells)} tokens"


def loads(report: Report) -> Iterator[str]:
    """One line for each measurement."""
    for row in report.data["loads"]:
        who = f"{row['contestant']}, {row['adapter'].rpartition(':')[2]}"
        if row["why"]:
            yield f"{who}: {row['kind']} broke off: {row['why']}"
        elif row["kind"] == "cost" and row["acquire_release"]:
            spread, ping = row["acquire_release"], row["times_ping"]
            beside = f", {ping:.1f} × a ping of its own" if ping is not None else ""
            yield f"{who}: acquire and release {_of(spread)}{beside}"
        elif row["kind"] == "scale" and row["kept"] is not None:
            sends = row["sends_per_second"]
            said = "" if sends is None else f", {sends:g} sends/s to the server"
            yield (
                f"{who}: {row['locks']} locks held by one client, {row['kept']} to the end: {row['threads']} threads, "
                f"{row['bytes_each'] / 1024:.1f} KiB each, {row['cpu_share'] * 100:.1f} % of a core{said}"
            )
        elif row["kind"] == "contention" and row["wait"]:
            processes = "1 process" if row["processes"] == 1 else f"{row['processes']} processes"
            shape = f"{row['contenders']} contenders in {processes}"
            hold = f", each for {row['hold'] * 1000:g} ms" if row["hold"] else ""
            handed = f", hand-over {_of(row['hand_over'])}" if row["hand_over"] else ""
            yield (
                f"{who}: {shape}{hold}: {row['per_second']:.0f} grants/s, wait {_of(row['wait'])}{handed}; "
                f"{row['most']} to {row['least']} each, {row['starved']} without"
            )


def _of(spread: dict[str, Any]) -> str:
    p50, p99, most = (spread[name] * 1000 for name in ("p50", "p99", "most"))
    return f"p50 {p50:.2f}, p99 {p99:.2f}, max {most:.2f} ms"


def servers(report: Report) -> Iterator[tuple[str, str]]:
    """What each that is no control said of its server, and is asked with."""
    for column in report.data["columns"]:
        its = column.get("versions") or {}
        if its and not column["control"]:
            yield column["name"], ", ".join(f"{what} {said}" for what, said in its.items())


def markdown(report: Report) -> str:
    """``report.md``: for a design record."""
    names, rows = grid(report)
    host, pieces = report.data["host"], pieces_of(report.data)
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
        lines += ["", f"{LEGEND[0].upper()}{LEGEND[1:]}.", ""]
    lines += [f"- {text}" for text, _ in notes(report)]
    lines += [f"- {line}" for line in (*figures(report), *loads(report))]
    lines += [f"- {name}: {said}" for name, said in servers(report)]
    lines += [
        "",
        f"multilock {report.data['multilock']}, Python {host['python']}, {host['system']}, {host['cores']} cores, seed "
        f"{report.data['seed']}{made}. One host, one clock, short ttls: see report.json and history.jsonl.",
    ]
    return "\n".join(lines) + "\n"
