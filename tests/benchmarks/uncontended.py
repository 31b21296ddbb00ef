"""Measure one acquire and release of a free lock."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import redis
import redis.asyncio
import redis_lock  # type: ignore[import-not-found, import-untyped, unused-ignore]

import multilock
from multilock_redis.wire import pack
from tests.benchmarks.grelmicro import locks_of_grelmicro
from tests.benchmarks.measure import Sample, interleave, interleave_async, pin
from tests.servers import RedisServer

__all__ = ["RawSocket", "asyncio_face", "blocking_face"]

TTL = 30
RAW = "two raw round trips"
RAW_LOCK = "raw SET NX and compare-and-delete"
OURS = "multilock"


class RawSocket:
    """Prepacked bytes on a plain socket, the lower limit for any client of the server."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, request: bytes) -> bytes:
        self._socket.sendall(request)
        return self.read()

    def read(self) -> bytes:
        return self._socket.recv(4096)

    def close(self) -> None:
        self._socket.close()


def blocking_face(*, apart: bool, rounds: int = 40, per_round: int = 50) -> dict[str, Sample]:
    with RedisServer() as server:
        pin(server.pid, apart=apart)
        raw = RawSocket(server.port)
        theirs = redis.Redis(port=server.port)
        with multilock.connect(server.url, ttl=float(TTL)) as client:
            ours = client.lock("ours")

            def multilock_cycle() -> None:
                ours.acquire().release()

            def redis_py_cycle() -> None:
                lock = theirs.lock("redis-py", timeout=TTL)
                lock.acquire()
                lock.release()

            def redis_lock_cycle() -> None:
                lock = redis_lock.Lock(theirs, "python-redis-lock", expire=TTL)
                lock.acquire()
                lock.release()

            samples = interleave(
                {
                    RAW: _two_round_trips(raw),
                    RAW_LOCK: _raw_lock(raw),
                    OURS: multilock_cycle,
                    "redis.lock.Lock": redis_py_cycle,
                    "python-redis-lock": redis_lock_cycle,
                },
                rounds=rounds,
                per_round=per_round,
            )
        theirs.close()
        raw.close()
    return samples


def asyncio_face(*, apart: bool, rounds: int = 40, per_round: int = 50) -> dict[str, Sample]:
    return asyncio.run(_asyncio_face(apart, rounds, per_round))


async def _asyncio_face(apart: bool, rounds: int, per_round: int) -> dict[str, Sample]:
    with RedisServer() as server:
        pin(server.pid, apart=apart)
        raw = RawSocket(server.port)
        two_round_trips = _two_round_trips(raw)
        theirs = redis.asyncio.Redis(port=server.port)
        async with (
            multilock.connect_async(server.url, ttl=float(TTL)) as client,
            locks_of_grelmicro(server.url, "grelmicro", TTL) as lock_of_grelmicro,
        ):
            ours = client.lock("ours")

            async def raw_cycle() -> None:
                two_round_trips()

            async def multilock_cycle() -> None:
                lease = await ours.acquire()
                await lease.release()

            async def redis_py_cycle() -> None:
                lock = theirs.lock("redis-py", timeout=TTL)
                await lock.acquire()
                await lock.release()

            async def grelmicro_cycle() -> None:
                async with lock_of_grelmicro():
                    pass

            samples = await interleave_async(
                {
                    RAW: raw_cycle,
                    OURS: multilock_cycle,
                    "redis.asyncio.lock.Lock": redis_py_cycle,
                    "grelmicro": grelmicro_cycle,
                },
                rounds=rounds,
                per_round=per_round,
            )
        await theirs.aclose()
        raw.close()
    return samples


def _two_round_trips(raw: RawSocket) -> Callable[[], None]:
    get = pack("GET", "nothing")

    def cycle() -> None:
        raw.ask(get)
        raw.ask(get)

    return cycle


def _raw_lock(raw: RawSocket) -> Callable[[], None]:
    script = "return redis.call('GET', KEYS[1]) == ARGV[1] and redis.call('DEL', KEYS[1]) or 0"
    sha = raw.ask(pack("SCRIPT", "LOAD", script)).split(b"\r\n")[1]
    take = pack("SET", "raw", "owner", "NX", "PX", TTL * 1000)
    give_back = pack("EVALSHA", sha, 1, "raw", "owner")

    def cycle() -> None:
        raw.ask(take)
        raw.ask(give_back)

    return cycle
