"""The guard: a write and its lease in one commit, in two sessions and three isolation levels."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
import sqlalchemy
import sqlalchemy.ext.asyncio
import sqlalchemy.orm
from psycopg import IsolationLevel, errors

import multilock
from multilock import CapabilityMissing, ConfigurationError, Lease, LockLost, NotHeld
from multilock.backend import Busy, Granted
from multilock.testing.conformance.base import SOON, eventually
from tests.backends.kit import NAME, WITHIN
from tests.backends.postgresql.conftest import Ask, Database, Queued

LEVELS = [IsolationLevel.READ_COMMITTED, IsolationLevel.REPEATABLE_READ, IsolationLevel.SERIALIZABLE]
KEY = f"multilock/{NAME}"


@pytest.fixture(params=LEVELS, ids=lambda level: level.name)
def session(server: Database, request: pytest.FixtureRequest) -> Iterator[psycopg.Connection]:
    """A user's own connection, which begins transactions by itself."""
    connection = psycopg.connect(server.url)
    connection.isolation_level = request.param
    yield connection
    connection.close()


@pytest.fixture
def lease(server: Database) -> Iterator[Lease]:
    with multilock.connect(server.url, ttl=20) as client:
        lease = client.lock(NAME).acquire()
        yield lease
        lease.release()


def guard(session: psycopg.Connection, client: Queued, claim: Any) -> None:
    multilock.guard(session, name=NAME, token=client.token(claim))


def end_lease(server: Database) -> None:
    """Make every lease end now, as if its ttl had passed."""
    server.sql("UPDATE multilock.locks SET until = clock_timestamp(), sure = NULL WHERE until IS NOT NULL")
    server.sql("UPDATE multilock.holders SET until = clock_timestamp()")


def make_rest(client: Queued, claim: Any) -> None:
    client.opened.rest(claim, client.grant(claim), False, 30.0, WITHIN)  # type: ignore[attr-defined]


def give_up_after(server: Database, client: Queued, claim: Any, way: str) -> None:
    """End the holding of ``claim`` in one of the ways in which it can end."""
    if way == "take-over":
        end_lease(server)
        other = client.mutex()
        client.take(other)
    elif way == "hand-over":
        waiter = client.wait(client.mutex())
        client.release(claim)
        assert client.ear.wait(lambda: waiter.id in client.ear.pushed)
    elif way == "release":
        client.release(claim)
    elif way == "rest":
        make_rest(client, claim)
    elif way == "force":
        assert client.opened.force_release(NAME, WITHIN)
    else:
        server.sql("DELETE FROM multilock.locks WHERE key = %s", KEY)


WAYS = ["take-over", "hand-over", "release", "rest", "force", "delete"]


def modes(client: Queued) -> list[Any]:
    return [client.mutex(), client.reader(), client.permit(2)]


@pytest.mark.parametrize("mode", range(3))
def test_nobody_gets_the_name_until_the_guarded_transaction_ends(
    one: Queued, two: Queued, server: Database, session: psycopg.Connection, mode: int
) -> None:
    claim = one.take(modes(one)[mode])
    guard(session, one, claim)
    end_lease(server)
    writer = two.writer()
    answer = two.attempt(writer, join=True)
    assert isinstance(answer, Busy)
    assert answer.expires_in is None
    session.commit()
    assert two.holds(writer, join=True)


@pytest.mark.parametrize("way", WAYS)
def test_a_guard_after_the_lease_was_lost_in_any_way_fails(
    one: Queued, server: Database, session: psycopg.Connection, way: str
) -> None:
    claim = one.take(one.mutex())
    session.execute("SELECT 1")  # an older snapshot
    give_up_after(server, one, claim, way)
    with pytest.raises((LockLost, errors.SerializationFailure)):
        guard(session, one, claim)
    session.rollback()
    with pytest.raises(LockLost):
        guard(session, one, claim)


@pytest.mark.parametrize("mode", range(3))
def test_renewals_and_waiters_pass_a_guard_by(one: Queued, two: Queued, session: psycopg.Connection, mode: int) -> None:
    claim = one.take(modes(one)[mode])
    session.execute("SELECT 1")
    one.opened.renew(one.grant(claim).group, [(claim, one.grant(claim))], WITHIN)
    guard(session, one, claim)
    [renewed] = one.opened.renew(one.grant(claim).group, [(claim, one.grant(claim))], WITHIN)
    assert isinstance(renewed, Granted)
    two.wait(two.writer())
    guard(session, one, claim)
    session.commit()


