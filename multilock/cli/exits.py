"""How a command ends: its exit code, and one line on stderr instead of a traceback."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from contextlib import suppress
from typing import NoReturn

from multilock import system, telling
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

USAGE, UNREACHABLE, INTERNAL, TAKEN, LOST = 64, 69, 70, 75, 76  # sysexits.h where it has one


BACKLOG = 100  # lines that wait for a stderr that is full; there is no room for more
LAST_WORDS = 10  # … looks at the end whether they have been read, with
LAST_WORD = 0.05  # seconds between them


def code_of(error: BaseException) -> int:
    """The exit code for an error that ended a command; says it on stderr."""
    match error:
        case KeyboardInterrupt():
            return 130
        case ModuleNotFoundError(name="rich"):  # a mistake of ours must not read "pip install"
            say("this command shows its results with rich: pip install 'multilock[cli]'")
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
            say(f"internal error, please report it: {type(error).__name__}: {error}")
            return INTERNAL
    say(str(error))
    return code


class _Voice:
    """stderr, written by a thread of its own.

    Nobody may read it (``2>&1 | less``, Ctrl-S), and then a write never returns: whoever has something to say must be
    able to go on, and to end CMD.
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
        """Wait for what is unsaid, but not for a reader who does not read. The library's own lines come by its log."""
        telling.flush(LAST_WORDS * LAST_WORD)
        said = system.Event()
        self._lines.put(said)
        for _ in range(LAST_WORDS):  # in steps: when the machine stood still, the thread comes first all the same
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
                _write(f"{lost} more messages found no room")


def _write(line: str) -> None:
    # Not sys.stderr: its lock, held by a write that never returns, would abort the interpreter at its end.
    left = f"multilock: {line}\n".encode(getattr(sys.stderr, "encoding", None) or "utf-8", "backslashreplace")
    with suppress(OSError):  # closed, or its reader has gone: CMD matters more
        while left:
            try:
                left = left[os.write(2, left) :]
            except BlockingIOError:  # CMD has the same stderr, and has made it non-blocking
                wait = system.poll()
                wait.register(2, system.POLLOUT)
                wait.poll()


_voice: _Voice | None = None


def say(message: str) -> None:
    """One line on stderr, at once if it is read; this never waits for its reader."""
    global _voice
    if _voice is None:
        _voice = _Voice()
    _voice.say(message)


def leave(code: int) -> NoReturn:
    """End this process now, whatever its threads wait for."""
    if _voice is not None:
        _voice.finish()
    os._exit(code)


class _Say(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage())


def show_warnings() -> None:
    """What the library warns of, a silent backend first of all, is said at once."""
    global _voice
    _voice = _voice or _Voice()
    logger = logging.getLogger("multilock")
    logger.addHandler(_Say(logging.WARNING))
    logger.propagate = False
