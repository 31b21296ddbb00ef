"""A clock that moves only when the test moves it, and threads that run only when the test runs them.

`HandRuntime` replaces the `multilock.kernel.runtime.Runtime` of the kernel, the code that all backends share. The
kernel is not a public interface, and a client of `connect` always uses the real clock::

    from multilock.config import settings_for
    from multilock.kernel.acquire import acquire
    from multilock.kernel.client import Kernel
    from multilock.kernel.blocking import BlockingFace, run
    from multilock.kernel.lock_options import want
    from multilock.lock import HeldLease
    from multilock.testing import HandRuntime
    from multilock_memory import open_backend

    runtime = HandRuntime()
    backend = open_backend("memory://by-hand", {})
    kernel = Kernel(backend, settings_for(backend.scheme, {"ttl": 30}), runtime, BlockingFace)
    lease = run(acquire(kernel, want(kernel, "orders/42", HeldLease), timeout=0))
    runtime.advance(100)          # on the way the watchdog renews, at its exact times
    assert lease.is_held()
    runtime.jump(30)              # the process did not run meanwhile, as after SIGSTOP
    assert not lease.is_held()
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable

from multilock.kernel.hard_fence import Killer
from multilock.kernel.runtime import ThreadBell, ThreadEvent, Workers
from multilock.kernel.ticking_thread import Ticker

__all__ = ["HandRuntime", "HandWorkers"]

STEPS_AT_ONCE = 10_000  # a ticker that makes this many steps at one moment is in an endless loop
REAL_LIMIT = 10.0  # real seconds for which a thread waits for the test to move the clock


class HandRuntime:
    """A `multilock.kernel.runtime.Runtime` driven by the test. It behaves the same each time for the same ``seed``.

    *Time* moves when the test calls `advance`, or when the thread that made this object waits: ``event.wait(5)`` moves
    the clock until the event is set or five seconds have passed. A *ticker* stands for a thread that works in steps,
    such as the watchdog. Every step that becomes due meanwhile runs. A wait without a timeout for an event that nothing
    can set raises RuntimeError instead of hanging.

    *Threads*: ``spawn`` and workers run a job in the calling thread, at once. Inside a step of a ticker the job runs
    right after that step. `hold_jobs` delays the workers' jobs, as a slow server would. With ``threads=True`` spawned
    jobs run in real threads. A wait in such a thread ends when the clock has passed its timeout. After ten real seconds
    the wait raises RuntimeError.
    """

    def __init__(self, *, start: float = 1000.0, seed: int = 0, threads: bool = False) -> None:
        self._now = start
        self._random = random.Random(seed)
        self._threads = threads
        self._driver = threading.current_thread()
        self._tickers: list[_HandTicker] = []
        self._killers: list[_HandKiller] = []
        # Jobs that run after the present step: those of spawned threads first, since the jobs of workers may take time.
        self._spawned: deque[Callable[[], None]] = deque()
        self._deferred: deque[Callable[[], None]] = deque()
        self._held: deque[Callable[[], None]] | None = None
        self._inside = 0  # how many steps run now: a step may run inside the wait of another
        self._moved = threading.Condition()

    # The methods of a Runtime

    def now(self) -> float:
        """Return the seconds on the clock."""
        return self._now

    def wall(self) -> int:
        """Return the time of the clock in microseconds."""
        return round(self._now * 1_000_000)

    def uniform(self, low: float, high: float) -> float:
        """Return a random number, which depends only on ``seed`` and the calls before."""
        return self._random.uniform(low, high)

    def event(self) -> ThreadEvent:
        """Return an event whose waits use this clock."""
        return _HandEvent(self)

    def bell(self) -> ThreadBell:
        """Return a bell whose waits use this clock."""
        return _HandBell(self)

    def spawn(self, run: Callable[[], None], name: str) -> None:
        """Run a job that the product gave to a new thread: in a real thread with ``threads=True``, otherwise in this
        thread."""
        if self._threads:
            threading.Thread(target=run, name=name, daemon=True).start()
        else:
            self._run_soon(run, self._spawned)

    def workers(self, name: str, limit: int, or_here: bool = False) -> Workers:
        """Return workers that run their jobs in the calling thread."""
        return HandWorkers(self)

    def killer(self) -> Killer:
        """Return a substitute for the timer that kills the process (``hard_fence``). The substitute only records its
        time: see `kills_at`."""
        self._killers.append(killer := _HandKiller())
        return killer

    def ticker(self, step: Callable[[], float], died: Callable[[BaseException], None], name: str) -> Ticker:
        """Return a ticker whose steps run when the clock reaches their time."""
        ticker = _HandTicker(self, step, died)
        self._tickers.append(ticker)
        return ticker

    # The methods by which the test moves the clock and runs jobs

    @property
    def kills_at(self) -> float:
        """The time at which ``hard_fence`` would kill the process, as planned now. ``math.inf`` means never."""
        return min((killer.when for killer in self._killers), default=math.inf)

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass. Each step that becomes due runs at its exact time, in order."""
        self.advance_to(self._now + seconds)

    def advance_to(self, when: float) -> None:
        """Let time pass until ``when``, as `advance` does."""
        while self._next() <= when:
            self._run_next()
        self._move(when)

    def jump(self, seconds: float) -> None:
        """Let ``seconds`` pass in which nothing of this process runs, as after SIGSTOP. `settle` then runs the overdue
        steps."""
        self._move(self._now + seconds)

    def settle(self) -> None:
        """Run everything that is due now."""
        self.advance(0.0)

    def hold_jobs(self) -> None:
        """Keep all further jobs of workers back until `release_jobs`."""
        self._held = self._held if self._held is not None else deque()

    @property
    def held_jobs(self) -> int:
        """The number of jobs that are kept back."""
        return len(self._held or ())

    def release_jobs(self, count: int | None = None) -> None:
        """Run the oldest ``count`` jobs that were kept back. Without ``count``, run all jobs and stop keeping jobs
        back."""
        held = self._held or deque()
        if count is None:
            self._held = None
        for _ in range(len(held) if count is None else count):
            held.popleft()()

    # Internal

    def _move(self, when: float) -> None:
        with self._moved:
            self._now = max(self._now, when)
            self._moved.notify_all()

    def _next(self) -> float:
        return min((ticker.due for ticker in self._tickers if not ticker.running), default=math.inf)

    def _run_next(self) -> None:
        ticker = min((each for each in self._tickers if not each.running), key=lambda each: each.due)
        self._move(ticker.due)
        self._inside += 1
        try:
            ticker.run()
        finally:
            self._inside -= 1
        if not self._inside:
            while waiting := self._spawned or self._deferred:
                waiting.popleft()()

    def _run_soon(self, job: Callable[[], None], waiting: deque[Callable[[], None]]) -> None:
        # A job never runs inside a step, because the step may hold a lock that the job needs.
        if self._inside:
            waiting.append(job)
        else:
            job()

    def _submit(self, job: Callable[[], None]) -> None:
        if self._held is not None:
            self._held.append(job)
        else:
            self._run_soon(job, self._deferred)

    def _wait(self, event: _HandEvent, timeout: float | None) -> bool:
        until = math.inf if timeout is None else self._now + timeout
        if threading.current_thread() is not self._driver:
            return self._wait_in_thread(event, until)
        while not event.is_set():
            following = min(self._next(), until)
            if following == math.inf:
                raise RuntimeError("this wait would never end: no step is due that could set the event")
            if following == until and self._next() > until:
                self._move(until)
                break
            self._run_next()
        return event.is_set()

    def _wait_in_thread(self, event: _HandEvent, until: float) -> bool:
        limit = time.monotonic() + REAL_LIMIT
        with self._moved:
            while not event.is_set() and self._now < until:
                if not self._moved.wait(limit - time.monotonic()):
                    left = until - self._now
                    until_end = f", and its wait ends in {left:g} s of the test's clock" if left < math.inf else ""
                    raise RuntimeError(
                        f"nobody set the event within {REAL_LIMIT:g} real seconds{until_end}: set it, or call advance()"
                    )
        return event.is_set()


