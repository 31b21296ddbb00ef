"""Keep late writes out of a database: a row that stands for the lease stays locked until the user's transaction ends.

There are two such rows. `Lease.guard`, and `guard` with a name and a token, lock the backend's own row of the lock. So
both need a lock in the PostgreSQL database of the user's transaction (`multilock.backend.Guards`). `guard` with a lease
locks a row of the table ``multilock_fence`` in the user's database, which has the greatest token seen.

This module sends statements over connections of psycopg, psycopg2, SQLAlchemy, Django and sqlite3. It imports none of
these modules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, cast, overload

from multilock.backend import Guards
from multilock.errors import CapabilityMissing, ConfigurationError, LockLost
from multilock.names import check_name, check_seconds
from multilock.registry import open_backend

if TYPE_CHECKING:
    from multilock.kernel.holding import AnyHeld
    from multilock.lease import AnyLease

__all__ = ["guard", "guard_lease", "guard_lease_async"]

LOST = "ML001"  # the SQLSTATE of a guard whose lease is over
NO_LOCK = 0  # a token that no lock has
NAME_MAX = 255  # characters that a name in the table may have
LIMIT = "SELECT pg_catalog.set_config('idle_in_transaction_session_timeout', %s, true)"
# The guard locks a row, so its transaction has an id. If that transaction has ended already, as with autocommit, the
# next one has no id yet, and this statement returns no row.
STILL_OPEN = "SELECT 1 WHERE pg_catalog.pg_current_xact_id_if_assigned() IS NOT NULL"
# Several transactions of one holder may be open at once, so the row of a token that is already stored is locked FOR
# SHARE. The statement first takes a shared advisory lock, so that a newer holder can keep others from sharing the row
# (`ALONE`).
SAME = (
    "SELECT pg_catalog.pg_advisory_xact_lock_shared(pg_catalog.hashtextextended(name, 1)) FROM multilock_fence "
    "WHERE name = %s AND token = %s FOR SHARE"
)
# A transaction that writes a token takes the shared advisory lock before it locks the row. Otherwise two such
# transactions could wait for each other.
SHARES = "SELECT pg_catalog.pg_advisory_xact_lock_shared(pg_catalog.hashtextextended(%s, 1))"
# In REPEATABLE READ and SERIALIZABLE, a transaction sees nothing that was committed after its first statement. As FOR
# SHARE changes no row, a newer lease may wait for the last write of an older one and still not see it. So these
# transactions ask three questions. The first question: is there a smaller token?
OLDER = (
    "SELECT 1 FROM multilock_fence WHERE name = %s AND token < %s "
    "AND pg_catalog.current_setting('transaction_isolation') <> 'read committed'"
)
# The second question: is the row shared by no other transaction, now and until this transaction ends?
ALONE = "SELECT 1 WHERE pg_catalog.pg_try_advisory_xact_lock(pg_catalog.hashtextextended(%s, 1))"
# The third question: was each transaction that had the row locked certainly over before our first statement? The system
# column xmax is the number of the last such transaction, or of a list of several. PostgreSQL does not say which of the
# two, so a number that may be a list is checked as both. VACUUM deletes a list that is no longer used, so 0 may have
# been a list. To make 0 rare, the transaction that writes a token also locks the row. Then xmax equals xmin, the number
# of a transaction that we see. The number may also be that of a savepoint, which no list of open transactions shows. So
# it counts as over only if it is older than every open transaction. If the first answer is yes, and one of the others
# is no, this transaction must begin again.
SEEN = """SELECT 1 FROM multilock_fence AS fence
WHERE name = %s AND token < %s AND fence.xmax <> 0 AND NOT EXISTS (
  SELECT FROM (SELECT fence.xmax AS locker WHERE fence.xmax <> fence.xmin UNION ALL
    SELECT listed.xid FROM pg_catalog.pg_get_multixact_members((
      SELECT fence.xmax FROM pg_catalog.pg_database AS ours WHERE ours.datname = pg_catalog.current_database()
      AND pg_catalog.mxid_age(fence.xmax) BETWEEN 1 AND pg_catalog.mxid_age(ours.datminmxid))) AS listed) AS lockers,
    pg_catalog.pg_snapshot_xmin(pg_catalog.pg_current_snapshot()) AS oldest
  WHERE pg_catalog.age(locker) <= pg_catalog.age(oldest::xid))"""
AGAIN = (
    "DO $$ BEGIN RAISE EXCEPTION 'could not serialize access: an older lease has written since this transaction began' "
    "USING ERRCODE = '40001'; END $$"
)
RAISE = (
    "INSERT INTO multilock_fence (name, token) VALUES (%s, %s) ON CONFLICT (name) DO UPDATE SET token = excluded.token "
    "WHERE multilock_fence.token <= excluded.token RETURNING token"
)

Ask = Callable[[str, tuple[Any, ...]], bool]
"""Sends a statement, with ``%s`` for its arguments, in the user's transaction. Returns whether the reply has a row."""


