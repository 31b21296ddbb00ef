"""The result of a comparison: `Report`, as data and as files. It can be judged again from its history.

``report.json`` follows ``report.schema.json`` in this folder. Its ``schema`` is the version. An addition keeps the
version, any other change increases it.
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
LATER = frozenset({"writes", "writes_refused", "token_regressions"})  # keys of a row that the first reports lack
GREEN, VIOLATION, VOID, UNREACHABLE = 0, 1, 3, 69
DECIDED_SHARE = 0.5  # if fewer of a contestant's cycles are decided, the run has proved nothing; not for controls


@dataclass(frozen=True, slots=True)
class Report:
    """A report. ``data`` is the content of report.json."""

    data: dict[str, Any]

    @property
    def cells(self) -> dict[tuple[str, str], dict[str, Any]]:
        """The cells, by contestant and scenario."""
        return {(cell["contestant"], cell["scenario"]): cell for cell in self.data["cells"]}

    @property
    def violations(self) -> list[str]:
        """The violations of all contestants that are not controls."""
        return list(self.data["violations"])

    @property
    def void(self) -> list[str]:
        """Why the run proves nothing. Empty if it proves something."""
        return list(self.data["void"])

    @property
    def exit_code(self) -> int:
        """0 no promise broken, 1 a promise broken, 3 void, 69 no server could be reached."""
        return int(self.data["exit_code"])

    def write(self, folder: Path) -> None:
        """Write ``report.json`` into this folder."""
        write_whole(folder / REPORT, json.dumps(self.data, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write a file. If that is interrupted or the disk is full, the old file stays as it was."""
    path = path.resolve()
    if path.exists() and not path.is_file():  # a pipe or a terminal
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
    """Return ``violations``, ``void`` and ``exit_code`` for these cells and loads."""
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
        if column["leftovers"]:  # also those of a control, since we left them
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
    """Return the pieces of a run. A report without pieces is one piece."""
    whole = {key: data[key] for key in ("made_at", "seconds", "command")}
    return list(data.get("pieces", [{**whole, "cycles": sum(cell["cycles"] for cell in data["cells"])}]))


def read_report(path: Path) -> Report:
    """Read a report from its file or folder. Raises ConfigurationError if it is missing or of an unknown version."""
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
    """Return the path of the history in this folder. It may be compressed."""
    compressed = folder / f"{HISTORY}.gz"
    return compressed if compressed.exists() and not (folder / HISTORY).exists() else folder / HISTORY


def verify(folder: Path) -> list[str]:
    """Judge every cycle of the history again. Returns each difference from the report, in words."""
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
            return [f"the report has {said} cycles in its pieces, but the history has {len(cycles)}"]
        return [
            *_row_differences(told["cells"], cells, lambda cell: f"{cell['contestant']}, {cell['scenario']}"),
            *_row_differences(told["loads"], loads, lambda load: f"load {load['cycle']}"),
            *_differences("report", told, again, again.keys() - {"cells", "loads"}),
        ]
    except OSError as error:
        raise ConfigurationError(f"cannot read {history}: {error.strerror or error}") from error
    except (ValueError, LookupError, TypeError, AttributeError, EOFError, zlib.error) as error:
        return [f"{history.name} and {REPORT} cannot be judged ({type(error).__name__}: {error})"]


def _row_differences(
    told: list[dict[str, Any]], again: list[dict[str, Any]], name: Callable[[dict[str, Any]], str]
) -> Iterator[str]:
    """Yield the differences, row by row. An older report may lack the figures in ``LATER``."""
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
            yield f"{where}: {key} is {again.get(key)!r} by the history, but {told.get(key)!r} in the report"
