"""Find the servers for the tests, start them on free ports of 127.0.0.1, and stop them again.

If the program of a server is missing, its tests are skipped. The tests fail instead if ``MULTILOCK_REQUIRE``
(``redis,…``) names the server. Only servers that the tests started are ever stopped, by their process id.

``python -m tests.servers redis -- COMMAND {url}`` runs a command with the address of a fresh server.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, Generic, NoReturn, Self, TypeVar

import pytest

__all__ = [
    "SERVERS",
    "Cluster",
    "RedisServer",
    "Server",
    "address",
    "bootstrap",
    "free_port",
    "running",
    "unavailable",
]

TRIES = 3  # another process may take a free port before the server does
STOP_WITHIN = 5.0  # seconds until a server that does not stop is killed
# These ports, and the ports 10,000 higher on which the nodes of a Redis Cluster talk to each other, are below the range
# that the kernel gives to clients. Each worker has its own ports, so that no other worker takes the port of a server
# that is being restarted.
FIRST_PORT, WORKERS, EACH = 10_000, 8, 1_200
_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % WORKERS
_ports = itertools.cycle(FIRST_PORT + _worker * EACH + (os.getpid() + n) % EACH for n in range(EACH))


def free_port() -> int:
    """Return a port on which nobody listens. Another process may take the port first; `Server.start` then tries another
    port."""
    while True:
        port = next(_ports)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Service:
    """Base of servers and clusters. A service runs inside a ``with`` block."""

    def start(self) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:  # also the time limit of the test
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class Server(Service):
    """One server process with its own folder. `start` returns once the server answers a real request.

    A subclass defines the name of the server, the command that starts it, and the request that checks it.
    """

    name: ClassVar[str]  #: the scheme of the server's URL
    program: ClassVar[str]  #: the name that messages use
    start_within: ClassVar[float]  #: seconds until the server answers, on a busy machine
    ends_by: ClassVar[signal.Signals] = signal.SIGTERM  #: the signal that `stop` sends
    place: ClassVar[str | None] = None  #: the parent of the server's folder; None for the default
    keeps: ClassVar[bool] = True  #: whether the server keeps its folder at `kill`; `stop` always deletes it

    def __init__(self) -> None:
        self.host = "127.0.0.1"
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    @property
    def endpoint(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.name}://{self.endpoint}"

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError(f"this {self.program} was not started")
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def command(self, folder: Path) -> list[str]:
        """Write the files that the command line names, and return the command line. Skips the test if the program is
        missing."""
        raise NotImplementedError

    def answers(self) -> bool:
        """Return whether the server answers a real request within about a second."""
        raise NotImplementedError

    def take_ports(self) -> None:
        self.port = free_port()

    def start(self) -> None:
        """Start the server with the data it has kept. It reuses its earlier ports, if any, so that clients find it
        again."""
        again = bool(self.port)
        for left in reversed(range(TRIES)):
            if not again:
                self.take_ports()
            try:
                self.launch()
                self.await_answer()
                return
            except OSError:
                self.kill() if again else self.stop()
                if again or not left:
                    raise

    def launch(self) -> None:
        """Start the process without waiting for an answer. One member of a cluster never answers alone."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(
                prefix="multilock-test-", dir=self.place, ignore_cleanup_errors=True
            )
        folder = Path(self._folder.name)
        with self._log().open("ab") as output:
            self._process = subprocess.Popen(
                self.command(folder),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C at the tests must not reach the server before its clients are closed
            )

    def await_answer(self) -> None:
        until = time.monotonic() + self.start_within
        while not self.answers():
            if not self.alive or time.monotonic() > until:
                said = self._log().read_text(errors="replace")[-1000:]
                raise OSError(f"{self.program} does not answer on port {self.port}: {said}")
            time.sleep(0.01)

    def stop(self) -> None:
        """End the server and delete its data. This does nothing if the server is not running."""
        self._end(self.ends_by)
        self._clear()

    def kill(self) -> None:
        """End the server as a power cut would. `start` brings it back, with its data if it `keeps` them."""
        self._end(signal.SIGKILL)
        if not self.keeps:
            self._clear()

    def restart(self) -> None:
        """Kill the server and start it again on the same ports."""
        self.kill()
        self.start()

    def pause(self) -> None:
        """Freeze the server. Connections stay open and new ones are accepted, but no request is answered."""
        os.kill(self.pid, signal.SIGSTOP)
        # The signal stops one thread after another, so wait for the last thread.
        until = time.monotonic() + STOP_WITHIN
        while any(_state(task) not in "Tt" for task in Path(f"/proc/{self.pid}/task").iterdir()):
            if time.monotonic() > until:
                raise OSError(f"{self.program} does not stop")
            time.sleep(0.001)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def logged(self, lines: int) -> str:
        """Return the last ``lines`` of the server's log."""
        if self._folder is None:
            return ""
        return "\n".join(self._log().read_text(errors="replace").splitlines()[-lines:])

    def _log(self) -> Path:
        assert self._folder is not None
        return Path(self._folder.name, "server.log")

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(number)
        process.send_signal(signal.SIGCONT)  # a frozen process receives only SIGKILL
        try:
            process.wait(STOP_WITHIN)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _clear(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _state(task: Path) -> str:
    """Return the state of a thread: ``T`` if it is stopped."""
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:  # the thread has just ended
        return "T"


S = TypeVar("S", bound=Server)


class Cluster(Service, Generic[S]):
    """Servers on this machine that form a cluster. A subclass makes the members, tells each the addresses of the
    others, and finds the leader."""

    members: Sequence[S]

    @property
    def url(self) -> str:
        return f"{self.members[0].name}://" + ",".join(member.endpoint for member in self.members)

    def introduce(self) -> None:
        """Tell each member the addresses of the others, before it is started."""
        raise NotImplementedError

    def find_leader(self) -> S | None:
        """Return the member that leads now, or None."""
        raise NotImplementedError

    def leader(self) -> S:
        until = time.monotonic() + self.members[0].start_within
        while (found := self.find_leader()) is None:
            if time.monotonic() > until:
                raise TimeoutError("the cluster has no leader")
            time.sleep(0.02)
        return found

    def followers(self) -> list[S]:
        leader = self.leader()
        return [member for member in self.members if member is not leader]

    def majority(self, votes: list[str]) -> str:
        """Return the reply of more than half of the members, or an empty text if there is no majority."""
        most = max(set(votes), key=votes.count, default="")
        return most if votes.count(most) * 2 > len(self.members) else ""

    def start(self) -> None:
        for left in reversed(range(TRIES)):
            for member in self.members:
                member.take_ports()
            self.introduce()
            try:
                for member in self.members:
                    member.launch()
                for member in self.members:
                    member.await_answer()
                return
            except OSError:
                self.stop()
                if not left:
                    raise

    def stop(self) -> None:
        for member in self.members:
            member.stop()


class RedisServer(Server):
    """One Redis or Valkey without persistence. ``options`` are further arguments of its command line."""

    name = "redis"
    program = "redis-server"
    start_within = 10.0  # a fresh server answers after 0.05 s on an idle machine
    keeps = False

    def __init__(self, *options: str) -> None:
        super().__init__()
        self.options = options

    @property
    def url(self) -> str:
        return f"{super().url}/0"

    def command(self, folder: Path) -> list[str]:
        program = shutil.which(self.program) or unavailable(self.name, f"{self.program} is not on the PATH")
        fixed = {"port": str(self.port), "bind": self.host, "save": "", "appendonly": "no", "dir": str(folder)}
        return [program, *(part for key, value in fixed.items() for part in (f"--{key}", value)), *self.options]

    def answers(self) -> bool:
        return b"+PONG" in self._ask(b"PING\r\n") or b"NOAUTH" in self._ask(b"PING\r\n")

    def _ask(self, request: bytes) -> bytes:
        try:
            with socket.create_connection((self.host, self.port), timeout=1.0) as connection:
                connection.sendall(request)
                return connection.recv(100)
        except OSError:
            return b""


SERVERS: dict[str, Callable[[], Server]] = {"redis": RedisServer}


@lru_cache
def bootstrap(name: str, *options: str) -> str:
    """Find or install this server with its script in ``tests/bootstrap``, and return the path that the script prints.

    If the script fails, skip the test or let it fail (`unavailable`).
    """
    script = Path(__file__).parent / "bootstrap" / f"{name}.sh"
    found = subprocess.run([str(script), *options], capture_output=True, text=True, check=False)
    if found.returncode:
        unavailable(name, found.stderr.strip().replace("\n", " "))
    return found.stdout.strip()


def unavailable(name: str, why: str) -> NoReturn:
    """Let the test fail if ``MULTILOCK_REQUIRE`` names this server. Otherwise skip it."""
    message = f"no {name} server: {why}"
    if name in os.environ.get("MULTILOCK_REQUIRE", "").replace(" ", "").split(","):
        pytest.fail(f"{message} (MULTILOCK_REQUIRE asks for it)", pytrace=False)
    pytest.skip(message)


@contextlib.contextmanager
def running(name: str) -> Iterator[Server]:
    """Start a fresh server of this kind that the test may pause, kill and empty."""
    server = SERVERS[name]()
    try:
        server.start()
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def address(name: str) -> Iterator[str]:
    """Yield the URL of a server of this kind to which tests may only send requests. The server is that of the
    environment, else a fresh one."""
    if url := os.environ.get(f"MULTILOCK_TEST_{name.upper()}_URL"):
        yield url
    else:
        with running(name) as server:
            yield server.url


def main(arguments: list[str]) -> int:
    name, _, *command = arguments
    try:
        with running(name) as server:
            return subprocess.run([part.replace("{url}", server.url) for part in command], check=False).returncode
    except (pytest.skip.Exception, pytest.fail.Exception) as missing:
        print(missing, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
