"""Adapters give every compared lock the same interface. The blocking and the asyncio API of multilock have adapters
like any other lock.

An adapter has a name of the form ``package.module:Name``, and must be importable in a fresh process::

    class Theirs:
        @staticmethod
        def open(url: str, ttl: float) -> AdapterClient: ...

Only one thread at a time calls these methods, except `AdapterHolding.believes`.
"""

from __future__ import annotations

import asyncio
import importlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

import multilock
from multilock import ConfigurationError
from multilock.backend import Backend

__all__ = [
    "ASYNCIO",
    "BLOCKING",
    "Adapter",
    "AdapterClient",
    "AdapterHolding",
    "AdapterLock",
    "Asyncio",
    "Blocking",
    "close_kazoo",
    "load",
]

BLOCKING = "multilock.testing.compare.contestants:Blocking"
ASYNCIO = "multilock.testing.compare.contestants:Asyncio"
OUTAGE = 15.0  # seconds without a reply after which a waiting client gives up; a restarted server is back sooner
ANSWER_WITHIN = 60.0  # seconds within which an asyncio client must answer; a scenario may block its loop for a while

T = TypeVar("T")


class AdapterHolding(Protocol):
    """A lock that was acquired.

    Optional members: ``on_lost(callback)`` arranges that ``callback()`` is called once the lock is lost. ``ttl`` is the
    granted ttl in seconds. ``remaining()`` returns the seconds for which the lock stays valid without a further reply.
    """

    @property
    def token(self) -> int | None:
        """The fencing token, which is greater for every later holder. None if the lock has no tokens."""

    def believes(self) -> bool:
        """Return whether the lock is held: the check that a user of the lock would make before acting."""

    def release(self) -> object:
        """Release the lock. False or an exception means that the lock was lost before."""


class AdapterLock(Protocol):
    """A lock with a name, made by a client."""

    def acquire(self, timeout: float) -> AdapterHolding | None:
        """Wait for the lock for ``timeout`` seconds. Returns None if another holder still has it."""


class AdapterClient(Protocol):
    """A client.

    Optional members: ``ping()`` makes one round trip. ``on_loop(call)`` runs ``call()`` on the event loop of the
    client, like user code that blocks the loop. ``end_session()`` asks the server to end the session of the newest
    acquired lock, as an operator would, and returns True if there was a session.
    """

    def lock(self, name: str) -> AdapterLock:
        """Return the lock of this name."""

    def close(self) -> object:
        """Close the client."""


class Adapter(Protocol):
    """The way to use one kind of lock: ``open`` returns a client.

    Optional members: ``loop`` is True if the clients have ``on_loop``. ``control`` names the scenarios in which the
    lock must fail, or the report is void. ``bound(url, ttl)`` returns the seconds until another client can get the lock
    of a holder that vanished. ``take(url, name)`` takes the lock away, as an operator would, and returns True if the
    lock had a holder. ``has_sessions(url)`` returns True if the clients have ``end_session``. ``sweep(url, begin)``
    removes everything whose name begins with ``begin``, and returns the names that it could not remove.
    """

    def open(self, url: str, ttl: float) -> AdapterClient:
        """Return a client of this URL."""


