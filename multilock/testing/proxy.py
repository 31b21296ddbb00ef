"""A TCP proxy between a client and a server that goes wrong on request.

    with FaultProxy.before("redis://127.0.0.1:6379/0") as proxy, multilock.connect(proxy.url) as client:
        lost = proxy.drop_reply(b"EVALSHA")
        ...

What TCP promises is kept: bytes held back arrive later, in order, or never and then nothing after them.
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
"""To the server, to the client, both."""

Which = Literal["all", "present", "new"]
"""Connections: all of them, those that exist, those that will be made."""

Side = Literal["server", "client"]
Then = Literal["cut", "hold"]

T = TypeVar("T")
CHUNK = 65536
BACKLOG_BYTES = 4_000_000  # held back for one direction before reading stops, as a network would
CONNECT_WITHIN = 5.0
RESET = struct.pack("ii", 1, 0)  # SO_LINGER 0: close() sends RST

PORTS = {  # where the backends find a server whose URL names no port
    "redis": 6379,
    "rediss": 6379,
    "redlock": 6379,
    "redlocks": 6379,
    "consul": 8500,
    "consuls": 8501,
    "etcd": 2379,
    "etcds": 2379,
    "zookeeper": 2181,
    "zk": 2181,
}
LOCAL = ("memory", "sqlite", "unix")


@dataclass(slots=True)
class Traffic:
    """Bytes that came to the proxy, and that went on from it, since it was made: what is missing was held back, or is
    lost."""

    up_in: int = 0
    up_pieces: int = 0  #: in which they came: what is sent in one go is one
    up_out: int = 0
    down_in: int = 0
    down_out: int = 0


class Fault:
    """One request that is to go wrong. It happens once."""

    def __init__(self, proxy: FaultProxy, kind: str, request: bytes, nth: int, then: str) -> None:
        if not isinstance(request, bytes):
            raise TypeError(f"a request is told by bytes that it contains, not by {request!r:.60}")
        if nth < 1:
            raise ValueError(f"nth is {nth}: the next request is number 1")
        self._proxy = proxy
        self._request = request
        self._left = nth
        self._pipe: _Pipe | None = None
        self._counting = threading.Lock()  # it may be shared by several proxies
        self._happened = threading.Event()
        self.kind = kind
        self.then = then

    @property
    def happened(self) -> bool:
        return self._happened.is_set()

    def wait(self, within: float) -> None:
        """Until the request was held, or its reply was dropped; TimeoutError after ``within`` seconds."""
        if not self._happened.wait(within):
            raise TimeoutError(f"no request that contains {self._request!r} went wrong in {within:g} s")

    def release(self) -> None:
        """Let a held request go on to the server, even if its client has given up and closed the connection."""
        self._proxy._do(self._release)

    def _release(self) -> None:
        if self._pipe is not None:
            self._pipe.fault = None

    def _takes(self, data: bytes) -> bool:
        with self._counting:
            self._left -= self._request in data
            return self._left == 0 and self._request in data


class _Pipe:
    """One direction of one connection: what came in, and when each piece may go out."""

    def __init__(
        self, source: socket.socket, sink: socket.socket, held: bool, delay: float, count_out: Callable[[int], None]
    ) -> None:
        self._count_out = count_out
        self.source = source
        self.sink = sink
        self.held = held
        self.delay = delay
        self.fault: Fault | None = None  # up: holds the request; down: swallows the reply
        self.swallow = False  # nothing that comes in goes out any more
        self.ended = False  # the source sent its last byte
        self.done = False  # … and the sink was told
        self._chunks: deque[tuple[float, bytes]] = deque()
        self._bytes = 0

    def wants_read(self) -> bool:
        return not self.ended and self._bytes < BACKLOG_BYTES

    def wants_write(self, at: float) -> bool:
        return self.due_at() <= at and bool(self._chunks)

    def due_at(self) -> float:
        """When something is to be sent, or the end is to be passed on; inf: not before something changes."""
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
        """Pass the end of the stream on, once everything before it has gone out."""
        if self.ended and not self.done and self.due_at() == 0.0:
            self.done = True
            with contextlib.suppress(OSError):
                self.sink.shutdown(socket.SHUT_WR)

    def discard(self) -> None:
        self.swallow = True
        self._chunks.clear()
        self._bytes = 0


class Connection:
    """One client's connection through the proxy."""

    def __init__(self, proxy: FaultProxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy = proxy
        self._client = client
        self._server = server
        self.up = _Pipe(client, server, proxy._new_up.held, proxy._new_up.delay, proxy._count_up_out)
        self.down = _Pipe(server, client, proxy._new_down.held, proxy._new_down.delay, proxy._count_down_out)

    def cut(self) -> None:
        """Reset both sides; what was held back is gone."""
        self._proxy._do(self._cut)

    def black_hole(self, direction: Direction = "both") -> None:
        """Let nothing through, and say nothing; `heal` delivers what was held back."""
        _check("direction", direction, Direction)
        self._proxy._do(lambda: self._set(direction, held=True))

    def half_open(self, dead: Side = "server") -> None:
        """That side is gone and the other never hears of it: its bytes go nowhere."""
        _check("dead", dead, Side)
        self._proxy._do(lambda: self._half_open(dead))

    def heal(self) -> None:
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
        silent.ended = silent.done = True  # the end is never told
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
    """What the next connection starts with, in one direction."""

    held = False
    delay = 0.0


class FaultProxy:
    """Listens on a free port of 127.0.0.1 and forwards to ``host:port``, faithfully until told otherwise.

    Every method has taken effect when it returns; after `close` it raises RuntimeError. One background thread serves
    all connections.
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
        """In front of the server of ``url``; `url` then leads through the proxy.

        ``port`` (default: the backend's own) counts where the URL names none. Raises ValueError for a URL of several
        hosts, and for one that leads to no port.
        """
        parts = urlsplit(url)
        if parts.scheme in LOCAL:
            raise ValueError(f"{parts.scheme}:// makes no TCP connection that a proxy could stand in")
        if "," in parts.netloc.rpartition("@")[2]:
            raise ValueError("the URL names several hosts, and one proxy stands before one host: make one for each")
        port = parts.port or port or PORTS.get(parts.scheme)
        if port is None:
            raise ValueError(f"{parts.scheme}:// has no usual port known here: name the port in the URL")
        return cls(parts.hostname or "127.0.0.1", port, url)

    @property
    def url(self) -> str:
        """The URL given to `before`, with the proxy's address in it."""
        if self._url is None:
            raise ValueError("this proxy was made for an address: use .host and .port")
        parts = urlsplit(self._url)
        login, at, _ = parts.netloc.rpartition("@")
        return urlunsplit(parts._replace(netloc=f"{login}{at}{self.host}:{self.port}"))

    @property
    def connections(self) -> list[Connection]:
        """Those that exist now."""
        return self._do(lambda: list(self._connections))

    @property
    def traffic(self) -> Traffic:
        """What has passed so far: whether a fault met anything can be told by it."""
        return self._do(lambda: replace(self._traffic))

    def cut(self) -> None:
        """Reset every connection; new ones are served."""
        self._do(self._cut)

    def refuse(self) -> None:
        """New connections are refused; the present ones stay."""
        self._do(self._stop_listening)

    def accept(self) -> None:
        """Take connections again, on the same port."""
        self._do(self._start_listening)

    def black_hole(self, direction: Direction = "both", which: Which = "all") -> None:
        """Let nothing through, and say nothing: connects succeed, bytes wait. `heal` delivers them."""
        _check("direction", direction, Direction)
        _check("which", which, Which)
        self._do(lambda: self._set(direction, which, held=True))

    def delay(self, seconds: float, direction: Direction = "both", which: Which = "all") -> None:
        """Everything arrives ``seconds`` later, in order."""
        if not seconds >= 0:  # NaN is not
            raise ValueError(f"the delay is {seconds}: give seconds, 0 for none")
        _check("direction", direction, Direction)
        _check("which", which, Which)
        self._do(lambda: self._set(direction, which, delay=seconds))

    def half_open(self, dead: Side = "server") -> None:
        """One side of every present connection is gone, and the other never hears of it."""
        _check("dead", dead, Side)
        self._do(lambda: self._half_open(dead))

    def heal(self) -> None:
        """End every black hole and delay, accept again, forget faults that have not happened; a cut stays cut."""
        self._do(self._heal)

    def drop_reply(self, request: bytes = b"", *, nth: int = 1, then: Then = "cut") -> Fault:
        """Forward the ``nth`` request from now on that contains ``request``, and swallow the reply: it was executed,
        and nobody is told. Then the connection is cut, or stays open and silent for ever.

        A request is what arrives in one piece, and the connection must be one of request and reply in turn.
        """
        _check("then", then, Then)
        return self._plan("drop", request, nth, then)

    def share(self, fault: Fault) -> None:
        """Requests of this proxy count for a fault of another one too: it happens once, where the last of them comes.
        Not for `hold_request`."""
        self._do(lambda: self._faults.append(fault))

    def hold_request(self, request: bytes = b"", *, nth: int = 1) -> Fault:
        """Keep the ``nth`` request that contains ``request``, and all after it on that connection, until
        `Fault.release`: it is executed then, whatever its client did meanwhile."""
        return self._plan("hold", request, nth, "")

    def close(self) -> None:
        """Cut everything and end the thread. Twice is harmless."""
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
        """Run ``job`` on the serving thread, which alone touches sockets, and wait for it."""
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
        """Tell the selector what each pipe waits for: bytes from its source, or room in its sink."""
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
        except OSError:  # the server is down: the client is reset, which is the nearest thing to a refusal
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
        fault._happened.set()  # before the client can see it
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
    """Raise ValueError for a ``value`` that the Literal type ``known`` does not have."""
    if value not in get_args(known):
        raise ValueError(f"{what} must be one of {', '.join(get_args(known))}, not {value!r}")
