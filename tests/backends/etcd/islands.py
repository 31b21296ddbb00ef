"""Three etcd members, each in its own network."""

from __future__ import annotations

from tests import islands
from tests.islands import possible
from tests.servers_etcd import EtcdCluster, EtcdServer

__all__ = ["Archipelago", "possible"]


class Island(islands.Island, EtcdServer):
    def take_ports(self) -> None:
        self.port, self.peer_port = 2379, 2380
        self.initial = f"{self.member}={self.peer}"


class Archipelago(islands.Archipelago[EtcdServer], EtcdCluster):
    def __init__(self) -> None:
        super().__init__(219, [Island(member=f"m{n}") for n in range(3)])
