"""docs/performance.md shows the newest results of each part, and writing them changes no other text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import page

FRAME = "".join(
    f"text {part}\n<!-- {part}: written by make bench -->\nold {part}\n<!-- end of {part} -->\n" for part in page.PARTS
)


def found(median: float) -> str:
    sample = {"median": median, "p99": 2.0, "count": 1}
    return json.dumps(
        {
            "when": "2026-01-02T03:04:05+00:00",
            "where": {"cores": 2, "load before": 0.0, "python": "3.11.7"},
            "uncontended": {"on two cores": {"multilock": {**sample, "ratios": {"raw": 1.0}}}},
            "requests": {"multilock": {"acquire": 1.0, "release": 1.0}},
            "notice": {"the key is deleted": sample},
            "held locks": {"1000": {"renewals": 5.0, "of one core": 0.01}},
            "load after": 0.5,
        }
    )


def test_writing_one_part_of_the_page_keeps_the_others(tmp_path: Path) -> None:
    (tmp_path / "etcd-2026-01-01.json").write_text(found(111.1))
    (tmp_path / "etcd-2026-01-02.json").write_text(found(222.2))
    text = tmp_path / "page.md"
    text.write_text(FRAME)
    page.write(tmp_path, text)
    head, _, tail = text.read_text().partition("old redis\n")
    assert "| multilock | 222.2 | 1.0 |" in tail
    assert "111.1" not in tail
    assert "old etcd" not in tail
    assert [line for line in tail.splitlines() if line.startswith(("text", "old"))] == [
        "text handover",
        "old handover",
        "text redlock",
        "old redlock",
        "text etcd",
        "text consul",
        "old consul",
        "text zookeeper",
        "old zookeeper",
        "text postgresql",
        "old postgresql",
        "text shared",
        "old shared",
        "text failover",
        "old failover",
    ]
    assert head + "old redis\n" == FRAME[: len(head) + len("old redis\n")]


def test_cells_where_another_is_ahead_are_listed_worst_first() -> None:
    crowd = {"locks/s": 10.0, "longest wait, ms": 5, "never got it": 0}
    results: dict[str, Any] = {
        "redlock": {
            "uncontended": {"near": {"raw": {"median": 1}, "multilock": {"median": 6}, "a": {"median": 4}}},
            "crowds": {
                "far": {
                    "multilock": crowd,
                    "b": crowd | {"locks/s": 40.0, "longest wait, ms": 6},
                    "unfair": crowd | {"locks/s": 99.0, "never got it": 3},
                }
            },
        },
        "shared": {"readers": {"memory": {"lock": 1.0}, "memory, asyncio": {"lock": 9.0}, "memory, c": {"lock": 3.0}}},
    }
    assert page.behind(results).splitlines()[2:] == [
        "| redlock: far, locks/s | multilock | 10.0 | b | 40.0 | 4.00 |",
        "| memory: lock, µs | multilock, asyncio | 9.0 | memory, c | 3.0 | 3.00 |",
        "| redlock: acquire + release, near, µs | multilock | 6 | a | 4 | 1.50 |",
    ]


def test_results_without_a_place_on_the_page_raise_an_error(tmp_path: Path) -> None:
    (tmp_path / "consul-2026-01-01.json").write_text(found(1.0))
    text = tmp_path / "page.md"
    text.write_text("nothing\n")
    with pytest.raises(ValueError, match="no place for the results of consul"):
        page.write(tmp_path, text)
    assert text.read_text() == "nothing\n"


def test_the_page_shows_the_results_that_are_kept() -> None:
    shown = page.PAGE.read_text()
    for part in page.PARTS:
        kept = sorted(page.RESULTS.glob(f"{part}-*.json"))
        place = shown.partition(f"<!-- {part}: written by make bench -->\n")[2].partition(f"<!-- end of {part} -->")[0]
        assert place == (page.tables(part, json.loads(kept[-1].read_text())) if kept else "")
