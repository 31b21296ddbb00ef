"""Requests to an etcd cluster: blocking, bounded in time, and never repeated once they may have been executed.

Each endpoint has one gRPC channel, and this module chooses among them. Requests go to one endpoint until it does not
reply, and then to the next endpoint over a new connection. gRPC's own balancing and retries are off, because its
``pick_first`` stays with a frozen member. Every request says ``hasleader``, so a member that is cut off from its leader
refuses at once. Exceptions of grpc become errors of multilock.
"""

from __future__ import annotations

import ctypes
import math
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from traceback import walk_tb
from typing import Any

from multilock import system

# gRPC reads this variable at its first import. Without it a forked child waits forever for gRPC's threads.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "1")

import grpc

from multilock import BackendRejected, BackendUnavailable, ConfigurationError, MultilockError
from multilock.backend import start_worker
from multilock.options import NO_TLS
from multilock_etcd import wire
from multilock_etcd.main_thread import Aside

__all__ = [
    "Cluster",
    "EtcdTransport",
    "LeaseMissing",
    "Method",
    "NotAcknowledged",
    "TooMuch",
    "calls",
    "refuse_eventlet",
]

Code = grpc.StatusCode

SILENT_AFTER = 0.1  # seconds; if a request with a shorter timeout gets no reply, its endpoint is not given up
SILENCE_COUNTS = 5.0  # seconds after a missing reply for which close() does not wait for that endpoint
OURS = "Locally cancelled by application"  # gRPC's message for a stream that this client ended
READER = "_run_channel_spin_thread"  # gRPC's function that starts the thread which reads a channel's events
READER_AGAIN = 0.1  # seconds between two tries to start the thread that reads a channel's events
CLOSE_WITHIN = 1.0  # seconds that gRPC may take to close its channels
PREPARE_WITHIN = 5.0  # seconds that the login may take, if the request itself has no time limit

_OPTIONS = (
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),  # a web proxy may delay requests
    ("grpc.use_local_subchannel_pool", 1),  # so that every channel has its own connection
    ("grpc.max_receive_message_length", -1),  # a page of names can be large
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # the time limit for one try to connect
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Pings find a watch stream whose connection died silently. etcd ends connections that ping more than every 5 s.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
)
# Messages which show that a request was never sent, or that a learner refused it. gRPC has no separate codes for these.
_NOT_SENT = (
    "failed to connect to all addresses",
    "dns resolution failed",
    "errors resolving",
    "name resolution",
    "not supported for learner",
)
_UNTRUSTED = (
    "CERTIFICATE_VERIFY_FAILED",
    "Ssl handshake failed",
    "Hostname Verification Check failed",
    "Unwrap failed",
)
# The server does not accept the token: it expired, members restarted, or auth was switched on. Nothing was executed.
_TOKEN_OVER = ("invalid auth token", "revision of auth store is old", "user name is empty")
_LEASE_MISSING = "requested lease not found"
_ENDED_UNANSWERED = "context canceled"
_TOO_MANY = "too many operations in txn request"
_TOO_LARGE = ("request is too large", "received message larger than max")
_REFUSED = {
    Code.UNAUTHENTICATED: "give username= and password=, or cert= and key=",
    Code.PERMISSION_DENIED: "give this user read and write access to the keys below prefix=",
    Code.INVALID_ARGUMENT: "see the server's message; if it asks for a login, give username= and password=",
    Code.FAILED_PRECONDITION: "see the server's message",
    Code.RESOURCE_EXHAUSTED: "see the server's message; if etcd is out of space, compact, defragment and disarm it",
    Code.UNIMPLEMENTED: "is it an etcd of version 3.4 or later?",
    Code.DATA_LOSS: "see the server's log",
}


@dataclass(frozen=True, slots=True, eq=False)
class Method:
    """One kind of request. There is exactly one object for each kind."""

    path: str
    answer: Any


