"""Signals that come at the worst moment."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from itertools import starmap
from operator import call
from typing import cast

import pytest

from multilock.cli.child import Child
from multilock.cli.signals import Signals


def test_a_signal_that_comes_as_the_wait_for_the_command_begins_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python has already looked for signals, and the system call does not know of this one."""
    wait = os.waitpid
    times = [1]

    def interrupted(pid: int, options: int) -> tuple[int, int]:
        if not times:
            return wait(pid, options)
        times.clear()
        raise_signal = getattr(ctypes.CDLL(None), "raise")
        # No Python bytecode runs between the two calls.
        _, status = starmap(call, [(raise_signal, signal.SIGTERM), (wait, pid, options)])
        return cast("tuple[int, int]", status)

    child = Child(["sleep", "20"], {})
    began = time.monotonic()
    with Signals() as signals, signals.go_to(child):
        monkeypatch.setattr(os, "waitpid", interrupted)
        assert child.wait(signals.pause) == 128 + signal.SIGTERM
        child.close()
    assert time.monotonic() - began < 15
    assert signals.passed_on == signal.SIGTERM
    assert times == []


def test_what_was_done_with_signals_before_is_done_again_after() -> None:
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)}
    with Signals():
        pass
    assert {signum: signal.getsignal(signum) for signum in before} == before
    assert signal.set_wakeup_fd(-1) == -1
