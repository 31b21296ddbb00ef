"""Virtual time, processes and tasks. A seeded schedule decides which task runs next.

A task is a greenlet that represents a thread. The simulation takes one event after the other from a heap, and sets its
time to that of the event. So waiting takes no real time, and the same seed gives the same run.
"""

from __future__ import annotations

import asyncio
import math
import random
import select
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from math import log
from typing import Any

from greenlet import getcurrent, greenlet

__all__ = ["LONG", "START", "TIMEOUT", "Over", "Process", "Simulation", "Task", "simulation"]

START = 1000.0  # seconds; the time at which every simulation begins
TIMEOUT = object()  # the result of `Simulation.block` if its time limit has passed
LONG = 0.01  # seconds; the mean delay of a wake-up that is much too late
UNWOUND = 50  # how often `Over` is raised in a task at most; the task may catch it and wait again


class Over(BaseException):
    """Raised in a task whose process was killed, or whose simulation has ended."""


class Process:
    """One simulated process of the operating system, with its own clock."""

    def __init__(self, sim: Simulation, name: str, number: int) -> None:
        self.sim = sim
        self.name = name
        self.pid = 1000 + number
        self.alive, self.paused = True, False
        self.pauses: list[list[float]] = []  # for each stop, the times of its beginning and its end
        # Offset and drift of the process's clock, compared with the time of the simulation.
        self.offset, self.rate = 0.0, 1.0
        self.deferred: list[tuple[Task, int, Any]] = []  # actions to run when the process continues
        self.tasks: dict[Task, None] = {}
        self.files: dict[int, Any] = {}  # the open descriptors of the process

    def now(self) -> float:
        """Return the time on the clock of this process."""
        return (self.sim.time + self.offset) * self.rate

    def ran_since(self, when: float) -> bool:
        """Return whether the process was not stopped at any time since ``when``."""
        return self.alive and not self.paused and all(until < when for _, until in self.pauses)

    def __repr__(self) -> str:
        return self.name


@dataclass(slots=True, eq=False)
class Task:
    """One thread of a process. ``turn`` counts its waits, so that a late wake-up for an earlier wait has no effect."""

    process: Process
    name: str
    ident: int
    turn: int = 0
    armed: bool = False
    waits_for: str = ""
    loop: asyncio.AbstractEventLoop | None = None  # the event loop that runs in this thread
    greenlet: Any = None


