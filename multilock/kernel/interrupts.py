"""Ctrl-C, a time limit by signal, a cancellation: CPython may raise them as any function begins, or returns from C.

What must not stay half done is therefore written so that it can be done twice, and done again where it was interrupted.

`surely` does that for a plain call that makes its first change itself. An ``except BaseException`` by hand stays where
the shape is another: what is called off is undone, not finished (a lease nobody got, a ticker nobody would close); it
awaits; or something was changed before the call, so that an interrupt at the entry of a helper would be one too many.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["Once", "surely"]

R = TypeVar("R")


def surely(step: Callable[..., R], *args: Any) -> R:
    """``step(*args)``; if it is interrupted, once more before the interrupt goes on. Twice must be harmless.

    The interrupt can also come before the first line here. So a step makes its first irrevocable change itself, and
    where something has been changed before, the caller's own ``try`` must cover the call.
    """
    try:
        return step(*args)
    except BaseException:
        step(*args)
        raise


class Once:
    """Calls it the first time, however often an interrupt made somebody start it again."""

    __slots__ = ("_callback", "_left")

    def __init__(self, callback: Callable[..., object]) -> None:
        self._callback = callback
        self._left = [callback]

    def __call__(self, *args: Any) -> object:
        try:
            callback = self._left.pop()
        except IndexError:
            return None
        return callback(*args)

    def __repr__(self) -> str:
        return repr(self._callback)
