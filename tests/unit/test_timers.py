"""Timers: functions that run at a given time."""

from __future__ import annotations

import math

from multilock.kernel.timers import Timers


def test_due_tasks_are_called_in_order_and_once() -> None:
    pokes: list[float] = []
    called: list[str] = []
    timers = Timers(pokes.append)
    timers.at(3.0, lambda: called.append("c"))
    timers.at(1.0, lambda: called.append("a"))
    timers.at(1.0, lambda: called.append("b"))
    assert pokes == [3.0, 1.0, 1.0]
    assert timers.step(0.5) == 1.0
    assert called == []
    assert timers.step(1.0) == 3.0
    assert called == ["a", "b"]
    assert timers.step(5.0) == math.inf
    assert called == ["a", "b", "c"]
    assert timers.step(9.0) == math.inf


def test_a_task_may_plan_another_that_is_due_at_once() -> None:
    called: list[int] = []
    timers = Timers(lambda at: None)
    timers.at(1.0, lambda: timers.at(1.0, lambda: called.append(2)))
    timers.step(1.0)
    assert called == [2]


def test_a_task_may_plan_one_for_later() -> None:
    timers = Timers(lambda at: None)
    timers.at(1.0, lambda: timers.at(4.0, lambda: None))
    assert timers.step(1.0) == 4.0
