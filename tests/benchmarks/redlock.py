"""``python -m tests.benchmarks.redlock``: benchmarks of Redlock in multilock and in other libraries.

Each contender has its own processes (`redlock_contend`), and all take turns in the same minutes. The library aioredlock
installs a parser that redis-py would then use for all contenders. So ``make bench`` makes a separate environment for
aioredlock. Without this environment, aioredlock is left out.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack, closing
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import redis

from tests.benchmarks.crowd import turns_of
from tests.benchmarks.measure import asked_of, far, interleave, sample
from tests.benchmarks.peer import PEERS_PYTHON, versions_of
from tests.benchmarks.report import publish, with_ratios
from tests.servers_redlock import RedisServers

RAW, OURS = "raw: two rounds to all servers", "multilock"
ON_A_LOOP = "aioredlock"
#: The commands that each contender sends to the servers. Commands inside its scripts do not count.
CONTENDERS: Mapping[str, tuple[str, ...]] = {
    RAW: ("get",),
    OURS: ("evalsha",),
    "multilock, asyncio": ("evalsha",),
    "redlock-py": ("set", "eval"),
    "pottery": ("set", "evalsha"),
    ON_A_LOOP: ("evalsha",),
}
SERVERS = (3, 5)
ROUND_TRIPS = (0, 1)  # milliseconds that the proxy adds to each round trip
ROUNDS, PER_ROUND = 10, 30
#: Number of servers, number of contenders, and milliseconds that are added to each round trip, half of them in each
#: direction.
CROWDS = [(3, 1, 0), *((servers, count, ms) for servers, ms in ((3, 0), (3, 4), (5, 0)) for count in (10, 50))]
RUSHES = [(3, 20, 0), (3, 50, 0)]  # like CROWDS, but contenders release at once and request the lock again at once
RUNS = 5  # number of runs of each rush with multilock; other libraries have one run
MOST_PROCESSES = 5
SECONDS = 2.5
HOLD = 0.002  # seconds
# Seconds from a contender's release to its next request, so that it does not overtake the other contenders. A single
# contender does not pause.
REST = 0.01
WITHIN = 60.0


def _contenders() -> dict[str, list[str]]:
    """Return the command that starts a process of each contender."""
    script = str(Path(__file__).with_name("redlock_contend.py"))
    commands = {name: [sys.executable, "-m", "tests.benchmarks.redlock_contend", name] for name in CONTENDERS}
    commands[ON_A_LOOP] = [str(PEERS_PYTHON), "-I", script, ON_A_LOOP]
    if not PEERS_PYTHON.exists():
        del commands[ON_A_LOOP]
    return commands


def _ports(url: str) -> str:
    return ",".join(host.rpartition(":")[2] for host in urlsplit(url).netloc.split(","))


class _Cycles:
    """A process that repeatedly acquires and releases a lock that no other process wants."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
        )
        self._answer()

    def __call__(self, count: int) -> list[float]:
        print(count, file=self._process.stdin, flush=True)
        took: list[float] = self._answer()
        return took

    def close(self) -> None:
        self._process.communicate(timeout=WITHIN)

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


def _uncontended() -> dict[str, Any]:
    return {
        f"{count} servers, {ms} ms": with_ratios(_alone(count, ms), (RAW, "redlock-py"))
        for ms in ROUND_TRIPS
        for count in SERVERS
    }


def _alone(count: int, ms: float) -> Mapping[str, Any]:
    with RedisServers(count) as servers, far(servers.url, ms) as url, ExitStack() as stack:
        turns = {
            name: stack.enter_context(closing(_Cycles([*command, _ports(url)])))
            for name, command in _contenders().items()
        }
        return interleave({}, rounds=ROUNDS, per_round=PER_ROUND, elsewhere=turns)


def _crowds() -> dict[str, Any]:
    """Return the figures of all crowds. The figures of a rush are the medians of its runs, and the longest wait of all
    runs."""
    found: dict[str, Any] = {}
    for servers, count, ms in CROWDS:
        rest = REST if count > 1 else 0.0
        found[f"{count} of them, {servers} servers, {ms} ms"] = {
            name: _crowd(servers, count, ms, command, CONTENDERS[name], HOLD, rest) for name, command in _libraries()
        }
    for servers, count, ms in RUSHES:
        found[f"{count} of them without a pause, {servers} servers, {ms} ms"] = {
            name: _of_runs(
                [
                    _crowd(servers, count, ms, command, CONTENDERS[name], 0.0, 0.0)
                    for _ in range(RUNS if name.startswith(OURS) else 1)
                ]
            )
            for name, command in _libraries()
        }
    return found


def _libraries() -> list[tuple[str, list[str]]]:
    return [(name, command) for name, command in _contenders().items() if name != RAW]


def _of_runs(runs: list[dict[str, float]]) -> dict[str, float]:
    worst = {"longest wait, ms", "never got it"}
    return {what: (max if what in worst else median)(run[what] for run in runs) for what in runs[0]}


def _crowd(
    many: int, count: int, ms: float, command: list[str], asks: tuple[str, ...], hold: float, rest: float
) -> dict[str, float]:
    processes = min(count, MOST_PROCESSES)
    with RedisServers(many) as servers, far(servers.url, ms) as url:
        ports = [member.port for member in servers.members]
        order = [*command, _ports(url), str(SECONDS), str(count // processes), str(hold), str(rest)]
        turns, asked = turns_of(order, lambda: asked_of(ports, asks), processes)
    done = [turn for turn in turns if turn[0] < math.inf]
    seconds = done[-1][1] - done[0][0] if done else math.inf
    gaps = [got - back for (_, back, _), (got, _, asked_at) in pairwise(done) if asked_at < back]
    return {
        "locks/s": round(len(done) / seconds, 1),
        "hand-over, ms": round(sample(gaps).median / 1000, 1) if gaps else 0.0,
        "longest wait, ms": round(1000 * max(min(got, back) - asked_at for got, back, asked_at in turns)),
        "never got it": len(turns) - len(done),
        "requests of one lock": round(asked / max(1, len(done)), 1),
    }


def _versions() -> Mapping[str, str]:
    with RedisServers(1) as servers, redis.Redis(port=servers.members[0].port) as bare:
        facts: Any = bare.info("server")
    peers = {name: version(name) for name in ("redlock-py", "pottery")}
    return {"redis-py": version("redis"), **peers, **versions_of([ON_A_LOOP]), "redis-server": facts["redis_version"]}


if __name__ == "__main__":
    publish("redlock", _versions, {"uncontended": _uncontended, "crowds": _crowds})
