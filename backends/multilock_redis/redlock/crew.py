"""Threads that ask one server, so that several are asked at once, and one that is silent keeps nobody waiting.

A thread is made when all others are busy, up to a limit, and kept: an idle one costs nothing. What a server that is
down was to be asked is refused at once, but for one question now and then that finds out whether it is back. So what
nobody answers makes no queue, however long the server is gone. It is down if it says so, or has been silent for long:
a limit that was short, a connection that was cut and a question that was called off say nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from multilock import BackendUnavailable, system
from multilock.backend import start_worker
from multilock.telling import logger
from multilock_redis.transport import is_down

__all__ = ["Crew", "NotAsked"]

Subject = TypeVar("Subject")
Said = TypeVar("Said")

AT_ONCE = 16  # questions under way to one server
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0  # seconds between questions to a server that is down
SILENCES = 3  # in a row, and a server is down that does not say so …
SILENT_FOR = 0.2  # … seconds each: a question that matters has 0.25 (`LEAST_LIMIT`), some of which it may wait here


class NotAsked(BackendUnavailable):
    """A question that we called off before the server was asked."""

    def __init__(self, message: str) -> None:
        super().__init__(message, unknown=False)


class Crew(Generic[Subject]):
    def __init__(
        self, subject: Subject, name: str, now: Callable[[], float], back: Callable[[], None] | None = None
    ) -> None:
        """``back`` is called when a server that was down has answered, on a thread of the crew."""
        self._subject = subject
        self._name = name
        self._now = now
        self._back = back
        self._jobs: system.SimpleQueue[Callable[[], None] | None] = system.SimpleQueue()
        self._idle: system.SimpleQueue[None] = system.SimpleQueue()  # one for each thread that waits for a job
        self._threads = 0
        self._lock = system.Lock()
        self._pause = 0.0  # 0: it is up
        self._silences = 0
        self._again_at = 0.0
        self._why: BaseException | None = None  # it was silent for
        self._trying = False
        self._closed = False

    def ask(
        self, question: Callable[[Subject, float], Said], deadline: float, tell: Callable[[Said | Exception], None]
    ) -> None:
        """``tell`` gets the answer, or the exception, on a thread of the crew; after `close` at once."""
        if self._closed:  # a push may come that late: no thread would end that was made for it
            tell(NotAsked(f"the client that asks {self._name} was closed"))
            return

        def job() -> None:
            try:
                said: Said | Exception = self._answer(question, deadline)
            except Exception as error:
                said = error
            try:
                tell(said)
            except Exception:  # a defect of ours must not cost the thread
                logger.exception("what %s said was not understood", self._name)

        self._jobs.put(job)
        try:
            self._idle.get_nowait()
        except system.Empty:
            self._one_more()

    def is_up(self) -> bool:
        """It has answered, to whomever: from now on all questions are asked. Whether it was down."""
        with self._lock:
            was_down = self._pause > 0.0
            self._silences, self._pause, self._why = 0, 0.0, None
        return was_down

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for _ in range(self._threads):
                self._jobs.put(None)

    def _one_more(self) -> None:
        with self._lock:
            if self._threads == AT_ONCE:
                return
            self._threads += 1
        worker = start_worker(self._work, "multilock-redlock")
        if worker.missing and self._threads == 1 and (job := self._jobs.get()):  # perhaps the interpreter is exiting
            job()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job
            self._idle.put(None)

    def _answer(self, question: Callable[[Subject, float], Said], deadline: float) -> Said:
        now = self._now()
        if now >= deadline:
            raise NotAsked(f"{self._name} has too many questions to answer")
        with self._lock:
            if self._pause and (self._trying or now < self._again_at):
                raise NotAsked(f"{self._name} was down just now") from self._why
            tries = self._trying = bool(self._pause)
        try:
            said = question(self._subject, deadline - now)
        except NotAsked:
            raise
        except BackendUnavailable as silence:
            self._is_silent(silence, self._now() - now)
            raise
        else:
            if self.is_up() and self._back:
                self._back()
            return said
        finally:
            if tries:
                self._trying = False

    def _is_silent(self, silence: BackendUnavailable, took: float) -> None:
        with self._lock:
            long = took >= SILENT_FOR
            self._silences += long
            if is_down(silence) or (long and self._silences >= SILENCES):
                self._why = silence.__cause__
                self._pause = min(max(FIRST_PAUSE, 2 * self._pause), LONGEST_PAUSE)
                self._again_at = self._now() + self._pause
