"""Requests to Consul's agents: blocking, bounded in time, never retried. Errors of sockets and of Consul become errors
of multilock."""

from __future__ import annotations

import socket
import ssl
import struct
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import consul
import consul.base

from multilock import BackendRejected, BackendUnavailable, system
from multilock.backend import start_worker
from multilock.options import NO_TLS, who_answered
from multilock_consul.wire import Reading, Response

__all__ = ["AT_A_TIME", "RIGHTS", "Address", "Agents", "Answer", "TooLarge", "Wire", "judged"]

Answer = tuple[Response, float]
"""The agent's response, and when the request was sent."""

RIGHTS = " (give token= the rights that multilock's page on Consul lists)"
AT_A_TIME = 64  # requests of one client under way, renewals not counted; an agent accepts 200 connections per address
SPARE = 8  # idle connections that are kept
NOT_EXECUTED = {400, 401, 403, 405, 407, 411, 413, 414, 415, 431, 500}
"""Status codes which show that the request was not executed, whether an agent or a proxy before it sent them. After any
other code it is unknown whether the request was executed."""

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class TooLarge(BackendRejected):
    """The request has more bytes or more operations than this server accepts."""


@dataclass(frozen=True, slots=True)
class Address:
    """Host and port of an agent."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Wire:
    """One connection to one agent, used by one thread at a time.

    A connection closes itself when it breaks, or when a call is interrupted: the next request on it could otherwise
    read the response to this one.
    """

    __slots__ = ("_first", "_head", "_now", "_poll", "address", "alive", "sock")

    def __init__(self, sock: socket.socket, address: Address, headers: str, now: Callable[[], float]) -> None:
        self.sock = sock
        self.address = address
        self.alive = True
        self._first = b""  # the first bytes that the server sent
        self._poll = system.poll()  # select() cannot watch a descriptor above 1023
        self._poll.register(sock, system.POLLIN)
        self._head = f" HTTP/1.1\r\nHost: {address}\r\n{headers}".encode()
        self._now = now

    def request(self, method: str, target: str, body: bytes = b"") -> bytes:
        """Encode a request for this connection."""
        return b"%b %b%bContent-Length: %d\r\n\r\n%b" % (method.encode(), target.encode(), self._head, len(body), body)

    def call(self, request: bytes, within: float) -> Answer:
        """Send one request and return its response, whatever the status. Raises `BackendUnavailable`."""
        sent = False
        deadline = self._now() + within
        try:
            self.sock.settimeout(max(within, 0.001))
            sent_at = self._now()
            # If this fails, the request was not sent completely, so the server cannot execute it.
            self.sock.sendall(request)
            sent = True
            response = self._read(deadline)
        except (OSError, ValueError) as error:
            self.close()
            said = "did not answer" if sent else "cannot be reached"
            why = f"{self.address} {said}: {error}{self._hint(error)}"
            raise BackendUnavailable(why, unknown=sent, backend="consul") from error
        except BaseException:
            self.close()
            raise
        if response.closes:
            self.close()
        return response, sent_at

    def _hint(self, error: Exception) -> str:
        if who := who_answered(self._first):
            return "" if "HTTP server" in who else f" ({who}: it is not a Consul agent, or its URL is consuls://)"
        if not self._first and isinstance(error, ConnectionError) and not isinstance(self.sock, ssl.SSLSocket):
            return " (the server sent nothing: is it a Consul agent? If it uses TLS, write consuls:// in the URL)"
        return ""

    def stale(self) -> bool:
        """Return whether the connection has input without a request: usually the agent has closed it."""
        waiting = isinstance(self.sock, ssl.SSLSocket) and self.sock.pending()
        return bool(waiting or self._poll.poll(0))

    def close(self) -> None:
        self.alive = False
        with suppress(OSError):
            self.sock.close()

    def _read(self, deadline: float) -> Response:
        reading = Reading()
        while True:
            if not (data := self.sock.recv(65536)):
                raise ConnectionError("the server ended the connection")
            self._first = self._first or data[:16]
            if response := reading.feed(data):
                return response
            if (left := deadline - self._now()) <= 0:
                raise TimeoutError("the response was not complete in time")
            self.sock.settimeout(left)


class Agents:
    """The agents of one client, and the connections to the one in use. If an agent fails, the next is used.

    All agents return the same results, because the cluster's leader answers every request that needs the newest state.
    Any thread may use this object.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        *,
        tls: ssl.SSLContext | None,
        token: str | None,
        dc: str | None,
        now: Callable[[], float],
    ) -> None:
        self._addresses = addresses
        self.tls = tls  #: the TLS settings, or None without TLS
        self._headers = f"X-Consul-Token: {token}\r\n" if token else ""
        self._dc = {"dc": dc} if dc else {}
        self.now = now
        self._first = 0  # index of the address in use
        self._idle: deque[Wire] = deque()  # needs no mutex, because each method of a deque is atomic
        # has an item for each request that may still be sent now
        self._room: system.SimpleQueue[bool] = system.SimpleQueue()
        for _ in range(AT_A_TIME):
            self._room.put(True)
        self._closed = False

    def target(self, path: str, **query: str | int) -> str:
        """Return path and query as they are sent. An empty value is a flag: ``?consistent``."""
        pairs = urlencode({**query, **self._dc})
        return f"{path}?{pairs}" if pairs else path

    def call(self, method: str, target: str, within: float, body: bytes = b"", *, urgent: bool = False) -> Answer:
        """Return a response with the status 200, 404 or 409. For any other status, raises the errors of `Backend`."""
        response, sent_at = self.exchange(method, target, within, body, urgent=urgent)
        return judged(response), sent_at

    def exchange(self, method: str, target: str, within: float, body: bytes = b"", *, urgent: bool = False) -> Answer:
        """Return the response, whatever its status. Raises `BackendUnavailable` if no response came.

        At most `AT_A_TIME` requests are under way, besides those that are ``urgent``. Many threads of this client must
        not use up the connections that the agent allows, because the renewals need them.
        """
        if urgent:
            return self._exchange(method, target, within, body)
        deadline = self.now() + within
        room: list[bool] = []
        try:
            system.take(self._room.get, within, room)
            return self._exchange(method, target, deadline - self.now(), body)
        except system.Empty:
            why = f"all {AT_A_TIME} requests that one client may send at a time were under way"
            raise BackendUnavailable(why, unknown=False, backend="consul") from None
        finally:
            if room:
                self._room.put(True)

    def _exchange(self, method: str, target: str, within: float, body: bytes) -> Answer:
        start = self.now()
        wire = self._take(within)
        left = start + within - self.now()
        # this process may have been paused, and the claim cancelled: no release would then undo this request
        if left <= 0:
            self._give(wire)
            raise BackendUnavailable(f"{wire.address}: no time was left to ask it", unknown=False, backend="consul")
        try:
            response, sent_at = wire.call(wire.request(method, target, body), left)
        except BackendUnavailable:
            self._leave(wire.address)
            raise
        finally:
            self._give(wire)
        if response.status >= 500:
            self._leave(wire.address)
        return response, sent_at

    def api(self, within: float) -> consul.base.Consul:
        """Return py-consul's own interface over these connections. Each of its requests has ``within`` seconds."""
        return _Api(self, within)

    def connect(self, within: float) -> Wire:
        """Return a new connection to the first agent that accepts one within ``within`` seconds.

        A separate thread connects, because neither a DNS look-up nor a handshake has a time limit. If that thread
        connects too late, it closes the connection.
        """
        within = max(within, 0.001)  # the caller's time may already be over
        result: system.SimpleQueue[Wire | BaseException] = system.SimpleQueue()
        done = system.Event()  # set when the caller no longer waits for the result

        def dial() -> None:
            try:
                result.put(self.dial(within))
            except BaseException as error:
                result.put(error)
            if done.is_set():
                _close_late(result)

        start_worker(dial, "multilock-consul-connect", once=True, or_here=True)
        try:
            outcome = result.get(timeout=within)
        except system.Empty:
            self._leave(self._address())
            outcome = TimeoutError(f"not connected within {within:g} s")
        finally:
            done.set()
            _close_late(result)
        if isinstance(outcome, BaseException):
            raise self._unreachable(outcome) from outcome
        return outcome

    def dial(self, within: float) -> Wire:
        """Connect as `connect` does, but in this thread, where a DNS look-up may take longer than ``within``. Raises
        OSError."""
        deadline = self.now() + within
        for left in reversed(range(len(self._addresses))):
            address = self._address()
            try:
                return self._open(address, (deadline - self.now()) / (left + 1))
            except OSError:
                self._leave(address)
                if not left:
                    raise
        raise AssertionError("no agents")  # pragma: no cover

    def close(self) -> None:
        """Close the idle connections. A connection in use is closed when its request ends."""
        self._closed = True
        self._trim()

    def _open(self, address: Address, within: float) -> Wire:
        sock = socket.create_connection((address.host, address.port), timeout=max(within, 0.001))
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # When this connection is closed, unsent bytes are dropped, and the agent is notified at once.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            if self.tls:
                sock = self.tls.wrap_socket(sock, server_hostname=address.host)
        except BaseException:
            sock.close()
            raise
        return Wire(sock, address, self._headers, self.now)

    def _address(self) -> Address:
        return self._addresses[self._first % len(self._addresses)]

    def _leave(self, address: Address) -> None:
        """Stop using the agent at ``address``, and close the idle connections to it. The next agent is used from now
        on, unless another thread has already chosen it.

        If the network is broken, a request on any of these connections would wait until its timeout.
        """
        if self._address() == address:
            self._first += 1
        for _ in range(len(self._idle)):
            with suppress(IndexError):  # another thread may have taken the last connection
                wire = self._idle.popleft()
                if wire.address == address:
                    wire.close()
                else:
                    self._idle.append(wire)

    def _take(self, within: float) -> Wire:
        while True:
            try:
                wire = self._idle.pop()
            except IndexError:
                return self.connect(within)
            if wire.address == self._address() and not wire.stale():
                return wire
            wire.close()

    def _give(self, wire: Wire) -> None:
        if wire.alive:
            self._idle.append(wire)
            if self._closed or len(self._idle) > SPARE:
                self._trim()

    def _trim(self) -> None:
        with suppress(IndexError):  # another thread may have taken the last connection
            while self._closed or len(self._idle) > SPARE:
                self._idle.popleft().close()

    def _unreachable(self, error: BaseException) -> Exception:
        where = ", ".join(map(str, self._addresses))
        if isinstance(error, ssl.SSLCertVerificationError):
            return BackendRejected(f"{where} is not trusted: {error} (see ca=)", backend="consul")
        hint = ""
        if NO_TLS in str(error):
            hint = " (this server does not use TLS: write consul:// in the URL)"
        elif self.tls and isinstance(error, (ssl.SSLError, TimeoutError, ConnectionResetError)):
            hint = " (does this server use TLS? If not, write consul:// in the URL)"
        return BackendUnavailable(f"{where} cannot be reached: {error}{hint}", unknown=False, backend="consul")


