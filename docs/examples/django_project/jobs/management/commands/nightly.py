"""Make the nightly report on one host, although cron starts this command on every host."""

import time
from typing import Any

from django.core.management.base import BaseCommand

import multilock
from jobs.models import Report


class Command(BaseCommand):
    help = "make the nightly report, on one host"

    def handle(self, *args: Any, **options: Any) -> None:
        with multilock.connect() as client:  # $MULTILOCK_URL
            lease = client.lock("django/nightly", hold_at_least=60).try_acquire()
            if lease is None:
                self.stdout.write("another host makes it, or has just made it")
                return
            with lease:
                time.sleep(1.0)  # stands for the work: make the report
                report = Report.objects.create(text="all is well", token=lease.fence())
                self.stdout.write(f"made report {report.pk}")
