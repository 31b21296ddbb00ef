"""Failures of servers, roles and connections, and the errors that the client then raises."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

import multilock
from multilock import BackendRejected, BackendUnavailable, MultilockError, now
from multilock.backend import Claim, Granted
from multilock.testing import FaultProxy
from multilock.testing.conformance.base import SOON, eventually
from multilock_postgresql import open_backend
from tests.backends.kit import NAME, WITHIN
from tests.backends.postgresql.conftest import Ask, Database, Queued
from tests.servers_postgresql import as_its_user, programs


@pytest.fixture
def own() -> Iterator[Database]:
    with Database() as server:
        yield server


def by_hand(server: Database) -> Queued:
    return Queued(open_backend(server.url, {"ttl": 20.0}))


def as_role(server: Database, role: str, *settings: str) -> str:
    """Make a role with these settings that may create tables. Returns its URL."""
    server.sql(f"CREATE ROLE {role} LOGIN")
    server.sql(f"GRANT CREATE ON DATABASE postgres TO {role}")
    for setting in settings:
        server.sql(f"ALTER ROLE {role} SET {setting}")
    return server.url.replace("app@", f"{role}@")


def test_clients_that_begin_at_once_make_the_tables_once(ask: Ask) -> None:
    clients = [ask(schema="at_once") for _ in range(6)]
    with ThreadPoolExecutor(6) as pool:
        held = list(pool.map(lambda client: client.holds(client.mutex()), clients))
    assert sorted(held) == [False] * 5 + [True]


def test_a_role_without_rights_is_told_what_an_owner_must_run(server: Database, ask: Ask) -> None:
    server.sql("CREATE ROLE no_rights LOGIN")
    poor = ask(server.url.replace("app@", "no_rights@"), schema="owned")
    with pytest.raises(BackendRejected, match=r"in the schema 'owned'.*doctor --sql"):
        poor.attempt(poor.mutex())
    printed = poor.opened.sql()  # type: ignore[attr-defined]
    server.sql(printed)
    with pytest.raises(BackendRejected, match="grant this role the rights"):
        poor.attempt(poor.mutex())
    server.sql("GRANT USAGE ON SCHEMA owned TO no_rights")
    server.sql("GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA owned TO no_rights")
    claim = poor.take(poor.mutex())
    server.sql("REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA owned FROM PUBLIC")
    with pytest.raises(BackendRejected, match="grant this role the rights"):
        poor.release(claim)
    server.sql("GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA owned TO no_rights")
    assert poor.release(claim)


def test_an_open_migration_that_makes_the_tables_again_delays_no_request(server: Database, ask: Ask) -> None:
    client = ask()
    holder, reader = client.take(client.mutex()), client.take(client.mutex(name="read", kind="read", fair=True))
    with psycopg.connect(server.url) as migration:
        migration.execute(client.opened.sql())  # type: ignore[attr-defined]
        for right, what in ("USAGE", "SCHEMA multilock"), ("DELETE", "ALL TABLES IN SCHEMA multilock"):
            migration.execute(f"GRANT {right} ON {what} TO pg_monitor")
        for claim in holder, reader:
            [renewed] = client.opened.renew(client.grant(claim).group, [(claim, client.grant(claim))], WITHIN)
            assert isinstance(renewed, Granted)
        waiter = client.wait(client.mutex())
        assert client.release(holder)
        assert client.ear.wait(lambda: waiter.id in client.ear.pushed)
        migration.rollback()


@pytest.mark.parametrize("limit", ["CONNECTION LIMIT 1", "NOLOGIN"])
def test_a_lease_is_renewed_if_its_role_may_make_no_further_connection(server: Database, ask: Ask, limit: str) -> None:
    role = limit.split()[0].lower()
    url = as_role(server, role)
    client = ask(url, schema=role)
    held = client.take(client.mutex())
    server.sql(f"ALTER ROLE {role} {limit}")
    for _ in range(2):
        [renewed] = client.opened.renew(client.grant(held).group, [(held, client.grant(held))], WITHIN)
        assert isinstance(renewed, Granted)
    with pytest.raises(MultilockError, match=r"too many connections|not permitted to log in"):
        ask(url, schema=role).attempt(held)
    assert client.release(held)


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_another_isolation_level_of_the_role_changes_nothing(server: Database, ask: Ask, level: str) -> None:
    role = f"role_{level[:4]}"
    url = as_role(server, role, f"default_transaction_isolation = '{level}'")
    client, other = ask(url, schema=role), ask(url, schema=role)
    claim = client.take(client.mutex())
    waiter = other.wait(other.mutex())
    assert client.release(claim)
    assert other.ear.wait(lambda: waiter.id in other.ear.pushed)
    assert [finding.code for finding in client.opened.diagnose(WITHIN)].count("postgresql-isolation") == 1


def test_a_clock_of_the_roles_own_ends_no_lease(one: Queued, server: Database, ask: Ask) -> None:
    server.sql("CREATE SCHEMA own_clock")
    body = "RETURNS timestamptz LANGUAGE sql AS 'SELECT timestamptz ''2000-01-01'''"
    server.sql(f"CREATE FUNCTION own_clock.clock_timestamp() {body}")
    one.opened.inspect(NAME, WITHIN)  # this makes the tables
    far = ask(as_role(server, "travels", "search_path = own_clock, pg_catalog"))
    server.sql("GRANT USAGE ON SCHEMA multilock, own_clock TO travels")
    server.sql("GRANT ALL ON ALL TABLES IN SCHEMA multilock TO travels")
    held = far.take(far.mutex())
    assert not one.holds(one.mutex())
    assert far.opened.inspect(held.name, WITHIN) is not None
    assert far.release(held)
    held = one.take(one.mutex())
    assert not far.holds(far.mutex())


def test_a_read_only_server_is_refused_by_name(server: Database, ask: Ask) -> None:
    client = ask(as_role(server, "reads_only", "default_transaction_read_only = on"))
    with pytest.raises(BackendUnavailable, match="give the address of the primary") as caught:
        client.attempt(client.mutex())
    assert not caught.value.unknown


def test_a_small_statement_timeout_is_a_finding(server: Database, ask: Ask) -> None:
    client = ask(as_role(server, "hurried", "statement_timeout = '1s'"))
    assert "postgresql-statement-timeout" in [finding.code for finding in client.opened.diagnose(WITHIN)]


def test_a_login_that_failed_leaves_no_connection_open(ask: Ask) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = ask(f"postgresql://app@127.0.0.1:{silent.getsockname()[1]}/postgres")
        with pytest.raises(BackendUnavailable) as caught:
            client.opened.ping(0.3)
        taken, _ = silent.accept()
        with taken:
            taken.settimeout(SOON)
            while taken.recv(1000):
                pass
        # Use the error here, so that the frames of its traceback live until this line.
        assert not caught.value.unknown


def test_a_wrong_database_is_refused(server: Database, ask: Ask) -> None:
    with pytest.raises(BackendRejected, match='database "nowhere" does not exist'):
        ask(server.url.replace("/postgres", "/nowhere")).opened.ping(WITHIN)


def test_a_text_that_the_database_cannot_hold_is_refused_at_once(server: Database, ask: Ask) -> None:
    one = ask()
    # A text that compression hardly shortens.
    long = "".join(chr(0x4E00 + 7 * number) for number in range(1000))
    with pytest.raises(BackendRejected, match="too long for an index: shorten it"):
        one.attempt(one.mutex(name=long))
    server.sql("CREATE DATABASE latin ENCODING 'LATIN1' TEMPLATE template0")
    latin = ask(server.url.replace("/postgres", "/latin"))
    claim = latin.mutex()
    with pytest.raises(BackendRejected, match="encoding of its database lacks"):
        latin.attempt(claim._replace(owner=f"{claim.id}@lock:host:1:\u65e5\u672c:1"))
    latin.take(latin.mutex(name=long[:200]))


def test_a_role_from_which_row_security_hides_holders_is_refused(server: Database, one: Queued, ask: Ask) -> None:
    reader = one.take(one.reader())
    poor = ask(as_role(server, "sees_little"))
    server.sql("GRANT ALL ON SCHEMA multilock TO sees_little")
    server.sql("GRANT ALL ON ALL TABLES IN SCHEMA multilock TO sees_little")
    server.sql("ALTER TABLE multilock.holders ENABLE ROW LEVEL SECURITY")
    try:
        with pytest.raises(BackendRejected, match="row-level security"):
            poor.attempt(poor.writer())
    finally:
        server.sql("ALTER TABLE multilock.holders DISABLE ROW LEVEL SECURITY")
    assert one.release(reader)


def test_a_loss_is_found_in_spite_of_a_function_of_the_role(server: Database, ask: Ask) -> None:
    url = as_role(server, "own_unnest", "search_path = own_functions, public")
    server.sql("CREATE SCHEMA own_functions AUTHORIZATION own_unnest")
    none = "RETURNS SETOF text LANGUAGE sql AS 'SELECT NULL::text WHERE false'"
    server.sql(f"CREATE FUNCTION own_functions.unnest(text[]) {none}")
    client = ask(url, schema="of_own_unnest")
    claim = client.take(client.mutex())
    assert client.opened.force_release(NAME, WITHIN)
    assert client.opened.renew(client.grant(claim).group, [(claim, client.grant(claim))], WITHIN) == [None]


def test_a_full_queue_of_notifications_is_no_fault_of_the_name(own: Database) -> None:
    with closing(by_hand(own)) as client:
        held = client.take(client.mutex())
        full = "BEGIN RAISE 'too many notifications in the NOTIFY queue' USING ERRCODE = '54000'; END"
        own.sql(f"CREATE FUNCTION no_room() RETURNS trigger LANGUAGE plpgsql AS $$ {full} $$")
        own.sql("CREATE TRIGGER no_room BEFORE UPDATE ON multilock.locks FOR EACH ROW EXECUTE FUNCTION no_room()")
        with pytest.raises(BackendUnavailable, match="its queue of notifications is full") as caught:
            client.release(held)
        assert not caught.value.unknown
        own.sql("DROP FUNCTION no_room CASCADE")
        assert client.release(held)


def test_connections_that_the_server_ended_at_rest_cost_no_request(one: Queued, server: Database) -> None:
    claim = one.take(one.mutex())
    ended = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = 'multilock'"
    [(count,)] = server.sql(ended)
    assert count > 0
    eventually(lambda: server.sql(ended)[0][0] == 0, SOON)
    assert one.release(claim)


@pytest.mark.parametrize("tells", ["notice", "error"])
def test_a_grant_without_its_synchronous_standby_is_unknown(own: Database, tells: str) -> None:
    with psycopg.connect(own.url, autocommit=True) as operator:
        operator.execute(f"ALTER ROLE app SET client_min_messages = '{tells}'")
        client = by_hand(own)
        client.release(client.take(client.mutex()))
        operator.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
        # A grant waits for the standby in spite of this setting.
        operator.execute("ALTER SYSTEM SET synchronous_commit = 'local'")
        operator.execute("SELECT pg_reload_conf()")
        told: list[BackendUnavailable] = []

        def attempt() -> None:
            for number in itertools.count():  # the server's processes read the new setting later
                try:
                    client.attempt(client.mutex(name=f"n{number}"))
                except BackendUnavailable as error:
                    told.append(error)
                    return

        asking = threading.Thread(target=attempt)
        asking.start()
        waits = "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
        eventually(lambda: operator.execute(waits).fetchall() != [], SOON)
        asking.join(SOON)
        assert told[0].unknown
        assert "canceling wait for synchronous replication" in str(told[0])
        client.close()


def test_a_warning_about_the_ids_of_transactions_leaves_the_outcome_known() -> None:
    with Database(wal_level="logical") as server:
        # This slot keeps VACUUM from freezing rows, so transaction ids run out, and the server warns at each new one.
        server.sql("SELECT pg_create_logical_replication_slot('forgotten', 'pgoutput')")
        where = "SELECT current_setting('data_directory'), min(datfrozenxid::text::bigint) FROM pg_database"
        [(data, first)] = server.sql(where)
        server.sql("CHECKPOINT")
        server.kill()
        Path(data, "postmaster.pid").unlink()
        last = first + (1 << 31) - 30_000_000
        states = Path(data, "pg_xact", f"{last >> 20:04X}")  # the part of the commit log that contains this id
        states.write_bytes(bytes(1 << 18))
        reset = [*as_its_user(states), str(programs() / "pg_resetwal"), "-f", "-x", str(last), "-D", data]
        subprocess.run(reset, check=True, capture_output=True)
        server.start()
        told: list[str | None] = []
        with psycopg.connect(server.url, autocommit=True) as operator:
            operator.add_notice_handler(lambda notice: told.append(notice.message_primary))
            operator.execute("SELECT pg_current_xact_id()")
        assert "must be vacuumed within" in str(told)
        with closing(by_hand(server)) as client:
            assert client.release(client.take(client.mutex()))


def test_a_forked_child_leaves_its_parents_connections_alone(one: Queued, server: Database) -> None:
    claim = one.take(one.mutex())
    held = (claim, one.grant(claim))
    one.opened.watch(held[1].group, [held], WITHIN)
    if not (child := os.fork()):
        try:
            one.opened.open(one.ear)
            os._exit(0 if not one.holds(one.mutex()) else 1)
        except BaseException:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert one.opened.renew(held[1].group, [held], WITHIN)[0] is not None
    server.sql("DELETE FROM multilock.locks")
    assert one.ear.wait(lambda: one.ear.losses != [])


def test_a_connection_that_a_child_drops_never_closes_another_file(one: Queued) -> None:
    one.release(one.take(one.mutex()))
    [wire] = one.opened._endpoint.wires  # type: ignore[attr-defined]
    wire.drop()
    others = [os.open(os.devnull, os.O_RDONLY) for _ in range(64)]  # these occupy all low numbers
    wire.close()
    closed = []
    for number in others:
        try:
            os.close(number)
        except OSError:
            closed.append(number)
    assert not closed


def test_a_token_beyond_the_clock_is_not_given_twice_after_a_crash() -> None:
    with Database(wal_writer_delay="10s") as server, closing(by_hand(server)) as one, closing(by_hand(server)) as two:
        held = one.take(one.mutex())
        # as if the clock had been stepped back
        server.sql("UPDATE multilock.locks SET token = token + 3600000000::bigint")
        waiter = two.wait(two.mutex())
        one.release(held)
        assert two.ear.wait(lambda: waiter.id in two.ear.pushed, SOON)
        server.kill()
        server.start()
        server.sql("UPDATE multilock.locks SET until = clock_timestamp(), sure = NULL")
        last = one.mutex()
        eventually(lambda: one.holds(last), SOON)
        assert one.token(last) > (two.ear.pushed[waiter.id].token or 0)


@pytest.fixture
def unflushed() -> Iterator[Database]:
    """Return a server whose crash loses each commit that did not wait for the disk."""
    with Database(wal_writer_delay="10s") as server:
        yield server


def crash_while_believed(server: Database, client: Queued, waiter: Claim, then: Callable[[], object] = bool) -> None:
    """Kill the server, which loses the hand-over to this waiter. Check that no other client gets the lock while the
    waiter believes that it holds it.

    ``then`` is executed after the server has started again.
    """
    assert client.ear.wait(lambda: waiter.id in client.ear.pushed, SOON)
    pushed = client.ear.pushed[waiter.id]
    assert pushed.valid_for is not None
    server.kill()
    server.start()
    then()
    with closing(by_hand(server)) as other:
        newcomer = other.mutex()
        while now() < pushed.sent_at + pushed.valid_for:
            assert not other.holds(newcomer)
            time.sleep(0.05)


def test_a_release_repeated_after_a_crash_admits_nobody_beside_a_believer(unflushed: Database) -> None:
    with (
        FaultProxy.before(unflushed.url) as proxy,
        closing(Queued(open_backend(proxy.url, {"ttl": 20.0}))) as far,
        closing(by_hand(unflushed)) as two,
    ):
        held, waiter = far.take(far.mutex()), two.wait(two.mutex())
        lost = proxy.drop_reply(held.id.encode())
        with pytest.raises(BackendUnavailable):
            far.release(held)
        assert lost.happened
        crash_while_believed(unflushed, two, waiter, lambda: far.release(held, unsure=True))


def test_after_an_unanswered_renewal_a_release_frees_the_name_at_once(one: Queued, two: Queued) -> None:
    assert one.release(one.take(one.mutex()), unsure=True)
    two.take(two.mutex())


def test_a_hint_that_was_given_up_covers_no_hand_over(unflushed: Database) -> None:
    with closing(by_hand(unflushed)) as one, closing(by_hand(unflushed)) as two:
        one.take(one.mutex())
        hint, waiter = one.wait(one.mutex(renew=False)), two.wait(two.mutex())
        unflushed.sql("UPDATE multilock.locks SET until = clock_timestamp(), sure = clock_timestamp()")
        assert not one.holds(one.mutex(fair=True))  # this call hands the name over, because the lease has ended
        assert one.woken(hint)
        one.release(hint)
        crash_while_believed(unflushed, two, waiter)


def test_a_crash_after_a_step_of_the_clock_admits_nobody_beside_a_believer(unflushed: Database) -> None:
    with closing(by_hand(unflushed)) as one, closing(by_hand(unflushed)) as two:
        held, waiter = one.take(one.mutex(ttl=0.5)), two.wait(two.mutex())
        ahead = "clock_timestamp() + interval '30 s'"  # as if the clock had been stepped back after a renewal
        unflushed.sql(f"UPDATE multilock.locks SET token = token - 1000000000, until = {ahead}, sure = {ahead}")
        one.release(held)
        crash_while_believed(unflushed, two, waiter)


def test_a_crash_of_the_server_keeps_grants_and_the_order_of_tokens(own: Database) -> None:
    with multilock.connect(own.url, ttl=20) as client:
        lease = client.lock("n").acquire()
        own.kill()
        own.start()
        lease.renew()
        assert lease.is_held()
        token = lease.token
        assert token is not None
        client.force_release("n")
        again = client.lock("n").acquire(timeout=SOON)
        assert again.token is not None
        assert again.token > token
        again.release()
