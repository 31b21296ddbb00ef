"""Run a comparison: play the cycles, several at once and within a time limit, then the loads, and make the report.

A run cleans up its locks and processes, even after an error. A cell is one contestant (a lock to be judged) in one
scenario (a fault).
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

import multilock
from multilock import ConfigurationError, now
from multilock.testing.beliefs import LedgerServer
from multilock.testing.compare.columns import Column, columns_for
from multilock.testing.compare.cycle import Plan, play
from multilock.testing.compare.history import Event, check_writable, open_history, write_cycle
from multilock.testing.compare.loads import Load, play_load, rows_of
from multilock.testing.compare.plan import Before, Options, Planned, Plans, done_before
from multilock.testing.compare.pool import Limit, RunEnded, WorkerPool
from multilock.testing.compare.report import SCHEMA, Report, conclude
from multilock.testing.compare.scenarios import SCENARIOS
from multilock.testing.compare.servers import Together, given
from multilock.testing.compare.summary import host
from multilock.testing.compare.verdicts import CycleVerdict, cells_of, judge_cycle
from multilock.urls import redact

__all__ = ["INTERRUPTED", "Progress", "interrupted_once", "run"]

AT_ONCE = 3  # cycles for each core at the start; a cycle waits most of the time
# the greatest numbers of cycles, for each core and in all; each cycle has two processes
MOST_AT_ONCE, MOST_OF_ALL = 20, 40
TICK = 0.1  # seconds between two checks whether the run ends
END_WITHIN = 30.0
INTERRUPTED = "interrupted"

T = TypeVar("T")


@dataclass(slots=True)
class Progress:
    """The progress of a run, passed to ``progress`` a few times a second."""

    done: int = 0
    planned: int = 0
    running: list[str] = field(default_factory=list)
    elapsed: float = 0.0
    within: float | None = None
    measuring: str = ""  #: the load that is measured now; loads are measured after all cycles


def run(
    urls: Sequence[str],
    options: Options | None = None,
    *,
    progress: Callable[[Progress], object] | None = None,
    **fields: Any,
) -> Report:
    """Run the scenarios with every URL, and with every adapter of the options.

    ``options`` may also be given by the names of their fields: ``run(urls, scenarios=["pause"], cycles=20)``.
    ``progress`` is called a few times a second. Returns the report, which is also written to the folder ``out``.

    Controls run as well. If no control of a URL must fail in the chosen scenarios, one control runs in ``pause`` once.
    A cell without a decided cycle gets up to two more cycles.

    Ctrl-C and (on the main thread) SIGTERM end the run early, with a report that is marked partial. The calling thread
    must outlive the run, because worker processes end with the thread that started them.

    Raises ConfigurationError, before anything runs, for anything misspelled, and if ``out`` cannot be written.
    """
    options = replace(options or Options(), **fields)
    before = done_before(options.out) if options.resume and options.out else Before()
    seed = before.data.get("seed", secrets.randbelow(10**6) if options.seed is None else options.seed)
    if options.seed not in (None, seed):
        raise ConfigurationError(f"the run in this folder has seed {seed}, not {options.seed}")
    check_writable(options.out)
    servers = given(options.server_pids, options.server_containers)
    with interrupted_once() as check, contextlib.ExitStack() as stack:
        columns = columns_for(urls, options.adapters, options.ttl, controls=options.controls, servers=servers)
        file = stack.enter_context(open_history(options.out, resume=options.resume))
        ledger = stack.enter_context(_ledger())
        limit = _limit(options.at_once, columns)
        plans = Plans(columns, options, seed, ledger, limit.most)
        plans.go_on(before)
        runner = _Runner(plans, limit, _Results(file, before), progress, options.within)
        runner.run(check)
        runner.undisturbed(partial(_find_leftovers, runner, columns, before))
        return _undisturbed(partial(_conclude, runner, columns, options, seed))


def _conclude(runner: _Runner, columns: list[Column], options: Options, seed: int) -> Report:
    """Return the report, and write it to its folder. Then, if a thread had an error, raise it."""
    report = Report(_content(runner, columns, options, seed))
    if options.out is not None:
        # If a disk error ended the run, this write may fail as well. The error of the run is raised below.
        with contextlib.suppress(OSError) if runner.error else contextlib.nullcontext():
            report.write(options.out)
    if runner.error:
        raise runner.error
    return report


def _limit(at_once: int | None, columns: list[Column]) -> Limit:
    cores = os.cpu_count() or 1
    least = at_once or AT_ONCE * cores
    most = at_once or min(MOST_AT_ONCE * cores, max(MOST_OF_ALL, AT_ONCE * cores))
    most = min([most, *(column.at_once for column in columns if column.at_once)])
    return Limit(min(least, most), most)


@contextlib.contextmanager
def _ledger() -> Iterator[str]:
    """Run the ledger that the locks of all cycles guard. On Linux its socket has an abstract name, so there is no
    file."""
    with contextlib.ExitStack() as stack:
        if sys.platform == "linux":
            path = f"\0multilock-compare-{os.getpid()}-{secrets.token_hex(4)}"
        else:
            path = stack.enter_context(tempfile.TemporaryDirectory()) + "/ledger"
        server = LedgerServer(Path(path))
        stack.callback(server.close)
        yield path


class _Results:
    """The results of this piece of a run and of earlier ones, and the history file. This class is not thread-safe."""

    def __init__(self, file: IO[bytes], before: Before) -> None:
        self.verdicts: list[tuple[Event, CycleVerdict]] = [*before.verdicts]
        self.rows: list[dict[str, Any]] = [*before.rows]
        self.before = before
        self._file = file

    def add_cycle(self, events: list[Event]) -> CycleVerdict:
        self._write(events)
        verdict = judge_cycle(events)
        self.verdicts.append((events[0], verdict))
        return verdict

    def add_load(self, events: list[Event]) -> None:
        self._write(events)
        self.rows += rows_of([events])

    def _write(self, events: list[Event]) -> None:
        try:
            write_cycle(self._file, events)
        except OSError as error:
            raise OSError(error.errno, f"the history cannot be continued: {error.strerror}") from error


class _Runner:
    """A run: the threads that play its cycles and loads."""

    def __init__(
        self,
        plans: Plans,
        limit: Limit,
        results: _Results,
        progress: Callable[[Progress], object] | None,
        within: float | None,
    ) -> None:
        self.plans, self.limit, self.results = plans, limit, results
        self.partial = ""
        self.began = now()
        self._progress, self._within = progress, within
        self._measuring = ""
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)  # notified when another cycle may begin
        self._stop = threading.Event()
        self._workers = WorkerPool(self._stop)
        self._errors: list[BaseException] = []

    @property
    def error(self) -> BaseException | None:
        """The error that ended the run. Errors inside a cycle do not end the run."""
        return self._errors[0] if self._errors else None

    def run(self, check: Callable[[], None]) -> None:
        """Run all plans. The calling thread starts the worker processes, which end when this thread ends. ``check`` is
        called repeatedly, and may raise KeyboardInterrupt to end the run."""
        plans = self.plans
        threads = [self._thread(self._play_all, plans.cycles) for _ in range(min(self.limit.most, len(plans.cycles)))]
        threads += [self._thread(self._play_alone, alone, after=threads) for alone in plans.alone.values()]
        threads.append(self._thread(self._measure, after=threads))
        try:
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads):
                check()
                self._workers.make()
                self._report_progress()
        except KeyboardInterrupt:
            self.partial = INTERRUPTED
        finally:
            self.undisturbed(partial(self._end, threads))

    def undisturbed(self, act: Callable[[], None]) -> None:
        """Call ``act``, and call it again if it is interrupted. After an interrupt, the run does not wait for locks to
        expire."""

        def again() -> None:
            try:
                act()
            except KeyboardInterrupt:
                self.partial = INTERRUPTED
                raise

        _undisturbed(again)

    def _end(self, threads: list[threading.Thread]) -> None:
        self._stop.set()
        until = now() + END_WITHIN
        for thread in threads:
            if thread.ident is not None:
                thread.join(max(0.0, until - now()))
        self._workers.close()

    def _report_progress(self) -> None:
        if self._progress is not None:
            with self._lock:
                running = sorted(f"{plan.contestant} {plan.scenario.name}" for plan in self.plans.running.values())
                done = len(self.results.verdicts)
            planned, elapsed = max(self.plans.planned, done + len(running)), now() - self.began
            self._progress(Progress(done, planned, running, elapsed, self._within, self._measuring))

    # ---- methods that run on the threads of cycles and loads

    def _thread(
        self, act: Callable[..., None], *arguments: object, after: Sequence[threading.Thread] = ()
    ) -> threading.Thread:
        """Return a thread that calls ``act`` once the threads ``after`` have ended. An error in it ends the run."""
        before = [*after]

        def body() -> None:
            try:
                for thread in before:
                    thread.join()
                act(*arguments)
            except RunEnded:
                pass
            except BaseException as error:
                self._errors.append(error)
                self._stop.set()

        return threading.Thread(target=body, name="compare", daemon=True)

    def _play_all(self, plans: deque[Planned]) -> None:
        """Play these plans, one after another."""
        while (following := self._next(plans)) is not None:
            self._play(*following)
            with self._lock:
                plans.extend(self.plans.once_more(plans, following[1]))

    def _play_alone(self, plans: deque[Planned]) -> None:
        """Play the cycles that take a server down, after all other cycles. Several of these cycles share one fault."""
        while plans and not self._stop.is_set():
            some = self.plans.take_together(plans)
            together = Together(len(some), some[0][1].seed)
            crew = [
                self._thread(self._play_all, deque([(column, replace(plan, together=together))]))
                for column, plan in some
            ]
            for thread in crew:
                thread.start()
            for thread in crew:
                thread.join()

    def _measure(self) -> None:
        """Run the loads, while nothing else runs."""
        for number, load in enumerate(self.plans.loads, 1):
            if self._stop.is_set():
                return
            self._measuring = f"{load.contestant} {load.kind}, {number} of {len(self.plans.loads)}"
            self.results.add_load(self._play_load(load))

    def _play_load(self, load: Load) -> list[Event]:
        # The load measures the memory of its process, so it needs a fresh process.
        borrow = partial(self._workers.borrow, fresh=load.kind == "scale")
        events, workers = play_load(load, borrow, self._stop)
        for worker in workers:
            self._workers.give_back(worker)
        return events

    def _next(self, plans: deque[Planned]) -> Planned | None:
        with self._room:
            while plans and plans[0][1].together is None and len(self.plans.running) >= self.limit.now:
                if self._stop.is_set():
                    break
                self._room.wait(TICK)
            return None if self._stop.is_set() else self.plans.take(plans, now() - self.began)

    def _play(self, column: Column, plan: Plan) -> None:
        a, b = self._workers.borrow(), self._workers.borrow()
        try:
            events = play(plan, a, b, self._stop)
        finally:
            self._workers.give_back(a)
            self._workers.give_back(b)
        with self._room:
            self.plans.ended(plan)
            self.limit.learn(events)
            self._room.notify_all()
        end = events[-1]
        if end.get("stopped"):
            return
        if not end["reached"] and not column.gone:
            column.check_alive()
        with self._lock:
            verdict = self.results.add_cycle(events)
            if verdict.decided or not end["reached"]:
                self.plans.settle(plan.cell)


# ---- after the run


def _find_leftovers(runner: _Runner, columns: list[Column], before: Before) -> None:
    """Find keys that this run has left at the servers, also in earlier pieces (oracle O7)."""
    for column in columns:
        column.find_leftovers(runner.plans.names_of(column), patient=runner.partial != INTERRUPTED)
        column.leftovers = sorted({*column.leftovers, *before.left_behind(column.name)})


def _content(runner: _Runner, columns: list[Column], options: Options, seed: int) -> dict[str, Any]:
    """Return the content of report.json."""
    results, before = runner.results, runner.results.before
    its = [column.data for column in columns]
    cells = cells_of(results.verdicts)
    command = [_program(), *map(_redacted, sys.argv[1:])]
    piece: dict[str, Any] = {
        "made_at": datetime.now(UTC).isoformat(timespec="seconds"), "seconds": round(now() - runner.began, 3),
        "cycles": len(results.verdicts) - len(before.verdicts), "command": command,
    }  # fmt: skip
    pieces = [*before.pieces, piece]
    error = runner.error
    return {
        "schema": SCHEMA,
        "multilock": multilock.__version__,
        "made_at": piece["made_at"],
        "partial": runner.partial or None if error is None else f"{type(error).__name__}: {error}",
        "command": command,
        "pieces": pieces,
        "seed": seed,
        "cycles": options.cycles,
        "control_cycles": options.of_controls,
        "planned": runner.plans.planned,
        "ttl": options.ttl,
        "at_once": runner.limit.most,
        "seconds": round(sum(piece["seconds"] for piece in pieces), 3),
        "host": host(),
        "scenarios": [{"name": name, "says": SCENARIOS[name].says} for name in runner.plans.scenarios],
        "columns": its,
        "cells": cells,
        "loads": results.rows,
        **conclude(its, cells, results.rows),
    }


def _program() -> str:
    """Return the name of the program without its folder, which must not be published."""
    name = Path(sys.argv[0]).name
    return "multilock" if name == "__main__.py" else name


def _redacted(word: str) -> str:
    """Return a word of the command line without the secrets of a URL in it."""
    found = re.search(r"[a-zA-Z][a-zA-Z0-9+.-]*://", word)
    return word if found is None else word[: found.start()] + redact(word[found.start() :])


# ---- Ctrl-C and SIGTERM interrupt a run once; the clean-up then runs to its end


def _undisturbed(act: Callable[[], T]) -> T:
    """Call ``act``, and call it again if it is interrupted. `interrupted_once` allows only one interrupt."""
    try:
        return act()
    except KeyboardInterrupt:
        return act()


@contextlib.contextmanager
def interrupted_once() -> Iterator[Callable[[], None]]:
    """Let Ctrl-C and SIGTERM raise KeyboardInterrupt once, so that the clean-up after it is not interrupted.

    Yields a function that raises KeyboardInterrupt if a signal has come. The caller must call it, because the
    interpreter discards an exception that a signal handler raises inside a finalizer.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    interrupted = False

    def interrupt(number: int, frame: object) -> None:
        nonlocal interrupted
        if not interrupted:
            interrupted = True
            raise KeyboardInterrupt

    def check() -> None:
        if interrupted:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield check
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
