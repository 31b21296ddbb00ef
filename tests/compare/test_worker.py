"""A worker records each reply of the lock with its time. It never records a belief for a time at which it did not check
the lock."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from multilock import now
from multilock.testing.beliefs import Record
from multilock.testing.compare import worker


class StandsStill:
    """A held lock whose process is paused after the first call of `believes`. The lock expires during the pause."""

    token = None

    def __init__(self, role: worker._Role) -> None:
        self._role = role
        self.yes = True
        self.last_yes = 0.0

    def believes(self) -> bool:
        if self.yes:
            self.last_yes = now()
        else:
            self._role.release_now.set()
        return self.yes

    def on_lost(self, callback: Callable[[], object]) -> None:
        time.sleep(0.2)
        self.yes = False

    def release(self) -> bool:
        return False


class ItsClient:
    def __init__(self, role: worker._Role) -> None:
        self.holding = StandsStill(role)

    def lock(self, name: str) -> ItsClient:
        return self

    def acquire(self, timeout: float) -> StandsStill:
        return self.holding


def test_a_process_that_is_frozen_between_two_calls_held_until_the_first(
    capfd: pytest.CaptureFixture[str],
) -> None:
    role = worker._Role("A", "", "", 1.0, "n")
    client = ItsClient(role)
    role.client = client  # type: ignore[assignment]
    role.acquire(1.0)
    record = Record()
    for line in capfd.readouterr().out.splitlines():
        record.feed(1, line)
    belief = record.beliefs["A"]
    assert belief.until <= client.holding.last_yes
    assert belief.over_by is not None
    assert belief.over_by >= client.holding.last_yes + 0.2


def test_an_error_is_shown_without_paths_of_this_machine(capfd: pytest.CaptureFixture[str]) -> None:
    role = worker._Role("A", "tests.compare.broken:Raising", "redis://127.0.0.1:1", 1.0, "n")

    def raises() -> None:
        raise RuntimeError("it is broken")

    role.start(raises)
    assert role._last is not None
    role._last.join(10)
    said = capfd.readouterr().out
    assert "RuntimeError: it is broken" in said
    assert "in raises" in said
    assert "test_worker.py" in said
    assert "/" not in said
