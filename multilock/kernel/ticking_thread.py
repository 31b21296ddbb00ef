"""The ticking thread of a client: it calls a step function at planned times. A poke makes the next step come earlier.

The step function of a client renews its leases and checks its deadlines.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Protocol

from multilock import system
from multilock.kernel.inside_backend import call_inside
from multilock.kernel.worker import SOON, begin_thread, helpers, is_any_missing, try_again
from multilock.system import now

__all__ = ["Ticker", "TickingThread"]

# A ticking thread divides a longer wait into waits of this many seconds. A wait does not count the time for which the
# machine sleeps, so without this limit the next step would be delayed by the whole sleep.
LONGEST_WAIT = 1.0


class Ticker(Protocol):
    """A thread that calls a step function again and again. Each call returns the time of the next call."""

    def start(self) -> str | None:
        """Start the thread. Returns the reason if the operating system refuses it, otherwise None."""

    def poke(self, at: float) -> None:
        """Make the next step come no later than ``at``."""

    def late(self) -> float:
        """Return the seconds by which the next step is overdue, 0.0 if it is on time, inf if the thread died."""

    def close(self) -> None:
        """End the thread after the present step."""


class TickingThread:
    """The `Ticker` of the real runtime.

    ``_planned`` is the time of the next step. A `poke` wakes the thread only for an earlier time. While the step runs,
    ``_planned`` is inf, so that every `poke` wakes the thread.
    """

    def __init__(self, step: Callable[[], float], died: Callable[[BaseException], None], name: str):
        self._step = step
        self._died = died
        self._wakeup = system.LockBell()
        self._planned = math.inf
        self._due = now()  # the time at which the present or next step should begin
        self._closed = False
        self._name = name

    def start(self) -> str | None:
        # `call_inside` marks the ticking thread, so that a finalizer that runs on this thread waits for nothing.
        return begin_thread(partial(call_inside, self._run), self._name)

    def poke(self, at: float) -> None:
        if at < self._planned:
            try:
                self._planned = at
                self._wakeup.ring()
            except BaseException:  # after an interrupt the bell may not have rung
                self._planned = math.inf
                raise

    def late(self) -> float:
        return max(0.0, now() - self._due)

    def close(self) -> None:
        self._closed = True
        self._wakeup.ring()

    def _run(self) -> None:
        try:
            helpers[self] = lambda: self.poke(now() + SOON)
            while not self._closed:
                self._planned = math.inf
                at = self._step()
                if is_any_missing() and try_again():
                    at = min(at, now() + SOON)
                self._planned = self._due = at
                while (rest := at - now()) > 0:
                    if self._wakeup.wait(rest if rest == math.inf else min(rest, LONGEST_WAIT)):
                        self._due = min(at, now())
                        break
        except BaseException as error:
            self._due = -math.inf
            if not self._closed:
                self._died(error)
        finally:
            helpers.pop(self, None)
