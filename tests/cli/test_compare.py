"""Tests of ``multilock compare``: its exit codes, its grid of verdicts, and the files that it writes."""

from __future__ import annotations

import contextlib
import copy
import fcntl
import gzip
import io
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from multilock.cli import compare as cli
from multilock.testing import compare
from multilock.testing.compare import Progress, Report, summary
from tests import chromium
from tests.cli.conftest import RunEach
from tests.compare.test_page import opens_well
from tests.servers import RedisServer

pytestmark = [pytest.mark.timeout(150), pytest.mark.slow]
PAUSE = ("--scenarios", "pause", "--cycles", "1")


def multilock(*words: object, within: float = 60.0, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "multilock", "compare", *map(str, words)],
        capture_output=True, text=True, check=False, timeout=within, env={**os.environ, **environment},
    )  # fmt: skip


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Run the command on one file of SQLite, and return the report and the output on 60 columns."""
    folder = tmp_path_factory.mktemp("compare")
    done = multilock(f"sqlite://{folder}/locks.db", *PAUSE, "--out", folder, "--seed", "7", COLUMNS="60")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout


def test_the_grid_shows_which_contestant_broke_which_promise(report: tuple[Path, str]) -> None:
    _, said = report
    assert "nothing was broken" in said
    assert "sqlite-flag" in said
    assert "pause  0/1" in said


def test_no_line_is_wider_than_a_terminal_of_60_columns(tmp_path: Path) -> None:
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    words = [sys.executable, "-m", "multilock", "compare", f"sqlite://{tmp_path}/locks.db", *PAUSE]
    bare = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    with subprocess.Popen(words, stdin=its, stdout=its, stderr=its, env={**bare, "TERM": "xterm"}) as running:
        os.close(its)
        said = bytearray()
        # EIO means that the program has ended.
        with contextlib.suppress(OSError), os.fdopen(ours, "rb", 0) as terminal:
            while more := terminal.read(4096):
                said += more
    assert running.returncode == 0
    screen = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said.decode())
    lines = [part.rstrip() for line in screen.splitlines() for part in line.split("\r")]
    progress = [line for line in lines if " of " in line and "cycles" in line and " s" in line]
    grid = [line for line in lines if line.startswith(("fault", "pause"))]
    assert progress
    assert [line.split()[0] for line in grid] == ["fault", "pause"]
    assert max(map(len, [*progress, *grid])) <= 60


def test_the_command_line_finds_a_seeded_defect(tmp_path: Path) -> None:
    with RedisServer() as server:
        broken = f"tests.compare.broken:Cached={server.url}"
        done = multilock(server.url, "--adapter", broken, *PAUSE, "--ttl", "1", "--json", within=100)
    assert done.returncode == 1, done.stderr
    cells = Report(json.loads(done.stdout)).cells
    assert cells["Cached", "pause"]["verdict"] == "broken"
    assert cells["redis", "pause"]["violations"] == []


def test_the_users_own_lock_is_compared_on_a_page_that_states_nothing_about_its_server(tmp_path: Path) -> None:
    with RedisServer() as server:
        adapter = f"tests.compare.broken:Sound={server.url}"
        done = multilock("--adapter", adapter, *PAUSE, "--ttl", "1", "--out", tmp_path, within=100)
    assert (done.returncode, done.stderr.count("internal error")) == (0, 0), done.stderr
    assert "Nothing was found that weakens a lock" not in (tmp_path / "report.html").read_text()


def test_a_run_keeps_the_report_the_history_and_a_table(report: tuple[Path, str]) -> None:
    folder, _ = report
    kept = compare.read_report(folder)
    assert (kept.data["seed"], kept.exit_code) == (7, 0)
    assert "memory" in kept.data["host"] or sys.platform != "linux"
    text = (folder / "report.md").read_text()
    assert re.search(r"^\| pause \| 0/1 -?[\d.]+ms \| \*\*1/1 [\d.]+m?s\*\* \|$", text, re.MULTILINE), text
    assert summary.markdown(kept) == text


def test_a_quick_comparison_of_two_backends_writes_a_self_contained_page(
    tmp_path: Path,
) -> None:
    chosen = ("--quick", "--scenarios", "pause,partition,cost", "--ttl", "1")
    with RedisServer() as server:
        done = multilock(f"sqlite://{tmp_path}/locks.db", server.url, *chosen, "--out", tmp_path, within=100)
    assert done.returncode == 0, done.stdout + done.stderr
    address = (tmp_path / "report.html").as_uri()
    with chromium.running() as browser:
        # tests/compare/test_page.py opens such a page with all widths and schemes
        opens_well(browser, address, chromium.WIDTHS[0], chromium.SCHEMES[0])
        assert browser.run("document.querySelector('.headline').textContent").startswith("Nothing was broken")
        cells = browser.run("[...document.querySelectorAll('#verdicts td')].map(each => each.textContent.trim()[0])")
        assert cells == ["✓", "✓", "–", "✓"]
        failed = browser.run(
            "[...document.querySelectorAll('#controls table tbody tr th')].map(each => each.innerText)"
        )
        assert failed[:3] == ["sqlite-flag", "naive", "naive"]
        # Three cycles of our locks, and three of the controls.
        assert browser.run("document.querySelectorAll('figure.cycle').length") == 3 + 3
        assert browser.run("document.querySelectorAll('#tokens .strip').length") == 3  # the naive lock gives no tokens


def test_page_and_card_are_drawn_again_from_kept_files(report: tuple[Path, str], tmp_path: Path) -> None:
    folder, _ = report
    for name in ("report.json", "history.jsonl"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    done = multilock("--page", tmp_path, "--card", tmp_path / "card.svg")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "report.html").read_text() == (folder / "report.html").read_text()
    assert (tmp_path / "card.svg").read_text().startswith("<svg")
    assert "1/1" in (tmp_path / "card.svg").read_text()


WITHOUT_JINJA2 = """
import sys
sys.modules["jinja2"] = None
from pathlib import Path
from multilock import ConfigurationError
from multilock.cli.compare import _drawing
_drawing(None, must=False)(Path("nowhere"), None)
try:
    _drawing("card.svg", must=True)
