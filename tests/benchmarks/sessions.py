"""Measurements that etcd, Consul and ZooKeeper share, because their locks live in a session that the client keeps
alive."""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import multilock
from tests.benchmarks.measure import sample

__all__ = ["ASYNCIO", "OURS", "TTL", "WITHIN", "Contender", "Count", "faces", "held", "notices", "requests"]

OURS, ASYNCIO = "multilock", "multilock, asyncio"
TTL = 30.0
WITHIN = 5.0
COUNTED = 20  # how many times each request is counted
NOTICES = 30
ARMED = 0.5  # seconds to wait after a grant, until the lease is watched; the watch begins after a quarter of a second
HELD = (1, 1000)
HELD_TTL = 6.0
PERIODS = 5  # renewal periods, each a third of the ttl

Count = Callable[[], Mapping[str, float]]  # returns how many requests of each kind the server has received so far


@dataclass(frozen=True, slots=True)
class Contender:
    """One lock of any library, which one thread acquires and releases."""

    acquire: Callable[[], object]
    release: Callable[[], object]

    def cycle(self) -> None:
        self.acquire()
        self.release()


def faces(url: str, stack: ExitStack) -> dict[str, Contender]:
    """Return the contenders of multilock, blocking and asyncio. ``stack`` closes their clients."""
    lock = stack.enter_context(multilock.connect(url, ttl=TTL)).lock("bench")
    leases: list[multilock.Lease] = []

    def release() -> None:
        assert leases.pop().release()

    loop = asyncio.new_event_loop()
    stack.callback(loop.close)
    client = multilock.connect_async(url, ttl=TTL)
    stack.callback(lambda: loop.run_until_complete(client.close()))
    alock = client.lock("bench-asyncio")
    aleases: list[multilock.AsyncLease] = []

    async def take() -> None:
        aleases.append(await alock.acquire())

    async def give_back() -> None:
        assert await aleases.pop().release()

    return {
        OURS: Contender(lambda: leases.append(lock.acquire()), release),
        ASYNCIO: Contender(lambda: loop.run_until_complete(take()), lambda: loop.run_until_complete(give_back())),
    }


def requests(contenders: Mapping[str, Contender], count: Count) -> dict[str, dict[str, float]]:
    """Return how many requests the server receives for one acquire and one release. The figures are medians, so
    occasional other requests do not matter."""
    found = {}
    for name, contender in contenders.items():
        contender.cycle()
        counts = {"acquire": [0.0] * COUNTED, "release": [0.0] * COUNTED}
        for number in range(COUNTED):
            for step, numbers in counts.items():
                before = sum(count().values())
                getattr(contender, step)()
                numbers[number] = sum(count().values()) - before
        found[name] = {step: statistics.median(numbers) for step, numbers in counts.items()}
    return found


def notices(
    url: str, ends: Mapping[str, Callable[[multilock.Client, str], float]], **options: Any
) -> dict[str, dict[str, float]]:
    """Return the microseconds from a request that ends a lock until ``on_lost`` begins.

    Each function in ``ends`` receives the client and the name of a lock that the client holds. It sends a request that
    ends the lock, and returns the time of sending.
    """
    found = {}
    for what, end in ends.items():
        took = []
        with multilock.connect(url, ttl=TTL, **options) as client:
            for number in range(NOTICES):
                began: list[float] = []
                told = threading.Event()

                def on_lost(_: multilock.Loss, began: list[float] = began, told: threading.Event = told) -> None:
                    began.append(multilock.now())
                    told.set()

                name = f"notice-{number}"
                client.lock(name, on_lost=on_lost).acquire(timeout=WITHIN)
                time.sleep(ARMED)
                sent_at = end(client, name)
                assert told.wait(WITHIN), "the loss was not told"
                took.append(began[0] - sent_at)
        found[what] = asdict(sample(took))
    return found


def held(url: str, count: Count) -> dict[str, dict[str, float]]:
    """Return the requests and the processor time of a client that holds one lock, and of a client that holds a
    thousand."""
    found = {}
    for locks in HELD:
        with multilock.connect(url, ttl=HELD_TTL) as client:
            leases = [client.lock(f"held-{number}").acquire() for number in range(locks)]
            time.sleep(ARMED + HELD_TTL / 3)
            before, used = count(), time.process_time()
            time.sleep(PERIODS * HELD_TTL / 3)
            used = time.process_time() - used
            asked = {f"{kind} in {PERIODS} periods": number - before[kind] for kind, number in count().items()}
            assert all(lease.is_held() for lease in leases)
            found[str(locks)] = {**asked, "of one core": round(used / (PERIODS * HELD_TTL / 3), 4)}
    return found
