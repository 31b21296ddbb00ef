"""The threads that are inside a call of a backend. A finalizer or signal handler that runs there must not wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from multilock import system
from multilock.errors import BackendUnavailable

__all__ = ["call_inside", "check_outside", "inside"]

R = TypeVar("R")

inside: set[int] = set()
"""The ids of threads that are calling a backend, and so may hold its locks, and of the ticking threads."""


def check_outside() -> None:
    """Raise BackendUnavailable if this thread is inside a backend, because it could wait forever for a lock that it
    holds itself.

    The caller is then a finalizer or a signal handler that has interrupted another call.
    """
    if system.get_ident() in inside:
        raise BackendUnavailable(
            "this call comes from a finalizer or a signal handler in the middle of another call of the same thread: "
            "make it on another thread",
            unknown=False,
        )


def call_inside(call: Callable[..., R], *args: Any) -> R:
    """Call a backend: return ``call(*args)``. Every call of a backend goes through here.

    Raises BackendUnavailable if the backend needs a new thread and the operating system refuses it.
    """
    thread = system.get_ident()
    if thread in inside:
        return call(*args)
    try:
        inside.add(thread)  # inside the `try`, so that an interrupt just after it cannot leave the thread in the set
        return call(*args)
    except RuntimeError as error:
        if "new thread" not in str(error):
            raise
        raise BackendUnavailable(str(error)) from error
    finally:
        inside.discard(thread)
