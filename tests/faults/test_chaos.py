"""Run contenders for some seconds with all kinds of faults, and judge their records. With a known defect, the judgement
must find it.

`make chaos` runs each backend for ten minutes, and each defect for up to ten.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import pytest

from tests.faults.chaos import (
    ARENAS,
    Arena,
    ConsulArena,
    EtcdArena,
    LateEtcdArena,
    Report,
    ZooKeeperArena,
    run,
)
from tests.faults.defects import DEFECTS

pytestmark = pytest.mark.slow

Chaos = Callable[..., Report]
Missing = Callable[[Report], list[str]]


def nothing(report: Report) -> list[str]:
    return []


def missing(
    report: Report, *, outliving: int, noticed: int = 0, of_each_mode: Mapping[str, int] = MappingProxyType({})
) -> list[str]:
    """Return the events that happened too rarely for the run to be conclusive."""
    deque(report.record.late_callbacks(faults=report.faults), maxlen=0)  # counts the judged callbacks so far
    counts = {
        "faults that outlived a lease": (report.outliving, outliving),
        "losses noticed by a running process": (report.record.judged_callbacks, noticed),
        **{f"acquisitions of mode {mode}": (report.by_mode[mode], least) for mode, least in of_each_mode.items()},
    }
    return [f"{times} {what}, less than {least}" for what, (times, least) in counts.items() if times < least]


@pytest.fixture
def chaos(show: Callable[[Report], None]) -> Chaos:
    def run_and_show(
        arena: type[Arena], seconds: float, defect: str = "", missing: Missing = nothing, *, mixed: bool = False
    ) -> Report:
        habits = DEFECTS[defect].habits if defect else ()
        report = run(
            arena, seconds, habits=habits, defect=defect, mixed=mixed, enough=lambda report: not missing(report)
        )
        show(report)
        return report

    return run_and_show


@pytest.mark.timeout(140)
def test_holders_cut_off_before_a_renewal_break_no_promise(chaos: Chaos) -> None:
    too_seldom = partial(missing, outliving=1)
    report = chaos(LateEtcdArena, 10.0, missing=too_seldom)
    assert report.violations == []
    assert too_seldom(report) == []


# On Redis, Redlock, PostgreSQL and SQLite the simulation finds the violations that random faults would find here.
@pytest.mark.timeout(140)
@pytest.mark.parametrize("arena", [EtcdArena, ConsulArena, ZooKeeperArena], ids=lambda arena: arena.scheme)
def test_random_faults_among_readers_writers_permits_and_plain_locks_break_no_promise(
    chaos: Chaos, arena: type[Arena]
) -> None:
    too_seldom = partial(missing, outliving=3, noticed=1, of_each_mode={"x": 7, "r": 7, "p3": 7})
    report = chaos(arena, 7.0, missing=too_seldom, mixed=True)
    assert report.violations == []
    assert too_seldom(report) == []


# `make chaos` runs the other defects.
@pytest.mark.timeout(150)
@pytest.mark.parametrize(("defect", "mixed"), [("cached is_held", True), ("validity from the acquire", False)])
def test_the_same_random_faults_find_a_seeded_defect_within_a_minute(chaos: Chaos, defect: str, mixed: bool) -> None:
    report = chaos(ARENAS[DEFECTS[defect].arena], 60.0, defect=defect, mixed=mixed)
    assert any(violation.startswith(DEFECTS[defect].oracles) for violation in report.violations)