@pytest.mark.parametrize("way", ["release", "rest", "force"])
def test_the_end_of_a_holding_waits_for_its_guard(
    one: Queued, server: Database, session: psycopg.Connection, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = one.take(one.mutex())
    guard(session, one, claim)
    monkeypatch.setattr("multilock_postgresql.transport.WAIT_SHARE", 0.01)
    with pytest.raises(multilock.BackendUnavailable) as caught:
        give_up_after(server, one, claim, way)
    assert not caught.value.unknown
    session.rollback()
    give_up_after(server, one, claim, way)


def test_a_guard_whose_session_is_killed_frees_the_name(
    one: Queued, two: Queued, server: Database, session: psycopg.Connection
) -> None:
    guard(session, one, one.take(one.mutex()))
    end_lease(server)
    server.sql("SELECT pg_terminate_backend(%s)", session.info.backend_pid)
    claim = two.mutex()
    eventually(lambda: two.holds(claim), SOON)


def test_a_rollback_to_a_savepoint_ends_the_guard(
    one: Queued, two: Queued, server: Database, session: psycopg.Connection
) -> None:
    claim = one.take(one.mutex())
    with session.transaction():
        with session.transaction(force_rollback=True):
            guard(session, one, claim)
        end_lease(server)
        two.take(two.mutex())


def test_a_read_only_transaction_cannot_guard(one: Queued, session: psycopg.Connection) -> None:
    session.read_only = True
    with pytest.raises(errors.ReadOnlySqlTransaction):
        guard(session, one, one.take(one.mutex()))


def test_a_lease_guards_only_an_open_transaction(lease: Lease, server: Database) -> None:
    with psycopg.connect(server.url, autocommit=True) as connection:
        with pytest.raises(ConfigurationError, match="open transaction"):
            lease.guard(connection)
        with connection.transaction():
            lease.guard(connection, idle_limit=0.5)
            limit = connection.execute("SHOW idle_in_transaction_session_timeout").fetchone()
            assert limit == ("500ms",)
    with pytest.raises(ConfigurationError, match="here takes"):
        lease.guard(object())
    lease.release()
    with psycopg.connect(server.url) as connection, pytest.raises(NotHeld):
        lease.guard(connection)


def test_another_backend_has_no_guard() -> None:
    with (
        multilock.connect("memory://guard") as client,
        client.lock("n") as lease,
        pytest.raises(CapabilityMissing, match=r"lease\.fence"),
    ):
        lease.guard(object())


def by_sqlalchemy(url: str, use: Callable[[Any], None]) -> None:
    engine = sqlalchemy.create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.begin() as connection:
        use(connection)
    with sqlalchemy.orm.Session(engine) as session, session.begin():
        use(session)
    alone = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
    with alone, pytest.raises(ConfigurationError):
        use(alone)
    engine.dispose()


def by_django(url: str, use: Callable[[Any], None]) -> None:
    import django
    from django.conf import settings

    if not settings.configured:
        settings.configure()
        django.setup()
    from django.db.backends.postgresql.base import DatabaseWrapper
    from django.db.utils import DEFAULT_DB_ALIAS, ConnectionHandler

    parts = psycopg.conninfo.conninfo_to_dict(url)
    database = {"ENGINE": "django.db.backends.postgresql", "NAME": parts["dbname"], "USER": parts["user"]}
    handler = ConnectionHandler({DEFAULT_DB_ALIAS: {**database, "HOST": parts["host"], "PORT": parts["port"]}})
    connection = handler[DEFAULT_DB_ALIAS]
    assert isinstance(connection, DatabaseWrapper)
    with contextlib.closing(connection):
        with pytest.raises(ConfigurationError):
            use(connection)
        connection.set_autocommit(False)
        use(connection)
        connection.rollback()


@pytest.mark.parametrize("by", [by_sqlalchemy, by_django])
def test_a_guard_works_through_other_libraries(
    by: Callable[[str, Callable[[Any], None]], None], server: Database, ask: Ask
) -> None:
    with multilock.connect(server.url, ttl=20) as client:
        lease = client.lock(NAME).acquire()
        by(server.url, lease.guard)
        token = lease.token
        assert token is not None
        lease.release()

        def is_lost(connection: Any) -> None:
            try:
                multilock.guard(connection, name=NAME, token=token)
            except LockLost:
                raise ConfigurationError("as expected") from None

        with pytest.raises(ConfigurationError, match="as expected"):
            by(server.url, is_lost)


def test_an_asyncio_lease_guards_through_asynchronous_connections(server: Database) -> None:
    async def main() -> None:
        engine = sqlalchemy.ext.asyncio.create_async_engine(server.url.replace("postgresql:", "postgresql+psycopg:"))
        async with multilock.connect_async(server.url, ttl=20) as client, client.lock(NAME) as lease:
            async with await psycopg.AsyncConnection.connect(server.url) as connection:
                await lease.guard(connection, idle_limit=1.0)
            async with await psycopg.AsyncConnection.connect(server.url, autocommit=True) as connection:
                with pytest.raises(ConfigurationError):
                    await lease.guard(connection)
            async with engine.begin() as begun:
                await lease.guard(begun)
            async with sqlalchemy.ext.asyncio.AsyncSession(engine) as session, session.begin():
                await lease.guard(session)
            with pytest.raises(ConfigurationError, match=r"psycopg\.AsyncConnection"):
                await lease.guard(psycopg)
        await engine.dispose()

    asyncio.run(main())
