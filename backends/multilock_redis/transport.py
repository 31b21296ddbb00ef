"""Requests to one Redis server: blocking, bounded in time, never retried. Errors of sockets and of redis-py become
errors of multilock.

redis-py makes the connections: it handles addresses, TLS, credentials, and the settings of the program's own client.
Then this module reads and writes on the socket itself, because replies are small, and redis-py would add a tenth to the
time of an acquire and a release.
"""

from __future__ import annotations

import os
import socket
import ssl
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from redis.backoff import NoBackoff
from redis.retry import Retry

from multilock import BackendUnavailable, MultilockError, system
from multilock.dialling import Dialling, OpenWires, unforked
from multilock_redis.connect_errors import broken_hint, not_connected
from multilock_redis.wire import IS_REPLICA, Incomplete, Unclear, parse

__all__ = ["Answer", "Endpoint", "Wire"]

Answer = tuple[Any, float]
"""The server's reply (or the exception made of it), and when the request was sent."""

SHORT = 0.05  # seconds; if a request with a shorter timeout gets no reply, other connections are not given up
BATCH = 500  # requests of a pipeline in one write
CHUNK = 65536  # bytes in one read

CONNECTING_AT_ONCE = 32  # threads of one client that may connect at once; a DNS look-up may hang forever

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
# If redis-py retried an acquire, the retry would find the lock taken by the first try. Replies are read as bytes.
_WITHOUT_RETRIES = {
    "retry": Retry(NoBackoff(), 0),
    "retry_on_timeout": False,
    "retry_on_error": [],
    "health_check_interval": 0,
    "decode_responses": False,
    "protocol": 2,
}
# Without a library name, redis-py from 7.2 on searches all installed packages for its version at each connection. That
# takes several times as long as connecting. The name is never sent: see `Endpoint._open_wire`.
_NAMED: dict[str, object] = {}
with suppress(ImportError):
    from redis.driver_info import DriverInfo

    _NAMED["driver_info"] = DriverInfo("multilock", "-")


class Open(OpenWires["Wire"]):
    """The open connections, and the servers that did not reply."""

    def __init__(self) -> None:
        super().__init__()
        #: Server -> when the last request without a reply was sent. A firewall that drops one connection has probably
        #: dropped all that were idle as long. So a connection that was idle since then is not used again.
        self.silent: dict[str, float] = {}


