"""The code that the author of a backend must write to use the conformance suite."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# The minimum that docs/writing-a-backend.md demands: a scheme that only this process knows, and a `Place` with two
# members.
BACKEND = """
import multilock
from multilock_sqlite import open_backend

multilock.register_backend("mine", lambda url, options: open_backend("sqlite" + url.removeprefix("mine"), options))
"""

TESTS = """
import sqlite3
from pathlib import Path

import mine
from multilock.names import escape
from multilock.testing import conformance

PATH = Path(__file__).with_name("locks.db")

class Mine(conformance.Place):
    url = f"mine://{PATH}"
    registered_in = "mine"

    def delete(self, name):
        with sqlite3.connect(PATH, timeout=5) as file:
            file.execute("DELETE FROM locks WHERE key = ?", (self.prefix + escape(name),))
        file.close()

class TestLock(conformance.LockConformance):
    backend = Mine

class TestClient(conformance.ClientConformance):
    backend = Mine

class TestBackend(conformance.BackendConformance):
    backend = Mine

class TestProcess(conformance.ProcessConformance):
    backend = Mine
"""

# Tests that send requests to the backend, and one that uses other processes.
ASKING = "gave_up or nothing_is_left or leaves_nothing or renew_answers or harmless_twice or exclude_each_other"


def test_a_place_needs_only_a_url_and_delete(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(BACKEND)
    (tmp_path / "test_mine.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "no:randomly", "-q", "-k", ASKING]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split(" passed")[0].split()[-1]) >= 8
