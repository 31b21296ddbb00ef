"""Compare the model of ZooKeeper with a real server: replies, errors, watches, sessions, and the data after a restart.

The model and the server get the same bytes. Their session ids, passwords and times differ, and their transactions are
counted from the beginning of the test.
"""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from tests.servers_zookeeper import ZooKeeperServer as RealServer
from tests.simulation.zookeeper_server import EVENT_XID, HEADER, ZooKeeperServer
from tests.simulation.zookeeper_store import (
    CLOSE,
    CREATE,
    CREATE_CONTAINER,
    DELETE,
    EXISTS,
    GET,
    GET_CHILDREN,
    PING,
    SET,
    SYNC,
    bytes_of,
    text_of,
    written,
)

CALLS, SEEDS, CLIENTS = 250, 8, 3
ASKED = 30_000  # ms
PING_XID = -2
STAT = struct.Struct("!qqqqiiiqiiq")
OPEN = (1).to_bytes(4, "big") + (31).to_bytes(4, "big") + written(b"world") + written(b"anyone")
PERSISTENT, EPHEMERAL_SEQUENTIAL, CONTAINER = 0, 3, 4


class HungUp(Exception):
    """The server has closed the connection."""


class RealConnection:
    def __init__(self, server: RealServer) -> None:
        self._socket = socket.create_connection((server.host, server.port), 30)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: bytes) -> None:
        try:
            self._socket.sendall(written(message))
        except OSError:
            raise HungUp from None

    def receive(self) -> bytes:
        return self._exactly(int.from_bytes(self._exactly(4), "big"))

    def _exactly(self, length: int) -> bytes:
        data = b""
        while len(data) < length:
            try:
                piece = self._socket.recv(length - len(data))
            except ConnectionError:
                raise HungUp from None
            if not piece:
                raise HungUp
            data += piece
        return data

    def close(self) -> None:
        self._socket.close()


class ModelConnection:
    def __init__(self, server: ZooKeeperServer) -> None:
        self._server, self._arrived, self.process = server, list[bytes](), None
        self.network: Any = SimpleNamespace(sockets=(self,))
        self._end = server.accept(self)

    def deliver(self, data: bytes) -> None:
        self._arrived.append(data[4:])

    def reset(self) -> None:
        """Do nothing: `receive` finds no reply."""

    def send(self, message: bytes) -> None:
        self._server.received(self._end, written(message))

    def receive(self) -> bytes:
        if not self._arrived:
            raise HungUp
        return self._arrived.pop(0)

    def close(self) -> None:
        if self._end:
            self._server.closed(self._end)


