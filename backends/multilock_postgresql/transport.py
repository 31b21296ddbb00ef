"""Requests to a PostgreSQL server: blocking, bounded in time, never retried. Errors of libpq become errors of
multilock.

Requests go through libpq (psycopg's ``pq`` module). Unlike with psycopg's cursors, a request has a time limit, an event
loop can send it without a thread, and it takes less time.

A wire is one connection. A wire is *at rest* while it is alive and idle, without an open transaction or a missing
reply.
"""

from __future__ import annotations

import itertools
import math
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import psycopg
from psycopg import pq
from psycopg.conninfo import make_conninfo

from multilock import BackendRejected, BackendUnavailable, MultilockError, system
from multilock.backend import start_worker
from multilock.dialling import Dialling, OpenWires, unforked
from multilock.timing import REQUEST_TIMEOUT_MAX
from multilock_postgresql.wire import IS_REPLICA, NotReadCommitted, Row, failure, refused_login

__all__ = ["AT_REST", "Answer", "ConnectionPool", "PgEndpoint", "PgWire", "patience"]

Answer = tuple[list[Row], float]
"""The rows of a reply, and when the request was sent."""

DIALLING_AT_ONCE = 16  # threads of one client that may connect at once; a DNS look-up may hang forever
# Share of a request's time for which the server may wait for a locked row. The remaining time is for the reply that
# nothing was executed.
WAIT_SHARE = 0.8
AT_REST = 60.0  # seconds after its last use for which an idle connection is kept
TEND_EVERY = 10.0  # seconds between two checks for connections that were idle for AT_REST
OWN_PID = b"SELECT pg_backend_pid()"
# A statement that waits for a table continues to wait after its client has gone, and each repetition takes one more
# session. The functions set a shorter limit for each request, but a new session needs the table before that.
LIMIT_LOCKS = b", CASE pg_backend_pid() WHEN %%d THEN pg_catalog.set_config('lock_timeout', '%d', false) END" % (
    REQUEST_TIMEOUT_MAX * 1000
)
PING = b"SELECT 1"
BEGIN, COMMIT = b"BEGIN ISOLATION LEVEL READ COMMITTED", b"COMMIT"
# Functions of the server whose warnings do not concern the commit: transaction ids or multixact ids run out, or the
# queue of notifications fills up.
HARMLESS = (b"GetNewTransactionId", b"GetNewMultiXactId", b"asyncQueueFillWarning")
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
_DONE = (pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK)
_PIPELINE = (pq.ExecStatus.PIPELINE_SYNC, pq.ExecStatus.PIPELINE_ABORTED)


