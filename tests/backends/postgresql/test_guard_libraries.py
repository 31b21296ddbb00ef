"""`multilock.guard` on the connections of each supported PostgreSQL library."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import psycopg
import psycopg2  # type: ignore[import-untyped]
import pytest
import sqlalchemy
import sqlalchemy.ext.asyncio
import sqlalchemy.orm
from django.db.utils import Error as DjangoError

import multilock
from multilock import ConfigurationError, Lease, LockLost
from multilock.testing import FaultProxy
from multilock.testing.conformance.base import SOON, eventually
from tests.backends.kit import NAME
from tests.backends.postgresql.conftest import Ask, Database

Opened = contextlib.AbstractContextManager[Any]


class OwnConnection(psycopg.Connection[Any]):
    """A connection class that a user has derived from psycopg's."""


def by_psycopg(url: str, autocommit: bool) -> Opened:
    return OwnConnection.connect(url, autocommit=autocommit, row_factory=lambda cursor: no_row)


def no_row(values: object) -> None:
    return None


@contextlib.contextmanager
def by_psycopg_pipeline(url: str, autocommit: bool) -> Iterator[Any]:
    with psycopg.connect(url, autocommit=autocommit) as connection, connection.pipeline():
        yield connection


@contextlib.contextmanager
def by_psycopg2(url: str, autocommit: bool) -> Iterator[Any]:
    with contextlib.closing(psycopg2.connect(url)) as connection:
        connection.autocommit = autocommit
        try:
            yield connection
        finally:
            if not connection.closed:  # the server keeps the locks for a moment after close()
                connection.rollback()


@contextlib.contextmanager
def engine_of(url: str, driver: str) -> Iterator[sqlalchemy.Engine]:
    engine = sqlalchemy.create_engine(url.replace("postgresql:", f"postgresql+{driver}:"), pool_size=1)
    try:
        yield engine
    finally:
        engine.dispose()


@contextlib.contextmanager
def by_sqlalchemy(url: str, autocommit: bool, driver: str = "psycopg") -> Iterator[Any]:
    with engine_of(url, driver) as engine, engine.connect() as connection:
        yield connection.execution_options(isolation_level="AUTOCOMMIT") if autocommit else connection


def by_sqlalchemy_with_psycopg2(url: str, autocommit: bool) -> Opened:
    return by_sqlalchemy(url, autocommit, "psycopg2")


@contextlib.contextmanager
def by_session(url: str, autocommit: bool) -> Iterator[Any]:
    with engine_of(url, "psycopg") as engine, sqlalchemy.orm.Session(engine) as session:
        if autocommit:
            session.connection(execution_options={"isolation_level": "AUTOCOMMIT"})
        yield session


@contextlib.contextmanager
def by_django(url: str, autocommit: bool) -> Iterator[Any]:
    import django
    from django.conf import settings

    if not settings.configured:
        settings.configure()
        django.setup()
    from django.db import connections, transaction

    parts = psycopg.conninfo.conninfo_to_dict(url)
    database = {"ENGINE": "django.db.backends.postgresql", "NAME": parts["dbname"], "USER": parts["user"]}
    connections.databases["guarded"] = connections.configure_settings(
        {"default": {}, "guarded": {**database, "HOST": parts["host"], "PORT": parts["port"]}}
    )["guarded"]
    with contextlib.closing(connections["guarded"]) as connection:
        try:
            if autocommit:
                yield connection
            else:
                with transaction.atomic(using="guarded"):
                    yield connection
        finally:
            connection.close()
            del connections["guarded"], connections.databases["guarded"]


LIBRARIES = [
    by_psycopg,
    by_psycopg_pipeline,
    by_psycopg2,
    by_sqlalchemy,
    by_sqlalchemy_with_psycopg2,
    by_session,
    by_django,
]


BROKEN = (psycopg.Error, psycopg2.Error, sqlalchemy.exc.DBAPIError, DjangoError)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_guard_works_through_each_library(
    library: Callable[[str, bool], Opened], server: Database, lease: Lease, ask: Ask
) -> None:
    two = ask()
    with library(server.url, False) as connection:
        lease.guard(connection, idle_limit=60)
        server.sql("UPDATE multilock.locks SET until = clock_timestamp(), sure = NULL")
        claim = two.wait(two.mutex())
    assert two.holds(claim, join=True)  # the guard has left no lock on the connection
    assert lease.token is not None
    with pytest.raises(LockLost), library(server.url, False) as connection:
        multilock.guard(connection, name=NAME, token=lease.token)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_guard_without_a_transaction_is_refused_through_each_library(
    library: Callable[[str, bool], Opened], server: Database, lease: Lease
) -> None:
    with pytest.raises(ConfigurationError, match="open transaction"), library(server.url, True) as connection:
        lease.guard(connection)


@pytest.mark.parametrize("library", [by_psycopg, by_psycopg2, by_django])
def test_a_cursor_is_refused(library: Callable[[str, bool], Opened], server: Database, lease: Lease) -> None:
    with (
        library(server.url, False) as connection,
        connection.cursor() as cursor,
        pytest.raises(ConfigurationError, match="here takes"),
    ):
        lease.guard(cursor)


