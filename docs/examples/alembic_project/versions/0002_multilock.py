"""The tables of multilock in this database, for programs whose role may not create tables.

The SQL is what `multilock doctor --sql` prints. You may run the SQL again, even while locks are held. This is needed
here, because `env.py` runs the migrations under a lock in these tables. If a later multilock needs more, add a revision
that runs the new SQL.
"""

from alembic import op

revision = "0002"
down_revision = "0001"

PROGRAM = "web"  # the role of the program; it must exist


def upgrade() -> None:
    if op.get_context().dialect.name != "postgresql":
        return
    from multilock_postgresql import sql_of

    op.execute(sql_of("multilock"))
    op.execute(f"GRANT USAGE ON SCHEMA multilock TO {PROGRAM}")
    op.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA multilock TO {PROGRAM}")
    op.execute(f"GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA multilock TO {PROGRAM}")


def downgrade() -> None:
    """Keep the tables: this migration holds a lock in them, and programs may hold other locks."""
