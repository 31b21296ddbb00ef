"""The plan of a run: its options, and the order of its cycles and loads. The order depends on the options and a seed.

A cycle is one trial of a cell. A load is a measurement without a fault.

A long run may be interrupted and continued later. Each part is a *piece*. The cycles and loads of earlier pieces are
read from the folder of the run and not planned again. A cell is one contestant (a lock to be judged) in one scenario (a
fault). A control is a contestant that is known to be weak.
"""

from __future__ import annotations

import itertools
import math
import random
import secrets
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import multilock
from multilock import ConfigurationError, now
from multilock.testing.compare.columns import Column
from multilock.testing.compare.cycle import Cell, Plan
from multilock.testing.compare.history import HISTORY, Event, read_cycles
from multilock.testing.compare.loads import LOADS, Load, rows_of
from multilock.testing.compare.report import pieces_of, read_report
from multilock.testing.compare.scenarios import PROOF, SCENARIOS, Scenario
from multilock.testing.compare.servers import ServerProcess
from multilock.testing.compare.verdicts import CycleVerdict, judge_cycle

__all__ = ["Before", "Options", "Planned", "Plans", "done_before"]

SHARE = 10  # how many cycles share one stop of their server
LONG = 5  # ttls; cycles whose ``bound`` (`Column`) is at least this long begin first
AGAIN = 2  # further cycles of a cell if none could be decided
# Contenders, processes, and seconds for which each contender holds the lock.
SIZES = [
    (contenders, min(contenders, processes), hold)
    for contenders, processes in ((1, 1), (4, 4), (20, 4), (100, 4), (1000, 8))
    for hold in (0.0, 0.001)
]
QUICK_SIZES = [(20, 4, 0.0)]
# The size of the load whose requests are counted: contenders, and seconds for which each holds the lock.
COUNTED = 20, 0.0
SECONDS, QUICK_SECONDS = 5.0, 1.0
PERIODS = 2  # ttls for which many locks are held and renewed
SAME = ("cycles", "control_cycles", "ttl", "planned")

