"""What the suite must know about a backend to test it, and how it hurts it.

A `Place` is one backend under test: `FaultyBackend` puts faults between the kernel and any backend; a place with better
means (a real server to stop, a proxy) overrides them.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, ClassVar, Literal, Protocol, TypeVar

from multilock import Client
from multilock.backend import Backend, Held, Notices
from multilock.errors import BackendUnavailable
from multilock.model import Busy, Capabilities, Claim, Finding, Granted, LockInfo
from multilock.registry import open_backend
from multilock.testing.conformance.faces import Face

__all__ = ["Call", "Faults", "FaultyBackend", "Mishap", "Place"]

Call = Literal["attempt", "renew", "release"]

T = TypeVar("T")
LATE_WITHIN = 30.0  # seconds a request that is held back waits for its release


class Mishap(Protocol):
    """One request that is to go wrong."""

    def wait(self, within: float) -> None:
        """Until it happened; TimeoutError after ``within`` seconds."""

    def release(self) -> None:
        """A request held back reaches the backend now."""


class Place:
    """One backend under test, fresh for each test. Subclass it and say at least `url` and `delete`.

    Everything a test takes is below `prefix`, which no other test uses.
    """

    scheme: ClassVar[str]
    quick_ttl: float = 0.6  #: seconds; the shortest ttl whose timing a busy machine still keeps

    def __init__(self) -> None:
        self.prefix = f"conformance-{uuid.uuid4().hex[:12]}/"
        self.faults = Faults()

    @property
    def url(self) -> str:
        """Where it is, for clients that faults concern."""
        raise NotImplementedError

    @property
    def clean_url(self) -> str:
        """Where it is for bystanders, whom no fault concerns."""
        return self.url

    @property
    def process_url(self) -> str | None:
        """Where another process finds it; None for one that lives in this process alone."""
        return self.clean_url

    def delete(self, name: str) -> None:
        """Take the lock's key away behind everybody's back, by means other than multilock's."""
        raise NotImplementedError

    def leftovers(self) -> list[str]:
        """What of this test is still stored and has no end of its own."""
        raise NotImplementedError

    def connect(self, face: Face, **options: Any) -> Client:
        """A client whose requests can go wrong."""
        return face.client(FaultyBackend(self._open(self.url, options), self.faults), **_for_client(options))

    def bystander(self, face: Face, **options: Any) -> Client:
        """A client of the same locks that no fault concerns."""
        return face.client(self._open(self.clean_url, options), **_for_client(options))

    def backend(self, **options: Any) -> Backend:
        """The backend itself, for tests of the SPI."""
        return self._open(self.clean_url, options)

    def drop_reply(self, call: Call) -> Mishap:
        """The next such request is executed, and its answer never comes."""
        return self.faults.plan(call, late=False)

    def hold_request(self, call: Call) -> Mishap:
        """The next such request is not answered in time, and is executed when the test releases it."""
        return self.faults.plan(call, late=True)

    @contextlib.contextmanager
    def silence(self) -> Iterator[None]:
        """Nobody answers inside this block (bystanders excepted)."""
        self.faults.silent.set()
        try:
            yield
        finally:
            self.faults.silent.clear()

    @contextlib.contextmanager
    def down(self) -> Iterator[None]:
        """The server is down inside this block: every request fails at once (bystanders' excepted)."""
        self.faults.down.set()
        try:
            yield
        finally:
            self.faults.down.clear()

    def close(self) -> None:
        """Whatever the test left is no concern of the next."""

    def _open(self, url: str, options: dict[str, Any]) -> Backend:
        ttl = options.get("ttl", 10.0)
        shared = {"ttl": ttl, "prefix": self.prefix, "identity": "conformance", "request_timeout": None}
        return open_backend(url.partition(":")[0], url, shared)


def _for_client(options: dict[str, Any]) -> dict[str, Any]:
    return {"ttl": 10.0, **options}


