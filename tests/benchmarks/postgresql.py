"""Benchmarks of PostgreSQL, run by ``python -m tests.benchmarks.postgresql``. They compare multilock's lock with
advisory locks, the locks of other libraries, and plain writes.

Other libraries are imported where they are used, so that the processes of a crowd start quickly.

``python -m tests.benchmarks.postgresql HOW URL`` runs the waiter of `_hand_over`. With SECONDS it runs one process of
`tests.benchmarks.crowd`.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psycopg

import multilock
from multilock import now
from multilock_postgresql.endpoints import endpoint_of_url
from multilock_postgresql.transport import PgWire
from tests.benchmarks import sessions
from tests.benchmarks.crowd import ASYNCIO, OURS, SECONDS, crowds, ours
from tests.benchmarks.grelmicro import GRELMICRO, locks_of_grelmicro
from tests.benchmarks.measure import interleave, pin, sample
from tests.benchmarks.report import publish, with_ratios
from tests.benchmarks.sessions import TTL, WITHIN
from tests.servers_postgresql import PostgresqlServer

RAW = "raw: two durable updates of one row"
RAW_ASYNCIO = "raw: asyncpg, the same two functions"
RAW_NOTIFY = "raw: NOTIFY and one request"
ADVISORY, DLOCK = "pg_advisory_lock, psycopg", "sqlalchemy-dlock"
SYNCED: dict[str, dict[str, str]] = {"fsync on": {"fsync": "on"}, "fsync off": {}}
NAME = "bench"
KEY = 4711
HELD = (1, 1000, 10_000)
WAITERS = 5000
MEASURED = 2 * TTL / 3  # seconds in which each lock is renewed twice
HANDED = 100  # number of handovers of each contender
QUEUED = 0.03  # seconds after which a waiter has certainly joined the queue
THREADS = 5  # the same as in tests.benchmarks.crowd

Take = Callable[[], AbstractContextManager[object]]
Cycle = Callable[[], object]


def _wire(url: str) -> PgWire:
    return endpoint_of_url(url, "postgresql", {}).connect(WITHIN, now)


# ---- contenders


def _raw(url: str) -> Cycle:
    """Measure the lower limit for any client: multilock's driver sends two prepared updates of one row."""
    wire = _wire(url)
    wire.script(b"CREATE TABLE raw (id int PRIMARY KEY, n int); INSERT INTO raw VALUES (1, 0)", WITHIN)
    update = b"UPDATE raw SET n = n + $1 WHERE id = 1"

    def cycle() -> None:
        wire.call(update, [b"1"], WITHIN)
        wire.call(update, [b"-1"], WITHIN)

    return cycle


def _raw_asyncio(url: str, loop: asyncio.AbstractEventLoop) -> Cycle:
    import asyncpg  # type: ignore[import-untyped, unused-ignore]

    connection = loop.run_until_complete(asyncpg.connect(url))
    acquire = "SELECT * FROM multilock.acquire_1($1, $2, '@raw', 'x', 30000, 0, true, false, NULL, 4000)"
    release = "SELECT multilock.release_1($1, $2, false, 4000)"

    async def take(claim_id: str) -> None:
        assert (await connection.fetchrow(acquire, "raw", claim_id))[0]

    async def give_back(claim_id: str) -> None:
        assert await connection.fetchval(release, "raw", claim_id)

    def cycle() -> None:
        claim_id = os.urandom(24).hex()
        loop.run_until_complete(take(claim_id))
        loop.run_until_complete(give_back(claim_id))

    return cycle


def _ours(url: str) -> Take:
    return multilock.connect(url, ttl=TTL).lock(NAME).acquire


def _advisory(url: str) -> Take:
    """An advisory lock of a session, on one connection."""
    connection = psycopg.connect(url, autocommit=True)

    @contextmanager
    def take() -> Iterator[None]:
        connection.execute("SELECT pg_advisory_lock(%s)", [KEY])
        yield
        connection.execute("SELECT pg_advisory_unlock(%s)", [KEY])

    return take


def _dlock(url: str) -> Take:
    import sqlalchemy
    from sqlalchemy_dlock.factory import create_sadlock  # type: ignore[import-not-found, unused-ignore]

    engine = sqlalchemy.create_engine(url.replace("://", "+psycopg://"), isolation_level="AUTOCOMMIT")
    connection = engine.connect()
    return lambda: create_sadlock(connection, KEY)


def _grelmicro(url: str, loop: asyncio.AbstractEventLoop, stack: ExitStack) -> Cycle:
    locks = locks_of_grelmicro(url, NAME, TTL)
    lock_of = loop.run_until_complete(locks.__aenter__())
    stack.callback(lambda: loop.run_until_complete(locks.__aexit__(None, None, None)))

    async def cycle() -> None:
        async with lock_of():
            pass

    return lambda: loop.run_until_complete(cycle())


