"""The lines by which a process under test, a *contender*, records its requests and their results. `Record.feed` reads
them.

Each line is one write to stdout, so that a killed process has written all its records. Times are those of
`multilock.now()`, a clock that all processes of a machine share::

    got TIME NAME ID TOKEN HELD [MODE]
                                     acquire() returned; after TIME is_held() returned HELD (1 or 0); TOKEN may be "-";
                                     without MODE, the mode of its claim, it is a mutex
    session ID SESSION               the lock that was just acquired lives in this session
    renewal TIME ID                  the lock that was just acquired will be renewed at TIME
    held TIME ID                     is_held() was called at TIME, and returned True
    over TIME ID [ANSWERED]          is_held() was called at TIME, and returned False by ANSWERED
    lost TIME ID REASON LOST_AT      the callback began, for a loss at LOST_AT
    release TIME ID                  release() was called
    released TIME ID OURS            release() returned OURS (1 or 0)
    stall FROM TO                    this process did not run
    wrong TEXT                       an unexpected exception

No value contains a space, except the TEXT of ``wrong``.
"""

from __future__ import annotations

import os
import threading
import time

from multilock.kernel.runtime import now

__all__ = ["note", "watch_pulse"]

PULSE = 0.005  # seconds between two checks whether the process was frozen
STALLED = 0.025


def note(*words: object) -> None:
    """Write one line. Any thread may call it."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def watch_pulse(every: float = PULSE) -> None:
    """Start a thread that records each pause of this process of 25 ms or more.

    The thread checks once in ``every`` seconds.
    """
    threading.Thread(target=_watch, args=(every,), name="pulse", daemon=True).start()


def _watch(every: float) -> None:
    last = now()
    while True:
        time.sleep(every)
        this = now()
        if this - last > STALLED:
            note("stall", last, this)
        last = this
