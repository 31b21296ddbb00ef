"""Requests that are interrupted, whose reply is lost, or that the server executes too late: what do they leave at the
server?"""

from __future__ import annotations

import gc
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from multilock import BackendUnavailable, dialling, now
from multilock.backend import Busy, Claim, Granted, Returned
from multilock.kernel import worker
from multilock.testing import Fault, FaultProxy
from multilock.testing.conformance.base import eventually
from multilock_postgresql import transactions, transport
from tests.backends.kit import NAME, WITHIN, interrupted
from tests.backends.postgresql.conftest import Ask, Database, Queued

Call = Callable[[Any, Claim, Granted], object]

RELEASES: dict[str, Call] = {
    "release": lambda opened, claim, granted: opened.release(claim, granted, False, WITHIN),
    "cancel": lambda opened, claim, granted: opened.release(claim, granted, True, WITHIN),
    "rest": lambda opened, claim, granted: opened.rest(claim, granted, False, 30.0, WITHIN),
    "unsure rest": lambda opened, claim, granted: opened.rest(claim, granted, True, 30.0, WITHIN),
}
HOLDERS: dict[str, Call] = {
    **RELEASES,
    "repeated attempt": lambda opened, claim, _: opened.attempt(claim, False, WITHIN),
    "renewal": lambda opened, claim, granted: opened.renew(granted.group, [(claim, granted)], WITHIN),
}
# Requests that change nothing, each with bytes that only its message contains.
LOOKS: dict[str, tuple[bytes, Callable[[Any], object]]] = {
    "inspect": (b"multilock/", lambda opened: opened.inspect(NAME, WITHIN)),
    "inspect_all": (b"multilock/", lambda opened: list(opened.inspect_all("", WITHIN))),
    "follow": (b"multilock/", lambda opened: opened.follow(frozenset({NAME}), WITHIN)),
    "diagnose": (b"pg_stat_replication", lambda opened: opened.diagnose(WITHIN)),
    "ping": (b"SELECT 1", lambda opened: opened.ping(WITHIN)),
}


@pytest.fixture
def proxy(server: Database) -> Iterator[FaultProxy]:
    with FaultProxy.before(server.url) as proxy:
        yield proxy


@pytest.fixture
def far(ask: Ask, proxy: FaultProxy) -> Queued:
    """Return a client that reaches the server through the proxy."""
    return ask(proxy.url)


def lost(proxy: FaultProxy, request: bytes, call: Callable[[], object]) -> BackendUnavailable:
    """Let the server execute the next request that contains these bytes, and drop its reply."""
    fault = proxy.drop_reply(request)
    with pytest.raises(BackendUnavailable) as caught:
        call()
    assert fault.happened
    return caught.value


@pytest.mark.parametrize("first", ["release", "cancel"])
def test_a_repeated_release_takes_nothing_from_the_waiter_that_got_the_name(
    far: Queued, two: Queued, proxy: FaultProxy, first: str
) -> None:
    held = far.take(far.mutex())
    waiter = two.wait(two.mutex())
    assert lost(proxy, held.id.encode(), lambda: RELEASES[first](far.opened, held, far.grant(held))).unknown
    assert two.ear.wait(lambda: waiter.id in two.ear.pushed)
    assert far.release(held, unsure=True) is False
    assert two.holds(waiter)
    assert two.token(waiter) == two.ear.pushed[waiter.id].token


def test_a_repeated_rest_is_not_longer_and_no_cancel_ends_it(
    far: Queued, two: Queued, proxy: FaultProxy, server: Database
) -> None:
    held = far.take(far.mutex())
    assert lost(proxy, held.id.encode(), lambda: RELEASES["rest"](far.opened, held, far.grant(held))).unknown
    until = "SELECT until FROM multilock.locks"
    before = server.sql(until)
    RELEASES["unsure rest"](far.opened, held, far.grant(held))
    assert server.sql(until) == before
    far.release(held, unsure=True)
    assert not two.holds(two.mutex())


def test_a_join_whose_reply_is_lost_keeps_its_place(far: Queued, two: Queued, one: Queued, proxy: FaultProxy) -> None:
    held = one.take(one.mutex())
    first = far.mutex()
    one.take(one.mutex(name="other"))
    far.wait(far.mutex(name="other"))  # from now on the client listens, so that its next request joins the queue
    assert lost(proxy, first.id.encode(), lambda: far.attempt(first, join=True)).unknown
    second = two.wait(two.mutex())
    far.wait(first)
    one.release(held)
    assert far.ear.wait(lambda: first.id in far.ear.pushed)
    assert second.id not in two.ear.pushed