Planned = tuple[Column, Plan]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of a run. Raises ConfigurationError for values that do not fit."""

    adapters: Sequence[str] = ()  #: more contestants, each ``package.module:Name=URL``
    scenarios: Sequence[str] | None = None  #: names of scenarios and loads; None means all
    cycles: int = 20  #: number of cycles for each contestant in each scenario
    control_cycles: int | None = None  #: number of cycles for each control in each scenario; None means ``cycles``
    ttl: float = 2.0  #: seconds
    seed: int | None = None  #: the seed of the order and of random choices; None means a random seed
    #: Seconds after which no cycle begins, except the first cycle of each contestant in each scenario.
    within: float | None = None
    controls: bool = True  #: whether controls run too
    #: Whether controls also run in scenarios in which they need not fail, and in all sizes of the load ``contention``.
    all_of_controls: bool = True
    #: How many cycles run at the same time. With None there are 3 for each core at first. The number grows while no
    #: process waits for a processor, up to 20 for each core and 40 in all.
    at_once: int | None = None
    locks: int = 1000  #: the number of locks that one client holds in the load ``scale``
    #: Servers that may be stopped, each ``URL=PID``. Up to 10 cycles share one stop. Servers are stopped only after all
    #: other cycles.
    server_pids: Sequence[str] = ()
    #: Servers that may be stopped, killed and restarted, each ``URL=NAME``. Cycles do not share a kill or a restart.
    server_containers: Sequence[str] = ()
    out: Path | None = None  #: the folder for the history and the report, which is made if it does not exist
    resume: bool = False  #: whether to continue, with the same options and seed, the run in ``out`` that ended early

    def __post_init__(self) -> None:
        known = [*SCENARIOS, *LOADS]
        if unknown := [name for name in self.names if name not in known]:
            raise ConfigurationError(f"unknown scenario {unknown[0]!r}: known are {', '.join(known)}")
        if min(self.cycles, self.of_controls) < 1 or not self.ttl > 0:
            raise ConfigurationError(
                f"cycles is {self.cycles}, {self.of_controls} for controls, and ttl is {self.ttl}: each must be more "
                "than 0"
            )
        if self.within is not None and not self.within > 0:
            raise ConfigurationError(f"the time for all cycles is {self.within} s: it must be more than 0")
        if self.resume and self.out is None:
            raise ConfigurationError("give the folder of the run that must be resumed")

    @property
    def names(self) -> Sequence[str]:
        """The chosen scenarios and loads."""
        return [*SCENARIOS, *LOADS] if self.scenarios is None else self.scenarios

    @property
    def of_controls(self) -> int:
        """The number of cycles of each control in each scenario."""
        return self.cycles if self.control_cycles is None else min(self.cycles, self.control_cycles)


class Plans:
    """The cycles and loads of a run that have not begun, in their order, and the cycles that run now.

    This class is not thread-safe: if several threads use it, the caller must hold a lock.
    """

    def __init__(self, columns: list[Column], options: Options, seed: int, ledger: str, most_at_once: int) -> None:
        self.cycles: deque[Planned] = deque()
        self.alone: dict[ServerProcess, deque[Planned]] = {}  #: for each server, the cycles that take it down
        self.loads: list[Load] = []
        self.planned = 0  #: how many cycles there are in all
        self.running: dict[int, Plan] = {}
        self._columns, self._options, self._seed, self._ledger = columns, options, seed, ledger
        # `_for_the_rest` is the part of the time for cycles that take no server down.
        self._within = self._for_the_rest = options.within
        self._again: dict[Cell, deque[Planned]] = defaultdict(deque)  # cycles that run only if they are needed
        self._begun = Counter[Cell]()
        self._settled: set[Cell] = set()  # cells that need no further cycle, because a cycle was decided or broke off
        self._id = secrets.token_hex(4)
        self._numbers = itertools.count(1)
        faults = [name for name in options.names if name in SCENARIOS]
        proofs = self._proofs(faults)
        self.scenarios = [*faults, *([PROOF] if proofs and PROOF not in faults else [])]  #: the scenarios of this run
        self._plan_cycles(faults, proofs)
        self._plan_loads()
        if self._within is not None and self.alone:
            alone = max(sum(_lasts(plan) / _shared_by(plan) for _, plan in plans) for plans in self.alone.values())
            rest = sum(_lasts(plan) for _, plan in self.cycles) / most_at_once
            self._for_the_rest = self._within * rest / (rest + alone)

    def _plan_cycles(self, scenarios: Sequence[str], proofs: Sequence[tuple[Column, Scenario, list[str]]]) -> None:
        """Plan the cycles in rounds: each round has one cycle of each cell, in random order, but long cycles first.

        Controls take part in only ``of_controls`` of the rounds, which are spread evenly and include the first. If no
        control of a URL must fail in these scenarios, one control of the URL gets one more cycle, in a scenario in
        which it must fail. Each cell also has a few cycles that run only if none of its cycles could be decided.
        """
        dice = random.Random(self._seed)
        cycles, of_controls = self._options.cycles, self._options.of_controls
        for turn in range(cycles + AGAIN):
            cells = [
                (column, SCENARIOS[name], faces)
                for column in self._columns
                for name in scenarios
                if not column.gone and (faces := column.faces(SCENARIOS[name]))
                if self._options.all_of_controls or not column.control or name in column.must_fail
                if turn >= cycles
                or not column.control
                or -turn * of_controls // cycles != -(turn + 1) * of_controls // cycles
            ]
            cells += proofs if turn == 0 or turn >= cycles else []
            dice.shuffle(cells)
            cells.sort(key=lambda cell: cell[0].bound < LONG * cell[0].ttl)
            for column, scenario, faces in cells:
                plan = self._plan(column, scenario, faces[turn % len(faces)])
                if turn >= cycles:
                    self._again[plan.cell].append((column, plan))
                elif scenario.alone and column.server is not None:
                    self.alone.setdefault(column.server, deque()).append((column, plan))
                else:
                    self.cycles.append((column, plan))
                self.planned += turn < cycles

    def _plan(self, column: Column, scenario: Scenario, adapter: str) -> Plan:
        number = next(self._numbers)
        return Plan(
            number, column.name, adapter, column.url, scenario, f"{self.names_of(column)}{number}", column.ttl,
            column.bound, f"{self._seed}.{number}", column.server, self._ledger,
        )  # fmt: skip

    def _proofs(self, scenarios: Sequence[str]) -> list[tuple[Column, Scenario, list[str]]]:
        """Return cycles of controls for the URLs whose controls need not fail in ``scenarios``. In these cycles they
        must fail, which shows that the run would have seen a failure."""
        shown = {column.url for column in self._columns if column.must_fail & {*scenarios}}
        return [
            (column, SCENARIOS[PROOF], column.faces(SCENARIOS[PROOF]))
            for column in self._columns
            if column.control and not column.gone and PROOF in column.must_fail and column.url not in shown
        ]

    def _plan_loads(self) -> None:
        """Plan the loads, size by size. Within a size the contestants follow one another in random order."""
        dice = random.Random(f"{self._seed} loads")
        quick, kinds = not self._options.all_of_controls, self._options.names
        seconds = QUICK_SECONDS if quick else SECONDS
        shapes = [("cost", 1, 1, 0.0)] if "cost" in kinds else []
        if "contention" in kinds:
            shapes += [("contention", *size) for size in (QUICK_SIZES if quick else SIZES)]
        if "scale" in kinds:
            shapes += [("scale", 1, 1, 0.0)]
        for kind, contenders, processes, hold in shapes:
            pairs = [(column, path) for column in self._columns if not column.gone for path in column.adapters]
            dice.shuffle(pairs)
            for column, path in pairs:
                if quick and column.control:
                    continue
                number = next(self._numbers)
                lasts = max(seconds, PERIODS * column.ttl) if kind == "scale" else seconds
                own = 1 if column.url.startswith("memory:") else processes
                self.loads.append(
                    Load(
                        number, kind, column.name, path, column.url, f"{self.names_of(column)}{number}", column.ttl,
                        lasts, contenders, own, hold, self._options.locks if kind == "scale" else 1, column.bound,
                        (contenders, hold) == COUNTED and path == column.adapters[0],
                    )
                )  # fmt: skip

    def names_of(self, column: Column) -> str:
        """Return the text with which all lock names of this column begin."""
        return f"compare-{self._id}-{self._columns.index(column)}-"

    def go_on(self, before: Before) -> None:
        """Remove the cycles and loads of earlier pieces. Raises ConfigurationError if the pieces are of another run."""
        every = (self.cycles, *self.alone.values(), *self._again.values())
        each = [plan for plans in every for _, plan in plans]
        cycles = [(plan.number, plan.contestant, plan.adapter, plan.scenario.name) for plan in each]
        loads = [(load.number, load.contestant, load.adapter, load.kind) for load in self.loads]
        options = self._options
        wanted = {"cycles": options.cycles, "control_cycles": options.of_controls, "ttl": options.ttl}
        before.check([*cycles, *loads], {**wanted, "planned": self.planned})
        self._begun.update(_cell_of(header) for header, _ in before.verdicts)
        self._settled |= {_cell_of(header) for header, verdict in before.verdicts if verdict.decided}
        self.loads = [load for load in self.loads if load.number not in before.headers]
        for plans in every:
            left = [(column, plan) for column, plan in plans if plan.number not in before.headers]
            plans.clear()
            plans.extend(left)

    def take(self, plans: deque[Planned], elapsed: float) -> Planned | None:
        """Remove and return the next of these plans for which there is time, ``elapsed`` seconds after the beginning of
        the run.

        The plan counts as running until `ended`. Returns None if no plan is left.
        """
        while plans:
            column, plan = plans.popleft()
            within = self._for_the_rest if plan.together is None else self._within
            left = math.inf if within is None else within - elapsed
            if not column.gone and (left >= _lasts(plan) or not self._has_enough(plan.cell)):
                self.running[plan.number] = plan
                self._begun[plan.cell] += 1
                return column, plan
            if plan.together is not None:
                plan.together.leave()
        return None

    def take_together(self, plans: deque[Planned]) -> list[Planned]:
        """Remove and return the next plan, and the plans that share its stop of the server."""
        scenario, most = plans[0][1].scenario, _shared_by(plans[0][1])
        some = [each for each in plans if each[1].scenario.name == scenario.name][:most]
        for each in some:
            plans.remove(each)
        return some

    def ended(self, plan: Plan) -> None:
        """Record that a cycle has ended."""
        del self.running[plan.number]

    def settle(self, cell: Cell) -> None:
        """Record that this cell needs no further cycle."""
        self._settled.add(cell)

    def once_more(self, plans: deque[Planned], done: Plan) -> list[Planned]:
        """Return a further plan if ``done`` was the last cycle of its cell, and no cycle of the cell was decided.

        Returns no plan if a cycle of the cell broke off, because the next cycle would break off too. Returns no plan
        either if the server would have to be stopped again, because other cycles may still use the server.
        """
        wanted = any(plan.cell == done.cell for _, plan in plans) or self._is_running(done.cell)
        if wanted or done.cell in self._settled or done.scenario.alone or not self._again[done.cell]:
            return []
        return [self._again[done.cell].popleft()]

    def _has_enough(self, cell: Cell) -> bool:
        """Return whether this cell needs no further cycle once the time of the run is over.

        A cell without a decided cycle still gets cycles, up to ``AGAIN + 1`` in all.
        """
        begun = self._begun[cell]
        return begun > AGAIN or (begun > 0 and (cell in self._settled or self._is_running(cell)))

    def _is_running(self, cell: Cell) -> bool:
        return any(plan.cell == cell for plan in self.running.values())


def _shared_by(plan: Plan) -> int:
    """Return how many cycles share one fault of their server."""
    return SHARE if plan.scenario.shared else 1


def _lasts(plan: Plan) -> float:
    """Return roughly how many seconds a cycle takes on an idle machine."""
    return plan.bound + 3 * plan.ttl + 2.0


def _cell_of(header: Event) -> Cell:
    return header["contestant"], header["scenario"]


# ---- earlier pieces


@dataclass(slots=True)
class Before:
    """The earlier pieces of a run. It is empty for the first piece."""

    data: dict[str, Any] = field(default_factory=dict)
    headers: dict[int, Event] = field(default_factory=dict)  #: the first event of each cycle and load, by its number
    verdicts: list[tuple[Event, CycleVerdict]] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def pieces(self) -> list[dict[str, Any]]:
        """The pieces so far."""
        return pieces_of(self.data) if self.data else []

    def left_behind(self, contestant: str) -> set[str]:
        """Return the keys that earlier pieces left at the server of this contestant."""
        columns = self.data.get("columns", [])
        return {name for column in columns if column["name"] == contestant for name in column["leftovers"]}

    def check(self, plans: Sequence[tuple[int, str, str, str]], wanted: dict[str, Any]) -> None:
        """Raise ConfigurationError unless the earlier pieces belong to the same run.

        Each of ``plans`` is the number, contestant, adapter and scenario of a cycle that is planned now.
        """
        for key in SAME if self.data else ():
            if self.data.get(key) != wanted[key]:
                raise _another(f"{key} was {self.data.get(key)} then, and is {wanted[key]} now")
        planned = {number: rest for number, *rest in plans}
        for number, header in self.headers.items():
            its = [header["contestant"], header["adapter"], header.get("scenario", header.get("kind"))]
            if planned.get(number) != its:
                raise _another(f"cycle {number} was {', '.join(its)} then, and is {planned.get(number)} now")


def done_before(folder: Path) -> Before:
    """Return the earlier pieces. Raises ConfigurationError if the folder has no run that can be continued."""
    before = Before(read_report(folder).data)
    if before.data["multilock"] != multilock.__version__:
        raise _another(f"multilock was {before.data['multilock']} then, and is {multilock.__version__} now")
    try:
        for events in read_cycles(folder / HISTORY):
            header, end = events[0], events[-1]
            if end["what"] != "end":
                raise ConfigurationError(f"{folder / HISTORY} ends within cycle {header['cycle']}")
            if end["at"] > now():
                raise _another("this machine was restarted since, so its clock is another one")
            before.headers[header["cycle"]] = header
            if header["what"] == "load":
                before.rows += rows_of([events])
            else:
                before.verdicts.append((header, judge_cycle(events)))
    except OSError as error:
        raise ConfigurationError(f"cannot read {folder / HISTORY}: {error.strerror}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigurationError(f"{folder / HISTORY} is not a history ({type(error).__name__}: {error})") from error
    return before


def _another(why: str) -> ConfigurationError:
    return ConfigurationError(f"the folder has another run, which cannot be continued ({why})")