TAKES: dict[str, Callable[[str], Take]] = {OURS: _ours, ADVISORY: _advisory, DLOCK: _dlock}


def _cycle(take: Take) -> None:
    with take():
        pass


def _uncontended() -> dict[str, Any]:
    return {f"{title}, client and server on two cores": _uncontended_with(**more) for title, more in SYNCED.items()}


def _uncontended_with(**settings: str) -> dict[str, Any]:
    with PostgresqlServer(**settings) as server, ExitStack() as stack:
        pin(server.pid, apart=True)
        loop = asyncio.new_event_loop()
        stack.callback(loop.close)
        faces = {name: face.cycle for name, face in sessions.faces(server.url, stack).items()}
        for cycle in faces.values():
            cycle()  # the first cycle makes the tables
        cycles: dict[str, Cycle] = {
            RAW: _raw(server.url),
            RAW_ASYNCIO: _raw_asyncio(server.url, loop),
            **faces,
            **{name: partial(_cycle, TAKES[name](server.url)) for name in (ADVISORY, DLOCK)},
            GRELMICRO: _grelmicro(server.url, loop, stack),
        }
        samples = interleave(cycles, rounds=10, per_round=25)
    return with_ratios(samples, (RAW, RAW_ASYNCIO, GRELMICRO))


# ---- a handover between two processes


def _hand_over() -> dict[str, Any]:
    """Return the time from a release in this process until a waiter in another process holds the lock."""
    with PostgresqlServer(fsync="on") as server:
        times = {name: _handed_over(name, take(server.url), server.url) for name, take in TAKES.items()}
        times[RAW_NOTIFY] = _notified(server.url)
    return {"fsync on": with_ratios({name: sample(took) for name, took in times.items()}, (RAW_NOTIFY,))}


def _handed_over(how: str, take: Take, url: str) -> list[float]:
    took = []
    with _waiter(how, url) as wait:
        for _ in range(HANDED):
            with take():
                wait("acquire", answers=False)
                time.sleep(QUEUED)
                released = now()
            took.append(wait("") - released)
            wait("release")
    return took


def _notified(url: str) -> list[float]:
    wire, took = _wire(url), []
    with _waiter(RAW_NOTIFY, url) as wait:
        for _ in range(HANDED):
            wait("listen", answers=False)
            time.sleep(QUEUED)
            sent = now()
            wire.call(b"SELECT pg_notify('raw', $1)", [b"x"], WITHIN)
            took.append(wait("") - sent)
    wire.close()
    return took


@contextmanager
def _waiter(how: str, url: str) -> Iterator[Callable[..., float]]:
    """Start the waiting process. Yields a function that sends a word to this process and returns the time in its
    reply."""
    command = [sys.executable, "-m", "tests.benchmarks.postgresql", how, url]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def ask(word: str, *, answers: bool = True) -> float:
            if word:
                print(word, file=stdin, flush=True)
            return float(stdout.readline()) if answers else 0.0

        ask("")
        try:
            yield ask
        finally:
            stdin.close()


def _wait(how: str, url: str) -> None:
    """Run the waiting process: execute each word from stdin, and print the time when that was done."""
    if how == RAW_NOTIFY:
        wire = _wire(url)
        wire.script(b"LISTEN raw", WITHIN)
    else:
        take = TAKES[how](url)
    held: list[AbstractContextManager[object]] = []
    print(now(), flush=True)
    for line in sys.stdin:
        if line == "listen\n":
            while not wire.receive(WITHIN):
                pass
        elif line == "acquire\n":
            held.append(take())
            held[0].__enter__()
        else:
            held.pop().__exit__(None, None, None)
        print(now(), flush=True)


# ---- a crowd


def _crowd() -> dict[str, Any]:
    commands = {how: ours(how) for how in (OURS, ASYNCIO)} | {how: _member(how) for how in (ADVISORY, GRELMICRO)}
    with PostgresqlServer(fsync="on") as server:
        # grelmicro's processes fail if several of them make the table at the same time.
        asyncio.run(_make_table_of_grelmicro(server.url))
        return crowds(lambda: nullcontext(server), commands, _counter)


def _member(how: str) -> Callable[[PostgresqlServer], list[str]]:
    return lambda server: [sys.executable, "-m", "tests.benchmarks.postgresql", how, server.url, str(SECONDS)]


async def _make_table_of_grelmicro(url: str) -> None:
    async with locks_of_grelmicro(url, NAME, TTL):
        pass


def _counter(server: PostgresqlServer) -> sessions.Count:
    def count() -> Mapping[str, float]:
        with psycopg.connect(server.url, autocommit=True) as operator:
            [transactions] = operator.execute("SELECT sum(xact_commit + xact_rollback) FROM pg_stat_database")
        return {"transactions": float(transactions[0])}

    return count


