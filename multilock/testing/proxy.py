"""A TCP proxy between a client and a server, which causes faults on request.

    with FaultProxy.before("redis://127.0.0.1:6379/0") as proxy, multilock.connect(proxy.url) as client:
        lost = proxy.drop_reply(b"EVALSHA")
        ...

The proxy keeps TCP's promises: bytes may arrive late, but they arrive in order. If bytes are lost, all later bytes in
the same direction of that connection are lost too.
"""

from __future__ import annotations

import contextlib
import math
import selectors
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Literal, TypeVar, get_args
from urllib.parse import urlsplit, urlunsplit

from multilock.kernel.runtime import now

__all__ = ["Connection", "Direction", "Fault", "FaultProxy", "Traffic", "Which"]

Direction = Literal["up", "down", "both"]
"""The bytes that a fault affects: those to the server (up), those to the client (down), or both."""

Which = Literal["all", "present", "new"]
"""The connections that a fault affects: all, those that exist now, or future ones."""

Side = Literal["server", "client"]
Then = Literal["cut", "hold"]

T = TypeVar("T")
CHUNK = 65536
BACKLOG_BYTES = 4_000_000  # bytes held back in one direction before the proxy stops reading, as a network would
CONNECT_WITHIN = 5.0
RESET = struct.pack("ii", 1, 0)  # SO_LINGER 0: close() sends RST

PORTS = {  # the backends' default ports
    "redis": 6379,
    "rediss": 6379,
    "valkey": 6379,
    "valkeys": 6379,
    "redlock": 6379,
    "redlocks": 6379,
    "consul": 8500,
    "consuls": 8501,
    "etcd": 2379,
    "etcds": 2379,
    "zookeeper": 2181,
    "zk": 2181,
    "postgresql": 5432,
    "postgres": 5432,
}
LOCAL = ("memory", "sqlite", "unix")


@dataclass(slots=True)
class Traffic:
    """The number of bytes that the proxy has received and sent since it was made. The difference was held back or
    lost."""

    up_in: int = 0
    up_pieces: int = 0  #: the number of pieces in which these bytes arrived: one call of recv() returns one piece
    up_out: int = 0
    down_in: int = 0
    down_out: int = 0


class Fault:
    """A planned fault of one request, which is held back or loses its reply. It happens once."""

    def __init__(self, proxy: FaultProxy, kind: str, request: bytes, nth: int, then: str) -> None:
        if not isinstance(request, bytes):
            raise TypeError(f"give bytes that the request contains, not {request!r:.60}")
        if nth < 1:
            raise ValueError(f"nth is {nth}: the next request is number 1")
        self._proxy = proxy
        self._request = request
        self._left = nth
        self._pipe: _Pipe | None = None
        self._counting = threading.Lock()  # several proxies may share the fault
        self._happened = threading.Event()
        self.kind = kind
        self.then = then

    @property
    def happened(self) -> bool:
        """Whether the request was held, or its reply was dropped."""
        return self._happened.is_set()

    def wait(self, within: float) -> None:
        """Wait until the request is held or its reply is dropped. Raises TimeoutError after ``within`` seconds."""
        if not self._happened.wait(within):
            raise TimeoutError(f"no fault within {within:g} s: too few requests contained {self._request!r}")

    def release(self) -> None:
        """Forward a held request to the server, even if its client has closed the connection meanwhile."""
        self._proxy._do(self._release)

    def _release(self) -> None:
        if self._pipe is not None:
            self._pipe.fault = None

    def _takes(self, data: bytes) -> bool:
        with self._counting:
            self._left -= self._request in data
            return self._left == 0 and self._request in data


class _Pipe:
    """One direction of one connection: the bytes that arrived, and when each piece may leave."""

    def __init__(
        self, source: socket.socket, sink: socket.socket, held: bool, delay: float, count_out: Callable[[int], None]
    ) -> None:
        self._count_out = count_out
        self.source = source
        self.sink = sink
        self.held = held
        self.delay = delay
        self.fault: Fault | None = None  # a fault of this pipe: up it holds the request, down it drops the reply
        self.swallow = False  # drop everything that arrives
        self.ended = False  # the source sent its last byte
        self.done = False  # the end was passed on to the sink
        self._chunks: deque[tuple[float, bytes]] = deque()
        self._bytes = 0

    def wants_read(self) -> bool:
        return not self.ended and self._bytes < BACKLOG_BYTES

    def wants_write(self, at: float) -> bool:
        return self.due_at() <= at and bool(self._chunks)

    def due_at(self) -> float:
        """Return when the next piece, or the end of the stream, is due at the sink. inf means that nothing is due
        now."""
        if self.held or self.done or (self.fault is not None and self.fault.kind == "hold"):
            return math.inf
        if self._chunks:
            return self._chunks[0][0]
        return 0.0 if self.ended else math.inf

    def put(self, data: bytes) -> None:
        if not self.swallow:
            self._chunks.append((now() + self.delay, data))
            self._bytes += len(data)

    def send(self) -> None:
        while self.wants_write(now()):
            at, data = self._chunks.popleft()
            try:
                sent = self.sink.send(data)
            except BlockingIOError:
                sent = 0
            except OSError:
                self.discard()
                return
            self._bytes -= sent
            self._count_out(sent)
            if sent < len(data):
                self._chunks.appendleft((at, data[sent:]))
                return

    def end(self) -> None:
        """Pass the end of the stream on to the sink, once all bytes before it have been sent."""
        if self.ended and not self.done and self.due_at() == 0.0:
            self.done = True
            with contextlib.suppress(OSError):
                self.sink.shutdown(socket.SHUT_WR)

    def discard(self) -> None:
        self.swallow = True
        self._chunks.clear()
        self._bytes = 0


