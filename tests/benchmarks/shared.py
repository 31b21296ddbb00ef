"""Readers and permits, on every backend: ``python -m tests.benchmarks.shared``.

What a reader pays beside many others, and how often three permits change hands among forty who want one; beside what
there is in the field: kazoo's Semaphore.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from importlib.metadata import version
from tempfile import TemporaryDirectory
from typing import Any

from kazoo.client import KazooClient

import multilock
from tests.benchmarks.measure import interleave
from tests.benchmarks.report import publish
from tests.servers import RedisServer, Server
from tests.servers_consul import ConsulServer
from tests.servers_etcd import EtcdServer
from tests.servers_zookeeper import ZooKeeperServer

TTL = 30.0
BESIDE = (0, 1_000, 5_000)
AT_ONCE = 16  # threads that take the readers beside which it is measured
CYCLES = 40
PERMITS, WANTING, SECONDS = 3, 40, 8.0


@contextlib.contextmanager
def _file() -> Iterator[str]:
    with TemporaryDirectory() as folder:
        yield f"sqlite://{folder}/locks.db"


@contextlib.contextmanager
def _url(server: AbstractContextManager[Server]) -> Iterator[str]:
    with server as running:
        yield running.url


BACKENDS: Mapping[str, Callable[[], AbstractContextManager[str]]] = {
    "memory": lambda: contextlib.nullcontext("memory://benchmark"),
    "sqlite": _file,
    "redis": lambda: _url(RedisServer()),
    "etcd": lambda: _url(EtcdServer()),
    "consul": lambda: _url(ConsulServer()),
    "zookeeper": lambda: _url(ZooKeeperServer()),
}
#: A listing is all that a ZooKeeper can be asked for: five thousand readers would each have read all before them.
MOST_READERS = {"zookeeper": 1_000}


class _Others:
    """Many readers of one client, as a rule in a process of their own."""

    def __init__(self) -> None:
        self._held: list[multilock.Lease] = []
        self._client: multilock.Client | None = None

    def take(self, url: str, count: int) -> None:
        """Until they are so many."""
        client = self._client = self._client or multilock.connect(url, ttl=TTL)
        reader = client.read_write_lock("read").reader()
        with ThreadPoolExecutor(AT_ONCE) as pool:
            self._held += pool.map(lambda _: reader.acquire(), range(count - len(self._held)))

    def end(self) -> None:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            assert all(pool.map(lambda lease: lease.release(), self._held))
        if self._client:
            self._client.close()
        self._held, self._client = [], None


_others = _Others()


def _take(url: str, count: int) -> None:
    _others.take(url, count)


def _end() -> None:
    _others.end()


def _readers() -> dict[str, dict[str, float | None]]:
    """Medians in µs of acquire + release."""
    found: dict[str, dict[str, float | None]] = {}
    spawn = multiprocessing.get_context("spawn")
    for backend, place in BACKENDS.items():
        with place() as url, multilock.connect(url, ttl=TTL) as ours, ProcessPoolExecutor(1, spawn) as process:
            reader, lock = ours.read_write_lock("read").reader(), ours.lock("alone")
            row: dict[str, float | None] = {}
            for count in BESIDE:
                if count > MOST_READERS.get(backend, count):
                    row[f"a reader beside {count:,}"] = None
                    continue
                if backend == "memory":
                    _take(url, count)
                else:
                    process.submit(_take, url, count).result()
                cycles = {"lock": lambda: lock.acquire().release(), "reader": lambda: reader.acquire().release()}  # noqa: B023
                samples = interleave(cycles, rounds=5, per_round=CYCLES)
                row.setdefault("a lock", samples["lock"].median)
                row[f"a reader beside {count:,}"] = samples["reader"].median
            found[backend] = row
            _end()
            process.submit(_end).result()
    return found


@dataclass(frozen=True, slots=True)
class Served:
    grants_per_s: float
    median_ms: float  #: of the wait for one
    p99_ms: float
    least: int  #: grants of the one that got the fewest


def _served(cycle_of: Callable[[ExitStack], Callable[[], None]]) -> Served:
    """Forty threads, each with a cycle of its own, which waits for a permit and gives it back."""
    waits: list[list[float]] = [[] for _ in range(WANTING)]
    over = threading.Event()

    def want(number: int, cycle: Callable[[], None]) -> None:
        while not over.is_set():
            began = time.perf_counter()
            cycle()
            waits[number].append(time.perf_counter() - began)

    with ExitStack() as stack:
        cycles = [cycle_of(stack) for _ in range(WANTING)]
        threads = [threading.Thread(target=want, args=each) for each in enumerate(cycles)]
        for thread in threads:
            thread.start()
        time.sleep(SECONDS)
        over.set()
        for thread in threads:
            thread.join()
    every = sorted(wait for own in waits for wait in own)
    return Served(
        round(len(every) / SECONDS, 1),
        round(every[len(every) // 2] * 1000, 1),
        round(every[int(len(every) * 0.99)] * 1000, 1),
        min(map(len, waits)),
    )


def _permits() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for backend, place in BACKENDS.items():
        with place() as url, multilock.connect(url, ttl=TTL) as client:
            semaphore = client.semaphore("permits", PERMITS)
            found[f"{backend}"] = asdict(_served(lambda _: lambda: _passed(semaphore)))  # noqa: B023
            if backend == "zookeeper":
                found["zookeeper, kazoo Semaphore"] = asdict(_served(_kazoo(url.partition("//")[2])))
    return found


def _passed(semaphore: multilock.Semaphore) -> None:
    semaphore.acquire().release()


def _kazoo(endpoint: str) -> Callable[[ExitStack], Callable[[], None]]:
    def cycle_of(stack: ExitStack) -> Callable[[], None]:
        client = KazooClient(endpoint.partition("/")[0])
        client.start()
        stack.callback(client.close)
        stack.callback(client.stop)
        semaphore = client.Semaphore("/kazoo", max_leases=PERMITS)

        def cycle() -> None:
            semaphore.acquire()
            semaphore.release()

        return cycle

    return cycle_of


if __name__ == "__main__":
    publish("shared", lambda: {"kazoo": version("kazoo")}, {"readers": _readers, "permits": _permits})