class calls:
    """The requests that a lock needs.

    A keep-alive is a stream, but gRPC sends it as a call with one answer, which needs no thread.
    """

    RANGE = Method("/etcdserverpb.KV/Range", wire.RangeResponse)
    TXN = Method("/etcdserverpb.KV/Txn", wire.TxnResponse)
    DELETE = Method("/etcdserverpb.KV/DeleteRange", wire.DeleteRangeResponse)
    GRANT = Method("/etcdserverpb.Lease/LeaseGrant", wire.LeaseGrantResponse)
    REVOKE = Method("/etcdserverpb.Lease/LeaseRevoke", wire.LeaseRevokeResponse)
    KEEP_ALIVE = Method("/etcdserverpb.Lease/LeaseKeepAlive", wire.LeaseKeepAliveResponse)
    TIME_TO_LIVE = Method("/etcdserverpb.Lease/LeaseTimeToLive", wire.LeaseTimeToLiveResponse)
    AUTHENTICATE = Method("/etcdserverpb.Auth/Authenticate", wire.AuthenticateResponse)
    STATUS = Method("/etcdserverpb.Maintenance/Status", wire.StatusResponse)
    MEMBERS = Method("/etcdserverpb.Cluster/MemberList", wire.MemberListResponse)
    WATCH = Method("/etcdserverpb.Watch/Watch", wire.WatchResponse)


class _Traffic:
    """Counts the calls into gRPC that are under way, and lets a fork wait for them.

    A forked child works only if no thread was inside gRPC at the fork. So a fork waits briefly for the calls that are
    under way, and then ends them. The outcome of an ended call is unknown, and the kernel repeats the request.
    """

    PATIENCE = 0.25  # seconds that a fork waits for calls

    def __init__(self) -> None:
        self._transports: weakref.WeakSet[EtcdTransport] = weakref.WeakSet()
        self._begin()
        os.register_at_fork(before=self._stop, after_in_parent=self._go_on, after_in_child=self._begin)

    def add(self, transport: EtcdTransport) -> None:
        self._transports.add(transport)

    def __enter__(self) -> None:
        with self._lock:
            while self._stopped:
                self._changed.wait()
            self._calls += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._calls -= 1
            if self._stopped:
                self._changed.notify_all()

    def _begin(self) -> None:
        # The lock is taken directly, because taking it through its Condition costs twice as much.
        self._lock = system.RLock()
        self._changed = system.Condition(self._lock)
        self._calls = 0
        self._stopped = 0  # threads that are about to fork

    def _stop(self) -> None:
        with self._changed:
            self._stopped += 1
            if self._changed.wait_for(self._quiet, self.PATIENCE):
                return
        for transport in list(self._transports):
            transport.interrupt()
        with self._changed:
            self._changed.wait_for(self._quiet, self.PATIENCE)

    def _quiet(self) -> bool:
        return not self._calls

    def _go_on(self) -> None:
        with self._changed:
            self._stopped -= 1
            self._changed.notify_all()


class _NoThread(BackendUnavailable):
    """The process could not start the thread that a stream needs."""


class _BehindALogin(BackendUnavailable):
    """The login of another thread used up the time of this request."""


def _behind_a_login() -> _BehindALogin:
    return _BehindALogin("another thread still waits for etcd to issue a token", unknown=False)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_libc = ctypes.PyDLL(None)  # PyDLL keeps the GIL, because releasing it can cost 5 ms
CLOCK_REALTIME = 0


class Within(float):
    """A timeout for gRPC, which adds it to ``time.time()`` to get a deadline on the system's clock.

    A test may have frozen or moved ``time.time()``. So the addition reads the system's clock itself.
    """

    def __radd__(self, wall: float) -> float:
        at = _Timespec()
        _libc.clock_gettime(CLOCK_REALTIME, ctypes.byref(at))
        deadline: float = at.seconds + at.nanoseconds / 1e9 + float(self)
        return deadline

    __add__ = __radd__


def suit_gevent() -> None:
    """Let gRPC run other greenlets while it waits, if gevent has patched this interpreter.

    Otherwise a waiting call of gRPC would stop every greenlet of the process forever.
    """
    if system.patched_by() == "gevent":
        import grpc.experimental.gevent as support

        support.init_gevent()


def refuse_eventlet() -> None:
    """Raise `ConfigurationError` if eventlet has patched this interpreter, since gRPC does not support it."""
    if system.patched_by() == "eventlet":
        raise ConfigurationError(
            "etcd:// does not work under eventlet: gRPC would stop every green thread of this process. "
            "Use gevent or threads, or a backend without gRPC"
        )


class TooMuch(BackendRejected):
    """The server refused a transaction as too large: in bytes if ``by_bytes``, else in operations. Nothing was done."""

    def __init__(self, message: str, *, by_bytes: bool) -> None:
        super().__init__(message)
        self.by_bytes = by_bytes