class PgWire:
    """One connection, used by one thread at a time.

    A connection closes itself when it breaks, or when a call is interrupted: the next request on it could otherwise
    read the reply to this one. A connection that an event loop watches (`watched`) only sets ``alive`` to False, and
    its owner closes it.
    """

    def __init__(self, connection: pq.abc.PGconn, endpoint: PgEndpoint, where: str, now: Callable[[], float]) -> None:
        self._pq = connection
        self._endpoint = endpoint
        self.where = where  #: the server's name in messages
        self._now = now
        # libpq closes its descriptor as soon as the connection is broken. But an event loop must stop watching a
        # descriptor before it is closed, so the loop watches this duplicate.
        self._sock = socket.socket(fileno=os.dup(connection.socket))
        self._poll = system.poll()
        self._poll.register(self._sock, system.POLLIN)
        self._names: dict[bytes, bytes] = {}  # SQL -> the name under which it was prepared
        self._preparing: tuple[bytes, bytes] | None = None  # the SQL and the name that the present request prepares
        # No name is used twice, because after an interrupt it is unknown whether the server knows the name.
        self._numbers = itertools.count()
        self._results: list[pq.abc.PGresult] = []
        self._warnings: list[str] = []  # warnings that came with the reply
        self.pooled = False  #: whether a pooler may send requests to different server processes
        self.watched = False
        self.alive = True
        self.used = now()  # when the last request was sent; before that, when the connection was made
        connection.nonblocking = 1
        connection.notice_handler = _into(self._warnings)

    def fileno(self) -> int:
        return self._sock.fileno()

    # ---- one request

    def call(self, sql: bytes, arguments: Sequence[bytes | None], within: float) -> list[Row]:
        """Send one request and return the rows of its reply. Sets ``used`` to the time at which the request was sent.

        Raises the exceptions that `Backend` allows, `NotThere` or `NotReadCommitted`.
        """
        until = self._now() + within
        sent = False
        try:
            self._send(sql, arguments)
            self._flush(until)
            sent = True
            self._await_reply(until)
        except (OSError, psycopg.Error) as error:
            raise self._broken(error, sent) from error
        except BaseException:
            self.close()
            raise
        return self._rows()

    def begin(self, sql: bytes, arguments: Sequence[bytes | None]) -> bool:
        """Send one request without blocking. `finish` reads the reply.

        Returns False if the request was not sent completely. The caller must then close the connection, because libpq
        would send the remaining bytes later.
        """
        try:
            if self.alive and not self.stale() and self.used >= self._endpoint.silent_since:
                self._send(sql, arguments)
                if not self._pq.flush():
                    return True
        except (OSError, psycopg.Error):
            pass
        self.alive = False
        return False

    def finish(self) -> list[Row]:
        """Return the rows of the reply. Raises BlockingIOError as long as it is incomplete."""
        try:
            self._pq.consume_input()
            if not self._complete():
                raise BlockingIOError
        except BlockingIOError:
            raise
        except (OSError, psycopg.Error) as error:
            raise self._broken(error, sent=True) from error
        return self._rows()

    def _send(self, sql: bytes, arguments: Sequence[bytes | None]) -> None:
        """Give the request to libpq. Sets ``used`` before the first byte can leave."""
        self._begin_request()
        if self._endpoint.begins_with_level:
            self._pq.enter_pipeline_mode()
            for each, given in ((BEGIN, ()), (sql, arguments), (COMMIT, ())):
                self._pq.send_query_params(each, given)
            self._pq.pipeline_sync()
        elif self.pooled:  # the next request may go to a process that has not prepared it
            self._pq.send_query_params(sql, arguments)
        elif (name := self._names.get(sql)) is not None:
            self._pq.send_query_prepared(name, arguments)
        else:
            name = b"multilock_%d" % next(self._numbers)
            self._preparing = sql, name
            self._pq.enter_pipeline_mode()
            self._pq.send_prepare(name, sql)
            self._pq.send_query_prepared(name, arguments)
            self._pq.pipeline_sync()

    def _begin_request(self) -> None:
        self.used = self._now()
        self._results, self._preparing = [], None
        self._warnings.clear()

    def _flush(self, until: float) -> None:
        poll = system.poll()
        while self._pq.flush():
            poll.register(self._sock, system.POLLIN | system.POLLOUT)
            self._wait(poll, until)
            self._pq.consume_input()  # the server may wait until it can write a reply, before it reads our request

    def _await_reply(self, until: float) -> None:
        while not self._complete():
            self._wait(self._poll, until)
            self._pq.consume_input()

    def _wait(self, poll: Any, until: float) -> None:
        left = until - self._now()
        if left <= 0 or not poll.poll(left * 1000):
            raise TimeoutError("no reply in time")

    def _complete(self) -> bool:
        """Take the results that have arrived. Returns True once the server has finished the request."""
        results = self._results
        while not self._pq.is_busy():
            result = self._pq.get_result()
            if result is not None:
                results.append(result)
                if result.status != pq.ExecStatus.PIPELINE_SYNC:
                    continue
            elif self._pq.pipeline_status:
                continue  # the end of one of several commands
            if self._pq.pipeline_status:
                self._pq.exit_pipeline_mode()
            return True
        return False

    def _rows(self) -> list[Row]:
        results = [result for result in self._results if result.status not in _PIPELINE]
        if not results:
            raise self._broken(ConnectionResetError("the server closed the connection"), sent=True)
        if self._preparing is not None and results[0].status in _DONE:
            sql, name = self._preparing
            self._names[sql] = name
        if error := next((result for result in results if result.status not in _DONE), None):
            raise self._failed(failure(error, self.where))
        # A warning means that PostgreSQL stopped waiting for the synchronous standby. So the request is executed on
        # this server, but perhaps not on the standby.
        if self._warnings:
            told = f"{self.where}: {self._warnings[0]}"
            raise BackendUnavailable(told, unknown=True, backend="postgresql")
        result = next((result for result in results if result.status == pq.ExecStatus.TUPLES_OK), results[-1])
        columns = range(result.nfields)
        return [tuple(result.get_value(row, column) for column in columns) for row in range(result.ntuples)]

    def _failed(self, error: Exception) -> Exception:
        if self._pq.transaction_status != pq.TransactionStatus.IDLE or IS_REPLICA in str(error):
            self._end()  # the connection is inside a failed transaction, or leads to the wrong server
        if isinstance(error, NotReadCommitted):
            self._endpoint.begins_with_level = True
        return error

    def _broken(self, error: Exception, sent: bool) -> BackendUnavailable:
        self._end()
        what = "did not answer" if sent else "cannot be reached"
        why = f"{self.where} {what}: {' '.join(str(error).split())}"
        return BackendUnavailable(why, unknown=sent, backend="postgresql")

    # ---- several statements, and notifications

    def script(self, sql: bytes, within: float) -> list[Row]:
        """Execute several statements in one message. Returns the rows of the last one that has any."""
        until = self._now() + within
        try:
            self._begin_request()
            self._pq.send_query(sql)
            self._flush(until)
            self._await_reply(until)
        except (OSError, psycopg.Error) as error:
            raise self._broken(error, sent=True) from error
        except BaseException:
            self.close()
            raise
        self._results.reverse()
        return self._rows()

    def ping(self) -> None:
        """Send a request whose reply `receive` reads. Notifications may arrive before the reply. `receive` returns
        them.

        The request is not sent in a pipeline, which has several results for one request. libpq shows no notification
        that comes after an unread result.
        """
        try:
            self._begin_request()
            self._pq.send_query(PING)
            if self._pq.flush():
                raise BlockingIOError("the connection accepts no more requests")
        except (OSError, psycopg.Error) as error:
            raise self._broken(error, sent=False) from error

    def receive(self, within: float) -> list[tuple[str, str]] | None:
        """Wait for data, and return the notifications in it: channel and payload. Returns None if nothing came."""
        try:
            if not self._poll.poll(max(0.0, within) * 1000):
                return None
            self._pq.consume_input()
            while not self._pq.is_busy() and self._pq.get_result() is not None:
                pass  # the reply to `ping`
            told = []
            while (notify := self._pq.notifies()) is not None:
                told.append((notify.relname.decode(errors="replace"), notify.extra.decode(errors="replace")))
        except (OSError, psycopg.Error) as error:
            raise self._broken(error, sent=True) from error
        return told

    # ---- the end of the connection

    def at_rest(self) -> bool:
        """Return whether the connection is usable, without an open transaction or a missing reply."""
        return self.alive and self._pq.transaction_status == pq.TransactionStatus.IDLE

    def stale(self) -> bool:
        """Return whether the connection has input without a request: the server has closed it, or another program
        answers. No request may then be sent."""
        return bool(self._poll.poll(0))

    def note_silence(self) -> None:
        """Record that the request has no reply. Another server may have taken over, so the event loop must not use
        connections that were idle since before this request: each would cost one more request its time."""
        self._endpoint.silent_since = max(self._endpoint.silent_since, self.used)

    def interrupt(self) -> None:
        """Make every wait for a reply fail. Any thread may call this."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection. If a reply is missing, drop the unsent bytes."""
        self.alive = False
        self._endpoint.wires.discard(self)
        with suppress(OSError):
            if self._pq.transaction_status != pq.TransactionStatus.IDLE:
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
                self._sock.shutdown(socket.SHUT_RDWR)
        self._pq.finish()
        self._sock.close()

    def drop(self) -> None:
        """Close the connection's socket, and nothing else, in a forked child.

        The parent continues using the connection. If the parent is killed while the child still has the socket open,
        the server does not notice it.

        libpq keeps the number of its descriptor, and would close it once more. So this number gets a socket without a
        connection, and cannot become that of a file of the program.
        """
        self.alive = False
        with suppress(OSError):
            os.close(self._sock.detach())
        with suppress(OSError, psycopg.Error), socket.socket(socket.AF_UNIX) as unconnected:
            os.dup2(unconnected.fileno(), self._pq.socket, inheritable=False)

    def _end(self) -> None:
        self.alive = False
        if not self.watched:
            self.close()


