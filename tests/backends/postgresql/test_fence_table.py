"""`multilock.guard(connection, lease)` with leases of any backend. It compares their tokens in a table of the user's
database."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
import pytest
import sqlalchemy
from psycopg import IsolationLevel, errors

import multilock
from multilock import CapabilityMissing, ConfigurationError, Lease, LockLost, NotHeld, database_guard
from multilock.testing import FaultProxy
from multilock.testing.conformance.base import SOON, eventually
from tests.backends.kit import NAME, WITHIN, interrupted
from tests.backends.postgresql.conftest import Database

TABLE = "CREATE TABLE multilock_fence (name VARCHAR(255) PRIMARY KEY, token BIGINT NOT NULL)"
LEVELS = [IsolationLevel.READ_COMMITTED, IsolationLevel.REPEATABLE_READ, IsolationLevel.SERIALIZABLE]


class Holders(NamedTuple):
    """Two leases of one name. The holder of the older lease has not noticed yet that it lost the lock."""

    older: Lease
    newer: Lease


@pytest.fixture
def holders() -> Iterator[Holders]:
    with multilock.connect("memory://older", ttl=20) as one, multilock.connect("memory://newer", ttl=20) as two:
        with two.lock(NAME):
            pass
        with one.lock(NAME) as older, two.lock(NAME) as newer:
            assert older.fence() < newer.fence()
            yield Holders(older, newer)


@pytest.fixture(params=LEVELS, ids=lambda level: level.name)
def begin(server: Database, request: pytest.FixtureRequest) -> Iterator[Callable[[], psycopg.Connection[Any]]]:
    server.sql("DROP TABLE IF EXISTS multilock_fence")
    server.sql(TABLE)
    with contextlib.ExitStack() as opened:

        def begin() -> psycopg.Connection[Any]:
            connection = opened.enter_context(contextlib.closing(psycopg.connect(server.url)))
            connection.isolation_level = request.param
            return connection

        yield begin


Begin = Callable[[], psycopg.Connection[Any]]


def test_a_newer_lease_waits_for_the_write_of_an_older_one(begin: Begin, server: Database, holders: Holders) -> None:
    old, new = begin(), begin()
    multilock.guard(old, holders.older)
    with ThreadPoolExecutor(1) as thread:
        guarded: Future[None] = thread.submit(multilock.guard, new, holders.newer)
        waiting = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        eventually(lambda: server.sql(waiting) == [(1,)], SOON)
        old.commit()
        with contextlib.suppress(errors.SerializationFailure):
            guarded.result(SOON)
    new.rollback()
    multilock.guard(new, holders.newer)


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("sharers", [1, 2, "savepoint", "vacuum"])
def test_no_lease_reads_from_before_the_last_write_of_an_older_one(
    begin: Begin, server: Database, holders: Holders, waits: bool, sharers: object
) -> None:
    server.sql("DROP TABLE IF EXISTS data")
    server.sql("CREATE TABLE data AS SELECT 0 AS value")
    with begin() as first:
        multilock.guard(first, holders.older)
    old, new, beside = begin(), begin(), begin()
    old.execute("SELECT txid_current()")
    new.execute("SELECT 1")
    if sharers == "savepoint":
        old.execute("SAVEPOINT here")
    multilock.guard(old, holders.older)
    if sharers in (2, "vacuum"):
        multilock.guard(beside, holders.older)
        beside.commit()
    old.execute("UPDATE data SET value = 1")
    if not waits:
        old.commit()
        if sharers == "vacuum":
            server.sql("VACUUM multilock_fence")
    with ThreadPoolExecutor(1) as thread:
        guarded: Future[None] = thread.submit(multilock.guard, new, holders.newer)
        if waits:
            waiting = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
            eventually(lambda: server.sql(waiting) == [(1,)], SOON)
            old.commit()
        if new.isolation_level == IsolationLevel.READ_COMMITTED:
            guarded.result(SOON)
        else:
            with pytest.raises(errors.SerializationFailure):
                guarded.result(SOON)
            new.rollback()
            multilock.guard(new, holders.newer)
    assert new.execute("SELECT value FROM data").fetchone() == (1,)


@pytest.mark.parametrize("looked_before", [True, False])
def test_an_older_lease_is_refused_after_a_newer_one_has_written(
    begin: Begin, holders: Holders, looked_before: bool
) -> None:
    old, new = begin(), begin()
    multilock.guard(old, holders.older)
    old.commit()
    if looked_before:
        old.execute("SELECT * FROM multilock_fence")
    multilock.guard(new, holders.newer)
    new.commit()
    with pytest.raises((LockLost, errors.SerializationFailure)):
        multilock.guard(old, holders.older)
    old.rollback()
    with pytest.raises(LockLost, match="newer"):
        multilock.guard(old, holders.older)


def test_another_open_transaction_keeps_no_newer_lease_out(begin: Begin, holders: Holders) -> None:
    other, old, new = begin(), begin(), begin()
    other.execute("SELECT txid_current()")
    multilock.guard(old, holders.older)
    old.commit()
    multilock.guard(new, holders.newer)


def test_no_older_lease_writes_while_a_newer_one_looks_for_its_last_write(
    begin: Begin, server: Database, holders: Holders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newer lease has found the session that had locked the row, and stops just before it locks the row itself."""
    server.sql("DROP TABLE IF EXISTS data")
    server.sql("CREATE TABLE data AS SELECT 0 AS value")
    monkeypatch.setattr(database_guard, "SEEN", database_guard.SEEN + " AND pg_advisory_lock_shared(7) IS NOT NULL")
    first, old, new, door = begin(), begin(), begin(), begin()
    multilock.guard(first, holders.older)
    first.commit()
    door.execute("SELECT pg_advisory_lock(7)")
    for each in old, new:
        each.execute("SET lock_timeout = '20s'")  # so that a failing test ends
    looks = new.isolation_level != IsolationLevel.READ_COMMITTED

    def waiting() -> int:
        [(count,)] = server.sql("SELECT count(*) FROM pg_locks WHERE NOT granted")
        return int(count)

    with ThreadPoolExecutor(2) as thread:
        newer: Future[None] = thread.submit(multilock.guard, new, holders.newer)
        eventually(lambda: waiting() == 1 if looks else newer.done(), SOON)
        older: Future[None] = thread.submit(multilock.guard, old, holders.older)
        eventually(lambda: older.done() or waiting() == 1 + looks, SOON)
        with contextlib.suppress(Exception):
            older.result(0)
            old.execute("UPDATE data SET value = 1")
            old.commit()
        door.close()
        newer.result(SOON)
        seen = new.execute("SELECT value FROM data").fetchone()
        new.commit()
        with contextlib.suppress(LockLost, errors.SerializationFailure):
            older.result(SOON)
        old.rollback()
    assert [seen] == server.sql("SELECT value FROM data")


