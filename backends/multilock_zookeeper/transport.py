"""Requests to ZooKeeper through kazoo: each with a deadline of its own, queued in order on one session.

What of kazoo is not relied upon, and why: its state (behind a silent server it stays CONNECTED for minutes, and it
reports no loss while it is disconnected), its retries, its waits (without a limit) and its results (two more threads'
turns for each). Its connection thread, its reconnecting to the same session and its wire format are. kazoo's exceptions
become ours here.
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
from multilock_zookeeper.sessions import PERIODS, Session
from multilock_zookeeper.wire import (
    Handler,
    dial,
    drop_what_is_not_understood,
    hung_up,
    log,
    open_second_session,
    remember_greetings,
)

__all__ = ["TLS_OPTIONS", "Answer", "Ensemble", "Listener", "NodeExists", "NodeMissing", "Transport"]

PERSISTENT, EPHEMERAL_SEQUENTIAL, CONTAINER = 0, 3, 4
ANY_VERSION = -1
NO_LEASES = b"0"  # data of a parent: kazoo's Semaphore, which does not see who else is there, keeps off by it
SILENT_AFTER = 5.0  # seconds, or one renewal period if that is less: then the connection is given up for another
STOPPED = 0.05  # seconds; who wakes up that much too late did not run
CLOSE_WITHIN = 1.0  # seconds for the farewell; a session that is not closed ends by itself
DIAL_SHARE = 1 / 3  # of the session timeout, for all hosts: kazoo would give one dead host all of it
RECONNECT = {"max_tries": -1, "delay": 0.01, "backoff": 2, "max_delay": 1.0}

TLS_OPTIONS = ("use_ssl", "ca", "certfile", "keyfile", "keyfile_password", "verify_certs", "check_hostname")
_NOT_EXECUTED = (foreign.SessionExpiredError, foreign.ThrottledOpError)  # … or in a session whose nodes are gone
# The leader decides these in the order of all writes, so that each of them proves the session as a write does.
_ORDERED_REFUSALS = (foreign.NoAuthError, foreign.QuotaExceededError)
_REFUSED: Mapping[type[Exception], str] = {
    foreign.NoAuthError: "give username= and password= of who may use these nodes",
    foreign.AuthFailedError: "see username=, password= and the server's authentication",
    foreign.InvalidACLError: "the server knows no such identity",
    foreign.BadArgumentsError: "see prefix=: a node's name has a character that ZooKeeper forbids",
    foreign.UnimplementedError: "ZooKeeper 3.5 or later is needed",
    foreign.NoChildrenForEphemeralsError: "see prefix=: a node above is ephemeral",
    foreign.QuotaExceededError: "the quota of a node above is used up: raise it, or see prefix=",
}


class NodeMissing(Exception):
    """The node, or its parent, is not there; nothing was done."""


class NodeExists(Exception):
    """There is a node of that name; nothing was done."""


class _CreateContainer(Create2):  # type: ignore[misc]
    """A parent that the server removes once it has been used and is empty. kazoo has no such request."""

    type = 19


class Answer:
    """Where kazoo's connection thread puts the answer to one request."""

    __slots__ = ("_pending", "error", "sent_at", "value")

    def __init__(self, sent_at: float) -> None:
        self.sent_at = sent_at  # not later than its bytes left
        self.value: Any = None
        self.error: Exception | None = None
        self._pending = system.Lock()
        self._pending.acquire()

    def set(self, value: object = None) -> None:
        self.value = value
        self._answered()

    def set_exception(self, error: Exception) -> None:
        self.error = error
        self._answered()

    def wait(self, within: float) -> bool:
        return self._pending.acquire(timeout=max(within, 0.0))

    def _answered(self) -> None:
        with contextlib.suppress(RuntimeError):  # kazoo may report a closed connection twice
            self._pending.release()


class Listener(Protocol):
    """What happens to the session. Returns at once and sends nothing: kazoo's connection thread calls it."""

    def began(self, session: Session) -> None: ...
    def shortened(self, session: Session) -> None: ...
    def suspended(self, session: Session) -> None: ...
    def resumed(self, session: Session) -> None: ...
    def ended(self, session: Session) -> None: ...


@dataclass(frozen=True, slots=True, repr=False)
class Ensemble:
    """Where ZooKeeper is, who we are, and the session timeout we ask for in seconds; or a client handed over."""

    hosts: str
    chroot: str
    ttl: float
    auth: Sequence[tuple[str, str]] = ()
    tls: Mapping[str, Any] = field(default_factory=dict)
    client: Any = None
    pid: int = field(default_factory=os.getpid)

    @property
    def name(self) -> str:
        return f"zookeeper {self.hosts}{self.chroot}"

    @property
    def acl(self) -> Sequence[Any]:
        """Who has a password is the only one to write what he made; to read it, as waiting does, is everybody's."""
        acl: Sequence[Any] = CREATOR_ALL_ACL + READ_ACL_UNSAFE if self.auth else OPEN_ACL_UNSAFE
        return acl


