"""What is asked after every test. `tests.again` runs no test again that fails here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from multilock import now, system
from multilock.kernel import worker

__all__ = ["no_thread_is_missing_or_dead", "threads_may_die"]

WITHIN = 10.0  # seconds in which what was refused a thread gets one


@pytest.fixture(autouse=True)
def no_thread_is_missing_or_dead() -> Iterator[None]:
    """No thread of multilock has died of a defect, and none that was refused is still missing.

    The worker remembers both for the whole process: the clients of all later tests would show them as findings.
    """
    yield
    until = now() + WITHIN
    while worker.try_again() and now() < until:
        system.sleep(0.05)
    troubles = worker.troubles()
    worker._deaths.clear()
    assert troubles == []


@pytest.fixture
def threads_may_die(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a test that has a thread of multilock die of a defect."""
    monkeypatch.setattr(worker, "_deaths", {})
