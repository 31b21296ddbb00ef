"""A process that takes a server down and puts it up again, whatever becomes of who asked for it.

``python keeper.py ORDER`` does the fault, says ``down``, and waits for a line, for the end of its stdin (who asked has
died), or for so many seconds; then it undoes the fault and says ``up``, or why not. It needs nothing but the standard
library, is started before the fault and hears of no ctrl-C, so that a server is stopped only while somebody is there to
let it go on. ORDER is JSON::

    {"within": SECONDS, "pid": PID}                              SIGSTOP, then SIGCONT
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

__all__ = ["main", "states"]

STOPS_WITHIN = 5.0  # seconds until each of its threads stands still
COMMAND_WITHIN = 60.0


def states(pid: int) -> str:
    """Of all threads of a process, a letter each as in proc(5); empty: it has ended. Linux."""
    found = ""
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += (task / "stat").read_text().rpartition(")")[2].split()[0]
    return found


def _down(order: dict[str, Any]) -> None:
    if "pid" not in order:
        _command(order["down"])
        return
    os.kill(order["pid"], signal.SIGSTOP)
    until = time.monotonic() + STOPS_WITHIN
    while set(states(order["pid"])) - set("tTZX"):
        if time.monotonic() > until:
            raise OSError("it does not stop")
        time.sleep(0.001)


def _up(order: dict[str, Any]) -> None:
    if "pid" not in order:
        _command(order["up"])
        return
    with contextlib.suppress(ProcessLookupError):  # it was killed meanwhile
        os.kill(order["pid"], signal.SIGCONT)


def _command(words: list[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=COMMAND_WITHIN)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()[-200:]}")


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # nobody hears it any more
        os.write(1, f"{text}\n".encode())


def main(order: dict[str, Any]) -> None:
    # A terminal that is closed and an operator who ends everything: what is down is put up all the same.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))
    try:
        try:
            _down(order)
            _say("down")
        except (OSError, subprocess.TimeoutExpired) as error:
            _say(f"failed: {error}")
        select.select([0], [], [], order["within"])
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        try:
            _up(order)
            _say("up")
        except (OSError, subprocess.TimeoutExpired) as error:
            _say(f"failed: {error}")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
