"""A process of the chaos harness: contenders on threads and on an event loop record when they believe that they hold a
lock.

The process prints the lines that `multilock.testing.beliefs.witness` describes, and these::

    habit NAME                       this process has this habit of tests/faults/habits.py
    asks TIME WHO MODE               the contender WHO asks for a name; WHO is unique in the run
    enters TIME WHO ID               that contender got the name
    leaves TIME WHO                  that contender gave up
    end THREADS SOCKETS              both clients are closed, and left these threads and sockets behind
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import random
import signal
import threading
import time
import traceback
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

import multilock
from multilock import (
    AsyncClient,
    AsyncDistributedLock,
    AsyncLease,
    BackendUnavailable,
    Client,
    DistributedLock,
    Lease,
    LeaseState,
    LockLost,
    Loss,
    log_thread,
    now,
)
from multilock.kernel.holding import Holding
from multilock.kernel.validity import lost_at
from multilock.testing import hear
from multilock.testing.beliefs import Account, note, watch_pulse
from multilock.testing.beliefs.witness import STALLED
from tests.faults.defects import DEFECTS
from tests.faults.habits import ELSEWHERE, HABITS, UVLOOP
from tests.faults.waits import PATIENCE

L = TypeVar("L", Lease, AsyncLease)

SHORT_HOLD = 0.03  # seconds: the longest hold, except for the share `LONG_HOLD` of the leases
NOTE_EVERY = 0.004  # seconds between two "held" lines of one lease
AT_ONCE = 50  # concurrent acquires of one client that keeps many locks
LOOK_EVERY = 0.2  # seconds between two checks of all locks of a client that keeps many
PATIENT = 0.0  # the share of requests that wait until the waiter counts as starved
PERMITS = 3
PLAIN, WRITERS = 0.15, 0.15  # shares of plain locks and writers among the requests for a mixed name
LONG_HOLD = 0.2  # share of leases that are held long, so that most faults hit one of them


def contend(
    url: str,
    ttl: str,
    names: str,
    threads: str,
    tasks: str,
    ledger: str,
    seed: str,
    habits: str,
    defect: str,
    mixed: str,
) -> None:
    """Contend until the harness says stop."""
    errors = os.dup(2)  # a habit may block stderr, so tracebacks go to a copy of it
    # `faulthandler.register` would read the frames of threads while they run, and crash.
    signal.signal(signal.SIGUSR1, lambda *_: faulthandler.dump_traceback(errors))
    has = set(filter(None, habits.split(";")))
    for habit in has:
        HABITS[habit]()
        note("habit", habit)
    if defect:
        DEFECTS[defect].seed()
    watch_pulse()
    places = names.split(",")
    crew = _Crew(url, float(ttl), places, ledger, random.Random(seed), mixed=bool(mixed), elsewhere=ELSEWHERE in has)
    blocking, asynchronous = crew.open_clients()
    workers = [threading.Thread(target=crew.work, args=(blocking, number)) for number in range(int(threads))]
    on_loop = asyncio.Runner(loop_factory=_uvloop() if UVLOOP in has else None)
    workers.append(threading.Thread(target=_run, args=(on_loop, crew, asynchronous, int(tasks))))
    for worker in workers:
        worker.start()
    note("ready")
    hear()
    crew.done.set()
    for worker in workers:
        worker.join()
    crew.close()
    blocking.close()
    note_end()


def _uvloop() -> Callable[[], asyncio.AbstractEventLoop]:
    import uvloop

    new_event_loop: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return new_event_loop


def _run(runner: asyncio.Runner, crew: _Crew, client: AsyncClient, tasks: int) -> None:
    with runner:
        runner.run(crew.work_on_loop(client, tasks))


def keep(url: str, ttl: str, prefix: str, first: str, last: str) -> None:
    """Hold many locks on one client until the harness says stop, and check all of them repeatedly."""
    watch_pulse()
    client = multilock.connect(url, ttl=float(ttl))
    done = threading.Event()

    def take(number: int) -> Lease:
        lease = client.lock(f"{prefix}{number}", on_lost=tell_loss).acquire()
        began, held = now(), lease.is_held()
        note("got", began, lease.name, _id(lease), lease.token, int(held))
        return lease

    def look(leases: list[Lease]) -> None:
        while not done.wait(LOOK_EVERY):
            for lease in leases.copy():
                asked = now()
                if lease.is_held():
                    note("held", asked, _id(lease))
                else:
                    note("over", asked, _id(lease))
                    leases.remove(lease)

    with ThreadPoolExecutor(AT_ONCE) as takers:
        leases = list(takers.map(take, range(int(first), int(last))))
    note("ready", now())
    looking = threading.Thread(target=look, args=(leases,))
    looking.start()
    hear()
    done.set()
    looking.join()
    client.close()
    note_end()


class _Crew:
    """The contenders of this process. Each has its own random generator."""

    def __init__(
        self, url: str, ttl: float, names: list[str], ledger: str, dice: random.Random, *, mixed: bool, elsewhere: bool
    ) -> None:
        self.url, self.ttl, self.names, self.ledger, self.dice = url, ttl, names, ledger, dice
        self.mixed = mixed
        self.done = threading.Event()
        self.elsewhere = ThreadPoolExecutor(4) if elsewhere else None
        self.lost: dict[str, deque[tuple[Lease, ExitStack]]] = defaultdict(deque)
        self.async_lost: dict[str, deque[tuple[AsyncLease, AsyncExitStack]]] = defaultdict(deque)

    def open_clients(self) -> tuple[Client, AsyncClient]:
        place = {"url": self.url, "ttl": self.ttl, "outage_timeout": 2.0}
        blocking, asynchronous = multilock.connect(place), multilock.connect_async(place)
        # All contenders of one API share these lock objects. A lock object must know which contender entered it.
        self.shared = {name: blocking.lock(name, on_lost=tell_loss) for name in self.names}
        # A scope may be left in another task, so its body has no task that a loss could cancel.
        self.async_shared = {
            name: asynchronous.lock(name, cancel_on_lost=False, on_lost=tell_loss) for name in self.names
        }
        return blocking, asynchronous

    def close(self) -> None:
        if self.elsewhere:
            for name in self.names:
                self._end_lost(self.elsewhere, name)
            self.elsewhere.shutdown()

    def _dice(self, number: int) -> random.Random:
        return random.Random(f"{self.dice.random()} {number}")

    def _lock(self, client: Any, dice: random.Random) -> Any:
        """Choose the next lock to contend for, blocking or asyncio.

        Half of the mixed names have readers and writers, the other half permits. All mixed names have plain locks too.
        """
        name, kind = dice.choice(self.names), dice.random()
        if not self.mixed:
            return client.lock(name, fair=client.capabilities.fair and dice.random() < 0.7, on_lost=tell_loss)
        if kind < PLAIN:
            return client.lock(name, on_lost=tell_loss)
        if self.names.index(name) % 2:
            return client.semaphore(name, PERMITS, on_lost=tell_loss)
        both = client.read_write_lock(name, on_lost=tell_loss)
        return both.writer() if kind < PLAIN + WRITERS else both.reader()

    # ---- the blocking face

    def work(self, client: Client, number: int) -> None:
        dice, account = self._dice(number), Account(self.ledger)
        while not self.done.is_set():
            turn = Turn(number)
            try:
                if self.elsewhere and dice.random() < 0.5:
                    leave = dice.choice((self._leave_elsewhere, self._leave_a_stack))
                    leave(self.elsewhere, self.shared[dice.choice(self.names)], account, dice, turn)
                    continue
                lock: DistributedLock = self._lock(client, dice)
                if turn.had(lease := lock.try_acquire(timeout=_patience(dice))):
                    for pause in hold(lease, account, dice):
                        time.sleep(pause)
                    note_release(lease)
                    note_released(lease, lease.release())
            except BackendUnavailable:
                turn.had(None)
                time.sleep(0.05)
            except Exception:
                note("wrong", repr(traceback.format_exc()))
        account.close()

    def _leave_elsewhere(
        self, others: ThreadPoolExecutor, lock: DistributedLock, account: Account, dice: random.Random, turn: Turn
    ) -> None:
        scope = _scope(lock)
        turn.had(lease := next(scope))
        self._end_lost(others, lock.name)
        for pause in hold(lease, account, dice):
            time.sleep(pause)
        note_release(lease)
        note_released(lease, others.submit(_leave, scope).result())

    def _leave_a_stack(
        self, others: ThreadPoolExecutor, lock: DistributedLock, account: Account, dice: random.Random, turn: Turn
    ) -> None:
        """Hold a lease that an exit stack has entered.

        If the lease was lost, another thread closes the stack while the next lease is held through the same lock
        object. The next lease must survive this.
        """
        stack = ExitStack()
        turn.had(lease := stack.enter_context(lock))
        self._end_lost(others, lock.name)
        for pause in hold(lease, account, dice):
            time.sleep(pause)
        note_release(lease)
        if lease.is_held():
            note_released(lease, _close(stack))
        else:
            self.lost[lock.name].append((lease, stack))

    def _end_lost(self, others: ThreadPoolExecutor, name: str) -> None:
        for _ in range(len(self.lost[name])):
            lease, stack = self.lost[name].popleft()
            note_released(lease, others.submit(_close, stack).result())

    # ---- the asyncio face

    async def work_on_loop(self, client: AsyncClient, tasks: int) -> None:
        async with client:
            await asyncio.gather(*(self._work_in_task(client, 100 + number) for number in range(tasks)))
            for name in self.names:
                await self._end_lost_of_tasks(name)

    async def _work_in_task(self, client: AsyncClient, number: int) -> None:
        dice, account = self._dice(number), Account(self.ledger)
        while not self.done.is_set():
            turn = Turn(number)
            try:
                if self.elsewhere and dice.random() < 0.5:
                    leave = dice.choice((self._leave_in_another_task, self._leave_an_async_stack))
                    await leave(self.async_shared[dice.choice(self.names)], account, dice, turn)
                    continue
                lock: AsyncDistributedLock = self._lock(client, dice)
                patience = _patience(dice)
                if dice.random() < 0.2:  # a cancelled acquire must leave nothing behind
                    async with asyncio.timeout(patience):
                        lease: AsyncLease | None = await lock.acquire()
                else:
                    lease = await lock.try_acquire(timeout=patience)
                if turn.had(lease):
                    for pause in hold(lease, account, dice):
                        await asyncio.sleep(pause)
                    note_release(lease)
                    note_released(lease, await lease.release())
            except BackendUnavailable:
                turn.had(None)
                await asyncio.sleep(0.05)
            except TimeoutError:
                turn.had(None)
            except (Exception, asyncio.CancelledError):  # only the timeout above may cancel this task
                note("wrong", repr(traceback.format_exc()))
        account.close()

    async def _leave_in_another_task(
        self, lock: AsyncDistributedLock, account: Account, dice: random.Random, turn: Turn
    ) -> None:
        scope = _async_scope(lock)
        turn.had(lease := await anext(scope))
        await self._end_lost_of_tasks(lock.name)
        for pause in hold(lease, account, dice):
            await asyncio.sleep(pause)
        note_release(lease)
        note_released(lease, await asyncio.create_task(_leave_async(scope)))

    async def _leave_an_async_stack(
        self, lock: AsyncDistributedLock, account: Account, dice: random.Random, turn: Turn
    ) -> None:
        stack = AsyncExitStack()
        turn.had(lease := await stack.enter_async_context(lock))
        await self._end_lost_of_tasks(lock.name)
        for pause in hold(lease, account, dice):
            await asyncio.sleep(pause)
        note_release(lease)
        if lease.is_held():
            note_released(lease, await _close_async(stack))
        else:
            self.async_lost[lock.name].append((lease, stack))

    async def _end_lost_of_tasks(self, name: str) -> None:
        for _ in range(len(self.async_lost[name])):
            lease, stack = self.async_lost[name].popleft()
            note_released(lease, await asyncio.create_task(_close_async(stack)))


def _scope(lock: DistributedLock) -> Iterator[Lease]:
    """Hold the lock in a generator, as a framework does while it serves a request."""
    with lock as lease:
        yield lease


def _leave(scope: Iterator[Lease]) -> bool:
    try:
        next(scope, None)
    except LockLost:
        return False
    return True


def _close(stack: ExitStack) -> bool:
    try:
        stack.close()
    except LockLost:
        return False
    return True


async def _async_scope(lock: AsyncDistributedLock) -> AsyncIterator[AsyncLease]:
    async with lock as lease:
        yield lease


async def _leave_async(scope: AsyncIterator[AsyncLease]) -> bool:
    try:
        await anext(scope, None)
    except LockLost:
        return False
    return True


async def _close_async(stack: AsyncExitStack) -> bool:
    try:
        await stack.aclose()
    except LockLost:
        return False
    return True


class Turn:
    """One request for a lock, and its outcome."""

    def __init__(self, number: int, mode: str = "x") -> None:
        self.who = f"{os.getpid()}.{number}"
        note("asks", now(), self.who, mode)

    def had(self, lease: L | None) -> TypeGuard[L]:
        if lease is None:
            note("leaves", now(), self.who)
            return False
        note("enters", now(), self.who, _id(lease))
        return True


def _patience(dice: random.Random) -> float:
    if PATIENT and dice.random() < PATIENT:
        return PATIENCE
    return 0 if dice.random() < 0.1 else dice.uniform(0.1, 3.0)


def _id(lease: Lease | AsyncLease) -> str:
    return lease.owner.partition("@")[0]


def hold(
    lease: Lease | AsyncLease, account: Account, dice: random.Random, *, long: float = LONG_HOLD
) -> Iterator[float]:
    """Hold this lease for a while, and increment a counter under it. Yields the seconds to sleep."""
    began, held = now(), lease.is_held()
    assert isinstance(lease, Holding)
    if session := lease._kernel.watchdog.sessions.of.get(lease.granted.group):
        note("session", _id(lease), lease.granted.group)
        note("renewal", session.due, _id(lease))
    mode = lease.claim.mode
    note("got", began, lease.name, _id(lease), lease.token, int(held), mode)
    assert lease.token is not None
    value = _of_ledger(account.read, lease.name, lease.token) if mode == "x" else None
    for_long = dice.random() < long
    until = began + (lease.ttl * dice.uniform(0.4, 1.3) if for_long else dice.uniform(0.0, SHORT_HOLD))
    noted = 0.0
    while True:
        asked = now()
        if not lease.is_held():
            note("over", asked, _id(lease))
            break
        if asked - noted >= NOTE_EVERY:
            note("held", asked, _id(lease))
            noted = asked
        # a lease at risk is held until it is renewed or lost
        if asked >= until and lease.state is not LeaseState.AT_RISK:
            break
        yield dice.choice((0.0, 0.001, 0.005))
    if value is not None:  # written even after the lease has ended, because the ledger must then refuse the token
        _of_ledger(account.write, lease.name, lease.token, value + 1)


def _of_ledger(ask: Callable[..., int | None], *words: object) -> int | None:
    """Send a request to the ledger of the harness. A slow reply counts as a stall, because it blocks the event loop."""
    asked = now()
    value = ask(*words)
    if now() - asked > STALLED:
        note("stall", asked, now())
    return value


def note_release(lease: Lease | AsyncLease) -> None:
    note("release", now(), _id(lease))


def note_released(lease: Lease | AsyncLease, ours: bool) -> None:
    note("released", now(), _id(lease), int(ours))


def tell_loss(loss: Loss) -> None:
    at = now()
    lease = loss.lease
    note("lost", at, lease.owner.partition("@")[0], loss.reason.value, lost_at(loss.valid_until, lease.ttl))


def note_end() -> None:
    """Record the threads and sockets that closed clients left behind.

    Wait a moment for threads and sockets that are just ending. The threads of gRPC close the socket of a channel only
    after its ``close()`` has returned.
    """
    until = now() + 3.0
    while True:
        threads, sockets = _threads_left(), _sockets_left()
        if not (threads or sockets) or now() > until:
            note("end", ",".join(threads) or "-", sockets)
            return
        time.sleep(0.01)


def _threads_left() -> list[str]:
    names = (thread.name for thread in threading.enumerate())
    return sorted(name for name in names if name.startswith("multilock") and name != log_thread.THREAD)


def _sockets_left() -> int:
    left = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            left += os.readlink(descriptor).startswith("socket:")
        except OSError:  # the descriptor used for listing the folder
            continue
    return left
