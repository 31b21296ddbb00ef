"""Calls at a given time, on the kernel's ticking thread. A function called by a timer must return at once."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable

from multilock import system

__all__ = ["Timers"]


class Timers:
    """The calls that one client has planned, each for a certain time."""

    def __init__(self, poke: Callable[[float], None]) -> None:
        self._poke = poke
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._lock = system.RLock()

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Call ``call()`` at the time ``when``."""
        with self._lock:
            heapq.heappush(self._heap, (when, next(self._numbers), call))
        self._poke(when)

    def step(self, now: float) -> float:
        """Call everything that is due, and return the time of the next call."""
        while True:
            with self._lock:
                if not self._heap:
                    return math.inf
                if (when := self._heap[0][0]) > now:
                    return when
                call = heapq.heappop(self._heap)[2]
            call()
