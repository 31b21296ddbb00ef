"""A minute in which everything goes wrong, judged by what the contenders believed; and the same with known defects."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.faults.chaos import (
    ARENAS,
    Arena,
    ConsulArena,
    EtcdArena,
    LateEtcdArena,
    RedisArena,
    Report,
    SqliteArena,
    ZooKeeperArena,
    run,
)
from tests.faults.defects import DEFECTS
from tests.faults.habits import HABITS

pytestmark = pytest.mark.slow

Chaos = Callable[..., Report]


@pytest.fixture
def chaos(capsys: pytest.CaptureFixture[str]) -> Chaos:
    """`run`, whose table is seen also when the test passes."""

    def run_and_show(arena: type[Arena], seconds: float, defect: str = "") -> Report:
        habits = DEFECTS[defect].habits if defect else ()
        report = run(arena, seconds, habits=habits, defect=defect)
        with capsys.disabled():
            print()
            report.show()
        return report

    return run_and_show


@pytest.mark.timeout(150)
def test_a_minute_of_chaos_on_redis_breaks_no_promise(chaos: Chaos) -> None:
    report = chaos(RedisArena, 60.0)
    assert report.violations == []
    assert report.acquisitions >= 500
    assert len(report.faults) >= 200
    assert report.outliving >= 50
    assert report.record.judged_callbacks > 0
    assert all(report.acquired_with[habit] >= 20 for habit in HABITS)


@pytest.mark.timeout(100)
def test_twenty_seconds_of_chaos_on_sqlite_break_no_promise(chaos: Chaos) -> None:
    report = chaos(SqliteArena, 20.0)
    assert report.violations == []
    assert report.outliving >= 10
    assert all(report.acquired_with[habit] for habit in HABITS)


@pytest.mark.timeout(150)
@pytest.mark.parametrize("arena", [EtcdArena, ConsulArena, ZooKeeperArena], ids=lambda arena: arena.scheme)
def test_a_minute_of_chaos_on_a_backend_of_sessions_breaks_no_promise(chaos: Chaos, arena: type[Arena]) -> None:
    report = chaos(arena, 60.0)
    assert report.violations == []
    assert report.acquisitions >= 200
    assert len(report.faults) >= 100
    assert report.outliving >= 20
    assert report.record.judged_callbacks > 0
    assert all(report.acquired_with[habit] for habit in HABITS)


@pytest.mark.timeout(100)
def test_half_a_minute_of_holders_cut_off_before_a_renewal_breaks_no_promise(chaos: Chaos) -> None:
    report = chaos(LateEtcdArena, 30.0)
    assert report.violations == []
    assert report.outliving >= 1


@pytest.mark.timeout(150)
@pytest.mark.parametrize("defect", DEFECTS)
def test_the_same_chaos_sees_a_defect_within_a_minute(chaos: Chaos, defect: str) -> None:
    report = chaos(ARENAS[DEFECTS[defect].arena], 60.0, defect=defect)
    assert any(violation.startswith(DEFECTS[defect].oracles) for violation in report.violations)
