"""Keep the results of one part of the benchmarks as dated JSON under ``results``, and write them into
docs/performance.md."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from tests.benchmarks import page
from tests.benchmarks.measure import Sample

__all__ = ["publish", "with_ratios"]


def publish(
    part: str, versions: Callable[[], Mapping[str, str]], benchmarks: Mapping[str, Callable[[], object]]
) -> None:
    """Run the benchmarks one after the other and publish the results. Before each benchmark, allow the process all
    cores again."""
    started = time.monotonic()
    cores = os.sched_getaffinity(0)
    where = {
        "cores": len(cores),
        "load before": os.getloadavg()[0],
        "python": platform.python_version(),
        "multilock": version("multilock"),
        **versions(),
    }
    results: dict[str, Any] = {"when": datetime.now(UTC).isoformat(timespec="seconds"), "where": where}
    for name, benchmark in benchmarks.items():
        print(f"{part}: {name} …", flush=True)
        results[name] = benchmark()
        os.sched_setaffinity(0, cores)
    results["load after"] = os.getloadavg()[0]
    results["seconds"] = round(time.monotonic() - started)
    page.RESULTS.mkdir(exist_ok=True)
    path = page.RESULTS / f"{part}-{results['when'][:10]}.json"
    path.write_text(json.dumps(results, indent=2) + "\n")
    print(f"{page.tables(part, results)}written to {path} after {results['seconds']} s\n", flush=True)
    page.write()


def with_ratios(samples: Mapping[str, Sample], references: tuple[str, ...]) -> dict[str, Any]:
    """Return each sample with its median as a multiple of the medians of these references. A missing reference is
    skipped."""
    known = [reference for reference in references if reference in samples]
    return {
        name: {**asdict(one), "ratios": {each: round(one.median / samples[each].median, 2) for each in known}}
        for name, one in samples.items()
    }