def test_a_newer_lease_that_comes_while_an_older_one_writes_its_token_only_waits(
    begin: Begin, server: Database, holders: Holders
) -> None:
    server.sql("INSERT INTO multilock_fence VALUES (%s, 0)", NAME)
    old, new = begin(), begin()
    # with another isolation level, the guard of a row that was never locked fails
    old.isolation_level = IsolationLevel.READ_COMMITTED
    new.execute("SELECT 1")
    waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted"

    with ThreadPoolExecutor(1) as thread:
        guarded: list[Future[None]] = []

        class Between(psycopg.Cursor[Any]):
            def execute(self, query: Any, *given: Any, **more: Any) -> Any:
                done = super().execute(query, *given, **more)
                if query == database_guard.RAISE:
                    guarded.append(thread.submit(multilock.guard, new, holders.newer))
                    eventually(lambda: server.sql(waiting) == [(1,)], SOON)
                return done

        old.cursor_factory = Between
        try:
            multilock.guard(old, holders.older)
            assert not guarded[0].done()
        finally:
            old.commit()
        with contextlib.suppress(errors.SerializationFailure):
            guarded[0].result(SOON)


def test_transactions_of_one_lease_write_side_by_side(begin: Begin, holders: Holders) -> None:
    first, second, third = begin(), begin(), begin()
    multilock.guard(first, holders.older)
    first.commit()
    multilock.guard(second, holders.older)
    multilock.guard(third, holders.older)


def test_a_fence_whose_reply_is_lost_or_that_arrives_late_orders_the_writes(
    begin: Begin, server: Database, holders: Holders
) -> None:
    new = begin()
    with FaultProxy.before(server.url) as proxy, ThreadPoolExecutor(1) as thread:
        lost = proxy.drop_reply(b"INSERT INTO multilock_fence")
        with psycopg.connect(proxy.url) as old, pytest.raises(psycopg.OperationalError):
            multilock.guard(old, holders.older)
        assert lost.happened
        with psycopg.connect(proxy.url) as old:
            late = proxy.hold_request(b"multilock_fence")
            guarded: Future[None] = thread.submit(multilock.guard, old, holders.older)
            late.wait(WITHIN)
            multilock.guard(new, holders.newer)
            new.commit()
            late.release()
            with pytest.raises(LockLost):
                guarded.result(WITHIN)
    assert server.sql("SELECT token FROM multilock_fence") == [(holders.newer.fence(),)]


