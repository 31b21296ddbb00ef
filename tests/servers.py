"""The servers the tests run on: found, started on free ports of 127.0.0.1, and stopped again.

A missing server is a loud skip, and a failure where ``MULTILOCK_REQUIRE`` (``redis,…``) names it. Only what was started
here is ever stopped, by its own process id.

``python -m tests.servers redis -- COMMAND {url}`` runs a command with the address of a fresh server.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar, NoReturn

import pytest

__all__ = ["SERVERS", "RedisServer", "Server", "address", "free_port", "running", "unavailable"]

START_WITHIN = 10.0  # seconds; a Redis answers after 0.05 on an idle machine
STOP_WITHIN = 5.0
HIGHEST_PORT = 55_535  # the nodes of a Redis Cluster talk to each other on a port that is 10,000 higher


def free_port() -> int:
    """A port nobody listens on. Another process may take it before we do: `Server.start` then tries another one."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if port <= HIGHEST_PORT:
            return port


class Server:
    """One server process of ours, with an empty directory. `start` returns once it answers a real request.

    A subclass says how it is called, how it is started and how it is asked.
    """

    name: ClassVar[str]
    program: ClassVar[str]

    def __init__(self, *options: str) -> None:
        self.options = options
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    @property
    def url(self) -> str:
        raise NotImplementedError

    def command(self, program: str, folder: str) -> list[str]:
        raise NotImplementedError

    def answers(self) -> bool:
        """Whether it answers a real request within a second or so."""
        raise NotImplementedError

    @property
    def pid(self) -> int:
        return self._running().pid

    def start(self) -> None:
        """On the port it had before, if any, so that clients find it again."""
        program = shutil.which(self.program)
        if program is None:
            unavailable(self.name, f"{self.program} is not on the PATH")
        ports = [self.port] if self.port else [free_port() for _ in range(3)]
        for self.port in ports:
            try:
                self._start(program)
                break
            except OSError:
                if self.port == ports[-1]:
                    raise

    def stop(self) -> None:
        """End it, politely; its data is gone afterwards. Harmless when it does not run."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it as a power cut would."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Killed and started again on the same port, empty."""
        self.kill()
        self.start()

    def pause(self) -> None:
        """Freeze it: connections stay open and are accepted, nothing is answered."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self, program: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="multilock-test-", ignore_cleanup_errors=True)
        log = Path(self._folder.name, "server.log")
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                self.command(program, self._folder.name),
                cwd=self._folder.name,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C at the tests must not reach the server before its clients are closed
            )
        until = time.monotonic() + START_WITHIN
        while not self.answers():
            if self._process.poll() is not None or time.monotonic() > until:
                said = log.read_text(errors="replace")[-1000:]
                self.kill()
                raise OSError(f"{self.program} does not answer on port {self.port}: {said}")
            time.sleep(0.01)

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(number)
            process.send_signal(signal.SIGCONT)  # a frozen one hears nothing but SIGKILL
            try:
                process.wait(STOP_WITHIN)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError(f"{self.program} was not started")
        return self._process


class RedisServer(Server):
    """One Redis or Valkey without persistence; ``options`` are further arguments of its command line."""

    name = "redis"
    program = "redis-server"

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def command(self, program: str, folder: str) -> list[str]:
        fixed = {"port": str(self.port), "bind": "127.0.0.1", "save": "", "appendonly": "no", "dir": folder}
        return [program, *(part for key, value in fixed.items() for part in (f"--{key}", value)), *self.options]

    def answers(self) -> bool:
        return b"+PONG" in self._ask(b"PING\r\n") or b"NOAUTH" in self._ask(b"PING\r\n")

    def _ask(self, request: bytes) -> bytes:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1.0) as connection:
                connection.sendall(request)
                return connection.recv(100)
        except OSError:
            return b""


SERVERS: dict[str, Callable[[], Server]] = {"redis": RedisServer}


def unavailable(name: str, why: str) -> NoReturn:
    """Fail where ``MULTILOCK_REQUIRE`` names this server, else skip; never returns."""
    message = f"no {name} server: {why}"
    if name in os.environ.get("MULTILOCK_REQUIRE", "").replace(" ", "").split(","):
        pytest.fail(f"{message} (MULTILOCK_REQUIRE asks for it)", pytrace=False)
    pytest.skip(message)


@contextlib.contextmanager
def running(name: str) -> Iterator[Server]:
    """A fresh server of this kind that the test may pause, kill and empty."""
    server = SERVERS[name]()
    try:
        server.start()
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def address(name: str) -> Iterator[str]:
    """The URL of a server of this kind that is only talked to: the one the environment names, else a fresh one."""
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
