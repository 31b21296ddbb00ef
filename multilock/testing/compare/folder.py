"""The folder of a run: whether it can be written is known before anything runs, and before what was kept there ends."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO

from multilock import ConfigurationError
from multilock.testing.compare.report import HISTORY

__all__ = ["check_writable", "open_history"]

DISK = 65_536  # bytes that are written on trial


def check_writable(out: Path | None) -> None:
    """A folder that cannot be made, or a disk that is full, is told of first. What is kept there is not touched."""
    if out is None:
        return
    trial = out / f"{HISTORY}.trial"
    try:
        out.mkdir(parents=True, exist_ok=True)
        try:
            trial.write_bytes(b"\n" * DISK)
        finally:
            trial.unlink(missing_ok=True)
    except OSError as error:
        raise _unwritable(out, error) from error


def open_history(out: Path | None, *, resume: bool) -> IO[bytes]:
    """Opened when all else is known to be right: unless it is gone on with, the history that was kept there ends."""
    path = Path(os.devnull) if out is None else out / HISTORY
    try:
        if out is not None and not resume:
            path.write_bytes(b"\n" * DISK)
        return path.open("ab" if resume else "wb", buffering=0)
    except OSError as error:
        raise _unwritable(path.parent, error) from error


def _unwritable(out: Path, error: OSError) -> ConfigurationError:
    return ConfigurationError(f"{out} cannot be written: {error.strerror}")
