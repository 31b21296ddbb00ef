"""A simulated etcd: connections, watch streams, elections and faults. `etcd_store` has the data.

The product's own transport runs over `Channel`, which replaces a channel of gRPC. A frame is a line: the number of the
call, a word, and a message.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc

import multilock_etcd
from multilock_etcd import transport, wire
from multilock_etcd.transport import Code, calls
from tests.simulation.etcd_store import DELETE, Refused, Row, Store, Stream
from tests.simulation.network import Network, Socket
from tests.simulation.plan import Fault
from tests.simulation.scheduler import Process, Simulation, simulation
from tests.simulation.server import PREFIX, Server, Simulated
from tests.simulation.threads import Waiters

if TYPE_CHECKING:
    from tests.simulation.world import World

__all__ = ["SIMULATED", "Channel", "EtcdServer"]

LOOKS_EVERY = 0.5  # seconds between two searches for expired leases at the server
CATCHES_UP_EVERY = 0.1  # seconds after which a watch that began in the past reports past events
ELECTION = 1.0  # seconds; the election timeout, by which a new leader extends each lease
WITHOUT_LEADER = 3 * ELECTION  # seconds after which a member without a leader ends watches that require a leader
CONNECT_WITHIN = 5.0  # seconds for one try to connect
BACKOFF = 0.1, 1.0  # seconds between two tries to connect: after the first failure, and the maximum
PING_EVERY, PONG_WITHIN = 10.0, 3.0  # seconds
NO_LEADER = "etcdserver: no leader"
LEADER_FAILED = "etcdserver: request timed out, possibly due to previous leader failure"
CONNECT_FAILED = "failed to connect to all addresses"
RESTING = b'"resting_until"'
CONTENDER = re.compile(rb"((?:[^/]+/)[^/!]+)/((?:read|write)/|permit/\d+/|)([0-9a-f]{16}\.[0-9a-f]{32})")
EXCLUSIVE = (b"", b"write/")
Change = tuple[str, str, str]  # the arguments of `Server.on_step`: the name's key, the claim, and the kind of change


class Session:
    """The server's end of one connection."""

    def __init__(self, link: Socket, run: int) -> None:
        self.link, self.run = link, run
        self.streams: dict[bytes, Stream] = {}
        self.requires_leader: set[bytes] = set()  # the streams that end if the member has no leader


