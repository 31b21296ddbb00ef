"""How a command ends: its exit code, and one line on stderr instead of a traceback."""

from __future__ import annotations

import logging
import sys

from multilock.errors import (
    BackendRejected,
    BackendUnavailable,
    CapabilityMissing,
    LockLost,
    LockTimeout,
    MultilockError,
)

__all__ = ["LOST", "TAKEN", "UNREACHABLE", "USAGE", "Finished", "code_of", "say", "show_warnings"]

USAGE, UNREACHABLE, INTERNAL, TAKEN, LOST = 64, 69, 70, 75, 76  # sysexits.h where it has one


class Finished(SystemExit):
    """A command that ended by itself, told apart from typer's own exits."""

    code: int


def code_of(error: BaseException) -> int:
    """The exit code for an error that ended a command; says it on stderr."""
    match error:
        case KeyboardInterrupt():
            return 130
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


def say(message: str) -> None:
    """One line on stderr, whatever thread speaks and whatever has become of stderr."""
    try:
        sys.stderr.write(f"multilock: {message}\n")
        sys.stderr.flush()
    except (OSError, ValueError):  # closed, or its reader has gone: CMD matters more
        pass


class _Say(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage())


def show_warnings() -> None:
    """What the library warns of, a silent backend first of all, is said at once."""
    logger = logging.getLogger("multilock")
    logger.addHandler(_Say(logging.WARNING))
    logger.propagate = False
