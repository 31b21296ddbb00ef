"""etcd for the tests: one member, or a cluster of three, started natively and told what goes wrong.

Of Debian 12 (3.4.23), or of the Debian release that ``MULTILOCK_TEST_ETCD_RELEASE`` names (``trixie``: 3.5.16).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.servers import free_port, unavailable

__all__ = ["EtcdCluster", "EtcdServer", "etcdctl"]

START_WITHIN = 20.0  # seconds; an etcd answers after 0.4 on an idle machine
STOP_WITHIN = 5.0
TRIES = 3  # another process may take a free port before etcd does
BOOTSTRAP = Path(__file__).parent / "bootstrap" / "etcd.sh"
# Elections within 0.2 s, so that a test of a failover need not wait. The smallest ttl granted is then 1 s.
FAST = ("--heartbeat-interval", "20", "--election-timeout", "200", "--log-level", "error", "--logger", "zap")


@lru_cache
def program() -> str:
    """The path of etcd; unpacked or installed where it is missing."""
    release = os.environ.get("MULTILOCK_TEST_ETCD_RELEASE")
    found = subprocess.run([BOOTSTRAP, *([release] if release else [])], capture_output=True, text=True, check=False)
    return found.stdout.strip() if found.returncode == 0 else unavailable("etcd", found.stderr[-500:])


def etcdctl(endpoint: str, *words: str, within: float = 10.0) -> str:
    """What ``etcdctl`` of the distribution prints for this command."""
    return subprocess.run(
        ["etcdctl", "--endpoints", endpoint, *words],
        env={**os.environ, "ETCDCTL_API": "3"},
        capture_output=True,
        text=True,
        check=True,
        timeout=within,
    ).stdout


def _state(task: Path) -> str:
    """Of a thread: ``T`` where it is stopped."""
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:  # it has just ended
        return "T"


class EtcdServer:
    """One etcd member with a folder of its own, which outlives `kill` and `start` but not `stop`.

    ``options`` are further arguments of its command line. `start` returns once it answers a real request.
    """

    name = "etcd"

    def __init__(self, *options: str, member: str = "m0", tls: bool = False) -> None:
        self.options = options
        self.member = member
        self.tls = tls
        self.host = "127.0.0.1"
        self.port = self.peer_port = 0
        self.initial = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    @property
    def endpoint(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        return f"etcd{'s' if self.tls else ''}://{self.endpoint}"

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError("this etcd was not started")
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def prefix(self) -> list[str]:
        """What its command line begins with."""
        return []

    def take_ports(self) -> None:
        self.port, self.peer_port = free_port(), free_port()
        self.initial = f"{self.member}=http://{self.host}:{self.peer_port}"

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
                self.stop()
                if again or not left:
                    raise

    def launch(self) -> None:
        """Without waiting for an answer, which one member of three alone never gives."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="multilock-test-", ignore_cleanup_errors=True)
        with self._log().open("ab") as output:
            self._process = subprocess.Popen(
                self._command(self._folder.name),
                cwd=self._folder.name,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C at the tests must not reach the server before its clients are closed
            )

    def await_answer(self) -> None:
        until = time.monotonic() + START_WITHIN
        while not self.answers():
            if not self.alive or time.monotonic() > until:
                raise OSError(f"etcd does not answer on port {self.port}: {self._log().read_text()[-1000:]}")
            time.sleep(0.02)

    def answers(self) -> bool:
        """Whether a write through this member is agreed to; with TLS, whether it listens at all."""
        try:
            if self.tls:
                with urllib.request.urlopen(f"http://{self.host}:{self.peer_port}/version", timeout=1.0):
                    return True
            self.post("kv/put", {"key": "IXJlYWR5", "value": ""}, 1.0)
        except OSError as error:
            return getattr(error, "code", None) in (400, 401, 403)  # it asks who we are
        return True

    def post(self, path: str, body: dict[str, Any], within: float = 5.0) -> dict[str, Any]:
        """A request to its JSON gateway: a client that is none of ours. Bytes are base64."""
        request = urllib.request.Request(
            f"http://{self.endpoint}/v3/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=within) as answer:
            said: dict[str, Any] = json.load(answer)
        return said

    def stop(self) -> None:
        """End it, politely; its data is gone afterwards. Harmless when it does not run."""
        self._end(signal.SIGTERM)
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def kill(self) -> None:
        """End it as a power cut would; `start` brings it back with its data."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        self.kill()
        self.start()

    def pause(self) -> None:
        """Freeze it: connections stay open and are accepted, nothing is answered from now on."""
        os.kill(self.pid, signal.SIGSTOP)
        # It takes effect one thread after the other.
        until = time.monotonic() + STOP_WITHIN
        while any(_state(task) not in "Tt" for task in Path(f"/proc/{self.pid}/task").iterdir()):
            if time.monotonic() > until:
                raise OSError("etcd does not stop")
            time.sleep(0.001)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def metric(self, name: str) -> float:
        """The sum of one of its counters, such as ``grpc_server_started_total{…}`` with these labels at its front."""
        with urllib.request.urlopen(f"http://{self.endpoint}/metrics", timeout=5.0) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    def __enter__(self) -> EtcdServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _command(self, folder: str) -> list[str]:
        client = f"http{'s' if self.tls else ''}://{self.endpoint}"
        peer = f"http://{self.host}:{self.peer_port}"
        named = {
            "--name": self.member,
            "--data-dir": str(Path(folder, "data")),
            "--listen-client-urls": client,
            "--advertise-client-urls": client,
            "--listen-peer-urls": peer,
            "--initial-advertise-peer-urls": peer,
            "--initial-cluster": self.initial,
        }
        return [*self.prefix(), program(), *(word for pair in named.items() for word in pair), *FAST, *self.options]

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


class EtcdCluster:
    """Three members on this machine."""

    def __init__(self, size: int = 3, *options: str) -> None:
        self.members: Sequence[EtcdServer] = [EtcdServer(*options, member=f"m{n}") for n in range(size)]

    @property
    def url(self) -> str:
        return "etcd://" + ",".join(member.endpoint for member in self.members)

    def leader(self) -> EtcdServer:
        """The member that leads, as a majority of them tell."""
        return self._eventually(self._leader)

    def followers(self) -> list[EtcdServer]:
        leader = self.leader()
        return [member for member in self.members if member is not leader]

    def start(self) -> None:
        for left in reversed(range(TRIES)):
            for member in self.members:
                member.take_ports()
            everybody = ",".join(member.initial for member in self.members)
            for member in self.members:
                member.initial = everybody
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

    def __enter__(self) -> EtcdCluster:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _leader(self) -> EtcdServer | None:
        ids: dict[str, EtcdServer] = {}
        votes: list[str] = []
        for member in self.members:
            try:
                said = member.post("maintenance/status", {}, 0.5)
            except OSError:
                continue
            ids[said["header"]["member_id"]] = member
            votes.append(said.get("leader", "0"))
        elected = max(set(votes), key=votes.count, default="0")
        return ids.get(elected) if votes.count(elected) * 2 > len(self.members) else None

    def _eventually(self, look: Callable[[], EtcdServer | None]) -> EtcdServer:
        until = time.monotonic() + START_WITHIN
        while not (found := look()):
            if time.monotonic() > until:
                raise OSError("the cluster has no leader")
            time.sleep(0.02)
        return found