def _close_late(result: system.SimpleQueue[Wire | BaseException]) -> None:
    """Close a connection that was made too late. Both the caller and the connecting thread call this, because either
    may be the last."""
    with suppress(system.Empty):
        if isinstance(late := result.get_nowait(), Wire):
            late.close()


def judged(response: Response) -> Response:
    """Return this response if it answers the request: 200, 404 or 409. Otherwise raises the errors of `Backend`."""
    status, said = response.status, response.text
    if status in (200, 404, 409):
        return response
    if status >= 500 and "ermission denied" not in said and "ACL not found" not in said:
        # Most errors may come after the write, but without a leader nothing was written.
        unknown = "No cluster leader" not in said
        raise BackendUnavailable(f"Consul failed ({status}): {said}", unknown=unknown, backend="consul")
    if status == 429:
        raise BackendUnavailable(f"Consul is overloaded (429): {said}", unknown=False, backend="consul")
    # for example, a proxy may send 408 after the agent has the request
    if not (300 <= status < 400 or status in NOT_EXECUTED):
        raise BackendUnavailable(f"this is not a reply of Consul ({status}): {said}", backend="consul")
    hint = RIGHTS if status in (401, 403, 500) else ""
    if status == 400 and "HTTPS server" in said:
        hint = " (this server uses TLS: write consuls:// in the URL)"
    kind = TooLarge if status == 413 else BackendRejected
    raise kind(f"Consul refused ({status}): {said}{hint}", backend="consul")


