"""What happens in the child before it becomes CMD.

multilock has threads, and a child forked from a threaded process cannot safely run Python. So this file is run as a
program by a fresh interpreter, which then turns into CMD: ``launch.py PARENT REPORT WATCH FOREGROUND CMD…``.
It imports nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Linux: SIGKILL for this process when ``parent`` dies, kept across exec (but not by a set-user-id program).

    The kernel watches the thread that forked, so that must be the parent's main thread.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the kernel was asked to watch it
        os._exit(128 + signal.SIGKILL)


def leave_watcher(pipe: int) -> None:
    """A process that kills this whole group when multilock dies, which is when ``pipe`` ends without a byte.

    It is no child of CMD, which would not know it, and has a session of its own, where no signal to the group and none
    of the terminal reaches it. Nothing else stays open in it: the reader of CMD's output must see its end.
    """
    group = os.getpgrp()
    if child := os.fork():
        os.waitpid(child, 0)
        return
    if os.fork():
        os._exit(0)
    os.setsid()
    os.chdir("/")
    for number in open_descriptors():
        if number != pipe:
            with contextlib.suppress(OSError):  # not open
                os.close(number)
    if not os.read(pipe, 1):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    os._exit(0)


def open_descriptors() -> list[int]:
    """Return the numbers of all open file descriptors, and of some that are not open."""
    try:
        return [int(number) for number in os.listdir("/dev/fd")]
    except OSError:  # a bare chroot
        return list(range(256))


def inheritable_descriptors() -> list[int]:
    """Return the descriptors above stderr that a program run by this process would inherit."""
    found = []
    for number in open_descriptors():
        with contextlib.suppress(OSError):  # not open
            if number > 2 and os.get_inheritable(number):
                found.append(number)
    return found


def take_terminal() -> None:
    """Here, not in the parent: CMD must not read before it may."""
    with contextlib.suppress(OSError):  # somebody has hung up
        os.tcsetpgrp(0, os.getpgrp())


def main(parent: str, report: str, watch: str, foreground: str, *command: str) -> None:
    """Become ``command``, in the foreground of the terminal on stdin if asked to.

    If that fails, its errno is written to the file descriptor ``report``; success closes it.
    """
    die_with(int(parent))
    leave_watcher(int(watch))
    for ours in (report, watch):
        os.set_inheritable(int(ours), False)
    if foreground == "1":
        take_terminal()
    for signum in (signal.SIGTTOU, signal.SIGTSTP, signal.SIGPIPE, signal.SIGXFSZ):  # ignored by multilock or Python
        signal.signal(signum, signal.SIG_DFL)
    if os.environ.get("LISTEN_PID") == parent:  # systemd's sockets are for the process of this number
        os.environ["LISTEN_PID"] = str(os.getpid())
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(int(report), str(error.errno).encode())
    os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
