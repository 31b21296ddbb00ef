"""Fork and exit: what happens to all clients of this process when it splits or ends.

SIGTERM's default action and ``os._exit`` run none of this: then the ttl ends the locks.
"""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Iterator
from typing import Protocol

from multilock.runtime import now

__all__ = ["register"]

EXIT_TIME = 2.0  # seconds for all clients together


class Process(Protocol):
    def withdraw(self, deadline: float) -> bool: ...
    def exit(self, deadline: float) -> None: ...
    def forked(self) -> None: ...


_kernels: weakref.WeakSet[Process] = weakref.WeakSet()


def register(kernel: Process) -> None:
    _kernels.add(kernel)


def _at_exit() -> None:
    began = now()
    kernels = list(_kernels)
    shares = _shares(len(kernels), began + EXIT_TIME / 2)
    still_open = [kernel for kernel in kernels if kernel.withdraw(next(shares))]
    for kernel, deadline in zip(still_open, _shares(len(still_open), began + EXIT_TIME), strict=True):
        kernel.exit(deadline)


def _shares(count: int, end: float) -> Iterator[float]:
    """When each of them must have done, so that a silent server leaves time for the others."""
    for left in range(count, 0, -1):
        yield now() + (end - now()) / left


def _after_fork_in_child() -> None:
    for kernel in list(_kernels):
        kernel.forked()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_after_fork_in_child)
