"""``make bench``: all benchmarks in one run, as tables, as dated JSON under ``results``, and in docs/performance.md.

Ratios count, not microseconds: every contender takes its turns in the same minute on the same machine.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import redis
from rich.console import Console
from rich.table import Table

from tests.benchmarks import handover, holding, importing, page, uncontended
from tests.benchmarks.measure import Sample
from tests.servers import RedisServer

WAITERS = (10, 100, 500, 2000)

console = Console(width=120)


def main() -> None:
    started = time.monotonic()
    cores = os.sched_getaffinity(0)
    results: dict[str, Any] = {"when": datetime.now(UTC).isoformat(timespec="seconds"), "where": _where()}
    for name, benchmark in BENCHMARKS.items():
        console.rule(name)
        results[name] = benchmark()
        os.sched_setaffinity(0, cores)
    results["load after"] = os.getloadavg()[0]
    results["seconds"] = round(time.monotonic() - started)
    page.RESULTS.mkdir(exist_ok=True)
    path = page.RESULTS / f"redis-{datetime.now(UTC):%Y-%m-%d}.json"
    path.write_text(json.dumps(results, indent=2) + "\n")
    page.write()
    console.print(f"written to {path.relative_to(Path.cwd())} after {results['seconds']} s")


def _where() -> dict[str, Any]:
    with RedisServer() as server, redis.Redis(port=server.port) as operator:
        redis_version = operator.info("server")["redis_version"]
    return {
        "cores": len(os.sched_getaffinity(0)),
        "load before": os.getloadavg()[0],
        "python": platform.python_version(),
        "multilock": version("multilock"),
        "redis-py": version("redis"),
        "python-redis-lock": version("python-redis-lock"),
        "redis-server": redis_version,
    }


def _uncontended() -> dict[str, Any]:
    return {
        f"{face}, {place}": _with_ratios(
            f"acquire + release, {face} face, {place}, µs", measure(apart=place != ON_ONE), references
        )
        for place in (ON_ONE, ON_TWO)
        for face, measure, references in (
            ("blocking", uncontended.blocking_face, (uncontended.RAW, "redis.lock.Lock")),
            ("asyncio", uncontended.asyncio_face, (uncontended.RAW, "redis.asyncio.lock.Lock")),
        )
    }


ON_ONE, ON_TWO = "client and server on one core", "client and server on two cores"


def _handover() -> dict[str, Any]:
    raw = "raw: push, wake-up, one request"
    samples = {raw: handover.raw_handover(), **handover.handovers()}
    return _with_ratios("hand-over, 20 waiters in 4 processes, µs", samples, (raw, "redis.lock.Lock"))


def _commands() -> dict[str, float]:
    counted = {str(waiters): round(handover.commands(waiters), 1) for waiters in WAITERS}
    table = Table("waiters", "commands", title="executed by the server for one hand-over")
    for waiters, number in counted.items():
        table.add_row(waiters, f"{number:g}")
    console.print(table)
    return counted


def _held() -> dict[str, Any]:
    found = holding.held_locks()
    table = Table("backend", "threads", "bytes each", "of a core", "still held", title="10,000 held locks, ttl 30 s")
    for backend, held in found.items():
        share = f"{held.cpu_share:.1%}"
        table.add_row(backend, str(held.threads), f"{held.bytes_each:.0f}", share, str(held.still_held))
    console.print(table)
    return {backend: asdict(held) for backend, held in found.items()}


def _import() -> dict[str, Any]:
    wall, cpu = importing.import_time()
    others = importing.third_party()
    console.print(f"import multilock: {wall} ms, {cpu} ms of the processor; modules of others: {others or 'none'}")
    return {"ms": wall, "cpu ms": cpu, "third party": others, "slowest": importing.slowest()}


BENCHMARKS: Mapping[str, Callable[[], object]] = {
    "uncontended": _uncontended,
    "hand-over": _handover,
    "commands of a hand-over": _commands,
    "held locks": _held,
    "import": _import,
}


def _with_ratios(title: str, samples: Mapping[str, Sample], references: tuple[str, ...]) -> dict[str, Any]:
    """A table, and what goes into the JSON: medians also in multiples of the references' medians."""
    table = Table("", "median", "p99", *(f"÷ {reference}" for reference in references), title=title)
    found = {}
    for name, one in samples.items():
        ratios = {reference: round(one.median / samples[reference].median, 2) for reference in references}
        table.add_row(name, f"{one.median:.1f}", f"{one.p99:.1f}", *(f"{ratio:g}" for ratio in ratios.values()))
        found[name] = {**asdict(one), "ratios": ratios}
    console.print(table)
    return found


if __name__ == "__main__":
    main()
