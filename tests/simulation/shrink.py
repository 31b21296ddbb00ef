"""Shrink the plan of a failing run: remove faults and operations while the same oracle still reports a violation."""

from __future__ import annotations

import time
from dataclasses import replace

from tests.simulation.plan import Plan, Weather
from tests.simulation.world import Run, run

__all__ = ["shrink"]

OTHER_SCHEDULE = 1_000_000  # the seed of a second schedule with which a smaller plan is tried


def parts(plan: Plan) -> list[object]:
    return [*plan.faults, *plan.operations]


def without(plan: Plan, first: int, last: int) -> Plan:
    """Return a copy of the plan without the parts from ``first`` to ``last``.

    The time of a removed operation passes before the operation that follows it.
    """
    smaller = Plan.from_json(plan.to_json())
    gone = {id(each) for each in parts(smaller)[first:last]}
    smaller.faults = [each for each in smaller.faults if id(each) not in gone]
    for worker in (worker for process in smaller.processes for worker in process.workers):
        pause, operations = 0.0, worker[:]
        worker.clear()
        for each in operations:
            if id(each) in gone:
                pause += each.think + each.hold
            else:
                each.think, pause = each.think + pause, 0.0
                worker.append(each)
    return smaller


def until_the_end(plan: Plan, found: Run) -> Plan:
    """Return the plan without the operations and faults that had not begun when the oracle reported the violation."""
    smaller = replace(Plan.from_json(plan.to_json()), faults=[each for each in plan.faults if each in found.struck])
    for number, process in enumerate(smaller.processes):
        for worker, operations in enumerate(process.workers):
            del operations[found.begun[f"P{number}/w{worker}"] :]
    return smaller


def shrink(plan: Plan, seconds: float) -> tuple[Plan, str, str]:
    """Return a smaller plan, the name of the oracle that it violates, and the text of the violation.

    The tries take at most ``seconds`` of processor time.
    """
    until, found = time.process_time() + seconds, run(plan, halts=True)
    if not found.violations:
        raise SystemExit("this plan does not fail")
    oracle, text = found.violations[0]

    def keep(found: Run) -> bool:
        """Keep the plan of this run if it fails in the same way. Returns whether it does."""
        nonlocal plan, text
        fails = bool(found.violations) and found.violations[0][0] == oracle
        if fails:
            plan, text = found.plan, found.violations[0][1]
            # Each planned fault takes a number of the schedule, so the run of a shorter plan may be another one.
            if (shorter := until_the_end(plan, found)) != plan:
                keep(run(shorter, halts=True))
        return fails

    def attempt(smaller: Plan) -> bool:
        """Keep the plan ``smaller`` if its run fails in the same way, perhaps with another schedule."""
        if smaller == plan or time.process_time() > until:
            return False
        return any(keep(run(replace(smaller, seed=seed), halts=True)) for seed in (plan.seed, OTHER_SCHEDULE))

    keep(found)
    attempt(replace(plan, weather=Weather(base=plan.weather.base)))
    for name in ("p_cut", "p_stall", "p_slow"):
        attempt(replace(plan, weather=replace(plan.weather, **{name: 0.0})))
    attempt(replace(plan, p_switch=0.0))
    attempt(replace(plan, p_long=0.0))
    size = 0
    while size != len(parts(plan)):
        size = step = len(parts(plan))
        while step:
            at = 0
            while at < len(parts(plan)):
                at += 0 if attempt(without(plan, at, at + step)) else step
            step //= 2
    return plan, oracle, text