class Faults:
    """What goes wrong between the clients of one place and their backend."""

    def __init__(self) -> None:
        self.silent = threading.Event()
        self.down = threading.Event()
        self._planned: list[_Planned] = []
        self._lock = threading.Lock()

    def plan(self, call: Call, *, late: bool) -> Mishap:
        planned = _Planned(call, late)
        with self._lock:
            self._planned.append(planned)
        return planned

    def take(self, call: str) -> _Planned | None:
        with self._lock:
            found = next((planned for planned in self._planned if planned.call == call), None)
            if found:
                self._planned.remove(found)
            return found


class _Planned:
    def __init__(self, call: str, late: bool) -> None:
        self.call = call
        self.late = late
        self.happened = threading.Event()
        self.released = threading.Event()

    def wait(self, within: float) -> None:
        if not self.happened.wait(within):
            raise TimeoutError(f"no {self.call} went wrong within {within:g} s")

    def release(self) -> None:
        self.released.set()


class FaultyBackend:
    """A backend in front of another one, whose requests go wrong when a test says so."""

    def __init__(self, inner: Backend, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults

    @property
    def scheme(self) -> str:
        return self._inner.scheme

    @property
    def capabilities(self) -> Capabilities:
        return self._inner.capabilities

    def open(self, notices: Notices) -> None:
        self._inner.open(notices)

    def attempt(self, claim: Claim, join: bool, within: float) -> Granted | Busy:
        return self._ask("attempt", within, lambda: self._inner.attempt(claim, join, within))

    def release(self, claim: Claim, granted: Granted | None, unsure: bool, within: float) -> bool:
        return self._ask("release", within, lambda: self._inner.release(claim, granted, unsure, within))

    def renew(self, group: Hashable, held: Sequence[Held], within: float) -> Sequence[Granted | None]:
        return self._ask("renew", within, lambda: self._inner.renew(group, held, within))

    def watch(self, group: Hashable, held: Sequence[Held], within: float) -> None:
        self._ask("watch", within, lambda: self._inner.watch(group, held, within))

    def follow(self, names: frozenset[str], within: float) -> bool:
        return self._ask("follow", within, lambda: self._inner.follow(names, within))

    def inspect(self, name: str, within: float) -> LockInfo | None:
        return self._ask("inspect", within, lambda: self._inner.inspect(name, within))

    def inspect_all(self, prefix: str, within: float) -> Iterator[LockInfo]:
        return self._ask("inspect_all", within, lambda: self._inner.inspect_all(prefix, within))

    def force_release(self, name: str, within: float) -> bool:
        return self._ask("force_release", within, lambda: self._inner.force_release(name, within))

    def diagnose(self, within: float) -> list[Finding]:
        return self._ask("diagnose", within, lambda: self._inner.diagnose(within))

    def ping(self, within: float) -> None:
        self._ask("ping", within, lambda: self._inner.ping(within))

    def close(self) -> None:
        self._inner.close()

    def _ask(self, call: str, within: float, request: Callable[[], T]) -> T:
        faults = self._faults
        if faults.down.is_set():
            raise BackendUnavailable("the test took the server down", unknown=False)
        if faults.silent.is_set():
            threading.Event().wait(within)
            raise BackendUnavailable(f"the test keeps the server silent: no answer in {within:g} s")
        if planned := faults.take(call):
            self._go_wrong(planned, within, request)
        return request()

    def _go_wrong(self, planned: _Planned, within: float, request: Callable[[], object]) -> None:
        if planned.late:
            threading.Thread(target=self._late, args=(planned, request), name="late-request", daemon=True).start()
            threading.Event().wait(within)
        else:
            request()
            planned.happened.set()
        raise BackendUnavailable("the test swallowed the answer")

    def _late(self, planned: _Planned, request: Callable[[], object]) -> None:
        planned.happened.set()
        if planned.released.wait(LATE_WITHIN):
            request()