class Session(NamedTuple):
    """A connection that the user passed. ``dialect`` is the kind of its database. ``raw`` is the driver's own
    connection for SQLite, otherwise None."""

    dialect: str
    ask: Ask
    raw: Any = None


@overload
def guard(connection: Any, lease: AnyLease, /, *, idle_limit: float | None = None) -> None: ...
@overload
def guard(
    connection: Any,
    /,
    *,
    name: str,
    token: int,
    prefix: str = "multilock/",
    schema: str = "multilock",
    idle_limit: float | None = None,
) -> None: ...
def guard(
    connection: Any,
    lease: AnyLease | None = None,
    /,
    *,
    name: str | None = None,
    token: int | None = None,
    prefix: str = "multilock/",
    schema: str = "multilock",
    idle_limit: float | None = None,
) -> None:
    """Keep late writes out of the transaction that is open on ``connection``.

    There are two ways to call it:

    * ``guard(connection, name=…, token=…)`` does what `Lease.guard` does, for a lock on ``postgresql://`` that another
      process holds. ``name`` and ``token`` are those of the lease, ``prefix`` and ``schema`` the options of the
      holder's client.
    * ``guard(connection, lease)`` is for a lease of any backend, and a database with the table ``multilock_fence``:
      PostgreSQL, or SQLite 3.35 and later. Transactions of newer leases wait until this one has ended, and transactions
      of older leases are refused. Meanwhile another process can still acquire the lock. So call this function in each
      transaction that reads or writes the protected data, before the transaction reads data on which its writes depend.
      In REPEATABLE READ and SERIALIZABLE it must be the first statement of the transaction. If an older lease has
      written since the transaction began, the server reports a serialization failure: roll back, and begin again.

    ``idle_limit`` is as for `Lease.guard`. Raises LockLost if the lease is over, or if a newer lease has written: then
    roll back. Raises ConfigurationError if no transaction is open, or if guard() does not know this kind of connection.
    Raises CapabilityMissing for the leases of readers and permits, and if the backend has no fencing tokens.
    """
    session = _session(connection)
    if lease is not None:
        _raise_tokens(session, cast("AnyHeld", lease), idle_limit)
        return
    if name is None or isinstance(token, bool) or not isinstance(token, int):
        raise TypeError("guard() takes a lease, or the name and the token (an int) of a lease")
    if not 0 <= token < 2**63:  # drivers send greater numbers as another type
        raise ValueError("the token of guard() is negative or beyond 2**63 - 1: give the token of the lease")
    backend = open_backend("postgresql", "postgresql://", {"prefix": prefix, "schema": schema, "ttl": 30.0})
    _lock_row(session, *cast("Guards", backend).guard(check_name(name)), token, name, idle_limit)


def guard_lease(lease: AnyHeld, connection: Any, idle_limit: float | None) -> None:
    """Implement `Lease.guard`."""
    rows = _rows_of(lease)
    session = _session(connection)
    for row in rows:
        _lock_row(session, *row, idle_limit)


async def guard_lease_async(lease: AnyHeld, connection: Any, idle_limit: float | None) -> None:
    """Implement `AsyncLease.guard`."""
    for sql, key, token, name in _rows_of(lease):
        # An AsyncConnection of SQLAlchemy has a blocking connection, so the blocking code can lock the row.
        if hasattr(connection, "run_sync"):
            await connection.run_sync(
                lambda blocking, *row: _lock_row(_session(blocking), *row), sql, key, token, name, idle_limit
            )
        else:
            await _lock_row_async(connection, sql, key, token, name, idle_limit)