class _HandKiller:
    when = math.inf

    def at(self, when: float) -> None:
        self.when = when

    def close(self) -> None:
        self.when = math.inf


class _HandEvent:
    def __init__(self, runtime: HandRuntime) -> None:
        self._runtime = runtime
        self._set = False

    def set(self) -> None:
        with self._runtime._moved:
            self._set = True
            self._runtime._moved.notify_all()

    def clear(self) -> None:
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout: float | None = None) -> bool:
        return self._runtime._wait(self, timeout)


class _HandBell:
    def __init__(self, runtime: HandRuntime) -> None:
        self._event = _HandEvent(runtime)
        self.ring = self._event.set

    def wait(self, seconds: float) -> bool:
        rang = self._event.wait(None if seconds == math.inf else seconds)
        self._event.clear()
        return rang


class HandWorkers:
    """Workers whose jobs run when they are submitted, or when the test releases them."""

    def __init__(self, runtime: HandRuntime) -> None:
        self._runtime = runtime
        self._closed = False

    def submit(self, job: Callable[[], None]) -> None:
        """Run the job, or keep it back."""
        if not self._closed:
            self._runtime._submit(job)

    def close(self) -> None:
        """Ignore all further jobs."""
        self._closed = True


class _HandTicker:
    def __init__(self, runtime: HandRuntime, step: Callable[[], float], died: Callable[[BaseException], None]) -> None:
        self._runtime = runtime
        self._step = step
        self._died = died
        self._poked = False
        self._dead = False
        self._at = (-math.inf, 0)  # the time of the last step, and how many steps ran at that time
        self.due = math.inf
        self.running = False

    def start(self) -> str | None:
        self.due = self._runtime.now()
        return None

    def poke(self, at: float) -> None:
        if self.running:
            self._poked = True
        elif not self._dead:
            self.due = min(self.due, max(at, self._runtime.now()))

    def late(self) -> float:
        return math.inf if self._dead else max(0.0, self._runtime.now() - self.due)

    def close(self) -> None:
        self.due = math.inf

    def run(self) -> None:
        now = self._runtime.now()
        self._at = (now, self._at[1] + 1 if self._at[0] == now else 1)
        if self._at[1] > STEPS_AT_ONCE:
            raise RuntimeError("a ticker spins: each of its steps asks for another one at once")
        self.running, self._poked, self.due = True, False, -math.inf
        try:
            at = self._step()
        except BaseException as error:
            self._dead, self.due = True, math.inf
            self._died(error)
            return
        finally:
            self.running = False
        if self.due == -math.inf:  # not changed by the step, so this ticker was not closed
            self.due = now if self._poked else max(at, now)
