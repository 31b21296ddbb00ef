"""A simulated Consul: HTTP, blocking queries, the expiry of sessions, and faults. `consul_store` has the data.

One server stands for the agent and the cluster. A `Dialer` replaces the functions of the module ``socket`` that
multilock's backend calls, so the server receives the very bytes of the backend.
"""

from __future__ import annotations

import json
import re
import socket
from base64 import b64decode
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import parse_qsl, unquote
from uuid import UUID

import multilock_consul
import multilock_consul.notices
import multilock_consul.transport
from multilock.values import decode_value
from multilock_consul.keys import SEMAPHORE_FLAGS
from multilock_consul.reader_locks import SAFETY
from multilock_consul.sessions import REMOVED_AFTER
from tests.simulation.consul_store import WRITES, Entry, Session, Store, shown
from tests.simulation.network import Network, Socket
from tests.simulation.plan import Fault
from tests.simulation.scheduler import Process, Simulation
from tests.simulation.server import PREFIX, Server, Simulated
from tests.simulation.threads import EPOCH, File

if TYPE_CHECKING:
    from tests.simulation.world import World

__all__ = ["SIMULATED", "ConsulServer", "Dialer"]

VERB = re.compile(rb'"Verb": ?"([a-z-]+)"')

LOOKS_EVERY = 0.05  # seconds between two checks whether a stopped server runs again and can reply
STAGGER = 16  # a blocking query takes longer than its wait, by at most the wait divided by this number
UNITS = {"ms": 1e-3, "s": 1.0}
REASONS = {200: "OK", 404: "Not Found", 409: "Conflict", 500: "Internal Server Error"}
PUSHED = "X-Pushed"  # a header for the simulation only, in the reply to a query that had to wait
NO_LEADER, NOT_READY = "No cluster leader", "rpc error making call: Not ready to serve consistent reads"


class Link(Protocol):
    """The connection back to a client."""

    @property
    def process(self) -> Process | None:
        """The client's process."""

    def deliver(self, data: bytes) -> None:
        """Send bytes to the client."""

    def reset(self) -> None:
        """Break the connection."""


@dataclass(eq=False, slots=True)
class End:
    """The server's end of one connection. ``link`` is None if nobody receives the replies."""

    link: Link | None
    process: Process | None
    run: int


@dataclass(eq=False, slots=True)
class Query:
    """A blocking query whose reply must wait."""

    end: End
    kind: str
    subject: str
    index: int  # the reply must have a greater index
    watch: tuple[str, str]


