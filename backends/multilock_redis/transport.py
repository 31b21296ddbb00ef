"""Requests to one Redis server: blocking, bounded in time, never retried. Foreign exceptions become ours here.

redis-py connects: addresses, TLS, credentials, whatever a client that was handed over is set up for. After that this
module writes and reads on the socket itself: an acquire and a release are one small request and one number each, and
reading those through redis-py would take a tenth of the time of the whole pair.
"""

from __future__ import annotations

import os
import socket
import ssl
import struct
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from redis import exceptions as theirs
from redis.backoff import NoBackoff
from redis.retry import Retry

from multilock import BackendRejected, BackendUnavailable, MultilockError, system
from multilock.backend import start_worker
from multilock.options import NO_TLS, who_answered
from multilock_redis.wire import IS_LOADING, IS_REPLICA, SILENT, Incomplete, Unclear, parse, refusal

__all__ = ["Answer", "Connections", "Endpoint", "Wire", "is_down", "not_connected"]

Answer = tuple[Any, float]
"""What the server said (or the exception that it became), and when the request was sent."""

SHORT = 0.05  # seconds; a request that had less time says nothing about its connection by its silence
SPARE = 4  # idle connections that are kept however long they were not used …
SPARE_FOR = 60.0  # … and seconds for which more than these are kept
TEND_EVERY = 5.0  # seconds; while there are more, so often it is looked for what is old, or ended by the server
BATCH = 500  # requests written at once in a pipeline
CHUNK = 65536  # bytes read at once

CONNECTING_AT_ONCE = 32  # threads of one client; what hangs in the look-up of a name hangs for as long as it likes

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
# Retries of redis-py would turn a won lock into a refusal; and answers are read as bytes.
_WITHOUT_RETRIES = {
    "retry": Retry(NoBackoff(), 0),
    "retry_on_timeout": False,
    "retry_on_error": [],
    "health_check_interval": 0,
    "decode_responses": False,
    "protocol": 2,
}


class Open:
    """The connections that are open, as long as somebody has them: one whose owner was interrupted before it noted it
    ends at once."""

    def __init__(self) -> None:
        self._wires: set[weakref.ref[Wire]] = set()  # its methods are atomic: no lock
        #: Server -> when the last request was sent that it did not answer in time. A firewall that has forgotten one
        #: connection has as a rule forgotten all that are as old: none that was not used since is used again.
        self.silent: dict[str, float] = {}

    def add(self, wire: Wire) -> None:
        self._wires.add(weakref.ref(wire, self._wires.discard))

    def discard(self, wire: Wire) -> None:
        self._wires.discard(weakref.ref(wire))

    def __iter__(self) -> Iterator[Wire]:
        return iter([wire for one in list(self._wires) if (wire := one())])


