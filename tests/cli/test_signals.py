"""Signals that come at the worst moment."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from itertools import starmap
from operator import call
from pathlib import Path
from typing import cast

import pytest

from multilock.cli.child import Child
from multilock.cli.signals import Signalled, Signals


def test_a_signal_at_the_beginning_of_the_wait_for_the_command_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal comes after Python's last check for signals and before the system call, so it does not interrupt the
    call."""
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

    began = time.monotonic()
    with Signals() as signals:
        child = Child(["sleep", "20"], {})
        assert child.go(lambda: 60.0, signals.pause)
        with signals.go_to(child):
            monkeypatch.setattr(os, "waitpid", interrupted)
            assert child.wait(signals.pause) == 128 + signal.SIGTERM
            child.close()
    assert time.monotonic() - began < 15
    assert signals.passed_on == [signal.SIGTERM]
    assert times == []


def test_a_command_does_not_begin_when_its_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher was stopped, so the order to begin came too late. No second order comes."""
    read = os.read
    asked: list[bytes] = []

    def counted(descriptor: int, size: int) -> bytes:
        if (said := read(descriptor, size)) == b".":
            asked.append(said)
        return said

    monkeypatch.setattr(os, "read", counted)
    with Signals() as signals:
        child = Child(["touch", str(tmp_path / "ran")], {})
        assert not child.go(lambda: 0.0 if len(asked) > 1 else 1e-9, signals.pause)
    assert len(asked) == 2
    assert not (tmp_path / "ran").exists()


def test_a_second_signal_does_not_interrupt_the_clean_up_after_the_first() -> None:
    ended: list[str] = []

    def interrupted_twice() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGINT)
            ended.append("cleaned up")

    with Signals() as signals, pytest.raises(Signalled), signals.end_the_wait():
        interrupted_twice()
    assert ended == ["cleaned up"]
    assert signals.pending == [signal.SIGINT]


def test_signal_handlers_are_restored_afterwards() -> None:
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)}
    with Signals():
        pass
    assert {signum: signal.getsignal(signum) for signum in before} == before
    assert signal.set_wakeup_fd(-1) == -1