def _into(warnings: list[str]) -> Callable[[pq.abc.PGresult], None]:
    """Return a handler that records the warnings that may concern the commit. The handler does not refer to the
    connection, because a reference cycle would keep a dropped connection open."""

    def note(result: pq.abc.PGresult) -> None:
        source = result.error_field(pq.DiagnosticField.SOURCE_FUNCTION)
        if result.error_field(pq.DiagnosticField.SQLSTATE) == b"01000" and source not in HARMLESS:
            told = result.error_field(pq.DiagnosticField.MESSAGE_PRIMARY) or b""
            warnings.append(told.decode(errors="replace"))

    return note


class PgEndpoint:
    """The addresses of one database, and how to connect to it. ``settings`` contain secrets and are never shown."""

    def __init__(self, name: str, hosts: Sequence[tuple[str, str]], settings: Mapping[str, str]) -> None:
        self.name = name  #: the URL without secrets
        self._hosts = list(hosts)  # pairs of host and port; "" is libpq's default
        self._settings = settings
        self.wires = OpenWires[PgWire]()
        #: Whether each request must set the isolation level in a transaction, because this role's default is another
        #: level.
        self.begins_with_level = False
        #: When the newest request of an event loop that got no reply was sent.
        self.silent_since = -math.inf
        self._dialling = Dialling[PgWire]("multilock-postgresql-connect", DIALLING_AT_ONCE)
        self._connect_start = pq.PGconn.connect_start  # a simulation replaces this function

    def __repr__(self) -> str:
        return f"<PgEndpoint {self.name}>"

    def at(self, host: str, port: str) -> PgEndpoint:
        """Return the same database at another address."""
        name = f"postgresql://{f'[{host}]' if ':' in host else host}:{port}/{self._settings.get('dbname', '')}"
        return PgEndpoint(name, [(host, port)], self._settings)

    def forget(self) -> None:
        """Drop the parent's connections in a forked child, which does not use them."""
        inherited, self.wires = self.wires, OpenWires[PgWire]()
        for wire in inherited:
            wire.drop()
        self._dialling.forget()

    def close(self) -> None:
        """Close connections that are made too late. `connect` still works, to finish work that is under way."""
        self._dialling.close()

    def connect(self, within: float, now: Callable[[], float]) -> PgWire:
        """Return a new connection, logged in, within ``within`` seconds.

        A separate thread connects, because a DNS look-up has no time limit. A connection that is made too late is
        returned by the next call.
        """
        within = max(within, 0.001)
        deadline = now() + within
        outcome = self._dialling.outcome(lambda: self._dial(deadline, now), within, now)
        if isinstance(outcome, PgWire):
            return outcome
        if isinstance(outcome, MultilockError):
            raise outcome
        raise BackendUnavailable(
            f"{self.name} cannot be reached: {outcome}", unknown=False, backend="postgresql"
        ) from outcome

    def _dial(self, deadline: float, now: Callable[[], float]) -> PgWire:
        """Try each host in turn. Each host gets an equal share of the time, so that a host without a reply leaves time
        for the others.

        If the last host has accepted the connection, its login may take longer than the deadline: a busy server has
        started a process for it, and would start the next one just as slowly.
        """
        failures: list[MultilockError] = []
        login_until = max(deadline, now() + REQUEST_TIMEOUT_MAX)
        for tried, (host, port) in enumerate(list(self._hosts)):
            left = len(self._hosts) - tried
            until = now() + (deadline - now()) / left
            try:
                wire = self._open_wire(host, port, until, login_until if left == 1 else until, now)
            except MultilockError as error:
                failures.append(error)
                continue
            if tried:  # this host is the primary now, so try it first
                self._hosts = [(host, port), *(each for each in self._hosts if each != (host, port))]
            return wire
        silent = [error for error in failures if isinstance(error, BackendUnavailable)]
        raise (silent or failures)[0]

    def _open_wire(self, host: str, port: str, until: float, login_until: float, now: Callable[[], float]) -> PgWire:
        where = f"postgresql://{f'[{host}]' if ':' in host else host}{f':{port}' if port else ''}"
        settings = {**self._settings, **({"host": host} if host else {}), **({"port": port} if port else {})}
        conninfo = make_conninfo("", **settings).encode()
        try:
            return unforked(lambda: self._log_in(conninfo, where, until, login_until, now), login_until, now)
        except TimeoutError as error:
            raise BackendUnavailable(str(error), unknown=False, backend="postgresql") from error

    def _log_in(
        self, conninfo: bytes, where: str, until: float, login_until: float, now: Callable[[], float]
    ) -> PgWire:
        try:
            connection = self._connect_start(conninfo)
            try:
                _finish_login(connection, where, until, login_until, now)
                wire = PgWire(connection, self, where, now)
            except BaseException:
                connection.finish()  # otherwise the traceback of this error would keep the connection open
                raise
        except (OSError, psycopg.Error) as error:
            if isinstance(error, MultilockError):
                raise
            raise _not_connected(str(error), where) from error
        self.wires.add(wire)
        # A pooler reports an invented process id at the login. It may pass its session on to others, with all settings.
        [(pid, *_)] = wire.script(OWN_PID + LIMIT_LOCKS % connection.backend_pid, max(0.001, login_until - now()))
        wire.pooled = int(pid or 0) != connection.backend_pid
        return wire


