"""Functions that helper processes run, on any backend: they hold readers, writers and permits of one name. See
`Helper`.

This module does not import pytest, so that the helper processes start quickly.
"""

from __future__ import annotations

import threading
from pathlib import Path

import multilock
from multilock import Client, now
from multilock.testing import hear, say

__all__ = ["NAME", "count_with_all", "hold_permit", "read", "stream", "write"]

NAME = "a"
PERMITS = 3


def read(url: str, prefix: str, ttl: str) -> None:
    with _connect(url, prefix, ttl) as client:
        lease = client.read_write_lock(NAME).reader().acquire()
        say("held")
        while hear() is not None:
            say("state", lease.state.name, lease.release())


def write(url: str, prefix: str, ttl: str) -> None:
    with _connect(url, prefix, ttl) as client:
        say("asks")
        client.read_write_lock(NAME).writer().acquire()
        say("held")
        hear()


def hold_permit(url: str, prefix: str, ttl: str) -> None:
    with _connect(url, prefix, ttl) as client:
        client.semaphore(NAME, PERMITS).acquire()
        say("held")
        hear()


def stream(url: str, prefix: str, ttl: str) -> None:
    """Acquire and release a reader repeatedly, alternately by `acquire` and by a single try. Report each token with the
    times of the request, of the grant and of the release."""
    with _connect(url, prefix, ttl) as client:
        lock = client.read_write_lock(NAME).reader()
        say("begins")
        goes_on = threading.Thread(target=hear, daemon=True)
        goes_on.start()
        turn = 0
        while goes_on.is_alive():
            turn += 1
            asked = now()
            lease = lock.acquire() if turn % 2 else lock.try_acquire()
            if lease:
                began = now()
                say("read", lease.fence(), asked, began, now())
                lease.release()


def count_with_all(url: str, file: str, rounds: str, *names: str) -> None:
    """Wait for the start signal. Then increment the counter in the file ``rounds`` times, each time while holding all
    these names."""
    path = Path(file)
    with multilock.connect(url) as client:
        locks = client.lock_all(names)
        client.ping()
        say("ready")
        hear()
        for _ in range(int(rounds)):
            with locks:
                path.write_text(str(int(path.read_text()) + 1))
    say("counted")


def _connect(url: str, prefix: str, ttl: str) -> Client:
    return multilock.connect(url, prefix=prefix, ttl=float(ttl))