class Transport:
    """One client's connection, and the session that lives on it."""

    def __init__(self, ensemble: Ensemble, now: Callable[[], float], listener: Listener) -> None:
        self._ensemble = ensemble
        self._now = now
        self._listener = listener
        self._ours = ensemble.client is None or ensemble.pid != os.getpid()
        self._client: Any = None
        self._handler: Handler | None = None
        self._up = system.Event()
        self._starting = system.Lock()
        self._changing = system.Lock()  # of the session; held for moments only, also by kazoo's connection thread
        self._asking = system.Lock()
        self._session: Session | None = None
        self._id: int | None = None
        self._granted = math.inf  # the least timeout that any handshake gave to the present id
        self._touched_at = -1e9  # when the leader heard of the session at the latest, by its handshake
        self._started = False
        self._adopted = False  # the session was there before us
        self._closed = False

    @property
    def name(self) -> str:
        return self._ensemble.name

    @property
    def asked(self) -> float:
        """Seconds of session timeout that are asked for: whole milliseconds."""
        return math.ceil(round(self._ensemble.ttl * 1000, 3)) / 1000

    # ---- the session

    def session(self, deadline: float) -> Session:
        """The present one; made where there is none."""
        session = self._session
        if session and self._up.is_set():
            return session
        self.connect(deadline)
        if not self._asking.acquire(timeout=max(deadline - self._now(), 0.0)):
            raise BackendUnavailable(f"{self.name}: no session yet", unknown=False)
        try:
            return self._session or self._begin(deadline)
        finally:
            self._asking.release()

    def _begin(self, deadline: float) -> Session:
        number = self._id
        granted = self._granted if self._granted < math.inf else self._ask_timeout(deadline)
        with self._changing:
            if number is None or number != self._id:
                raise BackendUnavailable(f"{self.name}: the session ended while it began", unknown=False)
            granted = min(granted, self._granted)  # it was connected anew meanwhile
            # kazoo sends something every third of the timeout. What it sent last arrived before what we send now.
            touched_at = self._touched_at - (granted / 3 if self._adopted else 0.0)
            session = Session(number, granted, touched_at)
            # First: a grant in a session that is cut just then must find that the kernel knows of the cut.
            self._listener.began(session)
            self._session = session
        return session

    @property
    def connected(self) -> bool:
        return self._up.is_set()

    def present(self) -> Session | None:
        """The session that has not ended as far as we know."""
        return self._session

    def is_present(self, number: object) -> bool:
        session = self._session
        return session is not None and session.number == number

    def connect(self, deadline: float) -> None:
        """Wait for the connection. Nothing is queued without one, so nothing is executed long after it was asked."""
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
            raise BackendRejected(f"{self.name}: TLS failed ({error}): see ca=, cert= and key=") from error
        if self._client.client_state == KeeperState.AUTH_FAILED:
            raise BackendRejected(f"{self.name}: authentication failed: see username= and password=")
        raise BackendUnavailable(f"{self.name}: no connection ({error or 'no answer'})", unknown=False) from error

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
        """kazoo's connection thread ends at a failed authentication. Its state tells less: CLOSED is what it was before
        that thread began, too. Whether a client handed over is started again is its owner's affair."""
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
            timeout=self.asked + 0.0001,  # it cuts milliseconds off
            handler=self._handler,
            auth_data=list(ensemble.auth),
            connection_retry=RECONNECT,
            logger=log,
            **ensemble.tls,
        )

    def _is_over(self, turned_away_at: float) -> bool:
        """Whether the session is to be given up: it had no connection, and was turned away, for all of its timeout.

        Its leases are lost by then: they end two thirds of the timeout after the last acknowledged write, sent
        before the connection broke. It is given up whole, with its id: a server that shows us an older past may have
        the session in it, with nodes that we have released since and that would live on if we took it up again. The new
        session begins with a write, so what it reads is not older than that, and every node is made anew in it.

        The time runs from when we were turned away, not from when the connection broke, since a server that starts
        counts every session anew, and also turns everybody away until it has read its data.
        """
        session = self._session
        ttl = session.ttl if session else self.asked  # without one nothing was ever made in it
        since = max(turned_away_at, self._touched_at)
        return self._id is not None and not self._up.is_set() and self._now() - since > ttl

    def _heard(self, state: str) -> None:
        """kazoo's connection thread tells its state."""
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
        """On kazoo's connection thread: nothing has been sent on this connection yet, and nothing is before the return.

        So no acknowledged write counts for longer than the server grants now. A greater timeout than before counts for
        nothing: the leader may yet be told of the lesser one, by the server that we come from.
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
        """The session timeout that this server gives to who asks for ours, where kazoo had connected before we came.

        Learnt from a second session that is closed at once.
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
        """Another connection to the server that we are connected to."""
        client = self._client
        present = client._connection._socket
        if present is None:
            raise ConnectionError("the connection broke")
        peer = present.getpeername()[:2]
        options = {name: getattr(client, name) for name in TLS_OPTIONS}
        return dial(peer, within, {**options, "check_hostname": False})  # that was done by the connection we follow

    def command(self, word: bytes, deadline: float) -> str:
        """What the server says to one of its four-letter words."""
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
        """Raises TimeoutError if nothing is left: a socket would take 0 for no limit at all."""
        if (left := deadline - self._now()) <= 0:
            raise TimeoutError("no time is left")
        return left

    # ---- requests

    def create(self, path: str, value: bytes, flags: int) -> Answer:
        return self._send(Create2(self._full(path), value, self._ensemble.acl, flags))

    def _create_parent(self, path: str, *, container: bool) -> Answer:
        """``path`` with the chroot, which may be missing as well."""
        if container:
            return self._send(_CreateContainer(path, NO_LEASES, self._ensemble.acl, CONTAINER))
        return self._send(Create2(path, b"", self._ensemble.acl, PERSISTENT))

    def delete(self, path: str) -> Answer:
        return self._send(Delete(self._full(path), ANY_VERSION))

    def put(self, path: str, value: bytes) -> Answer:
        return self._send(SetData(self._full(path), value, ANY_VERSION))

    def get(self, path: str) -> Answer:
        return self._send(GetData(self._full(path), None))

    def exists(self, path: str, watch: Callable[[Any], None] | None = None) -> Answer:
        return self._send(Exists(self._full(path), watch))

    def children(self, path: str, watch: Callable[[Any], None] | None = None) -> Answer:
        return self._send(GetChildren(self._full(path), watch))

    def sync(self, path: str) -> Answer:
        return self._send(Sync(self._full(path)))

    def ensemble_config(self) -> Answer:
        """Who its servers are; outside of any chroot."""
        return self._send(GetData("/zookeeper/config", None))

    def wait(self, answer: Answer, deadline: float) -> Any:
        """Its value. Raises also `NodeMissing` and `NodeExists`."""
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
        raise BackendUnavailable(what, unknown=not isinstance(error, _NOT_EXECUTED)) from error

    def ordered(self, answer: Answer, deadline: float) -> bool:
        """Wait until the leader has put this write of ours into the order of all writes: then it knew the session.

        Returns False if the node is missing. A node that we may not write, or not now, is there.
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
        """The children that were asked for; None: not even their parent is there."""
        try:
            children: Sequence[str] = self.wait(answer, deadline)
        except NodeMissing:
            return None
        return children

    def deleted(self, path: str, deadline: float) -> bool:
        """Delete this node. False: it was not there."""
        try:
            self.wait(self.delete(path), deadline)
        except NodeMissing:
            return False
        return True

    def make_parents(self, parent: str, deadline: float) -> None:
        """The directories stay; the parent of the contenders is a container, which the server removes when it has been
        empty for a while."""
        parts = self._full(parent).strip("/").split("/")
        paths = ["/" + "/".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
        answers = [self._create_parent(path, container=path == paths[-1]) for path in paths]
        for path, answer in zip(paths, answers, strict=True):
            try:
                self.wait(answer, deadline)
            except NodeExists:
                continue
            except BackendRejected:
                if path == paths[-1]:  # above we may not write, and need not: what matters is the last one
                    raise
            except NodeMissing:
                raise BackendRejected(f"{path} cannot be created: make its parents, or see prefix=") from None

    def _came_while_stopped(self, answer: Answer, deadline: float) -> bool:
        """This process did not run for a while: kazoo's thread is to read first what had come by then."""
        return self._now() - deadline > STOPPED and answer.wait(STOPPED)

    def stripped(self, path: str) -> str:
        """Without the chroot."""
        return str(self._client.unchroot(path))

    def _full(self, path: str) -> str:
        """With the chroot."""
        chroot: str = self._client.chroot
        return (chroot + path if path != "/" else chroot) if chroot else path

    def _send(self, request: Any) -> Answer:
        answer = Answer(self._now())
        self._client._call(request, answer)
        return answer

    def _silent(self, answer: Answer) -> None:
        """Give the connection up if it had time enough to answer: kazoo does not while it has something to send."""
        session = self._session
        patience = min(SILENT_AFTER, session.renew_every if session else self.asked / PERIODS) * 0.9
        if self._up.is_set() and self._now() - answer.sent_at >= patience and answer.sent_at >= self._touched_at:
            self.drop()

    def drop(self) -> None:
        """End the connection, not the session: kazoo opens another one."""
        with contextlib.suppress(OSError, AttributeError):
            self._client._connection._socket.shutdown(2)

    # ---- the end

    def forget(self) -> Any:
        """In a forked child: the parent's client is never used again, nor ended, not even by being forgotten."""
        return self._client

    def close(self) -> None:
        """Close the session, without waiting for a server that does not answer. A client handed over stays."""
        with self._starting:
            if self._closed:
                return
            self._closed = True
            client = self._client
        if client is None:
            return
        client.remove_listener(self._heard)
        if self._handler and (loop := self._handler.loop):
            # As KazooClient.stop() does, which waits without a limit. The thread of the connection ends by itself.
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