class Wire:
    """One connection, used by one thread at a time.

    A connection closes itself when it breaks, or when a call is interrupted: the next request on it could otherwise
    read the reply to this one. A connection that an event loop watches (`never_block`) only sets ``alive`` to False.
    Its owner stops watching the descriptor and then closes it, because a new connection may at once get the number of a
    closed descriptor.
    """

    __slots__ = (
        "__weakref__",
        "_at",
        "_buffer",
        "_connection",
        "_ended",
        "_heard",
        "_now",
        "_open",
        "_poll",
        "_sock",
        "_timeout",
        "_until",
        "_watched",
        "alive",
        "used",
        "where",
    )

    def __init__(self, connection: Any, where: str, now: Callable[[], float], among: Open) -> None:
        """Wrap a connection of redis-py, which stays in ``among`` until it is closed."""
        self._connection = connection
        self._open = among
        self.where = where  #: the server's name in messages; begins with the URL, without secrets
        self._now = now
        self._sock: socket.socket = connection._sock  # redis-py has no public access to the socket
        self._poll = system.poll()  # select() cannot watch a descriptor above 1023
        self._poll.register(self._sock, system.POLLIN)
        self._timeout = 0.0
        self._until = 0.0  # the deadline of the present reply
        self._buffer = b""  # the bytes that were read
        self._at = 0  # number of parsed bytes of the buffer
        self._heard = False  # whether the server has sent anything over this connection
        self._ended = False  # set by `interrupt`
        self._watched = False
        self.alive = True
        self.used = now()  # when the last request was sent; before that, when the connection was made
        # When this connection is closed, unsent bytes are dropped, and the server is notified at once.
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        among.add(self)

    def call(self, request: bytes, within: float) -> Any:
        """Send one request and return its reply. Sets ``used`` to the time at which the request was sent.

        Raises the exceptions that `Backend` allows, or `ScriptMissing`.
        """
        sent = False
        try:
            if not 0.8 * within <= self._timeout <= within:
                self._limit(within)
            self.used = self._now()
            self._until = self.used + within
            # If this fails, the request was not sent completely, so the server cannot execute it.
            self._sock.sendall(request)
            sent = True
            answer = self._read()
        except (OSError, ValueError) as error:
            raise self._broken(error, sent) from error
        except BaseException:
            self.close()
            raise
        if isinstance(answer, Exception):
            self._keep_after(answer)
            raise answer
        return answer

    def begin(self, request: bytes) -> bool:
        """Send one request on a non-blocking connection. `finish` reads the reply.

        Returns False if the request was not sent completely. The caller must then close the connection.
        """
        try:
            if not self.stale():
                self.used = self._now()
                if self._sock.send(request) == len(request):
                    return True
        except OSError:
            pass
        self._end()
        return False

    def finish(self) -> Any:
        """Return the reply. Raises BlockingIOError as long as it is incomplete."""
        try:
            answer = self._read()
        except (BlockingIOError, ssl.SSLWantReadError):
            raise BlockingIOError from None
        except (OSError, ValueError) as error:
            raise self._broken(error, sent=True) from error
        if isinstance(answer, Exception):
            self._keep_after(answer)
            raise answer
        return answer

    def put(self, request: bytes, patience: float) -> bool:
        """Send one request, as `begin` does. If the connection does not accept the whole request at once, wait up to
        ``patience`` seconds."""
        until, rest = 0.0, memoryview(request)
        while True:
            try:
                rest = rest[self._sock.send(rest) :]
            except (BlockingIOError, ssl.SSLWantWriteError):
                pass
            except OSError:
                break
            if not rest:
                return True
            until = until or self._now() + patience
            poll, left = system.poll(), until - self._now()
            poll.register(self._sock, system.POLLOUT)
            if left <= 0 or not poll.poll(left * 1000):
                break
        self._end()
        return False

    def never_block(self, *, tls: bool = False) -> bool:
        """Make the connection non-blocking. After that only `begin`, `put` and `finish` may be used.

        Returns False for a TLS connection, unless ``tls`` is True: an event loop must not use it, because it may have
        to write in order to read. Raises BackendUnavailable if `drop` was called before.
        """
        if isinstance(self._sock, ssl.SSLSocket) and not tls:
            return False
        try:
            self._sock.setblocking(False)
        except OSError as error:
            raise self._broken(error, sent=False) from error
        self._watched = True
        return True

    def fileno(self) -> int:
        return self._sock.fileno()

    def exchange(self, requests: Sequence[bytes], within: float, *, pushes: bool = False) -> list[Answer]:
        """Send all requests, then read all replies. Instead of an error reply, the result has the exception that `call`
        would raise.

        If more replies arrive than requests were sent, this raises, because it is unknown which reply belongs to which
        request. If ``pushes`` is True, further messages may follow the replies.
        """
        self._until = deadline = self._now() + within
        sent_at: list[float] = []
        answers: list[Answer] = []
        try:
            self._limit(within)
            for start in range(0, len(requests), BATCH):
                batch = requests[start : start + BATCH]
                self.used = self._now()
                self._sock.sendall(b"".join(batch))
                sent_at += [self.used] * len(batch)
            for at in sent_at:
                if self._at == len(self._buffer):
                    self._limit(deadline - self._now())
                answers.append((self._read(), at))
            if self._at < len(self._buffer) and not pushes:
                raise ValueError("it sent more replies than there were requests")
        except (OSError, ValueError) as error:
            raise self._broken(error, sent=True) from error
        except BaseException:
            self.close()
            raise
        for answer, _ in answers:
            self._keep_after(answer)
        return answers

    def send(self, request: bytes, within: float) -> None:
        """Send a request on a connection on which `receive` reads the replies."""
        try:
            self._limit(within)
            self._sock.sendall(request)
        except OSError as error:
            raise self._broken(error, sent=False) from error

    def receive(self, within: float) -> Any:
        """Return the next message, or None if none arrives within ``within`` seconds, which may be 0."""
        self._until = self._now() + within
        try:
            if within:
                self._limit(within)
            else:
                self._timeout = 0.0
                self._sock.settimeout(0.0)
            return self._read()
        except (TimeoutError, BlockingIOError, ssl.SSLWantReadError):
            return None
        except (OSError, ValueError) as error:
            raise self._broken(error, sent=True) from error

    @property
    def reached(self) -> tuple[str, int] | None:
        """The numeric address of the server, or None if the connection is closed."""
        with suppress(OSError):
            host, port, *_ = self._sock.getpeername()
            return host, port
        return None

    def stale(self) -> bool:
        """Return whether no further request may be sent on this connection.

        Returns True if bytes arrived without a request: the server has closed the connection, or has sent a reply
        twice, which the next request would get. Also returns True if the server gave no reply on another connection
        since this one was last used.
        """
        if self._at < len(self._buffer) or self.used < self._open.silent.get(self.where, 0.0):
            return True
        return bool(self._poll.poll(0))

    @property
    def unread(self) -> bool:
        """Whether the buffer has bytes that were not parsed yet."""
        return self._at < len(self._buffer)

    def interrupt(self) -> None:
        """Make every read fail, even a read that waits now, and a read of bytes that have already arrived. Any thread
        may call this."""
        self._ended = True
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    @property
    def tls(self) -> ssl.SSLContext | None:
        """The TLS settings of this connection, or None without TLS."""
        return self._sock.context if isinstance(self._sock, ssl.SSLSocket) else None

    def close(self) -> None:
        self.alive = False
        self._open.discard(self)
        self._connection.disconnect()

    def drop(self) -> None:
        """Close the descriptor, and nothing else, in a forked child.

        The parent continues using the connection. If the parent is killed while the child still has the descriptor
        open, the server does not notice it.
        """
        self.alive = False
        with suppress(OSError):
            os.close(self._sock.detach())

    def _end(self) -> None:
        """Stop using this connection."""
        self.alive = False
        if not self._watched:
            self.close()

    def _read(self) -> Any:
        if self._at == len(self._buffer):
            data = self._sock.recv(CHUNK)
            self._heard = self._heard or bool(data)
            if data[:1] == b":" and data.find(b"\r\n") == len(data) - 2 > 0 and not self._ended:
                return int(data[1:-2])  # the usual reply to an acquire or a release
            self._took(data)
        while True:
            if self._at < len(self._buffer):
                try:
                    answer, self._at = parse(self._buffer, self._at, self.where)
                    return answer
                except Incomplete:
                    self._await_rest()
            self._took(self._sock.recv(CHUNK))

    def _await_rest(self) -> None:
        """Limit the time for a reply that has begun, so that a reply in many pieces does not exceed the timeout."""
        if not self._watched:
            if (left := self._until - self._now()) <= 0:
                raise TimeoutError("its reply came in pieces, and was not complete in time")
            self._limit(left)

    def _took(self, more: bytes) -> None:
        if self._ended:
            raise ConnectionAbortedError("another server has taken over, or the client was closed")
        if not more:
            raise ConnectionResetError("the server closed the connection")
        self._buffer = self._buffer[self._at :] + more
        self._at = 0

    def _limit(self, within: float) -> None:
        if not 0.8 * within <= self._timeout <= within:
            self._timeout = max(within, 0.001)
            self._sock.settimeout(self._timeout)

    def _keep_after(self, answer: object) -> None:
        if not isinstance(answer, (BackendUnavailable, Unclear)):
            return
        self._end()  # a new connection may reach another server
        if IS_REPLICA in str(answer):
            for wire in self._open:
                if wire.where == self.where:
                    wire.interrupt()

    def _broken(self, error: Exception, sent: bool) -> BackendUnavailable:
        if sent and isinstance(error, TimeoutError) and self._until - self.used >= SHORT:
            self._open.silent[self.where] = max(self.used, self._open.silent.get(self.where, 0.0))
        self._end()
        what = "did not answer" if sent else "cannot be reached"
        why = f"{self.where} {what}: {error}{broken_hint(error, self.where, self._buffer[self._at :], self._heard)}"
        return BackendUnavailable(why, unknown=sent, backend="redis")


