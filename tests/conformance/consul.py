"""Consul under test. All tests share one server, and each test has its own proxy."""

from __future__ import annotations

import atexit
from functools import lru_cache
from urllib.parse import quote

from multilock.names import escape
from multilock.testing.conformance import Call, Mishap
from tests.conformance.proxied import OnTheWire, Proxied
from tests.servers_consul import ConsulServer

__all__ = ["Consul"]

# Bytes that only this kind of request contains.
MARKS: dict[Call, bytes] = {"attempt": b'"cas"', "renew": b"/v1/session/renew/", "release": b'"check-session"'}


class Consul(Proxied):
    """A proxy with real connections injects the faults. Keys are deleted through the API, as an operator would."""

    scheme = "consul"
    rest_at_most = 2.0  # seconds; the server ends a session only when twice its ttl has passed

    def __init__(self) -> None:
        self._server = _server()
        super().__init__(self._server.url)

    def delete(self, name: str) -> None:
        key = quote(f"{self.prefix}{escape(name)}/.lock")
        assert self._server.key(key) is not None
        self._server.ask("DELETE", f"kv/{key}")

    def leftovers(self) -> list[str]:
        keys = self._server.ask("GET", "kv/?keys&consistent")
        return sorted(key for key in keys if key.startswith(self.prefix))

    def drop_reply(self, call: Call) -> Mishap:
        return self.faults.plan(call, OnTheWire(lambda _: self.proxy.drop_reply(MARKS[call])))

    def hold_request(self, call: Call) -> Mishap:
        return self.faults.plan(call, OnTheWire(lambda _: self.proxy.hold_request(MARKS[call])))


@lru_cache
def _server() -> ConsulServer:
    """Return the server that all these tests share."""
    server = ConsulServer(session_ttl_min="100ms")
    server.start()
    server.ask("PUT", "kv/ready", b"")  # the server can list keys only once it has stored a key
    atexit.register(server.stop)
    return server
