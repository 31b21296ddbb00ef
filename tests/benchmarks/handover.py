"""Measure for how long a lock on one Redis has no holder between a release and the next grant, with twenty waiters in
four processes.

Run it with ``python -m tests.benchmarks.handover``. The notification of a waiter (push) is itself the grant
(docs/decisions/0019). With ``renew=False`` the push is only a hint, and the waiter must send one more request.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import portalocker  # type: ignore[import-not-found, unused-ignore]
import redis
import redis_lock  # type: ignore[import-not-found, import-untyped, unused-ignore]

import multilock
from multilock import AsyncClient, now
from multilock.kernel.runtime import Bell, Threads
from multilock.model import Claim
from multilock.testing import Helper, hear, say
from multilock_redis.acquire_release import Recipe
from multilock_redis.connections import Connections
from multilock_redis.keys import Keyspace
from multilock_redis.transactions import ACQUIRE, RELEASE, Transactions
from multilock_redis.transport import Endpoint
from multilock_redis.wire import pack
from tests.benchmarks.crowd import Run, Turn, run_of, turns_of
from tests.benchmarks.grelmicro import GRELMICRO, locks_of_grelmicro
from tests.benchmarks.measure import Sample, asked_of, far, sample
from tests.benchmarks.peer import PEERS_PYTHON, versions_of
from tests.benchmarks.report import publish
from tests.benchmarks.uncontended import RawSocket
from tests.servers import RedisServer

__all__ = ["HANDOVERS", "commands", "handovers", "raw_handover"]

ROUND_TRIPS = (0, 1)  # milliseconds that the proxy adds to each round trip
SECONDS, TURNS = 3.0, 3
WAITERS = (10, 100, 500, 2000)
RAW, REDIS_PY, ON_A_LOOP = "raw: push, wake-up, one request", "redis.lock.Lock", "multilock, asyncio"
MITHRIL, PORTALOCKER = "mithril-locks", "portalocker.RedisLock"

PROCESSES = 4
THREADS = 5
HOLD = 0.002  # seconds
REST = 0.01  # seconds from a contender's release to its next request, so that it does not overtake the other contenders
TTL = 30
NAME = "handover"
CHANNEL = "raw"

Take = Callable[[], AbstractContextManager[object]]
TakeOnALoop = Callable[[], AbstractAsyncContextManager[object]]


# ---- what each process does


def _multilock(url: str, *, fair: bool = False, renew: bool = True) -> Take:
    client = multilock.connect(url, ttl=float(TTL))
    return lambda: client.lock(NAME, fair=fair, renew=renew).acquire()


class _PlainSockets:
    """A lock with multilock's scripts but without most of its Python code. It sends prepacked requests and waits for
    the push.

    Either the waiter itself reads the subscription of its process, or a thread reads it and wakes the waiter. As with
    multilock, only one waiter of each process is in the queue of the server, and the push to it is a grant.
    """

    def __init__(self, url: str, *, listener: bool) -> None:
        self._port = urlsplit(url).port or 0
        self._client = os.urandom(8).hex()
        connections = Connections(Endpoint("raw", redis.Connection, {}), now)
        self._recipe = Recipe(Keyspace("multilock/"), Transactions(connections, now), "")
        self._push = RawSocket(self._port)
        self._push.ask(pack("SUBSCRIBE", f"multilock:wake:{self._client}"))
        self._bell = Threads().bell() if listener else None
        self._first = threading.Lock()
        self._own = threading.local()
        for script in (ACQUIRE, RELEASE):
            self._connection().ask(script.load)
        if self._bell:
            threading.Thread(target=self._listen, args=(self._bell,), daemon=True).start()

    def _listen(self, bell: Bell) -> None:
        while self._push.read():
            bell.ring()

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        claim_id = f"{self._client}.{os.urandom(16).hex()}"
        claim = Claim(NAME, "lock", claim_id, f"{claim_id}@raw", TTL, renew=True, fair=False, identity="")
        acquire, release = self._recipe.to_attempt(claim, True), self._recipe.to_release(claim, False)
        connection = self._connection()
        with self._first:
            if not connection.ask(acquire).startswith(b":"):
                self._bell.wait(TTL) if self._bell else self._push.read()
        yield
        connection.ask(release)

    def _connection(self) -> RawSocket:
        if not hasattr(self._own, "connection"):
            self._own.connection = RawSocket(self._port)
        connection: RawSocket = self._own.connection
        return connection


def _redis_py(url: str) -> Take:
    client = redis.Redis.from_url(url)
    return lambda: client.lock(NAME, timeout=TTL)


def _redis_lock(url: str) -> Take:
    client = redis.Redis.from_url(url)
    return lambda: redis_lock.Lock(client, NAME, expire=TTL)


def _portalocker(url: str) -> Take:
    client = redis.Redis.from_url(url, decode_responses=True, max_connections=1000)
    return lambda: portalocker.RedisLock(NAME, client, timeout=60.0, interrupt_on_lost=False)


HANDOVERS: dict[str, Callable[[str], Take]] = {
    "multilock": _multilock,
    "multilock, fair=True": lambda url: _multilock(url, fair=True),
    "multilock, renew=False: the push is a hint": lambda url: _multilock(url, renew=False),
    "raw: its scripts": lambda url: _PlainSockets(url, listener=False).turn,
    "raw: its scripts, and a thread that listens": lambda url: _PlainSockets(url, listener=True).turn,
    REDIS_PY: _redis_py,
    "python-redis-lock": _redis_lock,
    PORTALOCKER: _portalocker,
}


#: The commands that each contender sends to the server. Commands inside its scripts do not count.
ASK: dict[str, tuple[str, ...]] = {
    REDIS_PY: ("set", "evalsha"),
    "python-redis-lock": ("set", "blpop", "evalsha"),
    PORTALOCKER: ("subscribe", "unsubscribe", "publish", "pubsub|numsub", "client|list", "client|setname"),
    MITHRIL: ("evalsha", "blpop"),
}


@asynccontextmanager
async def _locks_of_multilock(url: str) -> AsyncIterator[TakeOnALoop]:
    async with multilock.connect_async(url, ttl=float(TTL)) as client:
        await client.ping()
        yield lambda: client.lock(NAME).acquire()


ON_LOOPS: dict[str, Callable[[str], AbstractAsyncContextManager[TakeOnALoop]]] = {
    ON_A_LOOP: _locks_of_multilock,
    GRELMICRO: lambda url: locks_of_grelmicro(url, NAME, TTL),
}


def contend(url: str, what: str, seconds: str) -> None:
    """Acquire and release in five threads, while other processes do the same. Print each turn (an acquire and its
    release) as a line."""
    take = HANDOVERS[what](url)
    until: list[float] = []
    go = threading.Event()

    def work() -> None:
        go.wait()
        turns = []
        while now() < until[0]:
            asked = now()
            with take():
                got = now()
                time.sleep(HOLD)
                released = now()
            turns.append((got, released, asked))
            time.sleep(REST)
        for turn in turns:
            say("turn", *turn)

    _run(work, go, until, float(seconds))


def contend_on_loop(url: str, what: str, seconds: str) -> None:
    asyncio.run(_contend_on_loop(url, what, float(seconds)))


async def _contend_on_loop(url: str, what: str, seconds: float) -> None:
    async with ON_LOOPS[what](url) as take:
        say("ready")
        await asyncio.to_thread(hear)
        until = now() + seconds
        turns: list[tuple[float, float, float]] = []

        async def work() -> None:
            while now() < until:
                asked = now()
                async with take():
                    got = now()
                    await asyncio.sleep(HOLD)
                    released = now()
                turns.append((got, released, asked))
                await asyncio.sleep(REST)

        await asyncio.gather(*(work() for _ in range(THREADS)))
        for turn in turns:
            say("turn", *turn)
    say("done")


def _run(work: Callable[[], None], go: threading.Event, until: list[float], seconds: float) -> None:
    threads = [threading.Thread(target=work) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    say("ready")
    hear()
    until.append(now() + seconds)
    go.set()
    for thread in threads:
        thread.join()
    say("done")


# ---- what is measured


def handovers(ms: float) -> dict[str, dict[str, Any]]:
    """Measure the time from the call of release to the return of a waiter's acquire. The contenders run in turns."""
    runs: dict[str, list[Run]] = {}
    for _ in range(TURNS):
        for what in (*HANDOVERS, *ON_LOOPS, *([MITHRIL] if PEERS_PYTHON.exists() else [])):
            runs.setdefault(what, []).append(_measured(what, ms))
    found = {RAW: asdict(raw_handover(ms))} | {what: _sum_up(its) for what, its in runs.items()}
    for one in found.values():
        one["ratios"] = {each: round(one["median"] / found[each]["median"], 2) for each in (RAW, REDIS_PY)}
    return found


