"""The background thread of a client, called the clerk. It reads late replies, acts for waiting claims, and repeats
releases.

A late reply is a reply that was still missing when its thread returned the fan (one connection to each server) to the
pool. The clerk never blocks on a server. It has a separate fan, whose connections other threads make.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count, islice
from typing import TYPE_CHECKING

from multilock import system
from multilock.backend import start_worker
from multilock.timing import LONGEST_PAUSE
from multilock_redis.redlock.connections import LAST_WORDS, Fan, Pool
from multilock_redis.redlock.votes import Evidence

if TYPE_CHECKING:
    from multilock_redis.redlock.acquire_release import Rounds

__all__ = ["CONFIRMED_WITHIN", "Clerk", "Unconfirmed"]

LATE = 0.01  # seconds; if nothing has used a fan for this long, the clerk reads its late replies
REPEAT_AFTER = 0.02  # seconds until unconfirmed releases are repeated; each failure doubles this time
BATCH = 64  # the greatest number of releases that are under way to one server
CONFIRMED_WITHIN = 5.0  # seconds to wait for the reply to a repeated release before it is repeated again
ASLEEP = 60.0  # the longest sleep of the thread in seconds


class Unconfirmed:
    """The releases that one server has not confirmed. The clerk repeats them in batches."""

    def __init__(self) -> None:
        self._waiting: dict[str, Evidence] = {}
        self._under_way: dict[str, Evidence] = {}
        self._pause = 0.0
        self._due = False  # whether the next batch is planned

    def failed(self, evidence: Evidence) -> float | None:
        """Record that the server did not confirm this release.

        Return the seconds until the clerk must send the next batch, or None if that batch is planned already.
        """
        again = self._under_way.pop(evidence.claim.id, None)
        self._waiting[evidence.claim.id] = evidence
        if self._due:
            return None
        self._due = True
        self._pause = min(LONGEST_PAUSE, 2 * self._pause) if again and self._pause else REPEAT_AFTER
        return self._pause

    def done(self, evidence: Evidence) -> bool:
        """Record that the server confirmed this release, or no longer has an entry of the claim.

        Return whether the clerk must send the next batch now.
        """
        self._waiting.pop(evidence.claim.id, None)
        if self._under_way.pop(evidence.claim.id, None):
            self._pause = 0.0
        if self._due or not self._waiting:
            return False
        self._due = True
        return True

    def batch(self) -> list[Evidence]:
        """Return the next releases to send, and count them as under way."""
        self._due = False
        batch = dict(islice(self._waiting.items(), max(0, BATCH - len(self._under_way))))
        for claim_id in batch:
            del self._waiting[claim_id]
        self._under_way |= batch
        return list(batch.values())

    def none(self) -> bool:
        """Return whether the server has confirmed every release. Any thread may call this, with or without the lock."""
        return not self._waiting and not self._under_way

    def all(self) -> list[Evidence]:
        return [*self._waiting.values(), *self._under_way.values()]


class Clerk:
    """The background thread and its tasks. Any thread may call any method except `run`."""

    def __init__(self, rounds: Rounds, pool: Pool, now: Callable[[], float]) -> None:
        """Do no I/O and start no thread. The thread starts with the first wait or the first late reply."""
        self._rounds = rounds
        self._pool = pool
        self._now = now
        self._lock = system.Lock()
        self._started = False
        self._closed = False
        self._asleep_until = 0.0
        self._numbers = count()
        # when to act for a claim, or to repeat releases at a server
        self._due: list[tuple[float, int, Evidence | int]] = []
        self._minded: set[Fan] = set()
        self._told = system.Event()  # set once the unconfirmed releases were sent again
        self._unconfirmed = [Unconfirmed() for _ in pool.links]
        self._bell: system.PipeBell | None = None
        self._fan: Fan | None = None

    def start(self) -> None:
        """Start the thread, unless it runs already or the client is closed."""
        with self._lock:
            if self._started or self._closed:
                return
            self._started = True
            self._bell = system.PipeBell()
            self._fan = self._pool.make()
        start_worker(self.run, "multilock-redlock-clerk")

    def soon(self, evidence: Evidence, when: float) -> None:
        """Act for the claim at ``when``, unless an earlier time is planned. The caller holds the claim's lock."""
        if evidence.due and evidence.due <= when:
            return
        evidence.due = when
        self._push(when, evidence)

    def mind(self, fan: Fan) -> None:
        """Read the late replies of this fan, unless another thread uses the fan soon."""
        with self._lock:
            if fan in self._minded:
                return
            self._minded.add(fan)
        self._wake(self._now() + LATE)

    def not_confirmed(self, evidence: Evidence, which: int) -> None:
        """Repeat the release at this server until the server confirms it."""
        with self._lock:
            pause = self._unconfirmed[which].failed(evidence)
        if pause is not None:
            self._push(self._now() + pause, which)

    def confirmed(self, evidence: Evidence, which: int) -> None:
        """Stop repeating the release at this server."""
        # Usually this needs no lock. If the clerk puts this release into a batch at this moment, `tell_late` confirms
        # it.
        if self._unconfirmed[which].none():
            return
        with self._lock:
            next_batch = self._unconfirmed[which].done(evidence)
        if next_batch:
            self._push(self._now(), which)

    def _push(self, when: float, what: Evidence | int) -> None:
        with self._lock:
            heappush(self._due, (when, next(self._numbers), what))
        self._wake(when)

    def _wake(self, when: float) -> None:
        self.start()
        with self._lock:
            if when >= self._asleep_until or self._bell is None:
                return
            self._asleep_until = 0.0
            self._bell.ring()

    def run(self) -> None:
        """Act and read replies until the client is closed. Only the background thread runs this."""
        fan, bell = self._fan, self._bell
        assert fan is not None
        assert bell is not None
        with system.DefaultSelector() as selector:
            selector.register(bell, system.EVENT_READ)
            nested = fan.fileno()
            if nested is not None:
                selector.register(nested, system.EVENT_READ)
            for lane in fan.lanes:
                lane.connect()  # connect early, because close() leaves no time to connect
            while not self._closed:
                selector.select(self._sleep(fan, nested is not None))
                with self._lock:
                    self._asleep_until = 0.0
                bell.clear()
                fan.look(0)
                self._act(fan)
                self._read_late()
        self._finish(fan)

    def _sleep(self, fan: Fan, wakes: bool) -> float:
        """Return for how many seconds the thread may sleep.

        ``wakes`` is True if a reply on the clerk's own connections wakes the thread. If it is False, the thread sleeps
        for at most `LATE` seconds.
        """
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
            if isinstance(what, int):
                self._tell(fan, what)
                continue
            with what.lock:
                due = what.due == when
                if due:
                    what.due = 0.0
            if due:
                self._rounds.act(what, fan)

    def _tell(self, fan: Fan, which: int) -> None:
        with self._lock:
            batch = self._unconfirmed[which].batch()
        for evidence in batch:
            self._rounds.tell_late(evidence, which, fan.lanes[which])

    def _read_late(self) -> None:
        """Read the late replies of the fans that no thread has used for a moment."""
        now = self._now()
        with self._lock:
            minded = list(self._minded)
        for fan in minded:
            with self._lock:
                owes = fan.owes()
                if not owes:
                    self._minded.discard(fan)
            if owes and now - fan.used >= LATE and self._pool.take_idle(fan):
                fan.look(0)
                fan.expire(now)
                self._pool.give(fan)

    def _finish(self, fan: Fan) -> None:
        """Send the unconfirmed releases again, also to servers that connect meanwhile, and close.

        This takes at most `LAST_WORDS` seconds, including the wait for replies.
        """
        until = self._now() + LAST_WORDS
        with self._lock:
            untold = [(which, each) for which, those in enumerate(self._unconfirmed) for each in those.all()]
        fan.connect_to({which for which, _ in untold}, until)
        for which, evidence in untold:
            if fan.lanes[which].wire:
                self._rounds.tell_late(evidence, which, fan.lanes[which])
        self._told.set()
        fan.finish(until)
        with self._lock:
            bell, self._bell = self._bell, None
        if bell:
            bell.close()

    def close(self) -> None:
        """End the thread. Wait a moment until it has sent the unconfirmed releases.

        The thread may need new connections for these releases, and the caller closes all connections of the client
        after this call.
        """
        with self._lock:
            self._closed = True
            if self._bell is not None:
                self._bell.ring()
        if self._started and not all(those.none() for those in self._unconfirmed):
            self._told.wait(LAST_WORDS)

    def drop(self) -> None:
        """Close the pipe in a forked child. The thread runs in the parent only."""
        bell, self._bell = self._bell, None
        if bell:
            bell.close()
