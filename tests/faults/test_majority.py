"""Servers and contenders of a majority are stopped, killed and cut off, until a seeded defect is seen."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.faults.chaos import Report, run
from tests.faults.defects import DEFECTS
from tests.faults.majority import Majority, RedlockArena

pytestmark = pytest.mark.slow


@pytest.mark.timeout(150)
def test_the_same_random_faults_find_that_two_of_five_count_as_a_majority(
    show: Callable[[Report], None],
) -> None:
    defect = "2 of 5 is enough"
    report = run(RedlockArena, 60.0, defect=defect, kind=Majority)
    show(report)
    assert any(violation.startswith(DEFECTS[defect].oracles) for violation in report.violations)
