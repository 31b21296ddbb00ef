"""ZooKeeper for the tests: one server, or an ensemble of three, started natively and told what goes wrong."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import TracebackType

from tests.servers import free_port, unavailable

__all__ = ["ZooKeeperCluster", "ZooKeeperServer", "classpath"]

START_WITHIN = 30.0  # seconds; a ZooKeeper answers after 0.5 on an idle machine
STOP_WITHIN = 5.0
TRIES = 3  # another process may take a free port before ZooKeeper does
BOOTSTRAP = Path(__file__).parent / "bootstrap" / "zookeeper.sh"
TICK = 0.2  # seconds; sessions of 0.4 s and more are granted, and expiries found within a tick
JAVA = ("-Xms16m", "-Xmx64m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Dzookeeper.admin.enableServer=false")


@lru_cache
def classpath() -> str:
    """With ZooKeeper in it; installed where it is missing."""
    found = subprocess.run([BOOTSTRAP], capture_output=True, text=True, check=False)
    return found.stdout.strip() if found.returncode == 0 else unavailable("zookeeper", found.stderr[-500:])


class ZooKeeperServer:
    """One server with a folder of its own, which outlives `kill` and `start` but not `stop`.

    ``settings`` are further lines of its zoo.cfg. `start` returns once it answers a real request.
    """

    name = "zookeeper"

    def __init__(self, number: int = 1, java: Sequence[str] = (), **settings: object) -> None:
        self.number = number
        self.java = java
        self.settings: dict[str, object] = {
            "tickTime": int(TICK * 1000),
            "initLimit": 20,
            "syncLimit": 10,
            "maxSessionTimeout": 60_000,
            "maxClientCnxns": 0,
            "4lw.commands.whitelist": "*",
            **settings,
        }
        self.host = "127.0.0.1"
        self.port = 0
        self.peer_ports = (0, 0)
        self.members: Mapping[int, str] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    @property
    def endpoint(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def address(self) -> str:
        """For the other members of its ensemble."""
        return f"{self.host}:{self.peer_ports[0]}:{self.peer_ports[1]}:participant"

    @property
    def url(self) -> str:
        return f"zookeeper://{self.endpoint}"

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError("this ZooKeeper was not started")
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def take_ports(self) -> None:
        self.port = free_port()
        self.peer_ports = (free_port(), free_port())

    def start(self) -> None:
        """With the data and on the ports it had before, if any."""
        again = bool(self.port)
        for left in reversed(range(TRIES)):
            if not again:
                self.take_ports()
            self.launch()
            try:
                self.await_answer()
                return
            except OSError:
                self._end() if again else self.stop()
                if again or not left:
                    raise

    def before(self) -> list[str]:
        """Words before its command line."""
        return []

    def launch(self) -> None:
        """Without waiting for an answer, which one server of three alone never gives."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="multilock-test-", ignore_cleanup_errors=True)
        folder = Path(self._folder.name)
        (folder / "data").mkdir(exist_ok=True)
        (folder / "data" / "myid").write_text(str(self.number))
        (folder / "zoo.cfg").write_text(self._config(folder))
        with self._log().open("ab") as output:
            self._process = subprocess.Popen(
                [*self.before(), "java", *JAVA, *self.java, "-cp", classpath(), self._main(), str(folder / "zoo.cfg")],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C at the tests must not reach the server before its clients are closed
            )

    def await_answer(self) -> None:
        until = time.monotonic() + START_WITHIN
        while not self.answers():
            if not self.alive or time.monotonic() > until:
                raise OSError(f"ZooKeeper does not answer on port {self.port}: {self._log().read_text()[-1000:]}")
            time.sleep(0.02)

    def answers(self) -> bool:
        """Whether it serves requests, as a leader, a follower or alone."""
        return "Mode: " in self.ask("srvr")

    def ask(self, word: str, within: float = 1.0) -> str:
        """What it says to one of its four-letter words; nothing if it does not answer."""
        said = b""
        try:
            with socket.create_connection((self.host, self.port), timeout=within) as connection:
                connection.sendall(word.encode())
                while piece := connection.recv(65536):
                    said += piece
        except OSError:
            return ""
        return said.decode(errors="replace")

    def metric(self, name: str) -> int:
        """One of the numbers that ``mntr`` tells, such as ``zk_packets_received``."""
        lines = dict(line.split("\t", 1) for line in self.ask("mntr", 5.0).splitlines() if "\t" in line)
        return int(float(lines[name]))

    def stop(self) -> None:
        """End it; its data is gone afterwards. Harmless when it does not run."""
        self._end()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def kill(self) -> None:
        """End it as a power cut would; `start` brings it back with its data."""
        self._end()

    def restart(self) -> None:
        self.kill()
        self.start()

    def pause(self) -> None:
        """Freeze it: connections stay open and are accepted, nothing is answered."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def __enter__(self) -> ZooKeeperServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _config(self, folder: Path) -> str:
        lines = {"dataDir": folder / "data", "clientPortAddress": self.host, "clientPort": self.port}
        servers = {f"server.{number}": address for number, address in self.members.items()}
        return "".join(f"{name}={value}\n" for name, value in {**lines, **self.settings, **servers}.items())

    def _main(self) -> str:
        single = "org.apache.zookeeper.server.ZooKeeperServerMain"
        return "org.apache.zookeeper.server.quorum.QuorumPeerMain" if self.members else single

    def _log(self) -> Path:
        assert self._folder is not None
        return Path(self._folder.name, "server.log")

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(STOP_WITHIN)


class ZooKeeperCluster:
    """Three servers on this machine."""

    def __init__(self, size: int = 3, **settings: object) -> None:
        numbers = range(1, size + 1)
        self.members: Sequence[ZooKeeperServer] = [ZooKeeperServer(each, **settings) for each in numbers]  # type: ignore[arg-type]

    @property
    def url(self) -> str:
        return "zookeeper://" + ",".join(member.endpoint for member in self.members)

    def leader(self, within: float = 20.0) -> ZooKeeperServer:
        until = time.monotonic() + within
        while time.monotonic() < until:
            for member in self.members:
                if member.alive and "Mode: leader" in member.ask("srvr"):
                    return member
            time.sleep(0.02)
        raise TimeoutError(f"no leader within {within:g} s")

    def followers(self) -> list[ZooKeeperServer]:
        leader = self.leader()
        return [member for member in self.members if member is not leader]

    def start(self) -> None:
        for left in reversed(range(TRIES)):
            for member in self.members:
                member.take_ports()
            peers = {member.number: member.address for member in self.members}
            for member in self.members:
                member.members = peers
                member.launch()
            try:
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

    def __enter__(self) -> ZooKeeperCluster:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
