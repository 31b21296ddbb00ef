"""The sockets, threads and log of kazoo: how it connects, reads and waits.

kazoo does not show which session timeout a server granted. It may also spend the whole session timeout on one host that
is dead, sends nothing, or turns us away. So kazoo connects, reads and waits through this module, which also reduces the
system calls of a request from thirty to six.
"""

from __future__ import annotations

import logging
import math
import socket
import ssl
from collections.abc import Callable, Mapping
from typing import Any

import kazoo.exceptions as foreign
from kazoo.handlers.threading import SequentialThreadingHandler
from kazoo.protocol.connection import RWServerAvailable
from kazoo.protocol.serialization import Auth

from multilock import system
from multilock.backend import Worker, start_worker
from multilock.log_thread import QueuedLogger, logger
from multilock_zookeeper.wire import granted_by

__all__ = [
    "Handler",
    "dial",
    "drop_what_is_not_understood",
    "hung_up",
    "log",
    "remember_greetings",
]

READ_AHEAD = 65536  # bytes
LOG = "kazoo.client.multilock"  # a child of kazoo's own logger, so that it has the same handlers


def _mask(record: logging.LogRecord) -> bool:
    """Mask the password: kazoo logs every request, including the one that logs in."""
    if isinstance(record.args, tuple):
        record.args = tuple(arg._replace(auth="***") if isinstance(arg, Auth) else arg for arg in record.args)
    return True


class _Log(QueuedLogger):
    """A log for kazoo. kazoo's threads keep the session, so a slow log handler must not delay them."""

    warn = QueuedLogger.warning


logging.getLogger(LOG).addFilter(_mask)
log = _Log(LOG)


class _Greeted:
    """A connection that remembers the session timeout in the server's handshake reply, which kazoo does not show.

    The timeout is negotiated in every handshake. Another server may grant a shorter timeout to the same session.
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
            self.recv = self._connection.recv  # type: ignore[method-assign]  # from here on kazoo reads directly
        return piece

    def _greet(self, piece: bytes) -> None:
        self._begun += piece
        self.granted = granted_by(self._begun)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


class _Buffered(_Greeted):
    """A `_Greeted` connection that reads ahead, because kazoo reads each reply in two pieces.

    Before kazoo waits for a reply, it checks ``pending()``, as for TLS. kazoo's main loop does not check it, so
    `Handler.select` does.
    """

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
        """Return how many bytes can be read without a system call, including those that TLS has decrypted."""
        within: int = self._connection.pending() if isinstance(self._connection, ssl.SSLSocket) else 0
        return len(self._ahead) - self._at + within


def remember_greetings(handler: Any) -> None:
    """Make the program's own kazoo client record the server's handshake reply, from its next connection on."""
    if not isinstance(handler.create_connection, _Dial):  # another client of this process may have done this already
        handler.create_connection = _Dial(handler.create_connection)


class _Dial:
    """A replacement for kazoo's ``create_connection`` that makes `_Greeted` connections."""

    def __init__(self, theirs: Callable[..., Any]) -> None:
        self._theirs = theirs

    def __call__(self, *args: Any, **options: Any) -> _Greeted:
        return _Greeted(self._theirs(*args, **options))


