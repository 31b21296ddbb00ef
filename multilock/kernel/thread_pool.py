"""A small pool of threads for requests, started on demand and ended when idle."""

from __future__ import annotations

from collections.abc import Callable

from multilock import system
from multilock.kernel.interrupts import surely
from multilock.kernel.worker import is_any_missing

__all__ = ["ThreadPool"]

IDLE = 15.0  # seconds until an idle thread ends; a renewal period is shorter by default, so one thread serves several


class ThreadPool:
    """At most ``limit`` threads that take jobs in order of arrival. ``submit`` does not block. Jobs must not raise.

    A thread that the operating system refuses counts as a thread that begins late: ``spawn`` starts it as soon as
    possible. If ``or_here`` is True and no thread of the pool runs meanwhile, `submit` itself runs a job in the calling
    thread.
    """

    def __init__(
        self, spawn: Callable[[Callable[[], None], str], None], name: str, limit: int, or_here: bool = False
    ) -> None:
        self._spawn = spawn
        self._name = name
        self._limit = limit
        self._jobs: system.SimpleQueue[Callable[[], None] | None] = system.SimpleQueue()
        self._lock = system.RLock()
        self._or_here = or_here
        self._threads = 0
        self._running = 0  # the threads that run, without those that the operating system has refused so far
        self._idle = 0  # waiting threads for which no job is on its way; `submit` reserves one by lowering this number
        self._backlog = 0  # jobs that were submitted while no thread was free
        self._closed = False

    def submit(self, job: Callable[[], None]) -> None:
        """Have a thread run ``job()``. Does nothing after `close`."""
        start = False
        with self._lock:
            if self._closed:
                return
            if self._idle:
                self._idle -= 1
            elif self._threads < self._limit:
                self._threads += 1
                start = True
            else:
                self._backlog += 1
        self._jobs.put(job)
        if start:
            try:
                surely(self._spawn, self._run, self._name)
            except BaseException:  # interrupted twice: the next job starts a thread, and an extra one is harmless
                with self._lock:
                    self._threads -= 1
                    self._backlog += 1
                raise
        if self._or_here and not self._running and is_any_missing():
            self._do_here()

    def _do_here(self) -> None:
        try:
            job = self._jobs.get_nowait()
        except system.Empty:
            return
        if job is None:  # None is no job: it tells one thread of the pool to end, so it is put back for that thread
            self._jobs.put(None)
            return
        job()
        self._job_done()

    def _job_done(self) -> None:
        with self._lock:
            if self._backlog:
                self._backlog -= 1
            else:
                self._idle += 1

    def close(self) -> None:
        """End the threads after the jobs that were submitted already."""
        with self._lock:
            self._closed = True
            threads = self._threads
        for _ in range(threads):
            self._jobs.put(None)

    def _run(self) -> None:
        with self._lock:
            self._running += 1
        try:
            self._do_jobs()
        finally:
            with self._lock:
                self._running -= 1

    def _do_jobs(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=IDLE)
            except system.Empty:
                with self._lock:
                    if not self._idle:
                        continue  # a job for this thread is on its way
                    self._idle -= 1
                    self._threads -= 1
                    return
            if job is None:
                return
            job()
            del job  # so that an idle thread keeps no object alive
            self._job_done()
