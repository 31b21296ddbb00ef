"""Run `migrate` under a lock. Every replica may run this command when it starts: one replica migrates, and the others
wait for it. A replica that finds the database up to date takes no lock."""

from typing import Any

from django.core.management.base import CommandError
from django.core.management.commands import migrate
from django.db import connections
from django.db.migrations.executor import MigrationExecutor

import multilock


def is_done(database: str) -> bool:
    executor = MigrationExecutor(connections[database])
    return not executor.migration_plan(executor.loader.graph.leaf_nodes())


class Command(migrate.Command):
    help = "migrate, while no other host migrates"

    def handle(self, *args: Any, **options: Any) -> None:
        if not options["app_label"] and is_done(options["database"]):
            self.stdout.write("nothing to migrate")
            return
        with multilock.connect() as client:  # $MULTILOCK_URL
            try:
                with client.lock("django/migrate").acquire(timeout=600):
                    super().handle(*args, **options)
            except multilock.LockTimeout as error:
                raise CommandError(f"another host still migrates: {error}") from error
