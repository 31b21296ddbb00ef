"""What the suite must know about a backend to test it, and how it hurts it.

A `Place` is one backend under test: `FaultyBackend` puts faults between the kernel and any backend; a place with better
means (a real server to stop, a proxy) overrides them.
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
LATE_WITHIN = 30.0  # seconds a request that is held back waits for its release
DELIVERED_WITHIN = 5.0  # seconds after that, for its client may be gone


class Mishap(Protocol):
    """One request that is to go wrong."""

    def wait(self, within: float) -> None:
        """Until it happened; TimeoutError after ``within`` seconds."""

    def release(self) -> None:
        """A request held back reaches the backend now."""


class Place:
    """One backend under test, fresh for each test. Subclass it and say at least `url` and `delete`; what else a place
    can do itself (look into the server, stop it, lose its answers) shows more.

    Everything a test takes is below `prefix`, which no other test uses.
    """

    #: A module that calls `register_backend`, for the helper processes of ProcessConformance, which begin afresh; a
    #: backend that is installed with an entry point needs none.
    registered_in: ClassVar[str | None] = None
    quick_ttl: float = 1.2  #: seconds; the shortest ttl whose timing a busy machine still keeps
    calm_ttl: float = 2.0  #: seconds; … and of whose last tenth, in which the lost callback starts

    rest: float = 1.0  #: seconds; the shortest rest (``hold_at_least``) that the server keeps …
    rest_at_most: float = 1.0  #: … and for how long it may keep that

    #: Options of the backend's own, for the clients of the suite.
    options: ClassVar[dict[str, object]] = {}

    def __init__(self) -> None:
        self.prefix = f"conformance-{uuid.uuid4().hex[:12]}/"
        self.faults = Faults()

    @property
    def url(self) -> str:
        """Where it is, for clients that faults concern."""
        raise NotImplementedError

    @property
    def steady_ttl(self) -> float:
        """Seconds; of a lease that is to be kept although the machine stands still for half a second."""
        return max(self.quick_ttl, self.calm_ttl)

    @property
    def clean_url(self) -> str:
        """Where it is for bystanders, whom no fault concerns."""
        return self.url

    def delete(self, name: str) -> None:
        """Take the lock's key away behind everybody's back, by means other than multilock's."""
        raise NotImplementedError

    def leftovers(self) -> list[str]:
        """What of this test is still stored and has no end of its own.

        The backend is asked for what is held; a look into the server shows also what it does not tell, as waiters.
        """
        with Client(self.backend()) as client:
            return [info.name for info in client.inspect_all()]

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
        return self.faults.plan(call, _Dropped())

    def delay_reply(self, call: Call) -> Mishap:
        """The next such request is executed, and its answer comes when the test releases it."""
        return self.faults.plan(call, _Delayed())

    def hold_request(self, call: Call) -> Mishap:
        """The next such request is not answered in time, and is executed when the test releases it."""
        return self.faults.plan(call, _Held())

    def slow_request(self, call: Call, seconds: float) -> Mishap:
        """The next such request takes its time on the way to the backend, and is answered."""
        return self.faults.plan(call, _Slow(seconds))

    def slow_answers(self, seconds: float) -> contextlib.AbstractContextManager[Backend] | None:
        """Give a backend whose answers come ``seconds`` late inside this block. Its requests are executed at once.

        It shows a backend that reads ``Granted.sent_at`` after its request has left. None: the answers of this backend
        do not travel, and cannot come late. A proxy does it: `multilock.testing.FaultProxy.delay`.
        """
        return None

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
        return open_backend(url.partition(":")[0], url, {**shared, **self.options})


def _for_client(options: dict[str, Any]) -> dict[str, Any]:
    return {"ttl": 10.0, **options}


class Stroke(Mishap, Protocol):
    """What `Faults.plan` takes: how one request goes wrong."""

    def strike(self, ids: Sequence[str], within: float, request: Callable[[], T]) -> T:
        """``request()`` for the claims with these ids, going wrong."""


S = TypeVar("S", bound=Stroke)


