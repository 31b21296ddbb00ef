"""The texts of errors and warnings about locks that a thread or task holds, does not hold, or waits for."""

from __future__ import annotations

import errno
import os
import sys
from typing import TYPE_CHECKING

from multilock.errors import CapabilityMissing, LockTimeout, NotHeld
from multilock.log_thread import logger

if TYPE_CHECKING:
    from multilock.kernel.holding import Holding
    from multilock.kernel.lock_options import Want

__all__ = ["ADVICE", "Messages", "advised"]

REFUSED = os.strerror(errno.ECONNREFUSED)  # every client library repeats the words of the operating system
ADVICE = ": is the server running, and are its host and port right? (`multilock doctor` checks them)"


def advised(told: str) -> str:
    """Return ``told``, the message about a silent backend. If its servers refuse connections, add what to check."""
    return f"{told.rstrip('.')}{ADVICE}" if REFUSED in told and ADVICE not in told else told


class Messages:
    """The messages of one client. With asyncio they call the holder of a lease a task, otherwise a thread."""

    def __init__(self, scheme: str, *, asynchronous: bool) -> None:
        self._scheme = scheme
        self._asynchronous = asynchronous
        self._who = "task" if asynchronous else "thread"
        self._told_of_loop = False  # whether `warn_of_stopped_loop` has logged its warning

    def still_taken(self, name: str, timeout: float | None, by_itself: bool) -> LockTimeout:
        """Return the error of an acquire that timed out. ``by_itself``: the calling thread or task holds the lock."""
        remedy = "inspect() shows who holds it, or until when it rests. Or wait for it with a timeout"
        if by_itself:
            remedy = f"this {self._who} holds it itself: release it first, or make the lock with reentrant=True"
        elif timeout:
            remedy = "wait longer. inspect() shows who holds it, or until when it rests"
        return LockTimeout(
            f"lock {name!r} is {f'still taken after {timeout:g} s' if timeout else 'taken'}: {remedy}",
            name=name,
            backend=self._scheme,
        )

    def blocked_by_itself(self, want: Want, held: Holding) -> CapabilityMissing:
        """Return the error for a reader that asks to write, or a writer that asks to read.

        The caller would wait for its own lease. Two readers that both ask to write would wait for each other.
        """
        verb, has = ("write", "read") if want.kind == "write" else ("read", "write")
        return CapabilityMissing(
            f"this {self._who} asks to {verb} {want.name!r} while it has a {has} lease of it, and multilock does not "
            "convert one into the other: release that lease first, and read the protected data again",
            name=held.name,
            backend=self._scheme,
        )

    def warn_of_itself(self, name: str) -> None:
        """Log that a thread or task waits for a lock that it holds itself."""
        logger.warning(
            "this %s waits for the lock %r, which it holds: make the lock with reentrant=True, or release it first",
            self._who,
            name,
            extra={"lock_name": name},
        )

    def warn_of_stopped_loop(self, name: str) -> None:
        """Log once for each client that a blocking acquire waits in a thread that runs an event loop."""
        if self._asynchronous or self._told_of_loop:
            return
        try:
            sys.modules["asyncio"].get_running_loop()
        except (KeyError, AttributeError, RuntimeError):  # asyncio is not (yet) imported, or this thread has no loop
            return
        self._told_of_loop = True
        logger.warning(
            "a blocking acquire() waits for the lock %r in a thread that runs an event loop, so the whole loop is "
            "blocked: use multilock.connect_async(), or call it with asyncio.to_thread() (logged once for each client)",
            name,
            extra={"lock_name": name},
        )

    def not_held(self, name: str) -> NotHeld:
        """Return the error for a caller that releases a lock object, but holds no lease of that object."""
        return NotHeld(
            f"this {self._who} holds no lease of {name!r} through this lock: it was released, or taken elsewhere "
            f"(lease.release() works from any {self._who})",
            name=name,
            backend=self._scheme,
        )

    def none_current(self, name: str | None) -> NotHeld:
        """Return the error that `Client.current_lease` raises if there is no lease."""
        of = f" of {name!r}" if name else ""
        return NotHeld(f"this {self._who} holds no lease{of}", name=name, backend=self._scheme)
