"""The end of a command: its exit code, and one line on stderr instead of a traceback.

CMD is the command that ``multilock run`` and ``multilock elect`` start.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from contextlib import suppress
from typing import NoReturn

from multilock import log_thread, system
from multilock.errors import (
    BackendRejected,
    BackendUnavailable,
    CapabilityMissing,
    LockLost,
    LockTimeout,
    MultilockError,
)
from multilock.kernel.worker import start_worker

__all__ = ["LOST", "TAKEN", "UNREACHABLE", "USAGE", "code_of", "leave", "say", "show_warnings"]

USAGE, UNREACHABLE, INTERNAL, TAKEN, LOST = 64, 69, 70, 75, 76  # exit codes of sysexits.h, where one fits


BACKLOG = 100  # lines kept while stderr is full; further lines are dropped
LAST_WORDS = 10  # how often the end of a command checks whether all lines were written
LAST_WORD = 0.05  # seconds between two of these checks


def code_of(error: BaseException) -> int:
    """Return the exit code for an error that ended a command, and print the error on stderr."""
    match error:
        case KeyboardInterrupt():
            return 130
        case ModuleNotFoundError(name="rich"):  # any other missing module is a mistake of multilock, not of the user
            say("this command needs rich to show its results: pip install 'multilock[cli]'")
            return USAGE
        case LockTimeout():
            code = TAKEN
        case LockLost():
            code = LOST
        case BackendUnavailable() | BackendRejected():
            code = UNREACHABLE
        case UnicodeError():
            code = INTERNAL
        case ValueError() | CapabilityMissing():
            code = USAGE
        case MultilockError() | OSError():
            code = INTERNAL
        case _:
            say(f"internal error, please report it: {error!r}")
            return INTERNAL
    say(str(error))
    return code


class _Voice:
    """Writes messages to stderr on a thread of its own.

    If nobody reads stderr (``2>&1 | less``, Ctrl-S), a write never returns. The thread that prints a message must be
    able to continue nevertheless, and to end CMD.
    """

    def __init__(self) -> None:
        self._lines: system.SimpleQueue[str | system.Event] = system.SimpleQueue()
        self._lost = 0
        start_worker(self._speak, "multilock-stderr")
        atexit.register(self.finish)

    def say(self, line: str) -> None:
        if self._lines.qsize() < BACKLOG:
            self._lines.put(line)
        else:
            self._lost += 1

    def finish(self) -> None:
        """Wait until the remaining lines are written, but not long, because perhaps nobody reads stderr.

        The library's log is flushed first, because its log thread passes the library's lines to this object.
        """
        log_thread.flush(LAST_WORDS * LAST_WORD)
        said = system.Event()
        self._lines.put(said)
        # Wait in steps: if the machine stood still, the thread still gets time to write first.
        for _ in range(LAST_WORDS):
            if said.wait(LAST_WORD):
                return

    def _speak(self) -> None:
        while True:
            line = self._lines.get()
            if isinstance(line, system.Event):
                line.set()
                continue
            _write(line)
            if self._lost:
                lost, self._lost = self._lost, 0
                _write(f"{lost} more messages were dropped, because stderr was not read")


def _write(line: str) -> None:
    # sys.stderr is not used: its lock, held by a write that never returns, would abort the interpreter at exit.
    left = f"multilock: {line}\n".encode(getattr(sys.stderr, "encoding", None) or "utf-8", "backslashreplace")
    with suppress(OSError):  # stderr is closed, or its reader is gone: the command is more important
        while left:
            try:
                left = left[os.write(2, left) :]
            except BlockingIOError:  # CMD has the same stderr, and made it non-blocking
                wait = system.poll()
                wait.register(2, system.POLLOUT)
                wait.poll()


_voice: _Voice | None = None


def say(message: str) -> None:
    """Print one line on stderr without waiting for its reader."""
    global _voice
    if _voice is None:
        _voice = _Voice()
    _voice.say(message)


def leave(code: int) -> NoReturn:
    """End this process now, even if its threads wait for something."""
    if _voice is not None:
        _voice.finish()
    os._exit(code)


class _Say(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage())


def show_warnings() -> None:
    """Print the library's warnings on stderr at once, above all that the backend does not reply."""
    global _voice
    _voice = _voice or _Voice()
    # Hide the warnings of client libraries: they warn of each attempt, and we warn once.
    logging.getLogger().addHandler(logging.NullHandler())
    logger = logging.getLogger("multilock")
    logger.addHandler(_Say(logging.WARNING))
    logger.propagate = False
