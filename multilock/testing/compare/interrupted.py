"""Ctrl-C and SIGTERM, which may come at any moment: heard once, and what must be done then is done all the same."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

__all__ = ["interrupted_once", "undisturbed"]

T = TypeVar("T")


def undisturbed(act: Callable[[], T]) -> T:
    """As an interrupt comes once (`interrupted_once`), what it broke off is done again."""
    try:
        return act()
    except KeyboardInterrupt:
        return act()


@contextlib.contextmanager
def interrupted_once() -> Iterator[Callable[[], None]]:
    """Ctrl-C and SIGTERM raise KeyboardInterrupt once; while that is cleaned up after, no other does. What is yielded
    raises it too, if there was one: an interpreter that is inside a finalizer throws it away."""
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
