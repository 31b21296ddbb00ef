"""The tables of multilock in this database, for programs whose role may not create tables.

The SQL is what `multilock doctor --sql` prints. You may run the SQL again, even while locks are held. This is needed
here, because `migrate_once` runs the migrations under a lock in these tables. If a later multilock needs more, add a
migration that runs the new SQL.
"""

from typing import Any

from django.db import migrations

PROGRAM = "web"  # the role of the program; it must exist


def make_tables(apps: Any, schema_editor: Any) -> None:
    if schema_editor.connection.vendor != "postgresql":
        return
    from multilock_postgresql import sql_of

    for sql in (
        sql_of("multilock"),
        f"GRANT USAGE ON SCHEMA multilock TO {PROGRAM}",
        f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA multilock TO {PROGRAM}",
        f"GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA multilock TO {PROGRAM}",
    ):
        schema_editor.execute(sql, params=None)


class Migration(migrations.Migration):
    dependencies = [("jobs", "0001_initial")]  # noqa: RUF012, Django's own style
    operations = [migrations.RunPython(make_tables, migrations.RunPython.noop)]  # noqa: RUF012