class NotAcknowledged(BackendUnavailable):
    """The server ended the request without a reply, as an etcd grpc-proxy does with a renewal."""


class LeaseMissing(Exception):
    """The lease that a put names does not exist. Nothing was written."""


@dataclass(frozen=True, slots=True, repr=False)
class Cluster:
    """How to connect and log in: endpoints ``host:port`` with TLS files and credentials, or a client object of the
    program, which can be used only in the process ``pid``."""

    targets: Sequence[str]
    tls: bool = False
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    username: str | None = None
    password: str | None = None
    client: Any = None
    pid: int = field(default_factory=os.getpid)


class EtcdTransport:
    """One client's connections to one cluster. Every call ends within its time, and raises only the errors of `Backend`
    and those of this module."""

    def __init__(self, cluster: Cluster, now: Callable[[], float]) -> None:
        self._cluster = cluster
        self._now = now
        self._lock = system.Lock()
        self._current = 0
        self._connections: list[_Connection | None] = [None] * len(cluster.targets)
        self._login = _Login(cluster)
        self._closed = False
        self._aside = Aside()
        _traffic.add(self)

    @property
    def name(self) -> str:
        """The name of the present endpoint, for messages."""
        return f"etcd {self._cluster.targets[self._current]}"

    @property
    def silent(self) -> bool:
        """Whether the endpoint in use gave no reply to a request a moment ago, and has sent nothing to this client
        since.

        Another client of this process may have sent that request.
        """
        number = self._current
        connection = self._connections[number]
        heard_at = connection.answered_at if connection and connection.answered_at else -math.inf
        return _silent_at.get(self._cluster.targets[number], -math.inf) > max(heard_at, self._now() - SILENCE_COUNTS)

    def call(self, method: Method, request: Any, within: float) -> tuple[Any, float]:
        """Send a request. Returns the reply, and when the request was sent.

        If the request was certainly not executed, this tries the next endpoint or logs in again. Raises `LeaseMissing`
        besides the errors of `Backend`.
        """
        return self._aside(partial(self._call, method, request, self._now() + within), within)

    def _call(self, method: Method, request: Any, deadline: float) -> tuple[Any, float]:
        tries = len(self._cluster.targets)
        relogin = True
        while True:
            if (sent_at := self._now()) >= deadline:
                raise BackendUnavailable("no time was left to ask etcd", unknown=False)
            connection = self._use()
            try:
                metadata = self._prepared(connection, deadline)
                if (sent_at := self._now()) >= deadline:  # this process may have been paused, and the claim cancelled
                    continue
                answer = connection.invoke(method, request, deadline - sent_at, metadata)
                connection.answered_at = self._now()
                return answer, sent_at
            except _BehindALogin as error:  # only the login is late, the endpoint may be healthy
                raise BackendUnavailable(str(error), unknown=False) from None
            except (grpc.RpcError, BackendUnavailable) as error:
                if relogin and self._login.is_over(error):
                    relogin = False
                    continue
                silence = self._failed(connection, error, sent_at)
                tries -= 1
                if isinstance(silence, BackendUnavailable) and not silence.unknown and tries > 0:
                    continue
                if silence is error:
                    raise
                raise silence from error
            finally:
                self._leave(connection)

    def each(self, method: Method, request: Any, within: float) -> Iterator[tuple[str, Any]]:
        """Send a request to every endpoint, each with an equal share of the time. Yields the endpoint, and its reply or
        the error."""
        share = within / len(self._connections)
        for number, target in enumerate(self._cluster.targets):
            yield target, self._aside(partial(self._call_one, number, method, request, self._now() + share), share)

    def _call_one(self, number: int, method: Method, request: Any, until: float) -> Any:
        """Send a request to one endpoint. Returns the reply or the error."""
        connection = self._use(number)
        try:
            metadata = self._prepared(connection, until)
            return connection.invoke(method, request, until - self._now(), metadata)
        except (grpc.RpcError, MultilockError) as error:
            failure = _translate(error, connection.name)
            if failure is not error:
                failure.__cause__ = error
            return failure
        finally:
            self._leave(connection)

    @contextmanager
    def watch(self, requests: Iterator[Any]) -> Iterator[Any]:
        """Open a watch stream, and yield its answers without a time limit.

        ``cancel()`` ends the stream. The stream also ends when its endpoint is given up.
        """
        connection = self._use()
        sent_at = self._now()
        try:
            stream = connection.stream(requests, self._prepared(connection, sent_at + PREPARE_WITHIN))
            try:
                yield stream
            finally:
                connection.streams.discard(stream)
                stream.cancel()
        except (grpc.RpcError, BackendUnavailable) as error:
            if isinstance(error, grpc.RpcError):
                if OURS in _details(error):  # this client ended the stream, so the endpoint may be healthy
                    raise BackendUnavailable("this client ended its stream", unknown=False) from error
                self._login.is_over(error)
                raise self._failed(connection, error, sent_at) from error
            if isinstance(error, _NoThread):
                self._give_up(connection)
            raise
        finally:
            self._leave(connection)

    def end(self, stream: Any) -> None:
        """End a watch stream."""
        self._aside(stream.cancel, CLOSE_WITHIN)

    def token_over(self) -> None:
        """Log in again before the next request, because a watch was denied, perhaps because of an old token."""
        self._login.forget()

    def close(self) -> None:
        try:
            self._aside(self._close, CLOSE_WITHIN)
        finally:
            self._aside.close()

    def _close(self) -> None:
        with self._lock:
            self._closed = True
            connections, self._connections = self._connections, [None] * len(self._connections)
        for connection in connections:
            if connection:
                connection.close()

    def interrupt(self) -> None:
        """End the calls that are under way, so that this process can fork."""
        for connection in self._connections:
            if connection:
                self._give_up(connection)
                connection.abort()

    def _prepared(self, connection: _Connection, deadline: float) -> Sequence[tuple[str, str]]:
        """Check that this endpoint replies, and log in. Returns the metadata of each request.

        If this fails, the request itself was not sent.
        """
        if len(self._connections) > 1 and connection.answered_at is None:
            # A frozen member accepts connections but never replies. So if there are several endpoints, each gets only a
            # share of the time.
            share = (deadline - self._now()) / len(self._connections)
            self._first(connection, calls.STATUS, wire.StatusRequest(), share)
        known = self._login.known
        if known is not None:
            return known

        def ask(method: Method, request: Any) -> Any:
            return self._first(connection, method, request, deadline - self._now())

        return self._login.metadata(ask, deadline - self._now())

    def _first(self, connection: _Connection, method: Method, request: Any, within: float) -> Any:
        try:
            answer = connection.invoke(method, request, within, self._login.base)
        except grpc.RpcError as error:
            if error.code() not in (Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED, Code.CANCELLED, Code.UNKNOWN):
                connection.answered_at = self._now()
            raise _translate(error, connection.name, sent=False) from error
        connection.answered_at = self._now()
        return answer

    def _use(self, number: int | None = None) -> _Connection:
        if self._cluster.client is not None and self._cluster.pid != os.getpid():
            raise ConfigurationError("the etcd client was passed to connect() before the fork: connect after the fork")
        with self._lock:
            connection = self._connections[self._current if number is None else number]
            if connection is not None:
                connection.users += 1
                return connection
        with _traffic, self._lock:
            if self._closed:
                raise BackendUnavailable("the connections to etcd are closed", unknown=False)
            number = self._current if number is None else number
            connection = self._connections[number]
            if connection is None:
                connection = self._connections[number] = _Connection(self._cluster, self._cluster.targets[number])
            connection.users += 1
            return connection

    def _leave(self, connection: _Connection) -> None:
        with self._lock:
            connection.users -= 1
            over = connection.retired and not connection.users
        if over:
            connection.close()

    def _failed(self, connection: _Connection, error: Exception, sent_at: float) -> Exception:
        """Return the exception to raise. If the endpoint did not reply, use the next one from now on."""
        silence = _translate(error, connection.name)
        late = _code(error) is Code.DEADLINE_EXCEEDED
        heard = connection.answered_at is not None and connection.answered_at > sent_at
        # A missing reply does not count against the endpoint if it answered other requests meanwhile, or if the request
        # had hardly any time.
        busy = late and error is not silence and (heard or self._now() - sent_at < SILENT_AFTER)
        if isinstance(silence, BackendUnavailable) and not busy:
            if late:
                _silent_at[connection.target] = self._now()
            # A new connection may only be slow. Keep it, so that the next request can use it once it is made.
            self._give_up(connection, connecting=late and connection.answered_at is None)
        return silence

    def _give_up(self, connection: _Connection, *, connecting: bool = False) -> None:
        """Use the next endpoint for the next request, and a new connection for later requests to this endpoint.

        If ``connecting`` is True, the connection is kept: it is still being made, and a later request can use it.
        """
        with self._lock:
            if connection not in self._connections:
                return
            number = self._connections.index(connection)
            if number == self._current:
                self._current = (number + 1) % len(self._connections)
            if connecting or not connection.ours:
                return
            self._connections[number] = None
            connection.retired = True
        for stream in list(connection.streams):
            stream.cancel()


