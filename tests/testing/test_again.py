"""Tests of `tests.again`, by which `make test` runs pytest: which tests run again, which never do, and what it
reports."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from multilock.testing.conformance import LossConformance
from tests import again
from tests.oracles import is_of_conformance

ROOT = Path(__file__).parents[2]


class Alone:
    """A stand-in for running a test alone: the first ``passes`` runs of each test pass, and later ones fail."""

    def __init__(self, passes: int = 1000) -> None:
        self.passes = passes
        self.runs: list[str] = []

    def __call__(self, test: str, seconds: float) -> bool:
        assert 0 < seconds <= 360
        self.runs.append(test)
        return self.runs.count(test) <= self.passes


def test_a_failed_test_that_passes_ten_times_alone_is_unsteady(capsys: pytest.CaptureFixture[str]) -> None:
    alone = Alone()
    assert again.judge([("tests/x.py::test_a", ""), ("tests/x.py::test_a", "")], alone) == 0
    assert alone.runs == ["tests/x.py::test_a"] * 10
    assert capsys.readouterr().out.splitlines()[-1] == "unsteady: tests/x.py::test_a"


@pytest.mark.parametrize("passes", [0, 9])
def test_a_failed_test_that_fails_once_in_ten_runs_is_red(passes: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert again.judge([("tests/x.py::test_a", "")], Alone(passes)) == 1
    assert f"run {passes + 1} of 10 alone failed" in capsys.readouterr().out


def test_more_than_three_failures_are_red_at_once() -> None:
    alone = Alone()
    assert again.judge([(f"tests/x.py::test_{number}", "") for number in range(4)], alone) == 1
    assert again.judge([(f"tests/x.py::test_{number}", "") for number in range(3)], alone) == 0
    assert len(alone.runs) == 30


def test_one_failure_of_the_final_run_is_red_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    alone = Alone()
    assert again.judge([("tests/x.py::test_a", ""), ("tests/x.py::test_b", "an oracle reports it")], alone) == 1
    assert alone.runs == []
    assert "red: tests/x.py::test_b: an oracle reports it" in capsys.readouterr().out


def test_a_repetition_without_time_left_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(again, "MINUTES", 0.0)
    assert again.judge([("tests/x.py::test_a", "")], Alone()) == 1


@pytest.mark.parametrize(
    ("nodeid", "files", "phase", "marked", "final"),
    [
        ("tests/unit/test_x.py::test_a", ["tests/unit/test_x.py"], "call", False, False),
        ("tests/unit/test_x.py::test_a", [], "collect", False, True),
        ("tests/faults/test_chaos.py::test_half_a_minute", [], "call", False, True),
        ("tests/simulation/test_seeds.py::test_seeds", [], "call", False, True),
        ("tests/x.py::test_a", ["/p/multilock/testing/beliefs/oracles.py"], "call", False, True),
        ("tests/x.py::test_a", ["/p/tests/oracles.py"], "teardown", False, True),
        ("tests/x.py::test_a", ["/p/tests/servers.py"], "setup", True, False),
        ("tests/x.py::test_a", ["/p/tests/x.py"], "call", True, True),
        ("tests/x.py::test_a", ["/p/tests/x.py"], "teardown", True, True),
        ("tests/x.py::test_the_options_of_a_callback_are_checked", ["/p/tests/x.py"], "call", False, False),
    ],
)
def test_a_test_that_reports_for_an_oracle_is_never_repeated(
    nodeid: str, files: list[str], phase: str, marked: bool, final: bool
) -> None:
    assert bool(again.must_not_run_again(nodeid, files, phase, marked)) == final


@pytest.mark.parametrize(
    ("suite", "name", "asks"),
    [
        (LossConformance, "test_there_is_never_a_callback_after_a_release", True),
        (type("TestLoss", (LossConformance,), {}), "test_there_is_never_a_callback_after_a_release", True),
        (LossConformance, "test_an_async_callback_is_awaited", False),
        (None, "test_there_is_never_a_callback_after_a_release", False),
    ],
)
def test_the_shared_suites_have_their_oracles(suite: type | None, name: str, asks: bool) -> None:
    item = SimpleNamespace(cls=suite, originalname=name)
    assert is_of_conformance(item) == asks  # type: ignore[arg-type]


# Each start of pytest takes seconds on a loaded machine, so here each failed test runs only twice more, without
# plugins.
TWICE = "import sys; from tests import again; again.RUNS = 2; sys.exit(again.main(sys.argv[1:]))"


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(source: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "test_it.py").write_text(source)
        return subprocess.run(
            [sys.executable, "-c", TWICE, "-p", "no:cacheprovider", "test_it.py", *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
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
def test_a_run_with_an_unsteady_test_is_green_and_names_the_test(
    run: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = run(FLAKY)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "unsteady: test_it.py::test_sometimes"), done.stdout


ORACLE = """
import os, pytest
@pytest.mark.oracle
def test_sometimes():
    first = not os.path.exists("ran")
    open("ran", "w").close()
    assert not first
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_in_which_an_oracle_objects_once_is_red(run: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = run(ORACLE, "-W", "ignore::pytest.PytestUnknownMarkWarning")
    assert (done.returncode, "red: test_it.py::test_sometimes: an oracle's question" in done.stdout) == (1, True)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_in_which_a_process_crashes_is_red(run: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = run("import os\ndef test_a(): os._exit(3)", "-p", "xdist.plugin", "-n", "1")
    assert (done.returncode, "its process crashed" in done.stdout) == (1, True), done.stdout
