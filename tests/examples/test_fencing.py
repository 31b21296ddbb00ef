"""A write that comes too late, after a real pause, is refused by the database."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.examples.conftest import WITHIN, Programs
from tests.servers_postgresql import PostgresqlServer

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def postgresql_url() -> Iterator[str]:
    with PostgresqlServer() as server:
        yield server.url


@pytest.mark.parametrize("place", ["sqlite?ttl=2"], indirect=True)
def test_sqlite_refuses_a_late_write(programs: Programs, tmp_path: Path) -> None:
    refuses_a_late_write(programs, "fenced_sqlite.py", tmp_path / "report.db")


@pytest.mark.parametrize("place", ["redis?ttl=2"], indirect=True)
def test_postgresql_refuses_a_late_write(programs: Programs, postgresql_url: str) -> None:
    programs.env["DATABASE_URL"] = postgresql_url
    refuses_a_late_write(programs, "fenced_postgresql.py")


def refuses_a_late_write(programs: Programs, path: str, *arguments: object) -> None:
    late = programs.python(path, *arguments, 3)  # long enough for a test to stop the process in it
    [held] = programs.wait_for("holds token")
    os.kill(late.pid, signal.SIGSTOP)
    programs.all_end(programs.python(path, *arguments, 0))
    [wrote] = programs.lines("wrote with token")
    assert int(wrote.split()[-1]) > int(held.split()[-1])
    os.kill(late.pid, signal.SIGCONT)
    assert late.wait(WITHIN) == 1
    assert programs.lines("refused:"), programs.said()
    assert programs.lines("wrote with token") == [wrote]