def _finish_login(
    connection: pq.abc.PGconn, where: str, until: float, login_until: float, now: Callable[[], float]
) -> None:
    """Log in. The server must accept the connection before ``until``, and the login before ``login_until``."""
    state: int = pq.PollingStatus.WRITING
    while state != pq.PollingStatus.OK:
        if state == pq.PollingStatus.FAILED:
            raise _not_connected(connection.get_error_message(), where)
        poll = system.poll()
        reading = state == pq.PollingStatus.READING
        poll.register(connection.socket, system.POLLIN if reading else system.POLLOUT)
        limit = until if connection.status == pq.ConnStatus.STARTED else login_until
        if not poll.poll(max(0.0, limit - now()) * 1000):
            raise TimeoutError("the server did not answer")
        state = connection.connect_poll()


def _not_connected(told: str, where: str) -> MultilockError:
    said = " ".join(told.split()).partition(" Is the server running")[0]  # cut libpq's advice, because our own follows
    why = f"{where} cannot be reached: {said}"
    if "session is read-only" in told or "server is in hot standby" in told:
        return BackendUnavailable(f"{why} ({IS_REPLICA})", unknown=False, backend="postgresql")
    if refused_login(told):
        return BackendRejected(f"{why} (check the login, the database and the certificates)", backend="postgresql")
    return BackendUnavailable(why, unknown=False, backend="postgresql")


