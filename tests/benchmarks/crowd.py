"""Twenty contenders in four processes compete for one name. Each releases the lock at once and requests it again at
once.

``python -m tests.benchmarks.crowd HOW URL SECONDS`` runs one of the processes. The process reports that it is ready,
waits for a line on stdin, and then prints its turns as JSON: when it requested, acquired and released each lock.
`tests.benchmarks.peer` runs such a process with the lock of another library.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import multilock
from multilock import now
from tests.benchmarks.measure import sample
from tests.servers import Server

__all__ = ["ASYNCIO", "FAIR", "KAZOO", "OURS", "SECONDS", "Run", "Turn", "crowds", "ours", "run_of", "turns_of"]

PROCESSES = 4
THREADS = 5
ROUNDS = 5
SECONDS = 4.0  # duration of a round
TTL = 30.0
NAME = "crowd"
OURS, FAIR, ASYNCIO, KAZOO = "multilock", "multilock, fair=True", "multilock, asyncio", "kazoo.Lock"

Turn = tuple[float, float, float]  # the times of acquire, release, and request
Count = Callable[[], Mapping[str, float]]
Lock = Callable[[], AbstractContextManager[object]]  # each thread calls this function to get its own lock
S = TypeVar("S", bound=Server)


def ours(how: str) -> Callable[[Server], list[str]]:
    """Return a function that returns the command of one process with multilock, for a given server."""
    return lambda server: [sys.executable, "-m", "tests.benchmarks.crowd", how, server.url, str(SECONDS)]


class Run(NamedTuple):
    gaps: list[float]  #: seconds from each release to the next grant, if the next holder was already waiting
    turns: int
    seconds: float
    asked: float


def crowds(
    start: Callable[[], AbstractContextManager[S]],
    commands: Mapping[str, Callable[[S], Sequence[str]]],
    count: Callable[[S], Count],
) -> dict[str, dict[str, Any]]:
    """Measure the commands in turns, and return the figures of each command.

    Each run has a new server. ``count`` returns how many requests a server has received so far.
    """
    runs: dict[str, list[Run]] = {how: [] for how in commands}
    for _ in range(ROUNDS):
        for how, its in runs.items():
            with start() as server:
                its.append(_run(commands[how](server), count(server)))
    return {how: _sum_up(its) for how, its in runs.items()}


def _run(command: Sequence[str], count: Count) -> Run:
    return run_of(*turns_of(command, lambda: sum(count().values())))


def run_of(turns: Sequence[Turn], asked: float) -> Run:
    """Return the figures of these turns, which are in the order of acquisition."""
    gaps = [(got - back, asked_at < back) for (_, back, _), (got, _, asked_at) in itertools.pairwise(turns)]
    return Run([gap for gap, waited in gaps if waited], len(turns), turns[-1][1] - turns[0][0], asked)


def _sum_up(runs: Sequence[Run]) -> dict[str, Any]:
    return {
        "hand-overs/s": round(statistics.median(run.turns / run.seconds for run in runs), 1),
        **asdict(sample([gap for run in runs for gap in run.gaps])),
        "requests of one lock": round(statistics.median(run.asked / run.turns for run in runs), 2),
    }


def turns_of(command: Sequence[str], count: Callable[[], float], many: int = PROCESSES) -> tuple[list[Turn], float]:
    """Run ``many`` processes of this command. Return their turns in the order of acquisition, and the number of
    requests.

    If a process never got the lock, it has one turn, at the time infinity.
    """
    processes = [_start(command) for _ in range(many)]
    try:
        for process in processes:
            _line(process)
        before = count()
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        turns: list[Turn] = sorted(tuple(turn) for process in processes for turn in json.loads(_line(process)))
        asked = count() - before
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    for (_, back, _), (got, _, _) in itertools.pairwise(turns):
        assert got > back or math.isinf(got), "two of them held it at once"
    return turns, asked


def _start(command: Sequence[str]) -> subprocess.Popen[str]:
    root = Path(__file__).parents[2]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root)


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "it ended"
    return line


# ---- what each process does


def _ours(url: str, fair: bool, seconds: float) -> list[Turn]:
    with multilock.connect(url, ttl=TTL) as client:
        client.ping()
        return _threads(lambda: client.lock(NAME, fair=fair), seconds)


def _kazoo(url: str, seconds: float) -> list[Turn]:
    from kazoo.client import KazooClient

    client = KazooClient(url.partition("//")[2], timeout=TTL)
    client.start()
    try:
        return _threads(lambda: client.Lock(f"/{NAME}"), seconds)
    finally:
        client.stop()
        client.close()


def _threads(lock_of: Lock, seconds: float) -> list[Turn]:
    turns: list[Turn] = []
    until = _go() + seconds

    def work() -> None:
        lock = lock_of()
        while (asked := now()) < until:
            with lock:
                got = now()
            turns.append((got, got, asked))

    threads = [threading.Thread(target=work) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return turns


async def _tasks(url: str, seconds: float) -> list[Turn]:
    turns: list[Turn] = []
    async with multilock.connect_async(url, ttl=TTL) as client:
        await client.ping()
        until = _go() + seconds

        async def work() -> None:
            lock = client.lock(NAME)
            while (asked := now()) < until:
                async with lock:
                    got = now()
                turns.append((got, got, asked))

        await asyncio.gather(*(work() for _ in range(THREADS)))
    return turns


def _go() -> float:
    print("ready", flush=True)
    sys.stdin.readline()
    return now()


def main(how: str, url: str, seconds: str) -> None:
    within = float(seconds)
    if how == ASYNCIO:
        turns = asyncio.run(_tasks(url, within))
    else:
        turns = _kazoo(url, within) if how == KAZOO else _ours(url, how == FAIR, within)
    print(json.dumps(turns), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
