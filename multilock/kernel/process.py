"""All clients of this process: which of them a thread is inside, and that each learns of a fork and of the exit."""

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

EXIT_TIME = 2.0  # seconds for all clients together …
FAREWELL = 0.5  # … of which the last are for closing connections and ending sessions
TELL_WITHIN = 0.5  # … and then for the log handlers


class OfThisProcess:
    """What has a meaning in its process only, and is refused where it would be carried into another."""

    __slots__ = ()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be pickled: it belongs to its process. Connect in the child, and pass it "
            "the URL and the name"
        )


class End(Protocol):
    def withdraw(self, deadline: float) -> bool: ...
    def exit(self, deadline: float) -> None: ...
    def forked(self) -> None: ...


class OneClient(Protocol):
    @property
    def lock(self) -> system.RLock: ...
    @property
    def end(self) -> End: ...


_kernels: dict[weakref.ref[OneClient], None] = {}  # a WeakSet cannot be looked through while another thread adds to it


def register(kernel: OneClient) -> None:
    _kernels[weakref.ref(kernel, lambda gone: _kernels.pop(gone, None))] = None


def _living() -> list[OneClient]:
    return [kernel for reference in list(_kernels) if (kernel := reference())]


def in_the_middle() -> bool:
    """Whether this thread is inside a backend or a client, any of them: who is called by the garbage collector, or by a
    signal, must not wait there. What it would wait for may be its own, and what it has keeps the time of a client."""
    if system.get_ident() in inside:
        return True
    for reference in list(_kernels):
        kernel = reference()
        if kernel is not None and kernel.lock._is_owned():  # type: ignore[attr-defined]
            return True
    return False


_exiting: set[int] = set()  # the thread that ends the interpreter, once it does


def ends_with_the_interpreter() -> bool:
    """Whether this is a daemon thread of the user's at the exit: it has nobody left to tell of an error."""
    if not _exiting or system.get_ident() in _exiting:
        return False
    return not system.current_thread().name.startswith("multilock-")


def _exit() -> None:
    _exiting.add(system.get_ident())
    _at_exit()


def _at_exit() -> None:
    notice_fork()  # what the parent holds is not this child's to give back
    began = now()
    kernels = _living()
    shares = _shares(len(kernels), began + EXIT_TIME / 2)
    still_open = [kernel for kernel in kernels if kernel.end.withdraw(next(shares))]
    for kernel, deadline in zip(still_open, _shares(len(still_open), began + EXIT_TIME - FAREWELL), strict=True):
        kernel.end.exit(deadline)
    telling.at_exit(TELL_WITHIN)


def _shares(count: int, end: float) -> Iterator[float]:
    """When each of them must have done, so that a silent server leaves time for the others."""
    for left in range(count, 0, -1):
        yield now() + (end - now()) / left


# A fork. Python calls hooks in the child, but only after a fork of its own: daemon(3), or a library that forks, tells
# nobody. So whatever asks whether a lease is held, or sends a request, looks first whether this is another process.

MADV_WIPEONFORK = 18  # <sys/mman.h>: a forked child finds the page empty


class _ByPid:
    """The same as the page, where the system cannot wipe one: a system call each time."""

    def __init__(self) -> None:
        self._pid, self._value = os.getpid(), 0

    def __getitem__(self, _: SupportsIndex) -> int:
        return self._value if os.getpid() == self._pid else 0

    def __setitem__(self, _: SupportsIndex, value: int) -> None:
        self._pid, self._value = os.getpid(), value


def _mark() -> mmap.mmap | _ByPid:
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
_resetting: dict[int, system.RLock] = {}  # by pid: a lock that the parent had may be taken for ever


def notice_fork() -> None:
    """Do what Python's hooks do, in a child that was forked without them. Costs no system call otherwise."""
    if this_process[0] != OURS:
        with _resetting.setdefault(os.getpid(), system.RLock()):
            if this_process[0] == FORKED:
                _after_fork_in_child()


def _after_fork_in_child() -> None:
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
