"""What programs do that has hidden defects before: processes of the chaos harness do it, beside all that goes wrong.

Those that `contend` sees to itself are only named here. What a habit needs is imported where it is taken up.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
from collections.abc import Callable

__all__ = ["ELSEWHERE", "HABITS", "UVLOOP"]

DESCRIPTORS = 2_000
ROOM = 1_000  # for those of the contenders

ELSEWHERE = "with left elsewhere"  #: in another thread, or task, than the one that entered; or by an exit stack
UVLOOP = "uvloop"


def log_to_a_full_pipe() -> None:
    """``logging.basicConfig()``, with a stderr that nobody reads: every handler blocks for ever."""
    _, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 4096)
    os.set_blocking(writing, True)
    os.dup2(writing, 2)
    logging.basicConfig()


def hold_descriptors() -> None:
    """All that come have numbers beyond those of ``select()``."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, DESCRIPTORS + ROOM), hard))
    while os.open(os.devnull, os.O_RDONLY) < DESCRIPTORS:
        pass


def give_up_soon() -> None:
    """The clean-up's minute is over after 2 × ttl: an outage need not last for longer than that minute."""
    from multilock.kernel import giving_back

    giving_back.AT_LEAST = 0.0


HABITS: dict[str, Callable[[], None]] = {
    "log handler blocks": log_to_a_full_pipe,
    "2,000 descriptors": hold_descriptors,
    UVLOOP: lambda: None,
    ELSEWHERE: lambda: None,
    "short clean-up": give_up_soon,
}
