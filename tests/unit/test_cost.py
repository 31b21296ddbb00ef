"""The cost of an acquire and its release, measured in function calls, because times vary too much for a test."""

from __future__ import annotations

import sys
from types import FrameType

import multilock

# The greatest number of function calls of an acquire and its release. Raise it only for a good reason.
CALLS = 119
PAIRS = 50


def test_acquiring_and_releasing_a_free_lock_takes_few_function_calls() -> None:
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    with multilock.connect("memory://cost") as client:
        lock = client.lock("a")
        lock.acquire().release()
        sys.setprofile(count)
        try:
            for _ in range(PAIRS):
                lock.acquire().release()
        finally:
            sys.setprofile(None)
    assert calls / PAIRS <= CALLS
