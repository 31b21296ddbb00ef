"""Locks through PgBouncer, which shares few sessions of the server among many clients."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial

import psycopg
import pytest

import multilock
from multilock import BackendUnavailable, LockLost
from multilock.backend import Busy
from multilock.testing import FaultProxy
from multilock.testing.conformance.base import eventually
from multilock_postgresql import notices
from tests.backends.kit import NAME, WITHIN
from tests.backends.postgresql.conftest import Ask, Database, Queued
from tests.servers_postgresql import PgBouncer

LONG = 30.0  # seconds to wait at most, on a busy machine
SESSIONS = 4
ROUNDS = 10
ADVISORY = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"


@pytest.fixture(scope="module")
def bouncer(package_server: Database) -> Iterator[PgBouncer]:
    with PgBouncer(package_server, SESSIONS) as bouncer:
        yield bouncer


@pytest.fixture(autouse=True)
def short_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "TEST_WITHIN", 0.3)  # seconds until a client concludes that no notification can arrive


@pytest.fixture
def shared(bouncer: PgBouncer, ask: Ask) -> Queued:
    """Return a client behind a pooler that may use another session for each transaction."""
    return ask(bouncer.url)


def all_sessions(bouncer: PgBouncer, stack: ExitStack) -> list[psycopg.Connection]:
    """Occupy every session of the transaction pool with a transaction."""
    open_one = partial(psycopg.connect, bouncer.url, prepare_threshold=None)
    taken = [stack.enter_context(closing(open_one())) for _ in range(SESSIONS)]
    assert len({each.execute("SELECT pg_backend_pid()").fetchone() for each in taken}) == SESSIONS
    return taken


def test_a_waiter_behind_a_session_pooler_is_handed_the_name_by_push(
    bouncer: PgBouncer, ask: Ask, one: Queued, server: Database
) -> None:
    far = ask(bouncer.session_url)
    held = one.take(one.mutex())
    waiter = far.wait(far.mutex())
    assert one.release(held)
    assert far.ear.wait(lambda: waiter.id in far.ear.pushed, LONG)
    assert not far.ear.down
    assert server.sql(ADVISORY) == [(1,)]
    far.close()
    eventually(lambda: server.sql(ADVISORY) == [(0,)], LONG)


def test_a_waiter_behind_a_transaction_pooler_reports_no_push_and_asks_again(
    shared: Queued, bouncer: PgBouncer, one: Queued, server: Database
) -> None:
    held = one.take(one.mutex())
    waiter = shared.wait(shared.mutex())
    [trouble] = shared.ear.down.values()
    assert "give listen=host:port" in trouble
    assert one.release(held)
    assert shared.holds(waiter, join=True)
    assert server.sql(ADVISORY) == [(0,)]
    with ExitStack() as stack:
        channels = [each.execute("SELECT pg_listening_channels()").fetchall() for each in all_sessions(bouncer, stack)]
    assert channels == [[]] * SESSIONS


def test_a_session_that_others_use_as_well_keeps_its_lock_timeout(shared: Queued, bouncer: PgBouncer) -> None:
    shared.release(shared.take(shared.mutex()))
    with ExitStack() as stack:
        shown = {each.execute("SHOW lock_timeout").fetchone() for each in all_sessions(bouncer, stack)}
    assert shown == {("0",)}


def test_a_lost_reply_to_the_end_of_listening_keeps_no_waiter_from_its_turn(
    bouncer: PgBouncer, ask: Ask, one: Queued
) -> None:
    held = one.take(one.mutex())
    with FaultProxy.before(bouncer.url) as proxy:
        far = ask(proxy.url)
        fault = proxy.drop_reply(b"UNLISTEN")
        waiter = far.wait(far.mutex())
        assert fault.happened
        assert far.ear.down
        assert one.release(held)
        assert far.holds(waiter, join=True)


def test_an_own_address_for_listening_brings_the_pushes_back(
    bouncer: PgBouncer, ask: Ask, one: Queued, server: Database
) -> None:
    far = ask(bouncer.url, listen=server.endpoint)
    held = one.take(one.mutex())
    waiter = far.wait(far.mutex())
    assert one.release(held)
    assert far.ear.wait(lambda: waiter.id in far.ear.pushed, LONG)
    grant = far.ear.pushed[waiter.id]
    far.opened.watch(grant.group, [(waiter, grant)], WITHIN)
    server.sql("DELETE FROM multilock.locks")
    assert far.ear.wait(lambda: far.ear.losses != [], LONG)


def test_an_address_for_listening_that_leads_elsewhere_is_reported(
    bouncer: PgBouncer, ask: Ask, one: Queued, server: Database
) -> None:
    server.sql("CREATE DATABASE session")  # PgBouncer uses this name for another database
    far = ask(bouncer.session_url, listen=server.endpoint)
    held = one.take(one.mutex())
    ended = threading.Event()

    def report_changes() -> None:
        with psycopg.connect(server.url.replace("/postgres", "/session"), autocommit=True) as other:
            while not ended.wait(0.02):
                other.execute("NOTIFY multilock_changes, 'another name'")

    with ThreadPoolExecutor(1) as thread:
        reported = thread.submit(report_changes)
        try:
            waiter = far.wait(far.mutex())
        finally:
            ended.set()
        reported.result(LONG)
    [trouble] = far.ear.down.values()
    assert "do not arrive at the address in listen=" in trouble
    assert one.release(held)
    assert far.holds(waiter, join=True)


def test_nobody_gets_a_name_that_is_guarded_through_the_pooler(
    shared: Queued, one: Queued, bouncer: PgBouncer, server: Database
) -> None:
    held = shared.take(shared.mutex())
    token = shared.token(held)
    with closing(psycopg.connect(bouncer.url, prepare_threshold=None)) as session:
        multilock.guard(session, name=NAME, token=token)
        server.sql("UPDATE multilock.locks SET until = clock_timestamp(), sure = NULL")
        assert isinstance(one.attempt(one.mutex()), Busy)
        session.commit()
        one.take(one.mutex())
        with pytest.raises(LockLost):
            multilock.guard(session, name=NAME, token=token)


def test_a_request_that_waits_for_a_session_is_not_executed_after_it_was_given_up(
    shared: Queued, one: Queued, bouncer: PgBouncer
) -> None:
    shared.release(shared.take(shared.mutex()))
    with ExitStack() as stack:
        all_sessions(bouncer, stack)
        with pytest.raises(BackendUnavailable) as caught:
            shared.attempt(shared.mutex(), within=0.3)
        assert caught.value.unknown
    shared.opened.ping(WITHIN)  # the sessions are free again
    one.take(one.mutex())


def test_more_clients_than_sessions_take_turns_on_both_faces(bouncer: PgBouncer, server: Database) -> None:
    def on_thread(name: str) -> list[int]:
        tokens = []
        with multilock.connect(bouncer.url) as client:
            for _ in range(ROUNDS):
                with client.lock(name) as lease:
                    tokens.append(lease.fence())
        return tokens

    async def on_loop(name: str) -> list[int]:
        tokens = []
        async with multilock.connect_async(bouncer.url) as client:
            for _ in range(ROUNDS):
                async with client.lock(name) as lease:
                    tokens.append(lease.fence())
        return tokens

    async def together() -> list[list[int]]:
        threads = (asyncio.to_thread(on_thread, f"thread {number}") for number in range(SESSIONS))
        return await asyncio.gather(*threads, *(on_loop(f"task {number}") for number in range(SESSIONS)))

    for tokens in asyncio.run(together()):
        assert tokens == sorted(set(tokens))
        assert len(tokens) == ROUNDS
