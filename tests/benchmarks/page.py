"""``python -m tests.benchmarks.page``: write the newest results of each part into docs/performance.md."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

__all__ = ["PAGE", "PARTS", "RESULTS", "behind", "tables", "write"]

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[2] / "docs" / "performance.md"
BEHIND = "<!-- behind: written by make bench -->\n"
END_OF_BEHIND = "<!-- end of behind -->"
OURS = "multilock"
# Contenders that send only plain requests, without the promises of a lock.
BASELINES = ("raw", "two raw", "grpc alone", "http.client", "kazoo's create")


def write(results: Path = RESULTS, page: Path = PAGE) -> None:
    """Replace the text between the markers of each part that has results. Other text of the page does not change."""
    text = page.read_text()
    files = {part: sorted(results.glob(f"{part}-*.json")) for part in PARTS}
    newest = {part: json.loads(found[-1].read_text()) for part, found in files.items() if found}
    for part, found in newest.items():
        begin, end = f"<!-- {part}: written by make bench -->\n", f"<!-- end of {part} -->"
        head, marker, rest = text.partition(begin)
        _, closed, tail = rest.partition(end)
        if not marker or not closed:
            raise ValueError(f"{page.name} has no place for the results of {part}: {begin}{end}")
        text = head + begin + tables(part, found) + end + tail
    head, _, rest = text.partition(BEHIND)
    if rest:
        _, _, tail = rest.partition(END_OF_BEHIND)
        text = head + BEHIND + behind(newest) + END_OF_BEHIND + tail
    page.write_text(text)


def behind(newest: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the table of all figures in which a contender is better than multilock, the worst first.

    Each row of multilock is compared with the best contender of its table. Contenders without the promises of a lock do
    not count.
    """
    rows = sorted((row for part, found in newest.items() for row in _behind(part, found)), key=itemgetter(-1))
    head = ["measured", "which", "ours", "the best other", "its own", "by a factor of"]
    return _table(head, ([*row[:-1], f"{1 / row[-1]:.2f}"] for row in rows))


def _behind(part: str, found: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Yield the figures of one part in which multilock is worse, each with multilock's speed as a share of the best
    other speed."""
    for title, rows in found.get("uncontended", {}).items():
        yield from _worse(f"{part}: acquire + release, {title}, µs", rows, "median")
    for title, rows in found["hand-over"].items() if part in ("handover", "postgresql") else ():
        yield from _worse(f"{part}: hand-over, {title}, µs", rows, "median")
    if "crowd" in found:
        yield from _worse(f"{part}: 20 contenders, hand-overs/s", found["crowd"], "hand-overs/s", more_is_better=True)
    for title, rows in found.get("crowds", {}).items():
        # If some waiters of a contender never got the lock, its other waiters had less competition, so it does not
        # count as faster.
        served = {name: row for name, row in rows.items() if not row["never got it"]}
        yield from _worse(f"{part}: {title}, locks/s", served, "locks/s", more_is_better=True)
        yield from _worse(f"{part}: {title}, longest wait, ms", served, "longest wait, ms")
    if "readers" in found:
        for backend in (name for name in found["readers"] if "," not in name):
            of_backend = {name: row for name, row in found["readers"].items() if name.partition(",")[0] == backend}
            for kind in next(iter(of_backend.values())):
                cells = {OURS if name == backend else name: {kind: row[kind]} for name, row in of_backend.items()}
                shown = {name.replace(f"{backend}, asyncio", f"{OURS}, asyncio"): cell for name, cell in cells.items()}
                yield from _worse(f"{backend}: {kind}, µs", shown, kind)


def _worse(
    what: str, rows: Mapping[str, Mapping[str, Any]], figure: str, *, more_is_better: bool = False
) -> Iterator[tuple[Any, ...]]:
    known = {name: row[figure] for name, row in rows.items() if row.get(figure) and not name.startswith(BASELINES)}
    others = {name: value for name, value in known.items() if not name.startswith(OURS)}
    if not others:
        return
    best = (max if more_is_better else min)(others, key=others.__getitem__)
    for name, value in known.items():
        share = value / others[best] if more_is_better else others[best] / value
        if name.startswith(OURS) and share < 1:
            yield what, name, value, best, others[best], share


def tables(part: str, found: Mapping[str, Any]) -> str:
    """Return the tables of these results, for the terminal and for the page."""
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
    """Return the tables of a backend whose locks live as long as a session."""
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


COSTS = {"held locks": "held locks, ttl 30 s", "waiters": "fair waiters of one asyncio client, ttl 30 s"}


def _postgresql(found: Mapping[str, Any]) -> list[str]:
    return [
        *(_timed(f"acquire + release, {title}", samples) for title, samples in found["uncontended"].items()),
        *(_timed(f"hand-over to another process, {way}", samples) for way, samples in found["hand-over"].items()),
        *(_crowd(found["crowd"]) if "crowd" in found else []),
        *(_costs(title, found[part]) for part, title in COSTS.items() if part in found),
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


#: The parts that can be measured separately, each with the function that returns its tables.
PARTS: Mapping[str, Callable[[Mapping[str, Any]], list[str]]] = {
    "redis": _redis,
    "handover": _handover,
    "redlock": _redlock,
    "etcd": _session,
    "consul": _session,
    "zookeeper": _session,
    "postgresql": _postgresql,
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


def _costs(title: str, found: Mapping[str, Mapping[str, float]]) -> str:
    """Return a table of the costs of locks or waiters, with a row for each number of them. The shares of a core are
    shown in percent."""
    kinds = next(iter(found.values()))
    rows = (
        [count, *(f"{cost:.1%}" if kind.endswith("of one core") else cost for kind, cost in costs.items())]
        for count, costs in found.items()
    )
    return _table([title, *kinds], rows)


def _kept(found: tuple[str, dict[str, Any]]) -> list[object]:
    count, its = found
    share = f"{its['of one core']:.1%}"
    return [f"{int(count):,}", *(f"{number:g}" for kind, number in its.items() if kind != "of one core"), share]


def _table(titles: list[str], rows: Iterable[Iterable[object]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join(f"| {' | '.join(map(str, cells))} |\n" for cells in lines)


if __name__ == "__main__":
    write()
