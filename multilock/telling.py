"""How the library says something: by a queue, and one thread of the process that calls the log handlers.

A handler, a filter, a format and the ``repr`` of an object may block or raise, as a full stderr does. Threads that keep
time, renew, listen or wait for a lock run none of that: they leave a line here, and go on.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import sys
import traceback
from collections.abc import Callable, Mapping
from itertools import count
from types import TracebackType
from typing import Any

from multilock import system
from multilock.kernel.worker import Worker, start_worker

__all__ = ["THREAD", "Teller", "at_exit", "begin", "defer", "flush", "logger"]

BACKLOG = 10_000  # lines kept for a handler that hangs; those that come then are dropped, and counted
THREAD = "multilock-log"

_Raised = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
_MOMENT = ("created", "msecs", "relativeCreated", "thread", "threadName", "taskName")  # as at the call

_complain = logging.NullHandler().handleError


class Teller:
    """A logger of this name for who must not wait: its methods return at once, run no code of the user's and never
    raise. Time, thread, place and context of each line are those of the call."""

    def __init__(self, name: str) -> None:
        self._log = logging.getLogger(name)

    def debug(self, message: str, *args: object, **more: Any) -> None:
        self._say(logging.DEBUG, message, args, **more)

    def info(self, message: str, *args: object, **more: Any) -> None:
        self._say(logging.INFO, message, args, **more)

    def warning(self, message: str, *args: object, **more: Any) -> None:
        self._say(logging.WARNING, message, args, **more)

    def error(self, message: str, *args: object, **more: Any) -> None:
        self._say(logging.ERROR, message, args, **more)

    def critical(self, message: str, *args: object, **more: Any) -> None:
        self._say(logging.CRITICAL, message, args, **more)

    def exception(self, message: str, *args: object) -> None:
        self._say(logging.ERROR, message, args, exc_info=True)

    def log(self, level: int, message: str, *args: object, **more: Any) -> None:
        self._say(level, message, args, **more)

    def wants(self, level: int) -> bool:
        """Return what ``isEnabledFor`` would, without the lock of logging: a configuration that hangs has it."""
        log: logging.Logger | None = self._log
        while log and not log.level:
            log = log.parent
        if log and level < log.level:  # most often, so that it comes first
            return False
        return not self._log.disabled and self._log.manager.disable < level

    def _say(
        self,
        level: int,
        message: str,
        args: tuple[object, ...],
        exc_info: object = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        if not self.wants(level):
            return
        frame = sys._getframe(2)
        code = frame.f_code
        moment = logging.LogRecord(  # without the arguments, which it would look into
            self._log.name, level, code.co_filename, frame.f_lineno, message, (), _raised(exc_info), code.co_name
        )
        _telling.put(_Entry(self._log, moment, args, extra).tell)


def _raised(exc_info: object) -> _Raised | None:
    if isinstance(exc_info, BaseException):
        return type(exc_info), exc_info, exc_info.__traceback__
    return sys.exc_info() if exc_info else None


class _Entry:
    __slots__ = ("_args", "_context", "_extra", "_log", "_moment")

    def __init__(
        self,
        log: logging.Logger,
        moment: logging.LogRecord,
        args: tuple[object, ...],
        extra: Mapping[str, Any] | None,
    ) -> None:
        self._log = log
        self._moment = moment
        self._args = args
        self._extra = extra
        self._context = contextvars.copy_context()  # a filter may add the request under way to every record

    def tell(self) -> None:
        """Call the handlers. A failure is shown as `logging` shows that of a handler."""
        try:
            self._context.run(self._tell)
        except BaseException:  # SystemExit too: the next line is told all the same
            with contextlib.suppress(BaseException):
                _complain(self._moment)

    def _tell(self) -> None:
        log, moment = self._log, self._moment
        record = log.makeRecord(
            log.name,
            moment.levelno,
            moment.pathname,
            moment.lineno,
            moment.msg,
            self._args,
            moment.exc_info,
            moment.funcName,
            self._extra,
        )
        for field in _MOMENT:
            if field in moment.__dict__:
                record.__dict__[field] = moment.__dict__[field]
        log.handle(record)


class _Telling:
    """The queue and its thread, which starts with the first line and does not end: who would start it at exit?

    Nothing here takes a lock for longer than a moment: a line may come from a signal handler, or from a finalizer that
    the garbage collector runs between any two others.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Also in a forked child: the lines of its parent are told there."""
        self._lines: system.SimpleQueue[Callable[[], object]] = system.SimpleQueue()
        self._drops = count()  # one atomic step for each line dropped …
        self._looks = self._drops_told = 0  # … and for each look at it
        self._started = system.Lock()  # taken by who starts the thread, for good
        self._worker: Worker | None = None
        self._thread: int | None = None

    def put(self, line: Callable[[], object]) -> None:
        if system.get_ident() == self._thread:
            return  # said by a handler, who would hear it, and say it again, for ever
        if self._lines.qsize() < BACKLOG:
            self._lines.put(line)
        else:
            next(self._drops)
        self._start()

    def _start(self) -> bool:
        """Return False if the process has no thread for it yet: the lines wait."""
        if self._started.acquire(blocking=False):
            lines = self._lines
            self._worker = start_worker(lambda: self._run(lines), THREAD)
        elif self._worker and self._worker.missing:
            self._worker.begin()  # here too: perhaps no thread keeps time that would do it
        return not (self._worker and self._worker.missing)

    def _run(self, lines: system.SimpleQueue[Callable[[], object]]) -> None:
        self._thread = system.get_ident()
        while True:
            if lines.empty():
                self._tell_drops()
            lines.get()()

    def _tell_drops(self) -> None:
        drops = next(self._drops) - self._looks
        self._looks += 1
        if new := drops - self._drops_told:
            self._drops_told = drops
            message = "%d lines of this log were dropped: its handlers hang"
            moment = logging.LogRecord(_log.name, logging.WARNING, __file__, 0, message, (), None)
            _Entry(_log, moment, (new,), None).tell()

    def defer(self, call: Callable[[], object]) -> None:
        """Have it called soon: for a finalizer, which may run in any thread, inside any lock."""

        def safely() -> None:
            try:
                call()
            except BaseException:
                with contextlib.suppress(BaseException):
                    traceback.print_exc()

        self._lines.put(safely)
        self._start()

    def flush(self, seconds: float) -> bool:
        """Whether all that was said before has been told within so many seconds."""
        if system.get_ident() == self._thread or (self._thread is None and self._lines.empty()):
            return True
        if not self._start():
            return False
        turn = system.Lock()
        turn.acquire()
        self._lines.put(turn.release)
        # In steps: when the machine stood still, the thread that tells comes first all the same.
        return any(turn.acquire(timeout=seconds / 10) for _ in range(10))

    def at_exit(self, seconds: float) -> None:
        """Where no thread can start any more, the exiting one tells the rest itself: the locks are given back."""
        if self.flush(seconds) or self._thread is not None:
            return
        with contextlib.suppress(system.Empty):
            while True:
                self._lines.get_nowait()()
        self._tell_drops()


def _complete(record: logging.LogRecord) -> bool:
    """A format may name these in every record: None where it is about no lock, or about none that is held."""
    for field in ("lock_name", "lock_owner", "lock_token"):
        record.__dict__.setdefault(field, None)
    return True


_log = logging.getLogger("multilock")
_log.addFilter(_complete)
logger = Teller(_log.name)
_telling = _Telling()
defer, flush, at_exit, begin = _telling.defer, _telling.flush, _telling.at_exit, _telling.begin
