"""The command line: ``multilock`` and ``python -m multilock``. Tables need the extra ``multilock[cli]`` (rich)."""

from __future__ import annotations

import io
import os
import sys

__all__ = ["main"]


def main() -> int:
    """Run the command that ``sys.argv`` names. Returns the exit code."""
    _open_standard_streams()
    from multilock.cli.arguments import run_app

    return run_app()


def _open_standard_streams() -> None:
    """Open those of stdin, stdout and stderr that are closed, as they may be in a daemon.

    Otherwise the next file that is opened, such as a database, would get the number 0, 1 or 2, and CMD would use it.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode))
    for stream in (sys.stdout, sys.stderr):  # a name that cannot be printed must not end a command early
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