def drop_what_is_not_understood(connection: Any) -> None:
    """Let a reply that kazoo does not understand end the connection, not kazoo's thread and the session.

    A server that hands a session over to another server may leave out a reply, and a proxy may send one twice. Then
    kazoo would raise RuntimeError, end its thread, and forget a session that still lives.
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
    """kazoo's threads and sockets, with a limit for the time that kazoo spends on a dead host.

    A server with older data turns away any client that has seen newer data, and cannot report that a session has
    expired. kazoo would try forever. So this handler reports the expiry, once ``is_over`` returns True. The argument of
    ``is_over`` is the time at which hosts began to turn us away.
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
        self._greeting = False  # whether a host has accepted the connection but not replied yet
        self._turned_away_at: float | None = None  # when a host first turned us away after the last reply
        self.dialed_at = 0.0
        self.error: OSError | None = None
        self.loop: Worker | None = None

    def create_connection(self, address: Any, timeout: float | None = None, **options: Any) -> Any:
        """Connect for kazoo, or report that the session has expired."""
        self.dialed_at = self._now()
        if self._greeting and self._turned_away_at is None:
            self._turned_away_at = self.dialed_at
        if self._turned_away_at is not None and self._is_over(self._turned_away_at):
            self._greeted()
            raise foreign.SessionExpiredError("no server accepts the session, and its timeout is over")
        try:
            connection = dial(address, min(timeout or self._dial_within, self._dial_within), options)
        except OSError as error:
            self.error = error
            raise
        self.error = None
        self._greeting = True
        return _Buffered(connection)

    def select(self, reading: Any, writing: Any, failing: Any, timeout: float) -> Any:
        """Wait for sockets, but not for long on a host that accepts a connection and sends nothing.

        kazoo would spend the whole session timeout on this host if there is no other.
        """
        if len(reading) > 1:  # this is kazoo's main loop, which begins after the host's reply
            self._greeted()
        elif self._greeting:
            timeout = min(timeout, self._greeting_within)
        return _wait(reading, writing, timeout)

    def dispatch_callback(self, callback: Any) -> None:
        """Call a watch on the connection thread. Our watches return at once, so passing them to another thread would
        take longer."""
        try:
            callback.func(*callback.args)
        except Exception:
            logger.exception("a notice of ZooKeeper failed")

    def _greeted(self) -> None:
        self._greeting = False
        self._turned_away_at = None

    def start(self) -> None:
        """Do not start kazoo's two threads for callbacks and results: multilock uses neither."""

    def stop(self) -> None: ...

    def spawn(self, loop: Any) -> Worker:
        """Run kazoo's connection thread. If a bug ends the thread, it is started again, with another session."""
        connection = loop.__self__

        def run() -> None:
            loop()
            if connection.client._stopped.is_set():
                connection.close()

        self.loop = start_worker(run, "multilock-zookeeper")
        return self.loop


def _wait(reading: Any, writing: Any, timeout: float) -> tuple[list[Any], list[Any], list[Any]]:
    """Do what ``select.select`` does, for descriptors of any number."""
    buffered = [one for one in reading if isinstance(one, _Buffered) and one.pending()]
    poll = system.poll()
    for one in reading:
        poll.register(one, system.POLLIN)
    for one in writing:
        poll.register(one, system.POLLOUT)
    ready = dict(poll.poll(0 if buffered else math.ceil(max(timeout, 0.0) * 1000)))
    # a broken or closed connection counts as ready, so that its reader gets the error
    return (
        [one for one in reading if one in buffered or one.fileno() in ready],
        [one for one in writing if one.fileno() in ready],
        [],
    )


def dial(address: Any, within: float, options: Mapping[str, Any]) -> Any:
    """Connect as kazoo does. If a step fails, no connection stays open."""
    tls = _tls(options) if options.get("use_ssl") else None
    connection = socket.create_connection(address, within)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return tls.wrap_socket(connection, server_hostname=options.get("hostname")) if tls else connection
    except BaseException:
        connection.close()
        raise


def _tls(options: Mapping[str, Any]) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=options.get("ca"))
    context.check_hostname = bool(options.get("check_hostname"))
    if not options.get("verify_certs", True):
        context.verify_mode = ssl.CERT_NONE
    if options.get("certfile"):
        context.load_cert_chain(options["certfile"], options.get("keyfile"), options.get("keyfile_password"))
    return context


def hung_up(error: ssl.SSLError) -> bool:
    """Return whether the peer hung up during the TLS handshake. A load balancer without a server hangs up as well, so
    this does not mean that TLS was refused."""
    closed = isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError))
    return closed or "UNEXPECTED_EOF" in (error.reason or "")
