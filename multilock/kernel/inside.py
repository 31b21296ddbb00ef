"""The threads that are inside a call of a backend. A finalizer or signal handler that runs there must not wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from multilock import system
from multilock.errors import BackendUnavailable

__all__ = ["call_inside", "inside"]

R = TypeVar("R")

inside: set[int] = set()
"""The ids of threads that are calling a backend, and so may hold its locks, and of the ticking threads."""


def call_inside(call: Callable[..., R], *args: Any) -> R:
    """Call a backend: return ``call(*args)``. Every call of a backend goes through here.

    A backend may need a thread of its own. If the operating system refuses it, that is BackendUnavailable.
    """
    thread = system.get_ident()
    if thread in inside:
        return call(*args)
    try:
        inside.add(thread)  # inside the `try`, so that an interrupt just after it cannot leave the mark forever
        return call(*args)
    except RuntimeError as error:
        if "new thread" not in str(error):
            raise
        raise BackendUnavailable(str(error)) from error
    finally:
        inside.discard(thread)
