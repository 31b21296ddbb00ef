"""Any process can be frozen and killed, and the times of its freezes can be read afterwards."""

from __future__ import annotations

import math
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from multilock import now
from multilock.testing import kill, pause, pausing

# A program that prints the id of an idle child, then echoes each line of its input.
TALKS = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
for line in sys.stdin:
    print("heard", line, end="", flush=True)
"""


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", TALKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                kill(process)


def child_of(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    return int(process.stdout.readline())


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_process_is_frozen_inside_the_block_and_resumes_after_it(process: subprocess.Popen[str]) -> None:
    child_of(process)
    before = now()
    with pause(process) as paused:
        assert paused.pid == process.pid
        assert state(process.pid) == "T"
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("hello\n")
        process.stdin.flush()
    assert process.stdout.readline() == "heard hello\n"
    [(start, end)] = pausing.spans(process.pid)
    assert before <= start <= end <= now()


def test_a_process_started_elsewhere_can_be_paused_too(process: subprocess.Popen[str]) -> None:
    child = child_of(process)
    with pause(child):
        assert state(child) == "T"
    assert state(child) != "T"


def test_dead_processes_stay_dead_and_their_parent_can_read_their_exit_codes(process: subprocess.Popen[str]) -> None:
    child = child_of(process)
    pause(process)
    with kill(process):
        assert process.poll() == -9
    assert pausing.spans(process.pid)[-1][1] == math.inf  # the process never continued
    kill(process)
    with pytest.raises(ProcessLookupError, match="has ended: it cannot be paused"):
        pause(process)
    pausing.end(child)  # the child was killed with its process group, so none is left


def test_a_process_of_multiprocessing_can_be_paused() -> None:
    process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
    with pytest.raises(ValueError, match="has no pid"):
        kill(process)
    process.start()
    with pause(process):
        kill(process)
    assert process.exitcode == -9


def test_the_plugin_resumes_processes_that_a_test_left_paused(process: subprocess.Popen[str]) -> None:
    child_of(process)
    pause(process)
    pausing.resume_all()
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("hello\n")
    process.stdin.flush()
    assert process.stdout.readline() == "heard hello\n"
    assert pausing.spans(process.pid) == []


@pytest.mark.parametrize("act", [pause, kill])
def test_process_groups_and_the_own_process_are_refused(act: Callable[[int], object]) -> None:
    for pid in (0, -1, 1, os.getpid()):
        with pytest.raises(ValueError, match="not a process that a test may freeze or kill"):
            act(pid)


def test_an_object_that_is_not_a_process_is_refused() -> None:
    for nonsense in (True, "12", None):
        with pytest.raises((TypeError, ValueError)):
            kill(nonsense)  # type: ignore[arg-type]