class Connection:
    """One connection of a client through the proxy."""

    def __init__(self, proxy: FaultProxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy = proxy
        self._client = client
        self._server = server
        self.up = _Pipe(client, server, proxy._new_up.held, proxy._new_up.delay, proxy._count_up_out)
        self.down = _Pipe(server, client, proxy._new_down.held, proxy._new_down.delay, proxy._count_down_out)

    def cut(self) -> None:
        """Reset the connections to the client and to the server. All bytes that were held back are lost."""
        self._proxy._do(self._cut)

    def black_hole(self, direction: Direction = "both") -> None:
        """Let nothing pass in this direction. `heal` delivers what was held back."""
        _check("direction", direction, Direction)
        self._proxy._do(lambda: self._set(direction, held=True))

    def half_open(self, dead: Side = "server") -> None:
        """Make one side vanish without notifying the other. Everything that the other side still sends is lost."""
        _check("dead", dead, Side)
        self._proxy._do(lambda: self._half_open(dead))

    def heal(self) -> None:
        """Deliver everything that was held back. Later bytes pass without delay."""
        self._proxy._do(lambda: self._set("both", held=False, delay=0.0))

    def _pipes(self, direction: Direction = "both") -> list[_Pipe]:
        return {"up": [self.up], "down": [self.down], "both": [self.up, self.down]}[direction]

    def _set(self, direction: Direction, held: bool | None = None, delay: float | None = None) -> None:
        for pipe in self._pipes(direction):
            pipe.held = pipe.held if held is None else held
            pipe.delay = pipe.delay if delay is None else delay

    def _half_open(self, dead: Side) -> None:
        gone, silent = (self.up, self.down) if dead == "server" else (self.down, self.up)
        gone.discard()
        silent.discard()
        silent.ended = silent.done = True  # the end is not passed on
        with contextlib.suppress(OSError):
            gone.sink.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self._proxy._forget(gone.sink)
        gone.sink.close()

    def _cut(self) -> None:
        for side in (self._client, self._server):
            with contextlib.suppress(OSError):
                side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self._close()

    def _close(self) -> None:
        self._proxy._connections.discard(self)
        for side in (self._client, self._server):
            self._proxy._forget(side)
            side.close()


class _Defaults:
    """The faults of a new connection, in one direction."""

    held = False
    delay = 0.0


class FaultProxy:
    """A proxy that listens on a free port of 127.0.0.1 and forwards to ``host:port``, without a fault at first.

    When a method returns, its fault is in effect. After `close` each method raises RuntimeError. One background thread
    serves all connections.
    """

    def __init__(self, host: str, port: int, url: str | None = None) -> None:
        self._target = (host, port)
        self._url = url
        self._selector = selectors.DefaultSelector()
        self._connections: set[Connection] = set()
        self._new_up, self._new_down = _Defaults(), _Defaults()
        self._faults: list[Fault] = []
        self._traffic = Traffic()
        self._jobs: deque[Callable[[], None]] = deque()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._closed = False
        self._listener: socket.socket | None = self._listen(0)
        self.host, self.port = self._listener.getsockname()
        self._thread = threading.Thread(target=self._serve, name="fault-proxy", daemon=True)
        self._thread.start()

    @classmethod
    def before(cls, url: str, port: int | None = None) -> FaultProxy:
        """Return a proxy in front of the server of ``url``. Clients connect to the ``url`` of the proxy.

        ``port`` (default: the backend's default port) is used if the URL has none. Raises ValueError if the URL has
        several hosts, does not use TCP, or has no known port.
        """
        parts = urlsplit(url)
        if parts.scheme in LOCAL:
            raise ValueError(f"{parts.scheme}:// does not use TCP: a proxy cannot be put in front of it")
        if "," in parts.netloc.rpartition("@")[2]:
            raise ValueError("the URL has several hosts, but one proxy serves one host: make one proxy for each")
        port = parts.port or port or PORTS.get(parts.scheme)
        if port is None:
            raise ValueError(f"{parts.scheme}:// has no known default port: give one in the URL")
        return cls(parts.hostname or "127.0.0.1", port, url)

    @property
    def url(self) -> str:
        """The URL given to `before`, with the address of the proxy."""
        if self._url is None:
            raise ValueError("this proxy was made from a host and a port, not from a URL: use .host and .port")
        parts = urlsplit(self._url)
        login, at, _ = parts.netloc.rpartition("@")
        return urlunsplit(parts._replace(netloc=f"{login}{at}{self.host}:{self.port}"))

    @property
    def connections(self) -> list[Connection]:
        """The connections that exist now."""
        return self._do(lambda: list(self._connections))

    @property
    def traffic(self) -> Traffic:
        """The bytes and pieces counted so far. A test can check with them that its fault affected any bytes."""
        return self._do(lambda: replace(self._traffic))

    def cut(self) -> None:
        """Reset every connection. New ones are accepted."""
        self._do(self._cut)

    def refuse(self) -> None:
        """Refuse new connections. Existing connections stay open."""
        self._do(self._stop_listening)

    def accept(self) -> None:
        """Accept connections again, on the same port."""
        self._do(self._start_listening)

    def black_hole(self, direction: Direction = "both", which: Which = "all") -> None:
        """Let no byte pass in this direction. New connections are still accepted. `heal` delivers the bytes."""
        _check("direction", direction, Direction)
        _check("which", which, Which)
        self._do(lambda: self._set(direction, which, held=True))

    def delay(self, seconds: float, direction: Direction = "both", which: Which = "all") -> None:
        """Deliver everything ``seconds`` later, in order."""
        if not seconds >= 0:  # written so that NaN is refused too
            raise ValueError(f"the delay is {seconds}: give seconds, 0 for none")
        _check("direction", direction, Direction)
        _check("which", which, Which)
        self._do(lambda: self._set(direction, which, delay=seconds))

    def half_open(self, dead: Side = "server") -> None:
        """Make one side of every present connection vanish without notifying the other."""
        _check("dead", dead, Side)
        self._do(lambda: self._half_open(dead))

    def heal(self) -> None:
        """End every black hole and delay, accept connections again, and forget planned faults. Connections that were
        cut stay cut."""
        self._do(self._heal)

    def drop_reply(self, request: bytes = b"", *, nth: int = 1, then: Then = "cut") -> Fault:
        """Forward the ``nth`` request from now on that contains ``request``, and drop its reply.

        The server executes the request, but the client receives no reply. Then the connection is cut. With
        ``then="hold"`` it stays open instead, but carries no more bytes. The proxy counts each piece that arrives as
        one request. So the client must wait for each reply before it sends its next request.
        """
        _check("then", then, Then)
        return self._plan("drop", request, nth, then)

    def share(self, fault: Fault) -> None:
        """Let ``fault``, which another proxy planned, also count the requests of this proxy.

        The fault happens once, at the proxy that receives the last request to be counted. A fault of `hold_request`
        cannot be shared.
        """
        self._do(lambda: self._faults.append(fault))

    def hold_request(self, request: bytes = b"", *, nth: int = 1) -> Fault:
        """Hold back the ``nth`` request from now on that contains ``request``, and all later bytes that its connection
        sends to the server.

        `Fault.release` forwards the request. The server then executes it, even if the client has given up meanwhile.
        """
        return self._plan("hold", request, nth, "")

    def close(self) -> None:
        """Cut everything and end the thread. A second call has no effect."""
        if not self._closed:
            self._do(self._shut)
            self._thread.join()
            self._wake_read.close()
            self._wake_write.close()

    def __repr__(self) -> str:
        host, port = self._target
        return f"<FaultProxy {self.host}:{self.port} before {host}:{port}{' closed' if self._closed else ''}>"

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _plan(self, kind: str, request: bytes, nth: int, then: str) -> Fault:
        fault = Fault(self, kind, request, nth, then)
        self._do(lambda: self._faults.append(fault))
        return fault

    def _do(self, job: Callable[[], T]) -> T:
        """Run ``job`` on the serving thread and wait for its result. Only that thread uses the sockets."""
        if self._closed:
            raise RuntimeError("this proxy is closed: make a new one")
        answer: Future[T] = Future()

        def run() -> None:
            try:
                answer.set_result(job())
            except Exception as error:
                answer.set_exception(error)

        self._jobs.append(run)
        self._wake_write.send(b"x")
        return answer.result()

    # Everything below runs on the serving thread.

    def _serve(self) -> None:
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        while not self._closed:
            self._register()
            for key, events in self._selector.select(self._rest()):
                if key.fileobj is self._wake_read:
                    self._wake_read.recv(CHUNK)
                elif key.fileobj is self._listener:
                    self._connect()
                elif events & selectors.EVENT_READ and key.data in self._pipes():
                    self._read(key.data)
            for pipe in self._pipes():
                pipe.send()
                pipe.end()
            for connection in [each for each in self._connections if each.up.done and each.down.done]:
                connection._close()
            while self._jobs:
                self._jobs.popleft()()

    def _pipes(self) -> list[_Pipe]:
        return [pipe for connection in self._connections for pipe in connection._pipes()]

    def _register(self) -> None:
        """Register at the selector what each pipe waits for: bytes from its source, or room in its sink."""
        at = now()
        for connection in self._connections:
            for pipe, other in ((connection.up, connection.down), (connection.down, connection.up)):
                events = selectors.EVENT_READ * pipe.wants_read() | selectors.EVENT_WRITE * other.wants_write(at)
                self._watch(pipe.source, events, pipe)

    def _watch(self, side: socket.socket, events: int, pipe: _Pipe) -> None:
        if side.fileno() < 0:
            return
        known = self._selector.get_map().get(side.fileno())
        if known is None and events:
            self._selector.register(side, events, pipe)
        elif known is not None and not events:
            self._selector.unregister(side)
        elif known is not None and known.events != events:
            self._selector.modify(side, events, pipe)

    def _rest(self) -> float | None:
        due = min((pipe.due_at() for pipe in self._pipes()), default=math.inf)
        return None if due == math.inf else max(0.0, due - now())

    def _connect(self) -> None:
        assert self._listener is not None
        try:
            client, _ = self._listener.accept()
        except OSError:
            return
        try:
            server = socket.create_connection(self._target, CONNECT_WITHIN)
        except OSError:  # the server is down; the client is connected already, so it gets a reset
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            client.close()
            return
        for side in (client, server):
            side.setblocking(False)
            side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connections.add(Connection(self, client, server))

    def _read(self, pipe: _Pipe) -> None:
        try:
            data = pipe.source.recv(CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        connection = next(each for each in self._connections if pipe in each._pipes())
        if pipe is connection.up:
            self._traffic.up_in += len(data)
            self._traffic.up_pieces += bool(data)
        else:
            self._traffic.down_in += len(data)
        if not data:
            pipe.ended = True
        elif pipe is connection.up:
            self._strike(connection, data)
            pipe.put(data)
        elif pipe.fault is None:
            pipe.put(data)
        else:
            self._drop(connection, pipe.fault)

    def _count_up_out(self, number: int) -> None:
        self._traffic.up_out += number

    def _count_down_out(self, number: int) -> None:
        self._traffic.down_out += number

    def _strike(self, connection: Connection, data: bytes) -> None:
        for fault in [each for each in self._faults if each._takes(data)]:
            self._faults.remove(fault)
            if fault.kind == "hold":
                fault._pipe = connection.up
                connection.up.fault = fault
                fault._happened.set()
            else:
                connection.down.fault = fault

    def _drop(self, connection: Connection, fault: Fault) -> None:
        connection.down.discard()
        fault._happened.set()  # set before the client can notice the fault
        if fault.then == "cut":
            connection._cut()

    def _set(self, direction: Direction, which: Which, held: bool | None = None, delay: float | None = None) -> None:
        if which != "new":
            for connection in self._connections:
                connection._set(direction, held, delay)
        if which != "present":
            for name, defaults in (("up", self._new_up), ("down", self._new_down)):
                if direction in (name, "both"):
                    defaults.held = defaults.held if held is None else held
                    defaults.delay = defaults.delay if delay is None else delay

    def _cut(self) -> None:
        for connection in list(self._connections):
            connection._cut()

    def _half_open(self, dead: Side) -> None:
        for connection in self._connections:
            connection._half_open(dead)

    def _heal(self) -> None:
        self._set("both", "all", held=False, delay=0.0)
        self._faults.clear()
        self._start_listening()

    def _listen(self, port: int) -> socket.socket:
        listener = socket.create_server(("127.0.0.1", port), backlog=512)
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        return listener

    def _start_listening(self) -> None:
        if self._listener is None:
            self._listener = self._listen(self.port)

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None

    def _forget(self, side: socket.socket) -> None:
        if side.fileno() >= 0 and side.fileno() in self._selector.get_map():
            self._selector.unregister(side)

    def _shut(self) -> None:
        self._closed = True
        self._stop_listening()
        for connection in list(self._connections):
            connection._cut()
        self._selector.close()


def _check(what: str, value: object, known: object) -> None:
    """Raise ValueError if ``value`` is not one of the Literal type ``known``."""
    if value not in get_args(known):
        raise ValueError(f"{what} must be one of {', '.join(get_args(known))}, not {value!r}")