@pytest.mark.parametrize("late", HOLDERS)
def test_a_request_of_the_former_holder_that_is_executed_late_changes_nothing(
    far: Queued, two: Queued, proxy: FaultProxy, server: Database, late: str
) -> None:
    held = far.take(far.mutex())
    fault = proxy.hold_request(held.id.encode())
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(HOLDERS[late], far.opened, held, far.grant(held))
        fault.wait(WITHIN)
        server.sql("UPDATE multilock.locks SET until = clock_timestamp(), sure = clock_timestamp()")
        two.take(two.mutex())
        before = server.sql("SELECT * FROM multilock.locks")
        fault.release()
        assert reply.result(WITHIN) in (Returned(False), [None]) or isinstance(reply.result(), Busy)
    assert server.sql("SELECT * FROM multilock.locks") == before


def test_a_reader_may_be_cancelled_while_its_request_is_under_way(one: Queued, two: Queued, server: Database) -> None:
    """Both lock the row of the name, and the row of the reader."""
    one.take(one.reader())
    reader = two.reader()
    waiting = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    with psycopg.connect(server.url) as operator, ThreadPoolExecutor(2) as threads:
        operator.execute("SELECT FROM multilock.locks FOR UPDATE")
        late = threads.submit(two.attempt, reader)
        eventually(lambda: len(server.sql(waiting)) == 1)
        row = "INSERT INTO multilock.holders SELECT %s, key, '', token, 20000, clock_timestamp() + interval '20 s'"
        server.sql(f"{row} FROM multilock.locks", reader.id)  # as if an earlier request had been executed
        released = threads.submit(two.release, reader, unsure=True)
        eventually(lambda: len(server.sql(waiting)) == 2)
        operator.rollback()
        assert isinstance(late.result(), Busy)
        assert released.result()
    assert server.sql("SELECT 1 FROM multilock.holders WHERE id = %s", reader.id) == []


def test_a_waiter_finds_the_handover_whose_push_was_lost(one: Queued, far: Queued, proxy: FaultProxy) -> None:
    held = one.take(one.mutex())
    waiter = far.wait(far.mutex())
    proxy.black_hole("down")
    one.release(held)
    proxy.cut()
    proxy.heal()
    assert far.ear.wait(lambda: None in far.ear.wakes)
    assert waiter.id not in far.ear.pushed
    assert far.holds(waiter, join=True)


@pytest.mark.parametrize("request_", ["LISTEN", "pg_advisory_lock_shared"])
def test_a_waiter_whose_client_could_not_listen_has_left_no_place(
    one: Queued, ask: Ask, proxy: FaultProxy, server: Database, request_: str
) -> None:
    held = one.take(one.mutex())
    client = ask(proxy.url)
    waiter = client.mutex()
    lost(proxy, request_.encode(), lambda: client.attempt(waiter, join=True))
    assert server.sql("SELECT id FROM multilock.queue") == []
    client.wait(waiter)
    one.release(held)
    assert client.ear.wait(lambda: waiter.id in client.ear.pushed)


def test_a_loss_is_reported_although_the_first_look_had_no_reply(
    far: Queued, proxy: FaultProxy, server: Database
) -> None:
    held = far.take(far.mutex())
    grant = far.grant(held)
    lost(proxy, held.id.encode(), lambda: far.opened.watch(grant.group, [(held, grant)], WITHIN))
    server.sql("DELETE FROM multilock.locks WHERE id = %s", held.id)
    assert far.ear.wait(lambda: held.id in [claim_id for claim_id, _ in far.ear.losses])


def test_a_force_release_with_a_lost_reply_frees_the_name_and_is_reported(
    far: Queued, one: Queued, two: Queued, proxy: FaultProxy
) -> None:
    held = one.take(one.mutex())
    one.opened.watch(one.grant(held).group, [(held, one.grant(held))], WITHIN)
    assert lost(proxy, f"multilock/{NAME}".encode(), lambda: far.opened.force_release(NAME, WITHIN)).unknown
    assert one.ear.wait(lambda: held.id in [claim_id for claim_id, _ in one.ear.losses])
    assert far.opened.force_release(NAME, WITHIN) is False
    two.take(two.mutex())


def test_tables_are_made_even_if_their_client_gives_up_meanwhile(ask: Ask, proxy: FaultProxy, server: Database) -> None:
    server.sql("DROP SCHEMA IF EXISTS unsure CASCADE")
    client = ask(proxy.url, schema="unsure")
    claim = client.mutex()
    lost(proxy, b"CREATE TABLE", lambda: client.attempt(claim))
    eventually(lambda: server.sql("SELECT to_regclass('unsure.locks') IS NOT NULL") == [(True,)])
    client.take(claim)


def test_tables_that_exist_are_found_without_a_wait_for_a_client_that_makes_some(one: Queued, server: Database) -> None:
    one.take(one.mutex())
    opened: Any = one.opened
    with psycopg.connect(server.url) as maker:
        maker.execute("SELECT pg_advisory_xact_lock(hashtextextended('multilock', 0))")
        opened._transactions.create(1.0)


