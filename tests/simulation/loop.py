"""An asyncio event loop in virtual time, which runs in one task of the simulation."""

from __future__ import annotations

import asyncio
from asyncio.selector_events import BaseSelectorEventLoop
from collections.abc import Coroutine
from typing import Any

from tests.simulation.scheduler import Simulation
from tests.simulation.threads import PipeBell, Selector

__all__ = ["Loop"]


class Loop(BaseSelectorEventLoop):
    """The event loop of one simulated process. It can watch only simulated files."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self._process = sim.running().process
        super().__init__(Selector())  # type: ignore[arg-type]

    def time(self) -> float:
        return self._process.now()

    def run(self, main: Coroutine[Any, Any, object]) -> None:
        """Run the coroutine to its end in the present task, and close the loop."""
        task = self._sim.running()
        task.loop = self
        asyncio._set_running_loop(self)
        try:
            ending = self.create_task(main)
            while not ending.done() or self._ready:  # type: ignore[attr-defined]
                self._run_once()  # type: ignore[attr-defined]
            ending.result()
            left = asyncio.all_tasks(self)  # `asyncio.run` also cancels these tasks, and lets them end
            for each in left:
                each.cancel()
            while not all(each.done() for each in left):
                self._run_once()  # type: ignore[attr-defined]
        finally:
            task.loop = None
            self.close()

    def _make_self_pipe(self) -> None:
        self._bell = PipeBell()
        self._add_reader(self._bell, self._bell.clear)  # type: ignore[attr-defined]

    def _close_self_pipe(self) -> None:
        self._remove_reader(self._bell)  # type: ignore[attr-defined]
        self._bell.close()

    def _write_to_self(self) -> None:
        self._bell.ring()

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Record an error that asyncio would log, unless the process was killed or the run is over."""
        if not self._sim.over and self._process.alive:
            self._sim.errors.append(f"{self._process}: {context['message']}: {context.get('exception')!r}")
