"""Run a crowd that wants permits for a few seconds, and test the oracles of crowds."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from multilock.testing.beliefs import FaultPeriod, Record
from tests.faults.chaos import RedisArena, Report, run
from tests.faults.crowd import PERMITS, Permits, in_use_again
from tests.faults.waits import PATIENCE, Waits


def waits(*lines: str) -> Waits:
    """Feed lines of the form ``PID line``, and return the waits."""
    those = Waits(Record())
    for line in lines:
        pid, _, rest = line.partition(" ")
        those.record.feed(int(pid), rest)
        those.feed(int(pid), rest)
    return those


def overtaken(those: Waits) -> list[tuple[str, str]]:
    return [(wait.who, other.who) for wait, other in those.overtaken()]


def beating(*heartbeats: str) -> list[str]:
    """Return lines of a writer that keeps its place by these heartbeats, and of a reader that entered before the
    writer."""
    queues = [f"1 queues 10 w1 {each}" for each in heartbeats]
    return ["1 asks 9 w x", *queues, "1 enters 15 w w1", "2 asks 12 r r", "2 enters 13 r r1"]


WRITER = ["1 asks 9 w x", "1 queues 10 w1", "1 enters 15 w w1"]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([*WRITER, "2 asks 12 r r", "2 enters 13 r r1"], [("w", "r")]),
        ([*WRITER, "2 asks 12 r r", "2 enters 16 r r1"], []),
        ([*WRITER, "2 asks 9.5 r r", "2 enters 13 r r1"], []),  # the reader may have reached the server first
        ([*WRITER, "1 stall 11 14", "2 asks 12 r r", "2 enters 13 r r1"], []),  # the writer may have lost its place
        ([*WRITER, "2 asks 12 r r", "2 leaves 13 r"], []),
        (["1 asks 10 a r", "1 queues 11 a1", "1 enters 15 a a1", "2 asks 12 b r", "2 enters 13 b b1"], []),  # together
        (["1 asks 10 a r", "1 queues 11 a1", "1 enters 15 a a1", "2 asks 12 w x", "2 enters 13 w w1"], [("a", "w")]),
        # Contender a never waited in the queue.
        (["1 asks 10 a r", "1 enters 15 a a1", "2 asks 12 w x", "2 enters 13 w w1"], []),
        (beating("9.9 10.9", "10.9 15.1"), [("w", "r")]),
        (beating("9.9 10.9", "10.9 15.1", "10.9 15.1"), [("w", "r")]),
        (beating("9.9 10.9", "11 15.1"), []),  # between the two periods, the writer had lost its place
        (beating("9.9 10.9", "10.9 14.9"), []),
    ],
)
def test_the_oracle_reports_a_waiter_that_entered_before_an_earlier_one(
    lines: list[str], expected: list[tuple[str, str]]
) -> None:
    assert overtaken(waits(*lines)) == expected


@pytest.mark.parametrize(
    ("lines", "number"),
    [
        (["1 asks 10 w x", f"1 enters {11 + PATIENCE} w w1"], 1),
        (["1 asks 10 w x", f"1 leaves {11 + PATIENCE} w"], 1),
        (["1 asks 10 w x", f"1 enters {11 + PATIENCE} w w1", "1 stall 10 20"], 0),
        (["1 asks 10 w x", "1 enters 11 w w1", "1 asks 12 w x", "1 end - 0"], 1),  # the process ended during the wait
        (["1 asks 10 w x", "1 enters 11 w w1", "1 asks 12 w x"], 0),  # killed
    ],
)
def test_the_oracle_reports_a_waiter_that_waits_too_long(lines: list[str], number: int) -> None:
    assert len(list(waits(*lines).starved())) == number


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["2 got 7 n d 4 1 p3"], [(1, 2.0)]),
        (["2 got 7 n d 4 1 p3", "2 stall 6 7"], [(1, 1.0)]),
        # this permit was acquired and released before the kill
        (["2 got 4 n d 4 1 p3", "2 held 4.5 d"], [(1, math.inf)]),
        # The first new holder uses the permit that b released, the second one uses that of the killed process.
        (["2 release 5.5 b", "2 got 7 n d 4 1 p3", "2 got 8 n e 5 1 p3"], [(1, 3.0)]),
        ([], [(1, math.inf)]),
    ],
)
def test_the_oracle_expects_the_permit_of_a_dead_holder_to_be_used_again(
    lines: list[str], expected: list[tuple[int, float]]
) -> None:
    holders = ["1 got 1 n a 1 1 p3", "1 held 4 a", "2 got 1 n b 2 1 p3", "2 got 1 n c 3 1 p3"]
    still = ["2 held 9 b", "2 held 9 c", *(["2 held 9 d"] if any("got 7 n d" in line for line in lines) else [])]
    one = waits(*holders, *lines, *still, *(["2 held 9 e"] if len(lines) == 3 else [])).record
    assert list(in_use_again(one, [FaultPeriod("process killed", 1, 5.0, 5.0)], PERMITS)) == expected


@pytest.mark.slow
def test_a_crowd_never_exceeds_three_permits_and_reuses_those_of_killed_holders(
    show: Callable[[Report], None],
) -> None:
    def enough(report: Report) -> bool:
        return report.by_mode["p3"] >= 12 and report.outliving > 0

    report = run(RedisArena, 6.0, kind=Permits, enough=enough)
    show(report)
    assert report.violations == []
    assert enough(report)
