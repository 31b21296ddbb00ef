"""Log from any thread without waiting: lines go into a queue, and one thread of the process calls the log handlers.

A handler, a filter, a format or the ``repr`` of an object may block (a full stderr) or raise. Threads that keep time,
renew, listen or wait for a lock run none of these: they put a line into the queue and continue.
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

__all__ = ["THREAD", "QueuedLogger", "at_exit", "begin", "defer", "flush", "logger"]

BACKLOG = 10_000  # lines kept for a handler that hangs; further lines are dropped and counted
THREAD = "multilock-log"

_Raised = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
_MOMENT = ("created", "msecs", "relativeCreated", "thread", "threadName", "taskName")  # copied from the call

_complain = logging.NullHandler().handleError


class QueuedLogger:
    """The logger ``name`` of `logging`, for threads that must not wait.

    Its methods return at once, run no code of the user and never raise. Time, thread, place and context of each line
    are those of the call.
    """

    def __init__(self, name: str) -> None:
        self._log = logging.getLogger(name)

    def debug(self, message: str, *args: object, **more: Any) -> None:
        """Log at level DEBUG."""
        self._say(logging.DEBUG, message, args, **more)

    def info(self, message: str, *args: object, **more: Any) -> None:
        """Log at level INFO."""
        self._say(logging.INFO, message, args, **more)

    def warning(self, message: str, *args: object, **more: Any) -> None:
        """Log at level WARNING."""
        self._say(logging.WARNING, message, args, **more)

    def error(self, message: str, *args: object, **more: Any) -> None:
        """Log at level ERROR."""
        self._say(logging.ERROR, message, args, **more)

    def critical(self, message: str, *args: object, **more: Any) -> None:
        """Log at level CRITICAL."""
        self._say(logging.CRITICAL, message, args, **more)

    def exception(self, message: str, *args: object) -> None:
        """Log at level ERROR, with the exception that is being handled."""
        self._say(logging.ERROR, message, args, exc_info=True)

    def log(self, level: int, message: str, *args: object, **more: Any) -> None:
        """Log at ``level``."""
        self._say(level, message, args, **more)

    def wants(self, level: int) -> bool:
        """Return what ``isEnabledFor`` would, without logging's lock, which a hanging configuration may hold."""
        log: logging.Logger | None = self._log
        while log and not log.level:
            log = log.parent
        if log and level < log.level:  # the usual case first
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
        moment = logging.LogRecord(  # without the arguments, because formatting would call their code
            self._log.name, level, code.co_filename, frame.f_lineno, message, (), _raised(exc_info), code.co_name
        )
        _log_thread.put(_Entry(self._log, moment, args, extra).tell)


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
        self._context = contextvars.copy_context()  # a filter may add the current request to every record

    def tell(self) -> None:
        """Call the handlers. A failure is printed as `logging` prints the failure of a handler."""
        try:
            self._context.run(self._tell)
        except BaseException:  # including SystemExit, because the next record must still be logged
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


class _LogThread:
    """The queue and its thread, which starts with the first line and never ends: at exit no thread could be started.

    A record may come from a signal handler or a finalizer, between any two lines of code. So nothing here holds a lock
    for longer than a moment.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Start with an empty queue. Also called in a forked child, because the parent logs its own lines."""
        self._lines: system.SimpleQueue[Callable[[], object]] = system.SimpleQueue()
        # Each next(self._drops) counts one dropped line, in one atomic step. Reading the counter takes a next() too, so
        # `_looks` counts the reads, which are subtracted.
        self._drops = count()
        self._looks = self._drops_told = 0
        self._started = system.Lock()  # never released: the thread that acquires it starts the worker
        self._worker: Worker | None = None
        self._thread: int | None = None

    def put(self, line: Callable[[], object]) -> None:
        if system.get_ident() == self._thread:
            return  # a handler logged this line: it would receive the line and log again, forever
        if self._lines.qsize() < BACKLOG:
            self._lines.put(line)
        else:
            next(self._drops)
        self._start()

    def _start(self) -> bool:
        """Start the worker. Returns False if the process cannot start a thread now. The lines then stay in the
        queue."""
        if self._started.acquire(blocking=False):
            lines = self._lines
            self._worker = start_worker(lambda: self._run(lines), THREAD)
        elif self._worker and self._worker.missing:
            self._worker.begin()  # start the thread here too: there may be no other thread that would start it
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
        """Have the worker call ``call()`` soon. Meant for finalizers, because a finalizer may run in any thread while
        that thread holds any lock."""

        def safely() -> None:
            try:
                call()
            except BaseException:
                with contextlib.suppress(BaseException):
                    traceback.print_exc()

        self._lines.put(safely)
        self._start()

    def flush(self, seconds: float) -> bool:
        """Wait at most ``seconds`` until all earlier lines are handled. Return whether they were."""
        if system.get_ident() == self._thread or (self._thread is None and self._lines.empty()):
            return True
        if not self._start():
            return False
        turn = system.Lock()
        turn.acquire()
        self._lines.put(turn.release)
        # Wait in steps: if the machine was suspended, the worker still gets some time before the limit is over.
        return any(turn.acquire(timeout=seconds / 10) for _ in range(10))

    def at_exit(self, seconds: float) -> None:
        """If no thread can be started any longer, handle the remaining lines in the calling thread. This is called at
        the exit of the interpreter, after all clients have released their locks."""
        if self.flush(seconds) or self._thread is not None:
            return
        with contextlib.suppress(system.Empty):
            while True:
                self._lines.get_nowait()()
        self._tell_drops()


def _complete(record: logging.LogRecord) -> bool:
    """Set the fields of a lock in every record, because a format may use them. The fields are None if the record
    concerns no held lock."""
    for field in ("lock_name", "lock_owner", "lock_token"):
        record.__dict__.setdefault(field, None)
    return True


_log = logging.getLogger("multilock")
_log.addFilter(_complete)
logger = QueuedLogger(_log.name)
_log_thread = _LogThread()
defer, flush, at_exit, begin = _log_thread.defer, _log_thread.flush, _log_thread.at_exit, _log_thread.begin
