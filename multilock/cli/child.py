"""CMD: a process group that dies with multilock, in the foreground of the terminal if there is one."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from pathlib import Path

from multilock import system
from multilock.cli.launch import inheritable_descriptors
from multilock.kernel.runtime import now

__all__ = ["CannotStart", "Child"]

# CMD inherits what the caller opened for it (`3>file`, `<(…)`, a systemd socket). This list is made before a client
# opens anything, so that it has no connection of ours.
INHERITED = frozenset(inheritable_descriptors())
LAUNCH = str(Path(__file__).with_name("launch.py"))
LOOK_EVERY = 0.02  # seconds between checks of a group that is being ended, which sends no event
LOOK_FOR_ZOMBIES_EVERY = 0.2  # seconds, because this reads a file for each process of the machine
DYING = 5.0  # seconds for the kernel to end a killed process; one inside a system call may never end
NOT_FOUND, NOT_EXECUTABLE = 127, 126  # as in a shell


class CannotStart(Exception):
    """CMD could not be run. ``code`` is the exit code that a shell would give."""

    def __init__(self, command: str, number: int) -> None:
        super().__init__(f"{command}: {os.strerror(number)}")
        self.code = NOT_FOUND if number == errno.ENOENT else NOT_EXECUTABLE


class _Left(Enum):
    """The processes left in a group."""

    NOTHING = auto()
    OURS = auto()
    FORBIDDEN = auto()  # only processes of another user


class Child:
    """One run of CMD. The main thread makes it and waits for it; any thread may signal or end it."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start CMD. Raises CannotStart."""
        self._terminal = _in_foreground()
        self._lock = system.RLock()  # reentrant: a signal handler may interrupt the main thread while it has the lock
        self._over = False  # True when the number of the group may belong to somebody else
        self._reaped = system.Event()
        self._ending = False
        self._zombies: set[str] = set()
        self._look_for_zombies_at = 0.0
        report, report_end = os.pipe()
        self._watch_end: int | None
        watch, self._watch_end = os.pipe()  # closes when this process ends, whatever the cause
        # In `cmd | less` on a terminal, the rest of the pipeline needs the foreground. CMD gets it when it asks.
        foreground = self._terminal and os.isatty(1)
        arguments = [str(os.getpid()), str(report_end), str(watch), str(int(foreground)), *command]
        with open(report, "rb") as told:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", LAUNCH, *arguments],
                    env={**os.environ, **environment},
                    process_group=0,
                    pass_fds=(report_end, watch, *INHERITED.intersection(inheritable_descriptors())),
                )
            finally:
                os.close(report_end)
                os.close(watch)
            self.group = self._process.pid
            failed = told.read()  # returns when CMD has started, or could not
        if failed:
            self.wait()
            self.close()
            raise CannotStart(command[0], int(failed))

    def signal(self, signum: int) -> bool:
        """Send ``signum`` to the whole group. Returns False if all its processes are another user's, as with sudo."""
        with self._lock:
            try:
                if not self._over:
                    os.killpg(self.group, signum)
            except ProcessLookupError:
                pass
            except PermissionError:
                return False
        return True

    def wait(self, pause: Callable[[], None] | None = None) -> int:
        """Wait for CMD itself. Returns its exit code, or 128 + the signal that ended it.

        ``pause()`` waits until a signal has come, also SIGCHLD. Without it, no signal is passed on meanwhile.

        CMD cannot be suspended from the terminal: it would keep the lock, and nobody would notice.
        """
        while True:
            pid, status = os.waitpid(self._process.pid, os.WUNTRACED | (os.WNOHANG if pause else 0))
            if not pid and pause:
                pause()
                continue
            if not os.WIFSTOPPED(status):
                break
            self._stopped(os.WSTOPSIG(status))
        self._process.returncode = os.waitstatus_to_exitcode(status)  # so that Popen does not wait again
        if not self._ending:  # CMD ended by itself: the rest of its group may live on
            self._dismiss_watcher()
        self._reaped.set()
        self.leave_terminal()
        code = self._process.returncode
        return 128 - code if code < 0 else code

    def _stopped(self, by: int) -> None:
        if self._terminal and by in (signal.SIGTTIN, signal.SIGTTOU):
            _put_in_foreground(self.group)
        elif not (self._terminal and by == signal.SIGTSTP):
            return  # somebody stopped it with kill -STOP: leave it stopped
        self.signal(signal.SIGCONT)

    def terminate(self) -> None:
        """Send SIGTERM to the group."""
        self._ending = True
        self.signal(signal.SIGTERM)
        self.signal(signal.SIGCONT)  # a stopped process does not receive it before

    def kill(self, kill_at: float, give_up_at: float, forbidden: Callable[[], None]) -> bool:
        """Send SIGKILL at ``kill_at`` (on the clock `multilock.now()`) to the processes left in the group.

        Returns False if processes that we may not kill are still alive at ``give_up_at``, or if the kernel does not end
        CMD. ``forbidden`` is called as soon as only such processes are left.
        """
        told = False
        killed = False
        while (left := self._left()) is not _Left.NOTHING:
            if left is _Left.FORBIDDEN and not told:
                told = True
                forbidden()
            if not killed and now() >= kill_at:
                killed = True
                self.signal(signal.SIGKILL)
            if killed and left is _Left.OURS and self._reaped.is_set():
                return True  # only zombies are left, which nobody has waited for
            limit = give_up_at if left is _Left.FORBIDDEN else max(give_up_at, kill_at) + DYING
            if killed and now() >= limit:
                return False
            system.sleep(LOOK_EVERY if killed else max(0.0, min(LOOK_EVERY, kill_at - now())))
        return True

    def _left(self) -> _Left:
        if self._reaped.is_set():  # as process 1 we must wait for CMD's orphans
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-self.group, os.WNOHANG)[0]:
                    pass
        try:
            os.killpg(self.group, 0)
        except ProcessLookupError:
            return _Left.NOTHING
        except PermissionError:
            return _Left.FORBIDDEN
        if not self._reaped.is_set() or now() < self._look_for_zombies_at:
            return _Left.OURS
        before, self._zombies = self._zombies, _zombies(self.group)
        self._look_for_zombies_at = now() + LOOK_FOR_ZOMBIES_EVERY
        # Only the same zombies twice: a process that was born during the first look is alive in the second.
        return _Left.NOTHING if self._zombies and self._zombies == before else _Left.OURS

    def close(self) -> None:
        """Send no further signal. Call it once CMD has been waited for."""
        with self._lock:
            self._over = True
        self._dismiss_watcher()

    def leave_terminal(self) -> None:
        """Take the foreground of the terminal back."""
        if self._terminal:
            _put_in_foreground(os.getpgrp())

    def _dismiss_watcher(self) -> None:
        with self._lock:
            if self._watch_end is not None:
                with contextlib.suppress(OSError):  # the watcher was killed
                    os.write(self._watch_end, b".")
                os.close(self._watch_end)
                self._watch_end = None


def _zombies(group: int) -> set[str]:
    """Return the processes of a group if all of them have ended, otherwise an empty set.

    They stay as zombies under a process 1 that waits for nobody, as in some containers. Needs /proc, otherwise the set
    is empty.
    """
    found = set()
    with contextlib.suppress(OSError):
        Path("/proc/1/stat").read_bytes()  # some machines hide the processes of other users
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it is gone
                fields = (process / "stat").read_bytes().rpartition(b")")[2].split()
                state, its_group, threads = fields[0], int(fields[2]), int(fields[17])
                if its_group == group:
                    if state not in b"ZX" or threads > 1:
                        return set()
                    found.add(process.name)
        return found
    return set()


def _in_foreground() -> bool:
    """Return whether stdin is a terminal in whose foreground we are."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


def _put_in_foreground(group: int) -> None:
    with contextlib.suppress(OSError):  # the terminal is gone
        os.tcsetpgrp(0, group)