class _Connection:
    """The channel of one endpoint. The channel is closed once it was given up and no call uses it any longer."""

    def __init__(self, cluster: Cluster, target: str) -> None:
        self.target = target
        self.name = f"etcd {target}"
        self.ours = cluster.client is None
        self.answered_at: float | None = None
        self.users = 0
        self.retired = False
        self._deaf = False  # no thread reads the channel's events
        self._ended = False
        self._closing = system.Lock()
        self.streams: set[Any] = set()
        self._channel = _channel(cluster, target) if self.ours else cluster.client.channel
        self._stubs: dict[Method, Any] = {}

    def invoke(self, method: Method, request: Any, within: float, metadata: Sequence[tuple[str, str]]) -> Any:
        stub = self._stubs.get(method)
        if stub is None:
            stub = self._stubs[method] = self._channel.unary_unary(
                method.path,
                request_serializer=type(request).SerializeToString,
                response_deserializer=method.answer.FromString,
            )
        try:
            with _traffic:
                return stub(request, timeout=Within(max(within, 0.001)), metadata=metadata)
        except ValueError as error:  # "Cannot invoke RPC on closed channel!": the client was closed meanwhile
            raise BackendUnavailable(f"{self.name}: {error}", unknown=False) from error

    def stream(self, requests: Iterator[Any], metadata: Sequence[tuple[str, str]]) -> Any:
        stub = self._channel.stream_stream(
            calls.WATCH.path,
            request_serializer=wire.WatchRequest.SerializeToString,
            response_deserializer=wire.WatchResponse.FromString,
        )
        try:
            with _traffic:
                call = stub(requests, metadata=metadata)
        except ValueError as error:  # the client was closed meanwhile
            raise BackendUnavailable(f"{self.name}: {error}", unknown=False) from error
        except (RuntimeError, MemoryError) as error:
            self._refused_a_thread(error)
            raise _NoThread(f"{self.name}: {error}", unknown=False) from error
        self.streams.add(call)
        if self.retired:  # the connection was given up meanwhile
            call.cancel()
        return call

    def _refused_a_thread(self, error: BaseException) -> None:
        """Deal with gRPC's failure to start a thread. If that thread reads this channel's events, start it as soon as
        the process can start threads again.

        gRPC itself does not try again. Without that thread no event of a stream on this channel arrives, and closing
        the channel waits forever.
        """
        for frame, _ in walk_tb(error.__traceback__):
            if frame.f_code.co_name == READER:
                self._deaf = True
                start = partial(frame.f_globals[READER], frame.f_locals["state"])
                start_worker(partial(self._start_reader, start), "multilock-etcd-reader", once=True)

    def _start_reader(self, start: Callable[[], None]) -> None:
        while True:
            try:
                start()
                break
            except (RuntimeError, MemoryError):
                system.sleep(READER_AGAIN)
        with self._closing:
            self._deaf, waits = False, self._ended
        if waits:
            self._channel.close()

    def close(self) -> None:
        with _traffic:
            self.abort()

    def abort(self) -> None:
        """End all calls that are under way. This may be called from inside a fork."""
        if not self.ours:
            return
        with self._closing:
            if self._ended:
                return
            self._ended = True
            if self._deaf:  # _start_reader closes the channel
                return
        self._channel.close()