class ConsulServer(Server):
    """A Consul server. Without ``sim`` no session expires, and a blocking query waits forever for a change."""

    asks_again = SAFETY + 1.0
    ttl_min = 10.0  # seconds; the server's session_ttl_min
    in_parts = True

    def __init__(self, name: str, sim: Simulation | None, clock: Callable[[], int], seed: object) -> None:
        super().__init__(name, sim, clock, seed)
        self.make_id: Callable[[], str] = lambda: str(UUID(int=self.random.getrandbits(128)))
        self._ends: dict[End, None] = {}
        self._last: dict[Process | None, bytes] = {}  # the last writing request of each process
        self.went_back = True  # tokens begin again if the data is lost
        self._deletes: set[str] = set()  # the keys that the present request of an operator deletes
        self._begin()

    def _begin(self) -> None:
        self.store = Store(lambda: self.micros() / 1e6)
        self._queries: dict[Query, None] = {}
        self._makers: dict[str, Process | None] = {}  # session -> the process that made it
        self._proved: dict[str, float] = {}  # session -> when it was made or renewed
        self._expiries: dict[str, float] = {}  # session -> when it ends
        self._written: dict[int, float] = {}  # index -> when it was written
        self._leads_from = self._reads_from = 0.0  # when the next leader is elected, and when it has read its log

    # For the oracles

    def _of_name(self, key: str) -> tuple[Entry | None, list[Entry]]:
        """Return the key of a name, and the keys of its readers and permits."""
        found = {entry.key: entry for entry in self.store.below(f"{key}/")}
        return found.pop(f"{key}/.lock", None), list(found.values())

    def holder(self, key: str) -> str | None:
        lock, shared = self._of_name(key)
        return _claim(lock) if lock and lock.session and not any(entry.session for entry in shared) else None

    def holders(self, key: str) -> list[str]:
        lock, shared = self._of_name(key)
        living = [entry for entry in shared if entry.session] or ([lock] if lock and lock.session else [])
        living = [entry for entry in living if not self._deletes or entry.key in self._deletes]
        return [claim for entry in living if (claim := _claim(entry))]

    def is_free(self, key: str) -> bool:
        lock, shared = self._of_name(key)
        keys = [f"{key}/.lock", *(entry.key for entry in shared)]
        if (lock and lock.session) or any(map(self.store.is_delayed, keys)):
            return False
        living = sum(entry.session != "" for entry in shared)
        limit = json.loads(b64decode(lock.value))["Limit"] if lock and lock.flags == SEMAPHORE_FLAGS else 1
        return living < int(limit)

    def claims(self) -> Iterator[tuple[str, str]]:
        for entry in self.store.keys.values():
            if entry.session and (claim := _claim(entry)):
                yield entry.key, claim

    def waiters(self, key: str, me: str) -> list[str]:
        return []  # Consul has no queue

    def request(self, data: bytes) -> object:
        head, _, body = data.partition(b"\r\n\r\n")
        return *head.split(b" HTTP", 1)[0].split(b"/", 4)[:4], *VERB.findall(body)

    def pushed(self, data: bytes) -> str | None:
        return "push" if PUSHED.encode() in data else None

    def granted_at(self, token: int) -> float:
        return self._written.get(token, 0.0) - EPOCH

    def late_leave(self, ttl: float) -> float:
        """Return twice the ttl. By then a renewal has removed the key of the claim, or the key has expired with its
        session."""
        return 2 * max(ttl, self.ttl_min)

    # Requests

    def accept(self, link: Link) -> End | None:
        if not self.up:
            return None
        end = End(link, link.process, self.run)
        self._ends[end] = None
        return end

    def closed(self, end: End) -> None:
        self._ends.pop(end, None)
        for query in [query for query in self._queries if query.end is end]:
            del self._queries[query]

    def _received(self, end: End, data: bytes) -> None:
        head, _, body = data.decode().partition("\r\n\r\n")
        path, _, query = head.split(" ", 2)[1].partition("?")
        words = path.split("/", 4)[2:]
        if data.startswith(b"PUT"):
            self._last[end.process] = data
        options = dict(parse_qsl(query, keep_blank_values=True))
        now = self.micros() / 1e6
        if now < self._leads_from:
            self._reply(end, 500, NO_LEADER)
        elif now < self._reads_from and "consistent" in options:
            self._reply(end, 500, NOT_READY)
        elif words[0] == "txn":
            self._transaction(end, [each["KV"] for each in json.loads(body)])
        elif words[0] == "kv":
            kind = "keys" if "keys" in options else "recurse" if "recurse" in options else "key"
            self._read(end, kind, unquote("/".join(words[1:])), options)
        elif words[1] == "info":
            self._read(end, "session", words[2], options)
        else:
            self._session(end, words[1], words[2] if words[2:] else "", body)

    def _transaction(self, end: End, steps: list[dict[str, Any]]) -> None:
        verbs = [step["Verb"] for step in steps]
        forces = verbs == ["check-session", "delete"] * (len(verbs) // 2)  # only an operator sends such a request
        if forces and all(self.store.fits(step) for step in steps[::2]):
            self._report_forced({step["Key"] for step in steps})
        if not WRITES.isdisjoint(verbs):
            self._reads_from = 0.0  # the new leader executes its whole log before this write
        rows, errors = self.store.execute(steps)
        self._note(f"{[(step['Verb'], step['Key']) for step in steps]} -> {errors or self.store.index}")
        self._reply(end, 409 if errors else 200, shown(rows, errors))
        self._has_changed()

    def _report_forced(self, keys: set[str]) -> None:
        """Report that an operator takes these keys away."""
        self._deletes = keys
        for name in sorted({_name(key) for key in keys}):
            self.on_step(name, "", "force")
        self._deletes = set()

    def _session(self, end: End, what: str, session_id: str, body: str) -> None:
        store = self.store
        if what == "create":
            said = json.loads(body)
            ttl, delay = _seconds(said["TTL"]), _seconds(said["LockDelay"])
            if not self.ttl_min <= ttl <= 86400:
                limits = f"[{self.ttl_min:g}s=24h0m0s]"
                self._reply(end, 500, f"Invalid Session TTL '{round(ttl * 1e9)}', must be between {limits}")
                return
            session_id = self.make_id()
            store.create(Session(session_id, said["Name"], ttl, said["TTL"], delay, said["Behavior"], 0))
            self._makers[session_id] = end.process
            self._lives(session_id)
            self._reply(end, 200, json.dumps({"ID": session_id}))
        elif what == "destroy":
            store.destroy(session_id)
            self._reply(end, 200, "true")
        elif session_id not in store.sessions or self.micros() / 1e6 < self._reads_from:
            store.changed = []
            self._reply(end, 404, f"Session id '{session_id}' not found")
        else:
            store.changed = []
            self._lives(session_id)
            self._reply(end, 200, json.dumps([store.sessions[session_id].row()]))
        self._note(f"session {what} {session_id}")
        self._has_changed()

    def _read(self, end: End, kind: str, subject: str, options: dict[str, str]) -> None:
        query = Query(end, kind, subject, int(options.get("index", 0)), self.store.watch(kind, subject))
        index, body = self.store.read(kind, subject)
        self._note(f"{kind} {subject} after {query.index}: {index}")
        if query.index and index <= query.index:
            self._queries[query] = None
            if self.sim is not None:
                wait = _seconds(options["wait"])
                self.sim.after(wait + self.random.uniform(0, wait / STAGGER), self._time_is_over, query, self.run)
        else:
            self._answer(query, index, body)

    def _time_is_over(self, query: Query, run: int) -> None:
        if query not in self._queries or run != self.run:
            return
        if self.paused:
            self.sim.after(LOOKS_EVERY, self._time_is_over, query, run)
        else:
            self._answer(query, *self.store.read(query.kind, query.subject))

    def _has_changed(self) -> None:
        """Answer the blocking queries whose subject the last request has changed."""
        store = self.store
        if store.changed:
            self._written[store.index] = self.micros() / 1e6
            for query in [query for query in self._queries if store.has_fired(query.watch)]:
                index, body = store.read(query.kind, query.subject)
                if index > query.index:
                    self._answer(query, index, body)
                else:
                    query.watch = store.watch(query.kind, query.subject)
            store.changed = []

    def _answer(self, query: Query, index: int, body: str | None) -> None:
        waited = query in self._queries
        self._queries.pop(query, None)
        head = f"X-Consul-Index: {index}\r\n" + f"{PUSHED}: yes\r\n" * waited
        self._reply(query.end, 404 if body is None else 200, body or "", head)

    def _reply(self, end: End, status: int, body: str, head: str = "") -> None:
        if end in self._ends and end.link:
            said = body.encode()
            first = f"HTTP/1.1 {status} {REASONS[status]}\r\n{head}Content-Length: {len(said)}\r\n\r\n"
            end.link.deliver(first.encode() + said)

    def _note(self, text: str) -> None:
        if self.sim is not None and self.sim.trace is not None:
            self.sim.note(None, f"  {self.name} {text}")

    # The ends of sessions

    def _lives(self, session_id: str) -> None:
        """Let a session live for one to two ttls from now, as Consul's documentation allows. The real server takes
        two."""
        if self.sim is not None:
            self._proved[session_id] = self.sim.time
            left = self.store.sessions[session_id].ttl * self.random.choice([1.0, 2.0, self.random.uniform(1.0, 2.0)])
            self._expiries[session_id] = end = self.sim.time + left
            self.sim.after(left, self._expire, session_id, end)

    def _expire(self, session_id: str, end: float) -> None:
        if self.up and not self.paused and self._expiries.get(session_id) == end:
            self._destroy(session_id)

    def _destroy(self, session_id: str) -> None:
        """End a session without a request of a client."""
        self._expiries.pop(session_id, None)
        self._note(f"session {session_id} ends")
        for key in self.store.destroy(session_id):
            self.on_expiry(_name(key))
        self._has_changed()

    # Faults

    def go_on(self) -> None:
        """Continue. The server executes the requests that have arrived, and ends the expired sessions, in either
        order."""
        first = self.random.random() < 0.5
        if first:
            super().go_on()
        self.paused = False
        for session_id, end in list(self._expiries.items()):
            if end <= self.sim.time:
                self._expire(session_id, end)
        if not first:
            super().go_on()

    def _ended(self, *, forgets: bool) -> list[Any]:
        ends, self._ends = list(self._ends), {}
        self._queries = {}
        if forgets:
            self._begin()
        return [end.link for end in ends]

    def start(self) -> None:
        """Start again. The new leader renews each session. If it reads the ends of earlier sessions in its log, each
        lock delay begins again. Otherwise no lock delay is left."""
        if self.up:
            return
        super().start()
        now = self.micros() / 1e6
        self._leads_from = now + self.random.choice([0.0, self.random.expovariate(2.0)])
        self._reads_from = self._leads_from + self.random.choice([0.0, self.random.expovariate(5.0)])
        reads_all = self.random.random() < 0.7
        delays = self.store.delays if reads_all else {}
        self.store.delays = {key: (now + delay, delay) for key, (_, delay) in delays.items()}
        for session_id in self.store.sessions:
            self._lives(session_id)

    def lose_scripts(self) -> None:
        """Do nothing: Consul has no scripts."""

    def delete(self, key: str) -> None:
        """Delete all keys of a name, or destroy a session that holds the name."""
        holding = [entry.session for entry in self.store.below(f"{key}/") if entry.session]
        if holding and self.random.random() < 0.5:
            session = self.random.choice(holding)
            locked = {entry.key for entry in self.store.keys.values() if entry.session == session}
            self._report_forced(locked)
            self._destroy(session)
        else:
            keys = [entry.key for entry in self.store.below(f"{key}/")]
            self._report_forced(set(keys))
            self.store.execute([{"Verb": "delete", "Key": each} for each in keys])
            self._has_changed()

    def repeat(self, process: Process, seconds: float) -> None:
        """Execute the last writing request of a process again after some seconds, as a proxy may do."""
        if process in self._last:
            self.sim.after(seconds, self.received, End(None, process, self.run), self._last[process])

    def remove_agent(self, process: Process, frozen_at: float) -> None:
        """Remove the agent of this process, which froze at that time, with all its sessions.

        If the client then gets no reply about the session, it reports the reason TAKEN.
        """
        for session_id in list(self.store.sessions):
            if self._makers[session_id] is process and self._proved[session_id] <= frozen_at:
                self.lost = self.sim.time
                self._destroy(session_id)


def _claim(entry: Entry) -> str | None:
    """Return the claim that locks this key, or None if the name only rests after a release."""
    info = decode_value(b64decode(entry.value))
    return info.owner.partition("@")[0] if info.owner and info.resting_until is None else None


def _name(key: str) -> str:
    """Return the part of a key that belongs to the name."""
    return "/".join(key.split("/")[:2])


def _seconds(duration: str) -> float:
    found = re.fullmatch(r"(\d+)(ms|s)", duration)
    assert found is not None, duration
    return int(found[1]) * UNITS[found[2]]


class Ear(File):
    """One end of a pair of connected sockets."""

    def __init__(self) -> None:
        super().__init__()
        self.data = b""
        self.other: Ear

    def setblocking(self, blocks: bool) -> None:
        """Do nothing: no call blocks."""

    def is_readable(self) -> bool:
        return bool(self.data) or self.other.number < 0

    def send(self, data: bytes) -> None:
        self.other.data += data
        self.other.has_changed()

    def recv(self, size: int) -> bytes:
        data, self.data = self.data, b""
        return data

    def close(self) -> None:
        super().close()
        self.other.has_changed()


class Dialer:
    """Replaces the module ``socket`` in the library."""

    def __init__(self, network: Network, server: ConsulServer) -> None:
        self._network, self._server = network, server

    def __getattr__(self, name: str) -> Any:
        return getattr(socket, name)

    def create_connection(self, address: tuple[str, int], timeout: float) -> Socket:
        """Connect. Raises OSError if the server is down or the network too slow."""
        return self._network.connect(self._server, timeout)

    def socketpair(self) -> tuple[Ear, Ear]:
        pair = Ear(), Ear()
        pair[0].other, pair[1].other = pair[1], pair[0]
        return pair


def repeat_request(world: World, fault: Fault, process: Process) -> None:
    """Let a proxy send the last writing request of a process again."""
    server = world.server(fault)
    assert isinstance(server, ConsulServer)
    server.repeat(process, fault.seconds)


def remove_agent(world: World, fault: Fault, process: Process) -> None:
    """Freeze the agent of a process. After some seconds, the servers remove the agent with all its sessions."""
    server = world.server(fault)
    assert isinstance(server, ConsulServer)
    world.network.part(process, server, max(fault.seconds, REMOVED_AFTER + 1.0))
    world.oracles.disturb(process, REMOVED_AFTER + 1.0, fault.kind)
    world.sim.after(REMOVED_AFTER, server.remove_agent, process, world.sim.time)


def _open(world: World, ttl: float) -> Any:
    server = world.servers[0]
    assert isinstance(server, ConsulServer)
    server.ttl_min = 10.0 if ttl >= 10 else 1.0
    for module in (multilock_consul.transport, multilock_consul.notices):
        vars(module)["socket"] = Dialer(world.network, server)
    options: dict[str, object] = {"prefix": PREFIX, "ttl": ttl}
    # A lock delay hides errors of less than a second. Only the removal of an agent needs a delay.
    if world.plan.seed % 3 and all(each.kind != "remove_agent" for each in world.plan.faults):
        options["lock_delay"] = 0
    return multilock_consul.open_backend("consul://simulation", options)


FAULTS = {"repeat_request": repeat_request, "remove_agent": remove_agent}
SIMULATED = {
    "consul": Simulated(
        _open,
        ConsulServer,
        1,
        FAULTS,
        {
            "network": ("", "repeat_request"),
            "slow": (5 * "remove_agent ", 5 * "remove_agent "),
        },
        often="slow",
        lacks="flush_scripts step_clock",
        ttls=(1.0, 2.0, 3.0, 6.0, 10.0, 10.0, 10.0),
    )
}
