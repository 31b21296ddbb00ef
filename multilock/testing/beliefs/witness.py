"""What a contender writes down, and when: the lines that `Record.feed` reads.

Each line leaves in one write to stdout, so that a killed process has said everything it knew. Times are those of
`multilock.now()`, a clock that all processes of a machine share::

    got TIME NAME ID TOKEN HELD [MODE]
                                     acquire() returned, and is_held() said HELD (1 or 0) after TIME; TOKEN may be "-";
                                     without the MODE of its claim it is a mutex's
    session ID SESSION               the lock which was just got lives in this session
    renewal TIME ID                  … which is renewed next at TIME
    held TIME ID                     is_held() was asked at TIME, and said yes
    over TIME ID [ANSWERED]          it was asked at TIME, and had said no at ANSWERED
    lost TIME ID REASON LOST_AT      the callback began, of a loss that is due at LOST_AT
    release TIME ID                  release() was called
    released TIME ID OURS            … and returned OURS (1 or 0)
    stall FROM TO                    this process did not run
    wrong TEXT                       an exception nobody expected

No word holds a space, but for the last of ``wrong``.
"""

from __future__ import annotations

import os
import threading
import time

from multilock.kernel.runtime import now

__all__ = ["note", "watch_pulse"]

PULSE = 0.005  # seconds between two looks of the thread that finds out when the process does not run
STALLED = 0.025


def note(*words: object) -> None:
    """Write one line down; from any thread."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def watch_pulse(every: float = PULSE) -> None:
    """From now on note when this process did not run for 25 ms or more: it was stopped, or the machine was busy.
    ``every`` so many seconds it is looked for."""
    threading.Thread(target=_watch, args=(every,), name="pulse", daemon=True).start()


def _watch(every: float) -> None:
    last = now()
    while True:
        time.sleep(every)
        this = now()
        if this - last > STALLED:
            note("stall", last, this)
        last = this
