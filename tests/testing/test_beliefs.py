"""The verdict is KEPT only if the end of the first belief was observed. If the process was frozen at that time, the
verdict is UNDECIDED."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import pytest

from multilock import now
from multilock.testing import Helper
from multilock.testing.beliefs import Outcome, Record, judge, note, watch_pulse

KEPT, BROKEN, UNDECIDED = Outcome

A = ("1 got 1 n a 1 1", "1 held 2 a", "1 over 2.01 a 2.02")
B = "2 got {} n b 2 1"


def judged(
    lines: Sequence[str], *, frozen: Sequence[tuple[float, float]] = (), killed: float = math.inf
) -> tuple[Outcome, float]:
    record = Record()
    for line in lines:
        record.feed(int(line[0]), line[2:])
    one, other = record.beliefs["a"], record.beliefs["b"]
    found = judge(one, other, frozen=frozen, stalls=record.stalls[2], killed=killed)
    return found.outcome, round(found.overlap, 6)


@pytest.mark.parametrize(
    ("lines", "outcome", "overlap"),
    [
        ((*A, B.format(2.5)), KEPT, -0.48),
        ((*A, B.format(1.5)), BROKEN, 0.5),
        ((*A, B.format(1.5), "2 stall 1.2 1.6"), BROKEN, 0.5),
        ((*A, B.format(2.015)), UNDECIDED, math.nan),
        ((*A, B.format(2.5), "2 stall 2.1 2.6"), KEPT, -0.08),
        ((*A, B.format(2.5), "2 stall 1.9 2.6"), UNDECIDED, math.nan),  # B may have held the name since 1.9
        ((*A, B.format(2.5), "2 stall 1.9 2.4"), KEPT, -0.48),  # B ran again from 2.4 on, and got the name only at 2.5
        ((*A[:2], B.format(2.5)), UNDECIDED, math.nan),  # the end of the first belief was not recorded
        ((*A[:2], "1 release 2.3 a", B.format(2.5)), KEPT, -0.2),
        (("1 got 1 n a 1 0", B.format(2.5)), UNDECIDED, math.nan),
    ],
)
def test_two_beliefs_do_not_overlap_only_if_that_was_seen(
    lines: Sequence[str], outcome: Outcome, overlap: float
) -> None:
    assert str(judged(lines)) == str((outcome, overlap))  # as text, because nan is not equal to nan


def test_a_killed_process_believes_nothing_afterwards() -> None:
    assert judged((*A[:2], B.format(2.5)), killed=2.1) == (KEPT, -0.4)


def test_a_frozen_process_is_judged_by_its_first_reply_afterwards() -> None:
    knew = ("1 got 1 n a 1 1", "1 held 2 a", "1 over 5.01 a 5.02", B.format(4))
    believed_on = ("1 got 1 n a 1 1", "1 held 5.01 a", B.format(4))
    assert judged(knew)[0] is UNDECIDED
    assert judged(knew, frozen=[(2.0, 5.0)])[0] is KEPT
    assert judged(knew, frozen=[(2.0, 3.5)])[0] is UNDECIDED  # the first process ran again when the second belief began
    assert judged(believed_on, frozen=[(2.0, 5.0)]) == (BROKEN, 1.01)
    assert judged((*knew[:2], knew[-1]), frozen=[(2.0, 5.0)])[0] is UNDECIDED  # the process never continued


def test_a_lock_without_tokens_has_no_regressions() -> None:
    record = Record()
    for line in ("1 got 1 n a - 1", "2 got 2 n b - 1"):
        record.feed(int(line[0]), line[2:])
    assert list(record.token_regressions()) == []


def with_a_pulse() -> None:
    watch_pulse()
    note("ready")
    input()


def test_a_process_reports_that_it_was_stopped() -> None:
    with Helper("tests.testing.test_beliefs:with_a_pulse") as helper:
        helper.wait_for("ready", within=20)
        helper.pause()
        stopped = now()
        while now() < stopped + 0.1:
            time.sleep(0.01)
        went_on = now()
        helper.resume()
        while True:  # an overloaded machine causes further stalls
            _, since, until = helper.wait_for("stall", within=20)
            if float(since) <= stopped and float(until) >= went_on:
                break
