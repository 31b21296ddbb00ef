"""Requests to ZooKeeper through kazoo. Each request has a separate deadline. All requests are sent in order, in one
session.

This module uses kazoo's connection thread, its reconnects and its wire format. It does not rely on the state that kazoo
reports, which stays CONNECTED for minutes if a server does not reply. Nor does it use kazoo's retries and waits, which
have no deadline. Exceptions of kazoo become errors of multilock.
"""

from __future__ import annotations

import contextlib
import math
import os
import ssl
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import kazoo.exceptions as foreign
from kazoo.client import KazooClient
from kazoo.protocol.serialization import CloseInstance, Create2, Delete, Exists, GetChildren, GetData, SetData, Sync
from kazoo.protocol.states import KazooState, KeeperState
from kazoo.security import CREATOR_ALL_ACL, OPEN_ACL_UNSAFE, READ_ACL_UNSAFE

from multilock import BackendRejected, BackendUnavailable, system
from multilock_zookeeper.session_validity import PERIODS, Session
from multilock_zookeeper.sockets import (
    Handler,
    dial,
    drop_what_is_not_understood,
    hung_up,
    log,
    remember_greetings,
)
from multilock_zookeeper.wire import open_second_session

__all__ = ["KAZOO_TLS", "Answer", "Ensemble", "NodeExists", "NodeMissing", "SessionListener", "Transport"]

PERSISTENT, EPHEMERAL_SEQUENTIAL, CONTAINER = 0, 3, 4
ANY_VERSION = -1
NO_LEASES = b"0"  # data of a parent; it keeps kazoo's Semaphore away, which would not see our contenders
SILENT_AFTER = 5.0  # seconds until a connection without a reply is replaced, or one renewal period if that is less
STOPPED = 0.05  # seconds; a thread that wakes up later than planned by this much was paused
CLOSE_WITHIN = 1.0  # seconds that closing the session may take; otherwise the session expires
DIAL_SHARE = 1 / 3  # share of the session timeout for connecting to one host
RECONNECT = {"max_tries": -1, "delay": 0.01, "backoff": 2, "max_delay": 1.0}

KAZOO_TLS = ("use_ssl", "ca", "certfile", "keyfile", "keyfile_password", "verify_certs", "check_hostname")
# The leader sends these refusals in the order of all writes. So such a refusal proves that the session lives, as a
# write does.
_ORDERED_REFUSALS = (foreign.NoAuthError, foreign.QuotaExceededError)
_REFUSED: Mapping[type[Exception], str] = {
    foreign.NoAuthError: "give username= and password= of a user that may use these nodes",
    foreign.AuthFailedError: "see username=, password= and the server's authentication",
    foreign.InvalidACLError: "the server does not know this identity",
    foreign.BadArgumentsError: "see prefix=: a node's name has a character that ZooKeeper forbids",
    foreign.UnimplementedError: "ZooKeeper 3.5 or later is needed",
    foreign.NoChildrenForEphemeralsError: "see prefix=: a node above is ephemeral",
    foreign.QuotaExceededError: "the quota of a node above is used up: raise it, or see prefix=",
}


class _NotQueued(foreign.ConnectionClosedError):  # type: ignore[misc]
    """kazoo's client was closed before the request was queued."""


# The request was not executed, or its session has ended with all nodes. The types must be exact: ConnectionClosedError
# is a subclass of SessionExpiredError, but its request may have been executed.
_NOT_EXECUTED = (foreign.SessionExpiredError, foreign.ThrottledOpError, _NotQueued)
_NO_SESSION: Mapping[str, type[Exception]] = {
    KeeperState.AUTH_FAILED: foreign.AuthFailedError,
    KeeperState.CLOSED: _NotQueued,
    KeeperState.EXPIRED_SESSION: foreign.SessionExpiredError,
}


class NodeMissing(Exception):
    """The node or its parent is missing. Nothing was done."""


