"""Import the simulation of a backend, and replace those parts of the library that would use real time or real
servers."""

from __future__ import annotations

import gc
import re
import sys
import traceback
from functools import cache

from multilock import log_thread
from multilock.kernel import living_clients, worker
from multilock.kernel.inside_backend import inside
from tests.simulation import plan
from tests.simulation.scheduler import Over, simulation
from tests.simulation.server import Simulated
from tests.simulation.threads import InOrder

__all__ = ["forget_everything", "simulated"]


@cache
def simulated(backend: str) -> Simulated:
    """Return the description of how a backend is simulated. The first call for a backend imports the backend."""
    found = plan.simulated(backend)
    for name, module in sorted(sys.modules.items()):
        if name.startswith("multilock"):
            vars(module)["set"] = InOrder
    gc.freeze()
    return found


def _say(
    self: object, level: int, message: str, args: tuple[object, ...], exc_info: object = None, extra: object = None
) -> None:
    """Log into the trace. A logged exception counts as an error of the run, unless it is `Over`, which ends tasks."""
    sim = simulation()
    if sim.over or sim.current is None:
        return
    error = exc_info if isinstance(exc_info, BaseException) else sys.exc_info()[1] if exc_info else None
    if error is not None and not isinstance(error, Over):
        trace = "".join(traceback.format_exception(error))[-2000:]
        sim.errors.append(f"{sim.current.process} logged {message % args}: {trace}")
    if sim.trace is not None and level > 10:
        text = re.sub(r" at 0x[0-9a-f]+", "", message % args)  # memory addresses would differ from run to run
        sim.note(sim.current.process, f"LOG {text}")


def forget_everything(backend: str) -> None:
    """Delete all data that a run has left in the modules of the library, so that all runs begin alike."""
    for name, module in sys.modules.items():
        if name.startswith("multilock"):
            for value in vars(module).values():
                if hasattr(value, "cache_clear"):
                    value.cache_clear()
    simulated(backend).forgets()
    living_clients._kernels.clear()
    worker.forget()
    inside.clear()


log_thread.QueuedLogger._say = _say  # type: ignore[method-assign]
vars(log_thread)["defer"] = lambda call: None
vars(log_thread)["flush"] = lambda seconds: True
gc.disable()  # garbage is collected only between two runs, because a finalizer during a run would change it
