"""Three ZooKeeper servers, each in its own network."""

from __future__ import annotations

from tests import islands
from tests.islands import possible
from tests.servers_zookeeper import ZooKeeperCluster, ZooKeeperServer

__all__ = ["Archipelago", "possible"]


class Island(islands.Island, ZooKeeperServer):
    def take_ports(self) -> None:
        self.port, self.peer_ports = 2181, (2888, 3888)


class Archipelago(islands.Archipelago[ZooKeeperServer], ZooKeeperCluster):
    def __init__(self) -> None:
        super().__init__(221, [Island(number) for number in (1, 2, 3)])
