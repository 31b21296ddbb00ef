"""Run kazoo in a simulated process: its sockets, its clock and its random numbers are those of the simulation."""

from __future__ import annotations

import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import kazoo.handlers.threading
import kazoo.protocol.connection
import kazoo.retry

import multilock_zookeeper
from multilock_zookeeper import sockets
from multilock_zookeeper.inspection import Inspection
from multilock_zookeeper.keys import Nodes
from multilock_zookeeper.transport import Answer, Transport
from tests.simulation.network import Network, Socket
from tests.simulation.plan import Fault
from tests.simulation.scheduler import Process, simulation
from tests.simulation.server import PREFIX, Simulated
from tests.simulation.threads import STAND_INS, File, now, sleep
from tests.simulation.zookeeper_server import ZooKeeperServer

if TYPE_CHECKING:
    from tests.simulation.world import World

__all__ = ["SIMULATED", "connect_through"]


class Pipe(File):
    """Both ends of the socket pair with which a thread wakes kazoo's thread. Each byte stands for one request."""

    def __init__(self) -> None:
        super().__init__()
        self._count = 0

    def is_readable(self) -> bool:
        return self._count > 0

    def send(self, data: bytes) -> int:
        if self.number < 0:
            raise OSError(9, "Bad file descriptor")
        self._count += len(data)
        self.has_changed()
        return len(data)

    def recv(self, size: int) -> bytes:
        self._count -= 1
        return b"\0"


def _pair() -> tuple[Pipe, Pipe]:
    pipe = Pipe()
    return pipe, pipe


class Telling:
    """The transport of an operator's requests. It reports the nodes that an operator deletes to the simulated server,
    which cannot distinguish these requests from releases."""

    def __init__(self, transport: Transport, server: ZooKeeperServer) -> None:
        self._transport, self._server = transport, server

    def delete(self, path: str) -> Answer:
        self._server.forced.add(path)
        return self._transport.delete(path)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def connect_through(network: Network, server: ZooKeeperServer) -> None:
    """Let kazoo connect to this server."""

    def connect(address: tuple[str, int], within: float) -> Socket:
        return network.connect(server, within)

    def inspection(nodes: Nodes, transport: Any, now: Callable[[], float]) -> Inspection:
        return Inspection(nodes, Telling(transport, server), now)  # type: ignore[arg-type]

    vars(multilock_zookeeper)["Inspection"] = inspection
    vars(sockets)["socket"] = SimpleNamespace(**{**vars(socket), "create_connection": connect})


def _addresses(host: str, port: int, *more: int) -> list[Any]:
    return [(0, 0, 0, "", (host, port))]


def _randint(low: int, high: int) -> int:
    return simulation().random.randint(low, high)


def _uniform(low: float, high: float) -> float:
    return simulation().random.uniform(low, high)


_time = SimpleNamespace(monotonic=now, sleep=sleep)
_random = SimpleNamespace(randint=_randint, uniform=_uniform, shuffle=lambda hosts: None)
vars(kazoo.protocol.connection)["time"] = vars(kazoo.retry)["time"] = _time
vars(kazoo.protocol.connection)["random"] = vars(kazoo.retry)["random"] = _random
vars(kazoo.protocol.connection)["socket"] = SimpleNamespace(**{**vars(socket), "getaddrinfo": _addresses})
_handlers = kazoo.handlers.threading
vars(_handlers)["threading"] = SimpleNamespace(**{name: STAND_INS[name] for name in ("Event", "Lock", "RLock")})
vars(_handlers)["socket"] = SimpleNamespace(socketpair=_pair)
_handlers.SequentialThreadingHandler.sleep_func = staticmethod(sleep)
_defaults = kazoo.retry.KazooRetry.__init__.__defaults__
kazoo.retry.KazooRetry.__init__.__defaults__ = tuple(sleep if callable(each) else each for each in _defaults)


def isolate(world: World, fault: Fault, process: Process) -> None:
    """Cut a server off from the leader."""
    server = world.server(fault)
    assert isinstance(server, ZooKeeperServer)
    server.isolate(fault.choice, fault.seconds)


def _open(world: World, ttl: float) -> Any:
    server = world.servers[0]
    assert isinstance(server, ZooKeeperServer)
    # Longer than any stall of a plan. In a session of half a second, a slow packet would end the connection.
    server.shortest = max(ttl / 2, 1.0)
    connect_through(world.network, server)
    return multilock_zookeeper.open_backend("zookeeper://simulation", {"prefix": PREFIX, "ttl": ttl})


SIMULATED = {
    "zookeeper": Simulated(
        _open,
        ZooKeeperServer,
        1,
        {"isolate": isolate},
        {"slow": ("isolate", "isolate"), "server": ("isolate", "isolate isolate"), "all": ("", "isolate")},
        lacks="flush_scripts step_clock",
    )
}
