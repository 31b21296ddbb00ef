"""Habits of programs that have revealed defects. Processes of the chaos harness adopt them in addition to all faults.

`contend` implements some habits itself, and only their names are here. A habit imports modules only in a process that
adopts it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import resource
from collections.abc import Callable, Iterable

__all__ = ["ELSEWHERE", "HABITS", "UVLOOP"]

DESCRIPTORS = 2_000
ROOM = 1_000  # descriptors for the contenders

#: a ``with`` is left in another thread or task than the one that entered it, or by an exit stack
ELSEWHERE = "with left elsewhere"
UVLOOP = "uvloop"


def log_to_a_full_pipe() -> None:
    """Use ``logging.basicConfig()`` with a stderr that nobody reads, so that every handler blocks forever."""
    _, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 4096)
    os.set_blocking(writing, True)
    os.dup2(writing, 2)
    logging.basicConfig()


def hold_descriptors() -> None:
    """Use up the low descriptors, so that all new ones exceed the limit of ``select()``."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, DESCRIPTORS + ROOM), hard))
    while os.open(os.devnull, os.O_RDONLY) < DESCRIPTORS:
        pass


def give_up_soon() -> None:
    """Stop a background cancel after 2 × ttl instead of a minute, so that an outage can outlast it."""
    from multilock.kernel import background_cancel

    background_cancel.AT_LEAST = 0.0


def lose_messages() -> None:
    """Lose half of the messages that wake SQLite's waiters, as a full FIFO does."""
    from multilock_sqlite import notices

    write, dice = notices._write, random.Random()

    def lose(directory: int, client: str, messages: Iterable[bytes]) -> None:
        if dice.random() < 0.5:
            write(directory, client, messages)

    vars(notices)["_write"] = lose


HABITS: dict[str, Callable[[], None]] = {
    "log handler blocks": log_to_a_full_pipe,
    "2,000 descriptors": hold_descriptors,
    UVLOOP: lambda: None,
    ELSEWHERE: lambda: None,
    "short clean-up": give_up_soon,
    "messages lost": lose_messages,
}
