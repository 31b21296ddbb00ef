"""Start Consul for the tests: one agent, or a cluster of three servers. The servers have methods that cause faults.

``tests/bootstrap/consul.sh`` finds or unpacks the program.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.servers import Cluster, Server, bootstrap, free_port

__all__ = ["ConsulCluster", "ConsulServer", "program"]

READY = "is it ready?"
FAST: Mapping[str, Any] = {
    "session_ttl_min": "1s",  # with the default, every test of a ttl would take 20 s
    "performance": {"raft_multiplier": 1},
    "disable_update_check": True,
    "log_level": "err",
}


def program() -> str:
    return bootstrap("consul")


class ConsulServer(Server):
    """One Consul server. ``config`` is added to its configuration.

    By default the server runs in dev mode and loses everything when it ends. ``keep`` gives it a disk, and then its
    start takes seconds. `start` returns once the server has a leader and a session can be made.
    """

    name = "consul"
    program = "Consul"
    start_within = 30.0  # a server answers after 0.3 s on an idle machine, a cluster after 3 s
    ends_by = signal.SIGKILL  # at SIGTERM a server leaves its cluster, which takes seconds

    def __init__(self, *, node: str = "n0", keep: bool = False, token: str = "", **config: Any) -> None:
        super().__init__()
        self.node = node
        self.keep = keep
        self.token = token
        self.config = config
        self.ports: dict[str, int] = {}

    def take_ports(self) -> None:
        super().take_ports()
        used = {"http": self.port, "server": free_port(), "serf_lan": free_port()}
        self.ports = {"dns": -1, "grpc": -1, "serf_wan": -1, **used}
        if "cert_file" in self.config:
            self.ports["https"] = free_port()

    def command(self, folder: Path) -> list[str]:
        config = {**FAST, "node_name": self.node, "ports": self.ports, "bind_addr": self.host, **self.config}
        if self.keep:
            config = {"server": True, "bootstrap_expect": 1, "data_dir": str(folder / "data"), **config}
        (folder / "consul.json").write_text(json.dumps(config))
        without = [f"--unset={name}" for name in os.environ if name.startswith("CONSUL_")]
        mode = [] if self.keep else ["-dev"]
        return ["env", *without, program(), "agent", *mode, "-config-file", str(folder / "consul.json")]

    def answers(self) -> bool:
        """Return whether the server can make a session, which needs a leader that knows the server's node."""
        try:
            session = self.ask("PUT", "session/create", {"Name": READY, "NodeChecks": [], "TTL": "10s"}, 1.0)["ID"]
            self.ask("PUT", f"session/destroy/{session}", within=1.0)
        except OSError:
            return False
        return True

    def ask(self, method: str, path: str, body: object = None, within: float = 5.0) -> Any:
        """Send a request to the API without multilock. Returns None for a reply without a body."""
        said = self.raw(
            method, path, body if isinstance(body, bytes) or body is None else json.dumps(body).encode(), within
        )
        return json.loads(said) if said else None

    def raw(self, method: str, path: str, data: bytes | None = None, within: float = 5.0) -> bytes:
        request = urllib.request.Request(f"http://{self.endpoint}/v1/{path}", data, method=method)
        if self.token:
            request.add_header("X-Consul-Token", self.token)
        with urllib.request.urlopen(request, timeout=within) as answer:
            said: bytes = answer.read()
        return said

    def key(self, path: str) -> dict[str, Any] | None:
        """Return the entry of this key. ``path`` is quoted as in a URL."""
        try:
            found: list[dict[str, Any]] = self.ask("GET", f"kv/{path}?consistent")
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise
        return found[0]

    def sessions(self) -> list[dict[str, Any]]:
        """Return the sessions of the server's clients, without those that our readiness check made."""
        return [session for session in self.ask("GET", "session/list?consistent") if session["Name"] != READY]

    def requests(self) -> Counter[str]:
        """Return how many requests the server has answered, by method and the first two parts of the path after
        ``/v1/`` (``"PUT session/create"``). Needs ``log_level="debug"``. A blocking query that is still open does not
        count."""
        said = re.findall(r"Request finished: method=([A-Z]+) url=/v1/([a-z]+(?:/[a-z]+)?)", self._log().read_text())
        return Counter(f"{method} {path}" for method, path in said)

    def sockets(self) -> int:
        count = 0
        for each in Path(f"/proc/{self.pid}/fd").iterdir():
            with suppress(OSError):
                count += os.readlink(each).startswith("socket")
        return count

    def cli(self, *words: str, within: float = 10.0) -> str:
        """Run this Consul command as a client of this server, and return its output."""
        return subprocess.run(
            [program(), *words],
            env=self.environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=within,
        ).stdout

    @property
    def environment(self) -> dict[str, str]:
        """Return environment variables that point Consul's own tools to this server."""
        token = {"CONSUL_HTTP_TOKEN": self.token} if self.token else {}
        return {**os.environ, "CONSUL_HTTP_ADDR": self.endpoint, **token}


class ConsulCluster(Cluster[ConsulServer]):
    """Three servers, each with a disk."""

    def __init__(self, size: int = 3, **config: Any) -> None:
        self.members = [ConsulServer(node=f"n{n}", keep=True, **config) for n in range(size)]

    def introduce(self) -> None:
        addresses = [f"{member.host}:{member.ports['serf_lan']}" for member in self.members]
        joined = {"bootstrap_expect": len(self.members), "retry_join": addresses, "retry_interval": "1s"}
        for member in self.members:
            member.config |= joined

    def find_leader(self) -> ConsulServer | None:
        """Return the leader that a majority of the members names."""
        votes: list[str] = []
        for member in self.members:
            try:
                votes.append(member.ask("GET", "status/leader", within=0.5))
            except OSError:
                continue
        elected = self.majority(votes)
        return next((one for one in self.members if elected == f"{one.host}:{one.ports['server']}" and one.alive), None)
