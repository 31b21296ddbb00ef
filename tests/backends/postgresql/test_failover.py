"""The primary dies and its standby takes over: which leases and tokens survive, with both kinds of standby."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import psycopg
import pytest

import multilock
from multilock import BackendUnavailable, LockLost, now
from multilock.backend import Claim, Granted
from multilock.testing.conformance.base import eventually
from tests.backends.kit import NAME, WITHIN
from tests.backends.postgresql.conftest import Ask, Database, Queued
from tests.servers_postgresql import programs

pytestmark = pytest.mark.rare  # two servers for each test

LONG = 30.0  # seconds to wait at most, on a busy machine


class Standby(Database):
    """A standby, which copies the primary until `promote` is called."""

    def __init__(self, primary: Database) -> None:
        super().__init__()
        self._primary = primary

    def making(self, data: Path) -> list[str]:
        source = ["-h", self._primary.host, "-p", str(self._primary.port), "-U", "app"]
        return [str(programs() / "pg_basebackup"), *source, "-D", str(data), "-R", "--checkpoint=fast", "--no-sync"]

    def promote(self) -> None:
        assert self.sql("SELECT pg_promote()") == [(True,)]


@pytest.fixture
def primary() -> Iterator[Database]:
    # With a short delay the WAL writer would flush commits even if no client waits for the flush.
    with Database(wal_writer_delay="10s") as server:
        yield server


@pytest.fixture
def standby(primary: Database, ask: Ask) -> Iterator[Standby]:
    first = ask(primary.url)
    first.release(first.take(first.mutex()))  # so that the standby has the tables from its start
    with Standby(primary) as server:
        yield server


@pytest.fixture
def client(primary: Database, standby: Standby, ask: Ask) -> Queued:
    """Return a client that knows both servers. It uses the server that accepts writes."""
    return ask(f"postgresql://app@{primary.endpoint},{standby.endpoint}/postgres")


def sooner_or_later(call: Callable[[], object]) -> object:
    """Repeat a request until a server answers."""
    told: list[object] = []

    def answered() -> bool:
        try:
            told.append(call())
        except BackendUnavailable:
            return False
        return True

    eventually(answered, LONG)
    return told[0]


def renew(client: Queued, claim: Claim) -> object:
    return client.opened.renew("", [(claim, client.grant(claim))], WITHIN)[0]


def test_after_an_asynchronous_failover_a_copied_lease_lives_and_a_lost_one_cannot_write(
    client: Queued, primary: Database, standby: Standby, ask: Ask
) -> None:
    copied = client.take(client.mutex(name="copied"))
    eventually(lambda: standby.sql("SELECT 1 FROM multilock.locks WHERE id = %s", copied.id) != [], LONG)
    standby.sql("ALTER SYSTEM SET primary_conninfo = ''")
    standby.sql("SELECT pg_reload_conf()")
    eventually(lambda: primary.sql("SELECT 1 FROM pg_stat_replication") == [], LONG)
    lost = client.take(client.mutex(name="lost"))
    primary.kill()
    standby.promote()
    assert isinstance(sooner_or_later(lambda: renew(client, copied)), Granted)
    other = ask(standby.url)
    assert not other.holds(other.mutex(name="copied"))
    again = other.take(other.mutex(name="lost"))
    assert other.token(again) > client.token(lost)
    assert renew(client, lost) is None
    with closing(psycopg.connect(standby.url)) as session, pytest.raises(LockLost):
        multilock.guard(session, name="lost", token=client.token(lost))


def test_after_a_synchronous_failover_nobody_enters_while_a_lost_hand_over_is_believed(
    client: Queued, primary: Database, standby: Standby, ask: Ask
) -> None:
    primary.sql("ALTER SYSTEM SET synchronous_standby_names = '*'")
    primary.sql("SELECT pg_reload_conf()")
    eventually(lambda: primary.sql("SELECT sync_state FROM pg_stat_replication") == [("sync",)], LONG)
    held = client.take(client.mutex())
    [(receiver,)] = standby.sql("SELECT pid FROM pg_stat_activity WHERE backend_type = 'walreceiver'")
    os.kill(receiver, signal.SIGSTOP)
    with pytest.raises(BackendUnavailable) as caught:
        client.attempt(client.mutex(name="new"), within=0.5)
    assert caught.value.unknown
    waiting = ask(primary.url)
    waiter = waiting.wait(waiting.mutex(ttl=4.0))
    # `sure` of the former lease protects the handover, so the commit does not wait for the standby.
    assert client.release(held)
    assert waiting.ear.wait(lambda: waiter.id in waiting.ear.pushed, LONG)
    pushed = waiting.ear.pushed[waiter.id]
    primary.kill()
    os.kill(receiver, signal.SIGCONT)
    standby.promote()
    assert standby.sql("SELECT id FROM multilock.locks WHERE key = 'multilock/job'") == [(held.id,)]
    third = ask(standby.url)
    assert pushed.valid_for is not None
    while now() < pushed.sent_at + pushed.valid_for:
        assert not third.holds(third.mutex())
        time.sleep(0.1)
    assert third.opened.force_release(NAME, WITHIN)
    assert pushed.token is not None
    assert third.token(third.take(third.mutex())) > pushed.token


def test_a_primary_that_still_runs_after_a_synchronous_failover_keeps_no_holder(
    primary: Database, standby: Standby
) -> None:
    primary.sql("ALTER SYSTEM SET synchronous_standby_names = '*'")
    primary.sql("SELECT pg_reload_conf()")
    eventually(lambda: primary.sql("SELECT sync_state FROM pg_stat_replication") == [("sync",)], LONG)
    with multilock.connect(primary.url, ttl=2.0) as one, multilock.connect(standby.url, ttl=2.0) as two:
        old = one.lock(NAME).acquire()
        standby.promote()
        standby.sql("ALTER SYSTEM RESET synchronous_standby_names")  # it has no standby of its own
        standby.sql("SELECT pg_reload_conf()")
        new = two.lock(NAME).acquire(timeout=LONG)
        assert not old.is_held()
        assert new.fence() > (old.token or 0)


def test_a_late_renewal_after_a_crash_admits_nobody_while_a_lost_hand_over_is_believed(
    primary: Database, ask: Ask
) -> None:
    """A pooler may keep a renewal until the server is back."""
    one, two, three = ask(primary.url), ask(primary.url), ask(primary.url)
    # Just after the start of the server, every handover waits for the disk.
    eventually(lambda: primary.sql("SELECT now() - pg_postmaster_start_time() > interval '4 s'") == [(True,)], LONG)
    held = one.take(one.mutex(ttl=2.0))
    second = two.wait(two.mutex(ttl=3.0))
    third = three.wait(three.mutex())
    assert one.release(held)
    assert two.ear.wait(lambda: second.id in two.ear.pushed, LONG)
    assert two.release(second)
    assert three.ear.wait(lambda: third.id in three.ear.pushed, LONG)
    pushed = three.ear.pushed[third.id]
    primary.kill()
    primary.start()
    assert primary.sql("SELECT id FROM multilock.locks") == [(second.id,)]  # the second handover is lost
    late = [(second, two.ear.pushed[second.id])]
    assert sooner_or_later(lambda: two.opened.renew("", late, WITHIN)[0] is not None)
    other = ask(primary.url)
    assert pushed.valid_for is not None
    while now() < pushed.sent_at + pushed.valid_for:
        assert not other.holds(other.mutex())
        time.sleep(0.1)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT], ids=["crash", "restart"])
def test_after_a_crash_a_commit_that_no_standby_confirmed_covers_no_hand_over(
    client: Queued, primary: Database, standby: Standby, ask: Ask, end: signal.Signals
) -> None:
    """A primary shows commits after its crash, or a fast restart, although the standby has not confirmed them."""
    primary.sql("ALTER SYSTEM SET synchronous_standby_names = '*'")
    primary.sql("SELECT pg_reload_conf()")
    eventually(lambda: primary.sql("SELECT sync_state FROM pg_stat_replication") == [("sync",)], LONG)
    held = client.take(client.mutex(ttl=2.0))
    first = client.wait(client.mutex())
    standby.sql("ALTER SYSTEM SET primary_conninfo = ''")
    standby.sql("SELECT pg_reload_conf()")
    eventually(lambda: primary.sql("SELECT 1 FROM pg_stat_replication") == [], LONG)
    with pytest.raises(BackendUnavailable):
        client.opened.release(held, client.grant(held), False, 0.5)  # hands the name to the first waiter
    if end == signal.SIGKILL:
        primary.kill()
    else:
        os.kill(primary.pid, end)
        eventually(lambda: not primary.alive, LONG)
    primary.start()
    waiting = ask(primary.url)
    waiter = waiting.mutex()
    assert not sooner_or_later(lambda: waiting.holds(waiter, join=True))
    other = ask(primary.url)
    with suppress(BackendUnavailable):  # the handover waits for the standby
        assert other.opened.release(first, None, False, 1.0).ours
        assert waiting.ear.wait(lambda: waiter.id in waiting.ear.pushed, LONG)
    primary.kill()
    standby.promote()
    third = ask(standby.url)
    eventually(lambda: third.holds(third.mutex()), LONG)
    pushed = waiting.ear.pushed.get(waiter.id)
    assert pushed is None or now() > pushed.sent_at + (pushed.valid_for or 0.0)
