"""The work that must be done in the child before it becomes CMD.

multilock has threads, and a child forked from a threaded process cannot safely run Python. So a fresh interpreter runs
this file as a program, which then becomes CMD: ``launch.py PARENT REPORT WATCH FOREGROUND CMD…``. It imports only the
standard library.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Linux: have the kernel send SIGKILL to this process when ``parent`` dies.

    That survives exec, except of a set-user-id program. The kernel watches the thread that forked, so that must be the
    parent's main thread.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent died before the kernel watched it
        os._exit(128 + signal.SIGKILL)


def leave_watcher(pipe: int) -> None:
    """Start a process that kills this whole group when multilock dies: then ``pipe`` ends without a byte.

    The watcher is not a child of CMD, which would not expect one. It has its own session, so that no signal to the
    group or from the terminal reaches it. It keeps nothing else open: the reader of CMD's output must see its end.
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
    """Return the numbers of all open file descriptors, possibly with some that are not open."""
    try:
        return [int(number) for number in os.listdir("/dev/fd")]
    except OSError:  # /dev/fd is missing, as in a bare chroot
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
    """Take the foreground here, not in the parent: CMD must not read from the terminal before it has it."""
    with contextlib.suppress(OSError):  # the terminal is gone
        os.tcsetpgrp(0, os.getpgrp())


def main(parent: str, report: str, watch: str, foreground: str, *command: str) -> None:
    """Become ``command``, in the foreground of the terminal on stdin if ``foreground`` is "1".

    If that fails, write the errno to the file descriptor ``report``. Success closes the descriptor.
    """
    die_with(int(parent))
    leave_watcher(int(watch))
    for ours in (report, watch):
        os.set_inheritable(int(ours), False)
    if foreground == "1":
        take_terminal()
    for signum in (signal.SIGTTOU, signal.SIGTSTP, signal.SIGPIPE, signal.SIGXFSZ):  # ignored by multilock or Python
        signal.signal(signum, signal.SIG_DFL)
    if os.environ.get("LISTEN_PID") == parent:  # systemd's sockets belong to the process with this number
        os.environ["LISTEN_PID"] = str(os.getpid())
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(int(report), str(error.errno).encode())
    os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