class Wire:
    """One connection, used by one thread at a time. It closes itself when it breaks, or when a call is interrupted:
    an answer that comes later must never be taken for that of another request.

    One that an event loop watches (`never_block`) only says so, and is closed by whoever has it watched: the loop must
    hear of it first, since the number of a closed descriptor is at once that of another connection.
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
        """It is ``among`` the open ones until it is closed."""
        self._connection = connection
        self._open = among
        self.where = where  #: begins with the URL, without secrets
        self._now = now
        self._sock: socket.socket = connection._sock  # redis-py has no public way to it
        self._poll = system.poll()  # select() takes no descriptor above 1023
        self._poll.register(self._sock, system.POLLIN)
        self._timeout = 0.0
        self._until = 0.0  # when the rest of an answer that has begun must be there
        self._buffer = b""  # what was read …
        self._at = 0  # … and up to where it was understood
        self._heard = False  # anything at all
        self._ended = False  # by `interrupt`
        self._watched = False
        self.alive = True
        self.used = now()  # when the last request was sent, or the connection made
        # However this connection ends, bytes that did not leave are dropped and the server hears of it at once.
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        among.add(self)

    def call(self, request: bytes, within: float) -> Any:
        """Send one request and read its answer; ``used`` is when it was sent. Raises as `Backend` says, or
        `ScriptMissing`."""
        sent = False
        try:
            if not 0.8 * within <= self._timeout <= within:
                self._limit(within)
            self.used = self._now()
            self._until = self.used + within
            # If this fails the request did not leave whole, so that it cannot be executed.
            self._sock.sendall(request)
            sent = True
            answer = self._read()
        except (OSError, ValueError) as error:
            raise self._broken(error, sent) from error
        except BaseException:
            self.close()
            raise
        return self._told(answer)

    def begin(self, request: bytes) -> bool:
        """Send one request without blocking, on a connection that was set so; `finish` reads its answer. False: it did
        not leave whole; then this connection is to be closed."""
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
        """The answer; BlockingIOError while it has not arrived whole."""
        try:
            answer = self._read()
        except (BlockingIOError, ssl.SSLWantReadError):
            raise BlockingIOError from None
        except (OSError, ValueError) as error:
            raise self._broken(error, sent=True) from error
        return self._told(answer)

    def put(self, request: bytes, patience: float) -> bool:
        """As `begin`, and where the connection does not take all of it at once, wait for up to ``patience`` seconds."""
        until, rest = self._now() + patience, memoryview(request)
        while True:
            try:
                rest = rest[self._sock.send(rest) :]
            except (BlockingIOError, ssl.SSLWantWriteError):
                pass
            except OSError:
                break
            if not rest:
                return True
            poll, left = system.poll(), until - self._now()
            poll.register(self._sock, system.POLLOUT)
            if left <= 0 or not poll.poll(left * 1000):
                break
        self._end()
        return False

    def never_block(self, *, tls: bool = False) -> bool:
        """From now on only `begin`, `put` and `finish` may be used. False: TLS, which may have to write in order to
        read; so with ``tls`` only a thread may use it."""
        if isinstance(self._sock, ssl.SSLSocket) and not tls:
            return False
        self._sock.setblocking(False)
        self._watched = True
        return True

    def fileno(self) -> int:
        return self._sock.fileno()

    def _told(self, answer: Any) -> Any:
        if isinstance(answer, Exception):
            self._keep_after(answer)
            raise answer
        return answer

    def exchange(self, requests: Sequence[bytes], within: float, *, pushes: bool = False) -> list[Answer]:
        """Pipelined: all are sent, then all answers read. An error answer is in its place, as what `call` raises.

        More answers than requests: which of them is whose is not known. With ``pushes`` the rest was not asked for."""
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
                raise ValueError("it answered more than it was asked")
        except (OSError, ValueError) as error:
            raise self._broken(error, sent=True) from error
        except BaseException:
            self.close()
            raise
        for answer, _ in answers:
            self._keep_after(answer)
        return answers

    def send(self, request: bytes, within: float) -> None:
        """For a connection that reads what comes, whenever it comes."""
        try:
            self._limit(within)
            self._sock.sendall(request)
        except OSError as error:
            raise self._broken(error, sent=False) from error

    def receive(self, within: float) -> Any:
        """The next message; None if it is not there within ``within`` seconds, which may be 0."""
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
        """The address that its host's name led to."""
        with suppress(OSError):
            host, port, *_ = self._sock.getpeername()
            return host, port
        return None

    def stale(self) -> bool:
        """Nothing may be asked here any more. Something arrived that nobody asked for: the server's end of the
        connection, or an answer that came twice, which the next request would take for its own. Or the server was
        silent on another connection, and this one was not used since."""
        if self._at < len(self._buffer) or self.used < self._open.silent.get(self.where, 0.0):
            return True
        return bool(self._poll.poll(0))

    @property
    def unread(self) -> bool:
        """More has arrived than was understood so far."""
        return self._at < len(self._buffer)

    def interrupt(self) -> None:
        """From any thread: a read that waits fails now, and so does one of what has arrived and was not read yet."""
        self._ended = True
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.alive = False
        self._open.discard(self)
        self._connection.disconnect()

    def drop(self) -> None:
        """In a forked child: close its descriptor and nothing else. It is the parent's, who goes on using it; but while
        the child has it the server takes a parent that was killed for one that is alive."""
        self.alive = False
        with suppress(OSError):
            os.close(self._sock.detach())

    def _end(self) -> None:
        """It is of no use any more."""
        self.alive = False
        if not self._watched:
            self.close()

    def _read(self) -> Any:
        if self._at == len(self._buffer):
            data = self._sock.recv(CHUNK)
            self._heard = self._heard or bool(data)
            if data[:1] == b":" and data.find(b"\r\n") == len(data) - 2 > 0 and not self._ended:
                return int(data[1:-2])  # what an acquire or release is told as a rule
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
        """Of an answer that comes in pieces: all of them together have the time of one."""
        if not self._watched:
            if (left := self._until - self._now()) <= 0:
                raise TimeoutError("its answer came in pieces, and not whole in time")
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
        self._end()  # the server's name may lead to another one by now
        if IS_REPLICA in str(answer):
            for wire in self._open:
                if wire.where == self.where:
                    wire.interrupt()

    def _broken(self, error: Exception, sent: bool) -> BackendUnavailable:
        if sent and isinstance(error, TimeoutError) and self._until - self.used >= SHORT:
            self._open.silent[self.where] = max(self.used, self._open.silent.get(self.where, 0.0))
        self._end()
        what = "did not answer" if sent else "cannot be reached"
        why = f"{self.where} {what}: {error}{self._hint(error)}"
        return BackendUnavailable(why, unknown=sent, backend="redis")

    def _hint(self, error: Exception) -> str:
        if who := who_answered(self._buffer[self._at :]):
            return f" ({who}: {f'the URL is {other_schemes(self.where)}' if 'TLS' in who else 'it is not Redis'})"
        if self._heard or not isinstance(error, (ConnectionError, ssl.SSLError)):
            return ""
        if speaks_tls(self.where):
            return WANTS_CERTIFICATE
        secure = other_schemes(self.where)
        return f" (it never said a word: is it a Redis? One that speaks TLS has a URL with {secure})"


