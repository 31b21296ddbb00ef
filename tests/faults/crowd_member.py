"""A process of the crowd: readers and writers, or contenders for permits, on threads and on an event loop.

The process prints the lines that `multilock.testing.beliefs.witness` and `tests.faults.contender` describe, and this::

    queues TIME ID [SINCE UNTIL]     this claim must wait; its last heartbeat keeps its place from SINCE to UNTIL
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
import traceback
from collections.abc import Sequence
from typing import Any

import multilock
from multilock import AsyncClient, BackendUnavailable, Client, now
from multilock.model import Busy, Claim, Granted
from multilock.testing import hear
from multilock.testing.beliefs import Account, note, watch_pulse
from multilock.timing import liveness
from multilock_sqlite import SqliteBackend
from tests.faults.contender import Turn, hold, note_end, note_release, note_released, tell_loss
from tests.faults.waits import PATIENCE

__all__ = ["NAME", "attend"]

NAME = "catalogue"
IMPATIENT = 0.1  # the share of requests that do not wait, and also the share of those that wait only briefly
LONG_HOLD = 0.01  # the share of long reads and writes; with fifty readers, often one of them is long
THINK = 0.02  # the longest pause in seconds between two turns


def attend(url: str, ttl: str, readers: str, writers: str, permits: str, ledger: str, seed: str) -> None:
    """Request locks until the harness says stop: permits, or the locks of readers and writers if ``permits`` is 0."""
    watch_pulse()
    crew = _Crew(int(permits), ledger, seed)
    place = {"url": url, "ttl": float(ttl), "outage_timeout": 2.0}
    blocking, asynchronous = multilock.connect(place), multilock.connect_async(place)
    _tell_who_queues(blocking._kernel.backend)
    modes = ["r" if not crew.permits else f"p{permits}"] * int(readers) + ["x"] * int(writers)
    members = list(enumerate(modes))
    workers = [threading.Thread(target=crew.work, args=(blocking, *member)) for member in members[::2]]
    workers.append(threading.Thread(target=lambda: asyncio.run(crew.work_on_loop(asynchronous, members[1::2]))))
    for worker in workers:
        worker.start()
    note("ready")
    hear()
    crew.done.set()
    for worker in workers:
        worker.join()
    blocking.close()
    note_end()


def _tell_who_queues(backend: Any) -> None:
    proven = backend.attempt

    def attempt(claim: Claim, join: bool, within: float) -> Granted | Busy:
        answer: Granted | Busy = proven(claim, join, within)
        if join and isinstance(answer, Busy):
            note("queues", now(), claim.id, *_heartbeat(backend, claim))
        return answer

    backend.attempt = attempt


def _heartbeat(backend: Any, claim: Claim) -> tuple[float, ...]:
    """Return the two times between which the last heartbeat keeps the claim's place in the queue.

    Only SQLite needs these times. If a process is stopped inside a transaction of SQLite, no other process can write a
    heartbeat to the file.
    """
    if not isinstance(backend, SqliteBackend) or claim.id not in backend._waiting:
        return ()
    until = backend._waiting[claim.id].until
    return until - liveness(claim.ttl), until


class _Crew:
    """The members in this process. Each has its own random generator."""

    def __init__(self, permits: int, ledger: str, seed: str) -> None:
        self.permits, self.ledger, self.seed = permits, ledger, seed
        self.done = threading.Event()

    def long(self) -> float:
        """Return the share of long holds. Until the run ends, every permit is held long, so that usually all are in
        use."""
        return 0.0 if self.done.is_set() else 1.0 if self.permits else LONG_HOLD

    def _lock(self, client: Any, mode: str) -> Any:
        """Return the lock of this mode, blocking or asyncio."""
        if self.permits:
            return client.semaphore(NAME, self.permits, on_lost=tell_loss)
        both = client.read_write_lock(NAME, on_lost=tell_loss)
        return both.writer() if mode == "x" else both.reader()

    def work(self, client: Client, number: int, mode: str) -> None:
        lock, dice, account = self._lock(client, mode), self._dice(number), Account(self.ledger)
        while not self.done.is_set():
            turn = Turn(number, mode)
            try:
                if turn.had(lease := lock.try_acquire(timeout=_patience(dice))):
                    for pause in hold(lease, account, dice, long=self.long()):
                        time.sleep(pause)
                    note_release(lease)
                    note_released(lease, lease.release())
            except BackendUnavailable:
                turn.had(None)
            except Exception:
                note("wrong", repr(traceback.format_exc()))
            time.sleep(dice.uniform(0.0, THINK))
        account.close()

    async def work_on_loop(self, client: AsyncClient, members: Sequence[tuple[int, str]]) -> None:
        async with client:
            await asyncio.gather(*(self._work_in_task(client, *member) for member in members))

    async def _work_in_task(self, client: AsyncClient, number: int, mode: str) -> None:
        lock, dice, account = self._lock(client, mode), self._dice(number), Account(self.ledger)
        while not self.done.is_set():
            turn = Turn(number, mode)
            try:
                if turn.had(lease := await lock.try_acquire(timeout=_patience(dice))):
                    for pause in hold(lease, account, dice, long=self.long()):
                        await asyncio.sleep(pause)
                    note_release(lease)
                    note_released(lease, await lease.release())
            except BackendUnavailable:
                turn.had(None)
            except Exception:
                note("wrong", repr(traceback.format_exc()))
            await asyncio.sleep(dice.uniform(0.0, THINK))
        account.close()

    def _dice(self, number: int) -> random.Random:
        return random.Random(f"{self.seed} {number}")


def _patience(dice: random.Random) -> float:
    kind = dice.random()
    if kind < IMPATIENT:
        return 0.0
    return dice.uniform(0.05, 0.5) if kind < 2 * IMPATIENT else PATIENCE
