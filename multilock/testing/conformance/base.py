"""The common part of all suites: fixtures, and helpers with which a test waits.

A face is the blocking or the asyncio API. A place is one backend with its server, new for each test.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Generic, TypeVar, cast

import pytest

from multilock import BackendUnavailable, Client, Lease, Loss, LossReason, now
from multilock.kernel.holding import Holding
from multilock.lease import AnyLease
from multilock.testing.conformance.faces import FACES, Face
from multilock.testing.conformance.places import Place
from multilock.testing.conformance_processes import NAME

__all__ = [
    "NAME",
    "SOON",
    "Conformance",
    "Pulse",
    "Recorder",
    "answers",
    "believed_until",
    "by_the_clock",
    "eventually",
    "queued",
    "refused",
    "until_renewed",
]

T = TypeVar("T")
SOON = 5.0  # seconds to wait at most for an effect that should be immediate, even on a busy machine


def eventually(ready: Callable[[], object], within: float = SOON) -> None:
    """Wait until ``ready()`` is true. Raises AssertionError after ``within`` seconds. Use it for state that no event
    reports."""
    until = now() + within
    while not ready():
        assert now() < until, f"the condition was not true within {within:g} s"
        time.sleep(0.003)


def until_renewed(lease: Lease, within: float = SOON) -> None:
    """Wait until a renewal has extended the lease."""
    end = now() + lease.remaining()
    eventually(lambda: not lease.is_held() or now() + lease.remaining() > end + 0.1, within)
    assert lease.is_held(), "lost before it was renewed"


def answers(client: Client) -> bool:
    """Return whether the backend answers this client now. Use it with `eventually`, which calls it again."""
    try:
        client.ping()
    except BackendUnavailable:
        return False
    return True


def queued(client: Client, name: str) -> int:
    """Return how many waiters the name has, or 0 if the backend does not answer, so that `eventually` can repeat it."""
    try:
        info = client.inspect(name)
    except BackendUnavailable:
        return 0
    return info.waiting or 0 if info else 0


def believed_until(lease: Lease) -> float:
    """Wait until the lease is lost. Returns the time just before the last call of ``is_held()`` that returned True."""
    believed = asked = now()
    while lease.is_held():
        believed = asked
        time.sleep(0.001)
        asked = now()
    return believed


def inner(lease: AnyLease) -> Holding:
    """Cast a blocking or asyncio lease to the kernel's class, so that tests can read its private members."""
    return cast("Holding", lease)


def by_the_clock(loss: Loss) -> bool:
    """Return whether the lease ended because its ttl was over. If the machine is busy, the reason may be PAUSED."""
    return loss.reason in (LossReason.EXPIRED, LossReason.PAUSED)


class Pulse:
    """A measurement of how long this process was paused. No promise about time holds during a pause."""

    BEAT = 0.005  # seconds between two beats; only longer stops count

    def __init__(self) -> None:
        self._longest = self._sum = 0.0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="pulse", daemon=True)

    def __enter__(self) -> Pulse:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _beat(self) -> None:
        last = now()
        while not self._end.wait(self.BEAT):
            last, before = now(), last
            stop = last - before - self.BEAT
            self._longest = max(self._longest, stop)
            self._sum += stop if stop > self.BEAT else 0.0

    def stopped(self) -> float:
        """Return the longest stop in seconds, or 0 if it was so short that any scheduler causes it."""
        time.sleep(2 * self.BEAT)  # so that the last stop is counted
        return self._longest if self._longest > 0.02 else 0.0

    def stopped_in_all(self) -> float:
        """Return the sum of all stops in seconds. A stop shorter than a beat is usual, and does not count."""
        time.sleep(2 * self.BEAT)  # so that the last stop is counted
        return self._sum


def refused(wait: Callable[[float], T], timeout: float = 1.0) -> T:
    """Call ``wait(timeout)``, which waits for a taken name, and return its result or raise its exception.

    On an overloaded machine no reply may come within a second. So a wait that raises `BackendUnavailable` is repeated
    with twice the timeout, at most three times. It is repeated only if this process was stopped for at least a tenth of
    the timeout in all. Shorter stops do not explain why a whole wait had no reply.
    """
    for seconds in (timeout, 2 * timeout, 4 * timeout):
        with Pulse() as pulse:
            try:
                return wait(seconds)
            except BackendUnavailable:
                if pulse.stopped_in_all() < seconds / 10:
                    raise
    return wait(8 * timeout)


class Recorder(Generic[T]):
    """A callback that records its arguments, and the time and thread of each call."""

    def __init__(self, *, raises: bool = False) -> None:
        self.calls: list[T] = []
        self.times: list[float] = []
        self.threads: list[int] = []
        self._raises = raises
        self._changed = threading.Condition()

    def __call__(self, value: T) -> None:
        with self._changed:
            self.times.append(now())
            self.threads.append(threading.get_ident())
            self.calls.append(value)
            self._changed.notify_all()
        if self._raises:
            raise ValueError("a callback of the test raises")

    def wait(self, count: int = 1, within: float = SOON) -> T:
        """Wait for the ``count``-th call and return its argument."""
        with self._changed:
            enough = self._changed.wait_for(lambda: len(self.calls) >= count, within)
            assert enough, f"called {len(self.calls)} times within {within:g} s, not {count}: {self.calls}"
            return self.calls[count - 1]

    def stays_at(self, count: int, during: float = 0.15) -> bool:
        """Return whether the number of calls stays at ``count`` for a while."""
        with self._changed:
            self._changed.wait_for(lambda: len(self.calls) > count, during)
            return len(self.calls) == count


class Conformance:
    """Base of the suites. ``backend`` is the class of the place under test. Each test runs with the blocking and with
    the asyncio API."""

    backend: ClassVar[Callable[[], Place]]

    @pytest.fixture(params=sorted(FACES))
    def face(self, request: pytest.FixtureRequest) -> Iterator[Face]:
        """The face under test."""
        face = FACES[request.param]()
        yield face
        face.close()

    @pytest.fixture
    def pulse(self) -> Iterator[Pulse]:
        """A measurement of the times in which this process did not run."""
        with Pulse() as pulse:
            yield pulse

    @pytest.fixture
    def place(self) -> Iterator[Place]:
        """The place under test."""
        place = type(self).backend()
        yield place
        place.close()

    @pytest.fixture
    def make(self, face: Face, place: Place) -> Iterator[Callable[..., Client]]:
        """A function that makes further clients. All these clients are closed after the test."""
        made: list[Client] = []

        def make(*, bystander: bool = False, **options: Any) -> Client:
            client = place.bystander(face, **options) if bystander else place.connect(face, **options)
            made.append(client)
            return client

        yield make
        for client in made:
            client.close()

    @pytest.fixture
    def client(self, make: Callable[..., Client]) -> Client:
        """The client under test, whose requests may be disturbed by faults."""
        return make()

    @pytest.fixture
    def other(self, make: Callable[..., Client]) -> Client:
        """Another client of the same locks, whose requests are never disturbed."""
        return make(bystander=True)
