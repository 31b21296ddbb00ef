"""Consul for the tests: one agent, or a cluster of three servers, started natively and told what goes wrong.

``tests/bootstrap/consul.sh`` finds or unpacks the program.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.servers import free_port, unavailable

__all__ = ["ConsulCluster", "ConsulServer", "program"]

START_WITHIN = 30.0  # seconds; a dev agent answers after 0.3 on an idle machine, a cluster after 3
STOP_WITHIN = 5.0
TRIES = 3  # another process may take a free port before Consul does
READY = "is it ready?"
BOOTSTRAP = Path(__file__).parent / "bootstrap" / "consul.sh"
FAST: Mapping[str, Any] = {
    "session_ttl_min": "1s",  # or every test of a ttl would take 20 s
    "performance": {"raft_multiplier": 1},
    "disable_update_check": True,
    "log_level": "err",
}


@lru_cache
def program() -> str:
    found = subprocess.run([str(BOOTSTRAP)], capture_output=True, text=True, check=False)
    path = shutil.which(found.stdout.strip())
    return path or unavailable("consul", found.stderr.strip().replace("\n", " "))


class ConsulServer:
    """One Consul server with a folder of its own, which outlives `kill` and `start` but not `stop`.

    ``config`` is added to its configuration. A dev server keeps nothing when it ends; ``keep`` gives it a disk, which
    makes its start take seconds. `start` returns once it has a leader and a session can be made.
    """

    name = "consul"

    def __init__(self, *, node: str = "n0", keep: bool = False, token: str = "", **config: Any) -> None:
        self.node = node
        self.keep = keep
        self.token = token
        self.config = config
        self.ports: dict[str, int] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    @property
    def port(self) -> int:
        return self.ports["http"]

    @property
    def url(self) -> str:
        return f"consul://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError("this Consul was not started")
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def take_ports(self) -> None:
        used = {name: free_port() for name in ("http", "server", "serf_lan")}
        self.ports = {"dns": -1, "grpc": -1, "serf_wan": -1, **used}
        if "cert_file" in self.config:
            self.ports["https"] = free_port()

    def start(self) -> None:
        """On the ports it had before, if any, so that clients find it again."""
        again = bool(self.ports)
        for left in reversed(range(TRIES)):
            if not again:
                self.take_ports()
            self.launch()
            try:
                self.await_answer()
                return
            except OSError:
                self.stop()
                if again or not left:
                    raise

    def launch(self) -> None:
        """Without waiting for an answer, which one server of three alone never gives."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="multilock-test-", ignore_cleanup_errors=True)
        folder = Path(self._folder.name)
        config = {**FAST, "node_name": self.node, "ports": self.ports, "bind_addr": "127.0.0.1", **self.config}
        if self.keep:
            config = {"server": True, "bootstrap_expect": 1, "data_dir": str(folder / "data"), **config}
        (folder / "consul.json").write_text(json.dumps(config))
        mode = [] if self.keep else ["-dev"]
        with self._log().open("ab") as output:
            self._process = subprocess.Popen(
                [program(), "agent", *mode, "-config-file", str(folder / "consul.json")],
                cwd=folder,
                env={name: value for name, value in os.environ.items() if not name.startswith("CONSUL_")},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C at the tests must not reach the server before its clients are closed
            )

    def await_answer(self, within: float = START_WITHIN) -> None:
        until = time.monotonic() + within
        while not self.answers():
            if not self.alive or time.monotonic() > until:
                raise OSError(f"Consul does not answer on port {self.port}: {self._log().read_text()[-1000:]}")
            time.sleep(0.02)

    def answers(self) -> bool:
        """Whether a session can be made here: there is a leader, and it knows this node."""
        try:
            session = self.ask("PUT", "session/create", {"Name": READY, "NodeChecks": [], "TTL": "10s"}, 1.0)["ID"]
            self.ask("PUT", f"session/destroy/{session}", within=1.0)
        except OSError:
            return False
        return True

    def ask(self, method: str, path: str, body: object = None, within: float = 5.0) -> Any:
        """A request to its API by a client that is none of ours; None for an answer without a body."""
        said = self.raw(
            method, path, body if isinstance(body, bytes) or body is None else json.dumps(body).encode(), within
        )
        return json.loads(said) if said else None

    def raw(self, method: str, path: str, data: bytes | None = None, within: float = 5.0) -> bytes:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/v1/{path}", data, method=method)
        if self.token:
            request.add_header("X-Consul-Token", self.token)
        with urllib.request.urlopen(request, timeout=within) as answer:
            said: bytes = answer.read()
        return said

    def key(self, path: str) -> dict[str, Any] | None:
        """The entry of this key; ``path`` is quoted as in a URL."""
        try:
            found: list[dict[str, Any]] = self.ask("GET", f"kv/{path}?consistent")
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise
        return found[0]

    def sessions(self) -> list[dict[str, Any]]:
        """Those of its clients; one of our own question whether it is ready may be left."""
        return [session for session in self.ask("GET", "session/list?consistent") if session["Name"] != READY]

    def requests(self) -> Counter[str]:
        """How many it has answered since it was made, by method and path without the last part: ``"PUT txn"``.
        Needs ``log_level="debug"``; a question that is still open does not count."""
        said = re.findall(r"Request finished: method=([A-Z]+) url=/v1/([a-z]+(?:/[a-z]+)?)", self._log().read_text())
        return Counter(f"{method} {path}" for method, path in said)

    def cli(self, *words: str, within: float = 10.0) -> str:
        """What the program prints for this command, as a client of this server."""
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
        """For tools of Consul that are to talk to this server."""
        token = {"CONSUL_HTTP_TOKEN": self.token} if self.token else {}
        return {**os.environ, "CONSUL_HTTP_ADDR": f"127.0.0.1:{self.port}", **token}

    def stop(self) -> None:
        """End it; its data is gone afterwards. Harmless when it does not run."""
        self._end(signal.SIGKILL)  # SIGTERM makes it say goodbye to its cluster, which takes seconds
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def kill(self) -> None:
        """End it as a power cut would; with ``keep``, `start` brings it back with its data."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        self.kill()
        self.start()

    def pause(self) -> None:
        """Freeze it: connections stay open and are accepted, nothing is answered."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def __enter__(self) -> ConsulServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _log(self) -> Path:
        assert self._folder is not None
        return Path(self._folder.name, "server.log")

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(number)
        process.send_signal(signal.SIGCONT)  # a frozen one hears nothing but SIGKILL
        try:
            process.wait(STOP_WITHIN)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class ConsulCluster:
    """Three servers on this machine, each with a disk."""

    def __init__(self, size: int = 3, **config: Any) -> None:
        self.servers = [ConsulServer(node=f"n{n}", keep=True, **config) for n in range(size)]

    @property
    def url(self) -> str:
        return "consul://" + ",".join(f"127.0.0.1:{server.port}" for server in self.servers)

    def leader(self) -> ConsulServer:
        """The server that leads, as a majority of them tell."""
        return self._eventually(self._leader)

    def followers(self) -> list[ConsulServer]:
        leader = self.leader()
        return [server for server in self.servers if server is not leader]

    def start(self) -> None:
        for left in reversed(range(TRIES)):
            for server in self.servers:
                server.take_ports()
            addresses = [f"127.0.0.1:{server.ports['serf_lan']}" for server in self.servers]
            for server in self.servers:
                server.config |= {"bootstrap_expect": len(self.servers), "retry_join": addresses}
                server.config["retry_interval"] = "1s"
                server.launch()
            try:
                for server in self.servers:
                    server.await_answer()
                return
            except OSError:
                self.stop()
                if not left:
                    raise

    def stop(self) -> None:
        for server in self.servers:
            server.stop()

    def __enter__(self) -> ConsulCluster:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _leader(self) -> ConsulServer | None:
        votes: list[str] = []
        for server in self.servers:
            try:
                votes.append(server.ask("GET", "status/leader", within=0.5))
            except OSError:
                continue
        elected = max(set(votes), key=votes.count, default="")
        if votes.count(elected) * 2 <= len(self.servers):
            return None
        return next((one for one in self.servers if elected == f"127.0.0.1:{one.ports['server']}" and one.alive), None)

    def _eventually(self, look: Callable[[], ConsulServer | None]) -> ConsulServer:
        until = time.monotonic() + START_WITHIN
        while not (found := look()):
            if time.monotonic() > until:
                raise OSError("the cluster has no leader")
            time.sleep(0.02)
        return found
