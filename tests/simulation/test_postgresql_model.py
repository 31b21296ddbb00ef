"""Compare the model of PostgreSQL with multilock's functions on a real server: replies, rows, notifications, and
whether a commit waits for the disk.

The model and the server execute the same random calls at the same time. In the SQL of the functions, a function of the
test replaces ``clock_timestamp()``.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psycopg
import pytest
from psycopg import pq

from multilock_postgresql import sql_of
from multilock_postgresql.wire import array
from tests.servers_postgresql import PostgresqlServer
from tests.simulation import postgresql_server
from tests.simulation.postgresql_store import STEPS, Refused, Row, Store

CALLS, SEEDS = 150, 10
CLIENTS = ["0000000000000001", "7000000000000002", "f000000000000003"]
NAMES = ["ml/a", "ml/b"]
MODES = [["x", "x"], ["r", "x"], ["r", "r", "x"], ["p2", "p2"], ["p2", "p3", "x"], ["r", "p2"]]
START = 1_700_000_000_000_000
PAUSES = [0, 17, 1000, 45_000, 310_000, 1_100_000, 3_100_000, 6_100_000, 9_000_000, 70_000_000, -1_500_000, -20_000_000]
DELETE = b"DELETE FROM multilock.locks WHERE key = $1"
CRASH = b"TRUNCATE multilock.queue, multilock.alive"  # empties these tables as a crash does

PREPARE = """
CREATE SCHEMA held;
CREATE FUNCTION held.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE AS
$$ SELECT timestamptz 'epoch' + current_setting('held.micros')::bigint * interval '1 microsecond' $$;
CREATE FUNCTION held.gen_random_uuid() RETURNS text LANGUAGE sql AS $$ SELECT current_setting('held.micros') $$;
CREATE FUNCTION held.pg_postmaster_start_time() RETURNS timestamptz LANGUAGE sql AS
$$ SELECT timestamptz '-infinity' $$;
CREATE FUNCTION held.us(timestamptz) RETURNS bigint LANGUAGE sql AS
$$ SELECT (extract(epoch FROM $1) * 1000000)::bigint $$;
"""
COLUMNS = {
    "locks": "key, token, id, who, ttl, held.us(until), held.us(sure), boot, held.us(followed)",
    "holders": "id, key, who, token, ttl, held.us(until)",
    "queue": "ticket, key, id, who, mode, held.us(until), echo, listens",
    "gone": "id, held.us(until)",
    "meta": "floor, held.us(swept)",
    "alive": "boot",
}
TABLES = " UNION ALL ".join(
    f"SELECT json_build_array('{table}', {columns})::text FROM multilock.{table}" for table, columns in COLUMNS.items()
).encode()
Words = Sequence[bytes | None]


def with_held_clock(sql: str) -> str:
    """Return this SQL with the clocks and the random word replaced by values that the test sets."""
    return re.sub(
        r"(?:pg_catalog\.)?\b(clock_timestamp|gen_random_uuid|pg_postmaster_start_time)\(\)", r"held.\1()", sql
    )


class Real:
    """Connections to a real server: one for the steps, one that locks a row, and one for each listening client."""

    def __init__(self, url: str) -> None:
        self._steps, self._locker, *self._listeners = self.connections = [
            psycopg.connect(url, autocommit=True) for _ in range(2 + len(CLIENTS))
        ]
        self._ask(self._steps, b"SET lock_timeout = 3")
        self._ask(self._steps, b"TRUNCATE multilock.locks, multilock.holders, multilock.queue, multilock.gone, "
                               b"multilock.alive RESTART IDENTITY")  # fmt: skip
        self._ask(self._steps, b"UPDATE multilock.meta SET floor = 0, swept = to_timestamp(1700000000)")
        for client, listener in zip(CLIENTS, self._listeners, strict=True):
            self._ask(listener, f'LISTEN "multilock_{client}"; LISTEN multilock_changes'.encode())

    def _ask(self, connection: psycopg.Connection, sql: bytes, words: Words | None = None) -> list[Row]:
        wire = connection.pgconn
        result = wire.exec_(sql) if words is None else wire.exec_params(sql, words)
        if result.status not in (pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK):
            raise Refused((result.error_field(pq.DiagnosticField.SQLSTATE) or b"").decode())
        columns = range(result.nfields)
        return [tuple(result.get_value(row, column) for column in columns) for row in range(result.ntuples)]

    def execute(self, micros: int, sql: bytes, words: Words) -> tuple[list[Row], bool]:
        """Return the rows of a step, and whether its commit waits for the disk."""
        self._ask(self._steps, b"BEGIN; SELECT set_config('held.micros', '%d', false)" % micros)
        try:
            rows = self._ask(self._steps, with_held_clock(sql.decode()).encode(), words)
        except Refused:
            self._ask(self._steps, b"ROLLBACK")
            raise
        [(flushes,)] = self._ask(self._steps, b"SELECT current_setting('synchronous_commit')")
        self._ask(self._steps, b"COMMIT")
        return rows, flushes == b"on"

    def lock(self, table: str, column: str, row: str, strength: str) -> None:
        sql = f"BEGIN; SELECT FROM multilock.{table} WHERE {column} = '{row}' FOR {strength}"
        self._ask(self._locker, sql.encode())

    def unlock(self) -> None:
        self._ask(self._locker, b"ROLLBACK")

    def close(self) -> None:
        for connection in self.connections:
            connection.close()

    def listens(self, client: int, listens: bool) -> None:
        number = int.from_bytes(bytes.fromhex(CLIENTS[client]), signed=True)
        call = "lock" if listens else "unlock"
        self._ask(self._listeners[client], f"SELECT pg_advisory_{call}_shared({number})".encode())

    def told(self) -> list[tuple[str, str]]:
        """Return the notifications since the last call. A notification of several clients is returned only once."""
        told = set[tuple[str, str]]()
        for listener in self._listeners:
            self._ask(listener, b"SELECT 1")
            while (notify := listener.pgconn.notifies()) is not None:
                told.add((notify.relname.decode(), notify.extra.decode()))
        return sorted(told)

    def tables(self) -> list[str]:
        return sorted(text.decode() for [text] in self._ask(self._steps, TABLES) if text)


def tables(model: Store) -> list[str]:
    rows = [(table, *row) for table in ("locks", "holders", "queue") for row in getattr(model, table).values()]
    rows += [("gone", *each) for each in model.gone.items()] + [("meta", model.floor, model.swept)]
    rows += [("alive", model.boot)] if model.boot else []
    return sorted(json.dumps(row) for row in rows)


def some_call(
    chance: random.Random, claims: list[tuple[str, str, str]], micros: int
) -> tuple[bytes, list[bytes | None]]:
    key, claim, mode = chance.choice(claims)
    wait = chance.choice([0, 1000, 3000, 6000])
    echo = b"%d/%d" % (micros, wait) if wait and chance.random() < 0.8 else None
    ttl, yes = b"%d" % chance.choice([40, 300, 2000, 30_000]), [b"t", b"f"]
    words = [key.encode(), claim.encode()]
    barge = chance.choice(yes) if mode == "x" and not wait else b"f"
    attempt: list[bytes | None] = [*words, b"@me", mode.encode(), ttl, b"%d" % wait, barge, chance.choice(yes), echo]
    some = chance.sample(claims, 3)
    keys, ids = array(each[0] for each in some), array(each[1] for each in some)
    held = [keys, ids, array(ttl.decode() for _ in some)]
    within = b"3"
    leave: list[bytes | None] = [*words, chance.choice([b"t", b"f", b"f"])]
    steps: list[tuple[bytes, list[bytes | None]]] = [
        *[(STEPS.attempt, [*attempt, within])] * 8,
        *[(STEPS.release, [*leave, within])] * 4,
        *[(STEPS.rest, [*leave, ttl, within])] * 2,
        (STEPS.force, [words[0], within]),
        (STEPS.renew, [*held, within]),
        (STEPS.renew, [array([key]), array([claim]), array([ttl.decode()]), within]),
        (STEPS.sweep, []),
        (STEPS.lost, [keys, ids]),
        (STEPS.follow, [array([key]), b"9000", within]),
        (STEPS.holder, [array(NAMES)]),
        (STEPS.inspect, [words[0]]),
        (STEPS.inspect_all, [b"ml/", b"ml0", b"2"]),
        (DELETE, [words[0]]),
    ]
    return chance.choice(steps)


def outcome(call: Callable[[], tuple[list[Row], bool]]) -> object:
    """Return the sorted rows and whether the commit waits for the disk, or return the error."""
    try:
        rows, flushes = call()
    except Refused as refused:
        return str(refused)
    return sorted(rows, key=str), flushes


def simulated(model: Store, sql: bytes, words: Words) -> tuple[list[Row], bool]:
    if sql != DELETE:
        return model.execute(sql, words), model.flushes
    model.delete((words[0] or b"").decode())
    return [], True


def compare(real: Real, model: Store, micros: int, sql: bytes, words: Words, where: str) -> object:
    """Execute a step on the server and on the model, compare them, and return the outcome."""
    expected = outcome(lambda: real.execute(micros, sql, words))
    assert outcome(lambda: simulated(model, sql, words)) == expected, where
    assert sorted(model.notices) == real.told(), where
    assert tables(model) == real.tables(), where
    return expected


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresqlServer]:
    with PostgresqlServer(autovacuum="off") as server:
        with psycopg.connect(server.url, autocommit=True) as connection:
            connection.execute(PREPARE)
            connection.execute(f"SET held.micros = {START}")
            connection.pgconn.exec_(with_held_clock(sql_of("multilock")).encode())
        yield server


@pytest.fixture
def real(server: PostgresqlServer) -> Iterator[Real]:
    real = Real(server.url)
    yield real
    real.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEEDS))
def test_the_model_of_postgresql_does_what_our_functions_do(real: Real, seed: int) -> None:
    chance, micros, present = random.Random(seed), START, set[str]()
    rested = set[bytes | None]()
    model = Store(lambda: micros, present.__contains__)
    claims = [
        (name, f"{client}.{chance.randbytes(8).hex()}", mode)
        for name, modes in zip(NAMES, chance.choices(MODES, k=2), strict=True)
        for mode in modes
        for client in CLIENTS
    ]
    for number in range(CALLS):
        micros += chance.choice(PAUSES)
        where, event = f"seed {seed}, call {number}", chance.random()
        if event < 0.1:
            client = chance.randrange(len(CLIENTS))
            present ^= {CLIENTS[client]}
            real.listens(client, CLIENTS[client] in present)
        elif event < 0.12:
            model.crash()
            real.execute(micros, CRASH, [])
        elif event < 0.2:
            real.unlock()
            model.locked.clear()
        elif event < 0.3 and not model.locked:
            excludes = chance.random() < 0.4
            rows = [("locks", "key", key) for key in model.locks] + [
                ("holders", "id", claim) for claim in model.holders
            ]
            if rows:
                table, column, row = chance.choice(rows)
                real.lock(table, column, row, "UPDATE" if excludes else "KEY SHARE")
                model.locked[row] = excludes
        at = chance.randrange(len(claims))
        name, claim, mode = claims[at]
        if claim in model.gone or claim.encode() in rested:
            claims[at] = name, f"{claim[:16]}.{chance.randbytes(8).hex()}", mode
        sql, words = some_call(chance, claims, micros)
        if sql == STEPS.attempt and words[1] in rested:
            continue  # no client sends another request with the id of a released lock
        where += f": {sql!r} {words}"
        if compare(real, model, micros, sql, words, where) == ([(b"t",)], True) and sql == STEPS.rest:
            rested.add(words[1])


@pytest.mark.slow
def test_the_model_keeps_a_name_shut_after_a_crash_as_our_functions_do(real: Real) -> None:
    micros = START
    model = Store(lambda: micros, lambda client: True)
    holder, waiter, newcomer = (f"{CLIENTS[0]}.{number}".encode() for number in range(3))

    def attempt(claim: bytes, wait: bytes, echo: bytes | None = None) -> object:
        words = [b"ml/a", claim, b"@me", b"x", b"300", wait, b"f", b"t", echo, b"3"]
        return compare(real, model, micros, STEPS.attempt, words, f"{claim!r} at {micros}")

    real.listens(0, True)
    attempt(holder, b"0")
    attempt(waiter, b"3000", b"1/3000")
    compare(real, model, micros, STEPS.release, [b"ml/a", holder, b"f", b"3"], "the hand-over")
    real.execute(micros, CRASH, [])
    model.crash()
    micros += 3_000_001
    assert attempt(newcomer, b"0") == ([(None, b"12000", b"-1")], False), "the name is shut"
    micros += 12_000_000
    assert attempt(newcomer, b"0") != ([(None, b"0", b"-1")], False), "the name is free"


def test_the_oracle_expects_no_waiter_that_a_step_back_of_the_clock_has_removed() -> None:
    sim: Any = None
    server = postgresql_server.PostgresqlServer("server0", sim, lambda: START, 0)
    holder, waiter = (f"{CLIENTS[0]}.{number}" for number in range(2))
    for claim, wait in ((holder, b"0"), (waiter, b"6000")):
        server.store.execute(
            STEPS.attempt, [b"ml/a", claim.encode(), b"@me", b"x", b"6000", wait, b"f", b"f", None, b"3"]
        )
    assert server.waiters("ml/a", holder) == [waiter]
    server.step = -20.0
    assert server.waiters("ml/a", holder) == []
    server.store.execute(STEPS.release, [b"ml/a", holder.encode(), b"f", b"3"])
    assert server.holder("ml/a") is None
