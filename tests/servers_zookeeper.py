"""Start ZooKeeper for the tests: one server, or an ensemble of three. The servers have methods that cause faults."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from tests.servers import Cluster, Server, bootstrap, free_port

__all__ = ["ZooKeeperCluster", "ZooKeeperServer", "classpath"]

ARCHIVE = Path(__file__).parents[1] / ".state" / "zookeeper.jsa"
TICK = 0.2  # seconds: a session may be as short as two ticks, and its expiry is noticed within a tick
JAVA = (
    # without these options, Java would warn of a missing or stale archive
    *("-XX:+IgnoreUnrecognizedVMOptions", "-Xlog:disable"),
    *("-Xms16m", "-Xmx64m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"),
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
    "-Dzookeeper.admin.enableServer=false",
    # These settings shorten an election on a busy machine. A server that missed the result learns it within a second
    # instead of half a minute, and gives a leader more than half a second to become ready.
    "-Dzookeeper.fastleader.maxNotificationInterval=1000",
    "-Dzookeeper.leaderConnectDelayDuringRetryMs=500",
)


def classpath() -> str:
    """Return a class path with ZooKeeper in it, after installing ZooKeeper if it is missing."""
    return bootstrap("zookeeper")


@lru_cache
def archive() -> str:
    """Return an option that makes Java read its classes from an archive, which halves the processor time of a start."""
    if not ARCHIVE.exists():
        ARCHIVE.parent.mkdir(exist_ok=True)
        ours = ARCHIVE.with_suffix(f".{os.getpid()}")
        with Archiving(java=[f"-XX:ArchiveClassesAtExit={ours}"]):
            pass
        if ours.exists():
            ours.replace(ARCHIVE)  # must be atomic: another process may do the same at this moment
    return f"-XX:SharedArchiveFile={ARCHIVE}"


class ZooKeeperServer(Server):
    """One server. ``settings`` are further lines of its zoo.cfg."""

    name = "zookeeper"
    program = "ZooKeeper"
    start_within = 30.0  # a server answers after 0.5 s on an idle machine
    ends_by = signal.SIGKILL

    def __init__(self, number: int = 1, java: Sequence[str] = (), **settings: object) -> None:
        super().__init__()
        self.number = number
        self.java = java
        self.settings: dict[str, object] = {
            "tickTime": int(TICK * 1000),
            "initLimit": 20,
            "syncLimit": 10,
            "maxSessionTimeout": 60_000,
            "maxClientCnxns": 0,
            "forceSync": "no",  # a killed server still keeps its data; only a power failure loses data
            "4lw.commands.whitelist": "*",
            **settings,
        }
        self.peer_ports = (0, 0)
        self.members: Mapping[int, str] = {}

    @property
    def address(self) -> str:
        """Return the address at which the other servers of the ensemble reach this server."""
        return f"{self.host}:{self.peer_ports[0]}:{self.peer_ports[1]}:participant"

    def take_ports(self) -> None:
        super().take_ports()
        self.peer_ports = (free_port(), free_port())

    def command(self, folder: Path) -> list[str]:
        (folder / "data").mkdir(exist_ok=True)
        (folder / "data" / "myid").write_text(str(self.number))
        (folder / "zoo.cfg").write_text(self._config(folder))
        return ["java", *JAVA, *self.options(), "-cp", classpath(), self._main(), str(folder / "zoo.cfg")]

    def options(self) -> Sequence[str]:
        return [archive(), *self.java]

    def answers(self) -> bool:
        """Return whether the member serves requests as a leader, as a follower or alone."""
        return "Mode: " in self.ask("srvr")

    def ask(self, word: str, within: float = 1.0) -> str:
        """Send a four-letter word and return the reply, or an empty text if there is none."""
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
        """Return one of the numbers that ``mntr`` reports, such as ``zk_packets_received``."""
        lines = dict(line.split("\t", 1) for line in self.ask("mntr", 5.0).splitlines() if "\t" in line)
        return int(float(lines[name]))

    def _config(self, folder: Path) -> str:
        lines = {"dataDir": folder / "data", "clientPortAddress": self.host, "clientPort": self.port}
        servers = {f"server.{number}": address for number, address in self.members.items()}
        return "".join(f"{name}={value}\n" for name, value in {**lines, **self.settings, **servers}.items())

    def _main(self) -> str:
        single = "org.apache.zookeeper.server.ZooKeeperServerMain"
        return "org.apache.zookeeper.server.quorum.QuorumPeerMain" if self.members else single


class Archiving(ZooKeeperServer):
    """A server that writes the archive when it ends."""

    ends_by = signal.SIGTERM

    def options(self) -> Sequence[str]:
        return self.java


class ZooKeeperCluster(Cluster[ZooKeeperServer]):
    def __init__(self, size: int = 3, **settings: object) -> None:
        numbers = range(1, size + 1)
        self.members = [ZooKeeperServer(each, **settings) for each in numbers]  # type: ignore[arg-type]

    def introduce(self) -> None:
        peers = {member.number: member.address for member in self.members}
        for member in self.members:
            member.members = peers

    def find_leader(self) -> ZooKeeperServer | None:
        return next((one for one in self.members if one.alive and "Mode: leader" in one.ask("srvr")), None)
