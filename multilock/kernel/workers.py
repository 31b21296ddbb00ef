"""Threads that carry requests: started on demand, few, ended when idle."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

from multilock.telling import logger

__all__ = ["ThreadWorkers"]

IDLE = 15.0  # seconds; longer than the renewal period of the default ttl, so that a worker is not started for each


class ThreadWorkers:
    """At most ``limit`` threads take jobs in order of arrival. ``submit`` never blocks, jobs must not raise.

    The process may have no more threads: then ``later(call)`` has the start tried again soon, on a thread that runs.
    """

    def __init__(
        self,
        spawn: Callable[[Callable[[], None], str], None],
        name: str,
        limit: int,
        later: Callable[[Callable[[], None]], None],
    ) -> None:
        self._spawn = spawn
        self._later = later
        self._name = name
        self._limit = limit
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.RLock()
        self._threads = 0
        self._idle = 0  # threads that wait and have no job coming: each is reserved by the submit that counts it down
        self._backlog = 0  # jobs for which no thread was free
        self._refused = False  # a start was, and is going to be tried again
        self._closed = False

    def submit(self, job: Callable[[], None]) -> None:
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
            self._start()

    def _start(self) -> bool:
        try:
            self._spawn(self._run, self._name)
        except BaseException as error:  # interrupted too: it may have begun, and one more than the limit does no harm
            with self._lock:
                self._threads -= 1
                self._backlog += 1
                again, self._refused = self._refused, True
            if not again:
                logger.error("no thread for %s yet: %s", self._name, error)
                self._later(self._start_again)
            if not isinstance(error, RuntimeError):
                raise
            return False
        return True

    def _start_again(self) -> None:
        while True:
            with self._lock:
                if not self._backlog or self._threads >= self._limit:
                    self._refused = False
                    return
                self._backlog -= 1
                self._threads += 1
            if not self._start():
                self._later(self._start_again)
                return

    def close(self) -> None:
        """The jobs already submitted are still done; the threads end after them."""
        with self._lock:
            self._closed = True
            threads = self._threads
        for _ in range(threads):
            self._jobs.put(None)

    def _run(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=IDLE)
            except Empty:
                with self._lock:
                    if not self._idle:
                        continue  # a job for this thread is on its way
                    self._idle -= 1
                    self._threads -= 1
                    return
            if job is None:
                return
            job()
            del job  # an idle thread keeps nothing alive
            with self._lock:
                if self._backlog:
                    self._backlog -= 1
                else:
                    self._idle += 1
