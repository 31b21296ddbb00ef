"""All clients of this process: which of them a thread is inside, and that each hears of a fork and of the exit."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Iterator
from threading import get_ident
from typing import NoReturn, Protocol

from multilock import telling
from multilock.kernel.runtime import inside, now

__all__ = ["OfThisProcess", "in_the_middle", "register"]

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
    def lock(self) -> threading.RLock: ...
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
    if get_ident() in inside:
        return True
    for reference in list(_kernels):
        kernel = reference()
        if kernel is not None and kernel.lock._is_owned():  # type: ignore[attr-defined]
            return True
    return False


def _at_exit() -> None:
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


def _after_fork_in_child() -> None:
    for kernel in _living():
        kernel.end.forked()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_after_fork_in_child)
