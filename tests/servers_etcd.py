"""Start etcd for the tests: one member, or a cluster of three. The servers have methods that cause faults.

The version is that of Debian 12 (3.4.23), or of the Debian release in ``MULTILOCK_TEST_ETCD_RELEASE`` (``trixie``:
3.5.16).
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.servers import Cluster, Server, bootstrap, free_port

__all__ = ["EtcdCluster", "EtcdProxy", "EtcdServer", "etcdctl", "learner"]

# Elections take at most 0.2 s, so that a test of a failover need not wait. The smallest ttl granted is then 1 s.
FAST = ("--heartbeat-interval", "20", "--election-timeout", "200", "--log-level", "error", "--logger", "zap")
# The members do not sync to disk, because another program that writes large files would delay each request. A killed
# member keeps its data nevertheless; only a power failure loses data.
UNSYNCED = ("--unsafe-no-fsync",)


def program() -> str:
    """Return the path of etcd, after unpacking or installing it if it is missing."""
    release = os.environ.get("MULTILOCK_TEST_ETCD_RELEASE")
    return bootstrap("etcd", *([release] if release else []))


def etcdctl(endpoint: str, *words: str, within: float = 10.0) -> str:
    """Run the distribution's ``etcdctl`` with this command, and return its output."""
    return subprocess.run(
        ["etcdctl", "--endpoints", endpoint, *words],
        env={**os.environ, "ETCDCTL_API": "3"},
        capture_output=True,
        text=True,
        check=True,
        timeout=within,
    ).stdout


class EtcdServer(Server):
    """One etcd member. ``options`` are further arguments of its command line. With ``synced``, it syncs to disk as in
    production."""

    name = program = "etcd"
    start_within = 20.0  # a member answers after 0.4 s on an idle machine

    def __init__(self, *options: str, member: str = "m0", tls: bool = False, synced: bool = False) -> None:
        super().__init__()
        self.options = options if synced else (*UNSYNCED, *options)
        self.member = member
        self.tls = tls
        self.peer_port = 0
        self.initial = ""

    @property
    def url(self) -> str:
        return f"etcd{'s' if self.tls else ''}://{self.endpoint}"

    @property
    def peer(self) -> str:
        """Return the address at which the other members of the cluster reach this member."""
        return f"http://{self.host}:{self.peer_port}"

    def take_ports(self) -> None:
        super().take_ports()
        self.peer_port = free_port()
        self.initial = f"{self.member}={self.peer}"

    def command(self, folder: Path) -> list[str]:
        client = f"http{'s' if self.tls else ''}://{self.endpoint}"
        named = {
            "--name": self.member,
            "--data-dir": str(folder / "data"),
            "--listen-client-urls": client,
            "--advertise-client-urls": client,
            "--listen-peer-urls": self.peer,
            "--initial-advertise-peer-urls": self.peer,
            "--initial-cluster": self.initial,
        }
        return [program(), *(word for pair in named.items() for word in pair), *FAST, *self.options]

    def answers(self) -> bool:
        """Return whether a write through this member succeeds. With TLS, return only whether the member listens."""
        try:
            if self.tls:
                with urllib.request.urlopen(f"{self.peer}/version", timeout=1.0):
                    return True
            self.post("kv/put", {"key": "IXJlYWR5", "value": ""}, 1.0)
        except OSError as error:
            return getattr(error, "code", None) in (400, 401, 403)  # the member replies, but requires authentication
        return True

    def learns(self) -> bool:
        """Return whether the member runs as a learner."""
        try:
            return bool(self.post("maintenance/status", {}, 1.0).get("isLearner"))
        except OSError:
            return False

    def post(self, path: str, body: dict[str, Any], within: float = 5.0) -> dict[str, Any]:
        """Send a request to the member's JSON gateway without multilock. Bytes are base64."""
        request = urllib.request.Request(
            f"http://{self.endpoint}/v3/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=within) as answer:
            said: dict[str, Any] = json.load(answer)
        return said

    def metric(self, name: str) -> float:
        """Return the sum of all metrics whose names, with their labels, begin with ``name``."""
        with urllib.request.urlopen(f"http://{self.endpoint}/metrics", timeout=5.0) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


@contextlib.contextmanager
def learner(server: EtcdServer) -> Iterator[EtcdServer]:
    """Start a learner beside this member: a member that has not been promoted yet."""
    new = EtcdServer("--initial-cluster-state", "existing", member="learner")
    new.take_ports()
    etcdctl(server.endpoint, "member", "add", new.member, "--learner", "--peer-urls", new.peer)
    new.initial = f"{server.initial},{new.initial}"
    try:
        new.launch()
        until = time.monotonic() + new.start_within
        while not new.learns():
            assert time.monotonic() < until, "the learner did not start"
            time.sleep(0.02)
        yield new
    finally:
        new.stop()


class EtcdProxy(Server):
    """``etcd grpc-proxy`` in front of this member."""

    name = program = "etcd"
    start_within = 20.0

    def __init__(self, server: EtcdServer) -> None:
        super().__init__()
        self._server = server

    def command(self, folder: Path) -> list[str]:
        named = {
            "--endpoints": self._server.endpoint,
            "--listen-addr": self.endpoint,
            "--data-dir": str(folder / "data"),
        }
        return [program(), "grpc-proxy", "start", *(word for pair in named.items() for word in pair)]

    def answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self.endpoint}/health", timeout=1.0):
                return True
        except OSError:
            return False


class EtcdCluster(Cluster[EtcdServer]):
    """A cluster of three members."""

    def __init__(self, size: int = 3, *options: str) -> None:
        self.members = [EtcdServer(*options, member=f"m{n}") for n in range(size)]

    def introduce(self) -> None:
        everybody = ",".join(member.initial for member in self.members)
        for member in self.members:
            member.initial = everybody

    def find_leader(self) -> EtcdServer | None:
        """Return the leader that a majority of the members names."""
        ids: dict[str, EtcdServer] = {}
        votes: list[str] = []
        for member in self.members:
            try:
                said = member.post("maintenance/status", {}, 0.5)
            except OSError:
                continue
            ids[said["header"]["member_id"]] = member
            votes.append(said.get("leader", "0"))
        return ids.get(self.majority(votes))
