"""A process that takes a server down, and brings it up again even if its parent dies.

``python keeper.py ORDER`` causes the fault, prints ``down``, and waits until a line arrives on stdin, stdin ends (its
parent died) or ``within`` seconds have passed. Then it ends the fault and prints ``up``, or why that failed. This
program needs only the standard library. It is started before the fault and ignores Ctrl-C, so a stopped server always
has a process that continues it. ORDER is JSON::

    {"within": SECONDS, "pid": PID}                              SIGSTOP, then SIGCONT, and for all its child processes
    {"within": SECONDS, "down": [COMMAND], "up": [COMMAND]}      each a list of words
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

__all__ = ["family", "main", "parent_of", "states"]

STOPS_WITHIN = 5.0  # seconds until all threads of the server and of its children must be stopped
COMMAND_WITHIN = 60.0


def states(pid: int) -> str:
    """Return the states of all threads of a process on Linux, one letter for each as in proc(5). Returns an empty text
    if the process has ended."""
    found = ""
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += (task / "stat").read_text().rpartition(")")[2].split()[0]
    return found


def parent_of(pid: int) -> int:
    """Return the id of a process's parent. Raises OSError if the process has ended, or if this is not Linux."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def family(pid: int) -> list[int]:
    """Return a process and, on Linux, all its descendants. PostgreSQL has a child process for each connection."""
    parents = {}
    for each in [int(path.name) for path in Path("/proc").glob("[0-9]*")]:
        with contextlib.suppress(OSError):  # it has ended
            parents[each] = parent_of(each)
    found = [pid]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return found


def _down(order: dict[str, Any], stopped: list[int]) -> None:
    if "pid" not in order:
        _command(order["down"])
        return
    os.kill(order["pid"], 0)
    until = time.monotonic() + STOPS_WITHIN
    while new := [each for each in family(order["pid"]) if each not in stopped]:  # a stopped process starts no child
        stopped += new
        _signal(new, signal.SIGSTOP)
        while any(set(states(each)) - set("tTZX") for each in new):
            if time.monotonic() > until:
                raise OSError("the process is not stopped by SIGSTOP")
            time.sleep(0.001)


def _up(order: dict[str, Any], stopped: list[int]) -> None:
    if "pid" not in order:
        _command(order["up"])
        return
    _signal(stopped, signal.SIGCONT)


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # the process has ended
            os.kill(pid, number)


def _command(words: list[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=COMMAND_WITHIN)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()[-200:]}")


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # the parent is gone
        os.write(1, f"{text}\n".encode())


def main(order: dict[str, Any]) -> None:
    """Take the server down, wait, and bring it up again."""
    # These signals must not end this process before it has resumed the server.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))
    stopped: list[int] = []
    try:
        try:
            _down(order, stopped)
            _say("down")
        except (OSError, subprocess.TimeoutExpired) as error:
            _say(f"failed: {error}")
        select.select([0], [], [], order["within"])
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        try:
            _up(order, stopped)
            _say("up")
        except (OSError, subprocess.TimeoutExpired) as error:
            _say(f"failed: {error}")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