class NodeExists(Exception):
    """A node of that name exists. Nothing was done."""


class _CreateContainer(Create2):  # type: ignore[misc]
    """Create a container: a parent that the server removes once it was used and is empty. kazoo lacks this request."""

    type = 19


class _Listing(GetChildren):  # type: ignore[misc]
    """List the children of a node. kazoo reads each name of the reply separately, which takes ten times as long."""

    @classmethod
    def deserialize(cls, reply: bytes, offset: int) -> list[str]:
        """Return the names in a reply. Each name comes after its length in four bytes, and contains no zero byte.

        If all names are shorter than 256 bytes, three zero bytes in a row occur only before names.
        """
        names = reply[offset + 4 :].split(b"\0\0\0")[1:]
        if len(names) == int.from_bytes(reply[offset : offset + 4], "big"):
            return [name[1:].decode() for name in names]
        children: list[str] = super().deserialize(reply, offset)
        return children


class Answer:
    """The reply to one request. kazoo's connection thread sets it."""

    __slots__ = ("_pending", "error", "sent_at", "value")

    def __init__(self, sent_at: float) -> None:
        self.sent_at = sent_at  # the time just before the request was sent
        self.value: Any = None
        self.error: Exception | None = None
        self._pending = system.LockBell()

    def set(self, value: object = None) -> None:
        """Set the value of the reply. kazoo calls this."""
        self.value = value
        self._pending.ring()

    def set_exception(self, error: Exception) -> None:
        """Set the error of the reply. kazoo calls this, perhaps twice for a closed connection."""
        self.error = error
        self._pending.ring()

    def wait(self, within: float) -> bool:
        """Wait for the reply for ``within`` seconds. Returns whether it has arrived."""
        return self._pending.wait(within)


class SessionListener(Protocol):
    """Notified when the session changes. The connection thread of kazoo calls these methods, so they return at once and
    send nothing."""

    def began(self, session: Session) -> None: ...
    def shortened(self, session: Session) -> None: ...
    def suspended(self, session: Session) -> None: ...
    def resumed(self, session: Session) -> None: ...
    def ended(self, session: Session) -> None: ...


@dataclass(frozen=True, slots=True, repr=False)
class Ensemble:
    """How to connect and log in, and the requested session timeout in seconds. Or the program's own client."""

    hosts: str
    chroot: str
    ttl: float
    auth: Sequence[tuple[str, str]] = ()
    tls: Mapping[str, Any] = field(default_factory=dict)
    client: Any = None
    pid: int = field(default_factory=os.getpid)

    @property
    def name(self) -> str:
        """The ensemble's name in messages."""
        return f"zookeeper {self.hosts}{self.chroot}"

    @property
    def acl(self) -> Sequence[Any]:
        """The access list of our nodes. If the client logs in, only clients with that login may write the nodes.
        Everybody may read them, because waiters must."""
        acl: Sequence[Any] = CREATOR_ALL_ACL + READ_ACL_UNSAFE if self.auth else OPEN_ACL_UNSAFE
        return acl