def test_a_fence_without_one_of_its_replies_keeps_the_older_token(
    begin: Begin, server: Database, holders: Holders
) -> None:
    first = begin()
    multilock.guard(first, holders.older)
    first.commit()
    if first.isolation_level == IsolationLevel.READ_COMMITTED:
        questions = [b"pg_advisory_xact_lock_shared(pg_catalog.hashtextextended($1"]
    else:
        questions = [b"pg_try_advisory_xact_lock", b"pg_snapshot_xmin"]
    for statement in (b"FOR SHARE", b"transaction_isolation", *questions):
        with FaultProxy.before(server.url) as proxy:
            lost = proxy.drop_reply(statement)
            with contextlib.closing(psycopg.connect(proxy.url)) as new:
                new.isolation_level = first.isolation_level
                with pytest.raises(psycopg.OperationalError):
                    multilock.guard(new, holders.newer)
            assert lost.happened, statement
        assert server.sql("SELECT token FROM multilock_fence") == [(holders.older.fence(),)]
    eventually(lambda: writes(begin(), holders.newer), SOON)


def writes(connection: psycopg.Connection[Any], lease: Lease) -> bool:
    """Return whether this lease can write. Returns False if its transaction must be repeated."""
    try:
        multilock.guard(connection, lease)
    except errors.SerializationFailure:
        return False
    else:
        return True
    finally:
        connection.rollback()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt may come in a finalizer
def test_an_interrupted_fence_keeps_the_older_token(begin: Begin, server: Database, holders: Holders) -> None:
    connection = begin()
    multilock.guard(connection, holders.older)
    connection.commit()
    moment, more = -1, True
    while more:
        moment += 2
        more = interrupted(lambda: multilock.guard(connection, holders.newer), moment, database_guard)
        connection.rollback()
        assert server.sql("SELECT token FROM multilock_fence") == [(holders.older.fence(),)]
    assert moment > 10
    assert writes(connection, holders.newer)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt may come in a finalizer
def test_an_interrupted_fence_leaves_no_token_after_a_rollback(
    begin: Begin, tmp_path: Path, server: Database, holders: Holders
) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "data.db", isolation_level=None)) as file:
        file.execute(TABLE)
        for connection in (begin(), file):
            moment, more = -1, True
            while more:
                moment += 2
                if connection is file:
                    file.execute("BEGIN")
                more = interrupted(lambda user=connection: multilock.guard(user, holders.older), moment, database_guard)  # type: ignore[misc]
                connection.rollback()
            assert moment > 10
            assert connection.execute("SELECT * FROM multilock_fence").fetchall() == []


def test_the_table_works_on_sqlite_too(tmp_path: Path, holders: Holders) -> None:
    file = tmp_path / "data.db"
    with contextlib.ExitStack() as opened:
        old, new = (
            opened.enter_context(contextlib.closing(sqlite3.connect(file, isolation_level=None, timeout=0.01)))
            for _ in range(2)
        )
        old.execute("PRAGMA journal_mode = WAL")
        old.execute(TABLE)
        with pytest.raises(ConfigurationError, match="open transaction"):
            multilock.guard(old, holders.older)
        old.execute("BEGIN")
        multilock.guard(old, holders.older)
        new.execute("BEGIN")
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            multilock.guard(new, holders.newer)
        old.execute("COMMIT")
        multilock.guard(new, holders.newer)
        new.execute("COMMIT")
        old.execute("BEGIN")
        with pytest.raises(LockLost):
            multilock.guard(old, holders.older)
        old.execute("ROLLBACK")
        with pytest.raises(ConfigurationError, match="idle_limit"):
            multilock.guard(new, holders.newer, idle_limit=1.0)
    engine = sqlalchemy.create_engine(f"sqlite:///{file}")
    with engine.begin() as connection:
        multilock.guard(connection, holders.newer)
    with pytest.raises(LockLost), engine.begin() as connection:
        multilock.guard(connection, holders.older)
    engine.dispose()


def test_only_leases_whose_tokens_order_writes_raise_the_table(tmp_path: Path, holders: Holders) -> None:
    with contextlib.closing(sqlite3.connect(":memory:")) as connection, multilock.connect("memory://more") as client:
        connection.execute(TABLE)
        with client.read_write_lock("r").reader() as reader, pytest.raises(CapabilityMissing, match="reader"):
            multilock.guard(connection, reader)
        with client.semaphore("s", 2) as permit, pytest.raises(CapabilityMissing, match="permits"):
            multilock.guard(connection, permit)
        with client.lock("n" * 256) as long, pytest.raises(ConfigurationError, match="255"):
            multilock.guard(connection, long)
        with client.lock_all(["b", "a"]) as both:
            multilock.guard(connection, both)
        with pytest.raises(NotHeld):
            multilock.guard(connection, both)
        with client.lock("c", reentrant=True) as outer:
            with client.lock_all(["c"], reentrant=True) as released:
                pass
            assert outer.is_held()
            with pytest.raises(NotHeld):
                multilock.guard(connection, released)
        with pytest.raises(ConfigurationError, match="leads to sqlite"):
            multilock.guard(connection, name=NAME, token=1)
        with pytest.raises(TypeError, match="name and the token"):
            multilock.guard(connection, name=NAME)  # type: ignore[call-overload]
        assert connection.execute("SELECT name FROM multilock_fence").fetchall() == [("a",), ("b",)]
