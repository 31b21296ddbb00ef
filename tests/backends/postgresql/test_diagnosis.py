"""The findings of diagnose(), computed from replies that the test makes, and from two replies of a real server."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from psycopg import errors

from multilock import system
from multilock_postgresql.diagnosis import QUERY, diagnose
from multilock_postgresql.transactions import StepQueries
from tests.backends.kit import WITHIN
from tests.backends.postgresql.conftest import Database, Queued

CALM: dict[str, object] = {
    "version": 150018,
    "fsync": "on",
    "full_page_writes": "on",
    "synchronous_commit": "on",
    "standbys": "",
    "isolation": "read committed",
    "idle_limit": "5min",
    "statement_timeout": 0,
    "replicas": 0,
    "asynchronous": 0,
    "oldest_snapshot": 1.5,
    "connections": 10,
    "most_connections": 100,
    "clock": None,
    "sees_all": "t",
    "name": "PostgreSQL 15.18 (Debian)",
}


class OneReply:
    """A replacement for the backend's transactions. Its reply is that of a healthy server, except for ``state``."""

    def __init__(self, **state: object) -> None:
        state.setdefault("clock", system.wall() / 1e6)
        self.row = tuple(None if value is None else str(value).encode() for value in ({**CALM, **state}).values())

    def run(self, sql: bytes, arguments: object, within: float, limited: bool) -> Any:
        return [self.row], 0.0

    def now(self) -> float:
        return 0.1


def codes(**state: object) -> list[tuple[str, str]]:
    found = diagnose(OneReply(**state), WITHIN)  # type: ignore[arg-type]
    return [(finding.code.removeprefix("postgresql-"), finding.level) for finding in found]


@pytest.mark.parametrize(
    ("state", "code", "level"),
    [
        ({"version": 130012}, "old", "error"),
        ({"name": "PostgreSQL 15.2-YB-2.25"}, "not-postgresql", "warning"),
        ({"name": "CockroachDB CCL v24.1"}, "not-postgresql", "warning"),
        ({"fsync": "off"}, "fsync-off", "error"),
        ({"full_page_writes": "off"}, "full-page-writes-off", "warning"),
        ({"synchronous_commit": "local"}, "asynchronous-commit", "info"),
        ({"standbys": "one"}, "synchronous", "info"),
        ({"replicas": 2, "asynchronous": 2}, "async-replicas", "warning"),
        ({"replicas": 2, "sees_all": "f"}, "replicas", "info"),
        ({"isolation": "serializable"}, "isolation", "info"),
        ({"statement_timeout": 4999}, "statement-timeout", "warning"),
        ({"idle_limit": "0"}, "guard-unbounded", "info"),
        ({"oldest_snapshot": 601}, "old-snapshot", "warning"),
        ({"connections": 81}, "connections", "warning"),
        ({"clock": 1000}, "clock", "info"),
    ],
)
def test_each_weakness_is_one_finding(state: dict[str, object], code: str, level: str) -> None:
    assert codes() == []
    assert codes(**state) == [(code, level)]


def test_the_query_asks_a_real_server_for_all_of_that(one: Queued, server: Database) -> None:
    assert len(server.sql(QUERY.decode())[0]) == len(CALM)
    found = {finding.code for finding in one.opened.diagnose(WITHIN)}
    assert {"postgresql-fsync-off", "postgresql-guard-unbounded"} <= found
    assert "postgresql-not-postgresql" not in found


def test_a_migration_of_the_tables_waits_for_open_guards(one: Queued, server: Database) -> None:
    claim = one.take(one.mutex())
    with psycopg.connect(server.url) as session:
        session.execute(StepQueries("multilock").guard, (f"multilock/{claim.name}", one.token(claim)))
        with pytest.raises(errors.LockNotAvailable):
            server.sql("SET lock_timeout = 10; ALTER TABLE multilock.locks ADD COLUMN extra integer")
    server.sql("ALTER TABLE multilock.locks ADD COLUMN extra integer")
    assert one.release(claim)
    assert one.release(one.take(one.mutex()))
    server.sql("ALTER TABLE multilock.locks DROP COLUMN extra")
