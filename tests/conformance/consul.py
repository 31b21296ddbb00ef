"""Consul as a place under test: one server for all tests, a proxy of its own for each."""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import lru_cache
from typing import TypeVar
from urllib.parse import quote

from multilock.names import escape
from multilock.testing import Fault, FaultProxy
from multilock.testing.conformance import Call, Mishap, Place
from tests.servers_consul import ConsulServer

__all__ = ["Consul"]

T = TypeVar("T")
# What only this kind of request has in its bytes.
MARKS: dict[Call, bytes] = {"attempt": b'"lock"', "renew": b"/v1/session/renew/", "release": b'"delete-cas"'}


class Consul(Place):
    """Faults are made by a proxy with real connections; keys are deleted through the API, as an operator would."""

    scheme = "consul"

    def __init__(self) -> None:
        super().__init__()
        self._server = _server()
        self._proxy = FaultProxy.before(self._server.url, 8500)

    @property
    def url(self) -> str:
        return self._proxy.url

    @property
    def clean_url(self) -> str:
        return self._server.url

    def delete(self, name: str) -> None:
        key = quote(f"{self.prefix}{escape(name)}/.lock")
        assert self._server.key(key) is not None
        self._server.ask("DELETE", f"kv/{key}")

    def leftovers(self) -> list[str]:
        keys = self._server.ask("GET", "kv/?keys&consistent")
        return sorted(key for key in keys if key.startswith(self.prefix))

    def drop_reply(self, call: Call) -> Mishap:
        return self.faults.plan(call, _OnTheWire(lambda: self._proxy.drop_reply(MARKS[call])))

    def hold_request(self, call: Call) -> Mishap:
        return self.faults.plan(call, _OnTheWire(lambda: self._proxy.hold_request(MARKS[call])))

    @contextlib.contextmanager
    def silence(self) -> Iterator[None]:
        self._proxy.black_hole()
        try:
            yield
        finally:
            self._proxy.heal()

    @contextlib.contextmanager
    def down(self) -> Iterator[None]:
        self._proxy.refuse()
        self._proxy.cut()
        try:
            yield
        finally:
            self._proxy.accept()

    def close(self) -> None:
        self._proxy.close()


class _OnTheWire:
    """A request that goes wrong between its client and the server."""

    def __init__(self, plan: Callable[[], Fault]) -> None:
        self._plan = plan
        self._planned: Future[Fault] = Future()

    def strike(self, ids: Sequence[str], within: float, request: Callable[[], T]) -> T:
        self._planned.set_result(self._plan())
        return request()

    def wait(self, within: float) -> None:
        self._planned.result(within).wait(within)

    def release(self) -> None:
        self._planned.result(0).release()


@lru_cache
def _server() -> ConsulServer:
    """The one that all these tests share."""
    server = ConsulServer(session_ttl_min="100ms")
    server.start()
    server.ask("PUT", "kv/ready", b"")  # a server without a key has no list of keys
    atexit.register(server.stop)
    return server
