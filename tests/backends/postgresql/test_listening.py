"""The connection that listens: what arrives there is neither lost nor held back."""

from __future__ import annotations

from typing import Any

import pytest

from multilock import BackendUnavailable
from multilock.testing.conformance.base import eventually
from multilock_postgresql import notices
from tests.backends.kit import WITHIN
from tests.backends.postgresql.conftest import Database, Queued

PINGS = 5
LONG = 30.0  # seconds, on a busy machine


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "TEND_EVERY", 0.1)


def inside(client: Queued) -> Any:
    """Return the backend, of which these tests know more than the interface."""
    return client.opened


def pinged(wire: Any) -> None:
    """Wait until the server was pinged several times."""
    sent: set[float] = set()

    def several() -> bool:
        sent.add(wire.used)
        return len(sent) > PINGS

    eventually(several, LONG)


def test_a_waiter_that_waited_long_is_still_handed_the_name_by_push(
    one: Queued, two: Queued, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = one.take(one.mutex())
    waiter = two.wait(two.mutex())
    pinged(inside(two)._listener._wire)
    monkeypatch.setattr(notices, "TEND_EVERY", 3600.0)  # no later reply may bring the push along
    assert one.release(held)
    assert two.ear.wait(lambda: waiter.id in two.ear.pushed, LONG)


def test_a_notification_that_comes_before_a_ping_keeps_the_connection(
    two: Queued, server: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    two.opened.follow(frozenset({"followed"}), 10.0)
    listener = inside(two)._listener
    wire, understand = listener._wire, listener._understand

    def notified(told: Any) -> None:
        understand(told)
        server.sql("NOTIFY multilock_changes, 'another name'")
        eventually(wire.stale)

    monkeypatch.setattr(listener, "_understand", notified)
    pinged(wire)
    assert listener._wire is wire
    assert not two.ear.down


def test_a_loss_that_could_not_be_looked_at_is_looked_at_again(
    one: Queued, server: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = one.take(one.mutex())
    one.opened.watch(one.grant(held).group, [(held, one.grant(held))], WITHIN)
    transactions = inside(one)._transactions
    run = transactions.run
    failed: list[bytes] = []

    def fail_once(sql: bytes, *arguments: Any, **options: Any) -> Any:
        if sql == transactions.steps.lost and not failed:
            failed.append(sql)
            raise BackendUnavailable("no reply", unknown=True)
        return run(sql, *arguments, **options)

    monkeypatch.setattr(transactions, "run", fail_once)
    server.sql("DELETE FROM multilock.locks")
    assert one.ear.wait(lambda: one.ear.losses != [], LONG)
    assert failed
