"""The PostgreSQL backend, called directly: which claims may hold together, and which rows the server keeps."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from psycopg import pq

import multilock
from multilock import BackendRejected, BackendUnavailable, now
from multilock.backend import Busy, Claim, Granted
from multilock.testing.conformance.base import SOON, eventually
from multilock.timing import REQUEST_TIMEOUT_MAX, heartbeat
from multilock_postgresql import transactions
from multilock_postgresql.transactions import StepQueries
from tests.backends.kit import NAME, TTL, WITHIN
from tests.backends.postgresql.conftest import Ask, Database, Queued

KEY = f"multilock/{NAME}"


def claims(client: Queued) -> list[Claim]:
    return [client.mutex(), client.writer(), client.reader(), client.permit(2)]


@pytest.mark.parametrize(("first", "second"), list(itertools.product(range(4), range(4))))
def test_only_equal_modes_hold_a_name_together(one: Queued, two: Queued, first: int, second: int) -> None:
    mine, theirs = claims(one)[first], claims(two)[second]
    one.take(mine)
    assert two.holds(theirs) is (mine.mode == theirs.mode != "x")


def test_no_more_claims_hold_than_there_are_permits(one: Queued, two: Queued) -> None:
    permits = [one.take(one.permit(2)), two.take(two.permit(2))]
    waiter = one.wait(one.permit(2))
    with pytest.raises(BackendRejected, match="has 2 permits"):
        two.attempt(two.permit(3))
    one.release(permits[0])
    assert one.ear.wait(lambda: waiter.id in one.ear.pushed)


def test_a_reader_overtakes_no_waiting_writer(one: Queued, two: Queued) -> None:
    first = one.take(one.reader())
    writer = two.wait(two.writer())
    assert not one.holds(one.reader())
    one.release(first)
    assert two.ear.wait(lambda: writer.id in two.ear.pushed)
    assert two.holds(writer)


def test_each_reader_has_a_token_of_its_own_and_keeps_it(one: Queued, two: Queued) -> None:
    readers = [one.take(one.reader()), two.take(two.reader())]
    tokens = [one.token(readers[0]), two.token(readers[1])]
    assert tokens[0] < tokens[1]
    one.take(readers[0])
    assert one.token(readers[0]) == tokens[0]


def test_a_waiter_can_leave_after_an_operator_deleted_the_row(server: Database, one: Queued, two: Queued) -> None:
    one.take(one.writer())
    first, second = two.wait(two.reader()), two.wait(two.reader())
    server.sql("DELETE FROM multilock.locks")
    assert not two.release(second)
    assert two.holds(first)


def test_a_cancel_is_final_for_a_request_that_comes_later(one: Queued, two: Queued) -> None:
    for claim in claims(one):
        one.release(claim, unsure=True)
        answer = one.attempt(claim, join=True)
        assert isinstance(answer, Busy)
        assert answer.spent
    two.take(two.mutex())


def test_a_deleted_holder_is_reported_and_not_renewed(one: Queued, two: Queued, server: Database) -> None:
    readers = [one.take(one.reader()), one.take(one.reader())]
    held = [(claim, one.grant(claim)) for claim in readers]
    one.opened.watch(held[0][1].group, held, WITHIN)
    server.sql("DELETE FROM multilock.holders WHERE id = %s", readers[0].id)
    renewed = one.opened.renew(held[0][1].group, held, WITHIN)
    assert renewed[0] is None
    assert isinstance(renewed[1], Granted)
    server.sql("DELETE FROM multilock.locks WHERE key = %s", KEY)
    assert one.ear.wait(lambda: readers[1].id in [claim_id for claim_id, _ in one.ear.losses])
    two.take(two.mutex())


def test_readers_behind_a_writer_that_gives_up_come_in_by_push(one: Queued, two: Queued) -> None:
    one.take(one.reader())
    writer, reader = one.wait(one.writer()), two.wait(two.reader())
    one.release(writer)
    assert two.ear.wait(lambda: reader.id in two.ear.pushed)


def test_a_push_counts_from_the_request_of_its_waiter(one: Queued, two: Queued) -> None:
    held = one.take(one.mutex())
    waiter = two.wait(two.mutex())
    asked_by = now()
    one.release(held)
    assert two.ear.wait(lambda: waiter.id in two.ear.pushed)
    granted = two.ear.pushed[waiter.id]
    assert granted.sent_at <= asked_by
    assert granted.valid_for == 6.0
    assert granted.short
    assert two.holds(waiter)
    assert two.token(waiter) == granted.token
    [renewed] = two.opened.renew(granted.group, [(waiter, granted)], WITHIN)
    assert isinstance(renewed, Granted)
    assert renewed.valid_for == TTL


def test_a_lock_that_is_not_renewed_gets_only_a_hint(one: Queued, two: Queued) -> None:
    held = one.take(one.mutex())
    waiter = two.wait(two.mutex(renew=False))
    one.release(held)
    assert two.woken(waiter)
    assert not two.ear.pushed


def test_a_row_that_another_transaction_has_locked_is_busy(
    one: Queued, two: Queued, server: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multilock_postgresql.transport.WAIT_SHARE", 0.01)
    one.release(one.take(one.mutex()))
    with psycopg.connect(server.url) as operator:
        operator.execute("SELECT FROM multilock.locks WHERE key = %s FOR UPDATE", (KEY,))
        assert two.attempt(two.mutex()) == Busy(heartbeat(TTL))
        operator.rollback()
    two.take(two.mutex())


def test_a_row_for_which_another_request_waits_as_well_is_busy(
    one: Queued, two: Queued, server: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multilock_postgresql.transport.WAIT_SHARE", 0.01)
    one.release(one.take(one.mutex()))
    lock = "SELECT FROM multilock.locks FOR UPDATE"
    with ThreadPoolExecutor(1) as pool, psycopg.connect(server.url) as operator:
        operator.execute(lock)
        waits = pool.submit(server.sql, lock)
        eventually(lambda: operator.execute("SELECT FROM pg_locks WHERE locktype = 'tuple'").fetchall() != [], SOON)
        assert two.attempt(two.mutex()) == Busy(heartbeat(TTL))
        operator.rollback()
        waits.result(SOON)
    two.take(two.mutex())


@pytest.mark.parametrize("lock", ["LOCK TABLE multilock.locks", "REINDEX INDEX multilock.locks_pkey"])
def test_a_locked_table_is_silence_and_not_a_taken_name(one: Queued, server: Database, lock: str) -> None:
    one.release(one.take(one.mutex()))
    with psycopg.connect(server.url) as operator:
        operator.execute(lock)
        with pytest.raises(BackendUnavailable) as caught:
            one.attempt(one.mutex(), within=0.5)
        assert not caught.value.unknown
        operator.rollback()
    one.take(one.mutex())


def test_a_single_try_beside_a_locked_table_says_that_the_server_did_not_answer(server: Database) -> None:
    async def on_loop() -> None:
        async with multilock.connect_async(server.url, request_timeout=1) as client:
            async with client.lock(NAME):
                pass
            with psycopg.connect(server.url) as operator:
                operator.execute("LOCK TABLE multilock.locks")
                with pytest.raises(BackendUnavailable):
                    await client.lock(NAME).try_acquire()
                operator.rollback()
                operator.execute("SELECT FROM multilock.locks WHERE key = %s FOR UPDATE", (KEY,))
                assert await client.lock(NAME).try_acquire() is None

    asyncio.run(on_loop())


@pytest.mark.parametrize(
    "send",
    [lambda client: client.attempt(client.mutex(), within=0.5), lambda client: client.opened.inspect(NAME, 0.5)],
    ids=["attempt", "inspect"],
)
def test_a_request_that_was_given_up_beside_a_locked_table_ends_at_the_server(
    one: Queued, two: Queued, server: Database, send: Callable[[Queued], object]
) -> None:
    one.take(one.mutex())
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'multilock' AND wait_event_type = 'Lock'"
    with psycopg.connect(server.url) as session:
        session.execute("LOCK multilock.locks IN ACCESS EXCLUSIVE MODE")
        with pytest.raises(BackendUnavailable):
            send(two)
        eventually(lambda: server.sql(waiting) == [(0,)], 4 * REQUEST_TIMEOUT_MAX)


def test_a_client_that_waits_for_the_tables_does_not_take_that_for_a_taken_name(server: Database, ask: Ask) -> None:
    with psycopg.connect(server.url) as other:
        other.execute("SELECT pg_advisory_xact_lock(hashtextextended('multilock', 0))")
        client = ask(schema="made_slowly")
        with pytest.raises(BackendUnavailable) as caught:
            client.attempt(client.mutex(), within=0.5)
        assert not caught.value.unknown


@pytest.mark.parametrize("kind", ["mutex", "reader"])
def test_a_row_that_another_transaction_has_locked_costs_no_other_lease_its_renewal(
    one: Queued, server: Database, kind: str
) -> None:
    claims = [one.take(getattr(one, kind)(name=name)) for name in ("a", "b", "c")]
    held = [(claim, one.grant(claim)) for claim in claims]
    table = "holders" if kind == "reader" else "locks"
    with psycopg.connect(server.url) as operator:
        operator.execute(f"UPDATE multilock.{table} SET who = 'me' WHERE id = %s", [claims[1].id])
        first, second, third = one.opened.renew(held[0][1].group, held, 2.0)
        assert isinstance(first, Granted)
        assert isinstance(second, BackendUnavailable)
        assert isinstance(third, Granted)
        assert isinstance(one.opened.renew(held[0][1].group, held[1:2], 0.2)[0], BackendUnavailable)
    assert all(isinstance(each, Granted) for each in one.opened.renew(held[0][1].group, held, WITHIN))


def test_few_renewals_wait_long_for_a_locked_row_and_others_only_briefly(one: Queued, server: Database) -> None:
    """If all of them waited long, a few locked rows could keep all renewing threads busy, and leases with a short ttl
    would end. If none did, a row that many other claims lock in turn would never be renewed."""
    claims = [one.take(one.mutex(name=str(number))) for number in range(transactions.PATIENT + 1)]
    held = [[(claim, one.grant(claim))] for claim in claims]
    group = held[0][0][1].group
    waiting = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    with ThreadPoolExecutor(transactions.PATIENT) as threads, psycopg.connect(server.url) as operator:
        operator.execute("SELECT FROM multilock.locks FOR UPDATE")
        patient = [threads.submit(one.opened.renew, group, each, 2 * WITHIN) for each in held[:-1]]
        eventually(lambda: len(server.sql(waiting)) == transactions.PATIENT, SOON)
        started = now()
        [locked] = one.opened.renew(group, held[-1], 2 * WITHIN)
        assert now() - started < WITHIN
        assert isinstance(locked, BackendUnavailable)
        assert not locked.unknown
        assert not any(each.done() for each in patient)
        operator.rollback()
        assert all(isinstance(each.result()[0], Granted) for each in patient)
    assert isinstance(one.opened.renew(group, held[-1], WITHIN)[0], Granted)


def test_a_renewal_locks_its_rows_in_the_order_in_which_followers_do(one: Queued, server: Database) -> None:
    """With a different order, a renewal and the subscription of a follower may wait for each other for a second."""
    held = [(claim, one.grant(claim)) for claim in (one.take(one.mutex(name=name)) for name in ("b", "a"))]
    with psycopg.connect(server.url) as first, psycopg.connect(server.url) as second, ThreadPoolExecutor(1) as thread:
        lock = "SELECT FROM multilock.locks WHERE key = %s FOR NO KEY UPDATE NOWAIT"
        first.execute(lock, ["multilock/a"])
        renewing = thread.submit(one.opened.renew, held[0][1].group, held, WITHIN)
        eventually(lambda: server.sql("SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'") != [], SOON)
        second.execute(lock, ["multilock/b"])
        second.rollback()
        first.rollback()
        assert all(isinstance(each, Granted) for each in renewing.result(SOON))


def test_the_server_makes_no_new_plan_for_each_request(one: Queued, server: Database) -> None:
    """To plan a renewal takes longer than to execute it. A plan for one request contains the values of the request."""
    steps, claim, lines = StepQueries("multilock"), b"f00d", list[str]()
    one.take(one.permit())  # this makes the tables

    def collect(told: psycopg.errors.Diagnostic) -> None:
        if told.context:  # a statement of a function
            lines.extend(line for line in (told.message_primary or "").splitlines() if "Parameters: " not in line)

    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute("LOAD 'auto_explain'")
        for setting in ("log_min_duration = 0", "log_nested_statements = on", "log_verbose = on"):
            connection.execute(f"SET auto_explain.{setting}")
        connection.execute("SET client_min_messages = log")
        connection.add_notice_handler(collect)

        def call(sql: bytes, *values: bytes) -> None:
            assert connection.pgconn.exec_params(sql, values).status == pq.ExecStatus.TUPLES_OK

        for mode in (b"x", b"r", b"p3") * 8:  # PostgreSQL makes the first five plans for their values alone
            lines.clear()
            call(steps.attempt, b"key", claim, b"@", mode, b"20000", b"0", b"f", b"f", b"", b"4000")
            call(steps.renew, b"{key}", b"{%b}" % claim, b"{20000}", b"4000")
            call(steps.release, b"key", claim, b"f", b"4000")
    assert any("holders" in line for line in lines)
    assert not [line for line in lines if claim.decode() in line]


def test_a_delete_without_triggers_ends_the_leases_of_readers(one: Queued, two: Queued, server: Database) -> None:
    reader = one.take(one.reader())
    with psycopg.connect(server.url) as operator:
        operator.execute("SET session_replication_role = replica")
        operator.execute("DELETE FROM multilock.locks")
    two.take(two.writer())
    assert one.opened.renew(one.grant(reader).group, [(reader, one.grant(reader))], WITHIN) == [None]


def join_dead(server: Database, *names: str) -> None:
    """Let waiters of one ended process join these queues: nobody holds the advisory lock of their client."""
    for number, name in enumerate(names):
        server.sql(
            "INSERT INTO multilock.queue (key, id, who, mode, until, listens) "
            "VALUES (%s, %s, '@', 'x', clock_timestamp() + interval '6 s', true)",
            f"multilock/{name}",
            f"{0x1234:016x}.{number:032x}",
        )


def test_a_waiter_whose_process_ended_is_passed_over(one: Queued, two: Queued, server: Database) -> None:
    held = one.take(one.mutex())
    join_dead(server, NAME)
    waiter = two.wait(two.mutex())
    one.release(held)
    assert two.ear.wait(lambda: waiter.id in two.ear.pushed)


def test_an_ended_process_is_passed_over_by_two_releases_at_once(one: Queued, two: Queued, server: Database) -> None:
    first, second = one.take(one.mutex(name="first")), two.take(two.mutex(name="second"))
    join_dead(server, "first", "second")
    with psycopg.connect(server.url) as slow:  # for example, its commit waits for a standby
        slow.execute("SELECT multilock.release_1('multilock/first', %s, false, 1000)", (first.id,))
        two.release(second)
        one.take(one.mutex(name="second"))
        slow.commit()
    two.take(two.mutex(name="first"))


def test_a_sweep_keeps_the_order_of_tokens(one: Queued, server: Database) -> None:
    first = one.take(one.mutex())
    one.release(first)
    server.sql("UPDATE multilock.locks SET token = token + 10000000000 - 200000000000")
    server.sql("UPDATE multilock.meta SET swept = '-infinity'")
    assert server.sql("SELECT multilock.sweep_1()") == [(1,)]
    server.sql("UPDATE multilock.meta SET floor = %s", one.token(first) + 10**12)
    assert one.token(one.take(one.mutex())) == one.token(first) + 10**12 + 1


@pytest.mark.parametrize("held", [True, False])
def test_a_row_that_is_deleted_after_a_step_back_of_the_clock_keeps_the_order_of_tokens(
    one: Queued, server: Database, held: bool
) -> None:
    first = one.take(one.mutex())
    if not held:
        one.release(first)
    server.sql("UPDATE multilock.locks SET token = token + 3600000000::bigint")
    server.sql("DELETE FROM multilock.locks")
    assert one.token(one.take(one.mutex())) > one.token(first) + 3600000000


@pytest.mark.parametrize("held", [True, False])
def test_a_row_that_is_deleted_before_a_step_back_of_the_clock_keeps_the_order_of_tokens(
    one: Queued, server: Database, held: bool
) -> None:
    first = one.take(one.mutex())
    if not held:
        one.release(first)
    server.sql("DELETE FROM multilock.locks")
    server.sql("UPDATE multilock.meta SET floor = floor + 3600000000")  # as if the clock was stepped back
    assert one.token(one.take(one.mutex())) > one.token(first) + 3600000000


def test_an_attempt_that_waited_for_a_sweep_takes_the_free_name(one: Queued, two: Queued, server: Database) -> None:
    one.release(one.take(one.mutex()))
    server.sql("UPDATE multilock.locks SET token = token - 200000000")
    server.sql("UPDATE multilock.meta SET swept = '-infinity'")
    with psycopg.connect(server.url) as sweeping, ThreadPoolExecutor(1) as thread:
        assert sweeping.execute("SELECT multilock.sweep_1()").fetchone() == (1,)
        asked = thread.submit(two.take, two.mutex())
        waits = "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        eventually(lambda: server.sql(waits) != [], SOON)
        sweeping.commit()
        asked.result(SOON)


def test_the_first_grant_of_a_new_row_has_a_greater_token_even_if_it_is_a_hand_over(
    one: Queued, two: Queued, server: Database
) -> None:
    one.take(one.mutex())
    server.sql("UPDATE multilock.meta SET floor = floor + 4000000000000000")  # as if the clock had been stepped back
    waiter = two.wait(two.mutex())
    server.sql("DELETE FROM multilock.locks")
    assert not one.holds(one.reader(), join=True)  # this call hands the name to the waiter
    assert two.ear.wait(lambda: waiter.id in two.ear.pushed)
    assert (two.ear.pushed[waiter.id].token or 0) > 4000000000000000


def test_a_request_that_waited_for_a_deleted_grant_has_a_greater_token(
    one: Queued, two: Queued, server: Database
) -> None:
    one.release(one.take(one.mutex(name="other")))
    with psycopg.connect(server.url) as inserting, ThreadPoolExecutor(1) as thread:
        inserting.execute("INSERT INTO multilock.locks (key, token) VALUES (%s, 1)", [KEY])
        late = one.mutex()
        asked = thread.submit(one.take, late)
        waits = "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        eventually(lambda: server.sql(waits) != [], SOON)
        [(stopped,)] = server.sql(waits)
        os.kill(stopped, signal.SIGSTOP)
        try:
            inserting.rollback()
            first = two.take(two.mutex())
            server.sql("DELETE FROM multilock.locks")
        finally:
            os.kill(stopped, signal.SIGCONT)
        asked.result(SOON)
    assert one.token(late) > two.token(first)


LATER = "until = until + interval '1 hour'"  # as if the clock had been stepped back


@pytest.mark.parametrize("kind", ["reader", "permit"])
def test_a_dead_holder_of_a_shared_name_keeps_nobody_out_after_a_step_back_of_the_clock(
    one: Queued, two: Queued, server: Database, kind: str
) -> None:
    if kind == "reader":
        dead, waiter = one.take(one.reader(ttl=0.3)), two.writer()
    else:
        dead, waiter = one.take(one.permit(2, ttl=0.3)), two.permit(2)
        two.take(two.permit(2))
    server.sql(f"UPDATE multilock.holders SET {LATER} WHERE id = %s", dead.id)
    eventually(lambda: two.holds(waiter, join=True), SOON)


def test_a_dead_waiter_keeps_nobody_out_after_a_step_back_of_the_clock(
    one: Queued, two: Queued, server: Database
) -> None:
    held = one.take(one.mutex())
    one.wait(one.mutex())
    reader = one.take(one.reader(name="read"))
    one.wait(one.writer(name="read"))
    server.sql(f"UPDATE multilock.queue SET {LATER}, listens = false, echo = NULL")
    two.take(two.reader(name="read"))
    one.release(held)
    two.take(two.mutex())
    assert one.release(reader)


def test_a_name_that_rests_is_free_by_the_servers_clock_only(one: Queued, two: Queued) -> None:
    held = one.take(one.mutex())
    one.opened.rest(held, one.grant(held), False, 30.0, WITHIN)  # type: ignore[attr-defined]
    assert not two.holds(two.mutex())
    info = two.opened.inspect(NAME, WITHIN)
    assert info is not None
    assert info.resting_until is not None
    assert two.opened.force_release(NAME, WITHIN)
    two.take(two.mutex())


@pytest.mark.parametrize("end", ["id = NULL, until = NULL", "until = clock_timestamp()"], ids=["free", "over"])
@pytest.mark.parametrize("by", ["release", "force"])
def test_a_waiter_whose_earlier_try_gets_the_name_leaves_the_queue(
    one: Queued, two: Queued, server: Database, end: str, by: str
) -> None:
    """Otherwise its own end would hand the name to this claim again."""
    one.take(one.mutex())
    claim = two.wait(two.mutex())
    server.sql(f"UPDATE multilock.locks SET {end}")
    two.take(claim)  # a single try, which was sent before the claim joined the queue
    assert two.release(claim) if by == "release" else one.opened.force_release(NAME, WITHIN)
    one.take(one.mutex())


@pytest.mark.parametrize("kind", ["mutex", "reader", "permit"])
def test_a_late_request_of_a_holder_that_was_released_by_force_takes_nothing(
    one: Queued, two: Queued, kind: str
) -> None:
    """Otherwise the holder would keep a lease with an old token."""
    claim = getattr(one, kind)()
    one.take(claim)
    assert two.opened.force_release(NAME, WITHIN)
    late = one.attempt(claim, join=True)
    assert isinstance(late, Busy)
    assert late.spent
    assert not two.opened.force_release(NAME, WITHIN)


def test_all_held_names_are_listed_in_pages(one: Queued, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multilock_postgresql.inspection.PAGE", 2)
    names = ["a", "a/b", "a.", "b", "."]
    for name in names:
        one.take(one.mutex(name=name))
    one.take(one.reader(name="a/readers"))
    one.take(one.reader(name="a/readers"))
    assert sorted(info.name for info in one.opened.inspect_all("", WITHIN)) == sorted([*names, "a/readers"])
    assert sorted(info.name for info in one.opened.inspect_all("a", WITHIN)) == ["a", "a.", "a/b", "a/readers"]
    assert [info.name for info in one.opened.inspect_all(".", WITHIN)] == ["."]
    [readers] = one.opened.inspect_all("a/readers", WITHIN)
    assert readers.holders == 2
