"""A few seconds in which servers and contenders of a majority are stopped, killed and cut off; and a run with a
defect."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.faults.chaos import Report, run
from tests.faults.defects import DEFECTS
from tests.faults.majority import Majority, RedlockArena

pytestmark = pytest.mark.slow


Show = Callable[[Report], None]


def chaos(show: Show, seconds: float, defect: str = "") -> Report:
    report = run(RedlockArena, seconds, defect=defect, kind=Majority, enough=much)
    show(report)
    return report


def much(report: Report) -> bool:
    return report.acquisitions >= 20 and len(report.faults) >= 15 and report.outliving > 0


def test_some_seconds_of_random_faults_among_five_servers_break_no_promise(show: Show) -> None:
    report = chaos(show, 7.0)
    assert report.violations == []
    assert much(report)


@pytest.mark.timeout(150)
def test_the_same_random_faults_find_that_two_of_five_count_as_a_majority(show: Show) -> None:
    defect = "2 of 5 is enough"
    report = chaos(show, 60.0, defect)
    assert any(violation.startswith(DEFECTS[defect].oracles) for violation in report.violations)
