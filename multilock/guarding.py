"""A write and its lease in one commit: the row of the lock stays locked until the end of the user's own transaction.

The statement is the backend's (`multilock.backend.Guards`). This module sends it over connections of psycopg 3,
psycopg2, SQLAlchemy and Django, whose modules it never imports.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from multilock.backend import Guards
from multilock.errors import CapabilityMissing, ConfigurationError, LockLost
from multilock.names import check_name, check_seconds
from multilock.registry import open_backend

if TYPE_CHECKING:
    from multilock.kernel.holding import AnyHeld

__all__ = ["guard", "guard_lease", "guard_lease_async"]

LOST = "ML001"  # the SQLSTATE of a guard whose lease is over
LIMIT = "SELECT set_config('idle_in_transaction_session_timeout', %s, true)"
# The guard locks a row, so its transaction has a number. A statement of a later transaction finds none.
STILL_OPEN = "SELECT 1 WHERE pg_current_xact_id_if_assigned() IS NOT NULL"

Statement = tuple[str, tuple[str, int]]
"""A statement with ``%s`` for its arguments, and these."""


def guard(
    connection: Any,
    *,
    name: str,
    token: int,
    prefix: str = "multilock/",
    schema: str = "multilock",
    idle_limit: float | None = None,
) -> None:
    """Guard a transaction by a lock that another process, or another client, holds: see `Lease.guard`.

    ``name`` and ``token`` are those of its lease. ``prefix`` and ``schema`` are the options of its client. Raises
    LockLost if the name is no longer held with this token.
    """
    options = {"prefix": prefix, "schema": schema, "ttl": 30.0}
    statement = _statement(open_backend("postgresql", "postgresql://", options), check_name(name), token)
    _send(connection, statement, name, idle_limit)


def guard_lease(lease: AnyHeld, connection: Any, idle_limit: float | None) -> None:
    """Implement `Lease.guard`."""
    for part in lease.leases:
        part.check()
        _send(connection, _statement(lease._kernel.backend, part.name, part.token), part.name, idle_limit)


async def guard_lease_async(lease: AnyHeld, connection: Any, idle_limit: float | None) -> None:
    """Implement `AsyncLease.guard`."""
    for part in lease.leases:
        part.check()
        statement = _statement(lease._kernel.backend, part.name, part.token)
        if hasattr(connection, "run_sync"):  # of SQLAlchemy: runs a function of the blocking connection
            await connection.run_sync(_send, statement, part.name, idle_limit)
        else:
            await _send_async(connection, statement, part.name, idle_limit)


def _statement(backend: Any, name: str, token: int | None) -> Statement:
    if not isinstance(backend, Guards) or token is None:
        raise CapabilityMissing(
            f"{backend.scheme}:// keeps its locks in no database of yours: send lease.fence() with each write instead",
            name=name,
            backend=backend.scheme,
        )
    sql, key = backend.guard(name)
    return sql, (key, token)


def _send(connection: Any, statement: Statement, name: str, idle_limit: float | None) -> None:
    ask = _asker(connection)
    try:
        ask(*statement)
    except Exception as error:
        if _says_lost(error):
            raise _lost(name) from error
        raise
    if idle_limit is not None:
        ask(LIMIT, _milliseconds(idle_limit))
    if not ask(STILL_OPEN, ()):
        raise _no_transaction()


async def _send_async(connection: Any, statement: Statement, name: str, idle_limit: float | None) -> None:
    if not type(connection).__module__.startswith("psycopg") or not _is_async(connection):
        raise _unknown(connection, "a psycopg.AsyncConnection, or an AsyncConnection or AsyncSession of SQLAlchemy")

    async def ask(sql: str, arguments: tuple[Any, ...]) -> bool:
        async with connection.cursor() as cursor:
            await cursor.execute(sql, arguments)
            found: int = cursor.rowcount
            return found == 1

    try:
        await ask(*statement)
    except Exception as error:
        if _says_lost(error):
            raise _lost(name) from error
        raise
    if idle_limit is not None:
        await ask(LIMIT, _milliseconds(idle_limit))
    if not await ask(STILL_OPEN, ()):
        raise _no_transaction()


def _asker(connection: Any) -> Callable[[str, tuple[Any, ...]], bool]:
    """Return a function that sends a statement in the connection's transaction. It returns whether there is a row."""
    module = type(connection).__module__
    if hasattr(connection, "exec_driver_sql"):  # a Connection of SQLAlchemy
        return lambda sql, arguments: connection.exec_driver_sql(sql, arguments).first() is not None
    if hasattr(connection, "get_bind"):  # a Session of SQLAlchemy
        return _asker(connection.connection())
    if _is_async(connection) or not module.startswith(("psycopg", "django.")):
        raise _unknown(connection, "a connection of psycopg, psycopg2 or Django, or one or a Session of SQLAlchemy")

    def ask(sql: str, arguments: tuple[Any, ...]) -> bool:
        with connection.cursor() as cursor:
            cursor.execute(sql, arguments)
            found: int = cursor.rowcount
            return found == 1

    return ask


def _is_async(connection: Any) -> bool:
    return hasattr(connection, "__aenter__")


def _says_lost(error: BaseException) -> bool:
    """Return whether the guard refused. SQLAlchemy and Django wrap the error of the driver."""
    those = (error, getattr(error, "orig", None), error.__cause__)
    return any(LOST in (getattr(each, "sqlstate", None), getattr(each, "pgcode", None)) for each in those)


def _lost(name: str) -> LockLost:
    why = f"lock {name!r} was lost before its guard: roll this transaction back"
    return LockLost(why, name=name, backend="postgresql")


def _milliseconds(idle_limit: float) -> tuple[str]:
    return (str(max(1, round(check_seconds(idle_limit, "idle_limit") * 1000))),)


def _no_transaction() -> ConfigurationError:
    return ConfigurationError(
        "guard() needs an open transaction, because it keeps the lock until the transaction ends: begin one first, and "
        "use no autocommit"
    )


def _unknown(connection: Any, known: str) -> ConfigurationError:
    its = f"{type(connection).__module__}.{type(connection).__qualname__}"
    return ConfigurationError(f"guard() here takes {known}, not {its}")