class Transport:
    """One client's connection, and the session that lives on it."""

    def __init__(self, ensemble: Ensemble, now: Callable[[], float], listener: SessionListener) -> None:
        self._ensemble = ensemble
        self._now = now
        self._listener = listener
        self._ours = ensemble.client is None or ensemble.pid != os.getpid()
        self._client: Any = None
        self._handler: Handler | None = None
        self._up = system.Event()
        self._starting = system.Lock()
        self._changing = system.Lock()  # guards the session; kazoo's connection thread takes it too
        self._asking = system.Lock()
        self._session: Session | None = None
        self._id: int | None = None
        self._granted = math.inf  # the least timeout that any handshake granted to the present session id
        self._touched_at = -1e9  # the latest time at which a handshake certainly refreshed the session at the leader
        self._started = False
        self._adopted = False  # whether the program's own KazooClient opened the session
        self._closed = False

    @property
    def name(self) -> str:
        """The ensemble's name in messages."""
        return self._ensemble.name

    @property
    def tls(self) -> ssl.SSLContext | None:
        """The TLS settings of the present connection, or None without TLS."""
        context: ssl.SSLContext | None = getattr(self._client._connection._socket, "context", None)
        return context

    @property
    def asked(self) -> float:
        """The requested session timeout in seconds, rounded up to whole milliseconds."""
        return math.ceil(round(self._ensemble.ttl * 1000, 3)) / 1000

    # ---- the session

    def session(self, deadline: float) -> Session:
        """Return the present session. If there is none, make one."""
        session = self._session
        if session and self._up.is_set():
            return session
        self.connect(deadline)
        with system.Taking(self._asking, deadline - self._now(), self._no_session):
            return self._session or self._begin(deadline)

    def _no_session(self) -> BackendUnavailable:
        return BackendUnavailable(f"{self.name}: no session yet", unknown=False)

    def _begin(self, deadline: float) -> Session:
        number = self._id
        granted = self._granted if self._granted < math.inf else self._ask_timeout(deadline)
        with self._changing:
            if number is None or number != self._id:
                raise BackendUnavailable(f"{self.name}: the session ended before it was ready", unknown=False)
            granted = min(granted, self._granted)  # another handshake may have come meanwhile
            # The program's own kazoo client sends a request at least every third of the timeout. So its last request
            # was sent at most that long before the client was passed as ``client=``.
            touched_at = self._touched_at - (granted / 3 if self._adopted else 0.0)
            session = Session(number, granted, touched_at)
            # Report the session first: if the timeout is cut at this moment, the kernel must know the session.
            self._listener.began(session)
            self._session = session
        return session

    @property
    def connected(self) -> bool:
        """Whether the connection is up, as far as kazoo knows."""
        return self._up.is_set()

    def present(self) -> Session | None:
        """Return the session, or None if there is none or its end was reported."""
        return self._session

    def is_present(self, number: object) -> bool:
        """Return whether the session with this number is the present one."""
        session = self._session
        return session is not None and session.number == number

    def connect(self, deadline: float) -> None:
        """Wait for the connection. Requests are queued only while connected, so that no request is executed long after
        its deadline."""
        if self._up.is_set():
            return
        with self._starting:
            if self._closed:
                raise BackendUnavailable(f"{self.name}: closed", unknown=False)
            self._start()
        if self._up.wait(max(deadline - self._now(), 0.0)):
            return
        error = self._handler.error if self._handler else None
        if isinstance(error, ssl.SSLError) and not hung_up(error):
            raise BackendRejected(f"{self.name}: TLS failed ({error}); see ca=, cert= and key=") from error
        if self._client.client_state == KeeperState.AUTH_FAILED:
            raise BackendRejected(f"{self.name}: authentication failed; see username= and password=")
        raise BackendUnavailable(
            f"{self.name} cannot be reached: {error or 'no answer, or its host has no address'}", unknown=False
        ) from error

    def _start(self) -> None:
        client = self._client
        if client is None:
            client = self._client = self._make() if self._ours else self._ensemble.client
            if not self._ours:
                remember_greetings(client.handler)
            client.add_listener(self._heard)
            drop_what_is_not_understood(client._connection)
            if client.connected:
                self._connected(self._now())
                self._adopted = True
        if not self._runs():
            self._started = True
            self._touched_at = self._now()
            client.start_async()

    def _runs(self) -> bool:
        """Return whether kazoo's connection thread runs, so that it need not be started.

        The thread ends after a failed authentication, and kazoo's state does not show that. Only the program restarts a
        client that was passed as ``client=``.
        """
        if self._handler:
            return self._handler.loop is not None and self._handler.loop.is_alive()
        return self._started or self._client.client_state != KeeperState.CLOSED

    def _make(self) -> Any:
        ensemble = self._ensemble
        hosts = ensemble.hosts.count(",") + 1
        share = ensemble.ttl * DIAL_SHARE
        self._handler = Handler(self._now, share / hosts, share, self._is_over)
        return KazooClient(
            hosts=ensemble.hosts + ensemble.chroot,
            timeout=self.asked + 0.0001,  # kazoo truncates to milliseconds
            handler=self._handler,
            auth_data=list(ensemble.auth),
            connection_retry=RECONNECT,
            logger=log,
            **ensemble.tls,
        )

    def _is_over(self, turned_away_at: float) -> bool:
        """Return whether to give up the session, because servers have turned its client away for the whole session
        timeout.

        The session's leases are lost by then, because they end 2/3 of the timeout after the last acknowledged write.
        The session's id is given up as well: a server with older data may still have the session, with nodes that we
        have released since. The next session begins with a write, so its reads are at least as new as that write.

        The time counts from when servers began to turn us away, because a server that has just started restarts the
        timeout of every session, and turns clients away until it has read its data.
        """
        session = self._session
        # without a session there are no nodes, so `asked` is long enough
        ttl = session.ttl if session else self.asked
        since = max(turned_away_at, self._touched_at)
        return self._id is not None and not self._up.is_set() and self._now() - since > ttl

    def _heard(self, state: str) -> None:
        """Handle a change of the connection's state. kazoo's connection thread calls this."""
        session = self._session
        self._adopted = False
        if state == KazooState.CONNECTED:
            self._connected(self._handler.dialed_at if self._handler else self._touched_at)
        elif state == KazooState.SUSPENDED:
            self._up.clear()
            self._touched_at = self._now()
            if session:
                self._listener.suspended(session)
        else:
            self._up.clear()
            self._end()

    def _connected(self, touched_at: float) -> None:
        """Take over the timeout of a new connection. kazoo's connection thread calls this before the first request on
        that connection.

        So no write counts for longer than the server grants now. A longer timeout than before does not count, because
        the last server may still report the shorter one to the leader.
        """
        number = self._client.client_id[0]
        if number != self._id:
            self._end()
        granted = getattr(self._client._connection._socket, "granted", None) or math.inf
        with self._changing:
            if number != self._id:
                self._granted = math.inf
            self._id = number
            self._granted = min(self._granted, granted)
            self._touched_at = touched_at
            session = self._session
        if session:
            if session.shorten(granted):
                self._listener.shortened(session)
            session.touch(touched_at)
        self._up.set()
        if session:
            self._listener.resumed(session)

    def _end(self) -> None:
        with self._changing:
            self._id = None
            session, self._session = self._session, None
        if session:
            session.over = True
            self._listener.ended(session)

    def _ask_timeout(self, deadline: float) -> float:
        """Return the session timeout that the server grants.

        A kazoo client that was already connected does not show its timeout. So open a second session with the same
        request, and close it at once.
        """
        within = deadline - self._now()
        if within <= 0:
            raise BackendUnavailable(f"{self.name}: no time was left to open a session", unknown=False)
        try:
            with self._dial(within) as connection:
                return open_second_session(connection, self.asked)
        except (OSError, struct.error) as error:
            raise BackendUnavailable(f"{self.name}: no session ({error})", unknown=False) from error

    def _dial(self, within: float) -> Any:
        """Open another connection to the server of the present one."""
        client = self._client
        present = client._connection._socket
        if present is None:
            raise ConnectionError("the connection broke")
        peer = present.getpeername()[:2]
        options = {name: getattr(client, name) for name in KAZOO_TLS}
        # The present connection has already checked the host name.
        return dial(peer, within, {**options, "check_hostname": False})

    def command(self, word: bytes, deadline: float) -> str:
        """Return the server's reply to one of its four-letter words."""
        self.connect(deadline)
        said = b""
        try:
            with self._dial(self._left(deadline)) as connection:
                connection.sendall(word)
                while piece := connection.recv(65536):
                    said += piece
                    connection.settimeout(self._left(deadline))
        except OSError as error:
            raise BackendUnavailable(f"{self.name}: no answer to {word.decode()} ({error})") from error
        return said.decode(errors="replace")

    def _left(self, deadline: float) -> float:
        """Return the seconds left. Raises TimeoutError if no time is left, because a timeout of 0 would make a socket
        non-blocking."""
        if (left := deadline - self._now()) <= 0:
            raise TimeoutError("no time is left")
        return left

    # ---- requests

    def create(self, path: str, value: bytes, flags: int) -> Answer:
        """Send a request to create a node."""
        return self._send(Create2(self._full(path), value, self._ensemble.acl, flags))

    def _create_parent(self, path: str, *, container: bool) -> Answer:
        """Create ``path``, which includes the chroot, because that may be missing as well."""
        if container:
            return self._send(_CreateContainer(path, NO_LEASES, self._ensemble.acl, CONTAINER))
        return self._send(Create2(path, b"", self._ensemble.acl, PERSISTENT))

    def delete(self, path: str) -> Answer:
        """Send a request to delete a node."""
        return self._send(Delete(self._full(path), ANY_VERSION))

    def put(self, path: str, value: bytes) -> Answer:
        """Send a request to write a node."""
        return self._send(SetData(self._full(path), value, ANY_VERSION))

    def get(self, path: str) -> Answer:
        """Send a request to read a node."""
        return self._send(GetData(self._full(path), None))

    def exists(self, path: str, watch: Callable[[Any], None] | None = None) -> Answer:
        """Send a request for a node's state, and watch it if ``watch`` is given."""
        return self._send(Exists(self._full(path), watch))

    def children(self, path: str, watch: Callable[[Any], None] | None = None) -> Answer:
        """Send a request for a node's children, and watch them if ``watch`` is given."""
        return self._send(_Listing(self._full(path), watch))

    def sync(self, path: str) -> Answer:
        """Send a request that makes later reads at least as new as the leader's present state."""
        return self._send(Sync(self._full(path)))

    def ensemble_config(self) -> Answer:
        """Read the ensemble's list of servers, which is outside of any chroot."""
        return self._send(GetData("/zookeeper/config", None))

    def wait(self, answer: Answer, deadline: float) -> Any:
        """Wait for a reply, and return its value. Raises `NodeMissing` and `NodeExists` besides the errors of
        `Backend`."""
        if not answer.wait(deadline - self._now()) and not self._came_while_stopped(answer, deadline):
            self._silent(answer)
            raise BackendUnavailable(f"{self.name}: no answer in time")
        error = answer.error
        if error is None:
            return answer.value
        if isinstance(error, foreign.NoNodeError):
            raise NodeMissing
        if isinstance(error, foreign.NodeExistsError):
            raise NodeExists
        what = f"{self.name}: {type(error).__name__} {error}".rstrip()
        if remedy := _REFUSED.get(type(error)):
            raise BackendRejected(f"{what} ({remedy})") from error
        raise BackendUnavailable(what, unknown=type(error) not in _NOT_EXECUTED) from error

    def ordered(self, answer: Answer, deadline: float) -> bool:
        """Wait for the reply to this write, which proves that the leader knew the session.

        Returns False if the node is missing. Returns True if the server refuses the write because of rights or a quota,
        since the node then exists.
        """
        try:
            self.wait(answer, deadline)
        except NodeMissing:
            return False
        except BackendRejected:
            if not isinstance(answer.error, _ORDERED_REFUSALS):
                raise
        return True

    def listed(self, answer: Answer, deadline: float) -> Sequence[str] | None:
        """Wait for a listing. Returns the children, or None if their parent is missing."""
        try:
            children: Sequence[str] = self.wait(answer, deadline)
        except NodeMissing:
            return None
        return children

    def deleted(self, path: str, deadline: float) -> bool:
        """Delete this node. Returns False if it was missing."""
        try:
            self.wait(self.delete(path), deadline)
        except NodeMissing:
            return False
        return True

    def make_parents(self, parent: str, deadline: float) -> None:
        """Create the parent of the contenders, and the directories above it.

        The directories stay. The parent is a container, which the server removes after it has been empty for a while.
        """
        parts = self._full(parent).strip("/").split("/")
        paths = ["/" + "/".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
        answers = [self._create_parent(path, container=path == paths[-1]) for path in paths]
        for path, answer in zip(paths, answers, strict=True):
            try:
                self.wait(answer, deadline)
            except NodeExists:
                continue
            except BackendRejected:
                if path == paths[-1]:  # we may lack the right to create the directories above, which may exist already
                    raise
            except NodeMissing:
                raise BackendRejected(f"{path} cannot be created: make its parents, or see prefix=") from None

    def _came_while_stopped(self, answer: Answer, deadline: float) -> bool:
        """Return whether the reply arrived during a pause of this process. kazoo's thread may still have to read it."""
        return self._now() - deadline > STOPPED and answer.wait(STOPPED)

    def stripped(self, path: str) -> str:
        """Return this path without the chroot."""
        return str(self._client.unchroot(path))

    def _full(self, path: str) -> str:
        """Return this path with the chroot."""
        chroot: str = self._client.chroot
        return (chroot + path if path != "/" else chroot) if chroot else path

    def _send(self, request: Any) -> Answer:
        """Queue a request, and wake kazoo's connection thread. kazoo's `_call` would swallow an interrupt, and report
        that the connection was closed."""
        answer = Answer(self._now())
        if refusal := _NO_SESSION.get(self._client._state):
            answer.set_exception(refusal("the client is closed"))
            return answer
        try:
            self._client._queue.append((request, answer))
            self._wake(answer)
        except BaseException:
            self._wake(answer)  # the thread sends one request for each byte, and ignores a surplus byte
            raise
        return answer

    def _wake(self, answer: Answer) -> None:
        try:
            self._client._connection._write_sock.send(b"\0")
        # the connection was closed just now
        except (OSError, AttributeError):
            answer.set_exception(foreign.ConnectionClosedError("the connection was closed"))

    def _silent(self, answer: Answer) -> None:
        """Give the connection up if it had enough time for this reply. kazoo keeps it as long as it has requests to
        send."""
        session = self._session
        patience = min(SILENT_AFTER, session.renew_every if session else self.asked / PERIODS) * 0.9
        if self._up.is_set() and self._now() - answer.sent_at >= patience and answer.sent_at >= self._touched_at:
            self.drop()

    def drop(self) -> None:
        """Close the connection but keep the session: kazoo opens another connection."""
        with contextlib.suppress(OSError, AttributeError):
            self._client._connection._socket.shutdown(2)

    # ---- close

    def forget(self) -> Any:
        """Return the parent's client in a forked child. The child must keep a reference to it, because the garbage
        collector would end the client."""
        return self._client

    def close(self) -> None:
        """Close the session. Does not wait for a server that does not reply. A client passed as ``client=`` stays
        open."""
        with self._starting:
            if self._closed:
                return
            self._closed = True
            client = self._client
        if client is None:
            return
        client.remove_listener(self._heard)
        if self._handler and (loop := self._handler.loop):
            # KazooClient.stop() does the same, but waits without a limit. The connection thread ends by itself.
            client._stopped.set()
            client._queue.append((CloseInstance, None))
            with contextlib.suppress(OSError, AttributeError):
                client._connection._write_sock.send(b"\0")
            if not loop.missing:
                loop.join(CLOSE_WITHIN)
            if loop.is_alive():
                self.drop()
                loop.join(0.0 if loop.missing else CLOSE_WITHIN)
            else:
                client.close()
