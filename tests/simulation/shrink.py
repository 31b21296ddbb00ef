"""Shrink the plan of a failing run: remove faults and operations while the same oracle still reports a violation."""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.simulation.plan import Operation, Plan, Weather
from tests.simulation.world import Run, run

__all__ = ["shrink"]

SCHEDULES = 1  # number of other schedules with which each smaller plan is tried


def without_the_rest(plan: Plan, found: Run) -> Plan:
    """Return the plan without the operations and faults that had not begun when the oracle reported the violation."""
    smaller = Plan.from_json(plan.to_json())
    smaller.faults = [each for each in plan.faults if each in found.struck]
    for number, process in enumerate(smaller.processes):
        for worker, operations in enumerate(process.workers):
            del operations[found.begun[f"P{number}/w{worker}"] :]
    return smaller


class Shrinker:
    """The smallest plan so far that still fails, and the changes that are tried on it."""

    def __init__(self, plan: Plan, seconds: float) -> None:
        self.until = time.process_time() + seconds
        found = run(plan, halts=True)
        if not found.violations:
            raise SystemExit("this plan does not fail")
        self.plan = without_the_rest(plan, found)
        self.oracle, self.text = found.violations[0]

    def attempt(self, change: Callable[[Plan], None]) -> bool:
        """Apply ``change`` to a copy of the plan. Keep it if the run still fails by the same oracle, perhaps with
        another schedule."""
        plan = Plan.from_json(self.plan.to_json())
        change(plan)
        if plan == self.plan or time.process_time() > self.until:
            return False
        for seed in (plan.seed, *range(1_000_000, 1_000_000 + SCHEDULES)):
            plan.seed = seed
            found = run(plan, halts=True)
            if found.violations and found.violations[0][0] == self.oracle:
                self.plan, self.text = without_the_rest(plan, found), found.violations[0][1]
                return True
        return False

    def fewer(self, items: Callable[[Plan], list[object]], gone: Callable[[Plan, list[object]], None]) -> bool:
        """Try to remove parts of a list: all, then halves, quarters and so on. Returns whether any part could be
        removed."""
        changed, step = False, max(1, len(items(self.plan)))
        while step:
            at = 0
            while at < len(items(self.plan)):

                def cut(plan: Plan, at: int = at, step: int = step) -> None:
                    removed = items(plan)[at : at + step]
                    del items(plan)[at : at + step]
                    gone(plan, removed)

                if self.attempt(cut):
                    changed = True
                else:
                    at += step
            step //= 2
        return changed


def shrink(plan: Plan, seconds: float) -> tuple[Plan, str, str]:
    """Return a smaller plan, the name of the oracle that it violates, and the text of the violation.

    The tries take at most ``seconds`` of processor time.
    """
    it = Shrinker(plan, seconds)
    it.attempt(lambda plan: setattr(plan, "weather", Weather(base=plan.weather.base)))
    for name in ("p_cut", "p_stall", "p_slow"):
        it.attempt(lambda plan, name=name: setattr(plan.weather, name, 0.0))  # type: ignore[misc]
    for name in ("p_switch", "p_long"):
        it.attempt(lambda plan, name=name: setattr(plan, name, 0.0))  # type: ignore[misc]
    again = True
    while again and time.process_time() < it.until:
        again = it.fewer(lambda plan: plan.faults, lambda plan, removed: None)  # type: ignore[arg-type,return-value]
        for process in range(len(plan.processes)):
            for worker in range(len(plan.processes[process].workers)):

                def operations(plan: Plan, process: int = process, worker: int = worker) -> list[object]:
                    return plan.processes[process].workers[worker]  # type: ignore[return-value]

                def wait(plan: Plan, removed: list[object], process: int = process, worker: int = worker) -> None:
                    """Let the following operation begin as late as it would after the removed ones."""
                    rest = plan.processes[process].workers[worker]
                    if rest:
                        rest[0].think += sum(each.think + each.hold for each in removed if isinstance(each, Operation))

                again = it.fewer(operations, wait) or again
    return it.plan, it.oracle, it.text
