"""The command line: ``multilock`` and ``python -m multilock``. Needs the extra ``multilock[cli]`` (typer, rich)."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> int:
    """Run the command that ``sys.argv`` names; returns the exit code."""
    try:
        from multilock.cli.app import run_app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "click", "rich"):  # a mistake of ours must not read "pip install"
            raise
        print("multilock: the command line needs typer and rich: pip install 'multilock[cli]'", file=sys.stderr)
        return 64
    return run_app()
