"""Write the newest results of each part into docs/performance.md: ``python -m tests.benchmarks.page``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["PAGE", "PARTS", "RESULTS", "tables", "write"]

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[2] / "docs" / "performance.md"


def write(results: Path = RESULTS, page: Path = PAGE) -> None:
    """Replace the text between the markers of each part that has results. The rest of the page stays."""
    text = page.read_text()
    for part in PARTS:
        if found := sorted(results.glob(f"{part}-*.json")):
            begin, end = f"<!-- {part}: written by make bench -->\n", f"<!-- end of {part} -->"
            head, marker, rest = text.partition(begin)
            _, closed, tail = rest.partition(end)
            if not marker or not closed:
                raise ValueError(f"{page.name} has no place for the results of {part}: {begin}{end}")
            text = head + begin + tables(part, json.loads(found[-1].read_text())) + end + tail
    page.write_text(text)


def tables(part: str, found: Mapping[str, Any]) -> str:
    """Return the tables of these results that ``make bench`` prints and the page shows."""
    unit = "Seconds" if part == "failover" else "Microseconds"
    return "\n".join([f"{_where(found)} {unit}, medians.\n", *PARTS[part](found)]) + "\n"


def _where(found: Mapping[str, Any]) -> str:
    where = dict(found["where"])
    cores, load = where.pop("cores"), where.pop("load before")
    versions = ", ".join(f"{name} {version}" for name, version in where.items())
    return (
        f"{found['when'][:10]}, {cores} cores (load {load:.1f} before, {found['load after']:.1f} after the run), "
        f"{versions}."
    )


def _redis(found: Mapping[str, Any]) -> list[str]:
    held = found["held locks"]
    return [
        *(_timed(f"acquire + release, {title}", samples) for title, samples in found["uncontended"].items()),
        _table(
            ["10,000 held locks, ttl 30 s", "threads at rest", "bytes each", "of one core"], map(_held, held.items())
        ),
        f"`import multilock`: {found['import']['ms']} ms ({found['import']['cpu ms']} ms of the processor), "
        "no module of others.\n",
    ]


def _handover(found: Mapping[str, Any]) -> list[str]:
    return [
        *(
            _timed(f"hand-over, 20 waiters in 4 processes, {way} more", samples, ("locks/s", "requests of one lock"))
            for way, samples in found["hand-over"].items()
        ),
        _table(["waiters", "commands for one hand-over"], found["commands of a hand-over"].items()),
    ]


def _redlock(found: Mapping[str, Any]) -> list[str]:
    crowds = [
        _table(
            [f"contenders: {title} more", *next(iter(rows.values()))], ([of, *row.values()] for of, row in rows.items())
        )
        for title, rows in found["crowds"].items()
    ]
    timed = (_timed(f"acquire + release, {title} more", samples) for title, samples in found["uncontended"].items())
    return [*timed, *crowds]


def _session(found: Mapping[str, Any]) -> list[str]:
    """Return the tables of a backend whose locks live on a session that is kept alive."""
    kept = found["held locks"]
    counted = list(next(iter(kept.values())))
    return [
        *(_timed(f"acquire + release, {title}", samples) for title, samples in found["uncontended"].items()),
        _table(
            ["requests, counted by the server", "acquire", "release"],
            ([name, f"{one['acquire']:g}", f"{one['release']:g}"] for name, one in found["requests"].items()),
        ),
        *(_crowd(found["crowd"]) if "crowd" in found else []),
        _table(["the callback begins after", "median", "p99"], map(_notice, found["notice"].items())),
        _table(["locks held by one client", *counted], map(_kept, kept.items())),
        *(
            _table([f"{title}, acquire + release", "median"], ([name, one["median"]] for name, one in samples.items()))
            for title, samples in found.get("with time", {}).items()
        ),
    ]


def _shared(found: Mapping[str, Any]) -> list[str]:
    readers, permits = found["readers"], found["permits"]
    kinds = list(next(iter(readers.values())))
    served = ["grants/s", "median wait, ms", "p99, ms", "grants of the last"]
    return [
        _table(
            ["acquire + release of", *kinds],
            ([backend, *("–" if one is None else one for one in row.values())] for backend, row in readers.items()),
        ),
        _table(["3 permits, 40 threads want one", *served], ([of, *row.values()] for of, row in permits.items())),
    ]


def _failover(found: Mapping[str, Any]) -> list[str]:
    ways = found["failovers"]
    measured = list(next(iter(ways.values())))
    return [
        _table(
            ["median (longest)", *measured],
            ([way, *map(_summed_up, row.values())] for way, row in ways.items()),
        )
    ]


def _summed_up(its: Any) -> str:
    return its if isinstance(its, str) else f"{its['median']} ({its['longest']})"


#: The parts that can be measured alone, and the function that shows each.
PARTS: Mapping[str, Callable[[Mapping[str, Any]], list[str]]] = {
    "redis": _redis,
    "handover": _handover,
    "redlock": _redlock,
    "etcd": _session,
    "consul": _session,
    "zookeeper": _session,
    "shared": _shared,
    "failover": _failover,
}


def _timed(title: str, samples: dict[str, Any], also: Sequence[str] = ()) -> str:
    references = list(next(iter(samples.values()))["ratios"])
    return _table(
        [title, "median", *(f"÷ {reference}" for reference in references), *also],
        (
            [name, one["median"], *one["ratios"].values(), *(one.get(each, "–") for each in also)]
            for name, one in samples.items()
        ),
    )


def _held(found: tuple[str, dict[str, Any]]) -> list[object]:
    backend, its = found
    return [backend, its["threads"], f"{its['bytes_each']:.0f}", f"{its['cpu_share']:.1%}"]


def _notice(found: tuple[str, dict[str, Any]]) -> list[object]:
    what, its = found
    return [what, its["median"], its["p99"]]


def _crowd(found: Mapping[str, Any]) -> list[str]:
    titles = ["hand-overs/s", "median", "p99", "requests of one lock"]
    rows = ([name, *(one[title] for title in titles)] for name, one in found.items())
    return [_table(["20 contenders in 4 processes", *titles], rows)]


def _kept(found: tuple[str, dict[str, Any]]) -> list[object]:
    count, its = found
    share = f"{its['of one core']:.1%}"
    return [f"{int(count):,}", *(f"{number:g}" for kind, number in its.items() if kind != "of one core"), share]


def _table(titles: list[str], rows: Iterable[Iterable[object]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join(f"| {' | '.join(map(str, cells))} |\n" for cells in lines)


if __name__ == "__main__":
    write()
