"""``python -m tests.again ARGUMENTS``: pytest, and then what failed once more, ten times alone.

A test is unsteady if it failed beside others on two loaded cores, and passes ten times out of ten alone while both
cores are kept half busy. The run is green then, and ends with a line that names the test, which is mended before its
issue is closed. More than three of them, one failure in ten, or six minutes that are over: the run is red.

Never run again is what must not be explained away: crashes, errors of collection, and what an oracle reports (an
overlap, a token that goes back, a late, missing or second callback, something left behind). An oracle reports where
its own code raises, and where a test that bears ``@pytest.mark.oracle`` fails, once its servers are there
(`tests.oracles.CONFORMANCE` for the suites that all backends share). This is the only place that runs a test again.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

__all__ = ["Failure", "judge", "main", "must_not_run_again"]

RUNS = 10  # all of them must pass
UNSTEADY = 3  # more in one run are a sign of something else
MINUTES = 6.0  # for all lone runs together
REPORT = "MULTILOCK_FAILURES"  # names the file that gets a line for each failure
PLUGIN = ("-p", "tests.again")

FOLDERS = re.compile(r"^tests/(faults|simulation)/")
JUDGES = (f"{os.sep}beliefs{os.sep}", f"tests{os.sep}faults{os.sep}", f"tests{os.sep}oracles.py")

Failure = tuple[str, str]
"""The test, and why it must not be run again (empty: it may)."""


def must_not_run_again(nodeid: str, files: Iterable[str], phase: str, marked: bool) -> str:
    """Return why this failure is final, or an empty text.

    ``files``: those that its traceback names. ``phase``: as of `pytest.TestReport.when`, or "collect". ``marked``:
    whether the test asks an oracle's question. It has not asked it yet if its setup failed.
    """
    if phase == "collect":
        return "an error of collection"
    if FOLDERS.search(nodeid) or any(judge in file for file in files for judge in JUDGES):
        return "an oracle reports it"
    return "an oracle's question" if marked and phase != "setup" else ""


# The plugin: in the process that runs a test, since a report says less of an exception.


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    if report.failed and call.excinfo:
        files = [str(entry.path) for entry in call.excinfo.traceback]
        marked = item.get_closest_marker("oracle") is not None
        report.user_properties.append(("final", must_not_run_again(item.nodeid, files, report.when, marked)))
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:  # a worker that crashed says nothing of its test
        _note(report.nodeid, str(dict(report.user_properties).get("final", "its process crashed")))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _note(report.nodeid, must_not_run_again(report.nodeid, (), "collect", False))


def _note(nodeid: str, final: str) -> None:
    # With workers, only the process that collects their reports notes them.
    if (path := os.environ.get(REPORT)) and "PYTEST_XDIST_WORKER" not in os.environ:
        with open(path, "a", encoding="utf-8") as notes:
            notes.write(json.dumps([nodeid, final]) + "\n")


# The wrapper


def main(arguments: Sequence[str]) -> int:
    """Return pytest's exit code, or 0 where all that failed is unsteady."""
    notes = Path(".state") / "failures.jsonl"
    notes.parent.mkdir(exist_ok=True)
    notes.unlink(missing_ok=True)
    code = _pytest([*PLUGIN, *arguments], {REPORT: str(notes)}, None)
    lines = notes.read_text(encoding="utf-8").splitlines() if notes.exists() else []
    if code != 1:  # green, or no matter of a single test
        return code or 0
    return judge([tuple(json.loads(line)) for line in lines], _alone)


def judge(failures: Sequence[Failure], alone: Callable[[str, float], bool]) -> int:
    """Return 0 if each of these passes when ``alone(test, seconds)`` runs it, else 1; say why."""
    finals = {test: why for test, why in failures if why}
    tests = list(dict.fromkeys(test for test, _ in failures))
    for test, why in finals.items():
        print(f"red: {test}: {why}")
    if finals or not tests:
        return 1
    if len(tests) > UNSTEADY:
        print(f"red: {len(tests)} tests failed, and at most {UNSTEADY} are run again")
        return 1
    end = time.monotonic() + 60 * MINUTES
    for test in tests:
        for turn in range(1, RUNS + 1):
            left = end - time.monotonic()
            if left <= 0 or not alone(test, left):
                print(f"red: {test}: run {turn} of {RUNS} alone {'failed' if left > 0 else 'found no time'}")
                return 1
    for test in tests:
        print(f"unsteady: {test}")
    return 0


def _alone(test: str, seconds: float) -> bool:
    with _HalfBusy():
        return _pytest(["-q", "-p", "no:randomly", test], {}, seconds) == 0


def _pytest(arguments: Sequence[str], more: dict[str, str], seconds: float | None) -> int | None:
    """Return its exit code, None if it took longer."""
    # It is no worker of a run around it.
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    run = subprocess.Popen([sys.executable, "-m", "pytest", *arguments], env={**clean, **more})
    try:
        return run.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if run.poll() is None:
            run.send_signal(signal.SIGINT)  # so that it stops the servers that it has started
            with contextlib.suppress(subprocess.TimeoutExpired):
                run.wait(20)
        run.kill()
        run.wait()


class _HalfBusy:
    """A process for each core that works half of the time."""

    WORK = """
import os, time
parent = os.getppid()
while os.getppid() == parent:
    end = time.monotonic() + 0.005
    while time.monotonic() < end:
        pass
    time.sleep(0.005)
"""

    def __enter__(self) -> None:
        self._busy = [subprocess.Popen([sys.executable, "-c", self.WORK]) for _ in range(os.cpu_count() or 1)]

    def __exit__(self, *_: object) -> None:
        for each in self._busy:
            each.kill()
            each.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
