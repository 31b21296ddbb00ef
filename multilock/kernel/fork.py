"""The reset of all clients in a forked child: every lease becomes RELEASED there, and each client begins anew.

Python calls hooks in a forked child, but only if Python itself forked, not after daemon(3) or a fork in a C library. So
every check of a lease, and every request, first checks whether this is still the same process.
"""

from __future__ import annotations

import mmap
import os
from typing import SupportsIndex

from multilock import log_thread, system
from multilock.kernel import worker
from multilock.kernel.inside_backend import inside
from multilock.kernel.living_clients import living

__all__ = ["OURS", "notice_fork", "this_process"]

MADV_WIPEONFORK = 18  # <sys/mman.h>: a forked child finds this page filled with zeros


class _ByPid:
    """Stands in for a memory page that is wiped in a forked child, on a system without such pages. Each read costs a
    system call."""

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
# A separate lock for each pid, because a lock of the parent may stay taken forever in a child.
_resetting: dict[int, system.RLock] = {}


def notice_fork() -> None:
    """Reset all clients if this process was forked without Python's hooks. On Linux the check costs no system call."""
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
        log_thread.begin()
        for kernel in living():
            kernel.end.forked()
    finally:
        this_process[0] = OURS


os.register_at_fork(after_in_child=_after_fork_in_child)
