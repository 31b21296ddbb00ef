"""A run that is interrupted and continued: the later piece runs the missing cycles, the report covers all pieces, and
other options are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import multilock
from multilock import ConfigurationError
from multilock.testing import compare

pytestmark = pytest.mark.timeout(120)

WANTED: dict[str, Any] = {
    "scenarios": ["taken", "cost"], "cycles": 2, "control_cycles": 1, "ttl": 1.0, "all_of_controls": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run whose time was over after one cycle of each cell."""
    folder = tmp_path_factory.mktemp("pieces")
    first = compare.run([url_of(folder)], compare.Options(**WANTED, seed=5, within=0.001, out=folder))
    assert sum(cell["cycles"] for cell in first.data["cells"]) == 2
    return folder


def url_of(folder: Path) -> str:
    return f"sqlite://{folder}/locks.db"


def test_the_rest_of_a_run_is_run_and_the_report_covers_all_parts(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    first = compare.read_report(tmp_path)
    report = compare.run([url_of(tmp_path)], compare.Options(**WANTED, out=tmp_path, resume=True))
    assert {name: cell["cycles"] for (name, _), cell in report.cells.items()} == {"sqlite": 2, "sqlite-flag": 1}
    assert [piece["cycles"] for piece in report.data["pieces"]] == [2, 1]
    assert report.data["seed"] == 5
    assert report.data["seconds"] > first.data["seconds"]
    assert report.data["loads"] == first.data["loads"]
    assert compare.verify(tmp_path) == []
    report.data["pieces"].pop()
    report.write(tmp_path)
    assert compare.verify(tmp_path) == ["the report has 2 cycles in its pieces, but the history has 3"]


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"seed": 6}, "has seed 5"),
        ({"cycles": 3}, "cycles was 2"),
        ({"control_cycles": 2}, "control_cycles was 1"),
        ({"ttl": 2.0}, "ttl was 1.0"),
        ({"scenarios": ["pause", "cost"]}, "taken"),
        ({"scenarios": ["taken"]}, "cost"),
        ({"out": None}, "give the folder"),
        ({"out": Path("/nowhere")}, "cannot read"),
    ],
)
def test_a_different_run_is_refused_before_anything_is_written(folder: Path, other: dict[str, Any], why: str) -> None:
    before = (folder / "history.jsonl").read_bytes()
    with pytest.raises(ConfigurationError, match=why):
        compare.run([url_of(folder)], compare.Options(**{**WANTED, "out": folder, **other}, resume=True))
    assert (folder / "history.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("what", "why"),
    [
        (lambda lines: lines[:-1], "ends within cycle"),
        (
            lambda lines: [*lines[:-1], json.dumps({**json.loads(lines[-1]), "at": 1e12}) + "\n"],
            "was restarted since",
        ),
        (lambda lines: [*lines, '{"cycle":'], "is not a history"),
    ],
)
def test_a_damaged_history_is_refused(folder: Path, tmp_path: Path, what: Any, why: str) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "history.jsonl"
    path.write_text("".join(what(path.read_text().splitlines(keepends=True))))
    with pytest.raises(ConfigurationError, match=why):
        compare.run([url_of(tmp_path)], compare.Options(**WANTED, out=tmp_path, resume=True))


def test_a_run_of_another_version_is_not_continued(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multilock, "__version__", "0.0.0")
    with pytest.raises(ConfigurationError, match=r"and is 0\.0\.0"):
        compare.run([url_of(folder)], compare.Options(**WANTED, out=folder, resume=True))