def test_an_asyncio_lease_refuses_a_cursor(server: Database) -> None:
    async def main() -> None:
        async with (
            multilock.connect_async(server.url, ttl=20) as client,
            client.lock(NAME) as lease,
            await psycopg.AsyncConnection.connect(server.url) as connection,
        ):
            with pytest.raises(ConfigurationError, match=r"psycopg\.AsyncConnection"):
                await lease.guard(connection.cursor())

    asyncio.run(main())


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_guard_whose_reply_is_lost_raises_and_keeps_no_row(
    library: Callable[[str, bool], Opened], server: Database, lease: Lease, ask: Ask
) -> None:
    two = ask()
    with FaultProxy.before(server.url) as proxy:
        lost = proxy.drop_reply(b"guard_1")
        with pytest.raises(BROKEN), library(proxy.url, False) as connection:
            lease.guard(connection)
        assert lost.happened
    server.sql("UPDATE multilock.locks SET until = clock_timestamp(), sure = NULL")
    claim = two.mutex()
    eventually(lambda: two.holds(claim), SOON)


def test_a_connection_that_goes_back_to_its_pool_guards_nothing(server: Database, lease: Lease, ask: Ask) -> None:
    two = ask()
    with engine_of(server.url, "psycopg") as engine:
        with engine.connect() as connection:
            lease.guard(connection, idle_limit=60)
        server.sql("UPDATE multilock.locks SET until = clock_timestamp(), sure = NULL")
        with engine.connect() as connection:
            two.take(two.mutex())
            assert connection.exec_driver_sql("SHOW idle_in_transaction_session_timeout").scalar() == "0"


def test_an_asyncio_lease_guards_through_asynchronous_connections(server: Database) -> None:
    async def main() -> None:
        async with multilock.connect_async(server.url, ttl=20) as client, client.lock(NAME) as lease:
            async with await psycopg.AsyncConnection.connect(server.url) as connection:
                await lease.guard(connection, idle_limit=60)
                async with connection.pipeline():
                    await lease.guard(connection)
            async with await psycopg.AsyncConnection.connect(server.url, autocommit=True) as connection:
                with pytest.raises(ConfigurationError):
                    await lease.guard(connection)
            for driver in ("psycopg", "asyncpg"):
                url = server.url.replace("postgresql:", f"postgresql+{driver}:")
                engine = sqlalchemy.ext.asyncio.create_async_engine(url)
                async with engine.begin() as begun:
                    await lease.guard(begun, idle_limit=60)
                async with sqlalchemy.ext.asyncio.AsyncSession(engine) as session, session.begin():
                    await lease.guard(session)
                with pytest.raises(LockLost):
                    async with engine.begin() as begun:
                        await begun.run_sync(lambda connection: multilock.guard(connection, name=NAME, token=1))
                await engine.dispose()
            with pytest.raises(ConfigurationError, match=r"psycopg\.AsyncConnection"):
                await lease.guard(psycopg)
            with pytest.raises(ConfigurationError, match="run_sync"):
                multilock.guard(connection, name=NAME, token=1)

    asyncio.run(main())


@contextlib.asynccontextmanager
async def begun(url: str, driver: str) -> AsyncIterator[Any]:
    """Yield an asynchronous connection with an open transaction."""
    if driver == "none":
        async with await psycopg.AsyncConnection.connect(url) as connection:
            yield connection
        return
    engine = sqlalchemy.ext.asyncio.create_async_engine(url.replace("postgresql:", f"postgresql+{driver}:"))
    try:
        async with engine.begin() as connection:
            yield connection
    finally:
        await engine.dispose()


@pytest.mark.parametrize("driver", ["none", "psycopg", "asyncpg"])
def test_an_asyncio_guard_that_is_cancelled_or_has_no_reply_keeps_no_row(server: Database, driver: str) -> None:
    waits = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"

    async def until(ready: Callable[[], object]) -> None:
        await asyncio.to_thread(eventually, ready, SOON)

    async def main() -> None:
        async with multilock.connect_async(server.url, ttl=60) as client, client.lock(NAME) as lease:
            with FaultProxy.before(server.url) as proxy:
                lost = proxy.drop_reply(b"guard_1")
                with pytest.raises((*BROKEN, OSError)):
                    async with begun(proxy.url, driver) as connection:
                        await lease.guard(connection)
                assert lost.happened
            async with await psycopg.AsyncConnection.connect(server.url) as operator:
                await operator.execute("SELECT FROM multilock.locks FOR UPDATE")

                async def guard() -> None:
                    async with begun(server.url, driver) as connection:
                        await lease.guard(connection)

                guarded = asyncio.create_task(guard())
                await until(lambda: server.sql(waits) == [(1,)])
                guarded.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await guarded
                await until(lambda: server.sql(waits) == [])
                await operator.execute("UPDATE multilock.locks SET who = who")
            async with begun(server.url, driver) as connection:
                await lease.guard(connection)

    asyncio.run(main())
