"""Read from the contenders' lines (`tests.faults.contender`) how long they waited, and whether their order was fair."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from multilock.testing.beliefs import Record
from multilock.testing.beliefs.oracles import within

__all__ = ["PATIENCE", "Wait", "Waits"]

PATIENCE = 30.0  # seconds after which a waiter counts as starved
STOOD_STILL = 0.1  # seconds; a waiter whose process did not run for this long may have lost its place


@dataclass(slots=True)
class Wait:
    """One wait of the contender ``who``, which requested the name in this mode.

    The server put the contender into the queue at ``queued``. At ``ended`` the contender got the name or gave up.
    ``kept`` is True if its heartbeats show that it always had its place in the queue.
    """

    who: str
    pid: int
    mode: str
    asked: float
    queued: float = math.inf
    ended: float = math.inf
    entered: bool = False
    kept: bool = True


class _Place:
    """A place in the queue, which each heartbeat prolongs."""

    def __init__(self, queued: float) -> None:
        self.queued = queued
        self.kept = True
        self._until = math.inf

    def hear(self, since: float, until: float) -> None:
        self.kept &= since <= self._until
        self._until = until

    def kept_until(self, at: float) -> bool:
        return self.kept and at <= self._until


class Waits:
    """All waits, read from the lines of `tests.faults.contender` and `tests.faults.crowd_member`."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.all: list[Wait] = []
        self._of: dict[str, Wait] = {}
        self._places: dict[str, _Place] = {}  # the places in the queue, by claim

    def feed(self, pid: int, line: str) -> None:
        match line.split(" "):
            case ["asks", at, who, mode]:
                self._of[who] = Wait(who, pid, mode, float(at))
                self.all.append(self._of[who])
            case ["queues", at, id, *heartbeat]:
                place = self._places.setdefault(id, _Place(float(at)))
                if heartbeat:
                    place.hear(*map(float, heartbeat))
            case ["enters", at, who, id]:
                wait = self._of[who]
                wait.ended, wait.entered = float(at), True
                if had := self._places.pop(id, None):
                    wait.queued, wait.kept = had.queued, had.kept_until(wait.ended)
            case ["leaves", at, who]:
                self._of[who].ended = float(at)

    def lasted(self, wait: Wait) -> float:
        """Return the seconds of this wait, without those in which its process did not run."""
        stalls = self.record.stalls[wait.pid]
        return wait.ended - wait.asked - within(stalls, wait.asked, wait.ended)

    def starved(self) -> Iterator[str]:
        """Yield a line for each waiter that waited longer than ``PATIENCE``, or still waited when its process ended by
        itself."""
        for wait in self.all:
            if wait.ended == math.inf and wait.pid in self.record.ends:
                yield f"O8 {wait.who} ({wait.mode}) asked, and never got a reply"
            elif wait.ended < math.inf and self.lasted(wait) > PATIENCE:
                yield f"O8 {wait.who} ({wait.mode}) waited for {self.lasted(wait):.1f} s"

    def overtaken(self) -> Iterator[tuple[Wait, Wait]]:
        """Yield each waiter that was overtaken, with the contender that overtook it.

        The waiter always had its place in the queue. The other contender requested the lock later, got it earlier, and
        may not hold it together with the waiter. A process that did not run may have lost its places, so its waits do
        not count.
        """
        entered = sorted((wait for wait in self.all if wait.entered), key=lambda wait: wait.ended)
        ends = [wait.ended for wait in entered]
        for wait in entered:
            stalls = self.record.stalls[wait.pid]
            if wait.kept and within(stalls, wait.queued, wait.ended) < STOOD_STILL:
                for other in entered[bisect_right(ends, wait.queued) : bisect_left(ends, wait.ended)]:
                    if other.asked > wait.queued and "x" in (wait.mode, other.mode):
                        yield wait, other

    def told(self, mode: str) -> str:
        those = [wait for wait in self.all if wait.mode == mode]
        times = sorted(self.lasted(wait) for wait in those if wait.entered) or [math.nan]
        return (
            f"mode {mode}: {len(those)} asked, {sum(wait.entered for wait in those)} entered, after "
            f"{statistics.median(times):.3f} s in the median, {times[int(0.99 * len(times))]:.2f} s at p99, "
            f"{times[-1]:.2f} s at most"
        )