class Endpoint:
    """Where the server is, and how to connect to it. ``settings`` hold secrets and are never shown."""

    def __init__(self, name: str, connection_class: Callable[..., Any], settings: Mapping[str, Any]) -> None:
        self.name = name
        self._class = connection_class
        self._settings = settings
        self._open = Open()
        self._permits = _permits()
        #: Another server has taken over. Asked after connecting; and whoever has it say so ends all connections after
        #: that: so one that is being made meanwhile ends in either case.
        self.is_left: Callable[[], bool] = _never

    def close(self) -> None:
        """No further connection is wanted, except to end what is under way."""

    def interrupt(self) -> None:
        """From any thread: all its connections end now, those in use too."""
        for wire in self._open:
            wire.interrupt()

    def forget(self) -> None:
        """In a forked child: what the parent had is not used here, and not kept open."""
        self._permits = _permits()  # the threads that have the others are not here
        inherited, self._open = self._open, Open()
        for wire in inherited:  # where there is no fork, the threads that close them are here
            wire.drop()

    def __repr__(self) -> str:
        return f"<Endpoint {self.name}>"

    def connect(self, within: float, now: Callable[[], float]) -> Wire:
        """A new connection, authenticated and on its database, in ``within`` seconds.

        On a thread of its own, since neither the look-up of a host name nor a handshake of several round trips takes
        a limit. One that comes too late is closed.
        """
        within = max(within, 0.001)  # whoever calls may have waited too long already
        deadline = now() + within
        result: system.SimpleQueue[Wire | BaseException] = system.SimpleQueue()
        done = system.Event()  # nobody waits for the result any more
        permits, permit = self._permits, list[None]()

        def give_back() -> None:
            with suppress(IndexError):
                permits.put(permit.pop())

        def dial() -> None:
            try:
                result.put(self._dial(within, now))
            except BaseException as error:
                result.put(error)
            finally:
                give_back()
            if done.is_set():
                _close_late(result)

        outcome: Wire | BaseException
        try:
            permit += map(permits.get, [True], [within])  # as the locks in `Listener` are taken
            start_worker(
                dial, "multilock-redis-connect", once=True, or_here=True
            )  # which gives the permit back, interrupted too
            outcome = result.get(timeout=max(0.0, deadline - now()))
        except system.Empty:
            outcome = TimeoutError(f"not connected within {within:g} s")
        finally:
            done.set()
            _close_late(result)
        if isinstance(outcome, Wire):
            return outcome
        if isinstance(outcome, MultilockError):
            raise outcome
        raise not_connected(outcome, self.name) from outcome

    def _dial(self, within: float, now: Callable[[], float]) -> Wire:
        """On a thread of its own. Raises what a failed connection raises, or what `connect` is to raise."""
        return self._open_wire(self._class, self._settings, self.name, within, now)

    def _open_wire(
        self,
        kind: Callable[..., Any],
        settings: Mapping[str, Any],
        where: str,
        within: float,
        now: Callable[[], float],
    ) -> Wire:
        deadline = now() + within
        while True:
            forks = _forks
            limits = {"socket_timeout": within, "socket_connect_timeout": within}
            connection = kind(**{**settings, **_WITHOUT_RETRIES, **limits})
            # Two round trips to tell the server which library this is.
            connection.driver_info = connection.lib_name = connection.lib_version = None
            connection.connect()
            wire = Wire(connection, where, now, self._open)
            if self.is_left():
                wire.close()
                raise ConnectionError("another server has taken over")
            if _forks == forks and forks % 2 == 0:
                return wire
            wire.close()  # a child may have it too, and did not know of it yet
            if now() >= deadline:
                raise TimeoutError("this process forks faster than a connection is made")


