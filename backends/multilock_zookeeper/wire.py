"""What is between kazoo and the wire: the sockets and threads it is given, its log, and a few bytes of the protocol.

kazoo keeps to itself which session timeout a server granted, and spends the session on a host that is dead, that says
nothing, or that turns us away; so it dials, reads and waits through this. It also asks the kernel some thirty times for
one request and its answer; here it asks six times.
"""

from __future__ import annotations

import logging
import math
import socket
import ssl
import struct
from collections.abc import Callable, Mapping
from typing import Any

import kazoo.exceptions as foreign
from kazoo.handlers.threading import SequentialThreadingHandler
from kazoo.protocol.connection import RWServerAvailable
from kazoo.protocol.serialization import Auth

from multilock import system
from multilock.backend import Worker, start_worker
from multilock.telling import Teller, logger

__all__ = [
    "Handler",
    "dial",
    "drop_what_is_not_understood",
    "hung_up",
    "log",
    "open_second_session",
    "remember_greetings",
]

READ_AHEAD = 65536  # bytes
LOG = "kazoo.client.multilock"  # heard like its parent, which kazoo takes by itself


def _mask(record: logging.LogRecord) -> bool:
    """kazoo logs every request, also the one with the password."""
    if isinstance(record.args, tuple):
        record.args = tuple(arg._replace(auth="***") if isinstance(arg, Auth) else arg for arg in record.args)
    return True


class _Log(Teller):
    """kazoo speaks on the threads that keep the session."""

    warn = Teller.warning


logging.getLogger(LOG).addFilter(_mask)
log = _Log(LOG)


class _Greeted:
    """A connection that remembers the session timeout with which the server greeted: kazoo keeps that to itself.

    It is negotiated anew in every handshake, and a server restarted with other limits, or another server, grants less
    to the same session. So kazoo reads through this, and it is known before the first request leaves.
    """

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._begun = b""
        self.granted: float | None = None  # seconds
        for name in ("fileno", "send"):
            setattr(self, name, getattr(connection, name))

    def recv(self, size: int) -> Any:
        piece = self._connection.recv(size)
        self._greet(piece)
        if self.granted is not None:
            self.recv = self._connection.recv  # type: ignore[method-assign]  # nothing is in between from here on
        return piece

    def _greet(self, piece: bytes) -> None:
        self._begun += piece
        if len(self._begun) >= 12:  # length, version of the protocol, milliseconds
            self.granted = struct.unpack_from("!i", self._begun, 8)[0] / 1000

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


class _Buffered(_Greeted):
    """… and takes from the kernel what is there: kazoo asks for each answer in two pieces. It looks at ``pending()``
    before it waits, as for TLS; its main loop does not, so `Handler.select` does."""

    def __init__(self, connection: Any) -> None:
        super().__init__(connection)
        self._ahead = b""
        self._at = 0

    def recv(self, size: int) -> Any:
        if self._at == len(self._ahead):
            self._ahead, self._at = self._connection.recv(READ_AHEAD), 0
            if self.granted is None:
                self._greet(self._ahead)
        piece = self._ahead[self._at : self._at + size]
        self._at += len(piece)
        return piece

    def pending(self) -> int:
        """Bytes that can be read although the kernel has none; those that TLS has decrypted as well."""
        within: int = self._connection.pending() if isinstance(self._connection, ssl.SSLSocket) else 0
        return len(self._ahead) - self._at + within


def remember_greetings(handler: Any) -> None:
    """Of the client that was handed over: from its next connection on."""
    if not isinstance(handler.create_connection, _Dial):  # several of ours may share it
        handler.create_connection = _Dial(handler.create_connection)


class _Dial:
    def __init__(self, theirs: Callable[..., Any]) -> None:
        self._theirs = theirs

    def __call__(self, *args: Any, **options: Any) -> _Greeted:
        return _Greeted(self._theirs(*args, **options))


def drop_what_is_not_understood(connection: Any) -> None:
    """Let an answer that kazoo does not understand end the connection, and not kazoo's thread and the session.

    A server that hands a session over to another one leaves out one answer and sends the next; a proxy may send one
    twice. kazoo raises RuntimeError then, its thread ends, and it forgets a session that lives on with all its nodes.
    What is still unanswered counts as unknown, as it does whenever the connection breaks.
    """
    understood = (
        foreign.ConnectionDropped,
        foreign.AuthFailedError,
        foreign.SessionExpiredError,
        connection.handler.timeout_exception,
        RWServerAvailable,
        OSError,
    )

    def dropping(step: Callable[..., Any]) -> Callable[..., Any]:
        def attempt(*args: Any) -> Any:
            try:
                return step(*args)
            except understood:
                raise
            except Exception as error:
                raise foreign.ConnectionDropped(f"{type(error).__name__}: {error}") from error

        return attempt

    for name in ("_connect", "_send_request", "_send_ping", "_read_socket"):
        setattr(connection, name, dropping(getattr(connection, name)))


