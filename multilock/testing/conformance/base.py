"""What all suites share: the fixtures, and how a test waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Generic, TypeVar

import pytest

from multilock import Client, now
from multilock.testing.conformance.faces import FACES, Face
from multilock.testing.conformance.places import Place

__all__ = ["NAME", "SOON", "Conformance", "Recorder", "eventually"]

T = TypeVar("T")
NAME = "orders/42"
SOON = 5.0  # seconds within which what should happen at once must happen, on a busy machine


def eventually(ready: Callable[[], object], within: float = SOON) -> None:
    """Wait until ``ready()`` is true; AssertionError after ``within`` seconds. For state that nothing announces."""
    until = now() + within
    while not ready():
        assert now() < until, f"it did not become true within {within:g} s"
        time.sleep(0.003)


class Recorder(Generic[T]):
    """A callback that remembers with what it was called, when and where."""

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
        """The ``count``-th call's value."""
        with self._changed:
            enough = self._changed.wait_for(lambda: len(self.calls) >= count, within)
            assert enough, f"called {len(self.calls)} times within {within:g} s, not {count}: {self.calls}"
            return self.calls[count - 1]

    def stays_at(self, count: int, during: float = 0.15) -> bool:
        """Whether nobody calls it any more for a while."""
        with self._changed:
            self._changed.wait_for(lambda: len(self.calls) > count, during)
            return len(self.calls) == count


class Conformance:
    """Base of the suites. ``backend`` makes the place under test; each test runs on both faces."""

    backend: ClassVar[Callable[[], Place]]

    @pytest.fixture(params=sorted(FACES))
    def face(self, request: pytest.FixtureRequest) -> Iterator[Face]:
        face = FACES[request.param]()
        yield face
        face.close()

    @pytest.fixture
    def place(self) -> Iterator[Place]:
        place = type(self).backend()
        yield place
        place.close()

    @pytest.fixture
    def make(self, face: Face, place: Place) -> Iterator[Callable[..., Client]]:
        """Further clients, all closed after the test."""
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
        """The client under test, whose requests can go wrong."""
        return make()

    @pytest.fixture
    def other(self, make: Callable[..., Client]) -> Client:
        """A competitor, whom no fault concerns."""
        return make(bystander=True)
