"""etcd as a place under test: one server for all tests, a proxy of its own for each."""

from __future__ import annotations

import atexit
import base64
import contextlib
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from multilock.names import escape
from multilock.testing import FaultProxy
from multilock.testing.conformance import Place
from tests.servers_etcd import EtcdServer

__all__ = ["Etcd"]


class Etcd(Place):
    """Silence and an outage are real connections that a proxy keeps or refuses; keys are deleted through the server's
    JSON gateway, as an operator would."""

    scheme = "etcd"
    quick_ttl = 2.0

    def __init__(self) -> None:
        super().__init__()
        self._server = _server()
        self._proxy = FaultProxy.before(self._server.url, 2379)

    @property
    def url(self) -> str:
        return self._proxy.url

    @property
    def clean_url(self) -> str:
        return self._server.url

    def delete(self, name: str) -> None:
        rows = self._rows(f"{self.prefix}{escape(name)}/")
        holder = min(rows, key=lambda row: int(row["create_revision"]))
        assert self._server.post("kv/deleterange", {"key": holder["key"]})["deleted"] == "1"

    def leftovers(self) -> list[str]:
        """Every key but the tombstones that have a lease, and so an end."""
        rows = [(base64.b64decode(row["key"]).decode(), row) for row in self._rows(self.prefix)]
        return sorted(key for key, row in rows if not (key.startswith(f"{self.prefix}!gone/") and "lease" in row))

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

    def _rows(self, prefix: str) -> list[dict[str, Any]]:
        begin = prefix.encode()
        end = begin[:-1] + bytes([begin[-1] + 1])
        question = {"key": base64.b64encode(begin).decode(), "range_end": base64.b64encode(end).decode()}
        rows: list[dict[str, Any]] = self._server.post("kv/range", question).get("kvs", [])
        return rows


@lru_cache
def _server() -> EtcdServer:
    """The one that all these tests share."""
    server = EtcdServer()
    server.start()
    atexit.register(server.stop)
    return server
