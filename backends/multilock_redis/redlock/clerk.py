"""The one thread of a client that acts while nobody asks: late answers, claims that are due, releases told again.

It never blocks on a server: it sends on connections of its own, which are made by other threads.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING

from multilock import system
from multilock.backend import start_worker
from multilock_redis.redlock.fan import LAST_WORDS, Fan, Pool
from multilock_redis.redlock.place import Evidence

if TYPE_CHECKING:
    from multilock_redis.redlock.rounds import Rounds

__all__ = ["Clerk"]

LATE = 0.01  # seconds after which the clerk reads what a fan is owed that nobody uses
FIRST_PAUSE, LONGEST_PAUSE = 0.02, 1.0  # seconds between two tries to tell a server of a release
ASLEEP = 60.0  # seconds


class _Untold:
    """A release that one server has not confirmed."""

    def __init__(self, evidence: Evidence, which: int) -> None:
        self.evidence = evidence
        self.which = which
        self.pause = FIRST_PAUSE


class Clerk:
    """Any thread may call, except `run`."""

    def __init__(self, rounds: Rounds, pool: Pool, now: Callable[[], float]) -> None:
        """No I/O, and no thread: it starts with the first wait or the first late answer."""
        self._rounds = rounds
        self._pool = pool
        self._now = now
        self._lock = system.Lock()
        self._started = False
        self._closed = False
        self._asleep_until = 0.0
        self._numbers = count()
        self._due: list[tuple[float, int, Evidence | _Untold]] = []
        self._minded: set[Fan] = set()
        self._telling: dict[tuple[str, int], _Untold] = {}
        self._bell: tuple[int, int] | None = None
        self._fan: Fan | None = None

    def start(self) -> None:
        with self._lock:
            if self._started or self._closed:
                return
            self._started = True
            reads, writes = os.pipe()
            os.set_blocking(reads, False)
            os.set_blocking(writes, False)
            self._bell = reads, writes
            self._fan = self._pool.make()
        start_worker(self.run, "multilock-redlock-clerk")

    def soon(self, evidence: Evidence, when: float) -> None:
        """Act for the claim then. Under its lock."""
        if evidence.due and evidence.due <= when:
            return
        evidence.due = when
        self._push(when, evidence)

    def mind(self, fan: Fan) -> None:
        """Read what this fan is owed, unless it is used before."""
        with self._lock:
            self._minded.add(fan)
        self._wake(self._now() + LATE)

    def tell_again(self, evidence: Evidence, which: int) -> None:
        """Tell this server of the release until it has confirmed it."""
        key = evidence.claim.id, which
        with self._lock:
            untold = self._telling.get(key)
            if untold is None:
                untold = self._telling[key] = _Untold(evidence, which)
        self._push(self._now() + untold.pause, untold)
        untold.pause = min(LONGEST_PAUSE, 2 * untold.pause)

    def _push(self, when: float, what: Evidence | _Untold) -> None:
        with self._lock:
            heappush(self._due, (when, next(self._numbers), what))
        self._wake(when)

    def _wake(self, when: float) -> None:
        self.start()
        with self._lock:
            if when >= self._asleep_until or self._bell is None:
                return
            self._asleep_until = 0.0
            with suppress(BlockingIOError):
                os.write(self._bell[1], b"!")

    def run(self) -> None:
        """The thread."""
        fan, bell = self._fan, self._bell
        assert fan is not None
        assert bell is not None
        with system.DefaultSelector() as selector:
            selector.register(bell[0], system.EVENT_READ)
            nested = fan.fileno()
            if nested is not None:
                selector.register(nested, system.EVENT_READ)
            for lane in fan.lanes:
                lane.connect()
            while not self._closed:
                selector.select(self._sleep(fan, nested is not None))
                with self._lock:
                    self._asleep_until = 0.0
                with suppress(BlockingIOError):
                    os.read(bell[0], 4096)
                fan.look(0)
                self._act(fan)
                self._read_late()
        self._finish(fan)

    def _sleep(self, fan: Fan, wakes: bool) -> float:
        """How long nothing is to be done, in seconds."""
        now = self._now()
        with self._lock:
            when = self._due[0][0] if self._due else now + ASLEEP
            if self._minded or not wakes:
                when = min(when, now + LATE)
            if (late := fan.late_in(now)) is not None:
                when = min(when, now + late + LATE)
            self._asleep_until = when
        return min(ASLEEP, max(0.0, when - now))

    def _act(self, fan: Fan) -> None:
        now = self._now()
        fan.expire(now)
        while True:
            with self._lock:
                if not self._due or self._due[0][0] > now:
                    return
                when, _, what = heappop(self._due)
            if isinstance(what, _Untold):
                self._tell(fan, what)
                continue
            with what.lock:
                due = what.due == when
                if due:
                    what.due = 0.0
            if due:
                self._rounds.act(what, fan)

    def _tell(self, fan: Fan, untold: _Untold) -> None:
        evidence, which = untold.evidence, untold.which
        with evidence.lock:
            if evidence.stays(which, int(self._now() * 1e6)):
                self._rounds.tell(evidence, which, fan.lanes[which], set())
                return
        with self._lock:
            self._telling.pop((evidence.claim.id, which), None)

    def _read_late(self) -> None:
        """Read the fans that owe something and that nobody has used for a moment."""
        now = self._now()
        with self._lock:
            minded = list(self._minded)
        for fan in minded:
            if not fan.owes():
                with self._lock:
                    self._minded.discard(fan)
            elif now - fan.used >= LATE and self._pool.take_idle(fan):
                fan.look(0)
                fan.expire(now)
                self._pool.give(fan)

    def _finish(self, fan: Fan) -> None:
        """Tell what is still to be told to servers that can be told at once, and end."""
        until = self._now() + LAST_WORDS
        with self._lock:
            untold = [what for _, _, what in self._due if isinstance(what, _Untold)]
            self._due.clear()
        for each in untold:
            with each.evidence.lock:
                if each.evidence.stays(each.which, int(self._now() * 1e6)) and fan.lanes[each.which].wire:
                    self._rounds.tell(each.evidence, each.which, fan.lanes[each.which], set())
        while fan.owes() and (left := until - self._now()) > 0:
            fan.look(left)
        fan.close()
        with self._lock:
            bell, self._bell = self._bell, None
        for descriptor in bell or ():
            os.close(descriptor)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._bell is not None:
                with suppress(BlockingIOError):
                    os.write(self._bell[1], b"!")

    def drop(self) -> None:
        """In a forked child: the thread is the parent's."""
        bell, self._bell = self._bell, None
        for descriptor in bell or ():
            os.close(descriptor)