class Handler(SequentialThreadingHandler):  # type: ignore[misc]
    """kazoo's threads and sockets: notes when and how well it dialed, and does not spend the session on a dead host.

    A server that lost its data, or got older data back, turns away who has seen more of it, for as long as he tells;
    kazoo tells until it hears that its session has expired, which it cannot hear so. We say it in the server's place
    once ``is_over`` agrees, which is told since when hosts turn us away.
    """

    def __init__(
        self,
        now: Callable[[], float],
        dial_within: float,
        greeting_within: float,
        is_over: Callable[[float], bool],
    ) -> None:
        super().__init__()
        self._now = now
        self._dial_within = dial_within
        self._greeting_within = greeting_within
        self._is_over = is_over
        self._greeting = False  # connected to a host that has not answered yet
        self._turned_away_at: float | None = None  # the first time since a host answered
        self.dialed_at = 0.0
        self.error: OSError | None = None
        self.loop: Worker | None = None

    def create_connection(self, address: Any, timeout: float | None = None, **options: Any) -> Any:
        self.dialed_at = self._now()
        if self._greeting and self._turned_away_at is None:
            self._turned_away_at = self.dialed_at
        if self._turned_away_at is not None and self._is_over(self._turned_away_at):
            self._greeted()
            raise foreign.SessionExpiredError("it cannot live any more, and no server takes it")
        try:
            connection = dial(address, min(timeout or self._dial_within, self._dial_within), options)
        except OSError as error:
            self.error = error
            raise
        self.error = None
        self._greeting = True
        return _Buffered(connection)

    def select(self, reading: Any, writing: Any, failing: Any, timeout: float) -> Any:
        """Nor does it spend the session on a host that accepts and says nothing: kazoo would, on the only one."""
        if len(reading) > 1:  # kazoo's main loop, which looks for requests too: the host has answered
            self._greeted()
        elif self._greeting:
            timeout = min(timeout, self._greeting_within)
        return _wait(reading, writing, timeout)

    def dispatch_callback(self, callback: Any) -> None:
        """A watch that fired is told on the connection thread: ours returns at once, and another thread's turn would
        cost more than all that it does."""
        try:
            callback.func(*callback.args)
        except Exception:
            logger.exception("a notice of ZooKeeper failed")

    def _greeted(self) -> None:
        self._greeting = False
        self._turned_away_at = None

    def start(self) -> None:
        """Start none of kazoo's two threads for callbacks and results: nothing of ours goes through them."""

    def stop(self) -> None: ...

    def spawn(self, loop: Any) -> Worker:
        """Run kazoo's connection. If it dies of a defect it begins again, with another session."""
        connection = loop.__self__

        def run() -> None:
            loop()
            if connection.client._stopped.is_set():
                connection.close()

        self.loop = start_worker(run, "multilock-zookeeper")
        return self.loop


def _wait(reading: Any, writing: Any, timeout: float) -> tuple[list[Any], list[Any], list[Any]]:
    """What ``select.select`` answers, for descriptors of any number. kazoo makes and closes an epoll for each."""
    buffered = [one for one in reading if isinstance(one, _Buffered) and one.pending()]
    poll = system.poll()
    for one in reading:
        poll.register(one, system.POLLIN)
    for one in writing:
        poll.register(one, system.POLLOUT)
    ready = dict(poll.poll(0 if buffered else math.ceil(max(timeout, 0.0) * 1000)))
    # What is broken or closed counts as ready, too: whoever reads it learns of it.
    return (
        [one for one in reading if one in buffered or one.fileno() in ready],
        [one for one in writing if one.fileno() in ready],
        [],
    )


def dial(address: Any, within: float, options: Mapping[str, Any]) -> Any:
    """A connection, as kazoo makes one; but what fails is closed."""
    connection = socket.create_connection(address, within)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if not options.get("use_ssl"):
        return connection
    context = ssl.create_default_context(cafile=options.get("ca"))
    context.check_hostname = bool(options.get("check_hostname"))
    if not options.get("verify_certs", True):
        context.verify_mode = ssl.CERT_NONE
    if options.get("certfile"):
        context.load_cert_chain(options["certfile"], options.get("keyfile"), options.get("keyfile_password"))
    return context.wrap_socket(connection, server_hostname=options.get("hostname"))


def hung_up(error: ssl.SSLError) -> bool:
    """In the middle of the greeting, as a load balancer does without a server behind it. That refuses nobody."""
    closed = isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError))
    return closed or "UNEXPECTED_EOF" in (error.reason or "")


def open_second_session(connection: Any, asked: float) -> float:
    """The session timeout in seconds that a server grants to who asks for this one; the session is closed at once.
    Raises OSError or struct.error."""
    connection.sendall(struct.pack("!iiqiqi16s?", 45, 0, 0, round(asked * 1000), 0, 16, b"", False))
    answer = _receive(connection)
    connection.sendall(struct.pack("!iii", 8, 1, -11))
    granted: int = struct.unpack_from("!i", answer, 4)[0]
    return granted / 1000


def _receive(connection: Any) -> bytes:
    length: int = struct.unpack("!i", _exactly(connection, 4))[0]
    return _exactly(connection, length)


def _exactly(connection: Any, length: int) -> bytes:
    data = b""
    while len(data) < length:
        piece = connection.recv(length - len(data))
        if not piece:
            raise ConnectionError("the server closed the connection")
        data += piece
    return data
