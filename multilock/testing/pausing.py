"""Freeze and kill processes: of the test, of a service, of anybody whom this user may signal.

    with pause(worker):                  # it stands still inside this block
        assert lock.try_acquire(timeout=10)
    kill(worker)                         # it is dead when this returns

What was frozen, and when, is kept: a process that stood still believed nothing meanwhile
(`multilock.testing.beliefs`).
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

TAKES_EFFECT_WITHIN = 5.0  # seconds; a signal needs some, where the machine is busy
LOOK_EVERY = 0.002


class Process(Protocol):
    """`multilock.testing.Helper`, ``subprocess.Popen``, ``multiprocessing.Process``, asyncio's, psutil's."""

    @property
    def pid(self) -> int | None: ...


_since: dict[int, float] = {}  # by pid, of what stands still now
_spans: list[tuple[int, float, float]] = []
_lock = threading.Lock()


def spans(pid: int) -> list[tuple[float, float]]:
    """From and to (inf: for good, or still), on the clock of `multilock.now()`: when this process was kept frozen."""
    with _lock:
        return [(start, until) for each, start, until in _spans if each == pid] + (
            [(_since[pid], math.inf)] if pid in _since else []
        )


class Paused:
    """A process that stands still, until `resume` or the end of ``with``."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def resume(self) -> None:
        """Let it go on; harmless if it has ended."""
        go_on(self.pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.resume()


class Killed:
    """A process that is dead; for ``with``, at whose end nothing happens."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


def pause(process: Process | int) -> Paused:
    """Freeze it (SIGSTOP), as a machine without time or a debugger does. All its threads stand still when this returns.

    ``with pause(process):`` lets it go on at the end; so does the pytest plugin at the end of the test. Raises
    ProcessLookupError if it has ended, TimeoutError if it does not stand still in 5 s.
    """
    pid = _pid(process)
    if _ended(process):
        raise ProcessLookupError(f"process {pid} has ended: it cannot be paused")
    stand_still(pid)
    return Paused(pid)


def kill(process: Process | int) -> Killed:
    """End it at once (SIGKILL), as a power cut does, paused or not; where it leads a process group of its own, its
    children in it too. It is dead when this returns, and whoever started it can still ask for its exit code. Harmless
    if it has ended."""
    pid = _pid(process)
    if not _ended(process):
        end(pid)
    return Killed(pid)


def stand_still(pid: int) -> None:
    """`pause`, of a process that has not been waited for."""
    os.kill(pid, signal.SIGSTOP)
    until = time.monotonic() + TAKES_EFFECT_WITHIN
    while not _stands(pid):
        if time.monotonic() > until:
            raise TimeoutError(f"process {pid} does not stand still")
        time.sleep(LOOK_EVERY)
    with _lock:
        _since.setdefault(pid, now())


def go_on(pid: int) -> None:
    """Let it go on; harmless if it was not paused, or has ended."""
    with _lock:
        if (since := _since.pop(pid, None)) is not None:
            _spans.append((pid, since, now()))
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def resume_all() -> None:
    """Let everything go on that was paused, and forget when: the plugin does it after each test."""
    for pid in list(_since):
        go_on(pid)
    with _lock:
        _spans.clear()


def end(pid: int) -> None:
    """`kill`, of a process that has not been waited for."""
    with contextlib.suppress(ProcessLookupError, TimeoutError):
        stand_still(pid)  # so that it is known since when it has done nothing
    with contextlib.suppress(ProcessLookupError):
        if os.getpgid(pid) == pid != os.getpgrp():
            os.killpg(pid, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGKILL)
    until = time.monotonic() + TAKES_EFFECT_WITHIN
    while not _is_dead(pid):
        if time.monotonic() > until:
            raise TimeoutError(f"process {pid} was sent SIGKILL and does not end")
        time.sleep(LOOK_EVERY)
    with _lock:
        if (since := _since.pop(pid, None)) is not None:
            _spans.append((pid, since, math.inf))


def _pid(process: Process | int) -> int:
    pid: object = process if isinstance(process, int) else getattr(process, "pid", process)
    if pid is None:
        raise ValueError(f"{process!r} was not started: it has no pid")
    if isinstance(pid, bool) or not isinstance(pid, int):
        raise TypeError(f"give a process, or the number of one, not {process!r}")
    if pid <= 1 or pid == os.getpid():  # 0 and less are groups
        raise ValueError(f"{pid} is not a process that a test may stop")
    return pid


def _ended(process: Any) -> bool:
    """Whether whoever started it has seen it end: its number may be another one's by now."""
    if isinstance(process, int):
        return False
    if callable(poll := getattr(process, "poll", None)):
        return poll() is not None
    return next((True for each in ("returncode", "exitcode") if getattr(process, each, None) is not None), False)


def _stands(pid: int) -> bool:
    """Whether all its threads do. Raises ProcessLookupError if it has ended."""
    with contextlib.suppress(ChildProcessError):
        return os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    if _is_dead(pid):
        raise ProcessLookupError(f"process {pid} has ended: it cannot be paused")
    tasks = Path(f"/proc/{pid}/task")  # it is not ours to wait for
    if not tasks.exists():  # nobody to ask; the signal takes effect before the process runs again
        return True
    return all(_state(task) in "TtZX" for task in tasks.iterdir())


def _is_dead(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    with contextlib.suppress(ChildProcessError):  # ours, and nobody has waited for it: it can be asked for again
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    return Path("/proc/self").exists() and _state(Path(f"/proc/{pid}")) in "ZX"


def _state(task: Path) -> str:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:  # it has just ended
        return "X"