class Simulation:
    """One run. All times are seconds of virtual time."""

    def __init__(self, seed: object, *, jitter: float, p_switch: float, p_long: float, trace: bool) -> None:
        """``jitter`` is the mean delay of each wake-up, and ``p_long`` is the probability of a much later wake-up.
        ``p_switch`` is the probability that another task may run when a task takes a lock."""
        global _present
        _present = self
        self.random = random.Random(f"schedule {seed}")
        self._chance = self.random.random
        self.ids = random.Random(f"ids {seed}")
        self.jitter, self.p_switch, self.p_long = jitter, p_switch, p_long
        self.time = START
        self.current: Any = None  # the running task; None while an event runs outside of all tasks
        self.over = False
        self.halted = False
        self.hash = 0  # a hash of all events so far, to compare runs
        self.processes: list[Process] = []
        self.errors: list[str] = []  # exceptions that ended tasks
        self.trace: list[str] | None = [] if trace else None
        self._heap: list[tuple[float, float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = count(1)
        self._idents = count(1)
        self.real: dict[int, tuple[Task, int]] = {}  # the tasks that wait for real descriptors
        self._hub = getcurrent()

    def process(self) -> Process:
        process = Process(self, f"P{len(self.processes)}", len(self.processes))
        self.processes.append(process)
        return process

    def at(self, when: float, call: Callable[..., None], *args: Any) -> None:
        """Call ``call(*args)`` at the time ``when``, outside of all tasks."""
        heappush(self._heap, (when, self._chance(), next(self._numbers), call, args))

    def after(self, seconds: float, call: Callable[..., None], *args: Any) -> None:
        """Call ``call(*args)`` after ``seconds``, outside of all tasks."""
        self.at(self.time + seconds, call, *args)

    def note(self, process: Process | None, text: str) -> None:
        """Add a line to the trace, if there is one."""
        if self.trace is not None:
            task = self.current
            place = f"{process or 'world'}/{task.name if task else '-'}"
            self.trace.append(f"{self.time - START:12.6f} {place:30} {text}")

    # Tasks

    def spawn(self, process: Process, run: Callable[[], object], name: str) -> Task:
        task = Task(process, name, next(self._idents))
        process.tasks[task] = None

        def body(_: Any = None) -> None:
            try:
                if not self.over and process.alive:
                    run()
            except Over:
                pass
            except BaseException as error:
                if not self.over and process.alive:
                    trace = "".join(traceback.format_exception(error))
                    self.errors.append(f"{self.time - START:.6f} {process}/{name}: {trace[-2000:]}")
            process.tasks.pop(task, None)

        task.greenlet = greenlet(body, self._hub)
        task.turn, task.armed = 1, True
        self.at(self.time + self._lag(), self._resume, task, 1, None)
        return task

    def block(self, seconds: float = math.inf, what: str = "") -> Any:
        """Suspend the running task. Returns the value given to `wake`, or TIMEOUT after ``seconds`` on the clock of its
        process."""
        task = self.running()
        task.turn = turn = task.turn + 1
        task.armed = True
        task.waits_for = what
        if seconds < math.inf:
            until = self.time + (seconds / task.process.rate if seconds > 0 else 0.0)
            self.at(until + self._lag(), self._resume, task, turn, TIMEOUT)
        value = self._hub.switch()
        if self.over or not task.process.alive:
            raise Over
        return value

    def running(self) -> Task:
        """Return the running task. Raises `Over` if the task must end."""
        task: Task | None = self.current
        if self.over or task is None or not task.process.alive:
            raise Over
        return task

    def wake(self, task: Task, turn: int, value: Any = True) -> None:
        """End the wait number ``turn`` of this task, unless it has ended already."""
        if task.turn == turn and task.armed:
            self.at(self.time + self._lag(), self._resume, task, turn, value)

    def may_switch(self) -> None:
        """Let other tasks run, with the probability ``p_switch``."""
        if self.p_switch and self.current is not None and self._chance() < self.p_switch:
            self.block(0.0, "switch")

    def _lag(self) -> float:
        lag = -log(1.0 - self._chance()) * self.jitter
        if self.p_long and self._chance() < self.p_long:
            lag += self.random.expovariate(1.0) * LONG
        return lag

    def _resume(self, task: Task, turn: int, value: Any) -> None:
        if task.turn != turn or not task.armed or not task.process.alive:
            return
        if task.process.paused:
            task.process.deferred.append((task, turn, value))
            return
        task.armed = False
        self._run(task, task.greenlet.switch, value)
        if self.real:
            for descriptor in select.select(self.real, [], [], 0)[0]:
                self.wake(*self.real.pop(descriptor))

    def _run(self, task: Task, switch: Callable[[Any], object], value: Any) -> None:
        before, self.current = self.current, task
        asyncio._set_running_loop(task.loop)
        switch(value)
        asyncio._set_running_loop(None)
        self.current = before

    # Time

    def run(self, until: float) -> None:
        """Process the events until the time ``until``, or until the run is halted."""
        heap = self._heap
        while heap and heap[0][0] <= until and not self.halted:
            when, _, number, call, args = heappop(heap)
            if when > self.time:
                self.time = when
            self.hash = hash((self.hash, when, number))
            call(*args)
        if not self.halted:
            self.time = max(self.time, until)

    def finish(self) -> None:
        self.over = True
        for process in self.processes:
            self._unwind(process)
        self._heap.clear()

    def _unwind(self, process: Process) -> None:
        for task in list(process.tasks):
            for _ in range(UNWOUND):
                if not task.greenlet:  # the task has not begun, or has ended
                    break
                self._run(task, task.greenlet.throw, Over)

    # Faults of processes

    def pause(self, process: Process) -> None:
        """Stop a process (SIGSTOP)."""
        if process.alive and not process.paused:
            self.note(process, "SIGSTOP")
            process.paused = True
            process.pauses.append([self.time, math.inf])

    def resume(self, process: Process) -> None:
        """Let a stopped process continue (SIGCONT)."""
        if process.paused:
            self.note(process, "SIGCONT")
            process.paused = False
            process.pauses[-1][1] = self.time
            deferred, process.deferred = process.deferred, []
            for task, turn, value in deferred:
                self.at(self.time + self._lag(), self._resume, task, turn, value)

    def kill(self, process: Process, how: str) -> None:
        """End a process and all its tasks at once."""
        if process.alive:
            self.note(process, how)
            process.alive = False
            self._unwind(process)


_present: Simulation | None = None


def simulation() -> Simulation:
    """Return the simulation that was created last."""
    assert _present is not None
    return _present