class Endpoint:
    """The address of a server, and how to connect to it. ``settings`` contain secrets and are never shown."""

    def __init__(self, name: str, connection_class: Callable[..., Any], settings: Mapping[str, Any]) -> None:
        self.name = name
        self._class = connection_class
        self._settings = settings
        self._open = Open()
        self._dialling = Dialling[Wire]("multilock-redis-connect", CONNECTING_AT_ONCE)
        #: Returns whether another server has replaced this one. Called after each new connection, so that a connection
        #: made during the change is ended as well.
        self.is_left: Callable[[], bool] = _never

    def close(self) -> None:
        """Record that new connections are needed only to finish work that is under way."""
        self._dialling.close()

    def interrupt(self) -> None:
        """End all connections now, including those in use. Any thread may call this."""
        for wire in self._open:
            wire.interrupt()

    def forget(self) -> None:
        """Close the descriptors that a fork inherited from the parent, before a client begins.

        Without a fork, another thread may close one of these connections at the same time, which does no harm.
        """
        inherited, self._open = self._open, Open()
        for wire in inherited:
            wire.drop()
        self._dialling.forget()

    def __repr__(self) -> str:
        return f"<Endpoint {self.name}>"

    def connect(self, within: float, now: Callable[[], float]) -> Wire:
        """Return a new connection, logged in and with its database selected, within ``within`` seconds.

        A separate thread connects, because neither a DNS look-up nor a handshake of several round trips has a time
        limit. A connection that is made too late is returned by the next call.
        """
        within = max(within, 0.001)  # the caller's time may already be over
        outcome = self._dialling.outcome(lambda: self._dial(within, now), within, now)
        if isinstance(outcome, Wire):
            return outcome
        if isinstance(outcome, MultilockError):
            raise outcome
        raise not_connected(outcome, self.name) from outcome

    def _dial(self, within: float, now: Callable[[], float]) -> Wire:
        """Connect. A separate thread runs this. Raises the exception of redis-py, or a `MultilockError` for the caller
        of `connect`."""
        return self._open_wire(self._class, self._settings, self.name, within, now)

    def _open_wire(
        self,
        kind: Callable[..., Any],
        settings: Mapping[str, Any],
        where: str,
        within: float,
        now: Callable[[], float],
    ) -> Wire:
        def make() -> Wire:
            limits = {"socket_timeout": within, "socket_connect_timeout": within}
            connection = kind(**{**settings, **_WITHOUT_RETRIES, **_NAMED, **limits})
            # Otherwise redis-py spends two round trips to send its library's name.
            connection.driver_info = connection.lib_name = connection.lib_version = None
            connection.connect()
            try:
                wire = Wire(connection, where, now, self._open)
            except BaseException:
                connection.disconnect()
                raise
            if self.is_left():
                wire.close()
                raise ConnectionError("another server has taken over")
            return wire

        return unforked(make, now() + within, now)


def _never() -> bool:
    return False
