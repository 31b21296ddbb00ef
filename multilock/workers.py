"""Threads that carry requests: started on demand, few, ended when idle."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

__all__ = ["ThreadWorkers"]

logger = logging.getLogger("multilock")

IDLE = 15.0  # seconds; longer than the renewal period of the default ttl, so that a worker is not started for each


class ThreadWorkers:
    """At most ``limit`` threads take jobs in order of arrival. ``submit`` never blocks, jobs must not raise."""

    def __init__(self, spawn: Callable[[Callable[[], None], str], None], name: str, limit: int) -> None:
        self._spawn = spawn
        self._name = name
        self._limit = limit
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._idle = 0  # threads that wait and have no job coming: each is reserved by the submit that counts it down
        self._backlog = 0  # jobs for which no thread was free
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

    def _start(self) -> None:
        try:
            self._spawn(self._run, self._name)
        except RuntimeError as error:  # the process may have no more threads: the job waits for the next that starts
            logger.error("no thread for %s: %s", self._name, error)
            with self._lock:
                self._threads -= 1
                self._backlog += 1

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
