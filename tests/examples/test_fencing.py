"""The database refuses a write that comes too late, after a real pause."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psycopg
import pytest

from tests.examples.conftest import WITHIN, Programs

pytestmark = pytest.mark.timeout(180)


@pytest.mark.parametrize("place", ["sqlite?ttl=2"], indirect=True)
def test_sqlite_refuses_a_late_write(programs: Programs, tmp_path: Path) -> None:
    refuses_a_late_write(programs, "fenced_sqlite.py", tmp_path / "report.db")


@pytest.mark.parametrize("place", ["redis?ttl=2"], indirect=True)
def test_postgresql_refuses_a_late_write(programs: Programs, postgresql_url: str) -> None:
    programs.env["DATABASE_URL"] = postgresql_url
    refuses_a_late_write(programs, "fenced_postgresql.py")


def refuses_a_late_write(programs: Programs, path: str, *arguments: object) -> None:
    late = programs.python(path, *arguments, 3)  # seconds before the write; meanwhile the test stops the process
    [held] = programs.wait_for("holds token")
    os.kill(late.pid, signal.SIGSTOP)
    programs.all_end(programs.python(path, *arguments, 0))
    [wrote] = programs.lines("wrote with token")
    assert int(wrote.split()[-1]) > int(held.split()[-1])
    os.kill(late.pid, signal.SIGCONT)
    assert late.wait(WITHIN) == 1
    assert programs.lines("refused:"), programs.said()
    assert programs.lines("wrote with token") == [wrote]


@pytest.mark.parametrize("place", ["postgresql?ttl=2"], indirect=True)
def test_a_queue_keeps_the_result_of_the_worker_that_was_not_paused(programs: Programs, postgresql_url: str) -> None:
    programs.env["DATABASE_URL"] = postgresql_url
    late = programs.python("job_queue.py", 5)  # seconds before the write; meanwhile the test stops the process
    programs.wait_for("begins job 1")
    os.kill(late.pid, signal.SIGSTOP)
    other = programs.python("job_queue.py", 0)
    programs.all_end(other)
    os.kill(late.pid, signal.SIGCONT)
    programs.all_end(late)
    assert programs.lines("lost job 1: lock 'jobs/1' was lost before its guard"), programs.said()
    with psycopg.connect(postgresql_url) as database:
        assert database.execute("SELECT DISTINCT result FROM jobs").fetchall() == [(f"done by pid {other.pid}",)]
