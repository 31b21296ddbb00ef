"""`multilock.guard` in a user's transaction: it fails if the lease was lost, and nobody gets the name until the
transaction ends. Tested in three isolation levels."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from psycopg import IsolationLevel, errors
from psycopg.pq import TransactionStatus

import multilock
from multilock import CapabilityMissing, ConfigurationError, Lease, LockLost, NotHeld, database_guard
from multilock.backend import Busy, Granted
from multilock.testing import FaultProxy
from multilock.testing.conformance.base import SOON, eventually
from tests.backends.kit import NAME, WITHIN, interrupted
from tests.backends.postgresql.conftest import Ask, Database, Queued, clear

LEVELS = [IsolationLevel.READ_COMMITTED, IsolationLevel.REPEATABLE_READ, IsolationLevel.SERIALIZABLE]
KEY = f"multilock/{NAME}"


@pytest.fixture(params=LEVELS, ids=lambda level: level.name)
def session(server: Database, request: pytest.FixtureRequest) -> Iterator[psycopg.Connection]:
    """Return a connection of the user, on which psycopg begins transactions."""
    connection = psycopg.connect(server.url)
    connection.isolation_level = request.param
    yield connection
    connection.close()


def guard(session: psycopg.Connection, client: Queued, claim: Any) -> None:
    multilock.guard(session, name=NAME, token=client.token(claim))


def end_lease(server: Database) -> None:
    """Make every lease end now, as if its ttl had passed."""
    server.sql("UPDATE multilock.locks SET until = clock_timestamp(), sure = NULL WHERE until IS NOT NULL")
    server.sql("UPDATE multilock.holders SET until = clock_timestamp()")


def make_rest(client: Queued, claim: Any) -> None:
    client.opened.rest(claim, client.grant(claim), False, 30.0, WITHIN)  # type: ignore[attr-defined]


def give_up_after(server: Database, client: Queued, claim: Any, way: str) -> None:
    """End the lease of ``claim`` in one of the possible ways."""
    if way == "take-over":
        end_lease(server)
        other = client.mutex()
        client.take(other)
    elif way == "hand-over":
        waiter = client.wait(client.mutex())
        client.release(claim)
        assert client.ear.wait(lambda: waiter.id in client.ear.pushed)
    elif way == "release":
        client.release(claim)
    elif way == "rest":
        make_rest(client, claim)
    elif way == "force":
        assert client.opened.force_release(NAME, WITHIN)
    else:
        server.sql("DELETE FROM multilock.locks WHERE key = %s", KEY)


WAYS = ["take-over", "hand-over", "release", "rest", "force", "delete"]


def modes(client: Queued) -> list[Any]:
    return [client.mutex(), client.reader(), client.permit(2)]


def renew(client: Queued, claim: Any) -> None:
    [renewed] = client.opened.renew(client.grant(claim).group, [(claim, client.grant(claim))], WITHIN)
    assert isinstance(renewed, Granted)


@pytest.mark.parametrize("token", [-1, 2**63, 2**70])
def test_a_number_that_is_no_token_is_refused_before_a_request(session: psycopg.Connection, token: int) -> None:
    with pytest.raises(ValueError, match="token"):
        multilock.guard(session, name=NAME, token=token)
    assert session.info.transaction_status == TransactionStatus.IDLE


def test_nobody_gets_the_name_until_the_guarded_transaction_ends(
    one: Queued, two: Queued, server: Database, session: psycopg.Connection
) -> None:
    for mode in modes(one):
        guard(session, one, one.take(mode))
        end_lease(server)
        writer = two.writer()
        answer = two.attempt(writer, join=True)
        assert isinstance(answer, Busy)
        assert answer.expires_in is None
        assert two.opened.inspect(NAME, WITHIN) is None
        session.commit()
        assert two.holds(writer, join=True)
        assert two.release(writer)


@pytest.mark.parametrize("mode", range(3))
def test_a_guard_after_the_lease_was_lost_in_any_way_fails(
    one: Queued, server: Database, session: psycopg.Connection, mode: int
) -> None:
    for way in WAYS:
        claim = one.take(modes(one)[mode])
        session.execute("SELECT 1")  # the transaction now has a snapshot from before the renewal
        renew(one, claim)
        give_up_after(server, one, claim, way)
        with pytest.raises((LockLost, errors.SerializationFailure)):
            guard(session, one, claim)
        session.rollback()
        with pytest.raises(LockLost):
            guard(session, one, claim)
        session.rollback()
        clear(server)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", range(3), ids=["mutex", "reader", "permit"])
def test_a_guard_fails_after_a_loss_although_the_tables_were_rewritten_since(
    one: Queued, server: Database, session: psycopg.Connection, mode: int, way: str
) -> None:
    held = one.take(modes(one)[mode])
    session.execute("SELECT FROM pg_class")  # from here a strict transaction sees the lease as it is now
    session.execute("CREATE TEMPORARY TABLE pg_class (oid oid, relfilenode oid)")  # no reason to overlook the rewriting
    give_up_after(server, one, held, way)
    rewrite(server)
    with pytest.raises((LockLost, errors.SerializationFailure)):
        guard(session, one, held)


def test_a_guard_passes_after_the_tables_were_rewritten_or_asks_for_a_new_transaction(
    one: Queued, server: Database, session: psycopg.Connection
) -> None:
    for mode in modes(one):
        held = one.take(mode)
        session.execute("SELECT FROM pg_class")
        rewrite(server)
        if session.isolation_level != IsolationLevel.READ_COMMITTED:
            with pytest.raises(errors.SerializationFailure):
                guard(session, one, held)
            session.rollback()
        guard(session, one, held)
        session.rollback()
        one.release(held)


def rewrite(server: Database) -> None:
    """Write the tables anew. A rewritten row no longer tells that a later version has another holder."""
    server.sql("VACUUM FULL multilock.locks")
    server.sql("CLUSTER multilock.holders USING holders_pkey")


def test_renewals_and_waiters_pass_a_guard_by(
    one: Queued, two: Queued, server: Database, session: psycopg.Connection
) -> None:
    for mode in modes(one):
        claim = one.take(mode)
        session.execute("SELECT 1")
        renew(one, claim)
        guard(session, one, claim)
        renew(one, claim)
        two.wait(two.writer())
        guard(session, one, claim)
        session.commit()
        clear(server)


def test_the_end_of_a_holding_waits_for_its_guard(
    one: Queued, server: Database, session: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    for table, mode in zip(["locks", "holders", "holders"], range(3), strict=True):
        for way in ("release", "rest", "force"):
            claim = one.take(modes(one)[mode])
            guard(session, one, claim)
            with monkeypatch.context() as patched:
                patched.setattr("multilock_postgresql.transport.WAIT_SHARE", 0.001)
                with pytest.raises(multilock.BackendUnavailable) as caught:
                    give_up_after(server, one, claim, way)
            assert not caught.value.unknown
            with pytest.raises(errors.LockNotAvailable):
                server.sql(f"SET lock_timeout = 10; DELETE FROM multilock.{table}")
            session.rollback()
            give_up_after(server, one, claim, way)
            clear(server)


def blocked(server: Database, session: psycopg.Connection) -> bool:
    pid = session.info.backend_pid
    return server.sql("SELECT wait_event_type FROM pg_stat_activity WHERE pid = %s", pid) == [("Lock",)]


@pytest.mark.parametrize("kind", range(3), ids=["mutex", "reader", "permit"])
def test_a_transaction_that_began_before_the_acquire_is_not_told_of_a_loss(
    one: Queued, session: psycopg.Connection, kind: int
) -> None:
    one.release(one.take(one.mutex()))
    session.execute("SELECT FROM pg_class")
    claim = one.take(modes(one)[kind])
    if session.isolation_level is IsolationLevel.READ_COMMITTED:
        guard(session, one, claim)
    else:
        with pytest.raises(errors.SerializationFailure, match="began before"):
            guard(session, one, claim)
    session.rollback()
    guard(session, one, claim)
    session.rollback()
    one.release(claim)
    with pytest.raises(LockLost):
        guard(session, one, claim)


def test_a_guard_fails_although_another_guard_of_the_holder_ended_during_the_take_over(
    ask: Ask, server: Database, session: psycopg.Connection
) -> None:
    """The lock of the ended guard and those of the take-over are then one list, of which PostgreSQL checks each entry
    alone: none of them says that the row has another holder."""
    server.sql("DROP SCHEMA IF EXISTS paused CASCADE")
    one, two = ask(schema="paused"), ask(schema="paused")
    held, other = one.take(one.mutex()), two.mutex()
    session.execute("SELECT FROM pg_class")  # from here a strict transaction sees the lease as it is now
    renew(one, held)
    [(acquire,)] = server.sql("SELECT pg_get_functiondef('paused.acquire_1'::regproc)")
    before, lock, after = acquire.partition("FOR NO KEY UPDATE;")
    server.sql(f"{before}{lock} PERFORM pg_advisory_xact_lock(1); {after}")
    with psycopg.connect(server.url) as ending, psycopg.connect(server.url) as pause, ThreadPoolExecutor(1) as thread:
        multilock.guard(ending, name=NAME, token=one.token(held), schema="paused")
        server.sql("UPDATE paused.locks SET until = clock_timestamp(), sure = NULL")
        pause.execute("SELECT pg_advisory_lock(1)")
        taking = thread.submit(two.attempt, other)
        eventually(lambda: server.sql("SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted") != [], SOON)
        ending.commit()
        pause.execute("SELECT pg_advisory_unlock(1)")
        taking.result(SOON)
    assert two.holds(other)
    with pytest.raises((LockLost, errors.SerializationFailure)):
        multilock.guard(session, name=NAME, token=one.token(held), schema="paused")


@pytest.mark.parametrize("commits", [True, False])
def test_a_guard_waits_for_a_take_over_that_has_not_committed(
    one: Queued, two: Queued, server: Database, session: psycopg.Connection, commits: bool
) -> None:
    claim = one.take(one.mutex())
    end_lease(server)
    with psycopg.connect(server.url) as taker, ThreadPoolExecutor(1) as thread:
        step = "SELECT token FROM multilock.acquire_1(%s, %s, '@', 'x', 20000, 0, false, false, NULL, 1000)"
        assert taker.execute(step, (KEY, two.mutex().id)).fetchone() != (None,)
        guarded: Future[None] = thread.submit(guard, session, one, claim)
        eventually(lambda: blocked(server, session), SOON)
        if commits:
            taker.commit()
            with pytest.raises((LockLost, errors.SerializationFailure)):
                guarded.result(SOON)
        else:
            taker.rollback()
            guarded.result(SOON)


def test_two_transactions_of_one_holder_and_other_readers_guard_side_by_side(
    one: Queued, two: Queued, server: Database, session: psycopg.Connection
) -> None:
    mine, other = one.take(one.reader()), two.take(two.reader())
    with psycopg.connect(server.url) as second, psycopg.connect(server.url) as third:
        guard(session, one, mine)
        guard(second, one, mine)
        guard(third, two, other)
        assert two.release(two.take(two.reader()))


def test_a_prepared_transaction_keeps_its_guard(
    one: Queued, two: Queued, server: Database, session: psycopg.Connection
) -> None:
    guard(session, one, one.take(one.mutex()))
    session.execute("PREPARE TRANSACTION 'guarded'")
    session.close()
    end_lease(server)
    claim = two.wait(two.mutex())
    server.sql("COMMIT PREPARED 'guarded'")
    assert two.holds(claim, join=True)


def test_a_guard_whose_session_is_killed_frees_the_name(
    one: Queued, two: Queued, server: Database, session: psycopg.Connection
) -> None:
    guard(session, one, one.take(one.mutex()))
    end_lease(server)
    server.sql("SELECT pg_terminate_backend(%s)", session.info.backend_pid)
    claim = two.mutex()
    eventually(lambda: two.holds(claim), SOON)


def test_a_guard_that_arrives_after_the_lease_was_lost_is_refused(one: Queued, two: Queued, server: Database) -> None:
    claim = one.take(one.mutex())
    with (
        FaultProxy.before(server.url) as proxy,
        psycopg.connect(proxy.url) as session,
        ThreadPoolExecutor(1) as thread,
    ):
        late = proxy.hold_request(b"guard_1")
        guarded: Future[None] = thread.submit(guard, session, one, claim)
        late.wait(WITHIN)
        end_lease(server)
        two.take(two.mutex())
        late.release()
        with pytest.raises(LockLost):
            guarded.result(WITHIN)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt may come in a finalizer
def test_an_interrupted_guard_keeps_nothing_after_the_transaction(
    one: Queued, server: Database, session: psycopg.Connection
) -> None:
    claim = one.take(one.mutex())
    moment, more = -1, True
    while more:
        moment += 2
        more = interrupted(lambda: guard(session, one, claim), moment, database_guard)
        session.rollback()
    assert moment > 10
    server.sql("SET lock_timeout = 1000; DELETE FROM multilock.locks")
    with pytest.raises(LockLost):
        guard(session, one, claim)


def test_a_rollback_to_a_savepoint_ends_the_guard(
    one: Queued, two: Queued, server: Database, session: psycopg.Connection
) -> None:
    claim = one.take(one.mutex())
    with session.transaction():
        with session.transaction(force_rollback=True):
            guard(session, one, claim)
        end_lease(server)
        two.take(two.mutex())


def test_a_read_only_transaction_cannot_guard(one: Queued, session: psycopg.Connection) -> None:
    session.read_only = True
    with pytest.raises(errors.ReadOnlySqlTransaction):
        guard(session, one, one.take(one.mutex()))


def test_a_lease_guards_only_an_open_transaction(lease: Lease, server: Database) -> None:
    with psycopg.connect(server.url, autocommit=True) as connection:
        with pytest.raises(ConfigurationError, match="open transaction"):
            lease.guard(connection)
        with connection.transaction():
            lease.guard(connection, idle_limit=30)
            limit = connection.execute("SHOW idle_in_transaction_session_timeout").fetchone()
            assert limit == ("30s",)
    with pytest.raises(ConfigurationError, match="here takes"):
        lease.guard(object())
    lease.release()
    with psycopg.connect(server.url) as connection, pytest.raises(NotHeld):
        lease.guard(connection)


def test_another_backend_has_no_guard() -> None:
    with (
        multilock.connect("memory://guard") as client,
        client.lock("n") as lease,
        pytest.raises(CapabilityMissing, match=r"lease\.fence"),
    ):
        lease.guard(object())


def test_a_lease_that_was_lost_here_ends_the_transaction_too(server: Database, lease: Lease) -> None:
    server.sql("DELETE FROM multilock.locks")
    assert lease.wait_lost(SOON)
    back = "INSERT INTO multilock.locks (key, id, token, ttl, until) VALUES (%s, 'it@', %s, 0, 'infinity')"
    server.sql(back, KEY, lease.token)  # a check at the server alone would now succeed
    with psycopg.connect(server.url) as connection:
        with pytest.raises(LockLost):
            lease.guard(connection)
        assert connection.info.transaction_status == TransactionStatus.INERROR


def test_a_lease_that_is_lost_while_its_guard_begins_ends_the_transaction_too(
    server: Database, lease: Lease, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = lease._kernel.backend  # type: ignore[attr-defined]
    rows = backend.guard

    def lose(name: str) -> tuple[str, str]:
        server.sql("DELETE FROM multilock.locks")
        assert lease.wait_lost(SOON)
        found: tuple[str, str] = rows(name)
        return found

    with psycopg.connect(server.url) as connection:
        connection.execute("SELECT 1")
        with monkeypatch.context() as patched:
            patched.setattr(backend, "guard", lose)
            with pytest.raises(LockLost):
                lease.guard(connection)
        assert connection.info.transaction_status == TransactionStatus.INERROR


def test_the_next_holder_writes_after_a_guarded_write_of_a_paused_one(server: Database) -> None:
    server.sql("DROP TABLE IF EXISTS written; CREATE TABLE written (at serial, token bigint)")
    with (
        multilock.connect(server.url, ttl=60) as paused,
        multilock.connect(server.url, ttl=60) as other,
        psycopg.connect(server.url) as connection,
        psycopg.connect(server.url) as late,
        ThreadPoolExecutor(1) as thread,
    ):
        # This client is paused from now on, and believes that it holds the lock.
        lease = paused.lock(NAME, renew=False).acquire()
        lease.guard(connection)
        end_lease(server)
        next_one = thread.submit(other.lock(NAME).acquire, timeout=SOON)
        eventually(lambda: server.sql("SELECT count(*) FROM multilock.queue") == [(1,)], SOON)
        assert not next_one.done()
        connection.execute("INSERT INTO written (token) VALUES (%s)", (lease.token,))
        connection.commit()
        with next_one.result() as newer:
            newer.guard(connection)
            connection.execute("INSERT INTO written (token) VALUES (%s)", (newer.token,))
            connection.commit()
            with pytest.raises(LockLost):
                lease.guard(late)
    assert server.sql("SELECT token FROM written ORDER BY at") == [(lease.token,), (newer.token,)]


@pytest.mark.parametrize("rests", [False, True], ids=["release", "rest"])
@pytest.mark.parametrize("kind", ["mutex", "reader", "permit"])
def test_a_release_that_waits_beyond_the_end_of_its_lease_reports_no_loss(
    server: Database, one: Queued, session: psycopg.Connection, kind: str, rests: bool
) -> None:
    claim = one.take(getattr(one, kind)())
    guard(session, one, claim)
    arguments = (claim, one.grant(claim), False, *((0.1,) if rests else ()), WITHIN)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(getattr(one.opened, "rest" if rests else "release"), *arguments)
        eventually(lambda: server.sql("SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'") != [])
        end_lease(server)
        session.rollback()
        assert waiting.result(SOON).ours


def test_a_set_of_locks_is_guarded_as_a_whole(server: Database) -> None:
    with multilock.connect(server.url, ttl=20) as client, psycopg.connect(server.url) as connection:
        both = client.lock_all(["a", "b"]).acquire()
        both.guard(connection)
        connection.rollback()
        client.force_release("b")
        with pytest.raises(LockLost, match="'b'"):
            both.guard(connection)
        connection.rollback()
        both.release()
        with pytest.raises(LockLost):
            both.guard(connection)
        assert connection.info.transaction_status == TransactionStatus.INERROR


def test_a_released_set_guards_nothing_although_its_locks_are_held(server: Database) -> None:
    with multilock.connect(server.url, ttl=20) as client, psycopg.connect(server.url) as connection:
        outer = client.lock("a", reentrant=True).acquire()
        both = client.lock_all(["a"], reentrant=True).acquire()
        both.guard(connection)
        connection.rollback()
        both.release()
        assert outer.is_held()
        with pytest.raises(NotHeld):
            both.guard(connection)
