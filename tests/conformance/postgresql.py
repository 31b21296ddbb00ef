"""PostgreSQL under test. All tests share one server, and each test has its own proxy."""

from __future__ import annotations

import atexit
from functools import lru_cache
from typing import Any

import psycopg

import multilock
from multilock.names import escape
from multilock.testing.conformance import Call, Mishap
from tests.conformance.proxied import OnTheWire, Proxied
from tests.servers_postgresql import PostgresqlServer

__all__ = ["Postgresql"]


class Postgresql(Proxied):
    """All faults use real connections. Rows are deleted by SQL, as an operator would."""

    scheme = "postgresql"

    def __init__(self) -> None:
        super().__init__(_url())

    def delete(self, name: str) -> None:
        assert self._ask("DELETE FROM multilock.locks WHERE key = %s RETURNING key", self.prefix + escape(name))

    def leftovers(self) -> list[str]:
        """Return every row, except tombstones and free names, which expire by themselves."""
        held = self._ask(
            "SELECT key FROM multilock.locks WHERE id IS NOT NULL AND starts_with(key, %s) "
            "UNION ALL SELECT key FROM multilock.holders WHERE starts_with(key, %s) "
            "UNION ALL SELECT key FROM multilock.queue WHERE starts_with(key, %s)",
            *[self.prefix] * 3,
        )
        return sorted(key for (key,) in held)

    def drop_reply(self, call: Call) -> Mishap:
        return self.faults.plan(call, OnTheWire(lambda ids: self.proxy.drop_reply(ids[0].encode())))

    def hold_request(self, call: Call) -> Mishap:
        return self.faults.plan(call, OnTheWire(lambda ids: self.proxy.hold_request(ids[0].encode())))

    def _ask(self, sql: str, *arguments: str) -> list[Any]:
        with psycopg.connect(self._clean_url, autocommit=True) as connection:
            return connection.execute(sql, arguments).fetchall()


@lru_cache
def _url() -> str:
    """Return the URL of the server that all these tests share. Its tables exist already."""
    server = PostgresqlServer()
    server.start()
    atexit.register(server.stop)
    with multilock.connect(server.url) as client, client.lock("warm-up") as lease:
        lease.renew()
    return server.url
