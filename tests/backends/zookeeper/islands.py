"""Three ZooKeeper servers, each in a network of its own (Linux, root): one can be cut off from the others and stay
reachable for clients."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType

from tests.servers_zookeeper import ZooKeeperCluster, ZooKeeperServer

__all__ = ["Archipelago", "possible"]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def possible() -> bool:
    """Whether this process may make networks."""
    return os.geteuid() == 0 and subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode == 0


class Island(ZooKeeperServer):
    """A server in a network namespace."""

    def __init__(self, number: int, subnet: str) -> None:
        super().__init__(number)
        self.host = f"{subnet}.{number + 1}"
        self.namespace = f"mlz{os.getpid()}-{number}"
        self.port, self.peer_ports = 2181, (2888, 3888)

    def take_ports(self) -> None:
        """They are its own."""

    def before(self) -> list[str]:
        return ["ip", "netns", "exec", self.namespace]


class Archipelago(ZooKeeperCluster):
    def __init__(self) -> None:
        self._subnet = f"10.221.{os.getpid() % 200 + 20}"
        self._bridge = f"mlzb{os.getpid()}"
        self.islands = [Island(each, self._subnet) for each in (1, 2, 3)]
        self.members = self.islands
        self._networks = ExitStack()

    def __enter__(self) -> Archipelago:
        try:
            self._dig()
            self.start()
        except BaseException:
            self._networks.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._networks.close()

    @contextmanager
    def cut_off(self, member: ZooKeeperServer) -> Iterator[None]:
        """Its peers hear nothing of this server, nor it of them; its clients notice nothing."""
        assert isinstance(member, Island)
        others = [other.host for other in self.islands if other is not member]
        for host in others:
            ip("-n", member.namespace, "route", "add", "blackhole", host)
        try:
            yield
        finally:
            for host in others:
                ip("-n", member.namespace, "route", "del", "blackhole", host)

    def _dig(self) -> None:
        ip("link", "add", self._bridge, "type", "bridge")
        self._networks.callback(ip, "link", "del", self._bridge)
        ip("addr", "add", f"{self._subnet}.1/24", "dev", self._bridge)
        ip("link", "set", self._bridge, "up")
        for island in self.islands:
            outer, inner = f"mzo{os.getpid()}{island.number}", f"mzi{os.getpid()}{island.number}"
            ip("netns", "add", island.namespace)
            self._networks.callback(ip, "netns", "del", island.namespace)
            ip("link", "add", outer, "type", "veth", "peer", "name", inner, "netns", island.namespace)
            ip("link", "set", outer, "master", self._bridge, "up")
            ip("-n", island.namespace, "addr", "add", f"{island.host}/24", "dev", inner)
            ip("-n", island.namespace, "link", "set", inner, "up")
            ip("-n", island.namespace, "link", "set", "lo", "up")
