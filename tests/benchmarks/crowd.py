"""Twenty contenders in four processes for one name, who hold it for no time and ask again at once.

``python -m tests.benchmarks.crowd HOW URL SECONDS`` is one of the processes: it says that it is ready, waits for a line
on stdin, and tells its turns in JSON: when each was got, given back and asked for. `tests.benchmarks.peer` does the
same.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import multilock
from multilock import now
from tests.benchmarks.measure import sample

__all__ = ["ASYNCIO", "FAIR", "OURS", "SECONDS", "crowd", "ours", "turns_of"]

PROCESSES = 4
THREADS = 5
SECONDS = 4.0
TTL = 30.0
NAME = "crowd"
OURS, FAIR, ASYNCIO = "multilock", "multilock, fair=True", "multilock, asyncio"

Turn = tuple[float, float, float]  # got, given back, asked for
Count = Callable[[], Mapping[str, float]]


def ours(how: str, url: str) -> list[str]:
    """The command of one of our processes."""
    return [sys.executable, "-m", "tests.benchmarks.crowd", how, url, str(SECONDS)]


def crowd(command: Sequence[str], count: Count) -> dict[str, Any]:
    """What the processes of this command did; ``count`` tells what their server has been asked until now."""
    turns, asked = turns_of(command, lambda: sum(count().values()))
    gaps = [(got - back, asked_at < back) for (_, back, _), (got, _, asked_at) in itertools.pairwise(turns)]
    return {
        "hand-overs/s": round(len(turns) / (turns[-1][1] - turns[0][0]), 1),
        **asdict(sample([gap for gap, waited in gaps if waited])),
        "requests of one lock": round(asked / len(turns), 2),
    }


def turns_of(command: Sequence[str], count: Callable[[], float], many: int = PROCESSES) -> tuple[list[Turn], float]:
    """What so ``many`` processes of this command did, in the order in which they got it, and how often they asked."""
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
        assert got > back, "two of them held it at once"
    return turns, asked


def _start(command: Sequence[str]) -> subprocess.Popen[str]:
    root = Path(__file__).parents[2]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root)


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "it ended"
    return line


# ---- what each process of ours does


def _threads(url: str, fair: bool, seconds: float) -> list[Turn]:
    client = multilock.connect(url, ttl=TTL)
    turns: list[Turn] = []
    until = _go() + seconds

    def work() -> None:
        while (asked := now()) < until:
            with client.lock(NAME, fair=fair).acquire():
                got = now()
            turns.append((got, got, asked))

    threads = [threading.Thread(target=work) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    client.close()
    return turns


async def _tasks(url: str, seconds: float) -> list[Turn]:
    turns: list[Turn] = []
    async with multilock.connect_async(url, ttl=TTL) as client:
        until = _go() + seconds

        async def work() -> None:
            while (asked := now()) < until:
                async with client.lock(NAME).acquire():
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
    turns = asyncio.run(_tasks(url, within)) if how == ASYNCIO else _threads(url, how == FAIR, within)
    print(json.dumps(turns), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
