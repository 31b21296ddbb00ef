"""What can be compared: anything that locks, behind a small adapter. Ours, of both faces, are adapters like any other.

An adapter is named as ``package.module:Name`` and must be importable in a fresh process::

    class Theirs:
        @staticmethod
        def open(url: str, ttl: float) -> Place: ...

Nothing here is asked by more than one thread at a time, but for `Holding.believes`.
"""

from __future__ import annotations

import asyncio
import importlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

import multilock
from multilock import ConfigurationError
from multilock.testing.compare.sessions import HAVE_SESSIONS, end_session

__all__ = ["ASYNCIO", "BLOCKING", "Adapter", "Asyncio", "Blocking", "Holding", "Lock", "Place", "load"]

BLOCKING = "multilock.testing.compare.contestants:Blocking"
ASYNCIO = "multilock.testing.compare.contestants:Asyncio"
OUTAGE = 15.0  # seconds of silence that a wait outlasts; a server is started again in less
ANSWER_WITHIN = 60.0  # seconds for the loop of an asyncio client; a scenario may block it for a while

T = TypeVar("T")


class Holding(Protocol):
    """A lock that was acquired.

    It may have ``on_lost(callback)``, which calls ``callback()`` once the holding is lost; ``ttl``, the seconds that
    were granted; and ``remaining()``, the seconds for which it is valid if nothing is heard any more.
    """

    @property
    def token(self) -> int | None:
        """Greater for every later holder; None where the lock gives none."""

    def believes(self) -> bool:
        """What a user of it would look at before he acts on it."""

    def release(self) -> object:
        """Give it back. False, or an exception: it was not ours any more."""


class Lock(Protocol):
    """A name in a place."""

    def acquire(self, timeout: float) -> Holding | None:
        """Wait for it for so many seconds; None: somebody else has it."""


class Place(Protocol):
    """A client.

    It may have ``ping()``, one round trip; ``on_loop(call)``, which runs ``call()`` on its event loop, as a user's code
    that waits where it must not; and ``end_session()``, which asks the server, as an operator does, to end the session
    that the newest holding lives in: True if there was one.
    """

    def lock(self, name: str) -> Lock: ...

    def close(self) -> object: ...


class Adapter(Protocol):
    """How to open a place.

    It may have ``loop`` (True: its places have ``on_loop``); ``control``, the scenarios in which it must fail, or the
    report is void; ``bound(url, ttl)``, the seconds until another can have the lock of a holder that has gone;
    ``take(url, name)``: an operator takes the lock away, True if somebody had it; ``has_sessions(url)``, True if its
    places have ``end_session``; and ``sweep(url, begin)``, which removes all that there still is of names that begin
    so, and returns the names of what it could not remove.
    """

    def open(self, url: str, ttl: float) -> Place: ...


def load(path: str) -> Adapter:
    """The adapter that is called ``package.module:Name``; ConfigurationError where there is none."""
    module, colon, name = path.partition(":")
    if not (module and colon and name):
        raise ConfigurationError(f"an adapter is named package.module:Name, not {path!r}")
    try:
        adapter: Adapter = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"the adapter {path!r} needs the module {error.name!r}, which is missing") from error
    except AttributeError:
        raise ConfigurationError(f"the module {module!r} has no adapter {name!r}") from None
    except Exception as error:  # of somebody else's module
        raise ConfigurationError(f"the adapter {path!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(getattr(adapter, "open", None)):
        raise ConfigurationError(f"the adapter {path!r} has no open(url, ttl)")
    return adapter


class _Ours:
    """What both faces of multilock have."""

    @staticmethod
    def bound(url: str, ttl: float) -> float:
        with multilock.connect(url, ttl=ttl) as client:
            return client.capabilities.takeover_bound

    @staticmethod
    def take(url: str, name: str) -> bool:
        with multilock.connect(url) as client:
            return client.force_release(name)

    @staticmethod
    def has_sessions(url: str) -> bool:
        return url.partition(":")[0] in HAVE_SESSIONS


class Blocking(_Ours):
    """multilock's blocking face."""

    @staticmethod
    def open(url: str, ttl: float) -> Place:
        return _Client(multilock.connect(url, ttl=ttl, outage_timeout=OUTAGE))


class _Client:
    def __init__(self, client: multilock.Client) -> None:
        self._client = client
        self.newest: multilock.Lease | None = None

    def lock(self, name: str) -> Lock:
        return _Lock(self, self._client.lock(name))

    def end_session(self) -> bool:
        return _end_session_of(self._client, self.newest)

    def ping(self) -> object:
        return self._client.ping()

    def close(self) -> None:
        self._client.close()


def _end_session_of(client: multilock.Client | multilock.AsyncClient, lease: Any) -> bool:
    return lease is not None and end_session(client._kernel.backend, lease._granted.group)


class _Lock:
    def __init__(self, client: _Client, lock: multilock.DistributedLock) -> None:
        self._client, self._lock = client, lock

    def acquire(self, timeout: float) -> Holding | None:
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
    """multilock's asyncio face, each client on a loop of its own."""

    loop = True

    @staticmethod
    def open(url: str, ttl: float) -> Place:
        return _AsyncClient(url, ttl)


class _AsyncClient:
    def __init__(self, url: str, ttl: float) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="compare-loop", daemon=True)
        self._thread.start()
        self._client = multilock.connect_async(url, ttl=ttl, outage_timeout=OUTAGE)
        self.newest: multilock.AsyncLease | None = None

    def lock(self, name: str) -> Lock:
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

    def acquire(self, timeout: float) -> Holding | None:
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
