"""The common part of the simulated servers."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.simulation.plan import Fault
from tests.simulation.scheduler import Process, Simulation
from tests.simulation.threads import EPOCH

if TYPE_CHECKING:
    from tests.simulation.world import World

__all__ = ["PREFIX", "Group", "Server", "Simulated"]

PREFIX = "ml/"  # the prefix of every key
Strike = Callable[["World", Fault, Process], None]
"""A fault that happens now, to this process or to a server."""


class Group:
    """The servers of one backend."""

    def __init__(self, world: World) -> None:
        self.servers = world.servers

    def keeper(self, name: str) -> Server | None:
        """Return the server that alone decides who holds a name, or None if no server or several servers decide."""
        return self.servers[0] if len(self.servers) == 1 else None

    def decides(self, server: Server) -> bool:
        """Return whether some names are lost if this server loses its data."""
        return len(self.servers) == 1

    def calm(self) -> None:
        """End all faults."""
        for server in self.servers:
            if server.paused:
                server.go_on()
            server.start()

    def end(self) -> None:
        """Remove what the run has left outside of the simulation."""


class Server:
    """The common part of the simulated servers. A subclass executes the requests."""

    group = Group
    keeps_tokens = True  # whether the last token of a name is kept if an operator deletes its key
    joins_within = 0.5  # seconds within which a waiter without faults is in the queue, even if it must connect first
    asks_again = 5.0  # seconds after which a waiter asks again if a push was lost
    in_parts = False  # whether one attempt may need several requests
    unwatched = 0.0  # seconds after which a waiter asks again if its request for a push got no reply in time

    def __init__(self, name: str, sim: Simulation | None, clock: Callable[[], int], seed: object) -> None:
        """``clock`` returns the microseconds of the wall clock."""
        self.name = name
        self.sim: Any = sim
        self.random = random.Random(f"server {name} {seed}")
        self.step = 0.0  # seconds by which the server's clock was stepped
        self.went_back = False  # whether the server's clock was stepped back
        self.up, self.paused = True, False
        self.run, self.started = 0, -math.inf
        self.lost = -math.inf  # when the server last lost commits that it had acknowledged
        #: Called before each request that may give a name to a claim: see `World._step`.
        self.on_step: Callable[[str, str, str], Callable[[], None]] = lambda *what: lambda: None
        self.on_expiry: Callable[[str], None] = lambda key: None
        self._clock = clock
        self._late: list[tuple[Any, bytes]] = []  # data that arrived while the server was stopped

    def micros(self) -> int:
        """Return the server's time in microseconds."""
        return self._clock() + int(self.step * 1e6)

    def received(self, end: Any, data: bytes) -> None:
        """Receive bytes from a client. ``end`` is the server's end of the client's connection."""
        if self.up and end.run == self.run:
            if self.paused:
                self._late.append((end, data))
            else:
                self._received(end, data)

    def _received(self, end: Any, data: bytes) -> None:
        raise NotImplementedError

    def accept(self, link: Any) -> Any:
        """Return the server's end of a new connection, or None if the server is down."""
        raise NotImplementedError

    def closed(self, end: Any) -> None:
        """Called when a client has closed its connection."""
        raise NotImplementedError

    # For the oracles

    def holder(self, key: str) -> str | None:
        """Return the claim that holds a name exclusively, or None."""
        raise NotImplementedError

    def holders(self, key: str) -> list[str]:
        """Return all claims that hold a name, as far as the server can tell."""
        return [held] if (held := self.holder(key)) else []

    def is_free(self, key: str) -> bool:
        """Return whether a claim would get the name now."""
        raise NotImplementedError

    def claims(self) -> Iterator[tuple[str, str]]:
        """Yield each claim that holds or waits, as a pair of the name's key and the claim."""
        raise NotImplementedError

    def waiters(self, key: str, me: str) -> list[str]:
        """Return the claims in the queue of a name that are alive and subscribed, in order. The claim ``me`` counts as
        alive."""
        raise NotImplementedError

    def request(self, data: bytes) -> object:
        """Return the kind of the request in ``data``, which a client sends."""
        raise NotImplementedError

    def pushed(self, data: bytes) -> str | None:
        """Return the claim that ``data``, which the server sends to a client, notifies of a grant. Returns None if
        ``data`` is no such message."""
        raise NotImplementedError

    def granted_at(self, token: int) -> float:
        """Return the time at which the server gave this token. In the base class, a token is a time in microseconds."""
        return token / 1e6 - EPOCH

    def late_leave(self, ttl: float) -> float:
        """Return for how many seconds a request that is executed after its cancel may have an effect. ``ttl`` is the
        longest ttl of the plan."""
        return 0.0

    # Faults

    def stop(self) -> None:
        """Stop the server's process. Requests that arrive are executed when it continues."""
        self.paused = True

    def go_on(self) -> None:
        """Let a stopped server continue."""
        self.paused = False
        late, self._late = self._late, []
        for end, data in late:
            self.received(end, data)

    def end(self, *, forgets: bool) -> None:
        """End the server. If ``forgets`` is True, the server loses its data."""
        self.up, self.paused = False, False
        self.run += 1
        self._late = []
        for link in self._ended(forgets=forgets):
            link.reset()

    def delete(self, key: str) -> None:
        """Delete the data of a name, as an operator does."""
        raise NotImplementedError

    def lose_scripts(self) -> None:
        """Forget the scripts or functions of the clients."""
        raise NotImplementedError

    def _ended(self, *, forgets: bool) -> list[Any]:
        """Forget all connections, and return the client's end of each."""
        raise NotImplementedError

    def start(self) -> None:
        """Start an ended server again."""
        if not self.up:
            self.up = True
            self.started = self.sim.time


@dataclass(slots=True)
class Simulated:
    """The description of how a backend is simulated. Its profiles and faults are added to those of `plan.PROFILES` and
    `faults`."""

    opens: Callable[[World, float], Any]  # opens the backend in the running process, for a client with this ttl
    server: type[Server] = Server
    servers: int = 0  # the number of simulated servers
    faults: Mapping[str, Strike] = field(default_factory=dict)
    profiles: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    often: str = ""  # profiles that are drawn besides `plan.OFTEN`
    lacks: str = ""  # faults that make no sense for this backend
    ttls: Sequence[float] = (1.0, 2.0, 3.0, 6.0, 10.0)
    shares: bool = True  # whether it has readers and permits
    replicas: int = 0  # the number of replicas of each server
    forgets: Callable[[], object] = lambda: None  # forgets what a run has left in the modules of the backend