@pytest.mark.parametrize("look", LOOKS)
def test_a_read_without_a_reply_raises_and_the_next_one_is_answered(far: Queued, proxy: FaultProxy, look: str) -> None:
    request, call = LOOKS[look]
    lost(proxy, request, lambda: call(far.opened))
    call(far.opened)


def test_a_renewal_counts_although_the_sweep_after_it_has_no_reply(far: Queued, proxy: FaultProxy) -> None:
    held = far.take(far.mutex())
    opened: Any = far.opened
    opened._recipe._swept = -1e9
    fault = proxy.drop_reply(b"sweep_1")
    [renewed] = opened.renew(far.grant(held).group, [(held, far.grant(held))], WITHIN)
    assert isinstance(renewed, Granted)
    assert fault.happened


def test_a_renewal_beside_a_locked_row_survives_a_lost_reply_and_reports_a_loss(
    far: Queued, proxy: FaultProxy, server: Database
) -> None:
    claims = [far.take(far.mutex(name=name)) for name in ("kept", "locked", "lost")]
    held = [(claim, far.grant(claim)) for claim in claims]
    group = held[0][1].group
    server.sql("DELETE FROM multilock.locks WHERE id = %s", claims[2].id)
    with psycopg.connect(server.url) as operator:
        operator.execute("UPDATE multilock.locks SET who = 'me' WHERE id = %s", [claims[1].id])
        lost(proxy, claims[0].id.encode(), lambda: far.opened.renew(group, held, 2.0))
        kept, locked, gone = far.opened.renew(group, held, 2.0)
        operator.rollback()
    assert isinstance(kept, Granted)
    assert isinstance(locked, BackendUnavailable)
    assert gone is None
    assert isinstance(far.opened.renew(group, held[1:2], WITHIN)[0], Granted)


def test_a_renewal_without_a_reply_delays_no_other_renewal(far: Queued, proxy: FaultProxy) -> None:
    claims = [far.take(far.mutex(name=name)) for name in ("long", "short")]
    long, short = [[(claim, far.grant(claim))] for claim in claims]
    late = proxy.hold_request(b"renew_1")
    with ThreadPoolExecutor(1) as thread:
        held = thread.submit(far.opened.renew, far.grant(claims[0]).group, long, WITHIN)
        late.wait(WITHIN)
        try:
            [renewed] = far.opened.renew(far.grant(claims[1]).group, short, WITHIN / 4)
        finally:
            late.release()
        assert isinstance(renewed, Granted)
        assert isinstance(held.result()[0], Granted)


@pytest.mark.parametrize("kind", ["attempt", "renewal", "borrower"])
def test_after_a_request_without_reply_no_other_idle_connection_is_tried(
    far: Queued, proxy: FaultProxy, server: Database, kind: str
) -> None:
    """After a failover, every idle connection may lead to the server that has gone silent."""

    def ask(kind: str, claim: Claim, within: float) -> object:
        granted = far.grant(claim)
        if kind == "attempt":
            return far.opened.attempt(claim, False, within)
        return far.opened.renew(granted.group, [(claim, granted)], within)

    claims = [far.take(far.mutex(name=name)) for name in ("one", "two")]
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    with psycopg.connect(server.url) as session, ThreadPoolExecutor(2) as threads:
        session.execute("SELECT FROM multilock.locks FOR UPDATE")
        users = "renewal" if kind == "renewal" else "attempt"
        asked = [threads.submit(ask, users, claim, WITHIN) for claim in claims]
        eventually(lambda: server.sql(waiting) == [(2,)])
        session.rollback()
        for each in asked:
            each.result(WITHIN)
    proxy.half_open()
    if kind == "borrower":  # a renewal for which no connection can be made uses an idle one for attempts
        proxy.refuse()
    with pytest.raises(BackendUnavailable) as caught:
        ask(kind, claims[0], 0.5)
    assert caught.value.unknown
    if kind == "borrower":
        with pytest.raises(BackendUnavailable) as caught:
            ask(kind, claims[0], WITHIN)
        assert not caught.value.unknown
    else:
        ask(kind, claims[0], WITHIN)


def connected(server: Database) -> int:
    [(count,)] = server.sql("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'multilock'")
    return int(count)


def test_a_login_whose_reply_is_lost_leaves_no_session_at_the_server(
    far: Queued, proxy: FaultProxy, server: Database
) -> None:
    lost(proxy, transport.OWN_PID, lambda: far.opened.ping(WITHIN))
    eventually(lambda: connected(server) == 0)
    far.opened.ping(WITHIN)


