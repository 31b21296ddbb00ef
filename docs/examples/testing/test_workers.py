"""Workers in separate processes are frozen and killed while they hold a lock. No two workers may believe at once that
they hold the lock."""

from __future__ import annotations

import pytest

import multilock
from multilock import Client
from multilock.testing import Helper, kill, pause, say
from multilock.testing.beliefs import Believers

pytestmark = pytest.mark.multilock(requires={"cross_host"})  # memory:// works within one process only
WORK = f"{__name__}:work"
WITHIN = 30.0  # seconds; each step takes two or three


def work(url: str, believers: str) -> None:
    """Hold the lock until it is lost. The process stands for a worker of the service."""
    with multilock.connect(url, ttl=2.0) as client:
        Believers(believers).watch(client)
        lease = client.lock("work").acquire()
        say("works")
        lease.wait_lost()
        say("stopped")


def test_a_frozen_worker_stops_when_it_resumes(
    multilock_client: Client, multilock_url: str, multilock_believers: Believers
) -> None:
    with Helper(WORK, multilock_url, multilock_believers.path) as worker:
        worker.wait_for("works", WITHIN)
        with pause(worker):
            multilock_client.lock("work").acquire(timeout=WITHIN)
        worker.wait_for("stopped", WITHIN)


def test_a_worker_that_is_killed_is_replaced(
    multilock_client: Client, multilock_url: str, multilock_believers: Believers
) -> None:
    with Helper(WORK, multilock_url, multilock_believers.path) as worker:
        worker.wait_for("works", WITHIN)
        kill(worker)
        multilock_client.lock("work").acquire(timeout=WITHIN)
