"""Ctrl-C and SIGTERM, which may come at any moment: they interrupt once, and the clean-up then runs to its end."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

__all__ = ["interrupted_once", "undisturbed"]

T = TypeVar("T")


def undisturbed(act: Callable[[], T]) -> T:
    """Call ``act``. If the one interrupt (`interrupted_once`) comes meanwhile, call it again."""
    try:
        return act()
    except KeyboardInterrupt:
        return act()


@contextlib.contextmanager
def interrupted_once() -> Iterator[Callable[[], None]]:
    """Let Ctrl-C and SIGTERM raise KeyboardInterrupt once, so that the clean-up after it is not interrupted.

    It yields a function that also raises KeyboardInterrupt after a signal: if the interpreter is inside a finalizer, it
    discards the first one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    interrupted = False

    def interrupt(number: int, frame: object) -> None:
        nonlocal interrupted
        if not interrupted:
            interrupted = True
            raise KeyboardInterrupt

    def check() -> None:
        if interrupted:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield check
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
