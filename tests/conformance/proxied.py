"""A base for backends under test with a real server: all tests share the server, and each test has its own proxy."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import TypeVar

from multilock.backend import Backend
from multilock.testing import Fault, FaultProxy
from multilock.testing.conformance import Place

__all__ = ["OnTheWire", "Proxied"]

T = TypeVar("T")


class Proxied(Place):
    """The proxy in front of the server can hold back bytes of real connections, or refuse connections."""

    def __init__(self, clean_url: str) -> None:
        super().__init__()
        self._clean_url = clean_url
        self.proxy = FaultProxy.before(clean_url)

    @property
    def url(self) -> str:
        return self.proxy.url

    @property
    def clean_url(self) -> str:
        return self._clean_url

    @contextlib.contextmanager
    def slow_answers(self, seconds: float) -> Iterator[Backend]:
        self.proxy.delay(seconds, "down")
        try:
            yield self._open(self.url, {})
        finally:
            self.proxy.heal()

    @contextlib.contextmanager
    def silence(self) -> Iterator[None]:
        self.proxy.black_hole()
        try:
            yield
        finally:
            self.proxy.heal()

    @contextlib.contextmanager
    def down(self) -> Iterator[None]:
        self.proxy.refuse()
        self.proxy.cut()
        try:
            yield
        finally:
            self.proxy.accept()

    def close(self) -> None:
        self.proxy.close()


class OnTheWire:
    """A request that fails between the client and the server. ``plan`` receives the ids of its claims."""

    def __init__(self, plan: Callable[[Sequence[str]], Fault]) -> None:
        self._plan = plan
        self._planned: Future[Fault] = Future()

    def strike(self, ids: Sequence[str], within: float, request: Callable[[], T]) -> T:
        self._planned.set_result(self._plan(ids))
        return request()

    def wait(self, within: float) -> None:
        self._planned.result(within).wait(within)

    def release(self) -> None:
        self._planned.result(0).release()
