"""What came of a comparison: `Report`, as data and as files; judged again from its history.

``report.json`` follows ``report.schema.json`` beside this module. Its ``schema`` is the version of that: one that is
added to keeps it, one that is changed gets the next number.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multilock import ConfigurationError
from multilock.testing.compare.history import read_cycles
from multilock.testing.compare.loads import rows_of
from multilock.testing.compare.verdicts import cells_of, judge_cycle

__all__ = [
    "HISTORY",
    "REPORT",
    "SCHEMA",
    "Report",
    "conclude",
    "history_of",
    "pieces_of",
    "read_report",
    "verify",
    "write_whole",
]

SCHEMA = 1
HISTORY, REPORT = "history.jsonl", "report.json"
LATER = frozenset({"writes", "writes_refused", "token_regressions"})  # of a row: not in the first reports
GREEN, VIOLATION, VOID, UNREACHABLE = 0, 1, 3, 69
DECIDED_SHARE = 0.5  # of the cycles of a contestant that is no control; with fewer the run has shown nothing


@dataclass(frozen=True, slots=True)
class Report:
    """``data`` is what report.json holds."""

    data: dict[str, Any]

    @property
    def cells(self) -> dict[tuple[str, str], dict[str, Any]]:
        """By contestant and scenario."""
        return {(cell["contestant"], cell["scenario"]): cell for cell in self.data["cells"]}

    @property
    def violations(self) -> list[str]:
        """Of all that are not controls."""
        return list(self.data["violations"])

    @property
    def void(self) -> list[str]:
        """Why it has shown nothing; empty: it has."""
        return list(self.data["void"])

    @property
    def exit_code(self) -> int:
        """0 green, 1 a violation, 3 void, 69 nobody could be reached."""
        return int(self.data["exit_code"])

    def write(self, folder: Path) -> None:
        """``report.json`` in this folder."""
        write_whole(folder / REPORT, json.dumps(self.data, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def write_whole(path: Path, text: str) -> None:
    """All of it, or, where that is interrupted or the disk is full, what was there before."""
    path = path.resolve()
    if path.exists() and not path.is_file():  # a pipe, a terminal
        path.write_text(text, encoding="utf-8")
        return
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def conclude(
    columns: list[dict[str, Any]], cells: list[dict[str, Any]], loads: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    """``violations``, ``void`` and ``exit_code`` of these cells and loads."""
    loads = loads or []
    controls = {column["name"] for column in columns if column["control"]}
    violations = [*_violations(columns, cells, controls), *_under_load(loads, controls)]
    void = list(_void(columns, cells, controls)) if cells or not loads else []
    ours = [column for column in columns if not column["control"]]
    if violations:
        code = VIOLATION
    elif ours and all(column["gone"] for column in ours) and not cells and not loads:
        code = UNREACHABLE
    else:
        code = VOID if void else GREEN
    return {"violations": violations, "void": void, "exit_code": code}


def _violations(columns: list[dict[str, Any]], cells: list[dict[str, Any]], controls: set[str]) -> Iterator[str]:
    for cell in cells:
        if cell["contestant"] not in controls:
            for broken in cell["violations"]:
                what = "; ".join(broken["what"])
                yield f"{cell['contestant']}, {cell['scenario']}, cycle {broken['cycle']}: {what}"
    for column in columns:
        if column["leftovers"]:  # also of a control: it is our own mess
            yield f"{column['name']}: left behind {', '.join(column['leftovers'])}"


def _under_load(loads: list[dict[str, Any]], controls: set[str]) -> Iterator[str]:
    for row in loads:
        if row["contestant"] not in controls:
            for what in row["violations"]:
                yield f"{row['contestant']}, {row['contenders']} contenders: {what}"


def _void(columns: list[dict[str, Any]], cells: list[dict[str, Any]], controls: set[str]) -> Iterator[str]:
    by_key = {(cell["contestant"], cell["scenario"]): cell for cell in cells}
    asked = {cell["scenario"] for cell in cells}
    present = {column["url"] for column in columns if not column["gone"]}
    for column in columns:
        if column["url"] not in present:
            continue
        for scenario in sorted(asked & set(column["must_fail"])):
            cell = by_key.get((column["name"], scenario))
            if cell is None or cell["verdict"] != "broken":
                yield f"the control {column['name']} did not fail in {scenario!r}: there the others have shown nothing"
    if not cells:
        yield "no cycle was run"
    for name in sorted({cell["contestant"] for cell in cells} - controls):
        its = [cell for cell in cells if cell["contestant"] == name]
        cycles, decided = (sum(cell[key] for cell in its) for key in ("cycles", "decided"))
        if decided < DECIDED_SHARE * cycles:
            yield f"{name}: only {decided} of {cycles} cycles could be decided"
            continue
        for cell in its:
            if not cell["decided"]:
                yield f"{name}, {cell['scenario']}: none of {cell['cycles']} cycles could be decided"


def pieces_of(data: dict[str, Any]) -> list[dict[str, Any]]:
    """What was run in one go, each. A report that does not say so was."""
    whole = {key: data[key] for key in ("made_at", "seconds", "command")}
    return list(data.get("pieces", [{**whole, "cycles": sum(cell["cycles"] for cell in data["cells"])}]))


def read_report(path: Path) -> Report:
    """The file, or the folder it is in. ConfigurationError where it is none, or of another version."""
    file = path / REPORT if path.is_dir() else path
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"cannot read {file}: {error.strerror}") from error
    except ValueError:
        raise ConfigurationError(f"{file} is not a report: it is not JSON") from None
    version = data.get("schema") if isinstance(data, dict) else None
    if version != SCHEMA:
        raise ConfigurationError(f"{file} has schema {version!r}, and this multilock reads {SCHEMA}")
    return Report(data)


def history_of(folder: Path) -> Path:
    """The history that was kept there, which may have been compressed."""
    compressed = folder / f"{HISTORY}.gz"
    return compressed if compressed.exists() and not (folder / HISTORY).exists() else folder / HISTORY


def verify(folder: Path) -> list[str]:
    """Judge every cycle of the history again; each difference from the report in words."""
    told = read_report(folder).data
    history = history_of(folder)
    try:
        cycles, loads = [], []
        for events in read_cycles(history):
            if events[0]["what"] == "load":
                loads += rows_of([events])
            else:
                cycles.append((events[0], judge_cycle(events)))
        cells = json.loads(json.dumps(cells_of(cycles)))
        loads = json.loads(json.dumps(loads))
        again = {"cells": cells, "loads": loads, **conclude(told["columns"], cells, loads)}
        if len(cycles) != (said := sum(piece["cycles"] for piece in pieces_of(told))):
            return [f"report: its pieces have {said} cycles, and the history has {len(cycles)}"]
        return [
            *_row_differences(told["cells"], cells, lambda cell: f"{cell['contestant']}, {cell['scenario']}"),
            *_row_differences(told["loads"], loads, lambda load: f"load {load['cycle']}"),
            *_differences("report", told, again, again.keys() - {"cells", "loads"}),
        ]
    except OSError as error:
        raise ConfigurationError(f"cannot read {history}: {error.strerror or error}") from error
    except (ValueError, LookupError, TypeError, AttributeError, EOFError, zlib.error) as error:
        return [f"{history.name} and {REPORT} cannot be judged: {type(error).__name__}: {error}"]


def _row_differences(
    told: list[dict[str, Any]], again: list[dict[str, Any]], name: Callable[[dict[str, Any]], str]
) -> Iterator[str]:
    """Row by row. A report of before there was a figure need not have it."""
    old, new = ({name(row): row for row in rows} for rows in (told, again))
    for each in sorted(old.keys() | new.keys()):
        if each not in old or each not in new:
            yield f"{each}: only in the {'report' if each in old else 'history'}"
        else:
            keys = old[each].keys() | new[each].keys() - (LATER - old[each].keys())
            yield from _differences(each, old[each], new[each], keys)


def _differences(where: str, told: dict[str, Any], again: dict[str, Any], keys: Iterable[str]) -> Iterator[str]:
    for key in sorted(keys):
        if told.get(key) != again.get(key):
            yield f"{where}: {key} is {again.get(key)!r} by the history, and the report says {told.get(key)!r}"
