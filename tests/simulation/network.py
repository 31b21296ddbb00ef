"""The network between simulated processes and servers: ordered connections with delays, stalls, cuts and partitions.

Data that was sent before a connection was closed may still arrive.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from typing import Any

from tests.simulation.plan import Weather
from tests.simulation.scheduler import Process, Simulation
from tests.simulation.server import Server
from tests.simulation.threads import File

__all__ = ["Network", "Socket"]

HOST_IS_MISSED = 40.0  # seconds until a server notices that a client's host has died
LONGEST_STALL = 30.0  # seconds


class Network:
    """All connections of one run, and the delays between processes and servers."""

    def __init__(self, sim: Simulation, seed: object, weather: Weather) -> None:
        self.sim = sim
        self.random = random.Random(f"network {seed}")
        self.weather = weather
        self.sockets: dict[Socket, None] = {}
        self._parted: dict[tuple[Process, Server], float] = {}  # when the partition or stall ends
        self.on_sent: Callable[[Socket, bytes], None] = lambda sock, data: None
        self.on_connect: Callable[[Process], None] = lambda process: None
        self.on_arrived: Callable[[Socket, bytes], None] = lambda sock, data: None
        self.on_read: Callable[[Socket, bytes], None] = lambda sock, data: None

    def part(self, process: Process, server: Server, seconds: float) -> None:
        """Hold all packets between the process and the server back until ``seconds`` have passed."""
        self._parted[process, server] = self.sim.time + seconds

    def calm(self) -> None:
        """End all partitions, stalls and cuts."""
        self._parted.clear()
        self.weather = Weather(base=self.weather.base)

    def delay(self, process: Process, server: Server, *, may_stall: bool = True) -> float:
        """Return the delay of the next packet between this process and this server."""
        chance, weather = self.random, self.weather
        delay = weather.base * (0.5 - math.log(1.0 - chance.random()))
        if may_stall and weather.p_slow and chance.random() < weather.p_slow:
            delay += chance.expovariate(1.0) * weather.slow
        if may_stall and weather.p_stall and chance.random() < weather.p_stall:
            delay += min(LONGEST_STALL, chance.expovariate(1.0) * weather.stall)
        if self._parted and (until := self._parted.get((process, server), 0.0)):
            delay = max(delay, until - self.sim.time + weather.base * chance.random() * 100)
        return delay

    def connect(self, server: Server, within: float) -> Socket:
        """Connect the running process. Raises OSError if the server is down, or if it takes ``within`` seconds."""
        process = self.sim.running().process
        self.on_connect(process)
        delay = self.delay(process, server) + self.delay(process, server)
        self.sim.block(min(delay, within), "connect")
        if delay >= within:
            raise TimeoutError("timed out")
        sock = Socket(self, server)
        sock.end = server.accept(sock)
        if sock.end is None:
            sock.close()
            raise ConnectionRefusedError(111, "Connection refused")
        return sock

    def of(self, process: Process, server: Server | None = None) -> list[Socket]:
        """Return the open connections of a process."""
        return [each for each in self.sockets if each.process is process and server in (None, each.server)]


class Socket(File):
    """The client's end of a connection, with those methods of a socket that the library calls."""

    def __init__(self, network: Network, server: Server) -> None:
        super().__init__()
        self.network = network
        self.server = server
        self.sim = network.sim
        self.end: Any = None  # the server's end of the connection
        self.loses = False  # whether data for the server is lost
        self._timeout: float | None = None
        self._arrived: deque[bytes] = deque()
        self._error: bytes | Exception | None = None  # the result of a read after all data was read
        self._closed = False
        self._to_server = self._to_client = 0.0  # when the last packet in each direction arrives
        network.sockets[self] = None

    def __repr__(self) -> str:
        return f"{self.process}#{self.number}"

    def setsockopt(self, *what: object) -> None:
        """Do nothing."""

    def settimeout(self, seconds: float | None) -> None:
        self._timeout = seconds

    def setblocking(self, blocks: bool) -> None:
        self._timeout = None if blocks else 0.0

    def getpeername(self) -> tuple[str, int]:
        return self.server.name, 6379

    def send(self, data: bytes) -> int:
        self.sendall(data)
        return len(data)

    def sendall(self, data: bytes) -> None:
        sim = self.sim
        sim.running()
        if self._closed:
            raise OSError(9, "Bad file descriptor")
        if self._error is not None:
            raise BrokenPipeError(32, "Broken pipe")
        self._may_break()
        data = bytes(data)
        self.network.on_sent(self, data)  # a fault that follows this event may delay the data
        delay = self.network.delay(self.process, self.server)
        self._to_server = max(self._to_server + 1e-9, sim.time + delay)
        sim.at(self._to_server, self._reaches_server, data)

    def recv(self, size: int) -> bytes:
        self.sim.running()
        if self._timeout == 0 and not self.is_readable():
            raise BlockingIOError(11, "Resource temporarily unavailable")
        if not self.wait(self._timeout, "recv"):
            raise TimeoutError("timed out")
        if self._closed:
            raise OSError(9, "Bad file descriptor")
        if self._arrived:
            self.network.on_read(self, data := self._arrived.popleft())
            return data
        if isinstance(self._error, bytes):
            return self._error
        assert self._error is not None
        raise self._error

    def is_readable(self) -> bool:
        return bool(self._arrived) or self._error is not None or self._closed

    def shutdown(self, how: int) -> None:
        if self._closed or self._error is not None:
            raise OSError(107, "not connected")
        self._error = b""
        self._leave()
        self.has_changed()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._leave()
            super().close()

    def _may_break(self) -> None:
        network = self.network
        if network.weather.p_cut and network.random.random() < network.weather.p_cut:
            self.sim.after(network.delay(self.process, self.server, may_stall=False), self.cut)

    def _reaches_server(self, data: bytes) -> None:
        if not self.loses and self.end is not None:
            self.server.received(self.end, data)

    def deliver(self, data: bytes) -> None:
        """Send bytes from the server to the client."""
        self._may_break()
        delay = self.network.delay(self.process, self.server)
        self._to_client = max(self._to_client + 1e-9, self.sim.time + delay)
        self.sim.at(self._to_client, self._reaches_client, data)

    def _reaches_client(self, data: bytes) -> None:
        if not self._closed and self._error is None and self.process.alive:
            self.network.on_arrived(self, data)
            self._arrived.append(data)
            self.has_changed()

    def _leave(self) -> None:
        """Let the server notice the end of the connection. Data that is under way arrives earlier, or is lost."""
        network = self.network
        if self.sim.over or self not in network.sockets:
            return
        del network.sockets[self]
        when = self.sim.time + network.delay(self.process, self.server, may_stall=False)
        if self._to_server > self.sim.time and network.random.random() >= network.weather.p_late:
            self.loses = True
        else:
            when = max(when, self._to_server + 1e-9)
        self.sim.at(when, self._server_notices)

    def _server_notices(self) -> None:
        if self.end is not None:
            end, self.end = self.end, None
            self.server.closed(end)

    def cut(self, *, silently: bool = False) -> None:
        """Break the connection. Data for the client is lost, and data for the server may be lost.

        With ``silently`` neither end notices the break, and all later packets are lost too.
        """
        if self._closed or self._error is not None:
            return
        self.sim.note(self.process, f"{self} breaks{', and nobody notices' if silently else ''}")
        if silently:
            self.loses = True
            self.deliver = lambda data: None  # type: ignore[method-assign]
            return
        self.loses = self.network.random.random() < 0.5
        self._fails()
        self.sim.after(self.network.delay(self.process, self.server, may_stall=False), self._server_notices)

    def reset(self) -> None:
        """Break the connection because the server has ended."""
        self.loses, self.end = True, None
        self.sim.after(self.network.delay(self.process, self.server, may_stall=False), self._fails)

    def _fails(self) -> None:
        if not self._closed and self._error is None:
            self._error = ConnectionResetError(104, "Connection reset by peer")
            self.network.sockets.pop(self, None)
            self.has_changed()

    def dies(self, host_too: bool) -> None:
        """End the connection because the process was killed."""
        self._closed = True
        self.network.sockets.pop(self, None)
        after = HOST_IS_MISSED if host_too else self.network.delay(self.process, self.server, may_stall=False)
        self.sim.at(max(self._to_server + 1e-9, self.sim.time + after), self._server_notices)
