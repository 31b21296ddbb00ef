"""The tools of the benchmarks: contenders take turns in one run, and processes are pinned to cores."""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from multilock.testing.network import Network

__all__ = ["Sample", "asked_of", "far", "interleave", "interleave_async", "pin", "sample", "timed"]

Cycle = Callable[[], object]
AsyncCycle = Callable[[], Awaitable[object]]
# A function that runs the given number of cycles in another process or on an event loop, and returns the time of each
# cycle.
Elsewhere = Callable[[int], list[float]]


@dataclass(frozen=True, slots=True)
class Sample:
    """The median and the 99th percentile of measured times in microseconds, and the number of times."""

    median: float
    p99: float
    count: int


def sample(seconds: list[float]) -> Sample:
    ordered = sorted(seconds)
    return Sample(
        median=round(statistics.median(ordered) * 1e6, 1),
        p99=round(ordered[int(len(ordered) * 0.99)] * 1e6, 1),
        count=len(ordered),
    )


@contextlib.contextmanager
def far(url: str, ms: float) -> Iterator[str]:
    """Yield a URL of the same servers behind proxies, which make each round trip longer by ``ms``. Forwarding takes
    some time too."""
    if not ms:
        yield url
        return
    with contextlib.closing(Network(url)) as network:
        network.delay(ms / 2000)
        yield network.url


def asked_of(ports: Sequence[int], by: Sequence[str]) -> int:
    """Return how often the Redis servers have executed the commands ``by``. To count requests, choose commands that no
    script executes."""
    count = 0
    for port in ports:
        with redis.Redis(port=port) as bare:
            stats: Any = bare.info("commandstats")
        count += sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in by)
    return count


def pin(server: int, *, apart: bool) -> None:
    """Pin this process to one core, and all threads of the server to the same core or to another one.

    On the same core a round trip is as short as possible, so the client's own work has the greatest share of the time.
    """
    cores = sorted(os.sched_getaffinity(os.getppid()))
    os.sched_setaffinity(0, {cores[-1]})
    for thread in Path(f"/proc/{server}/task").iterdir():
        os.sched_setaffinity(int(thread.name), {cores[0] if apart else cores[-1]})


def interleave(
    cycles: Mapping[str, Cycle],
    *,
    rounds: int,
    per_round: int,
    elsewhere: Mapping[str, Elsewhere] | None = None,
    before_each_round: Cycle = lambda: None,
) -> dict[str, Sample]:
    """Run each cycle ``rounds × per_round`` times, in turns. The first round only warms up."""
    turns: dict[str, Elsewhere] = {name: timed(cycle) for name, cycle in cycles.items()} | dict(elsewhere or {})
    times: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(rounds + 1):
        before_each_round()
        for name, turn in turns.items():
            spent = turn(per_round)
            if number:
                times[name] += spent
    return {name: sample(spent) for name, spent in times.items()}


def timed(cycle: Cycle) -> Elsewhere:
    clock = time.perf_counter

    def turn(count: int) -> list[float]:
        spent = []
        for _ in range(count):
            start = clock()
            cycle()
            spent.append(clock() - start)
        return spent

    return turn


async def interleave_async(cycles: Mapping[str, AsyncCycle], *, rounds: int, per_round: int) -> dict[str, Sample]:
    times: dict[str, list[float]] = {name: [] for name in cycles}
    clock = time.perf_counter
    for turn in range(rounds + 1):
        for name, cycle in cycles.items():
            for _ in range(per_round):
                start = clock()
                await cycle()
                spent = clock() - start
                if turn:
                    times[name].append(spent)
            await asyncio.sleep(0)
    return {name: sample(spent) for name, spent in times.items()}
