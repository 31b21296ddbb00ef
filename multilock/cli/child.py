"""CMD: a process group of its own, in the foreground of the terminal if there is one, that dies with multilock."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from multilock.runtime import now

__all__ = ["CannotStart", "Child"]

LAUNCH = str(Path(__file__).with_name("launch.py"))
LOOK_EVERY = 0.02  # seconds between looks at a group that is being ended; there is nothing to wait on
NOT_FOUND, NOT_EXECUTABLE = 127, 126  # as a shell has it


class CannotStart(Exception):
    """CMD could not be run; ``code`` is the exit code a shell would give."""

    def __init__(self, command: str, number: int) -> None:
        super().__init__(f"{command}: {os.strerror(number)}")
        self.code = NOT_FOUND if number == errno.ENOENT else NOT_EXECUTABLE


class Child:
    """One run of CMD. Made and waited for by the main thread; any thread may signal or end it."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start it. Raises CannotStart."""
        self._terminal = _in_foreground()
        self._lock = threading.RLock()  # a signal handler may interrupt the main thread in one of its sections
        self._over = False  # its group's number may belong to somebody else
        report, report_end = os.pipe()
        # With `cmd | less` on a terminal the rest of the pipeline needs the foreground; CMD gets it when it asks.
        foreground = self._terminal and os.isatty(1)
        arguments = [str(os.getpid()), str(report_end), str(int(foreground)), *command]
        with open(report, "rb") as told:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", LAUNCH, *arguments],
                    env={**os.environ, **environment},
                    process_group=0,
                    pass_fds=(report_end,),
                )
            finally:
                os.close(report_end)
            self.group = self._process.pid
            failed = told.read()  # ends when CMD begins
        if failed:
            self.wait()
            self.close()
            raise CannotStart(command[0], int(failed))

    def signal(self, signum: int) -> None:
        """Send ``signum`` to the whole group, as long as there is one."""
        with self._lock, contextlib.suppress(ProcessLookupError, PermissionError):
            if not self._over:
                os.killpg(self.group, signum)

    def wait(self) -> int:
        """Wait for CMD itself; its exit code, or 128 + the signal that ended it.

        CMD cannot be suspended from the terminal: it would keep the lock, and nobody would be told.
        """
        while True:
            _, status = os.waitpid(self._process.pid, os.WUNTRACED)
            if not os.WIFSTOPPED(status):
                break
            self._stopped(os.WSTOPSIG(status))
        self._process.returncode = os.waitstatus_to_exitcode(status)  # waited for here: Popen must not wait again
        if self._terminal:
            _put_in_foreground(os.getpgrp())
        code = self._process.returncode
        return 128 - code if code < 0 else code

    def _stopped(self, by: int) -> None:
        if self._terminal and by in (signal.SIGTTIN, signal.SIGTTOU):
            _put_in_foreground(self.group)
        elif not (self._terminal and by == signal.SIGTSTP):
            return  # somebody's kill -STOP is respected
        self.signal(signal.SIGCONT)

    def end(self, kill_at: float) -> None:
        """SIGTERM to the group now, SIGKILL at ``kill_at`` (on the clock `multilock.now()`) to what is left of it."""
        self.signal(signal.SIGTERM)
        self.signal(signal.SIGCONT)  # a stopped process hears nothing before
        while self._exists() and (rest := kill_at - now()) > 0:
            time.sleep(min(rest, LOOK_EVERY))
        self.signal(signal.SIGKILL)

    def _exists(self) -> bool:
        try:
            os.killpg(self.group, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return True

    def close(self) -> None:
        """No signal is sent any more; call it once CMD has been waited for."""
        with self._lock:
            self._over = True


def _in_foreground() -> bool:
    """Whether stdin is a terminal and ours to hand on."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


def _put_in_foreground(group: int) -> None:
    with contextlib.suppress(OSError):  # somebody has hung up
        os.tcsetpgrp(0, group)