class Side:
    """One of the two servers, with its clients. It translates replies so that both servers must give the same."""

    def __init__(self, server: Any, connection: type[Any]) -> None:
        self._server, self._kind = server, connection
        self.clients: dict[int, Any] = {}
        self.sessions: dict[int, tuple[int, bytes]] = {}  # client -> its session id and password
        self._names: dict[int, str] = {}  # session id -> a name that is the same on both sides
        self._base = 0
        self._base = self.connect(-1)[1]

    def connect(self, client: int, *, seen: int = 0, resume: bool = False, wrong: bool = False) -> tuple[Any, int]:
        """Open a session, or resume that of this client. Return the server's reply and its counter."""
        resume = resume and client in self.sessions
        session, password = self.sessions[client] if resume else (0, bytes(16))
        before = self.clients.get(client)
        self.clients[client] = made = self._kind(self._server)
        password = bytes(16) if wrong else password
        seen += self._base if seen else 0
        try:
            made.send(struct.pack("!iqiq", 0, seen, ASKED, session) + written(password) + b"\0")
            reply = made.receive()
        except HungUp:
            self.drop(client)
            return "hung up", 0
        finally:
            if before is not None:  # the server closes an older connection of the same session
                before.close()
        _, timeout, number = struct.unpack_from("!iiq", reply)
        if not number:
            self.drop(client)
            return (timeout, reply[16:]), 0
        if not resume:
            self.sessions[client] = number, bytes_of(reply, 16)[0]
            self._names[number] = f"session {len(self._names)}"
        same = bytes_of(reply, 16)[0] == self.sessions[client][1]
        return (timeout, self._names[number], same, reply[36:]), self._counter(client)

    def _counter(self, client: int) -> int:
        self.clients[client].send(struct.pack("!ii", PING_XID, PING))
        return int(HEADER.unpack_from(self.clients[client].receive())[1]) - self._base

    def ask(self, client: int, xid: int, kind: int, body: bytes) -> list[Any]:
        """Send a request. Return its reply, and the events that the server has pushed to each client."""
        own = self.clients.get(client)
        if own is None:
            return ["no connection"]
        try:
            own.send(struct.pack("!ii", xid, kind) + body)
            got = [self._reply(own, kind)]
        except HungUp:
            got = ["hung up"]
        if kind == CLOSE:
            self.drop(client)
        return got + [self.pushed(each) for each in list(self.clients)]

    def _reply(self, own: Any, kind: int) -> Any:
        """Read the reply. Events may come before it, because the client itself may watch the node."""
        message = own.receive()
        xid, zxid, code = HEADER.unpack_from(message)
        if xid == EVENT_XID:
            return [event_of(message), self._reply(own, kind)]
        return xid, zxid - self._base, code, self._body(kind, message[16:])

    def _body(self, kind: int, body: bytes) -> Any:
        if not body:
            return None
        if kind == GET_CHILDREN:
            return sorted(names(body))
        if kind == SYNC:
            return text_of(body, 0)[0]
        what, at = bytes_of(body, 0) if kind in (CREATE, CREATE_CONTAINER, GET) else (b"", 0)
        czxid, mzxid, _, _, version, cversion, aversion, owner, length, children, pzxid = STAT.unpack_from(body, at)
        changed = [each - self._base for each in (czxid, mzxid, pzxid)]
        return what, changed, version, cversion, aversion, self._names.get(owner, owner), length, children

    def pushed(self, client: int) -> Any:
        """Return the events that a client has received."""
        own, events = self.clients[client], []
        try:
            own.send(struct.pack("!ii", PING_XID, PING))
            while (message := own.receive()) and HEADER.unpack_from(message)[0] == EVENT_XID:
                events.append(event_of(message))
        except HungUp:
            self.drop(client)
            return client, sorted(events), "hung up"
        return client, sorted(events), HEADER.unpack_from(message)[1] - self._base

    def drop(self, client: int) -> None:
        """Close the connection of a client without closing its session."""
        if client in self.clients:
            self.clients.pop(client).close()

    def close(self) -> None:
        for client in list(self.clients):
            self.drop(client)


def event_of(message: bytes) -> tuple[int, int, int, str]:
    _, zxid, code = HEADER.unpack_from(message)
    kind, _ = struct.unpack_from("!ii", message, 16)
    return zxid, code, kind, text_of(message, 24)[0]


def names(body: bytes) -> Iterator[str]:
    at = 4
    for _ in range(int.from_bytes(body[:4], "big")):
        name, at = text_of(body, at)
        yield name


def create(path: str, data: bytes, flags: int) -> bytes:
    return written(path.encode()) + written(data) + OPEN + flags.to_bytes(4, "big")


def some_call(chance: random.Random, root: str, nodes: Sequence[str]) -> tuple[int, bytes]:
    parent = f"{root}/{chance.choice('ab')}"
    path = chance.choice([parent, parent, root, f"{root}/!alive", *nodes[-6:], *nodes[-6:]])
    one, watch = written(path.encode()), chance.choice([b"\0", b"\1"])
    value = written(chance.randbytes(chance.choice([0, 5])))
    version = chance.choice([-1, -1, -1, 0, 1]).to_bytes(4, "big", signed=True)
    calls = [
        *[(CREATE, create(f"{parent}/{chance.randbytes(3).hex()}__lock__", b"{}", EPHEMERAL_SEQUENTIAL))] * 5,
        *[(CREATE_CONTAINER, create(parent, b"0", CONTAINER))] * 2,
        (CREATE, create(root, b"", PERSISTENT)),
        (CREATE, create(f"{path}/x", b"", EPHEMERAL_SEQUENTIAL)),
        *[(DELETE, one + version)] * 4,
        *[(SET, one + value + version)] * 3,
        (SYNC, one),
        *[(EXISTS, one + watch)] * 3,
        *[(GET, one + b"\0")] * 2,
        *[(GET_CHILDREN, one + watch)] * 6,
    ]
    return chance.choice(calls)


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    with RealServer(java=["-Dznode.container.checkIntervalMs=3600000"]) as server:
        yield server


