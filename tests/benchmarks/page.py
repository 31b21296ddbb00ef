"""Writes the newest results into docs/performance.md: ``python -m tests.benchmarks.page``."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = ["PAGE", "RESULTS", "write"]

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[2] / "docs" / "performance.md"
BEGIN, END = "<!-- results: written by make bench -->\n", "<!-- end of results -->"


def write() -> None:
    newest = json.loads(max(RESULTS.glob("redis-*.json")).read_text())
    head, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(head + BEGIN + _results(newest) + END + rest.partition(END)[2])


def _results(found: dict[str, Any]) -> str:
    where = found["where"]
    held = found["held locks"]
    parts = [
        f"{found['when'][:10]}, {where['cores']} cores (load {where['load before']:.1f} before, "
        f"{found['load after']:.1f} after the run), Python {where['python']}, redis-py {where['redis-py']}, "
        f"Redis {where['redis-server']}. Microseconds, medians.\n",
        *(_timed(f"acquire + release, {title}", samples) for title, samples in found["uncontended"].items()),
        _timed("hand-over, 20 waiters in 4 processes", found["hand-over"]),
        _table(["waiters", "commands for one hand-over"], found["commands of a hand-over"].items()),
        _table(
            ["10,000 held locks, ttl 30 s", "threads at rest", "bytes each", "of one core"], map(_held, held.items())
        ),
        f"`import multilock`: {found['import']['ms']} ms ({found['import']['cpu ms']} ms of the processor), "
        "no module of others.\n",
    ]
    return "\n".join(parts) + "\n"


def _timed(title: str, samples: dict[str, Any]) -> str:
    references = list(next(iter(samples.values()))["ratios"])
    return _table(
        [title, "median", *(f"÷ {reference}" for reference in references)],
        ([name, one["median"], *one["ratios"].values()] for name, one in samples.items()),
    )


def _held(found: tuple[str, dict[str, Any]]) -> list[object]:
    backend, its = found
    return [backend, its["threads"], f"{its['bytes_each']:.0f}", f"{its['cpu_share']:.1%}"]


def _table(titles: list[str], rows: Iterable[Iterable[object]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join(f"| {' | '.join(map(str, cells))} |\n" for cells in lines)


if __name__ == "__main__":
    write()
