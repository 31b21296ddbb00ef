"""Run the cycles: several at a time, in an order drawn from a seed, within a time. Clean up, however the run ends."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import queue
import random
import re
import secrets
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import IO, Any

import multilock
from multilock import ConfigurationError, MultilockError, now
from multilock.testing.beliefs import LedgerServer
from multilock.testing.compare.columns import Column, columns_for, is_ours
from multilock.testing.compare.cycle import Cell, Plan, play
from multilock.testing.compare.folder import check_writable, open_history
from multilock.testing.compare.history import Event, write_cycle
from multilock.testing.compare.host import host
from multilock.testing.compare.interrupted import interrupted_once, undisturbed
from multilock.testing.compare.loads import LOADS, Load, play_load, rows_of
from multilock.testing.compare.mates import Mate, Stopped
from multilock.testing.compare.pieces import Before, done_before
from multilock.testing.compare.report import SCHEMA, Report, conclude
from multilock.testing.compare.scenarios import SCENARIOS, Scenario
from multilock.testing.compare.servers import ServerProcess, given
from multilock.testing.compare.together import Together
from multilock.testing.compare.verdicts import Verdict, cells_of, judge_cycle
from multilock.urls import redact

__all__ = ["INTERRUPTED", "Progress", "run"]

AT_ONCE = 3  # cycles for each core at the start: most of a cycle is waiting
MOST_AT_ONCE, MOST_OF_ALL = 20, 40  # the most for each core, and in all: each cycle has two processes
STOOD_STILL = 0.01  # if the processes of a cycle did not run for more than this share of it, fewer run at once
SHARE = 10  # how many cycles share one stop of their server
LONG = 5  # ttls
PROOF = "pause"  # a scenario in which all controls fail that must fail in any
AGAIN = 2  # further cycles of a cell if none could be decided
# Contenders, processes, and seconds for which each contender holds the lock.
SIZES = [
    (contenders, min(contenders, processes), hold)
    for contenders, processes in ((1, 1), (4, 4), (20, 4), (100, 4), (1000, 8))
    for hold in (0.0, 0.001)
]
QUICK_SIZES = [(20, 4, 0.0)]
COUNTED = 20, 0.0  # contenders and hold of the load whose requests are counted, for one face
SECONDS, QUICK_SECONDS = 5.0, 1.0
PERIODS = 2  # ttls for which many locks are held and renewed
TICK = 0.1
END_WITHIN = 30.0
ALIVE_WITHIN = 5.0
LOOK_AROUND = 5.0  # seconds within which a released lock must be gone from the server
INTERRUPTED = "interrupted"


@dataclass(slots=True)
class Progress:
    """The progress of a run, passed to ``progress`` a few times a second."""

    done: int = 0
    planned: int = 0
    running: list[str] = field(default_factory=list)
    elapsed: float = 0.0
    within: float | None = None
    measuring: str = ""  #: the present load; loads run after all cycles


def run(
    urls: Sequence[str],
    *,
    adapters: Sequence[str] = (),
    scenarios: Sequence[str] | None = None,
    cycles: int = 20,
    ttl: float = 2.0,
    seed: int | None = None,
    within: float | None = None,
    controls: bool = True,
    control_cycles: int | None = None,
    all_of_controls: bool = True,
    at_once: int | None = None,
    locks: int = 1000,
    server_pids: Sequence[str] = (),
    server_containers: Sequence[str] = (),
    out: Path | None = None,
    resume: bool = False,
    progress: Callable[[Progress], object] | None = None,
) -> Report:
    """Put every URL, and every ``package.module:Name=URL`` of ``adapters``, through the scenarios.

    ``server_pids`` and ``server_containers``, each ``URL=PID`` or ``URL=NAME``, are servers that may be stopped, for 10
    cycles at once. Containers may also be killed and restarted, for one cycle. These faults come after all others.

    Each scenario and contestant has ``cycles`` cycles, or as many as begin ``within`` seconds (at least one, however
    long it takes). ``out`` is a folder for the history and the report, and is made if it does not exist.

    ``controls`` run as well, each for ``control_cycles`` (default: as many as the others). With ``all_of_controls``
    they also run in scenarios in which they need not fail, and contention has all its sizes. If no control of a URL
    must fail in the chosen scenarios, one runs through ``pause`` once. If no cycle of a cell could be decided, it has
    up to two more.

    ``at_once`` cycles run at the same time. The default is 3 for each core at first. It grows while all processes
    run when they want to, up to 20 for each core and 40 in all. In the scenario ``scale`` one client holds ``locks``
    locks.

    ``resume`` continues a run in ``out`` that ended early, with its seed. The settings must be the same. It runs the
    rest, and the report covers all pieces.

    Ctrl-C and (on the main thread) SIGTERM end the run early, with a report that is marked partial. Call it from a
    thread that outlives the run: worker processes end with their thread.

    Raises ConfigurationError, before anything runs, for anything misspelled, and if ``out`` cannot be written.
    """
    chosen, loads = _scenarios(scenarios)
    of_controls = cycles if control_cycles is None else min(cycles, control_cycles)
    if min(cycles, of_controls) < 1 or not ttl > 0:
        raise ConfigurationError(
            f"cycles is {cycles}, {of_controls} for controls, and ttl is {ttl}: each must be more than 0"
        )
    cores = os.cpu_count() or 1
    usual = _AtOnce(AT_ONCE * cores, min(MOST_AT_ONCE * cores, max(MOST_OF_ALL, AT_ONCE * cores)))
    if within is not None and not within > 0:
        raise ConfigurationError(f"the time for all cycles is {within} s: it must be more than 0")
    if resume and out is None:
        raise ConfigurationError("give the folder of the run that must be resumed")
    before = done_before(out) if resume and out else Before()
    if seed is not None and seed != before.data.get("seed", seed):
        raise ConfigurationError(f"the run in this folder has seed {before.data['seed']}, not {seed}")
    seed = before.data.get("seed", secrets.randbelow(10**6) if seed is None else seed)
    check_writable(out)
    servers = given(server_pids, server_containers)
    with interrupted_once() as check, contextlib.ExitStack() as stack:
        columns = columns_for(urls, adapters, ttl, controls=controls, servers=servers)
        file = stack.enter_context(open_history(out, resume=resume))
        ledger = stack.enter_context(_ledger())
        limit = _AtOnce(at_once, at_once) if at_once else usual
        runner = _Runner(columns, seed, within, limit, file, progress, ledger)
        runner.plan(chosen, cycles, of_controls, all_of_controls=all_of_controls)
        runner.plan_loads(loads, locks, quick=not all_of_controls)
        runner.go_on(before, {"cycles": cycles, "control_cycles": of_controls, "ttl": ttl})
        runner.run(check)
        return undisturbed(partial(_conclude, runner, out, cycles, of_controls, ttl))


def _conclude(runner: _Runner, out: Path | None, cycles: int, of_controls: int, ttl: float) -> Report:
    """Return the report, and write it to its folder. Then raise an error of a thread, if there was one."""
    report = Report(runner.data(cycles, of_controls, ttl))
    if out is not None:
        with contextlib.suppress(OSError) if runner.error else contextlib.nullcontext():  # perhaps the same disk error
            report.write(out)
    if runner.error:
        raise runner.error
    return report


def _scenarios(names: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """Return the chosen faults and the chosen loads."""
    known = [*SCENARIOS, *LOADS]
    chosen = known if names is None else list(names)
    if unknown := [name for name in chosen if name not in known]:
        raise ConfigurationError(f"unknown scenario {unknown[0]!r}: known are {', '.join(known)}")
    return [name for name in chosen if name in SCENARIOS], [name for name in chosen if name in LOADS]


@contextlib.contextmanager
def _ledger() -> Iterator[str]:
    """Run the ledger that the locks of all cycles guard. On Linux its socket has an abstract name, so no file."""
    with contextlib.ExitStack() as stack:
        if sys.platform == "linux":
            path = f"\0multilock-compare-{os.getpid()}-{secrets.token_hex(4)}"
        else:
            path = stack.enter_context(tempfile.TemporaryDirectory()) + "/ledger"
        server = LedgerServer(Path(path))
        stack.callback(server.close)
        yield path


class _AtOnce:
    """How many cycles run at the same time.

    The number grows by one after a cycle whose processes all ran when they wanted to, and falls by one after another
    cycle. An overloaded machine would decide fewer cycles.
    """

    def __init__(self, least: int, most: int) -> None:
        self.now, self._least, self.most = least, least, most

    def learn(self, events: list[Event]) -> None:
        faults = [event for event in events if event["what"] == "fault"]
        stood_still = sum(
            each["until"] - each["at"]
            for each in events
            if each["what"] == "stall"
            if not any(fault["pid"] == each["pid"] and _meet(fault, each) for fault in faults)
        )
        busy = stood_still > STOOD_STILL * 2 * (events[-1]["at"] - events[0]["at"])
        self.now = max(self._least, self.now - 1) if busy else min(self.most, self.now + 1)


def _meet(one: Event, other: Event) -> bool:
    return bool(one["at"] <= other["until"] and other["at"] <= one["until"])


class _Runner:
    def __init__(
        self,
        columns: list[Column],
        seed: int,
        within: float | None,
        at_once: _AtOnce,
        file: IO[bytes],
        progress: Callable[[Progress], object] | None,
        ledger: str,
    ) -> None:
        self.columns, self.seed, self.within, self.at_once = columns, seed, within, at_once
        self.partial = ""
        self._file, self._tell, self._ledger = file, progress, ledger
        self._plans: deque[tuple[Column, Plan]] = deque()
        self._alone: dict[ServerProcess, deque[tuple[Column, Plan]]] = {}
        self._for_the_rest = within  # the part of it for cycles without a fault of a server, which run first
        self._planned = 0
        self._loads: list[Load] = []
        self._rows: list[dict[str, Any]] = []
        self._verdicts: list[tuple[Event, Verdict]] = []
        self._before = Before()
        self._begun = Counter[Cell]()
        self._settled: set[Cell] = set()  # cells with a cycle that was decided, or that broke off
        self._again: dict[Cell, deque[tuple[Column, Plan]]] = defaultdict(deque)  # further cycles, if they are needed
        self._numbered = 0
        self.scenarios: list[str] = []
        self._running: dict[int, Plan] = {}
        self._measuring = ""
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)  # notified when another cycle may begin
        self._stop = threading.Event()
        self._wanted: queue.SimpleQueue[Future[Mate]] = queue.SimpleQueue()
        self._idle: list[Mate] = []
        self._mates: list[Mate] = []
        self._id = secrets.token_hex(4)
        self._began = now()
        self._errors: list[BaseException] = []

    def plan(self, scenarios: Sequence[str], cycles: int, of_controls: int, *, all_of_controls: bool) -> None:
        """Plan rounds with one cycle of each cell. Within a round the order is random, but long cycles begin first.

        Controls are in ``of_controls`` rounds: the first one, and then as evenly as possible. If no control of a URL
        must fail in these scenarios, there is one more cycle, of one in which it must. Each cell also has a few cycles
        that run only if none of its cycles could be decided.
        """
        dice = random.Random(self.seed)
        proofs = self._proofs(scenarios)
        self.scenarios = [*scenarios, *([PROOF] if proofs and PROOF not in scenarios else [])]
        numbers = itertools.count(1)
        for turn in range(cycles + AGAIN):
            cells = [
                (column, SCENARIOS[name], faces)
                for column in self.columns
                for name in scenarios
                if not column.gone and (faces := column.faces(SCENARIOS[name]))
                if all_of_controls or not column.control or name in column.must_fail
                if turn >= cycles
                or not column.control
                or -turn * of_controls // cycles != -(turn + 1) * of_controls // cycles
            ]
            cells += proofs if turn == 0 or turn >= cycles else []
            dice.shuffle(cells)
            cells.sort(key=lambda cell: cell[0].bound < LONG * cell[0].ttl)
            for column, scenario, faces in cells:
                number = next(numbers)
                plan = Plan(
                    number, column.name, faces[turn % len(faces)], column.url, scenario,
                    f"{self._begin(column)}{number}", column.ttl, column.bound, f"{self.seed}.{number}", column.server,
                    self._ledger,
                )  # fmt: skip
                if turn >= cycles:
                    self._again[plan.cell].append((column, plan))
                elif scenario.alone and column.server is not None:
                    self._alone.setdefault(column.server, deque()).append((column, plan))
                else:
                    self._plans.append((column, plan))
                self._planned += turn < cycles
                self._numbered = number
        if self.within is not None and self._alone:
            alone = max(sum(_lasts(plan) / _shared_by(plan) for _, plan in plans) for plans in self._alone.values())
            rest = sum(_lasts(plan) for _, plan in self._plans) / self.at_once.most
            self._for_the_rest = self.within * rest / (rest + alone)

    def _proofs(self, scenarios: Sequence[str]) -> list[tuple[Column, Scenario, list[str]]]:
        """Return the control cycles that prove that a failure would have been seen, where no other cycle does."""
        shown = {column.url for column in self.columns if column.must_fail & {*scenarios}}
        return [
            (column, SCENARIOS[PROOF], column.faces(SCENARIOS[PROOF]))
            for column in self.columns
            if column.control and not column.gone and PROOF in column.must_fail and column.url not in shown
        ]

    def plan_loads(self, kinds: Sequence[str], locks: int, *, quick: bool) -> None:
        """Plan the loads: one contestant after another in an order drawn from the seed, for each size in turn."""
        dice = random.Random(f"{self.seed} loads")
        sizes = QUICK_SIZES if quick else SIZES
        seconds = QUICK_SECONDS if quick else SECONDS
        shapes = [("cost", 1, 1, 0.0)] if "cost" in kinds else []
        if "contention" in kinds:
            shapes += [("contention", *size) for size in sizes]
        if "scale" in kinds:
            shapes += [("scale", 1, 1, 0.0)]
        number = self._numbered
        for kind, contenders, processes, hold in shapes:
            pairs = [(column, path) for column in self.columns if not column.gone for path in column.adapters]
            dice.shuffle(pairs)
            for column, path in pairs:
                if quick and column.control:
                    continue
                number += 1
                lasts = max(seconds, PERIODS * column.ttl) if kind == "scale" else seconds
                own = 1 if column.url.startswith("memory:") else processes
                self._loads.append(
                    Load(
                        number, kind, column.name, path, column.url, f"{self._begin(column)}{number}", column.ttl,
                        lasts, contenders, own, hold, locks if kind == "scale" else 1, column.bound,
                        (contenders, hold) == COUNTED and path == column.adapters[0],
                    )
                )  # fmt: skip

    def go_on(self, before: Before, wanted: dict[str, Any]) -> None:
        """Remove what earlier pieces did from the plans. Raises ConfigurationError if they are of another run."""
        each = [plan for plans in (self._plans, *self._alone.values(), *self._again.values()) for _, plan in plans]
        cycles = [(plan.number, plan.contestant, plan.adapter, plan.scenario.name) for plan in each]
        loads = [(load.number, load.contestant, load.adapter, load.kind) for load in self._loads]
        before.check([*cycles, *loads], {**wanted, "planned": self._planned})
        self._before, self._verdicts, self._rows = before, [*before.verdicts], [*before.rows]
        self._begun = Counter(_cell_of(header) for header, _ in before.verdicts)
        self._settled = {_cell_of(header) for header, verdict in before.verdicts if verdict.decided}
        self._loads = [load for load in self._loads if load.number not in before.headers]
        for plans in (self._plans, *self._alone.values(), *self._again.values()):
            left = [(column, plan) for column, plan in plans if plan.number not in before.headers]
            plans.clear()
            plans.extend(left)

    @property
    def error(self) -> BaseException | None:
        """The error that ended the run. Errors inside a cycle do not end it."""
        return self._errors[0] if self._errors else None

    def run(self, check: Callable[[], None]) -> None:
        """Run all plans. This thread makes the workers, which end with it. ``check`` raises KeyboardInterrupt."""
        threads = [
            threading.Thread(target=self._serve, args=(self._plans, ()), name="compare", daemon=True)
            for _ in range(min(self.at_once.most, len(self._plans)))
        ]
        threads += [
            threading.Thread(target=self._serve_alone, args=(plans, threads.copy()), name="compare", daemon=True)
            for plans in self._alone.values()
        ]
        measuring = threading.Thread(target=self._measure, args=(threads.copy(),), name="compare", daemon=True)
        threads.append(measuring)
        try:
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads):
                check()
                self._make_mates()
                self._report_progress()
        except KeyboardInterrupt:
            self.partial = INTERRUPTED
        finally:
            self._undisturbed(partial(self._end, threads))
        self._undisturbed(self._look_for_leftovers)
        if self.error is not None:
            self.partial = f"{type(self.error).__name__}: {self.error}"

    def _undisturbed(self, act: Callable[[], None]) -> None:
        """Do ``act`` to its end. An interrupt now means not to wait for locks that end by themselves."""

        def again() -> None:
            try:
                act()
            except KeyboardInterrupt:
                self.partial = INTERRUPTED
                raise

        undisturbed(again)

    def _end(self, threads: list[threading.Thread]) -> None:
        self._stop.set()
        until = now() + END_WITHIN
        for thread in threads:
            if thread.ident is not None:
                thread.join(max(0.0, until - now()))
        for mate in self._mates:
            mate.helper.close()

    def _make_mates(self) -> None:
        with contextlib.suppress(queue.Empty):
            wanted = self._wanted.get(timeout=TICK)
            try:
                mate = Mate(self._stop)
            except OSError as error:
                wanted.set_exception(error)
            else:
                self._mates.append(mate)
                wanted.set_result(mate)

    def _report_progress(self) -> None:
        if self._tell is not None:
            with self._lock:
                running = sorted(f"{plan.contestant} {plan.scenario.name}" for plan in self._running.values())
                done = len(self._verdicts)
            planned, elapsed = max(self._planned, done + len(running)), now() - self._began
            self._tell(Progress(done, planned, running, elapsed, self.within, self._measuring))

    # ---- on the threads that play cycles

    def _serve(self, plans: deque[tuple[Column, Plan]], before: Sequence[threading.Thread]) -> None:
        """Play these plans, one after another."""
        try:
            for thread in before:
                thread.join()
            while (next_one := self._next(plans)) is not None:
                self._play(*next_one)
                plans.extend(self._once_more(plans, next_one[1]))
        except Stopped:
            pass
        except BaseException as error:
            self._errors.append(error)
            self._stop.set()

    def _serve_alone(self, plans: deque[tuple[Column, Plan]], before: Sequence[threading.Thread]) -> None:
        """Play the cycles that take a server down. They wait for all users of the server, and share one fault."""
        for thread in before:
            thread.join()
        while plans and not self._stop.is_set():
            name, most = plans[0][1].scenario.name, _shared_by(plans[0][1])
            some = [each for each in plans if each[1].scenario.name == name][:most]
            for each in some:
                plans.remove(each)
            together = Together(len(some), some[0][1].seed)
            crew = [
                threading.Thread(
                    target=self._serve, args=(deque([(column, replace(plan, together=together))]), ()),
                    name="compare", daemon=True,
                )
                for column, plan in some
            ]  # fmt: skip
            for thread in crew:
                thread.start()
            for thread in crew:
                thread.join()

    def _measure(self, before: list[threading.Thread]) -> None:
        """Run the loads, while nothing else runs."""
        try:
            for thread in before:
                thread.join()
            for number, load in enumerate(self._loads, 1):
                if self._stop.is_set():
                    return
                self._measuring = f"{load.contestant} {load.kind}, {number} of {len(self._loads)}"
                a_mate = partial(self._mate, fresh=load.kind == "scale")  # fresh, because its memory is measured
                events, mates = play_load(load, a_mate, self._stop)
                for mate in mates:
                    self._give_back(mate)
                self._write(events)
                self._rows += rows_of([events])
        except Stopped:
            pass
        except BaseException as error:
            self._errors.append(error)
            self._stop.set()

    def _next(self, plans: deque[tuple[Column, Plan]]) -> tuple[Column, Plan] | None:
        with self._room:
            while plans and not self._stop.is_set():
                together = plans[0][1].together
                if together is None and len(self._running) >= self.at_once.now:
                    self._room.wait(TICK)
                    continue
                column, plan = plans.popleft()
                within = self._for_the_rest if together is None else self.within
                left = math.inf if within is None else self._began + within - now()
                if column.gone or (left < _lasts(plan) and self._has_enough(plan.cell)):
                    if together is not None:
                        together.leave()
                    continue
                self._running[plan.number] = plan
                self._begun[plan.cell] += 1
                return column, plan
        return None

    def _has_enough(self, cell: Cell) -> bool:
        """Return whether this cell needs no further cycle when the time is over.

        Each cell gets one decided cycle, if one of its first few is decided.
        """
        begun = self._begun[cell]
        return begun > AGAIN or (begun > 0 and (cell in self._settled or self._is_running(cell)))

    def _is_running(self, cell: Cell) -> bool:
        return any(plan.cell == cell for plan in self._running.values())

    def _once_more(self, plans: deque[tuple[Column, Plan]], done: Plan) -> list[tuple[Column, Plan]]:
        """Return a further plan if ``done`` was the last cycle of its cell, and none was decided.

        Not if one broke off: it would again. A server is not stopped again either: other cycles that saw its fault may
        still use it.
        """
        with self._lock:
            wanted = any(plan.cell == done.cell for _, plan in plans) or self._is_running(done.cell)
            if wanted or done.cell in self._settled or done.scenario.alone or not self._again[done.cell]:
                return []
            return [self._again[done.cell].popleft()]

    def _play(self, column: Column, plan: Plan) -> None:
        a, b = self._mate(), self._mate()
        try:
            events = play(plan, a, b, self._stop)
        finally:
            self._give_back(a)
            self._give_back(b)
        with self._room:
            del self._running[plan.number]
            self.at_once.learn(events)
            self._room.notify_all()
        end = events[-1]
        if end.get("stopped"):
            return
        if not end["reached"] and not column.gone:
            column.gone = _away(column)
        with self._lock:
            self._write(events)
            verdict = judge_cycle(events)
            self._verdicts.append((events[0], verdict))
            if verdict.decided or not end["reached"]:
                self._settled.add(plan.cell)

    def _write(self, events: list[Event]) -> None:
        try:
            write_cycle(self._file, events)
        except OSError as error:
            raise OSError(error.errno, f"the history cannot be written on: {error.strerror}") from error

    def _mate(self, *, fresh: bool = False) -> Mate:
        with self._lock:
            if self._idle and not fresh:
                return self._idle.pop()
        wanted: Future[Mate] = Future()
        self._wanted.put(wanted)
        while True:
            try:
                return wanted.result(TICK)
            except TimeoutError:
                if self._stop.is_set():
                    raise Stopped("the run ends") from None

    def _give_back(self, mate: Mate) -> None:
        if mate.fit and not self._stop.is_set():
            with self._lock:
                self._idle.append(mate)
        else:
            mate.helper.kill()

    # ---- after the run

    def _begin(self, column: Column) -> str:
        """Return the beginning of all names of this column."""
        return f"compare-{self._id}-{self.columns.index(column)}-"

    def _look_for_leftovers(self) -> None:
        """Check O7: look for leftovers of multilock, and let each adapter that can do so sweep."""
        for column in self.columns:
            if column.gone or column.url.startswith("memory:"):
                continue
            try:
                if (left := column.sweep(self._begin(column))) is not None:
                    column.leftovers = left
                elif is_ours(column.url):
                    column.leftovers = self._wait_until_nothing_is_left(column)
            except Exception as error:  # the adapter may be anybody's
                column.gone = f"{type(error).__name__}: {error}"

    def _wait_until_nothing_is_left(self, column: Column) -> list[str]:
        with multilock.connect(column.url) as client:
            until = now() + (LOOK_AROUND if self.partial == INTERRUPTED else column.bound + LOOK_AROUND)
            while (left := self._left(client, column)) and now() < until:
                time.sleep(TICK)
        return left

    def _left(self, client: multilock.Client, column: Column) -> list[str]:
        return sorted({info.name for info in client.inspect_all(self._begin(column))})

    def data(self, cycles: int, of_controls: int, ttl: float) -> dict[str, Any]:
        """Return the content of report.json."""
        for column in self.columns:
            column.leftovers = sorted({*column.leftovers, *self._before.left_behind(column.name)})
        columns = [column.data for column in self.columns]
        cells = cells_of(self._verdicts)
        made_at, seconds = datetime.now(UTC).isoformat(timespec="seconds"), round(now() - self._began, 3)
        command = [_program(), *map(_redacted, sys.argv[1:])]
        did = len(self._verdicts) - len(self._before.verdicts)
        pieces = [
            *self._before.pieces, {"made_at": made_at, "seconds": seconds, "cycles": did, "command": command},
        ]  # fmt: skip
        return {
            "schema": SCHEMA,
            "multilock": multilock.__version__,
            "made_at": made_at,
            "partial": self.partial or None,
            "command": command,
            "pieces": pieces,
            "seed": self.seed,
            "cycles": cycles,
            "control_cycles": of_controls,
            "planned": self._planned,
            "ttl": ttl,
            "at_once": self.at_once.most,
            "seconds": round(sum(piece["seconds"] for piece in pieces), 3),
            "host": host(),
            "scenarios": [{"name": name, "says": SCENARIOS[name].says} for name in self.scenarios],
            "columns": columns,
            "cells": cells,
            "loads": self._rows,
            **conclude(columns, cells, self._rows),
        }  # fmt: skip


def _program() -> str:
    """Return the name of the program without its folder, which must not be published."""
    name = Path(sys.argv[0]).name
    return "multilock" if name == "__main__.py" else name


def _redacted(word: str) -> str:
    """Return a word of the command line without the secrets of a URL in it."""
    found = re.search(r"[a-zA-Z][a-zA-Z0-9+.-]*://", word)
    return word if found is None else word[: found.start()] + redact(word[found.start() :])


def _lasts(plan: Plan) -> float:
    """Return roughly how many seconds a cycle takes on an idle machine."""
    return plan.bound + 3 * plan.ttl + 2.0


def _cell_of(header: Event) -> Cell:
    return header["contestant"], header["scenario"]


def _shared_by(plan: Plan) -> int:
    """Return how many cycles share one fault of their server."""
    return SHARE if plan.scenario.shared else 1


def _away(column: Column) -> str:
    """Return why the server of this column does not answer. Empty if it does, or if we cannot ask it."""
    if not is_ours(column.url):
        return ""
    try:
        with multilock.connect(column.url, request_timeout=ALIVE_WITHIN) as client:
            client.ping()
    except MultilockError as error:
        return f"{type(error).__name__}: {error}"
    return ""
