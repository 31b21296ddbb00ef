"""The suite's access to a backend under test, and the faults that the suite causes.

A `Place` is one backend under test. By default it causes faults with a `FaultyBackend`, which stands between the kernel
and the backend. A place that has a real server to stop, or a proxy, overrides the methods that cause faults.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, ClassVar, Literal, Protocol, TypeVar, cast

from multilock import Client
from multilock.backend import Backend, Held, Notices, Rests
from multilock.errors import BackendUnavailable
from multilock.kernel.runtime import now
from multilock.model import Busy, Capabilities, Claim, Finding, Granted, LockInfo, Returned
from multilock.registry import open_backend
from multilock.testing.conformance.faces import Face

__all__ = ["Call", "Faults", "FaultyBackend", "Mishap", "Place", "Stroke"]

Call = Literal["attempt", "renew", "release"]

T = TypeVar("T")
LATE_WITHIN = 30.0  # seconds for which a request that is held back waits for its release
DELIVERED_WITHIN = 5.0  # seconds for which a released request is tried before it is dropped


class Mishap(Protocol):
    """A fault of one request."""

    def wait(self, within: float) -> None:
        """Wait until the fault happened. Raises TimeoutError after ``within`` seconds."""

    def release(self) -> None:
        """Let a request that is held back reach the backend now."""


class Place:
    """One backend under test, new for each test. Subclass it and define at least `url` and `delete`.

    A place that can do more (read the server's data, stop it, lose its replies) should override more methods: then the
    tests check more. All names of a test are below `prefix`, which no other test uses.
    """

    #: A module that calls `register_backend`. The helper processes of ProcessConformance import it, since they start
    #: afresh. A backend with an entry point does not need it.
    registered_in: ClassVar[str | None] = None
    quick_ttl: float = 1.2  #: seconds; the shortest ttl whose timing is right even on a busy machine
    calm_ttl: float = 2.0  #: seconds; the shortest ttl whose last tenth gives the lost callback time to start

    rest: float = 1.0  #: seconds; the shortest rest (``hold_at_least``) that the server keeps
    rest_at_most: float = 1.0  #: seconds; the longest time for which the server may keep that rest

    #: The backend's own options for the clients of the suite.
    options: ClassVar[dict[str, object]] = {}

    def __init__(self) -> None:
        self.prefix = f"conformance-{uuid.uuid4().hex[:12]}/"
        self.faults = Faults()

    @property
    def url(self) -> str:
        """The URL for clients whose requests may be disturbed."""
        raise NotImplementedError

    @property
    def steady_ttl(self) -> float:
        """The ttl in seconds of a lease that must survive half a second in which the machine does not run."""
        return max(self.quick_ttl, self.calm_ttl)

    @property
    def clean_url(self) -> str:
        """The URL for clients whose requests are never disturbed."""
        return self.url

    def delete(self, name: str) -> None:
        """Remove the lock's key from the server without using multilock."""
        raise NotImplementedError

    def leftovers(self) -> list[str]:
        """Return the entries of this test at the server that do not end by themselves.

        The default asks the backend for held names. A place that reads the server directly can also return entries that
        the backend does not list, such as waiters.
        """
        with Client(self.backend()) as client:
            return [info.name for info in client.inspect_all()]

    def connect(self, face: Face, **options: Any) -> Client:
        """Return a client whose requests may be disturbed."""
        return face.client(FaultyBackend(self._open(self.url, options), self.faults), **_for_client(options))

    def bystander(self, face: Face, **options: Any) -> Client:
        """Return a client of the same locks whose requests are never disturbed."""
        return face.client(self._open(self.clean_url, options), **_for_client(options))

    def backend(self, **options: Any) -> Backend:
        """Return the backend itself, for tests of the SPI."""
        return self._open(self.clean_url, options)

    def drop_reply(self, call: Call) -> Mishap:
        """Let the next request of this kind be executed, but drop its reply."""
        return self.faults.plan(call, _Dropped())

    def delay_reply(self, call: Call) -> Mishap:
        """Let the next request of this kind be executed, but hold back its reply until the test releases it."""
        return self.faults.plan(call, _Delayed())

    def hold_request(self, call: Call) -> Mishap:
        """Hold the next request of this kind back. The request gets no reply in time, and is executed when the test
        releases it."""
        return self.faults.plan(call, _Held())

    def slow_request(self, call: Call, seconds: float) -> Mishap:
        """Delay the next request of this kind by ``seconds`` on its way to the backend. The request is then executed
        and gets its reply."""
        return self.faults.plan(call, _Slow(seconds))

    def slow_answers(self, seconds: float) -> contextlib.AbstractContextManager[Backend] | None:
        """Yield a backend whose replies come ``seconds`` late inside this context. Its requests are executed at once.

        This shows whether a backend reads ``Granted.sent_at`` only after it sent its request. The default returns None,
        which is right if replies cannot be late. With a server, use `multilock.testing.FaultProxy.delay`.
        """
        return None

    @contextlib.contextmanager
    def silence(self) -> Iterator[None]:
        """Leave requests without a reply inside this context, except those of undisturbed clients."""
        self.faults.silent.set()
        try:
            yield
        finally:
            self.faults.silent.clear()

    @contextlib.contextmanager
    def down(self) -> Iterator[None]:
        """Take the server down inside this context: requests fail at once, except those of undisturbed clients."""
        self.faults.down.set()
        try:
            yield
        finally:
            self.faults.down.clear()

    def close(self) -> None:
        """Remove everything that would disturb the next test."""

    def _open(self, url: str, options: dict[str, Any]) -> Backend:
        ttl = options.get("ttl", 10.0)
        shared = {"ttl": ttl, "prefix": self.prefix, "identity": "conformance", "request_timeout": None}
        return open_backend(url.partition(":")[0], url, {**shared, **self.options})


def _for_client(options: dict[str, Any]) -> dict[str, Any]:
    return {"ttl": 10.0, **options}


class Stroke(Mishap, Protocol):
    """The argument of `Faults.plan`: the way in which one request fails."""

    def strike(self, ids: Sequence[str], within: float, request: Callable[[], T]) -> T:
        """Run ``request()``, for the claims with these ids, with this fault."""


S = TypeVar("S", bound=Stroke)


class Faults:
    """The faults between the clients of one place and their backend."""

    def __init__(self) -> None:
        self.silent = threading.Event()
        self.down = threading.Event()
        self.answered: Counter[str] = Counter()  #: how many requests had a reply, by their kind
        self._planned: list[tuple[Call, Stroke]] = []
        self._lock = threading.Lock()

    def plan(self, call: Call, stroke: S) -> S:
        """Let the next request of this kind fail in this way."""
        with self._lock:
            self._planned.append((call, stroke))
        return stroke

    def take(self, call: str) -> Stroke | None:
        """Return the fault for a request of this kind, or None."""
        with self._lock:
            found = next((planned for planned in self._planned if planned[0] == call), None)
            if found is None:
                return None
            self._planned.remove(found)
            return found[1]


class _Dropped:
    """The request is executed, but its reply is dropped."""

    def __init__(self) -> None:
        self._happened = threading.Event()

    def strike(self, ids: Sequence[str], within: float, request: Callable[[], T]) -> T:
        request()
        self._happened.set()
        raise BackendUnavailable("the test dropped the reply")

    def wait(self, within: float) -> None:
        if not self._happened.wait(within):
            raise TimeoutError(f"the fault did not happen within {within:g} s")

    def release(self) -> None:
        """Do nothing: the request was executed already."""


class _Delayed:
    """The request is executed at once, but its reply comes when the test releases it."""

    def __init__(self) -> None:
        self._happened = threading.Event()
        self._released = threading.Event()

    def strike(self, ids: Sequence[str], within: float, request: Callable[[], T]) -> T:
        answer = request()
        self._happened.set()
        if self._released.wait(within):
            return answer
        raise BackendUnavailable(f"the test holds the reply back: none came in {within:g} s")

    def wait(self, within: float) -> None:
        if not self._happened.wait(within):
            raise TimeoutError(f"the fault did not happen within {within:g} s")

    def release(self) -> None:
        self._released.set()


class _Slow(_Dropped):
    """The request takes a while to arrive, is then executed, and gets its reply."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def strike(self, ids: Sequence[str], within: float, request: Callable[[], T]) -> T:
        self._happened.set()
        threading.Event().wait(self._seconds)
        return request()


class _Held(_Dropped):
    """The request gets no reply in time. A thread, which stands for the network, executes it after the release."""

    def __init__(self) -> None:
        super().__init__()
        self._released = threading.Event()

    def strike(self, ids: Sequence[str], within: float, request: Callable[[], T]) -> T:
        def later() -> None:
            self._released.wait(LATE_WITHIN)
            until = now() + DELIVERED_WITHIN
            while self._released.is_set() and now() < until:
                try:
                    request()
                    return
                except BackendUnavailable:  # the client closed the connection of this request, and makes another one
                    threading.Event().wait(0.02)

        threading.Thread(target=later, name="late-request", daemon=True).start()
        self._happened.set()
        threading.Event().wait(within)
        raise BackendUnavailable(f"the test holds the request back: no reply in {within:g} s")

    def release(self) -> None:
        self._released.set()


class FaultyBackend:
    """A backend that passes requests on to another backend, and makes a request fail when a test wants that."""

    def __init__(self, inner: Backend, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults

    @property
    def scheme(self) -> str:
        """The scheme of the inner backend."""
        return self._inner.scheme

    @property
    def spi_version(self) -> int:
        """The version of the inner backend."""
        return self._inner.spi_version

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the inner backend."""
        return self._inner.capabilities

    def open(self, notices: Notices) -> None:
        """Open the inner backend."""
        self._inner.open(notices)

    def attempt(self, claim: Claim, join: bool, within: float) -> Granted | Busy:
        """Attempt at the inner backend, with the planned fault."""
        return self._ask("attempt", within, lambda: self._inner.attempt(claim, join, within), claim)

    def release(self, claim: Claim, granted: Granted | None, unsure: bool, within: float) -> Returned:
        """Release at the inner backend, with the planned fault."""
        return self._ask("release", within, lambda: self._inner.release(claim, granted, unsure, within), claim)

    def rest(self, claim: Claim, granted: Granted, unsure: bool, seconds: float, within: float) -> Returned:
        """Call `rest` of the inner backend, which releases but keeps the name taken, with the planned fault."""
        inner = cast("Rests", self._inner)
        return self._ask("release", within, lambda: inner.rest(claim, granted, unsure, seconds, within), claim)

    def renew(
        self, group: Hashable, held: Sequence[Held], within: float
    ) -> Sequence[Granted | BackendUnavailable | None]:
        """Renew at the inner backend, with the planned fault."""
        claims = [claim for claim, _ in held]
        return self._ask("renew", within, lambda: self._inner.renew(group, held, within), *claims)

    def watch(self, group: Hashable, held: Sequence[Held], within: float) -> None:
        """Watch at the inner backend, with the planned fault."""
        self._ask("watch", within, lambda: self._inner.watch(group, held, within))

    def follow(self, names: frozenset[str], within: float) -> bool:
        """Follow at the inner backend, with the planned fault."""
        return self._ask("follow", within, lambda: self._inner.follow(names, within))

    def inspect(self, name: str, within: float) -> LockInfo | None:
        """Inspect at the inner backend, with the planned fault."""
        return self._ask("inspect", within, lambda: self._inner.inspect(name, within))

    def inspect_all(self, prefix: str, within: float) -> Iterator[LockInfo]:
        """List held names at the inner backend, with the planned fault."""
        return self._ask("inspect_all", within, lambda: self._inner.inspect_all(prefix, within))

    def force_release(self, name: str, within: float) -> bool:
        """Force a release at the inner backend, with the planned fault."""
        return self._ask("force_release", within, lambda: self._inner.force_release(name, within))

    def diagnose(self, within: float) -> list[Finding]:
        """Diagnose at the inner backend, with the planned fault."""
        return self._ask("diagnose", within, lambda: self._inner.diagnose(within))

    def ping(self, within: float) -> None:
        """Ping at the inner backend, with the planned fault."""
        self._ask("ping", within, lambda: self._inner.ping(within))

    def close(self) -> None:
        """Close the inner backend."""
        self._inner.close()

    def _ask(self, call: str, within: float, request: Callable[[], T], *claims: Claim) -> T:
        faults = self._faults
        if faults.down.is_set():
            raise BackendUnavailable("the test took the server down", unknown=False)
        if faults.silent.is_set():
            threading.Event().wait(within)
            raise BackendUnavailable(f"the test keeps the server silent: no reply in {within:g} s")
        if stroke := faults.take(call):
            return stroke.strike([claim.id for claim in claims], within, request)
        answer = request()
        faults.answered[call] += 1
        return answer