def _contend(how: str, url: str, seconds: float) -> None:
    turns: list[tuple[float, float, float]] = []
    if how == GRELMICRO:
        asyncio.run(_tasks(url, seconds, turns))
    else:
        takes = [TAKES[how](url) for _ in range(THREADS)]
        until = _go() + seconds
        threads = [threading.Thread(target=_take_turns, args=(take, until, turns)) for take in takes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    print(json.dumps(turns), flush=True)


def _take_turns(take: Take, until: float, turns: list[tuple[float, float, float]]) -> None:
    while (asked := now()) < until:
        with take():
            got = now()
        turns.append((got, got, asked))


async def _tasks(url: str, seconds: float, turns: list[tuple[float, float, float]]) -> None:
    async with locks_of_grelmicro(url, NAME, TTL) as lock_of:
        until = _go() + seconds

        async def work() -> None:
            while (asked := now()) < until:
                async with lock_of():
                    got = now()
                turns.append((got, got, asked))

        await asyncio.gather(*(work() for _ in range(THREADS)))


def _go() -> float:
    print("ready", flush=True)
    sys.stdin.readline()
    return now()


# ---- locks that are held


def _held() -> dict[str, dict[str, float]]:
    """Return the shares of one core that the client and the server need to renew locks, for each number of locks in
    ``HELD``."""
    found = {}
    for locks in HELD:
        with PostgresqlServer() as server, multilock.connect(server.url, ttl=TTL) as client:
            leases = [client.lock(f"held-{number}").acquire() for number in range(locks)]
            time.sleep(sessions.ARMED + TTL / 3)
            before = _spent(server)
            time.sleep(MEASURED)
            found[f"{locks:,}"] = _shares(before, _spent(server))
            assert all(lease.is_held() for lease in leases)
    return found


def _queued() -> dict[str, dict[str, float]]:
    """Measure what ``WAITERS`` fair waiters of one asyncio client cost while they wait, and how fast they are
    served."""
    with PostgresqlServer(fsync="on") as server:
        return {f"{WAITERS:,}": asyncio.run(_wait_together(server))}


async def _wait_together(server: PostgresqlServer) -> dict[str, float]:
    async with multilock.connect_async(server.url, ttl=TTL) as ours, multilock.connect_async(server.url) as theirs:
        served: list[float] = []

        async def wait() -> None:
            async with ours.lock(NAME, fair=True).acquire():
                served.append(now())

        lease = await theirs.lock(NAME).acquire()
        waiters = [asyncio.create_task(wait()) for _ in range(WAITERS)]
        await asyncio.to_thread(_await_queue, server.url)
        before = _spent(server)
        await asyncio.sleep(MEASURED)
        shares = _shares(before, _spent(server))
        asked = now()
        async with ours.lock("free").acquire():
            took = now() - asked
        released = now()
        await lease.release()
        await asyncio.gather(*waiters)
    return {
        **shares,
        "a free lock meanwhile, ms": round(took * 1000, 1),
        "served/s": round(WAITERS / (served[-1] - released), 1),
    }


def _await_queue(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as operator:
        while operator.execute("SELECT count(*) FROM multilock.queue").fetchone() != (WAITERS,):
            time.sleep(0.5)


def _spent(server: PostgresqlServer) -> tuple[float, float]:
    """Return the seconds of processor time that this process and the server have used."""
    return time.process_time(), _processor_time(server)


def _shares(before: tuple[float, float], after: tuple[float, float]) -> dict[str, float]:
    """Return the shares of one core that the client and the server have used within `MEASURED` seconds."""
    client, server = (round((end - start) / MEASURED, 4) for start, end in zip(before, after, strict=True))
    return {"client, of one core": client, "server, of one core": server}


def _processor_time(server: PostgresqlServer) -> float:
    """Return the seconds that all processes of the server have used, including those that have ended."""
    ticks = 0
    for pid in (server.pid, *server._children()):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += sum(map(int, fields[11 : 15 if pid == server.pid else 13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _versions() -> dict[str, str]:
    libraries = ("psycopg", "asyncpg", "sqlalchemy-dlock", "grelmicro")
    with PostgresqlServer() as server, psycopg.connect(server.url) as operator:
        [[told]] = operator.execute("SHOW server_version")
    return {**{name: version(name) for name in libraries}, "PostgreSQL": told.split()[0]}


BENCHMARKS: Mapping[str, Callable[[], object]] = {
    "uncontended": _uncontended,
    "hand-over": _hand_over,
    "crowd": _crowd,
    "held locks": _held,
    "waiters": _queued,
}

if __name__ == "__main__":
    if len(sys.argv) == 4:
        _contend(sys.argv[1], sys.argv[2], float(sys.argv[3]))
    elif len(sys.argv) == 3:
        _wait(sys.argv[1], sys.argv[2])
    else:
        publish("postgresql", _versions, BENCHMARKS)
