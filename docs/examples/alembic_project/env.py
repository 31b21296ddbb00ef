"""Alembic: every replica runs `alembic upgrade head` when it starts; the migrations run once.

    pip install 'multilock[redis]' alembic
    export MULTILOCK_URL=redis://127.0.0.1:6379/0 DATABASE_URL=sqlite:////var/tmp/app.db
    cd docs/examples/alembic_project
    alembic upgrade head & alembic upgrade head; wait

You should see "creating accounts" once. The second replica waits for the first, and then finds nothing to do. A replica
that finds the database up to date takes no lock, so a hundred replicas need not wait for each other.

On PostgreSQL the lock can be in the migrated database itself, with 'multilock[postgresql]' and without MULTILOCK_URL:

    unset MULTILOCK_URL; export DATABASE_URL=postgresql+psycopg://owner@127.0.0.1/app

Then `lease.guard()` protects the migrations: a replica that was frozen, and lost its lock, cannot commit them late.
"""

from __future__ import annotations

import os

from alembic import context
from alembic.runtime.migration import MigrationContext
from sqlalchemy import create_engine

import multilock

engine = create_engine(os.environ["DATABASE_URL"])
IN_DATABASE = engine.dialect.name == "postgresql" and "MULTILOCK_URL" not in os.environ
URL = engine.url.set(drivername="postgresql").render_as_string(hide_password=False) if IN_DATABASE else None


def is_there() -> bool:
    """Return True if the database has the revision that `alembic upgrade` asks for. The migration itself checks this
    again."""
    try:
        wanted = context.get_revision_argument()
    except KeyError:  # a command without a revision, such as `alembic current`
        return False
    with engine.connect() as connection:
        return MigrationContext.configure(connection).get_current_heads() == (wanted,)


def run_migrations(lease: multilock.Lease) -> None:
    with engine.connect() as connection:
        context.configure(connection=connection)
        with context.begin_transaction():
            if IN_DATABASE:
                lease.guard(connection)  # until the commit, nobody else gets the lock
            context.run_migrations()


# Take the lock before Alembic asks the database which migrations it has. If the lock is lost during the migration,
# `with` raises. So the deployment stops instead of starting with a half-migrated database.
if not is_there():
    with multilock.connect(URL) as client, client.lock("alembic").acquire(timeout=600) as lease:
        run_migrations(lease)