def _channel(cluster: Cluster, target: str) -> Any:
    if not cluster.tls:
        return grpc.insecure_channel(target, options=_OPTIONS)
    try:
        parts = [Path(file).read_bytes() if file else None for file in (cluster.ca, cluster.key, cluster.cert)]
    except OSError as error:
        raise BackendRejected(f"the files for TLS cannot be read: {error} (see ca=, cert=, key=)") from error
    return grpc.secure_channel(target, grpc.ssl_channel_credentials(*parts), options=_OPTIONS)


class _Login:
    """The login: none, the metadata of a client object that the program passed, or a token for user and password.

    The token is requested once, and again when the server no longer accepts it.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._user = cluster.username
        self._password = cluster.password
        self._client = cluster.client
        self._asking = system.Lock()
        self.base = (("hasleader", "true"),)
        nobody = cluster.username is None and cluster.client is None
        #: The metadata of each request; None if `metadata` must find it out first.
        self.known: tuple[tuple[str, str], ...] | None = self.base if nobody else None

    def metadata(self, ask: Callable[[Method, Any], Any], within: float) -> Sequence[tuple[str, str]]:
        if self._client is not None:
            return (*self.base, *(getattr(self._client, "metadata", None) or ()))
        return self._authenticate(ask, within)

    def forget(self) -> None:
        if self._user is not None:
            self.known = None

    def is_over(self, error: Exception) -> bool:
        """Return whether a new token can cure this error. The next request then first requests a new token."""
        if self._user is None or not any(text in _details(error) for text in _TOKEN_OVER):
            return False
        self.forget()
        return True

    def _authenticate(self, ask: Callable[[Method, Any], Any], within: float) -> Sequence[tuple[str, str]]:
        with system.Taking(self._asking, within, _behind_a_login):
            if (known := self.known) is None:
                known = self.known = self.base + self._token(ask)
            return known

    def _token(self, ask: Callable[[Method, Any], Any]) -> tuple[tuple[str, str], ...]:
        request = wire.AuthenticateRequest(name=self._user, password=self._password or "")
        try:
            return (("token", ask(calls.AUTHENTICATE, request).token),)
        except BackendRejected as error:
            if "authentication is not enabled" in str(error):
                return ()
            raise


suit_gevent()
_traffic = _Traffic()
_silent_at: dict[str, float] = {}  # endpoint -> when it last gave no reply to a request of this process


def _code(error: Exception) -> Any:
    cause = error if isinstance(error, grpc.RpcError) else error.__cause__
    return cause.code() if isinstance(cause, grpc.RpcError) else None


def _details(error: Exception) -> str:
    return (error.details() or "") if isinstance(error, grpc.RpcError) else ""


# The number that grpc reports for a server that is not etcd: the fourth byte of its answer, which grpc reads as the
# type of a frame.
_STRANGERS = {
    "http1.x server": "an HTTP server listens there, not etcd",
    f"frame type {ord('R')}": "a Redis listens there, not etcd",
    NO_TLS: "this server does not use TLS: write etcd:// in the URL",
    "Handshake read failed": "does this server use TLS? If not, write etcd:// in the URL",
}


def _translate(error: Exception, where: str, sent: bool = True) -> Exception:
    """Return the exception that this backend raises for this exception of grpc.

    ``sent`` is False if the failed call only prepared the request.
    """
    if not isinstance(error, grpc.RpcError):
        return error
    code, said = error.code(), error.details() or ""
    if code is Code.NOT_FOUND and _LEASE_MISSING in said:
        return LeaseMissing(said)
    if any(text in said for text in _UNTRUSTED):
        return BackendRejected(f"{where} is not trusted, or does not trust us: {said} (see ca=, cert=, key=)")
    if (by_bytes := any(text in said for text in _TOO_LARGE)) or _TOO_MANY in said:
        return TooMuch(f"{where} refused: {said} (see etcd's --max-txn-ops, --max-request-bytes)", by_bytes=by_bytes)
    # A proxy may throttle after etcd has executed the request. Only etcd's own message is a refusal.
    throttled = code is Code.RESOURCE_EXHAUSTED and "etcdserver" not in said
    if code in _REFUSED and "too many requests" not in said and not throttled:
        return BackendRejected(f"{where} refused: {said} ({_REFUSED[code]})")
    said += next((f" ({hint})" for text, hint in _STRANGERS.items() if text in said), "")
    if any(text in said.lower() for text in _NOT_SENT) or "too many requests" in said:
        return BackendUnavailable(f"{where} cannot be reached: {said}", unknown=False)
    unanswered = NotAcknowledged if code is Code.UNKNOWN and said == _ENDED_UNANSWERED else BackendUnavailable
    return unanswered(f"{where} did not answer: {said} ({code.name})", unknown=sent)
