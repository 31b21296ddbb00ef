"""The wrapper of `make test`: what is run again, what never is, and what it says."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import again

ROOT = Path(__file__).parents[2]


class Alone:
    """Passes so many lone runs of each test, then fails."""

    def __init__(self, passes: int = 1000) -> None:
        self.passes = passes
        self.runs: list[str] = []

    def __call__(self, test: str, seconds: float) -> bool:
        assert 0 < seconds <= 360
        self.runs.append(test)
        return self.runs.count(test) <= self.passes


def test_a_test_that_passes_ten_times_alone_is_unsteady(capsys: pytest.CaptureFixture[str]) -> None:
    alone = Alone()
    assert again.judge([("tests/x.py::test_a", ""), ("tests/x.py::test_a", "")], alone) == 0
    assert alone.runs == ["tests/x.py::test_a"] * 10
    assert capsys.readouterr().out.splitlines()[-1] == "unsteady: tests/x.py::test_a"


@pytest.mark.parametrize("passes", [0, 9])
def test_one_failure_of_ten_is_red(passes: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert again.judge([("tests/x.py::test_a", "")], Alone(passes)) == 1
    assert f"run {passes + 1} of 10 alone failed" in capsys.readouterr().out


def test_more_than_three_failures_are_red_at_once() -> None:
    alone = Alone()
    assert again.judge([(f"tests/x.py::test_{number}", "") for number in range(4)], alone) == 1
    assert again.judge([(f"tests/x.py::test_{number}", "") for number in range(3)], alone) == 0
    assert len(alone.runs) == 30


def test_one_final_failure_is_red_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    alone = Alone()
    assert again.judge([("tests/x.py::test_a", ""), ("tests/x.py::test_b", "an oracle reports it")], alone) == 1
    assert alone.runs == []
    assert "red: tests/x.py::test_b: an oracle reports it" in capsys.readouterr().out


def test_a_lone_run_that_finds_no_time_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(again, "MINUTES", 0.0)
    assert again.judge([("tests/x.py::test_a", "")], Alone()) == 1


@pytest.mark.parametrize(
    ("nodeid", "files", "phase", "final"),
    [
        ("tests/unit/test_x.py::test_a", ["tests/unit/test_x.py"], "call", False),
        ("tests/unit/test_x.py::test_a", [], "collect", True),
        ("tests/faults/test_chaos.py::test_half_a_minute", [], "call", True),
        ("tests/simulation/test_seeds.py::test_seeds", [], "call", True),
        ("tests/x.py::test_a", ["multilock/testing/beliefs/oracles.py"], "call", True),
        ("tests/x.py::test_the_callback_starts_in_time[redis]", [], "call", True),
        ("tests/x.py::test_a_cancel_leaves_nothing_behind", [], "call", True),
        ("tests/x.py::TestLoss::test_two_never_overlap", [], "call", True),
        ("tests/x.py::test_a[token]", [], "call", False),
    ],
)
def test_what_an_oracle_reports_is_never_run_again(nodeid: str, files: list[str], phase: str, final: bool) -> None:
    assert bool(again.must_not_run_again(nodeid, files, phase)) == final


# Each start of pytest takes seconds on a loaded machine: two lone runs, not ten.
TWICE = "import sys; from tests import again; again.RUNS = 2; sys.exit(again.main(sys.argv[1:]))"


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(source: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "test_it.py").write_text(source)
        return subprocess.run(
            [sys.executable, "-c", TWICE, "-p", "no:cacheprovider", "test_it.py", *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    return run


FLAKY = """
import os
def test_sometimes():
    first = not os.path.exists("ran")
    open("ran", "w").close()
    assert not first
def test_always():
    pass
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_with_an_unsteady_test_is_green_and_names_it(
    run: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = run(FLAKY)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "unsteady: test_it.py::test_sometimes"), done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_in_which_a_process_crashes_is_red(run: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = run("import os\ndef test_a(): os._exit(3)", "-n", "1")
    assert (done.returncode, "its process crashed" in done.stdout) == (1, True), done.stdout
