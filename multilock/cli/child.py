"""CMD, the command that ``multilock run`` and ``multilock elect`` start: a process group that dies with multilock.

The launcher (launch.py) is the process that becomes CMD.
"""

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

from multilock.cli.launch import inheritable_descriptors, strays
from multilock.kernel.runtime import now

__all__ = ["CannotStart", "Child"]

# CMD inherits the descriptors that the caller opened for it (`3>file`, `<(…)`, a systemd socket). This list is made
# before a client opens anything, so that it has no connection of multilock.
INHERITED = frozenset(inheritable_descriptors())
LAUNCH = str(Path(__file__).with_name("launch.py"))
LOOK_EVERY = 0.02  # seconds between checks whether a group has ended, because no event reports it
LOOK_FOR_ZOMBIES_EVERY = 0.2  # seconds between two searches, each of which reads a file for each process of the machine
DYING = 5.0  # seconds that the kernel may take to end a killed process; a process inside a system call may never end
NOT_FOUND, NOT_EXECUTABLE = 127, 126  # the exit codes of a shell


Pause = Callable[..., None]  # `Signals.pause`


class CannotStart(Exception):
    """CMD could not be run. ``code`` is the exit code that a shell would give."""

    def __init__(self, command: str, number: int) -> None:
        super().__init__(f"{command}: {os.strerror(number)}")
        self.code = NOT_FOUND if number == errno.ENOENT else NOT_EXECUTABLE


class _Left(Enum):
    """The kind of CMD's processes that have not ended."""

    NOTHING = auto()
    OURS = auto()
    FORBIDDEN = auto()  # only processes of another user are left


