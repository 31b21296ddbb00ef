"""The end of all clients at the exit of the interpreter: claims of waiters are cancelled, then held locks are
released."""

from __future__ import annotations

import atexit
from collections.abc import Iterator

from multilock import log_thread, system
from multilock.kernel.fork import notice_fork
from multilock.kernel.living_clients import living
from multilock.kernel.runtime import now

__all__ = ["ends_with_the_interpreter"]

EXIT_TIME = 2.0  # seconds that all clients together may take at exit
FAREWELL = 0.5  # seconds at the end of EXIT_TIME, for closing connections and ending sessions
TELL_WITHIN = 0.5  # seconds that the log handlers may take after EXIT_TIME

_exiting: set[int] = set()  # empty until the interpreter exits, then the id of the thread that runs the exit


def ends_with_the_interpreter() -> bool:
    """Return whether the interpreter is exiting and the calling thread is a daemon thread of the user. Such a thread
    must end without a traceback."""
    if not _exiting or system.get_ident() in _exiting:
        return False
    return not system.current_thread().name.startswith("multilock-")


def _exit() -> None:
    _exiting.add(system.get_ident())
    _at_exit()


def _at_exit() -> None:
    """Release all locks: first cancel the claims of waiters, in all clients, then release the held locks."""
    notice_fork()  # a forked child must not release the locks of its parent
    began = now()
    kernels = living()
    shares = _shares(len(kernels), began + EXIT_TIME / 2)
    still_open = [kernel for kernel in kernels if kernel.end.withdraw(next(shares))]
    for kernel, deadline in zip(still_open, _shares(len(still_open), began + EXIT_TIME - FAREWELL), strict=True):
        kernel.end.exit(deadline)
    log_thread.at_exit(TELL_WITHIN)


def _shares(count: int, end: float) -> Iterator[float]:
    """Yield a deadline for each of ``count`` clients, so that a client whose server is silent leaves time for the
    others."""
    for left in range(count, 0, -1):
        yield now() + (end - now()) / left


atexit.register(_exit)
