"""A minute in which everything goes wrong, judged by what the contenders believed; and the same with known defects."""

from __future__ import annotations

import pytest

from tests.faults.chaos import ConsulArena, EtcdArena, RedisArena, SqliteArena, run
from tests.faults.defects import DEFECTS

pytestmark = pytest.mark.slow


@pytest.mark.timeout(150)
def test_a_minute_of_chaos_on_redis_breaks_no_promise() -> None:
    report = run(RedisArena, 60.0)
    report.show()
    assert report.violations == []
    assert report.acquisitions >= 500
    assert len(report.faults) >= 200
    assert report.outliving >= 50
    assert report.record.judged_callbacks > 0


@pytest.mark.timeout(100)
def test_twenty_seconds_of_chaos_on_sqlite_break_no_promise() -> None:
    report = run(SqliteArena, 20.0)
    report.show()
    assert report.violations == []
    assert report.outliving >= 10


@pytest.mark.timeout(150)
def test_a_minute_of_chaos_on_etcd_breaks_no_promise() -> None:
    report = run(EtcdArena, 60.0)
    report.show()
    assert report.violations == []
    assert report.acquisitions >= 150
    assert len(report.faults) >= 80
    assert report.outliving >= 5


@pytest.mark.timeout(150)
def test_a_minute_of_chaos_on_consul_breaks_no_promise() -> None:
    report = run(ConsulArena, 60.0)
    report.show()
    assert report.violations == []
    assert report.acquisitions >= 200
    assert len(report.faults) >= 100
    assert report.outliving >= 5


@pytest.mark.timeout(150)
@pytest.mark.parametrize("defect", DEFECTS)
def test_the_same_chaos_sees_a_defect_within_a_minute(defect: str) -> None:
    report = run(RedisArena, 60.0, defect=defect)
    report.show()
    assert any(violation.startswith(("O1", "O3")) for violation in report.violations)