class EtcdServer(Server):
    """An etcd cluster, which the clients reach at one or more addresses. All members share one store."""

    def __init__(self, name: str, sim: Simulation | None, clock: Callable[[], int], seed: object) -> None:
        super().__init__(name, sim, clock, seed)
        self._sessions: dict[Session, None] = {}
        self._leaderless_until = 0.0
        self._leaving: set[str] = set()  # the claims whose keys the present step deletes
        self.store = Store(self._now)

    def _now(self) -> float:
        return float(self.sim.time)

    @property
    def _works(self) -> bool:
        return self.up and not self.paused and self._now() >= self._leaderless_until

    # For the oracles

    def _contenders(self, key: str) -> list[tuple[Row, bytes, str]]:
        """Return the contenders for a name in order of arrival, each with its kind and its claim."""
        rows = self.store.rows_in(f"{key}/".encode(), f"{key}0".encode())
        rows.sort(key=lambda row: row.create_revision)
        return [(row, found[2], found[3].decode()) for row in rows if (found := CONTENDER.fullmatch(row.key))]

    def holder(self, key: str) -> str | None:
        for row, kind, claim in self._contenders(key)[:1]:
            return claim if kind in EXCLUSIVE and RESTING not in row.value else None
        return None

    def is_free(self, key: str) -> bool:
        return not self.store.rows_in(f"{key}/".encode(), f"{key}0".encode())

    def claims(self) -> Iterator[tuple[str, str]]:
        for row in self.store.rows.values():
            if (found := CONTENDER.fullmatch(row.key)) and RESTING not in row.value:
                yield found[1].decode(), found[3].decode()

    def waiters(self, key: str, me: str) -> list[str]:
        holder = self.holder(key)
        claims = [claim for row, _, claim in self._contenders(key) if RESTING not in row.value]
        return [claim for claim in claims if claim != holder and claim not in self._leaving]

    def request(self, data: bytes) -> object:
        _, word, message = data.split(b" ", 2)
        if word.decode() != calls.TXN.path:
            return word
        parts = wire.TxnRequest.FromString(message)
        return len(parts.compare), *(each.ListFields()[0][0].name for each in (*parts.success, *parts.failure))

    def pushed(self, data: bytes) -> str | None:
        if b" watch " not in data[:16]:
            return None
        for event in wire.WatchResponse.FromString(data.split(b" ", 2)[2]).events:
            if event.type == DELETE and (found := CONTENDER.fullmatch(event.kv.key)):
                return str(found[3].decode())
        return None

    def granted_at(self, token: int) -> float:
        return self.store.given_at.get(token, 0.0)

    # Messages

    def accept(self, link: Socket) -> Session | None:
        if not self.up:
            return None
        session = Session(link, self.run)
        self._sessions[session] = None
        return session

    def closed(self, session: Session) -> None:
        if session.run == self.run:
            self._sessions.pop(session, None)
            for stream in session.streams.values():
                self.store.streams.pop(stream, None)

    def _received(self, session: Session, data: bytes) -> None:
        number, word, message = data.split(b" ", 2)
        match word:
            case b"ping":
                self._send(session, number, b"pong")
            case b"stream":
                self._open_stream(session, number, requires_leader=message == b"True")
            case b"watch":
                if stream := session.streams.get(number):
                    self.store.hear(stream, wire.WatchRequest.FromString(message))
                    self.sim.after(CATCHES_UP_EVERY * self.random.random(), self._catch_up)
            case b"end":
                if stream := session.streams.pop(number, None):
                    self.store.streams.pop(stream, None)
                    self._send(session, number, b"end")
            case _:
                lag = self.random.expovariate(1000.0) if self.random.random() < 0.1 else 0.0
                request = session, number, word.decode(), message
                if lag:
                    self.sim.after(lag, self._execute, *request)
                else:
                    self._execute(*request)

    def _send(self, session: Session, number: bytes, word: bytes, message: bytes = b"") -> None:
        session.link.deliver(b"%s %s %s" % (number, word, message))

    def _open_stream(self, session: Session, number: bytes, *, requires_leader: bool) -> None:
        def send(answer: Any) -> None:
            self._send(session, number, b"watch", answer.SerializeToString())

        stream = session.streams[number] = Stream(send)
        self.store.streams[stream] = None
        if requires_leader:
            session.requires_leader.add(number)

    def _catch_up(self) -> None:
        if self.up and not self.paused:
            self.store.catch_up()
        elif self.up:
            self.sim.after(CATCHES_UP_EVERY, self._catch_up)

    def _execute(self, session: Session, number: bytes, path: str, message: bytes) -> None:
        if not self.up or session.run != self.run:
            return
        if self.paused:
            self._late.append((session, b"%s %s %s" % (number, path.encode(), message)))
            return
        request = REQUESTS[path].FromString(message)
        if self._now() < self._leaderless_until and path != calls.STATUS.path:
            self._execute_without_leader(session, number, path, message)
            return
        steps = [self.on_step(*change) for change in self._changes(path, request)]
        self._leaving.clear()
        try:
            reply = self.store.execute(path, request)
        except Refused as refused:
            self._refuse(session, number, refused.code, refused.details)
        else:
            self._send(session, number, b"reply", reply.SerializeToString())
            if path == calls.GRANT.path:
                self._expire_later(self.store, reply.ID)
        for executed in steps:
            executed()
        if self.sim.trace is not None:
            shown = re.sub(r"\s+", " ", str(request))[:300]
            self.sim.note(None, f"  {self.name} {path.rpartition('/')[2]} {shown} -> {self.store.revision}")

    def _execute_without_leader(self, session: Session, number: bytes, path: str, message: bytes) -> None:
        """Refuse a request, execute it late, or let it time out. A request that times out may still be executed by the
        next leader."""
        fate, until = self.random.random(), self._leaderless_until + self.random.uniform(0.0, 0.1)
        if fate < 0.3:
            self._refuse(session, number, Code.UNAVAILABLE, NO_LEADER)
            return
        if fate < 0.8:
            self.sim.at(until, self._execute, session, number, path, message)
        if fate > 0.6:
            self.sim.at(until, self._refuse, session, number, Code.UNAVAILABLE, LEADER_FAILED)

    def _refuse(self, session: Session, number: bytes, code: Any, details: str) -> None:
        if self.up and session.run == self.run:
            self._send(session, number, b"error", f"{code.name} {details}".encode())

    def _changes(self, path: str, request: Any) -> list[Change]:
        """Return which claims this request adds or removes, one for each name."""
        puts, deletes, kind = [], [], "leave"
        if path == calls.DELETE.path:
            deletes = [request.key]
        elif path == calls.REVOKE.path or (path == calls.KEEP_ALIVE.path and not self.store.is_alive(request.ID)):
            deletes = self.store.keys_of(request.ID)
        elif path == calls.TXN.path:
            compares = [each for each in request.compare if each.target == wire.CREATE and each.create_revision]
            done = all(self.store.holds(each) for each in request.compare)
            operations = request.success if done else request.failure
            puts = [each.request_put.key for each in operations if each.HasField("request_put")]
            deletes = [each.request_delete_range.key for each in operations if each.HasField("request_delete_range")]
            kind = "force" if compares else kind  # only an operator compares the keys that it deletes
        return self._all_changes(puts, "ask") or self._all_changes(deletes, kind)

    def _all_changes(self, keys: Iterable[bytes], kind: str) -> list[Change]:
        found: dict[str, Change] = {}
        for each in keys:
            if contender := CONTENDER.fullmatch(each):
                key, claim = contender[1].decode(), contender[3].decode()
                found.setdefault(key, (key, claim, kind))
                if kind != "ask":
                    self._leaving.add(claim)
        return list(found.values())

    # Leases

    def _expire_later(self, store: Store, number: int) -> None:
        until = max(store.leases[number].until, self._now())
        self.sim.at(until + self.random.uniform(0.0, LOOKS_EVERY), self._expire, store, number)

    def _expire(self, store: Store, number: int) -> None:
        lease = store.leases.get(number)
        if lease is None or store is not self.store:
            return
        if lease.until > self._now() or not self._works:
            self._expire_later(store, number)
            return
        changes = self._all_changes(lease.keys, "leave")
        steps = [self.on_step(*change) for change in changes]
        self._leaving.clear()
        self.sim.note(None, f"  {self.name} ends the lease {number}")
        store.end_lease(number)
        for executed in steps:
            executed()
        for key, _, _ in changes:
            self.on_expiry(key)

    # Faults

    def elect(self, seconds: float, *, replays: bool) -> None:
        """Let the cluster have no leader for some seconds. With ``replays``, the member that serves the watches then
        restores a snapshot."""
        self._leaderless_until = until = max(self._leaderless_until, self._now() + seconds)
        self.sim.at(until, self._elected, until, replays)
        self.sim.after(WITHOUT_LEADER, self._end_streams, until)

    def _elected(self, until: float, replays: bool) -> None:
        if until == self._leaderless_until:
            self.store.extend_leases(ELECTION)
            if replays:
                self.store.replay()
                self._catch_up()

    def _end_streams(self, until: float) -> None:
        """End the watches that require a leader, if the cluster still has none."""
        if self._now() >= until or not self.up or self.paused:
            return
        for session in self._sessions:
            for number in sorted(session.requires_leader & session.streams.keys()):
                self.store.streams.pop(session.streams.pop(number), None)
                self._refuse(session, number, Code.UNAVAILABLE, NO_LEADER)

    def _ended(self, *, forgets: bool) -> list[Socket]:
        sessions, self._sessions = list(self._sessions), {}
        self.store.streams.clear()
        if forgets:
            lost, self.store = self.store, Store(self._now, self.store.lease)
            self.store.given_at = lost.given_at  # a client may still hold a lock by a token of the lost data
            self.went_back = True  # the revisions begin again
        return [each.link for each in sessions]

    def start(self) -> None:
        if not self.up:
            super().start()
            self.elect(self.random.uniform(0.0, ELECTION), replays=False)

    def compact(self) -> None:
        if self._works:
            self.store.compact()

    def delete(self, key: str) -> None:
        """Delete one key of a name, or all its keys."""
        contenders = self._contenders(key)
        if contenders and self.random.random() < 0.5:
            self.store.delete(self.random.choice(contenders)[0].key)
        else:
            self.store.delete(f"{key}/".encode(), f"{key}0".encode())


