"""One process with contenders for a lock on a majority of Redis servers.

The lock is multilock's or another library's. The environment of another library need not contain multilock.

``redlock_contend.py WHAT PORTS`` reads from stdin a number of cycles of acquire and release, and prints the seconds of
each cycle as a list in JSON.

``redlock_contend.py WHAT PORTS SECONDS THREADS HOLD REST`` works like `tests.benchmarks.crowd`, but each contender
holds the lock for HOLD seconds, and requests it again after REST seconds. At the end, waiters have GIVE_UP seconds
more.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

__all__ = ["WAYS"]

NAME = "redlock"
TTL = 10.0  # seconds, the default of pottery; a key that a late request left behind expires after this time
FOR_EVER = 10**9
# seconds after which a waiter gives up, because waiters that retry at random may block each other forever
GIVE_UP = 3.0

Take = Callable[[], Callable[[], object]]  # acquires the lock, and returns the function that releases it
TakeAsync = Callable[[], Awaitable[Callable[[], Awaitable[object]]]]


def raw(ports: list[int]) -> Take:
    """Return a `Take` that sends plain requests without a lock. Its time is the lower limit for any client.

    An acquire and a release each send one prepacked request to every server, and then read all replies.
    """
    sockets = [socket.create_connection(("127.0.0.1", port)) for port in ports]
    for each in sockets:
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def round_trips() -> None:
        for each in sockets:
            each.sendall(b"*2\r\n$3\r\nGET\r\n$7\r\nnothing\r\n")
        for each in sockets:
            each.recv(100)

    def take() -> Callable[[], object]:
        round_trips()
        return round_trips

    return take


def ours(ports: list[int]) -> Take:
    multilock = importlib.import_module("multilock")
    client = multilock.connect(_url(ports), ttl=TTL)
    return lambda: client.lock(NAME).acquire().release


async def ours_on_a_loop(ports: list[int]) -> TakeAsync:
    multilock = importlib.import_module("multilock")
    client = multilock.connect_async(_url(ports), ttl=TTL)

    async def take() -> Callable[[], Awaitable[object]]:
        lease = await client.lock(NAME).acquire()
        return lambda: lease.release()

    return take


def _url(ports: list[int]) -> str:
    return f"redlock://{','.join(f'127.0.0.1:{port}' for port in ports)}/0?restart_guard=0"


def redlock_py(ports: list[int]) -> Take:
    library = importlib.import_module("redlock")
    manager = library.Redlock([{"host": "127.0.0.1", "port": port} for port in ports], retry_count=FOR_EVER)

    def take() -> Callable[[], object]:
        lock = manager.lock(NAME, int(TTL * 1000))
        return lambda: manager.unlock(lock)

    return take


def pottery(ports: list[int]) -> Take:
    library, redis = importlib.import_module("pottery"), importlib.import_module("redis")
    masters = {redis.Redis(port=port) for port in ports}

    def take() -> Callable[[], object]:
        lock = library.Redlock(key=NAME, masters=masters, auto_release_time=TTL)
        assert lock.acquire()
        return lambda: lock.release()

    return take


async def aioredlock(ports: list[int]) -> TakeAsync:
    library = importlib.import_module("aioredlock")
    manager = library.Aioredlock([("127.0.0.1", port) for port in ports], retry_count=FOR_EVER)

    async def take() -> Callable[[], Awaitable[object]]:
        lock = await manager.lock(NAME, lock_timeout=TTL)
        return lambda: manager.unlock(lock)

    return take


WAYS: dict[str, Callable[[list[int]], Take]] = {
    "raw: two rounds to all servers": raw,
    "multilock": ours,
    "redlock-py": redlock_py,
    "pottery": pottery,
}
ON_A_LOOP: dict[str, Callable[[list[int]], Awaitable[TakeAsync]]] = {
    "multilock, asyncio": ours_on_a_loop,
    "aioredlock": aioredlock,
}


def _now() -> float:
    return time.clock_gettime(time.CLOCK_MONOTONIC)


def _say(what: Any) -> None:
    print(json.dumps(what), flush=True)


def cycles(take: Take) -> None:
    take()()
    _say("ready")
    for line in sys.stdin:
        took = []
        for _ in range(int(line)):
            start = _now()
            take()()
            took.append(_now() - start)
        _say(took)


async def cycles_on_a_loop(take: TakeAsync) -> None:
    await (await take())()
    _say("ready")
    while line := await asyncio.to_thread(sys.stdin.readline):
        took = []
        for _ in range(int(line)):
            start = _now()
            await (await take())()
            took.append(_now() - start)
        _say(took)


def crowd(take: Take, seconds: float, count: int, hold: float, rest: float) -> None:
    turns: list[tuple[float, float, float]] = []
    waiting: dict[int, float] = {}
    _say("ready")
    sys.stdin.readline()
    until = _now() + seconds

    def work(me: int) -> None:
        while (asked := _now()) < until:
            waiting[me] = asked
            give_back = take()
            del waiting[me]
            got = _now()
            time.sleep(hold)
            back = _now()
            give_back()
            turns.append((got, back, asked))
            time.sleep(rest)

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, until + GIVE_UP - _now()))
    _say([*turns, *_never(waiting)])


def _never(waiting: dict[int, float]) -> list[tuple[float, float, float]]:
    """Return a turn for each waiter that never got the lock. The time of its grant is infinity."""
    return [(math.inf, _now(), asked) for asked in list(waiting.values())]


async def crowd_on_a_loop(take: TakeAsync, seconds: float, count: int, hold: float, rest: float) -> None:
    turns: list[tuple[float, float, float]] = []
    waiting: dict[int, float] = {}
    _say("ready")
    await asyncio.to_thread(sys.stdin.readline)
    until = _now() + seconds

    async def work(me: int) -> None:
        while (asked := _now()) < until:
            waiting[me] = asked
            give_back = await take()
            del waiting[me]
            got = _now()
            await asyncio.sleep(hold)
            back = _now()
            await give_back()
            turns.append((got, back, asked))
            await asyncio.sleep(rest)

    tasks = [asyncio.create_task(work(number)) for number in range(count)]
    ended, _ = await asyncio.wait(tasks, timeout=seconds + GIVE_UP)
    await asyncio.gather(*ended)
    _say([*turns, *_never(waiting)])


async def _on_a_loop(what: str, ports: list[int], order: list[str]) -> None:
    take = await ON_A_LOOP[what](ports)
    if order:
        await crowd_on_a_loop(take, float(order[0]), int(order[1]), float(order[2]), float(order[3]))
    else:
        await cycles_on_a_loop(take)
    os._exit(0)  # closing the loop would wait forever for contenders that keep trying


def main(what: str, servers: str, *order: str) -> None:
    ports = [int(port) for port in servers.split(",")]
    if what in ON_A_LOOP:
        asyncio.run(_on_a_loop(what, ports, list(order)))
    elif order:
        crowd(WAYS[what](ports), float(order[0]), int(order[1]), float(order[2]), float(order[3]))
    else:
        cycles(WAYS[what](ports))
    sys.stdout.flush()
    os._exit(0)  # threads and connections that a library has left must not delay the exit


if __name__ == "__main__":
    main(*sys.argv[1:])