def _rows_of(lease: AnyHeld) -> list[tuple[str, str, int, str]]:
    """Return the rows that the guard of this lease locks: for each, the statement, its key and token, and the name.

    A lease of several locks is checked as a whole, because other leases may still hold its parts after its release.
    """
    backend = lease._kernel.backend
    rows: list[tuple[str, str, int, str]] = []
    for part in lease.leases:
        if not isinstance(backend, Guards) or part.token is None:
            raise CapabilityMissing(
                f"{backend.scheme}:// keeps no lock in a database of yours: use multilock.guard(connection, lease), or "
                "store lease.fence() with each write",
                name=part.name,
                backend=backend.scheme,
            )
        rows.append((*backend.guard(part.name), part.token, part.name))
    try:
        lease.check()
    except LockLost:  # the server refuses the guard instead, so that the transaction cannot commit
        return [(sql, key, NO_LOCK, lease.name) for sql, key, _, _ in rows]
    return rows


# ---- the row of the lock


def _lock_row(session: Session, sql: str, key: str, token: int, name: str, idle_limit: float | None) -> None:
    if session.dialect != "postgresql":
        raise ConfigurationError(
            f"the lock is in a PostgreSQL database, but this connection leads to {session.dialect}"
        )
    try:
        session.ask(sql, (key, token))
    except Exception as error:
        if _says_lost(error):
            raise _lost(name) from error
        raise
    _keep_open(session, idle_limit)


async def _lock_row_async(connection: Any, sql: str, key: str, token: int, name: str, idle_limit: float | None) -> None:
    if not (_is_of(connection, "psycopg") and _is_async(connection)):
        raise _unknown(connection, "a psycopg.AsyncConnection, or an AsyncConnection or AsyncSession of SQLAlchemy")

    async def ask(sql: str, arguments: tuple[Any, ...]) -> bool:
        async with connection.cursor() as cursor:
            await cursor.execute(sql, arguments)
            if cursor.rowcount < 0:
                async with connection.pipeline():  # reads the reply: see `_asker_by_count`
                    pass
            found: int = cursor.rowcount
            return found > 0

    try:
        await ask(sql, (key, token))
    except Exception as error:
        if _says_lost(error):
            raise _lost(name) from error
        raise
    if idle_limit is not None:
        await ask(LIMIT, _milliseconds(idle_limit))
    if not await ask(STILL_OPEN, ()):
        raise _no_transaction()


def _says_lost(error: BaseException) -> bool:
    """Return whether the guard refused. SQLAlchemy and Django wrap the error of the driver."""
    those = (error, getattr(error, "orig", None), error.__cause__)
    return any(LOST in (getattr(each, "sqlstate", None), getattr(each, "pgcode", None)) for each in those)


def _lost(name: str) -> LockLost:
    return LockLost(f"lock {name!r} was lost before its guard: roll this transaction back", name=name)


# ---- the row of the user's table


def _raise_tokens(session: Session, lease: AnyHeld, idle_limit: float | None) -> None:
    """Raise the stored tokens to those of this lease."""
    lease.check()  # the lease is checked as a whole, for the reason given in `_rows_of`
    # Every program raises the tokens in the same order. Otherwise two leases of several locks could deadlock.
    for part in sorted(lease.leases, key=lambda part: part.name):
        token = part.fence()
        if part.claim.mode != "x":
            raise CapabilityMissing(
                f"{part.name!r} is held by a reader, whose token refuses no writer: guard a lock or a writer",
                name=part.name,
                backend=part._kernel.scheme,
            )
        if len(part.name) > NAME_MAX:
            raise ConfigurationError(
                f"the table multilock_fence has names of at most {NAME_MAX} characters: shorten it"
            )
        row = (part.name, token)
        unseen = False
        if session.dialect == "postgresql":
            if session.ask(SAME, row):
                continue
            if session.ask(OLDER, row):
                unseen = not (session.ask(ALONE, (part.name,)) and session.ask(SEEN, row))
            else:
                session.ask(SHARES, (part.name,))
        if not session.ask(RAISE, row):
            raise LockLost(f"a newer lease of {part.name!r} has written: roll this transaction back", name=part.name)
        if unseen:
            session.ask(AGAIN, ())
        if session.dialect == "postgresql":
            session.ask(SAME, row)
    _keep_open(session, idle_limit)


# ---- connections