REQUESTS = {
    calls.RANGE.path: wire.RangeRequest,
    calls.TXN.path: wire.TxnRequest,
    calls.DELETE.path: wire.DeleteRangeRequest,
    calls.GRANT.path: wire.LeaseGrantRequest,
    calls.REVOKE.path: wire.LeaseRevokeRequest,
    calls.KEEP_ALIVE.path: wire.LeaseKeepAliveRequest,
    calls.TIME_TO_LIVE.path: wire.LeaseTimeToLiveRequest,
    calls.STATUS.path: wire.StatusRequest,
}


class Connection(Socket):
    """The connection of a channel. It passes arriving data on to the channel, even if no task waits for data."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel.network, channel.server)
        self.channel = channel
        self.arrived_at = self.sim.time

    def _reaches_client(self, data: bytes) -> None:
        if not self._closed and self._error is None and self.process.alive:
            self.network.on_arrived(self, data)
            self.arrived_at = self.sim.time
            self.channel.arrived(self, data)

    def _fails(self) -> None:
        if not self._closed and self._error is None:
            super()._fails()
            self.channel.broken(self, f"recvmsg:{self._error}")

    def ping(self) -> None:
        self._to_server = max(self._to_server + 1e-9, self.sim.time + self.network.delay(self.process, self.server))
        self.sim.at(self._to_server, self._reaches_server, b"0 ping ")


class Call(grpc.RpcError):  # type: ignore[misc]
    """A call: a request with one reply, or a stream. As in gRPC, the object is also the error of a failed call."""

    def __init__(self, channel: Channel, number: int, parse: Callable[[bytes], Any]) -> None:
        super().__init__()
        self.channel, self.number, self._parse = channel, number, parse
        self.is_sent = False
        self._code: Any = None  # None while the call is under way
        self._details = ""
        self._replies: deque[bytes] = deque()
        self._waiters = Waiters()

    def __str__(self) -> str:
        return f"{self._code} {self._details}"

    def code(self) -> Any:
        return self._code

    def details(self) -> str:
        return self._details

    def is_over(self) -> bool:
        return self._code is not None

    def has_reply(self) -> bool:
        return bool(self._replies) or self.is_over()

    def wait(self, ready: Callable[[], bool], seconds: float | None, what: str) -> bool:
        return self._waiters.wait(ready, seconds, what)

    def changed(self) -> None:
        self._waiters.wake_all()

    def receive(self, data: bytes) -> None:
        if not self.is_over():
            self._replies.append(data)
            self.changed()

    def finish(self, code: Any, details: str = "") -> None:
        if not self.is_over():
            self._code, self._details = code, details
            self.channel.calls.pop(self.number, None)
            self.changed()

    def cancel(self) -> None:
        if not self.is_over():
            self.finish(Code.CANCELLED, "Locally cancelled by application!")
            self.channel.send(self, b"end")

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.wait(self.has_reply, None, "stream")
            if self._replies:
                yield self._parse(self._replies.popleft())
            elif self._code is Code.OK:
                return
            else:
                raise self

    def reply(self, seconds: float) -> Any:
        """Return the reply to a request with one reply. Raises this call if it failed."""
        if not self.wait(self.has_reply, seconds, "reply"):
            self.finish(Code.DEADLINE_EXCEEDED, "Deadline Exceeded")
        if not self._replies:
            raise self
        return self._parse(self._replies.popleft())


class Channel:
    """Replaces a channel of gRPC. All calls share one connection to the server, which is made when a call needs it."""

    def __init__(self, network: Network, server: Server) -> None:
        self.network, self.server, self.sim = network, server, network.sim
        self.calls: dict[int, Call] = {}
        self._numbers = 0
        self._link: Connection | None = None
        self._is_ready = self._is_closed = False
        self._backoff, self._fails_until = BACKOFF[0], 0.0

    def unary_unary(
        self, path: str, *, request_serializer: Callable[[Any], bytes], response_deserializer: Callable[[bytes], Any]
    ) -> Callable[..., Any]:
        def ask(request: Any, timeout: float, metadata: Any) -> Any:
            process = self.sim.running().process
            until = process.now() + float(timeout)
            call = self._begin(response_deserializer)
            if not call.wait(lambda: self._is_ready or call.is_over(), timeout, "connect"):
                call.finish(Code.DEADLINE_EXCEEDED, "Deadline Exceeded")
            self.send(call, path.encode(), request_serializer(request))
            return call.reply(until - process.now())

        return ask

    def stream_stream(
        self, path: str, *, request_serializer: Callable[[Any], bytes], response_deserializer: Callable[[bytes], Any]
    ) -> Callable[..., Any]:
        def ask(requests: Iterator[Any], metadata: Any) -> Call:
            call = self._begin(response_deserializer)
            words = request_serializer, requests, ("hasleader", "true") in metadata
            self.sim.spawn(self.sim.running().process, partial(self._send_all, call, *words), "grpc")
            return call

        return ask

    def _send_all(
        self, call: Call, serialize: Callable[[Any], bytes], requests: Iterator[Any], requires_leader: bool
    ) -> None:
        call.wait(lambda: self._is_ready or call.is_over(), None, "connect")
        self.send(call, b"stream", str(requires_leader).encode())
        for request in requests:
            if call.is_over():
                return
            self.send(call, b"watch", serialize(request))
        self.send(call, b"end")

    def _begin(self, parse: Callable[[bytes], Any]) -> Call:
        if self._is_closed:
            raise ValueError("Cannot invoke RPC on closed channel!")
        self._numbers += 1
        call = Call(self, self._numbers, parse)
        self.calls[call.number] = call
        if self._link is None:
            self._connect()
        return call

    def send(self, call: Call, word: bytes, message: bytes = b"") -> None:
        """Send a frame of a call. Does nothing without a connection, or if the call ended before its first frame was
        sent."""
        if self._link is None or not self._is_ready or (call.is_over() and not call.is_sent):
            return
        call.is_sent, link = True, self._link
        try:
            link.sendall(b"%d %s %s" % (call.number, word, message))
        except OSError as error:
            self.broken(link, str(error))
        if link.loses:  # gRPC limits the time after which TCP gives up
            self.sim.after(PONG_WITHIN, self.broken, link, "recvmsg:Connection timed out")

    def close(self) -> None:
        self._is_closed = True
        for call in list(self.calls.values()):
            call.finish(Code.CANCELLED, "Channel closed!")
        if self._link is not None:
            self._link.close()
            self._link = None

    # The connection

    def _connect(self) -> None:
        self._is_ready = False
        self.network.on_connect(simulation().running().process)
        link = Connection(self) if self.sim.time >= self._fails_until else None
        if link is not None:
            link.end = self.server.accept(link)
            if link.end is not None:
                self._link = link
                link.ping()  # the first frame of the server shows that the connection works
                self.sim.after(CONNECT_WITHIN, self._check, link, self.sim.time)
                return
            link.close()
        delay = self.network.delay(simulation().running().process, self.server, may_stall=False)
        self.sim.after(delay, self._failed, list(self.calls.values()), link is not None)

    def _failed(self, failing: list[Call], new: bool) -> None:
        """End these calls, because the server refused the connection."""
        if new:
            self._fails_until = self.sim.time + self._backoff
            self._backoff = min(2 * self._backoff, BACKOFF[1])
        for call in failing:
            call.finish(Code.UNAVAILABLE, f"{CONNECT_FAILED}; last error: Connection refused")

    def arrived(self, link: Connection, data: bytes) -> None:
        number, word, message = data.split(b" ", 2)
        if not self._is_ready:
            self._is_ready, self._backoff = True, BACKOFF[0]
            self.sim.after(PING_EVERY, self._ping, link)
            for each in list(self.calls.values()):
                each.changed()
        call = self.calls.get(int(number))
        if call is None:
            return
        if word == b"error":
            code, _, details = message.decode().partition(" ")
            call.finish(Code[code], details)
        elif word == b"end":
            call.finish(Code.OK)
        else:
            call.receive(message)
            if word == b"reply":
                call.finish(Code.OK)

    def broken(self, link: Connection, details: str) -> None:
        """End all calls, because the connection has ended."""
        if link is not self._link:
            return
        prefix = "" if self._is_ready else f"{CONNECT_FAILED}; last error: "
        self._link, self._is_ready = None, False
        link.close()
        for call in list(self.calls.values()):
            call.finish(Code.UNAVAILABLE, prefix + details)

    def _ping(self, link: Connection) -> None:
        if link is not self._link:
            return
        if self.calls and not link.process.paused:
            link.ping()
            self.sim.after(PONG_WITHIN, self._check, link, self.sim.time)
        self.sim.after(PING_EVERY, self._ping, link)

    def _check(self, link: Connection, since: float) -> None:
        """Give the connection up if nothing has arrived since ``since``."""
        if link is not self._link or link.arrived_at > since or not link.process.alive:
            return
        if link.process.paused:
            self.sim.after(PONG_WITHIN, self._check, link, since)
            return
        self.broken(link, "keepalive watchdog timeout")


def elect(world: World, fault: Fault, process: Process) -> None:
    """Let etcd have no leader for a while."""
    server = world.server(fault)
    assert isinstance(server, EtcdServer)
    server.elect(fault.seconds, replays=fault.choice % 4 == 0)


def compact(world: World, fault: Fault, process: Process) -> None:
    """Let etcd forget all events before the present revision."""
    server = world.server(fault)
    assert isinstance(server, EtcdServer)
    server.compact()


def _open(world: World, ttl: float) -> Any:
    server, process = world.servers[0], simulation().running().process
    vars(transport)["_channel"] = lambda cluster, target: Channel(world.network, server)
    # The transport remembers silent hosts for the whole interpreter, so each simulated process uses its own host names.
    hosts = ",".join(f"host{number}.{process}" for number in range(world.plan.seed % 2 * 2 + 1))
    return multilock_etcd.open_backend(f"etcd://{hosts}", {"prefix": PREFIX, "ttl": ttl})


SIMULATED = {
    "etcd": Simulated(
        _open,
        EtcdServer,
        1,
        {"elect": elect, "compact": compact},
        {"slow": ("elect", "elect")} | dict.fromkeys(("server", "all"), ("elect compact", "elect compact")),
        lacks="flush_scripts step_clock",
        forgets=transport._silent_at.clear,
    )
}
