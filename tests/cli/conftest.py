"""Fixtures that run real `multilock` processes, on SQLite and on Redis."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from subprocess import PIPE, CompletedProcess, Popen

import pytest

import multilock

ROOT = Path(__file__).parents[2]
TTL = 30.0  # seconds; the ttl of locks that the test holds, which must survive a freeze of the machine
WITHIN = 45.0  # seconds to wait at most; on an idle machine a demo takes about ten seconds, and all else less than one

Start = Callable[..., Popen[str]]
Run = Callable[..., CompletedProcess[str]]
RunEach = Callable[..., list[CompletedProcess[str]]]

FORKING = """
import json, os, sys, tempfile
from multilock.cli import main

def ended(words):
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        if not (child := os.fork()):
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            sys.argv[1:] = words
            sys.exit(main())
        _, status = os.waitpid(child, 0)
        out.seek(0)
        err.seek(0)
        return words, os.waitstatus_to_exitcode(status), out.read().decode(), err.read().decode()

print(json.dumps([ended(words) for words in json.loads(sys.argv[1])]))
"""


def until(true: Callable[[], object], within: float = WITHIN) -> None:
    """Wait until ``true()`` is true, for a state that no event reports, such as that of another process."""
    deadline = time.monotonic() + within
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {within} s in vain")
        time.sleep(0.01)


def gone(pid: int) -> bool:
    """Return True if this process has ended. A zombie has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):  # the process ended before the file was opened, or after
        return True


def line_of(process: Popen[str]) -> str:
    """Return the next line that the process prints."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MULTILOCK_")}
    return {**kept, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'backends'}", "COLUMNS": "80", "LINES": "24"}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start `multilock ARGUMENTS`, and kill it at the end of the test if it still runs."""
    with ExitStack() as stack:

        def start(
            *arguments: str, env: dict[str, str] | None = None, stderr: int = PIPE, through: Sequence[str] = ()
        ) -> Popen[str]:
            process = stack.enter_context(
                Popen(
                    [*through, sys.executable, "-m", "multilock", *arguments],
                    env={**environment(), **(env or {})},
                    cwd=tmp_path,
                    stdin=subprocess.DEVNULL,
                    stdout=PIPE,
                    stderr=stderr,
                    text=True,
                )
            )
            stack.callback(process.kill)
            return process

        yield start


@pytest.fixture
def run(start: Start) -> Run:
    """Run `multilock ARGUMENTS` to its end, and check that it shows no traceback."""

    def run(*arguments: str, env: dict[str, str] | None = None) -> CompletedProcess[str]:
        process = start(*arguments, env=env)
        out, err = process.communicate(timeout=WITHIN)
        assert "Traceback" not in err
        return CompletedProcess(process.args, process.returncode, out, err)

    return run


@pytest.fixture
def run_each(tmp_path: Path) -> RunEach:
    """Run `multilock` with each of these arguments, in forks of one process, because the imports take most of the time
    of a run."""

    def run_each(*commands: Sequence[str]) -> list[CompletedProcess[str]]:
        program = [sys.executable, "-c", FORKING, json.dumps(commands)]
        done = subprocess.run(
            program, env=environment(), cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, check=True
        )
        return [CompletedProcess(*each) for each in json.loads(done.stdout)]

    return run_each


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite://{tmp_path}/locks.db"


# The commands do not depend on the backend, except when a lock is lost. The tests of losses name both backends.
@pytest.fixture(params=["sqlite", pytest.param("redis", marks=pytest.mark.rare)])
def url(request: pytest.FixtureRequest) -> str:
    """Return a URL that only this test uses."""
    if request.param == "sqlite":
        return str(request.getfixturevalue("sqlite_url"))
    return f"{request.getfixturevalue('redis_url')}?prefix={uuid.uuid4().hex}/"


@pytest.fixture
def client(url: str) -> Iterator[multilock.Client]:
    """Connect a client of the test to the ``url`` that the commands use."""
    with multilock.connect(url, ttl=TTL) as client:
        yield client