def _keep_open(session: Session, idle_limit: float | None) -> None:
    """Set how long the transaction may be idle. Raises ConfigurationError if the transaction is over already."""
    if session.dialect == "sqlite":
        if idle_limit is not None:
            raise ConfigurationError("SQLite ends no transaction by itself: leave idle_limit out")
        still_open = session.raw.in_transaction
    else:
        if idle_limit is not None:
            session.ask(LIMIT, _milliseconds(idle_limit))
        still_open = session.ask(STILL_OPEN, ())
    if not still_open:
        raise _no_transaction()


def _session(connection: Any) -> Session:
    """Return the `Session` of this connection, whose class may be derived from a class that we know."""
    known = "a connection of psycopg, psycopg2, Django or sqlite3, or a Connection or Session of SQLAlchemy"
    if _is_async(connection):
        raise _unknown(connection, f"{known} (with SQLAlchemy: await connection.run_sync(multilock.guard, …))")
    if hasattr(connection, "get_bind"):  # a Session of SQLAlchemy
        connection = connection.connection()
    if hasattr(connection, "exec_driver_sql"):  # a Connection of SQLAlchemy
        session = _of_sqlalchemy(connection)
    elif _is_of(connection, "django"):
        connection.ensure_connection()
        session = Session(connection.vendor, _asker_by_rows(connection), connection.connection)
    elif _is_of(connection, "sqlite3"):
        session = Session(
            "sqlite", lambda sql, row: bool(connection.execute(_styled(sql, "qmark"), row).fetchall()), connection
        )
    elif _is_of(connection, "psycopg", "psycopg2") and not getattr(connection, "async_", False):
        session = Session("postgresql", _asker_by_count(connection))
    else:
        raise _unknown(connection, known)
    if session.dialect not in ("postgresql", "sqlite"):
        raise ConfigurationError(f"guard() works with PostgreSQL and SQLite, not with {session.dialect}")
    return session


def _of_sqlalchemy(connection: Any) -> Session:
    dialect = connection.dialect

    def ask(sql: str, arguments: tuple[Any, ...]) -> bool:
        return connection.exec_driver_sql(_styled(sql, dialect.paramstyle), arguments).first() is not None

    return Session(dialect.name, ask, connection.connection.driver_connection if dialect.name == "sqlite" else None)


def _asker_by_rows(connection: Any) -> Ask:
    def ask(sql: str, arguments: tuple[Any, ...]) -> bool:
        with connection.cursor() as cursor:
            cursor.execute(sql, arguments)
            return bool(cursor.fetchall())

    return ask


def _asker_by_count(connection: Any) -> Ask:
    """Return a function that executes a statement, and returns whether it found a row.

    The function does not read the row, because a connection of psycopg may turn its rows into any type.
    """

    def ask(sql: str, arguments: tuple[Any, ...]) -> bool:
        with connection.cursor() as cursor:
            cursor.execute(sql, arguments)
            # In a pipeline the reply has not been read yet. The end of an inner pipeline reads it, and also ends the
            # transaction of an autocommit.
            if cursor.rowcount < 0:
                with connection.pipeline():
                    pass
            found: int = cursor.rowcount
            return found > 0

    return ask


def _styled(sql: str, style: str) -> str:
    """Return the statement with the placeholders that the driver expects."""
    first, *rest = sql.split("%s")
    if style == "qmark":
        return sql.replace("%s", "?")
    if style == "numeric_dollar":  # asyncpg
        return first + "".join(f"${number}{part}" for number, part in enumerate(rest, 1))
    return sql


def _is_of(connection: Any, *packages: str) -> bool:
    """Return whether this is a connection of one of these packages, and no cursor."""
    return hasattr(connection, "commit") and any(
        each.__module__.split(".")[0] in packages for each in connection.__class__.__mro__
    )


def _is_async(connection: Any) -> bool:
    return hasattr(connection, "__aenter__")


def _milliseconds(idle_limit: float) -> tuple[str]:
    return (str(max(1, round(check_seconds(idle_limit, "idle_limit") * 1000))),)


def _no_transaction() -> ConfigurationError:
    return ConfigurationError(
        "guard() needs an open transaction, because it works until the transaction ends: begin one first, and use no "
        "autocommit"
    )


def _unknown(connection: Any, known: str) -> ConfigurationError:
    its = f"{type(connection).__module__}.{type(connection).__qualname__}"
    return ConfigurationError(f"guard() here takes {known}, not {its}")
