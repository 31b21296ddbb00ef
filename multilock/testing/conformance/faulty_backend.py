"""A backend whose requests can be lost, delayed, slowed down or held back by a test of the suite.

A `FaultyBackend` stands between the kernel and the backend under test. The test plans each fault of a request with
`Faults`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Literal, Protocol, TypeVar, cast

from multilock.backend import Backend, Held, Notices, Rests
from multilock.errors import BackendUnavailable
from multilock.kernel.runtime import now
from multilock.model import Busy, Capabilities, Claim, Finding, Granted, LockInfo, Returned

__all__ = ["Call", "Delayed", "Dropped", "Faults", "FaultyBackend", "HeldBack", "Mishap", "Slow"]

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


class Dropped:
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


class Delayed:
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


class Slow(Dropped):
    """The request takes a while to arrive, is then executed, and gets its reply."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def strike(self, ids: Sequence[str], within: float, request: Callable[[], T]) -> T:
        self._happened.set()
        threading.Event().wait(self._seconds)
        return request()


class HeldBack(Dropped):
    """The request gets no reply in time. A thread executes it once the test releases it, as if the network had delayed
    it."""

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
                except BackendUnavailable:  # the client closed the connection of this request and opens another one
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
        """Call `attempt` of the inner backend, with the planned fault."""
        return self._ask("attempt", within, lambda: self._inner.attempt(claim, join, within), claim)

    def release(self, claim: Claim, granted: Granted | None, unsure: bool, within: float) -> Returned:
        """Call `release` of the inner backend, with the planned fault."""
        return self._ask("release", within, lambda: self._inner.release(claim, granted, unsure, within), claim)

    def rest(self, claim: Claim, granted: Granted, unsure: bool, seconds: float, within: float) -> Returned:
        """Call `rest` of the inner backend, which releases but keeps the name taken, with the planned fault."""
        inner = cast("Rests", self._inner)
        return self._ask("release", within, lambda: inner.rest(claim, granted, unsure, seconds, within), claim)

    def renew(
        self, group: Hashable, held: Sequence[Held], within: float
    ) -> Sequence[Granted | BackendUnavailable | None]:
        """Call `renew` of the inner backend, with the planned fault."""
        claims = [claim for claim, _ in held]
        return self._ask("renew", within, lambda: self._inner.renew(group, held, within), *claims)

    def watch(self, group: Hashable, held: Sequence[Held], within: float) -> None:
        """Call `watch` of the inner backend, with the planned fault."""
        self._ask("watch", within, lambda: self._inner.watch(group, held, within))

    def follow(self, names: frozenset[str], within: float) -> bool:
        """Call `follow` of the inner backend, with the planned fault."""
        return self._ask("follow", within, lambda: self._inner.follow(names, within))

    def inspect(self, name: str, within: float) -> LockInfo | None:
        """Call `inspect` of the inner backend, with the planned fault."""
        return self._ask("inspect", within, lambda: self._inner.inspect(name, within))

    def inspect_all(self, prefix: str, within: float) -> Iterator[LockInfo]:
        """Call `inspect_all` of the inner backend, with the planned fault."""
        return self._ask("inspect_all", within, lambda: self._inner.inspect_all(prefix, within))

    def force_release(self, name: str, within: float) -> bool:
        """Call `force_release` of the inner backend, with the planned fault."""
        return self._ask("force_release", within, lambda: self._inner.force_release(name, within))

    def diagnose(self, within: float) -> list[Finding]:
        """Call `diagnose` of the inner backend, with the planned fault."""
        return self._ask("diagnose", within, lambda: self._inner.diagnose(within))

    def ping(self, within: float) -> None:
        """Call `ping` of the inner backend, with the planned fault."""
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