@pytest.fixture
def late(far: Queued, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> Fault:
    """Return a login that takes longer than the request's timeout."""
    monkeypatch.setattr(dialling, "KEPT", 600.0)
    monkeypatch.setattr(dialling, "PROMISING", 600.0)
    monkeypatch.setattr(transport, "REQUEST_TIMEOUT_MAX", 600.0)
    late = proxy.hold_request(b"application_name")
    with pytest.raises(BackendUnavailable):
        far.opened.ping(0.1)
    late.wait(WITHIN)
    return late


def test_the_next_request_uses_a_login_that_took_longer_than_its_own(
    far: Queued, proxy: FaultProxy, late: Fault
) -> None:
    before = proxy.connections
    late.release()
    far.opened.ping(WITHIN)
    assert proxy.connections == before


def test_a_client_that_is_closed_leaves_no_late_session_at_the_server(
    far: Queued, server: Database, late: Fault
) -> None:
    far.close()
    late.release()
    eventually(lambda: connected(server) == 0)


def test_an_endpoint_that_accepts_no_connection_is_given_up_with_the_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transport, "REQUEST_TIMEOUT_MAX", 600.0)
    with socket.socket() as server, socket.socket() as first:
        server.bind(("127.0.0.1", 0))
        server.listen(0)  # the operating system drops further connections until the first one is accepted
        first.connect(server.getsockname())
        endpoint = transport.PgEndpoint("full", [("127.0.0.1", str(server.getsockname()[1]))], {"user": "app"})
        with pytest.raises(BackendUnavailable):
            endpoint.connect(0.1, now)
        eventually(lambda: endpoint._dialling.permits.qsize() == transport.DIALLING_AT_ONCE)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt may come in a finalizer
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_an_interrupt_while_connecting_leaves_no_session_at_the_server(one: Queued, server: Database) -> None:
    endpoint = one.opened._endpoint  # type: ignore[attr-defined]
    moment = 1
    while interrupted(lambda: endpoint.connect(WITHIN, now).close(), moment, transport, dialling, worker):
        moment += 1
    assert moment > 10
    eventually(lambda: endpoint._dialling.permits.qsize() == transport.DIALLING_AT_ONCE)
    gc.collect()
    eventually(lambda: connected(server) == 0)


def test_a_channel_reports_lost_replies_as_unknown_and_is_closed(far: Queued, two: Queued, proxy: FaultProxy) -> None:
    opened: Any = far.opened
    claim = far.mutex()
    requests: list[Callable[[Any], bool]] = [
        lambda channel: channel.attempt(claim, False),
        lambda channel: channel.release(claim, None, True),
    ]
    for send in requests:
        channel = opened.channel(WITHIN)
        fault = proxy.drop_reply(claim.id.encode())
        assert send(channel)
        fault.wait(WITHIN)
        with pytest.raises(BackendUnavailable) as caught:
            answer(channel)
        assert caught.value.unknown
        assert not channel.idle()
        channel.close()
    two.take(two.mutex())


def test_after_a_channel_had_no_reply_no_other_idle_channel_sends(
    one: Queued, proxy: FaultProxy, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = one.take(one.mutex())
    opened: Any = ask(proxy.url, request_timeout=10.0).opened
    cancelled, silent, idle = (opened.channel(WITHIN) for _ in range(3))
    proxy.half_open()
    assert cancelled.attempt(claim, False)
    cancelled.close()
    assert silent.attempt(claim, False)
    late = now() + 10.0
    monkeypatch.setattr(silent, "_now", lambda: late)
    silent.close()
    assert not idle.attempt(claim, False)
    idle.close()
    new = opened.channel(WITHIN)
    assert new.attempt(claim, False)
    assert isinstance(answer(new), Granted)
    new.close()


def answer(channel: Any) -> object:
    """Wait for the reply as an event loop does, and return it."""
    told: list[object] = []

    def arrived() -> bool:
        try:
            told.append(channel.answer())
        except BlockingIOError:
            return False
        return True

    eventually(arrived)
    return told[0]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt may come in a finalizer
# An interrupted connection is closed by the garbage collector.
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_an_interrupt_at_any_point_of_a_request_leaves_a_working_client(one: Queued, two: Queued) -> None:
    opened: Any = one.opened
    moment, more = 0, True
    while more:
        moment += 1
        claim = one.mutex(name=f"n{moment}")
        more = interrupted(lambda claim=claim: one.attempt(claim), moment, transport, transactions)  # type: ignore[misc]
        granted = one.grant(one.take(claim))
        more |= interrupted(
            lambda claim=claim, granted=granted: opened.release(claim, granted, False, WITHIN),  # type: ignore[misc]
            moment,
            *(transport, transactions),
        )
        one.release(claim, unsure=True)
        two.take(two.mutex(name=claim.name))
    assert moment > 10
    eventually(lambda: opened._connections._permits.qsize() == opened._most)
