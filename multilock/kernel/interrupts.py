"""Helpers for steps that must not stay half done if an interrupt comes: Ctrl-C, a time limit by signal, a cancellation.

CPython may raise an interrupt whenever a Python function begins or a C function returns. So a second run of such a step
must be harmless. If the step is interrupted, it is run once more.

`surely` calls a step in this way. The step must be a plain function that makes the first change itself. The caller
writes its own ``except BaseException`` instead if the step awaits, or if it may have to be undone, for example because
no caller has received the lease. The caller also does so if it made a change before it called `surely`, because an
interrupt at the entry of `surely` would leave that change half done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["Once", "surely"]

R = TypeVar("R")


def surely(step: Callable[..., R], *args: Any) -> R:
    """Return ``step(*args)``. If ``step`` is interrupted, call it once more, then let the interrupt continue.

    A second call of ``step`` must be harmless.
    """
    try:
        return step(*args)
    except BaseException:
        step(*args)
        raise


class Once:
    """A callback that runs at most once, even if the kernel starts it again after an interrupt.

    The thread that runs the callback removes it from this object. Otherwise a thread that must not be delayed could
    drop the last reference to an object of the user, and run its ``__del__``. ``begins()`` is called just before the
    callback.
    """

    __slots__ = ("_begins", "_left", "_name")

    def __init__(self, callback: Callable[..., object], begins: Callable[[], None]) -> None:
        self._left = [callback]
        self._name = ""
        self._begins = [begins]  # removed like the callback: it may refer to the lease, which refers to this object

    def begun(self) -> bool:
        """Return whether the callback has begun."""
        return not self._left

    def __call__(self, *args: Any) -> object:
        try:
            callback = self._left.pop()
        except IndexError:
            return None
        try:
            self._begins.pop()()
            result = callback(*args)
        except BaseException:
            self._name = repr(callback)  # the name of the callback, for the log
            raise
        if result is not None:  # the value may be an awaitable, which the log message then mentions
            self._name = repr(callback)
        return result

    def __repr__(self) -> str:
        return self._name or repr(self._left[0] if self._left else None)
