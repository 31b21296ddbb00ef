"""An etcd under test. All tests share one server, and each test has its own proxy."""

from __future__ import annotations

import atexit
import base64
from functools import lru_cache
from typing import Any

from multilock.names import escape
from tests.conformance.proxied import Proxied
from tests.servers_etcd import EtcdServer

__all__ = ["Etcd"]


class Etcd(Proxied):
    """Keys are deleted through the server's JSON gateway, as an operator would."""

    scheme = "etcd"
    quick_ttl = 3.0
    rest = 2.0
    rest_at_most = 3.5  # seconds; the server looks for expired leases twice a second

    def __init__(self) -> None:
        self._server = _server()
        super().__init__(self._server.url)

    def delete(self, name: str) -> None:
        rows = self._rows(f"{self.prefix}{escape(name)}/")
        holder = min(rows, key=lambda row: int(row["create_revision"]))
        assert self._server.post("kv/deleterange", {"key": holder["key"]})["deleted"] == "1"

    def leftovers(self) -> list[str]:
        """Return every key, except tombstones that expire with their lease."""
        rows = [(base64.b64decode(row["key"]).decode(), row) for row in self._rows(self.prefix)]
        return sorted(key for key, row in rows if not (key.startswith(f"{self.prefix}!gone/") and "lease" in row))

    def _rows(self, prefix: str) -> list[dict[str, Any]]:
        begin = prefix.encode()
        end = begin[:-1] + bytes([begin[-1] + 1])
        question = {"key": base64.b64encode(begin).decode(), "range_end": base64.b64encode(end).decode()}
        rows: list[dict[str, Any]] = self._server.post("kv/range", question).get("kvs", [])
        return rows


@lru_cache
def _server() -> EtcdServer:
    """Return the server that all these tests share."""
    server = EtcdServer()
    server.start()
    atexit.register(server.stop)
    return server
