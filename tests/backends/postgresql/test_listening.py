"""No notification is lost or delayed on the connection on which a client listens."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import psycopg
import pytest

from multilock import BackendUnavailable
from multilock.testing import FaultProxy
from multilock.testing.conformance.base import SOON, eventually
from multilock_postgresql import notices, open_backend
from multilock_postgresql.transport import PING
from tests.backends.kit import NAME, WITHIN, interrupted
from tests.backends.postgresql.conftest import Ask, Database, Queued

PINGS = 5
LONG = 30.0  # seconds to wait at most, on a busy machine


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "TEND_EVERY", 0.1)


@pytest.fixture
def proxy(server: Database) -> Iterator[FaultProxy]:
    with FaultProxy.before(server.url) as proxy:
        yield proxy


def inside(client: Queued) -> Any:
    """Return the backend of a client. These tests use its private attributes."""
    return client.opened


def pinged(wire: Any) -> None:
    """Wait until the client has pinged the server several times over this connection."""
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
    # The client sends no further pings, so the notification cannot arrive together with the reply to a ping.
    monkeypatch.setattr(notices, "TEND_EVERY", 3600.0)
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


def test_an_acquire_beside_a_new_subscription_is_reported(
    one: Queued, two: Queued, server: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notices, "TEND_EVERY", 3600.0)
    one.release(one.take(one.mutex()))
    with psycopg.connect(server.url) as follower, ThreadPoolExecutor(1) as thread:
        two.opened.follow(frozenset({NAME}), WITHIN)
        server.sql("UPDATE multilock.locks SET followed = NULL")
        follower.execute("UPDATE multilock.locks SET followed = clock_timestamp() + interval '90 s'")
        taken = thread.submit(one.take, one.mutex())
        eventually(lambda: server.sql("SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'") != [], LONG)
        follower.commit()
        taken.result(LONG)
    assert two.ear.wait(lambda: NAME in two.ear.changes, LONG)


def test_a_subscription_that_is_given_up_leaves_no_session_at_the_server(one: Queued, server: Database) -> None:
    one.take(one.mutex())
    with psycopg.connect(server.url) as other:
        other.execute("SELECT FROM multilock.locks FOR UPDATE")
        with pytest.raises(BackendUnavailable):
            one.opened.follow(frozenset({NAME}), 0.5)
        eventually(lambda: server.sql("SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'") == [], SOON)


def test_a_subscription_does_not_wait_for_a_synchronous_standby() -> None:
    with Database() as server, closing(Queued(open_backend(server.url, {"ttl": 20.0}))) as client:
        client.release(client.take(client.mutex()))
        server.sql("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
        server.sql("SELECT pg_reload_conf()")
        with psycopg.connect(server.url) as asked:
            eventually(lambda: asked.execute("SHOW synchronous_standby_names").fetchone() == ("nobody",), SOON)
        assert client.opened.follow(frozenset({NAME}), WITHIN)
        server.sql("ALTER SYSTEM RESET synchronous_standby_names")


def test_a_leader_whose_name_rests_is_reported(one: Queued, two: Queued, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "TEND_EVERY", 3600.0)
    held = one.take(one.mutex())
    two.opened.follow(frozenset({NAME}), WITHIN)
    inside(one).rest(held, one.grant(held), False, 30.0, WITHIN)
    assert two.ear.wait(lambda: NAME in two.ear.changes, LONG)


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


def test_a_loss_is_found_although_the_reply_to_the_look_at_it_was_lost(
    ask: Ask, server: Database, proxy: FaultProxy
) -> None:
    far = ask(proxy.url)
    held = far.take(far.mutex())
    far.opened.watch(far.grant(held).group, [(held, far.grant(held))], WITHIN)
    fault = proxy.drop_reply(held.id.encode())
    server.sql("DELETE FROM multilock.locks")
    assert far.ear.wait(lambda: far.ear.losses != [], LONG)
    assert fault.happened
    assert [claim_id for claim_id, _ in far.ear.losses] == [held.id]


def test_a_listener_whose_ping_has_no_reply_connects_again(one: Queued, ask: Ask, proxy: FaultProxy) -> None:
    held = one.take(one.mutex())
    far = ask(proxy.url)
    waiter = far.wait(far.mutex())
    wire = inside(far)._listener._wire
    proxy.drop_reply(PING, then="hold").wait(LONG)
    eventually(lambda: inside(far)._listener._wire is not wire, LONG)
    far.wait(waiter)
    assert one.release(held)
    assert far.ear.wait(lambda: waiter.id in far.ear.pushed, LONG)


def test_a_pause_after_a_ping_keeps_the_connection(two: Queued, monkeypatch: pytest.MonkeyPatch) -> None:
    two.opened.follow(frozenset({"followed"}), WITHIN)
    wire = inside(two)._listener._wire
    ping, receive = wire.ping, wire.receive
    pauses: list[float] = []

    def stand_still() -> None:
        ping()
        eventually(wire.stale, LONG)
        pauses.append(3 * notices.TEND_EVERY)

    def receive_late(within: float) -> Any:
        time.sleep(pauses[-1] if pauses else 0.0)
        return receive(0.0 if pauses else within)

    monkeypatch.setattr(wire, "receive", receive_late)
    monkeypatch.setattr(wire, "ping", stand_still)
    eventually(lambda: len(pauses) > 2, LONG)
    assert inside(two)._listener._wire is wire
    assert not two.ear.down


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt may come in a finalizer
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_an_interrupt_while_it_begins_to_listen_leaves_a_client_that_can_wait(
    one: Queued, ask: Ask, server: Database
) -> None:
    one.take(one.mutex())
    moment, more = -1, True
    while more:
        moment += 3
        client = ask()
        first, second = client.mutex(), client.mutex()
        more = interrupted(lambda client=client, claim=first: client.attempt(claim, True), moment, notices)  # type: ignore[misc]
        client.wait(second)
        server.sql(f"SELECT pg_notify('multilock_{client.ear.client}', %s)", second.id)
        assert client.woken(second)
        client.close()
    assert moment > 10


def test_a_follower_is_notified_of_the_next_holder_after_the_row_was_deleted(
    one: Queued, two: Queued, server: Database
) -> None:
    one.take(one.mutex())
    two.opened.follow(frozenset({NAME}), WITHIN)
    two.ear.changes.clear()
    server.sql("DELETE FROM multilock.locks")
    assert two.ear.wait(lambda: NAME in two.ear.changes)
    # wait until the client has subscribed to the new row
    eventually(lambda: server.sql("SELECT followed FROM multilock.locks") != [], SOON)
    two.ear.changes.clear()
    one.take(one.mutex())
    assert two.ear.wait(lambda: NAME in two.ear.changes)