def _sum_up(runs: list[Run]) -> dict[str, Any]:
    turns = sum(run.turns for run in runs)
    return {
        **asdict(sample([gap for run in runs for gap in run.gaps])),
        "locks/s": round(turns / sum(run.seconds for run in runs), 1),
        "requests of one lock": round(sum(run.asked for run in runs) / turns, 2),
    }


def _measured(what: str, ms: float) -> Run:
    with RedisServer() as server, far(server.url, ms) as url:
        run = _turns_elsewhere if what == MITHRIL else _turns
        turns, asked = run(what, url, lambda: asked_of([server.port], ASK.get(what, ("evalsha",))))
    for (_, released, _), (got, _, _) in itertools.pairwise(turns):
        assert got > released, f"{what}: two of them held it at once"
    return run_of(turns, asked)


def _turns(what: str, url: str, count: Callable[[], int]) -> tuple[list[Turn], float]:
    with contextlib.ExitStack() as stack:
        function = "contend_on_loop" if what in ON_LOOPS else "contend"
        helpers = [
            stack.enter_context(Helper(f"tests.benchmarks.handover:{function}", url, what, SECONDS))
            for _ in range(PROCESSES)
        ]
        for helper in helpers:
            helper.wait_for("ready", 20)
        before = count()
        for helper in helpers:
            helper.tell("go")
        for helper in helpers:
            helper.wait_for("done", SECONDS + 60)
        asked = count() - before
        said = [line.split() for helper in helpers for line in helper.lines]
    return sorted((float(words[1]), float(words[2]), float(words[3])) for words in said if words[0] == "turn"), asked


