"""Make the tables and functions of the lock. The first request that finds them missing does this, or an owner of the
database."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from multilock import BackendRejected, BackendUnavailable
from multilock_postgresql.transport import PgWire, patience
from multilock_postgresql.wire import LockWait

__all__ = ["SCHEMA", "create", "grants_of", "sql_of"]

SCHEMA = "multilock"
FILES = ("tables_1.sql", "functions_1.sql")


@lru_cache
def sql_of(schema: str) -> str:
    """Return the SQL that makes the tables and functions of layout 1. An owner may run it in one transaction."""
    folder = Path(__file__).parent / "sql"
    # Without CREATE on the database, CREATE SCHEMA IF NOT EXISTS fails even if the schema exists.
    begin = f"""DO $$ BEGIN
  IF to_regnamespace('"{schema}"') IS NULL THEN
    CREATE SCHEMA "{schema}";
  END IF;
END $$;
"""
    files = "".join((folder / file).read_text(encoding="utf-8") for file in FILES)
    return begin + files.replace("@S@", f'"{schema}"')


def grants_of(schema: str) -> str:
    """Return a comment in SQL that lists the rights which the role of a program needs."""
    return f"""
-- The role of the program needs these rights. Put its name in place of app.
-- GRANT USAGE ON SCHEMA "{schema}" TO app;
-- GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA "{schema}" TO app;
-- GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA "{schema}" TO app;
"""


def create(wire: PgWire, schema: str, within: float) -> None:
    """Make the tables and functions, unless another client has just made them.

    Raises BackendRejected if this role may not make them.
    """
    # Everything is one message, which a slow server executes even after the client has given up. An advisory lock
    # admits one client at a time, because others would fail with a duplicate key of the catalogue.
    missing = f"""to_regprocedure('"{schema}".guard_1(text, bigint)') IS NULL"""
    make = f"""DO $multilock$ BEGIN
  PERFORM set_config('client_min_messages', 'warning', true);
  IF {missing} THEN
    PERFORM set_config('lock_timeout', '{patience(within).decode()}', true);
    PERFORM pg_advisory_xact_lock(hashtextextended('multilock', 0));
    IF {missing} THEN
      EXECUTE $multilock_sql${sql_of(schema)}$multilock_sql$;
    END IF;
  END IF;
END $multilock$"""
    try:
        wire.script(make.encode(), within)
    except LockWait as error:  # this was a wait for the advisory lock, not for a row
        raise BackendUnavailable(
            f"{error}: another client makes the tables", unknown=False, backend="postgresql"
        ) from error
    except BackendRejected as error:
        raise BackendRejected(
            f"{error}. multilock needs its tables in the schema {schema!r}: let a role that may create them connect "
            "once, or run the SQL that `multilock doctor --sql` prints",
            backend="postgresql",
        ) from error