WANTS_CERTIFICATE = " (does it ask its clients for a certificate? One that it trusts is given by cert= and key=)"


def not_connected(error: BaseException, where: str) -> Exception:
    """What a connection that could not be made, or not be logged in to, means. ``where`` begins with the URL."""
    if isinstance(error.__context__, ssl.SSLCertVerificationError):
        return BackendRejected(f"{where} is not trusted: {error.__context__} (see ca=)", backend="redis")
    if isinstance(error, theirs.ResponseError) and str(error).partition(" ")[0] in SILENT:
        return refusal(str(error), where)
    if isinstance(error, theirs.ResponseError) and str(error).startswith("unknown command"):
        return refusal(f"ERR {error}", where)
    if isinstance(error, (theirs.AuthenticationError, theirs.ResponseError)):
        return BackendRejected(
            f"{where} refused: {error} (check username=, password= and the database)", backend="redis"
        )
    why = f"{where} cannot be reached: {error}{_hint(error, where)}"
    return BackendUnavailable(why, unknown=False, backend="redis")


def is_down(silence: BackendUnavailable) -> bool:
    """Whether it is certain that there is no server at the moment: nobody listens, or it is loading its data."""
    if IS_LOADING in str(silence):
        return True
    error: BaseException | None = silence
    while error and not isinstance(error, (ConnectionRefusedError, theirs.BusyLoadingError)):
        error = error.__cause__ or error.__context__
    return error is not None


def _hint(error: BaseException, where: str) -> str:
    if not speaks_tls(where):
        return ""
    if NO_TLS in str(error):
        return f" (what listens there does not speak TLS: the URL is {other_schemes(where)})"
    # A Redis without TLS waits for the end of a line.
    if "alert" in str(error):  # of a server that does
        return WANTS_CERTIFICATE
    silent = isinstance(error, (TimeoutError, theirs.TimeoutError))
    broken = isinstance(error.__context__, (ssl.SSLError, ConnectionResetError))
    return f" (is it TLS that is spoken there? Else the URL is {other_schemes(where)})" if silent or broken else ""


def speaks_tls(where: str) -> bool:
    return where.startswith("rediss")