class Faults:
    """What goes wrong between the clients of one place and their backend."""

    def __init__(self) -> None:
        self.silent = threading.Event()
        self.down = threading.Event()
        self.answered: Counter[str] = Counter()  #: requests that were answered, by their kind
        self._planned: list[tuple[Call, Stroke]] = []
        self._lock = threading.Lock()

    def plan(self, call: Call, stroke: S) -> S:
        """The next request of this kind goes wrong in this way."""
        with self._lock:
            self._planned.append((call, stroke))
        return stroke

    def take(self, call: str) -> Stroke | None:
        with self._lock:
            found = next((planned for planned in self._planned if planned[0] == call), None)
            if found is None:
                return None
            self._planned.remove(found)
            return found[1]


class _Dropped:
    """Executed; the answer never comes."""

    def __init__(self) -> None:
        self._happened = threading.Event()

    def strike(self, ids: Sequence[str], within: float, request: Callable[[], T]) -> T:
        request()
        self._happened.set()
        raise BackendUnavailable("the test swallowed the answer")

    def wait(self, within: float) -> None:
        if not self._happened.wait(within):
            raise TimeoutError(f"no request went wrong within {within:g} s")

    def release(self) -> None:
        """It was executed already."""


class _Delayed:
    """Executed at once; the answer comes when the test releases it."""

    def __init__(self) -> None:
        self._happened = threading.Event()
        self._released = threading.Event()

    def strike(self, ids: Sequence[str], within: float, request: Callable[[], T]) -> T:
        answer = request()
        self._happened.set()
        if self._released.wait(within):
            return answer
        raise BackendUnavailable(f"the test delays the answer: none in {within:g} s")

    def wait(self, within: float) -> None:
        if not self._happened.wait(within):
            raise TimeoutError(f"no request went wrong within {within:g} s")

    def release(self) -> None:
        self._released.set()


class _Slow(_Dropped):
    """On its way for a while, then executed and answered."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def strike(self, ids: Sequence[str], within: float, request: Callable[[], T]) -> T:
        self._happened.set()
        threading.Event().wait(self._seconds)
        return request()


class _Held(_Dropped):
    """Not answered in time; executed when the test releases it, by a thread that stands for the network."""

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
                except BackendUnavailable:  # the client gives up the connection that it came by, and makes another
                    threading.Event().wait(0.02)

        threading.Thread(target=later, name="late-request", daemon=True).start()
        self._happened.set()
        threading.Event().wait(within)
        raise BackendUnavailable(f"the test holds the request: no answer in {within:g} s")

    def release(self) -> None:
        self._released.set()


class FaultyBackend:
    """A backend in front of another one, whose requests go wrong when a test says so."""

    def __init__(self, inner: Backend, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults

    @property
    def scheme(self) -> str:
        return self._inner.scheme

    @property
    def spi_version(self) -> int:
        return self._inner.spi_version

    @property
    def capabilities(self) -> Capabilities:
        return self._inner.capabilities

    def open(self, notices: Notices) -> None:
        self._inner.open(notices)

    def attempt(self, claim: Claim, join: bool, within: float) -> Granted | Busy:
        return self._ask("attempt", within, lambda: self._inner.attempt(claim, join, within), claim)

    def release(self, claim: Claim, granted: Granted | None, unsure: bool, within: float) -> Returned:
        return self._ask("release", within, lambda: self._inner.release(claim, granted, unsure, within), claim)

    def rest(self, claim: Claim, granted: Granted, unsure: bool, seconds: float, within: float) -> Returned:
        inner = cast("Rests", self._inner)
        return self._ask("release", within, lambda: inner.rest(claim, granted, unsure, seconds, within), claim)

    def renew(
        self, group: Hashable, held: Sequence[Held], within: float
    ) -> Sequence[Granted | BackendUnavailable | None]:
        claims = [claim for claim, _ in held]
        return self._ask("renew", within, lambda: self._inner.renew(group, held, within), *claims)

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

    def _ask(self, call: str, within: float, request: Callable[[], T], *claims: Claim) -> T:
        faults = self._faults
        if faults.down.is_set():
            raise BackendUnavailable("the test took the server down", unknown=False)
        if faults.silent.is_set():
            threading.Event().wait(within)
            raise BackendUnavailable(f"the test keeps the server silent: no answer in {within:g} s")
        if stroke := faults.take(call):
            return stroke.strike([claim.id for claim in claims], within, request)
        answer = request()
        faults.answered[call] += 1
        return answer
