"""The clients of this process: what happens to them at a fork and at exit, and whether a thread is inside one."""

from __future__ import annotations

import atexit
import mmap
import os
import weakref
from collections.abc import Iterator
from typing import NoReturn, Protocol, SupportsIndex

from multilock import system, telling
from multilock.kernel import worker
from multilock.kernel.runtime import inside, now

__all__ = [
    "OURS",
    "OfThisProcess",
    "ends_with_the_interpreter",
    "in_the_middle",
    "notice_fork",
    "register",
    "this_process",
]

EXIT_TIME = 2.0  # seconds at exit for all clients together
FAREWELL = 0.5  # the last seconds of EXIT_TIME, for closing connections and ending sessions
TELL_WITHIN = 0.5  # seconds after EXIT_TIME for the log handlers


class OfThisProcess:
    """Base of objects that work only in the process that made them. Pickling one raises TypeError."""

    __slots__ = ()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be pickled: it belongs to its process. Connect in the child, and pass it "
            "the URL and the name"
        )


class End(Protocol):
    """The methods of `multilock.kernel.ending.End` that this file calls."""

    def withdraw(self, deadline: float) -> bool:
        """Cancel the claims of waiters until ``deadline``. Returns False if the client has ended before."""

    def exit(self, deadline: float) -> None:
        """Give back what is held, until ``deadline``."""

    def forked(self) -> None:
        """Reset the client in a forked child."""


class OneClient(Protocol):
    """The members of `multilock.kernel.core.Kernel` that this file uses."""

    @property
    def lock(self) -> system.RLock:
        """The lock of the client's state."""

    @property
    def end(self) -> End:
        """The end of the client."""


_kernels: dict[weakref.ref[OneClient], None] = {}  # not a WeakSet, which must not change while it is iterated


def register(kernel: OneClient) -> None:
    """Add a client to those that this file looks after, as long as it lives."""
    _kernels[weakref.ref(kernel, lambda gone: _kernels.pop(gone, None))] = None


def _living() -> list[OneClient]:
    return [kernel for reference in list(_kernels) if (kernel := reference())]


def in_the_middle() -> bool:
    """Return whether this thread is inside a backend or holds the lock of a client.

    A finalizer or a signal handler that runs there must not wait. It could wait for a lock that its own thread holds,
    or hold up the thread that renews leases.
    """
    if system.get_ident() in inside:
        return True
    for reference in list(_kernels):
        kernel = reference()
        if kernel is not None and kernel.lock._is_owned():  # type: ignore[attr-defined]
            return True
    return False


_exiting: set[int] = set()  # the id of the thread that ends the interpreter, once that has begun


def ends_with_the_interpreter() -> bool:
    """Return whether this is a user's daemon thread during the exit, where nobody would see its error."""
    if not _exiting or system.get_ident() in _exiting:
        return False
    return not system.current_thread().name.startswith("multilock-")


def _exit() -> None:
    _exiting.add(system.get_ident())
    _at_exit()


def _at_exit() -> None:
    """Give back all locks: first what waiters claim, in all clients, then what is held."""
    notice_fork()  # a forked child must not give back the locks of its parent
    began = now()
    kernels = _living()
    shares = _shares(len(kernels), began + EXIT_TIME / 2)
    still_open = [kernel for kernel in kernels if kernel.end.withdraw(next(shares))]
    for kernel, deadline in zip(still_open, _shares(len(still_open), began + EXIT_TIME - FAREWELL), strict=True):
        kernel.end.exit(deadline)
    telling.at_exit(TELL_WITHIN)


def _shares(count: int, end: float) -> Iterator[float]:
    """Return a deadline for each of ``count`` clients, so that a silent server leaves time for the others."""
    for left in range(count, 0, -1):
        yield now() + (end - now()) / left


# Forks. Python calls hooks in a forked child, but only if Python itself forked, not after daemon(3) or a fork in a C
# library. So every check of a lease, and every request, first checks whether this is still the same process.

MADV_WIPEONFORK = 18  # <sys/mman.h>: a forked child finds this page filled with zeros


class _ByPid:
    """A replacement for the wiped page on systems that have none. Every look at it costs a system call."""

    def __init__(self) -> None:
        self._pid, self._value = os.getpid(), 0

    def __getitem__(self, _: SupportsIndex) -> int:
        return self._value if os.getpid() == self._pid else 0

    def __setitem__(self, _: SupportsIndex, value: int) -> None:
        self._pid, self._value = os.getpid(), value


def _mark() -> mmap.mmap | _ByPid:
    """Return a byte array that is all zeros in a forked child."""
    if os.uname().sysname == "Linux":
        page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        try:
            page.madvise(MADV_WIPEONFORK)
        except OSError:  # Linux before 4.14
            return _ByPid()
        return page
    return _ByPid()


FORKED, RESETTING, OURS = range(3)
this_process = _mark()
this_process[0] = OURS
_resetting: dict[int, system.RLock] = {}  # by pid, because a lock of the parent may stay taken forever in a child


def notice_fork() -> None:
    """Reset all clients if this process was forked without Python's hooks. Otherwise it costs no system call."""
    if this_process[0] != OURS:
        with _resetting.setdefault(os.getpid(), system.RLock()):
            if this_process[0] == FORKED:
                _after_fork_in_child()


def _after_fork_in_child() -> None:
    """Reset everything that belongs to the parent."""
    this_process[0] = RESETTING
    try:
        inside.clear()
        worker.forget()
        telling.begin()
        for kernel in _living():
            kernel.end.forked()
    finally:
        this_process[0] = OURS


atexit.register(_exit)
os.register_at_fork(after_in_child=_after_fork_in_child)
