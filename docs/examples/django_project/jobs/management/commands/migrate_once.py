"""Run `migrate` under a lock. Every replica may run it when it starts: one migrates, the others find it done."""

from typing import Any

from django.core.management.base import CommandError
from django.core.management.commands import migrate

import multilock


class Command(migrate.Command):
    help = "migrate, while no other host migrates"

    def handle(self, *args: Any, **options: Any) -> None:
        with multilock.connect() as client:  # $MULTILOCK_URL
            try:
                with client.lock("django/migrate").acquire(timeout=600):
                    super().handle(*args, **options)
            except multilock.LockTimeout as error:
                raise CommandError(f"another host still migrates: {error}") from error