def patience(within: float) -> bytes:
    """Return the ms for which the server may wait for a locked row if its reply must come within ``within`` seconds."""
    return b"%d" % max(1, int(within * 1000 * WAIT_SHARE))


class ConnectionPool:
    """At most ``most`` connections of one client. The most recently used one is taken first. Any thread may use this
    object."""

    def __init__(
        self, endpoint: PgEndpoint, now: Callable[[], float], most: int, lender: ConnectionPool | None = None
    ) -> None:
        """If no new connection can be made, a request uses an idle connection of ``lender``."""
        self.endpoint = endpoint
        self.now = now
        self._lender = lender
        self._idle: deque[PgWire] = deque()  # used without a lock, since its methods are atomic
        self._permits: system.SimpleQueue[None] = system.SimpleQueue()
        for _ in range(most):
            self._permits.put(None)
        self._closed = system.Event()
        self._tended = False  # whether a thread closes connections that were idle for too long

    def call(self, sql: bytes, arguments: Sequence[bytes | None], within: float, *, limited: bool = True) -> Answer:
        """Send one request. Returns its rows, and when it was sent.

        If ``limited`` is True, a last argument is added: the ms for which the server may wait for a locked row
        (`patience`).
        """

        def ask(wire: PgWire, left: float) -> Answer:
            return wire.call(sql, [*arguments, patience(left)] if limited else arguments, left), wire.used

        return self.use(ask, within)

    def use(self, ask: Callable[[PgWire, float], Answer], within: float) -> Answer:
        """Take an idle or a new connection, and return ``ask(wire, left)``. ``left`` is the time that is left of
        ``within``."""
        deadline = self.now() + within
        permit: list[None] = []
        wire: PgWire | None = None
        home = self
        try:
            try:
                system.take(self._permits.get, within, permit)
            except system.Empty:
                busy = f"{self.endpoint.name}: all connections are in use (see connections=)"
                raise BackendUnavailable(busy, unknown=False, backend="postgresql") from None
            home, wire = self._take(deadline)
            left = deadline - self.now()
            if left <= 0:
                late = f"{self.endpoint.name}: no time was left to ask it"
                raise BackendUnavailable(late, unknown=False, backend="postgresql")
            try:
                return ask(wire, left)
            except BackendUnavailable as silence:
                # The server may have gone silent, and another one may have taken over. A connection that was idle since
                # before this request would cost the next request its time, too.
                if silence.unknown:
                    home._trim(wire.used)
                raise
        finally:
            # No Python function is called before the put, so no interrupt can lose the permit.
            if permit:
                self._permits.put(None)
            if wire is not None:
                home._give(wire)
            home._tend_idle()

    def _take(self, deadline: float) -> tuple[ConnectionPool, PgWire]:
        """Return a connection, and the pool that gets it back."""
        wire = self._take_idle()
        if wire is not None:
            return self, wire
        try:
            return self, self.endpoint.connect(deadline - self.now(), self.now)
        except MultilockError:  # perhaps the server or the role allows no further connection
            wire = self._lender._take_idle() if self._lender and self.now() < deadline else None
            if self._lender and wire:
                return self._lender, wire
            raise

    def _take_idle(self) -> PgWire | None:
        while self._idle:
            try:
                wire = self._idle.pop()
            except IndexError:  # another thread has taken the last idle connection
                continue
            if wire.alive and not wire.stale():
                return wire
            wire.close()
        return None

    def _give(self, wire: PgWire) -> None:
        if wire.at_rest():
            self._idle.append(wire)
        else:  # an interrupt left a transaction open, so the next request would never be committed
            wire.close()

    def _tend_idle(self) -> None:
        if self._closed.is_set():
            self._trim(self.now())
        elif self._idle and not self._tended:
            self._tended = True
            start_worker(self._tend, "multilock-postgresql-idle")

    def _tend(self) -> None:
        """Close connections that were idle for `AT_REST` seconds, until no idle connection is left.

        A separate thread runs this.
        """
        while self._idle and not self._closed.wait(TEND_EVERY):
            self._trim(self.now() - AT_REST)
        self._tended = False

    def _trim(self, used_before: float) -> None:
        """Close idle connections that were last used before this time, or that the server has closed."""
        with suppress(IndexError):  # another thread may have taken the last connection
            for _ in range(len(self._idle)):
                wire = self._idle.popleft()
                if wire.used <= used_before or wire.stale():
                    wire.close()
                else:
                    self._idle.append(wire)

    def close(self) -> None:
        """Close the idle connections. A connection in use is closed when its request ends."""
        self._closed.set()
        self._trim(self.now())
