"""Ten thousand held locks: the threads and memory that they need, and the processor time of their renewals."""

from __future__ import annotations

import gc
import multiprocessing
import resource
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import multilock
from tests.servers import RedisServer

__all__ = ["Held", "held_locks"]

TTL = 30.0
REST = 1.0  # seconds from the last acquire to the measurement


@dataclass(frozen=True, slots=True)
class Held:
    locks: int
    threads: int  #: number of multilock's threads while no lock is acquired or released
    bytes_each: float
    cpu_share: float  #: share of one core that is used during a renewal period
    still_held: int


def held_locks(count: int = 10_000) -> dict[str, Held]:
    """Measure each backend in a new process, so that no backend reuses memory that another has freed."""
    with RedisServer() as server, TemporaryDirectory() as folder:
        urls = {"redis": server.url, "sqlite": f"sqlite://{folder}/locks.db", "memory": "memory://benchmark"}
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, spawn, max_tasks_per_child=1) as fresh:
            return {backend: fresh.submit(_held, url, count).result() for backend, url in urls.items()}


def _held(url: str, count: int) -> Held:
    with multilock.connect(url, ttl=TTL) as client:
        client.lock("warm-up").acquire().release()
        locks = [client.lock(f"lock/{number}") for number in range(count)]
        leases: list[multilock.Lease] = []
        gc.collect()
        before = _resident()
        leases.extend(lock.acquire() for lock in locks)
        time.sleep(REST)
        gc.collect()
        after = _resident()
        threads = sum(thread.name.startswith("multilock") for thread in threading.enumerate())
        share = _cpu_share(lambda: time.sleep(TTL / 3))
        held = sum(lease.is_held() for lease in leases)
        for lease in leases:
            lease.release()
    return Held(count, threads, round((after - before) / count), round(share, 4), held)


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def _cpu_share(period: Callable[[], None]) -> float:
    wall, cpu = time.perf_counter(), time.process_time()
    period()
    return (time.process_time() - cpu) / (time.perf_counter() - wall)
