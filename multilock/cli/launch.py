"""The work that must be done in the child before it becomes CMD.

multilock has threads, and a child forked from a threaded process cannot safely run Python. So a fresh interpreter runs
this file as a program, which then becomes CMD: ``launch.py PARENT REPORT GO WATCH FOREGROUND CMD…``. It imports only
the standard library.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

PR_SET_PDEATHSIG = 1
LOOKS = 500
LOOK_AGAIN = 0.02  # seconds until the second search, if the first search found no process
CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # the clock of `multilock.now()`


def die_with(parent: int) -> None:
    """Linux: have the kernel send SIGKILL to this process when ``parent`` dies.

    This setting survives exec, unless the program is set-user-id. The kernel watches the thread that forked, so the
    parent must fork in its main thread.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent died before the kernel watched it
        os._exit(128 + signal.SIGKILL)


def leave_watcher(pipe: int) -> None:
    """Start a process that kills this whole group when multilock dies: then ``pipe`` ends without a byte.

    The watcher is not a child of CMD, which would not expect one. The watcher has its own session, so that no signal to
    the group or from the terminal reaches it. The watcher keeps no other descriptor open: the reader of CMD's output
    must see the end of that output.
    """
    group, session = os.getpgrp(), os.getsid(0)
    if child := os.fork():
        os.waitpid(child, 0)
        return
    if os.fork():
        os._exit(0)
    os.setsid()
    os.chdir("/")
    for number in open_descriptors():
        if number != pipe:
            with contextlib.suppress(OSError):  # the descriptor is not open
                os.close(number)
    if not os.read(pipe, 1):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
        kill_strays(os.environ.get("MULTILOCK_OWNER", ""), group, session)
    os._exit(0)


def strays(owner: str, group: int, session: int) -> list[int]:
    """Linux: return the processes that CMD started and that have left its group, as processes of timeout(1) and ``set
    -m`` do.

    They are still in CMD's session, and have the MULTILOCK_OWNER that only this run of CMD got. A daemon is not
    returned, because it has a session of its own: CMD wanted it to live on.

    Searches twice before it returns an empty list, because a process in the middle of execve shows no environment.
    """
    if not owner:
        return []
    mark = os.fsencode(f"MULTILOCK_OWNER={owner}")
    if not (found := _marked(mark, group, session)):
        time.sleep(LOOK_AGAIN)
        found = _marked(mark, group, session)
    return found


def _marked(mark: bytes, group: int, session: int) -> list[int]:
    found = []
    with contextlib.suppress(FileNotFoundError):  # no /proc
        for pid in [int(name) for name in os.listdir("/proc") if name.isdigit()]:
            with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
                if os.getsid(pid) == session and os.getpgid(pid) != group:
                    # this file is empty if the process is a zombie, or is in the middle of execve()
                    with open(f"/proc/{pid}/environ", "rb") as environment:
                        if mark in environment.read().split(b"\0"):
                            found.append(pid)
    return found


def kill_strays(owner: str, group: int, session: int) -> None:
    """Kill the processes that `strays` returns, until it returns none: a process may have started another one just
    before it was killed."""
    for _ in range(LOOKS):
        if not (pids := strays(owner, group, session)):
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


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
        with contextlib.suppress(OSError):  # the descriptor is not open
            if number > 2 and os.get_inheritable(number):
                found.append(number)
    return found


def take_terminal() -> None:
    """Take the foreground here, not in the parent: CMD must not read from the terminal before it has the foreground."""
    with contextlib.suppress(OSError):  # the terminal is gone
        os.tcsetpgrp(0, os.getpgrp())


def wait_for_go(report: int, go: int) -> None:
    """Write a dot to ``report``, and read from ``go`` the time before which CMD may begin. If that time has passed, ask
    again.

    So CMD does not begin after the end of the lease, however long this process or multilock was stopped before.
    """
    while True:
        os.write(report, b".")
        until = os.read(go, 64)
        if not until:  # multilock has ended
            os._exit(1)
        if time.clock_gettime(CLOCK) < float(until):
            return


def main(parent: str, report: str, go: str, watch: str, foreground: str, *command: str) -> None:
    """Become ``command``, in the foreground of the terminal on stdin if ``foreground`` is "1".

    If that fails, write the errno to the file descriptor ``report``. Success closes the descriptor.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a Ctrl-C during the start shows no traceback
    die_with(int(parent))
    leave_watcher(int(watch))
    for ours in (report, go, watch):
        os.set_inheritable(int(ours), False)
    if foreground == "1":
        take_terminal()
    for signum in (signal.SIGTTOU, signal.SIGTSTP, signal.SIGPIPE, signal.SIGXFSZ):  # multilock or Python ignores these
        signal.signal(signum, signal.SIG_DFL)
    if os.environ.get("LISTEN_PID") == parent:  # systemd's sockets belong to the process with this number
        os.environ["LISTEN_PID"] = str(os.getpid())
    wait_for_go(int(report), int(go))
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(int(report), str(error.errno).encode())
    os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
