"""Start the programs of docs/examples/ as their pages say, on the tests' servers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.servers import RedisServer
from tests.servers_consul import ConsulServer
from tests.servers_etcd import EtcdServer
from tests.servers_postgresql import PostgresqlServer

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"
BIN = Path(sys.executable).parent
WITHIN = 45.0  # seconds to wait at most; on an idle machine each wait takes one or two


def until(true: Callable[[], Any], within: float = WITHIN, why: Callable[[], object] = str) -> Any:
    """Wait until the condition ``true`` returns a true value, and return that value."""
    deadline = time.monotonic() + within
    while not (found := true()):
        assert time.monotonic() < deadline, f"waited {within} s in vain: {why()}"
        time.sleep(0.02)
    return found


class Programs:
    """Running examples, each in its own process group. All write lines to one file, so that the order of the lines is
    known."""

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        self.folder = folder
        self.env = env
        self._log = folder / "said.log"
        self._log.touch()
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, *command: object, cwd: Path | None = None) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as said:  # in append mode, no process overwrites a line of another one
            process = subprocess.Popen(
                [str(part) for part in command],
                cwd=cwd or self.folder,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def python(self, path: str, *arguments: object) -> subprocess.Popen[bytes]:
        """Start an example. A warning in it is an error."""
        return self.start(sys.executable, "-W", "error::ResourceWarning", EXAMPLES / path, *arguments)

    def all_end(self, *processes: subprocess.Popen[bytes]) -> None:
        """Check that these examples end by themselves, with exit code 0."""
        for process in processes:
            assert process.wait(WITHIN) == 0, self.said()

    def terminate(self, process: subprocess.Popen[bytes]) -> int:
        """Send SIGTERM to this one process, as a supervisor does, and return its exit code."""
        process.terminate()
        try:
            return process.wait(WITHIN)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it does not end: {self.said()}") from None

    def said(self) -> str:
        return self._log.read_text(errors="replace")

    def lines(self, *containing: str) -> list[str]:
        """Return the lines that contain all of these words."""
        lines = self.said().rpartition("\n")[0].splitlines()
        return [line for line in lines if all(word in line for word in containing)]

    def wait_for(self, *containing: str, times: int = 1) -> list[str]:
        def enough() -> list[str]:
            found = self.lines(*containing)
            return found if len(found) >= times else []

        found: list[str] = until(enough, why=self.said)
        return found

    def end(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
        for process in self._started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            with contextlib.suppress(ProcessLookupError):  # the group may outlive its first process
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def programs(tmp_path: Path, place: str) -> Iterator[Programs]:
    """An object that starts examples with the URL of this test in their environment."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MULTILOCK_", "PYTHON"))}
    path = os.pathsep.join([str(BIN), os.environ["PATH"]])
    programs = Programs(tmp_path, {**kept, "PATH": path, "MULTILOCK_URL": place})
    try:
        yield programs
    finally:
        programs.end()


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A URL for this test alone; ``parametrize(…, indirect=True)`` names the backend, and options after a ``?``."""
    name, _, options = str(getattr(request, "param", "sqlite")).partition("?")
    if name == "sqlite":
        return f"sqlite://{tmp_path}/locks.db?{options}"
    server = request.getfixturevalue(f"{name}_url")
    return f"{server}?prefix={uuid.uuid4().hex}/&{options}".rstrip("&")


@pytest.fixture(scope="session")
def etcd_url() -> Iterator[str]:
    with EtcdServer() as server:
        yield server.url


@pytest.fixture(scope="session")
def consul_url() -> Iterator[str]:
    with ConsulServer() as server:
        yield server.url


@pytest.fixture(scope="session")
def postgresql_server() -> Iterator[PostgresqlServer]:
    with PostgresqlServer() as server, psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute("CREATE ROLE web LOGIN")  # the role of the programs, which may create nothing
        yield server


@pytest.fixture
def postgresql_url(postgresql_server: PostgresqlServer) -> str:
    """The URL of a new database, with a role that may do everything."""
    name = f"test_{uuid.uuid4().hex}"
    with psycopg.connect(postgresql_server.url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return postgresql_server.url.removesuffix("postgres") + name


@pytest.fixture(scope="session")
def broker_url() -> Iterator[str]:
    """The URL of Celery's messages, which must not be the backend of the locks."""
    with RedisServer() as server:
        yield server.url


def http(url: str, method: str = "GET") -> tuple[int, Any]:
    """Return the status and the body of the response. The status is 0 if no server listens yet."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=10) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)
    except OSError:
        return 0, None
