"""Servers of a cluster, each in its own network. A test can cut one server off from the others while clients still
reach it. Needs Linux and root."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Self

from tests.servers import Cluster, S, Server

__all__ = ["Archipelago", "Island", "possible"]


def possible() -> bool:
    return os.geteuid() == 0 and subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode == 0


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


def namespace(server: Server) -> str:
    """Return the name of this server's network namespace."""
    return f"ml-{server.host}"


class Island(Server):
    """A mixin that makes any server a member of an `Archipelago`. The server may use any port, because all ports in its
    own network are free."""

    def command(self, folder: Path) -> list[str]:
        return ["ip", "netns", "exec", namespace(self), *super().command(folder)]


class Archipelago(Cluster[S]):
    """The servers ``islands``, each in its own network, and a bridge that joins the networks. The addresses of the
    servers begin with 10.``net``, which no other servers use."""

    def __init__(self, net: int, islands: Sequence[S]) -> None:
        self.islands = self.members = islands
        self._net = net

    def __enter__(self) -> Self:
        with ExitStack() as networks:
            self._dig(networks)
            super().__enter__()
            self._networks = networks.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        with self._networks:
            self.stop()

    @contextmanager
    def cut_off(self, member: S) -> Iterator[None]:
        """Cut this member off from its peers, in both directions. Its clients notice nothing."""
        others = [other.host for other in self.islands if other is not member]
        for host in others:
            ip("-n", namespace(member), "route", "add", "blackhole", host)
        try:
            yield
        finally:
            for host in others:
                ip("-n", namespace(member), "route", "del", "blackhole", host)

    def _build_bridge(self) -> tuple[str, str]:
        """Create a bridge with an unused subnet. Returns its name and the subnet.

        The kernel refuses a second bridge of the same name. It accepts a second bridge with the same subnet, but
        silently routes to the older one, which a killed run may have left behind.
        """
        for number in random.sample(range(1, 255), 254):
            bridge, subnet = f"ml{self._net}-{number}b", f"10.{self._net}.{number}"
            if ip("-4", "route", "show", f"{subnet}.0/24"):
                continue
            with suppress(subprocess.CalledProcessError):
                ip("link", "add", bridge, "type", "bridge")
                return bridge, subnet
        raise OSError(f"no free address in 10.{self._net}.0.0/16: networks of killed runs are left (ip link)")

    def _dig(self, networks: ExitStack) -> None:
        bridge, subnet = self._build_bridge()
        networks.callback(ip, "link", "del", bridge)
        ip("addr", "add", f"{subnet}.1/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        for place, island in enumerate(self.islands, 2):
            island.host = f"{subnet}.{place}"
            its, outer = namespace(island), f"{bridge}{place}"
            ip("netns", "add", its)
            networks.callback(ip, "netns", "del", its)
            ip("link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", its)
            networks.callback(ip, "link", "del", outer)  # without this, the kernel would delete the link much later
            ip("link", "set", outer, "master", bridge, "up")
            ip("-n", its, "addr", "add", f"{island.host}/24", "dev", "eth0")
            ip("-n", its, "link", "set", "eth0", "up")
            ip("-n", its, "link", "set", "lo", "up")
