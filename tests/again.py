"""``python -m tests.again ARGUMENTS``: run pytest, then run each failed test ten more times on its own.

A test is unsteady if it fails beside other tests, but passes ten times out of ten on its own while all cores are kept
half busy. If all failed tests are unsteady, the run is green and ends with a line that names them. An unsteady test
must be repaired soon. The run is red if more than three tests fail, if one of the ten runs fails, or if the reruns take
longer than six minutes.

Some failures are final, and their tests never run again: crashes, collection errors, and failures that an oracle
reports. An oracle checks for an overlap, a decreasing token, a late, missing or second callback, or keys left at the
server. A failure counts as reported by an oracle if the oracle's own code raised, or if a test marked
``@pytest.mark.oracle`` failed after its servers had started. `tests.oracles.CONFORMANCE` lists such tests of the suites
that all backends share.
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

RUNS = 10  # runs of each test, all of which must pass
UNSTEADY = 3  # failures in one run; more than these probably have a common cause
MINUTES = 6.0  # limit for all reruns together
REPORT = "MULTILOCK_FAILURES"  # the environment variable with the path of a file, which gets one line for each failure
PLUGIN = ("-p", "tests.again")

FOLDERS = re.compile(r"^tests/(faults|simulation)/")
JUDGES = (f"{os.sep}beliefs{os.sep}", f"tests{os.sep}faults{os.sep}", f"tests{os.sep}oracles.py")

Failure = tuple[str, str]
"""The test, and why it must not be run again (empty: it may)."""


def must_not_run_again(nodeid: str, files: Iterable[str], phase: str, marked: bool) -> str:
    """Return why the failure of this test is final, or an empty text if the test may run again.

    ``files`` are the files that the traceback names. ``phase`` is `pytest.TestReport.when`, or "collect". ``marked``
    says whether the test carries the oracle marker. A test that failed in its setup has not checked anything yet, so
    its marker does not count.
    """
    if phase == "collect":
        return "an error of collection"
    if FOLDERS.search(nodeid) or any(judge in file for file in files for judge in JUDGES):
        return "an oracle reports it"
    return "an oracle's question" if marked and phase != "setup" else ""


# This hook of pytest runs in the process of the test, where more is known about the exception than in the report.


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    if report.failed and call.excinfo:
        files = [str(entry.path) for entry in call.excinfo.traceback]
        marked = item.get_closest_marker("oracle") is not None
        report.user_properties.append(("final", must_not_run_again(item.nodeid, files, report.when, marked)))
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:  # a worker that crashed reports no reason
        _note(report.nodeid, str(dict(report.user_properties).get("final", "its process crashed")))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _note(report.nodeid, must_not_run_again(report.nodeid, (), "collect", False))


def _note(nodeid: str, final: str) -> None:
    # With xdist workers, only the process that collects their reports writes this file.
    if (path := os.environ.get(REPORT)) and "PYTEST_XDIST_WORKER" not in os.environ:
        with open(path, "a", encoding="utf-8") as notes:
            notes.write(json.dumps([nodeid, final]) + "\n")


# The command, which runs pytest, and then each failed test on its own.


def main(arguments: Sequence[str]) -> int:
    """Return pytest's exit code, or 0 if every failed test is only unsteady."""
    notes = Path(".state") / "failures.jsonl"
    notes.parent.mkdir(exist_ok=True)
    notes.unlink(missing_ok=True)
    code = _pytest([*PLUGIN, *arguments], {REPORT: str(notes)}, None)
    lines = notes.read_text(encoding="utf-8").splitlines() if notes.exists() else []
    if code != 1:  # the run is green, or has an error that no single test caused
        return code or 0
    return judge([tuple(json.loads(line)) for line in lines], _alone)


def judge(failures: Sequence[Failure], alone: Callable[[str, float], bool]) -> int:
    """Return 0 if each failed test passes when ``alone(test, seconds)`` runs it, else 1. Print the reason."""
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
    """Run pytest. Returns its exit code, or None if it took longer than ``seconds``."""
    # These variables would make pytest a worker of the surrounding run, so they are removed.
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    run = subprocess.Popen([sys.executable, "-m", "pytest", *arguments], env={**clean, **more})
    try:
        return run.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if run.poll() is None:
            run.send_signal(signal.SIGINT)  # lets pytest stop the servers it has started
            with contextlib.suppress(subprocess.TimeoutExpired):
                run.wait(20)
        run.kill()
        run.wait()


class _HalfBusy:
    """One process per core, each busy half of the time."""

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
