"""An asyncio event loop in virtual time. It runs in one task of the simulation."""

from __future__ import annotations

import asyncio
import asyncio.base_events
import math
from collections.abc import Callable, Coroutine
from typing import Any

from tests.simulation.scheduler import Simulation
from tests.simulation.threads import File, Waiter, now, waiter

__all__ = ["Loop"]


class Loop(asyncio.base_events.BaseEventLoop):
    """The loop of one simulated process. It watches simulated files only."""

    def __init__(self, sim: Simulation) -> None:
        super().__init__()
        self._sim = sim
        self._process = sim.running().process
        self._selector = self  # BaseEventLoop asks it for events
        self._waiter: Waiter | None = None
        self._rung = False
        self._readers: dict[int, tuple[File, asyncio.Handle]] = {}

    def time(self) -> float:
        return now()

    def run(self, main: Coroutine[Any, Any, object]) -> None:
        """Run the coroutine to its end in the present task, and close the loop."""
        task = self._sim.running()
        task.loop = self
        asyncio._set_running_loop(self)
        try:
            ending = self.create_task(main)
            while not ending.done():
                self._run_once()  # type: ignore[attr-defined]
            ending.result()
            while self._ready:  # type: ignore[attr-defined]
                self._run_once()  # type: ignore[attr-defined]
        finally:
            task.loop = None
            asyncio._set_running_loop(None)
            self.close()

    def select(self, timeout: float | None) -> list[File]:
        """Wait until a watched file is readable, or the loop is called from another task."""
        if not self._rung and not self._readable() and timeout != 0:
            self._waiter = waiter()
            self._sim.block(math.inf if timeout is None else timeout, "loop")
            self._waiter = None
        self._rung = False
        return self._readable()

    def _readable(self) -> list[File]:
        return [file for file, _ in self._readers.values() if file.number >= 0 and file.is_readable()]

    def _process_events(self, files: list[File]) -> None:
        for file in files:
            self._ready.append(self._readers[file.number][1])  # type: ignore[attr-defined]

    def _write_to_self(self) -> None:
        self._rung = True
        self._has_changed()

    def _has_changed(self) -> None:
        if self._waiter:
            self._sim.wake(*self._waiter)
            self._waiter = None

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Record what asyncio would log, unless the process was killed or the run is over."""
        if not self._sim.over and self._process.alive:
            self._sim.errors.append(f"{self._process}: {context['message']}: {context.get('exception')!r}")

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
        file = self._sim.running().process.files[fd]
        self._readers[fd] = file, asyncio.Handle(callback, args, self)
        file.watchers.append(self._has_changed)

    def remove_reader(self, fd: Any) -> bool:
        found = self._readers.pop(fd, None)
        if found and self._has_changed in found[0].watchers:
            found[0].watchers.remove(self._has_changed)
        return found is not None
