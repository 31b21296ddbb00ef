from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

import multilock
from multilock import Lease
from multilock_postgresql import open_backend
from tests.backends.kit import NAME, ByHand
from tests.servers_postgresql import PostgresqlServer

Row = tuple[Any, ...]


class Database(PostgresqlServer):
    """A server whose lock tables a test may read and change."""

    def sql(self, statement: str, *arguments: object) -> list[Row]:
        """Execute a statement as a superuser, in a separate transaction. Returns its rows."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            cursor = connection.execute(statement, arguments or None)
            return cursor.fetchall() if cursor.description else []


class Queued(ByHand):
    queues = True


Ask = Callable[..., Queued]


@pytest.fixture(scope="package")
def package_server() -> Iterator[Database]:
    with Database() as server:
        yield server


@pytest.fixture
def server(package_server: Database) -> Database:
    """Return a server without locks. A test that stops or configures a server must start a separate one."""
    if package_server.sql("SELECT to_regclass('multilock.locks') IS NOT NULL")[0][0]:
        clear(package_server)
    return package_server


def clear(server: Database) -> None:
    server.sql("TRUNCATE multilock.locks, multilock.holders, multilock.queue, multilock.gone")
    server.sql("UPDATE multilock.meta SET floor = 0")


@pytest.fixture
def lease(server: Database) -> Iterator[Lease]:
    """Return a lease of `NAME` that an ordinary client has acquired."""
    with multilock.connect(server.url, ttl=20) as client:
        lease = client.lock(NAME).acquire()
        yield lease
        lease.release()


@pytest.fixture
def ask(server: Database) -> Iterator[Ask]:
    """Return a function that opens backends of this server, or of a given URL, which the test calls directly."""
    made: list[Queued] = []

    def make(url: str | None = None, **options: object) -> Queued:
        made.append(Queued(open_backend(url or server.url, {"ttl": 20.0, **options})))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def one(ask: Ask) -> Queued:
    return ask()


@pytest.fixture
def two(ask: Ask) -> Queued:
    return ask()
