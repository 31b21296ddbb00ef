"""Freeze and kill processes: helpers of the test, services, any process that this user may signal.

    with pause(worker):                  # the worker is frozen inside this block
        assert lock.try_acquire(timeout=10)
    kill(worker)                         # the worker is dead when this returns

The module records when each process was frozen. During that time the process cannot act on a lock, so it does not count
as a holder (`multilock.testing.beliefs`).
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from multilock.kernel.runtime import now

__all__ = ["Killed", "Paused", "Process", "end", "go_on", "kill", "pause", "resume_all", "spans", "stand_still"]

TAKES_EFFECT_WITHIN = 5.0  # seconds that a signal may take to have its effect on a busy machine
LOOK_EVERY = 0.002


class Process(Protocol):
    """Any object with a ``pid``: of `multilock.testing.Helper`, subprocess, multiprocessing, asyncio or psutil."""

    @property
    def pid(self) -> int | None:
        """The process ID, or None if the process has not been started."""


_since: dict[int, float] = {}  # by pid: when the process was frozen
_spans: list[tuple[int, float, float]] = []
_lock = threading.Lock()


def spans(pid: int) -> list[tuple[float, float]]:
    """Return when this process was frozen, as (from, to) on the clock of `multilock.now()`. A ``to`` of inf means that
    the process is still frozen, or was killed."""
    with _lock:
        return [(start, until) for each, start, until in _spans if each == pid] + (
            [(_since[pid], math.inf)] if pid in _since else []
        )


class Paused:
    """A frozen process, until `resume` or the end of ``with``."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def resume(self) -> None:
        """Let the process continue. This does nothing if the process has ended."""
        go_on(self.pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.resume()


class Killed:
    """A process that was killed. Like `Paused`, it is a context manager, but leaving the ``with`` does nothing."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


def pause(process: Process | int) -> Paused:
    """Freeze a process with SIGSTOP, like an overloaded machine or a debugger. When this returns, no thread of it runs.

    The end of ``with pause(process):`` lets it continue, and so does the pytest plugin at the end of the test. Raises
    ProcessLookupError if the process has ended, and TimeoutError if it is not frozen within 5 s.
    """
    pid = _pid(process)
    if _ended(process):
        raise ProcessLookupError(f"process {pid} has ended: it cannot be paused")
    stand_still(pid)
    return Paused(pid)


def kill(process: Process | int) -> Killed:
    """End a process at once with SIGKILL, like a power cut. The process may be frozen.

    If it leads a process group, its children in the group are killed too. When this returns the process is dead, and
    its parent can still ask for the exit code. This does nothing if the process had ended before.
    """
    pid = _pid(process)
    if not _ended(process):
        end(pid)
    return Killed(pid)


def stand_still(pid: int) -> None:
    """Freeze a process as `pause` does. The caller must ensure that no other process has this pid by now."""
    os.kill(pid, signal.SIGSTOP)
    until = time.monotonic() + TAKES_EFFECT_WITHIN
    while not _stands(pid):
        if time.monotonic() > until:
            raise TimeoutError(f"process {pid} is not frozen {TAKES_EFFECT_WITHIN:g} s after SIGSTOP")
        time.sleep(LOOK_EVERY)
    with _lock:
        _since.setdefault(pid, now())


def go_on(pid: int) -> None:
    """Let a process continue. This does nothing if the process is not frozen, or has ended."""
    with _lock:
        if (since := _since.pop(pid, None)) is not None:
            _spans.append((pid, since, now()))
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def resume_all() -> None:
    """Let every frozen process continue, and forget the records. The plugin does this after each test."""
    for pid in list(_since):
        go_on(pid)
    with _lock:
        _spans.clear()


def end(pid: int) -> None:
    """Kill a process as `kill` does. The caller must ensure that no other process has this pid by now."""
    with contextlib.suppress(ProcessLookupError, TimeoutError):
        stand_still(pid)  # records the time from which the process did nothing
    with contextlib.suppress(ProcessLookupError):
        if os.getpgid(pid) == pid != os.getpgrp():
            os.killpg(pid, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGKILL)
    until = time.monotonic() + TAKES_EFFECT_WITHIN
    while not _is_dead(pid):
        if time.monotonic() > until:
            raise TimeoutError(f"process {pid} was sent SIGKILL, but does not end")
        time.sleep(LOOK_EVERY)
    with _lock:
        if (since := _since.pop(pid, None)) is not None:
            _spans.append((pid, since, math.inf))


def _pid(process: Process | int) -> int:
    pid: object = process if isinstance(process, int) else getattr(process, "pid", process)
    if pid is None:
        raise ValueError(f"{process!r} has no pid: start it first")
    if isinstance(pid, bool) or not isinstance(pid, int):
        raise TypeError(f"give a process or its pid, not {process!r}")
    if pid <= 1 or pid == os.getpid():  # 0 and negative numbers mean process groups
        raise ValueError(f"{pid} is not a process that a test may freeze or kill")
    return pid


def _ended(process: Any) -> bool:
    """Return whether the object ``process`` knows that its process has ended. Another process may have this pid by
    now."""
    if isinstance(process, int):
        return False
    if callable(poll := getattr(process, "poll", None)):
        return poll() is not None
    return next((True for each in ("returncode", "exitcode") if getattr(process, each, None) is not None), False)


def _stands(pid: int) -> bool:
    """Return whether all threads of the process are frozen. Raises ProcessLookupError if it has ended."""
    with contextlib.suppress(ChildProcessError):
        return os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    if _is_dead(pid):
        raise ProcessLookupError(f"process {pid} has ended: it cannot be paused")
    tasks = Path(f"/proc/{pid}/task")  # the process is not our child, so waitid() does not apply
    if not tasks.exists():  # without /proc: the signal takes effect before the process runs again
        return True
    return all(_state(task) in "TtZX" for task in tasks.iterdir())


def _is_dead(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    with contextlib.suppress(ChildProcessError):  # not our child; WNOWAIT keeps the exit code of a child readable
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    return Path("/proc/self").exists() and _state(Path(f"/proc/{pid}")) in "ZX"


def _state(task: Path) -> str:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:  # the process has just ended
        return "X"
