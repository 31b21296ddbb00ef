"""``python -m tests.benchmarks.shared``: measure readers and permits on every backend.

The benchmark measures how long a reader's acquire and release take beside many other readers, and how often three
permits are granted to forty waiters. kazoo's ReadLock and Semaphore are measured in the same way. Readers of fasteners
work in one process or on one file, and readers of aiorwlock on one event loop. So these two libraries are compared with
memory:// and sqlite:// only.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from importlib.metadata import version
from tempfile import TemporaryDirectory
from typing import Any

import aiorwlock
import fasteners
from kazoo.client import KazooClient

import multilock
from tests.benchmarks.measure import Elsewhere, interleave, timed
from tests.benchmarks.report import publish
from tests.servers import RedisServer, Server
from tests.servers_consul import ConsulServer
from tests.servers_etcd import EtcdServer
from tests.servers_zookeeper import ZooKeeperServer

TTL = 30.0
BESIDE = (0, 1_000, 5_000)
AT_ONCE = 16  # number of threads that acquire the locks of the other readers
# seconds for which a process is observed, and the share of a processor below which it counts as idle
SETTLES, RESTS = 1.0, 0.05
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
#: ZooKeeper returns only complete lists of nodes, so five thousand readers would read very long lists.
MOST_READERS = {"zookeeper": 1_000}


@dataclass(frozen=True, slots=True)
class Taker:
    """A contender. ``lock`` and ``reader`` run a number of cycles of acquire and release, and return the seconds of
    each."""

    lock: Elsewhere
    reader: Elsewhere
    # Whether the contender is also measured beside many readers of multilock, which its lock must see.
    beside: bool = True


@contextlib.contextmanager
def _ours(url: str) -> Iterator[Taker]:
    with multilock.connect(url, ttl=TTL) as client:
        lock, reader = client.lock("alone"), client.read_write_lock("read").reader()
        yield Taker(timed(lambda: lock.acquire().release()), timed(lambda: reader.acquire().release()))


@contextlib.contextmanager
def _ours_on_a_loop(url: str) -> Iterator[Taker]:
    with asyncio.Runner() as runner:
        client = multilock.connect_async(url, ttl=TTL)
        yield Taker(_on(runner, client.lock("alone")), _on(runner, client.read_write_lock("read").reader()))
        runner.run(client.close())


@contextlib.contextmanager
def _aiorwlock(_: str) -> Iterator[Taker]:
    with asyncio.Runner() as runner:
        both: Any = aiorwlock.RWLock()
        yield Taker(_on(runner, both.writer), _on(runner, both.reader), beside=False)


@contextlib.contextmanager
def _fasteners(_: str) -> Iterator[Taker]:
    both = fasteners.ReaderWriterLock()
    yield Taker(timed(_entered(both.write_lock)), timed(_entered(both.read_lock)), beside=False)


@contextlib.contextmanager
def _fasteners_file(_: str) -> Iterator[Taker]:
    with TemporaryDirectory() as folder:
        both = fasteners.InterProcessReaderWriterLock(f"{folder}/lock")
        yield Taker(timed(_entered(both.write_lock)), timed(_entered(both.read_lock)), beside=False)


@contextlib.contextmanager
def _kazoo_locks(url: str) -> Iterator[Taker]:
    with _kazoo_client(url) as client:
        lock, reader = client.WriteLock("/alone"), client.ReadLock("/multilock/read")
        yield Taker(timed(_entered(lambda: lock)), timed(_entered(lambda: reader)))


def _entered(enter: Callable[[], AbstractContextManager[object]]) -> Callable[[], None]:
    def cycle() -> None:
        with enter():
            pass

    return cycle


def _on(runner: asyncio.Runner, lock: AbstractAsyncContextManager[object]) -> Elsewhere:
    async def cycles(count: int) -> list[float]:
        spent = []
        for _ in range(count):
            start = time.perf_counter()
            async with lock:
                pass
            spent.append(time.perf_counter() - start)
        return spent

    return lambda count: runner.run(cycles(count))


#: The contenders of each backend, which take turns on one server. multilock is the first.
TAKERS: Mapping[str, Mapping[str, Callable[[str], AbstractContextManager[Taker]]]] = {
    "memory": {
        "asyncio": _ours_on_a_loop,
        "fasteners.ReaderWriterLock of one process": _fasteners,
        "aiorwlock of one loop": _aiorwlock,
    },
    "sqlite": {"fasteners.InterProcessReaderWriterLock on a file": _fasteners_file},
    "zookeeper": {"kazoo WriteLock and ReadLock": _kazoo_locks},
}


class _Others:
    """Many readers of one client, usually in a separate process."""

    def __init__(self) -> None:
        self._held: list[multilock.Lease] = []
        self._client: multilock.Client | None = None

    def take(self, url: str, count: int) -> None:
        """Acquire until there are ``count`` readers, and wait until their process is idle.

        multilock begins to watch a lock a moment after its grant. This work must not be measured.
        """
        client = self._client = self._client or multilock.connect(url, ttl=TTL)
        reader = client.read_write_lock("read").reader()
        with ThreadPoolExecutor(AT_ONCE) as pool:
            self._held += pool.map(lambda _: reader.acquire(), range(count - len(self._held)))
        before = -math.inf
        while time.process_time() - before > RESTS * SETTLES:
            before = time.process_time()
            time.sleep(SETTLES)

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
    """Return the medians of acquire + release, in µs."""
    found: dict[str, dict[str, float | None]] = {}
    spawn = multiprocessing.get_context("spawn")
    for backend, place in BACKENDS.items():
        with place() as url, ExitStack() as stack, ProcessPoolExecutor(1, spawn) as process:
            takers = {backend: stack.enter_context(_ours(url))}
            takers |= {f"{backend}, {who}": stack.enter_context(of(url)) for who, of in TAKERS.get(backend, {}).items()}
            rows: dict[str, dict[str, float | None]] = {who: {} for who in takers}
            for count in BESIDE:
                if count <= MOST_READERS.get(backend, count):
                    _take(url, count) if backend == "memory" else process.submit(_take, url, count).result()
                    here = {who: taker for who, taker in takers.items() if taker.beside or not count}
                    samples = _medians(here)
                else:
                    samples = {}
                for who, row in rows.items():
                    alone, reading = samples.get(who, (None, None))
                    row.setdefault("a lock", alone)
                    row[f"a reader beside {count:,}"] = reading
            found |= rows
            _end()
            process.submit(_end).result()
    return found


def _medians(takers: Mapping[str, Taker]) -> dict[str, tuple[float, float]]:
    """Return for each contender the median times of its lock and of its reader."""
    turns = {f"{who}: lock": taker.lock for who, taker in takers.items()}
    turns |= {f"{who}: reader": taker.reader for who, taker in takers.items()}
    samples = interleave({}, rounds=5, per_round=CYCLES, elsewhere=turns)
    return {who: (samples[f"{who}: lock"].median, samples[f"{who}: reader"].median) for who in takers}


@dataclass(frozen=True, slots=True)
class Served:
    grants_per_s: float
    median_ms: float  #: percentiles of the time that a thread waits for one permit
    p99_ms: float
    least: int  #: number of grants of the thread that got the fewest


def _served(cycle_of: Callable[[ExitStack], Callable[[], None]]) -> Served:
    """Run forty threads, each of which repeatedly waits for a permit and releases it."""
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
                found["zookeeper, kazoo Semaphore"] = asdict(_served(_kazoo_semaphore(url)))
    return found


def _passed(semaphore: multilock.Semaphore) -> None:
    semaphore.acquire().release()


def _kazoo_semaphore(url: str) -> Callable[[ExitStack], Callable[[], None]]:
    def cycle_of(stack: ExitStack) -> Callable[[], None]:
        semaphore = stack.enter_context(_kazoo_client(url)).Semaphore("/kazoo", max_leases=PERMITS)
        return _entered(lambda: semaphore)

    return cycle_of


@contextlib.contextmanager
def _kazoo_client(url: str) -> Iterator[Any]:
    client = KazooClient(url.partition("//")[2].partition("/")[0], timeout=TTL)
    client.start()
    try:
        yield client
    finally:
        client.stop()
        client.close()


def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("kazoo", "fasteners", "aiorwlock")}


if __name__ == "__main__":
    publish("shared", _versions, {"readers": _readers, "permits": _permits})