except ConfigurationError as refused:
    print(refused)
"""


def test_without_jinja2_the_page_is_omitted_and_a_card_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_JINJA2], capture_output=True, text=True, check=True, timeout=50
    )
    assert "report.html was not written" in done.stderr
    assert "multilock[compare]" in done.stdout


def test_verify_judges_the_history_again(report: tuple[Path, str], tmp_path: Path) -> None:
    folder, _ = report
    assert multilock("--verify", folder).returncode == 0
    data = json.loads((folder / "report.json").read_text())
    data["cells"][0]["decided"] = 300
    (tmp_path / "report.json").write_text(json.dumps(data))
    (tmp_path / "history.jsonl").write_bytes((folder / "history.jsonl").read_bytes())
    found = multilock("--verify", tmp_path)
    assert found.returncode == 1
    assert "decided is 1 by the history, but 300 in the report" in found.stderr


def test_a_report_from_before_a_figure_existed_is_judged_without_it(report: tuple[Path, str], tmp_path: Path) -> None:
    folder, _ = report
    (tmp_path / "history.jsonl").write_bytes((folder / "history.jsonl").read_bytes())
    data = json.loads((folder / "report.json").read_text())
    for cell in data["cells"]:
        del cell["writes"], cell["writes_refused"]
    (tmp_path / "report.json").write_text(json.dumps(data))
    assert compare.verify(tmp_path) == []
    del data["cells"][0]["broken"]
    (tmp_path / "report.json").write_text(json.dumps(data))
    assert compare.verify(tmp_path) == ["sqlite, pause: broken is 0 by the history, but None in the report"]


MISTAKES = [
    (),
    ("nowhere://x",),
    ("memory://", "--scenarios", "earthquake"),
    ("memory://", "--cycles", "0"),
    ("memory://", "--out", "/proc/nowhere"),
    ("memory://", "--card", "/proc/nowhere/card.svg"),
    ("--page", "/nowhere"),
    ("memory://", "--against", "/nowhere/report.json"),
    ("--adapter", "no.such.module:Name=redis://x"),
    ("--verify", "/nowhere"),
]


def test_a_usage_mistake_is_reported_before_anything_runs(run_each: RunEach) -> None:
    for done in run_each(*(["compare", *words] for words in MISTAKES)):
        assert done.returncode == 64, done
        assert done.stderr.startswith("multilock: ")
        assert done.stdout == ""


def test_an_absent_server_is_reported_without_its_password(tmp_path: Path) -> None:
    done = multilock("redis://me:geheim@127.0.0.1:1", *PAUSE, "--json", "--out", tmp_path)
    assert done.returncode == 69
    data = json.loads(done.stdout)
    assert "BackendUnavailable" in data["columns"][0]["gone"]
    written = "".join(path.read_text() for path in tmp_path.iterdir())
    assert "geheim" not in done.stdout + done.stderr + written


def test_the_time_left_is_that_of_this_part_of_a_run() -> None:
    said = cli._Progress()
    assert said.line(Progress(90, 100, [], 0.1), 100) == "90 of 100 cycles, 0 s"
    later = Progress(95, 100, ["redis pause", "redis pause"], 50.0)
    assert said.line(later, 100) == "95 of 100 cycles, 50 s, about 50 s left  redis pause"
    assert said.line(replace(later, within=60.0), 50) == "95 of 100 cycles, 50 s, about 10 s left  redis pau"


def test_progress_is_shown_while_loads_are_measured() -> None:
    said = cli._Progress()
    assert said.line(Progress(0, 2, [], 0.1), 100) == "0 of 2 cycles, 0 s"
    measured = Progress(2, 2, [], 30.0, measuring="redis cost, 3 of 8")
    assert said.line(measured, 100) == "2 of 2 cycles, 30 s  measures redis cost, 3 of 8"


@pytest.fixture(scope="module")
def long() -> Report:
    """A report with eleven columns and all loads, one of which broke off with a traceback."""
    return Report(json.loads(gzip.decompress(Path(__file__).with_name("long_report.json.gz").read_bytes())))


def test_each_figure_is_one_line_that_fits_a_terminal(long: Report) -> None:
    said = io.StringIO()
    cli._show(Console(file=said, width=100), long)
    lines = said.getvalue().splitlines()
    assert [line for line in lines if len(line.rstrip()) > 100 and " broke off: " not in line] == []
    figures = [line for line in lines if line.startswith("redis asyncio")]
    assert len(figures) == 1 + 10 + 1  # one line for the cost, 10 for contention, and one for many locks
    assert any(re.fullmatch(r"redis +2 s +≤ 0.92 +≥ 0.08 +≤ 1.91 +12836 +– +23741 +1617", line) for line in lines)


def test_the_design_record_shows_the_figures_as_tables_in_the_order_of_the_grid(long: Report) -> None:
    text = summary.markdown(long)
    assert "| redis | 2 s | ≤ 0.92 | ≥ 0.08 | ≤ 1.91 | 12836 | – | 23741 | 1617 |" in text
    costs = re.findall(r"^\| ([\w-]+) blocking \|.* \| [\d.]+ \|$", text.partition("ontention")[0], re.MULTILINE)
    assert costs == ["memory", "sqlite", "redis", "etcd", "consul", "zookeeper"]


def test_a_traceback_of_a_load_is_reduced_to_its_last_line(long: Report) -> None:
    why = next(row["why"] for row in long.data["loads"] if row["why"])
    assert "Traceback" in why or "\n" in why.strip()
    [told] = [line for line in summary.markdown(long).splitlines() if " broke off: " in line]
    assert told.startswith("- redis-py: scale broke off: redis.exceptions.LockNotOwnedError: ")


def test_changes_against_an_older_report_are_listed_briefly(long: Report) -> None:
    old, new = long, Report(copy.deepcopy(long.data))
    assert compare.against(old, new) == []
    new.cells["redis", "pause"].update(verdict="broken", broken=2, decided=20, overlap_worst=0.0031)
    new.cells["redis", "partition"]["notice"]["most"] = 1.25
    redis = next(column for column in new.data["columns"] if column["name"] == "redis")
    redis["versions"]["server"] = "redis 8.0.1"
    redis["findings"] = [{"level": "error", "code": "eviction", "message": "", "remedy": ""}]
    costs = [row for row in new.data["loads"] if (row["kind"], row["contestant"]) == ("cost", "redis")]
    next(row for row in costs if row["adapter"].endswith("Blocking"))["acquire_release"]["p50"] = 0.0012
    new.data["cells"].remove(new.cells["sqlite", "kill"])
    assert compare.against(old, new) == [
        "redis, pause: kept → broken",
        "sqlite, kill: not in this run",
        "redis: server redis 7.0.15 → redis 8.0.1, finding persistence warning → –, finding eviction – → error",
        "redis, partition: known after 0.89 ttl → 1.25 ttl",
        "redis, pause: broken 0/301 → 2/20, overlap 0.0 ms → 3.1 ms",
        "redis blocking, acquire and release: p50 0.33 ms → 1.20 ms",
    ]


def made_of(*cells: tuple[str, str, str, float | None], control: str = "") -> Report:
    names = dict.fromkeys(name for name, *_ in cells)
    columns: list[dict[str, Any]] = [
        {"name": name, "control": name == control, "gone": None, "not_applicable": [], "ttl": 2.0} for name in names
    ]
    rows: list[dict[str, Any]] = [
        {
            "contestant": name, "scenario": scenario, "verdict": verdict, "cycles": 1,
            "decided": int(verdict != "undecided"), "broken": int(verdict == "broken"), "overlap_worst": worst,
            "below": None, "notice": None, "takeover": None, "callback_margin": None, "tokens": 0,
        }
        for name, scenario, verdict, worst in cells
    ]  # fmt: skip
    scenarios = [{"name": name} for name in dict.fromkeys(scenario for _, scenario, *_ in cells)]
    return Report(
        {
            "columns": columns, "cells": rows, "loads": [], "scenarios": scenarios, "violations": [],
            "void": ["no control failed"], "exit_code": 3, "partial": "interrupted", "planned": 9,
        }
    )  # fmt: skip


def test_our_columns_come_first_and_an_unknown_cell_is_never_green() -> None:
    report = made_of(
        ("weak", "pause", "broken", 0.2), ("ours", "pause", "kept", -0.1), ("ours", "kill", "undecided", None),
        ("weak", "kill", "broken", 12.0), control="weak",
    )  # fmt: skip
    names, rows = summary.grid(report)
    assert names == ["ours", "weak"]
    assert rows[0] == ("pause", [("0/1 -100ms", "kept"), ("1/1 200ms", "broken")])
    assert rows[1] == ("kill", [("?", "undecided"), ("1/1 12.0s", "broken")])
    assert summary.headline(report).startswith("VOID")
    assert summary.headline(report).endswith("partial: interrupted")
    assert next(summary.notes(report)) == ("VOID: no control failed", "broken")


def test_the_meaning_of_none_of_n_is_explained_only_for_enough_cycles() -> None:
    report = made_of(
        ("ours", "pause", "kept", -0.1), ("ours", "kill", "kept", -0.1), ("weak", "kill", "kept", -0.1), control="weak"
    )
    for cell, decided in zip(report.data["cells"], (300, 271, 11), strict=True):
        cell |= {"decided": decided, "below": 3 / decided}
    assert [text for text, _ in summary.notes(report) if "means" in text] == ["0/271 means: below 1.1 % with 95 %"]