def other_schemes(where: str) -> str:
    """Those with TLS of a URL without, or the other way round. A server's own name does not tell whose it is one of."""
    scheme = where.partition("://")[0]
    if "+" not in scheme:
        return (
            "redis://, redlock:// or redis+cluster://"
            if speaks_tls(where)
            else ("rediss://, redlocks:// or rediss+cluster://")
        )
    return f"{scheme.replace('rediss', 'redis', 1) if speaks_tls(where) else scheme.replace('redis', 'rediss', 1)}://"


def _never() -> bool:
    return False


def _permits() -> system.SimpleQueue[None]:
    permits: system.SimpleQueue[None] = system.SimpleQueue()
    for _ in range(CONNECTING_AT_ONCE):
        permits.put(None)
    return permits


_forks = 0  # odd while this process forks


def _count_forks() -> None:
    global _forks
    _forks += 1


os.register_at_fork(before=_count_forks, after_in_parent=_count_forks, after_in_child=_count_forks)


def _close_late(result: system.SimpleQueue[Wire | BaseException]) -> None:
    """Close the connection that is still in there; whoever of both sides comes last finds it."""
    with suppress(system.Empty):
        if isinstance(late := result.get_nowait(), Wire):
            late.close()


class Connections:
    """The connections of one client to one server: the last used is taken first. Any thread may call."""

    def __init__(self, endpoint: Endpoint, now: Callable[[], float]) -> None:
        self._endpoint = endpoint
        self._now = now
        self._idle: deque[Wire] = deque()  # its methods are atomic: no lock
        self._closed = system.Event()
        self._tended = False  # by a thread, while there are many

    def call(self, request: bytes, within: float) -> Answer:
        wire, left = self._take(within)
        try:
            return wire.call(request, left), wire.used
        finally:
            self._give(wire)

    def exchange(self, requests: Sequence[bytes], within: float) -> list[Answer]:
        wire, left = self._take(within)
        try:
            return wire.exchange(requests, left)
        finally:
            self._give(wire)

    def channel(self, within: float) -> Wire | None:
        """A connection of the caller's own, that never blocks."""
        wire = self._endpoint.connect(within, self._now)
        if wire.never_block():
            return wire
        self._give(wire)
        return None

    def close(self) -> None:
        """Idle connections end now, those in use when their request ends."""
        self._closed.set()
        self._endpoint.close()
        self._trim()

    def _take(self, within: float) -> tuple[Wire, float]:
        """A connection, and what is left of ``within``. Who stood still has nothing left, and asks nothing: that may
        have been called off meanwhile, so long ago that no server knows."""
        start = self._now()
        while self._idle:
            try:
                wire = self._idle.pop()
            except IndexError:  # another thread took it
                continue
            if not wire.stale():
                break
            wire.close()
        else:
            wire = self._endpoint.connect(within, self._now)
        left = start + within - self._now()
        if left <= 0:
            self._give(wire)
            raise BackendUnavailable(f"{wire.where}: no time was left to ask it", unknown=False, backend="redis")
        return wire, left

    def _give(self, wire: Wire) -> None:
        if wire.alive:
            self._idle.append(wire)
            if self._closed.is_set():
                self._trim()
            elif len(self._idle) > SPARE and not self._tended:
                self._tended = True
                start_worker(self._tend, "multilock-redis-idle")

    def _tend(self) -> None:
        """On a thread of its own, until there are few: a burst may be followed by nothing that would look."""
        while len(self._idle) > SPARE and not self._closed.wait(TEND_EVERY):
            self._trim()
        self._tended = False

    def _trim(self) -> None:
        """End those that were not used for long or that the server has ended; all of them once this is closed."""
        with suppress(IndexError):  # another thread took the last one
            for _ in range(len(self._idle)):
                wire = self._idle.popleft()
                old = len(self._idle) >= SPARE and wire.used < self._now() - SPARE_FOR
                if self._closed.is_set() or old or wire.stale():
                    wire.close()
                else:
                    self._idle.append(wire)