def compare(sides: Sequence[Side], client: int, xid: int, kind: int, body: bytes, where: str) -> Any:
    """Send a request to both servers, compare the replies and the events, and return the reply."""
    real, model = (side.ask(client, xid, kind, body) for side in sides)
    assert model == real, where
    return real[0]


@contextmanager
def both(real: RealServer, model: ZooKeeperServer) -> Iterator[list[Side]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(closing(Side(real, RealConnection))),
            stack.enter_context(closing(Side(model, ModelConnection))),
        ]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEEDS))
def test_the_model_replies_and_pushes_as_zookeeper_does(server: RealServer, seed: int) -> None:
    with both(server, ZooKeeperServer("model", None, lambda: 0, seed)) as sides:
        compare_many(sides, seed)


def compare_many(sides: Sequence[Side], seed: int) -> None:
    """Compare the replies to many random requests, also over connections and sessions that end."""
    chance, root, nodes = random.Random(seed), f"/root{seed}", list[str]()
    for number in range(CALLS):
        client, event = chance.randrange(CLIENTS), chance.random()
        where = f"seed {seed}, call {number} of client {client}"
        if event < 0.03:
            for side in sides:
                side.drop(client)
        elif event < 0.1 or client not in sides[0].clients:
            how: dict[str, Any] = {
                "resume": chance.random() < 0.7,
                "seen": chance.choice([0, 0, 1, 1_000_000]),
                "wrong": chance.random() < 0.1,
            }
            real, simulated = (side.connect(client, **how) for side in sides)
            assert simulated == real, f"{where}: {how}"
        kind, body = some_call(chance, root, nodes) if event < 0.98 else (CLOSE, b"")
        reply = compare(sides, client, number + 1, kind, body, f"{where}: {kind} {body!r}")
        while isinstance(reply, list):
            reply = reply[1]
        if kind == CREATE and isinstance(reply, tuple) and reply[3]:
            nodes.append(reply[3][0].decode())


@pytest.mark.slow
def test_the_model_keeps_sessions_nodes_and_numbers_over_a_restart() -> None:
    model = ZooKeeperServer("model", None, lambda: 0, 0)
    with RealServer() as server, both(server, model) as sides:
        for side in sides:
            side.connect(0)
            side.connect(1)
        for xid, (kind, body) in enumerate(
            [
                (CREATE_CONTAINER, create("/a", b"0", CONTAINER)),
                (CREATE, create("/a/x__lock__", b"{}", EPHEMERAL_SEQUENTIAL)),
                (CREATE, create("/a/y__lock__", b"{}", EPHEMERAL_SEQUENTIAL)),
                (DELETE, written(b"/a/y__lock__0000000001") + b"\xff" * 4),
                (GET_CHILDREN, written(b"/a") + b"\1"),
            ]
        ):
            compare(sides, 0, xid + 1, kind, body, f"{kind} {body!r}")
        for side in sides:
            for client in (-1, 0, 1):
                side.drop(client)
        server.restart()
        model.end(forgets=False)
        model.start()
        for client in (0, 1):
            real, simulated = (side.connect(client, resume=True, seen=1) for side in sides)
            assert simulated == real, "a session survives"
        compare(sides, 0, 1, CREATE, create("/a/z__lock__", b"", EPHEMERAL_SEQUENTIAL), "the counter of the parent")
        compare(sides, 1, 1, GET_CHILDREN, written(b"/a") + b"\1", "the nodes")
        compare(sides, 0, 2, CLOSE, b"", "the nodes of a session go with it, and the watch fires")