class Child:
    """One run of CMD. Only the main thread and its signal handlers use this object."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the program that becomes CMD. It waits for `go`."""
        self._command = command[0]
        self._owner = environment.get("MULTILOCK_OWNER", "")
        self._terminal = _in_foreground()
        self._over = False  # whether the group's number may belong to another group by now
        self._code: int | None = None
        self._ending = False
        self._zombies: set[str] = set()
        self._look_for_zombies_at = 0.0
        self._report, report_end = os.pipe()
        os.set_blocking(self._report, False)
        go, self._go = os.pipe()
        self._pipes: tuple[int, ...] = (self._report, self._go)
        self._watch_end: int | None
        watch, self._watch_end = os.pipe()  # closes when this process ends, whatever the cause
        # In `multilock run … | less` on a terminal, `less` needs the foreground. CMD gets the foreground when CMD first
        # uses the terminal.
        foreground = self._terminal and os.isatty(1)
        theirs = (report_end, go, watch)
        arguments = [str(os.getpid()), *map(str, theirs), str(int(foreground)), *command]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", LAUNCH, *arguments],
                env={**os.environ, **environment},
                process_group=0,
                pass_fds=(*theirs, *INHERITED.intersection(inheritable_descriptors())),
            )
        finally:
            for end in theirs:
                os.close(end)
        self.group = self._process.pid

    def go(self, seconds: Callable[[], float], pause: Pause) -> bool:
        """Let CMD begin. Returns False if it never began, because ``seconds()`` was 0. Raises CannotStart.

        ``seconds()`` returns for how long CMD may still begin. The launcher is slow on a busy machine: a lease that was
        valid when the launcher was started may have ended when it is ready.
        """
        ready = told = False  # whether the launcher waits for the permission to begin; whether it has got it
        while True:
            asked_at = now()
            if not (left := seconds()):
                break
            if ready:
                with contextlib.suppress(BrokenPipeError):  # the launcher was killed
                    os.write(self._go, str(asked_at + left).encode())
                ready, told = False, True
            try:
                said = os.read(self._report, 16)
            except BlockingIOError:
                self.poll()  # if Ctrl-Z has stopped the launcher, this lets it continue
                pause(left, self._report)
                continue
            if not said:
                return True  # CMD runs, or its launcher was killed
            if said != b".":
                self.wait(pause)
                self.close()
                raise CannotStart(self._command, int(said))
            ready, told = True, False
        if told:
            return True  # CMD runs or is about to run, so the caller must end it
        self.signal(signal.SIGKILL)
        self.wait(pause)
        self.close()
        return False

    def signal(self, signum: int) -> bool:
        """Send ``signum`` to the whole group. Returns False if all its processes are another user's, as with sudo."""
        try:
            if not self._over:
                os.killpg(self.group, signum)
        except ProcessLookupError:
            pass
        except PermissionError:
            return False
        return True

    def wait(self, pause: Pause) -> int:
        """Wait for CMD itself, and return its exit code as `poll` does."""
        while (code := self.poll()) is None:
            pause()
        return code

    def poll(self) -> int | None:
        """Return the exit code of CMD, or 128 + the signal that ended it, or None while it runs.

        CMD cannot be suspended from the terminal, because a suspended CMD would keep the lock unnoticed.
        """
        while self._code is None:
            pid, status = os.waitpid(self._process.pid, os.WUNTRACED | os.WNOHANG)
            if not pid:
                return None
            if os.WIFSTOPPED(status):
                self._stopped(os.WSTOPSIG(status))
                continue
            # The exit code is stored in Popen too, so that Popen does not call waitpid() again.
            code = self._process.returncode = os.waitstatus_to_exitcode(status)
            if not self._ending:  # CMD ended by itself, but the rest of its group may still run
                self._dismiss_watcher()
            self.leave_terminal()
            self._code = 128 - code if code < 0 else code
        return self._code

    def _stopped(self, by: int) -> None:
        if self._terminal and by in (signal.SIGTTIN, signal.SIGTTOU):
            _put_in_foreground(self.group)
        elif not (self._terminal and by == signal.SIGTSTP):
            return  # an operator stopped the process with kill -STOP, so leave it stopped
        self.signal(signal.SIGCONT)

    def terminate(self) -> None:
        """Send SIGTERM to all processes of CMD."""
        self._ending = True
        # A stopped process does not receive SIGTERM before it continues, so SIGCONT follows.
        for signum in (signal.SIGTERM, signal.SIGCONT):
            self._signal_all(signum)

    def _signal_all(self, signum: int) -> None:
        self.signal(signum)
        for pid in self._strays():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signum)

    def _strays(self) -> list[int]:
        return strays(self._owner, self.group, os.getsid(0))

    def kill(
        self,
        kill_at: float,
        give_up_at: float,
        pause: Pause,
        forbidden: Callable[[], None] = lambda: None,
        until: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Send SIGKILL at ``kill_at`` (on the clock `multilock.now()`) to the processes that are left.

        Returns when none is left, or ``until()`` is true. Returns False if processes that we may not kill are still
        alive at ``give_up_at``, or if the kernel does not end CMD. ``forbidden`` is called as soon as only processes
        that we may not kill are left.
        """
        told = False
        killed = False
        while (left := self._left()) is not _Left.NOTHING and not until():
            if left is _Left.FORBIDDEN and not told:
                told = True
                forbidden()
            if now() >= kill_at:
                killed = True
                self._signal_all(signal.SIGKILL)
            if killed and left is _Left.OURS and self._code is not None and not self._strays():
                return True  # only zombies are left, which nobody has waited for
            limit = give_up_at if left is _Left.FORBIDDEN else max(give_up_at, kill_at) + DYING
            if killed and now() >= limit:
                return False
            pause(LOOK_EVERY if killed else max(0.0, min(LOOK_EVERY, kill_at - now())))
        return True

    def _left(self) -> _Left:
        if self.poll() is not None:  # as process 1 we must wait for CMD's orphans
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-self.group, os.WNOHANG)[0]:
                    pass
        try:
            os.killpg(self.group, 0)
        except ProcessLookupError:
            living = False
        except PermissionError:
            return _Left.FORBIDDEN
        else:
            living = self._code is None or not self._only_zombies()
        return _Left.OURS if living or self._strays() else _Left.NOTHING

    def _only_zombies(self) -> bool:
        if now() < self._look_for_zombies_at:
            return False
        before, self._zombies = self._zombies, _zombies(self.group)
        self._look_for_zombies_at = now() + LOOK_FOR_ZOMBIES_EVERY
        # The zombies count only if two searches find the same zombies: a process that started during the first search
        # is alive in the second.
        return bool(self._zombies) and self._zombies == before

    def close(self) -> None:
        """Send no further signal. Call it after CMD has been waited for."""
        self._over = True
        self._dismiss_watcher()
        for end in self._pipes:
            os.close(end)
        self._pipes = ()

    def leave_terminal(self) -> None:
        """Take the foreground of the terminal back."""
        if self._terminal:
            _put_in_foreground(os.getpgrp())

    def _dismiss_watcher(self) -> None:
        end, self._watch_end = self._watch_end, None
        if end is not None:
            with contextlib.suppress(OSError):  # the watcher was killed
                os.write(end, b".")
            os.close(end)


def _zombies(group: int) -> set[str]:
    """Return the processes of a group if all of them have ended, otherwise an empty set.

    If process 1 does not wait for its children, as in some containers, ended processes stay as zombies. Needs /proc,
    otherwise the set is empty.
    """
    found: set[str] = set()
    with contextlib.suppress(OSError):
        Path("/proc/1/stat").read_bytes()  # some machines hide the processes of other users
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the process has ended
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
    with contextlib.suppress(OSError):  # the terminal was closed
        os.tcsetpgrp(0, group)