class _Api(consul.base.Consul):  # type: ignore[misc]
    """A py-consul client for one call, built at py-consul's extension point for other HTTP clients."""

    def __init__(self, agents: Agents, within: float) -> None:
        self._adapter = _Adapter(agents, within)
        super().__init__("agents", 0, scheme="http", consistency="consistent")

    def http_connect(self, host: str, port: int, scheme: str, verify: object = True, cert: object = None) -> _Adapter:
        return self._adapter

    connect = http_connect  # the name in python-consul; py-consul uses ``connect`` for something else


class _Adapter(consul.base.HTTPClient):  # type: ignore[misc]
    """An HTTP client for py-consul that uses the agents' token, address and TLS, and ignores those of py-consul."""

    def __init__(self, agents: Agents, within: float) -> None:
        super().__init__()
        self._agents = agents
        self._within = within

    def get(self, callback: Any, path: str, params: Any = None, *_: Any, **__: Any) -> Any:
        return self._ask("GET", callback, path, params)

    def put(self, callback: Any, path: str, params: Any = None, data: Any = "", *_: Any, **__: Any) -> Any:
        return self._ask("PUT", callback, path, params, data)

    def post(self, callback: Any, path: str, params: Any = None, data: Any = "", *_: Any, **__: Any) -> Any:
        return self._ask("POST", callback, path, params, data)

    def delete(self, callback: Any, path: str, params: Any = None, data: Any = "", *_: Any, **__: Any) -> Any:
        return self._ask("DELETE", callback, path, params, data)

    def close(self) -> None:
        """Do nothing: the connections belong to the agents."""

    def _ask(self, method: str, callback: Any, path: str, params: Any, data: Any = "") -> Any:
        target = self.uri(path, params).removeprefix(self.base_uri)
        body = data if isinstance(data, bytes) else data.encode()
        response, _ = self._agents.call(method, target, self._within, body)
        said = response.body.decode(errors="replace")
        try:
            return callback(consul.base.Response(response.status, _Headers(response.headers), said))
        except consul.ConsulException as error:
            raise BackendUnavailable(f"py-consul cannot read Consul's response: {error}", backend="consul") from error


class _Headers(dict[str, str]):
    """Headers with names in lower case, for py-consul, which asks for ``X-Consul-Index``."""

    def __getitem__(self, name: str) -> str:
        return super().__getitem__(name.lower())