def _turns_elsewhere(what: str, url: str, count: Callable[[], int]) -> tuple[list[Turn], float]:
    script = str(Path(__file__).with_name("peer.py"))
    port = str(urlsplit(url).port)
    order = [str(PEERS_PYTHON), "-I", script, what, port, str(SECONDS), str(HOLD), str(REST)]
    return turns_of(order, count, PROCESSES)


def answer_pushes(port: str) -> None:
    """Run the waiting process of `raw_handover`, which waits for each push and sends one request after it."""
    with _subscribed(int(port)) as push, socket.create_connection(("127.0.0.1", int(port))) as ask:
        say("ready")
        while b"stop" not in push.recv(4096):
            _round_trip(ask, pack("GET", "nothing"))
            say("asked", now())


def raw_handover(ms: float = 0, count: int = 500) -> Sample:
    """Measure the lower limit for any client, on plain sockets with prepacked bytes.

    A handover consists of a request that makes the server push, the wake-up of the waiting process, and a request by
    the waiting process.
    """
    gaps = []
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(RedisServer())
        port = urlsplit(stack.enter_context(far(server.url, ms))).port or 0
        helper = stack.enter_context(Helper("tests.benchmarks.handover:answer_pushes", port))
        helper.wait_for("ready", 20)
        with socket.create_connection(("127.0.0.1", port)) as ask:
            for _ in range(count):
                time.sleep(HOLD)
                started = now()
                _round_trip(ask, pack("PUBLISH", CHANNEL, "x"))
                gaps.append(float(helper.wait_for("asked", 5)[1]) - started)
            _round_trip(ask, pack("PUBLISH", CHANNEL, "stop"))
    return sample(gaps)


@contextlib.contextmanager
def _subscribed(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port)) as push:
        _round_trip(push, pack("SUBSCRIBE", CHANNEL))
        yield push


def _round_trip(connection: socket.socket, request: bytes) -> bytes:
    connection.sendall(request)
    return connection.recv(4096)


def commands(waiters: int, *, count: int = 50) -> float:
    """Return how many commands the server executes for one handover, including those inside scripts."""
    return asyncio.run(_commands(waiters, count))


async def _commands(waiters: int, count: int) -> float:
    with RedisServer() as server, redis.Redis(port=server.port) as operator:
        async with multilock.connect_async(server.url, ttl=float(TTL)) as client:
            lease = await client.lock(NAME).acquire()
            turns = asyncio.Semaphore(0)
            stop = asyncio.Event()

            async def work() -> None:
                async with client.lock(NAME, fair=True).acquire():
                    turns.release()
                    if turns._value >= count:
                        stop.set()
                        await asyncio.Event().wait()  # wait forever, so that the other waiters stay in the queue

            tasks = [asyncio.create_task(work()) for _ in range(waiters)]
            await _until_queued(client, waiters)
            count = min(count, waiters)
            before = _executed(operator)
            await lease.release()
            await stop.wait()
            after = _executed(operator)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return (after - before) / count


async def _until_queued(client: AsyncClient, waiters: int) -> None:
    async with asyncio.timeout(60):
        while (info := await client.inspect(NAME)) is None or info.waiting != waiters:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def _executed(operator: redis.Redis) -> int:
    stats = operator.info("commandstats")
    return sum(stat["calls"] for name, stat in stats.items() if name not in ("cmdstat_info", "cmdstat_ping"))


def _versions() -> dict[str, str]:
    with RedisServer() as server, redis.Redis(port=server.port) as operator:
        running = operator.info("server")["redis_version"]
    return {
        "redis-py": version("redis"),
        "python-redis-lock": version("python-redis-lock"),
        "portalocker": version("portalocker"),
        "grelmicro": version("grelmicro"),
        **versions_of([MITHRIL]),
        "redis-server": running,
    }


def _handovers() -> dict[str, Any]:
    return {f"{ms} ms": handovers(ms) for ms in ROUND_TRIPS}


def _commands_of_one() -> dict[str, float]:
    return {str(waiters): round(commands(waiters), 1) for waiters in WAITERS}


if __name__ == "__main__":
    publish("handover", _versions, {"hand-over": _handovers, "commands of a hand-over": _commands_of_one})
