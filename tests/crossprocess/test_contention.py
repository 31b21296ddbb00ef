"""Processes with blocking and asyncio clients take turns: no update is lost, and tokens only grow."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crossprocess.conftest import Start

START = 20.0


@pytest.mark.oracle
def test_processes_that_share_a_counter_lose_no_count(start: Start, tmp_path: Path) -> None:
    counter = tmp_path / "counter"
    counter.touch()
    helpers = [start(function, counter, 30) for function in ("count", "count_on_loop") * 2]
    for helper in helpers:
        helper.wait_for("done", 2 * START)
    assert int(counter.read_text()) == 4 * 30
    tokens = [[int(line.split()[1]) for line in helper.lines if line.startswith("token")] for helper in helpers]
    assert all(its == sorted(its) for its in tokens)
    assert len({token for its in tokens for token in its}) == 4 * 30