def load(path: str) -> Adapter:
    """Return the adapter ``package.module:Name``. Raises ConfigurationError if it cannot be used."""
    module, colon, name = path.partition(":")
    if not (module and colon and name):
        raise ConfigurationError(f"an adapter is written package.module:Name, not {path!r}")
    try:
        adapter: Adapter = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"the adapter {path!r} needs the module {error.name!r}, which is missing") from error
    except AttributeError:
        raise ConfigurationError(f"the module {module!r} has no adapter {name!r}") from None
    except Exception as error:  # the module belongs to the user
        raise ConfigurationError(f"the adapter {path!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(getattr(adapter, "open", None)):
        raise ConfigurationError(f"the adapter {path!r} must have a function open(url, ttl)")
    return adapter


class _Ours:
    """The common part of the adapters for the blocking and the asyncio API of multilock."""

    @staticmethod
    def bound(url: str, ttl: float) -> float:
        """Return the seconds until another client can get the lock of a holder that vanished."""
        with multilock.connect(url, ttl=ttl) as client:
            return client.capabilities.takeover_bound

    @staticmethod
    def take(url: str, name: str) -> bool:
        """Take the lock away, as an operator would."""
        with multilock.connect(url) as client:
            return client.force_release(name)

    @staticmethod
    def has_sessions(url: str) -> bool:
        """Return whether locks of this backend live in sessions."""
        return url.partition(":")[0] in HAVE_SESSIONS


class Blocking(_Ours):
    """The adapter of multilock's blocking API."""

    @staticmethod
    def open(url: str, ttl: float) -> AdapterClient:
        """Return a blocking client."""
        return _Client(multilock.connect(url, ttl=ttl, outage_timeout=OUTAGE))


class _Client:
    def __init__(self, client: multilock.Client) -> None:
        self._client = client
        self.newest: multilock.Lease | None = None

    def lock(self, name: str) -> AdapterLock:
        return _Lock(self, self._client.lock(name))

    def end_session(self) -> bool:
        return _end_session_of(self._client, self.newest)

    def ping(self) -> object:
        return self._client.ping()

    def close(self) -> None:
        self._client.close()


def _end_session_of(client: multilock.Client | multilock.AsyncClient, lease: Any) -> bool:
    return lease is not None and _end_session(client._kernel.backend, lease.granted.group)


class _Lock:
    def __init__(self, client: _Client, lock: multilock.DistributedLock) -> None:
        self._client, self._lock = client, lock

    def acquire(self, timeout: float) -> AdapterHolding | None:
        lease = self._client.newest = self._lock.try_acquire(timeout)
        return None if lease is None else _Lease(lease)


class _Lease:
    def __init__(self, lease: multilock.Lease) -> None:
        self.lease = lease
        self.token = lease.token
        self.ttl = lease.ttl

    def believes(self) -> bool:
        return self.lease.is_held()

    def remaining(self) -> float:
        return self.lease.remaining()

    def on_lost(self, callback: Callable[[], object]) -> None:
        self.lease.on_lost(lambda _: callback())

    def release(self) -> object:
        return self.lease.release()


class Asyncio(_Ours):
    """The adapter of multilock's asyncio API. Each client has its own event loop."""

    loop = True

    @staticmethod
    def open(url: str, ttl: float) -> AdapterClient:
        """Return a client with blocking methods, which run on an event loop in another thread."""
        return _AsyncClient(url, ttl)


class _AsyncClient:
    def __init__(self, url: str, ttl: float) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="compare-loop", daemon=True)
        self._thread.start()
        self._client = multilock.connect_async(url, ttl=ttl, outage_timeout=OUTAGE)
        self.newest: multilock.AsyncLease | None = None

    def lock(self, name: str) -> AdapterLock:
        return _AsyncLock(self, self._client.lock(name, cancel_on_lost=False))

    def ping(self) -> object:
        return self.run(self._client.ping())

    def end_session(self) -> bool:
        return _end_session_of(self._client, self.newest)

    def on_loop(self, call: Callable[[], object]) -> None:
        self.loop.call_soon_threadsafe(call)

    def close(self) -> None:
        self.run(self._client.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def run(self, coroutine: Coroutine[Any, Any, T], beyond: float = 0.0) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(ANSWER_WITHIN + beyond)


class _AsyncLock:
    def __init__(self, client: _AsyncClient, lock: multilock.AsyncDistributedLock) -> None:
        self._client, self._lock = client, lock

    def acquire(self, timeout: float) -> AdapterHolding | None:
        lease = self._client.newest = self._client.run(self._lock.try_acquire(timeout), timeout)
        return None if lease is None else _AsyncLease(self._client, lease)


class _AsyncLease:
    def __init__(self, client: _AsyncClient, lease: multilock.AsyncLease) -> None:
        self._client, self._lease = client, lease
        self.token = lease.token
        self.ttl = lease.ttl

    def believes(self) -> bool:
        return self._lease.is_held()

    def remaining(self) -> float:
        return self._lease.remaining()

    def on_lost(self, callback: Callable[[], object]) -> None:
        self._client.loop.call_soon_threadsafe(self._lease.on_lost, lambda _: callback())

    def release(self) -> object:
        return self._client.run(self._lease.release())


# ---- ending a session of Consul or ZooKeeper, or a lease of etcd, as an operator would
#
# The request does not go through the client that holds the lock. So the holder learns of the end only from the server.

HAVE_SESSIONS = frozenset({"consul", "consuls", "etcd", "etcds", "zookeeper", "zk"})
"""The schemes of backends with sessions."""

WITHIN = 5.0
TRIES = 8


def _end_session(backend: Backend, session: Any) -> bool:
    """End a session. ``session`` is the `Granted.group` of a lock. Returns False if the session did not exist."""
    its: Any = backend
    match backend.scheme:
        case "consul" | "consuls":
            agents = its._agents
            answer, _ = agents.call("PUT", agents.target(f"/v1/session/destroy/{session}"), WITHIN)
            return bool(answer.json())
        case "etcd":
            from multilock_etcd.transport import LeaseMissing, calls
            from multilock_etcd.wire import LeaseRevokeRequest

            try:
                its._requests.call(calls.REVOKE, LeaseRevokeRequest(ID=session), WITHIN)
            except LeaseMissing:
                return False
            return True
        case "zookeeper":
            return close_kazoo(its._transport._client, its._ensemble.tls)
    return False


def close_kazoo(client: Any, tls: Any = None) -> bool:
    """End the session of this KazooClient at the server. Only the server notifies the client.

    Another connection takes over the session and closes it. On a busy machine the client may reconnect to its session
    first. So this function tries to take the session over once more: if the server opens a new session instead, the old
    one has ended.
    """
    if (its := client.client_id) is None:
        return False
    hosts = ",".join(f"{host}:{port}" for host, port in client.hosts)
    timeout = client._session_timeout / 1000
    for tried in range(TRIES):
        number = _close(hosts, its, timeout, tls or {})
        if number is not None and number != its[0]:
            return tried > 0  # a new number at the first try means that the session had ended before
    return False


def _close(hosts: str, its: tuple[int, bytes], timeout: float, tls: Any) -> int | None:
    """Take over the session ``its``, close it, and return its number. If ``its`` no longer exists, the server opens a
    new session, whose number is returned."""
    from kazoo.client import KazooClient

    other = KazooClient(hosts, client_id=its, timeout=timeout, **tls)
    other.start(WITHIN)
    try:
        return None if other.client_id is None else int(other.client_id[0])
    finally:
        other.stop()
        other.close()
