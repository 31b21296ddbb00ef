"""The folder of a run. It is checked for writing before anything runs, and before an old history is overwritten."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO

from multilock import ConfigurationError
from multilock.testing.compare.report import HISTORY

__all__ = ["check_writable", "open_history"]

DISK = 65_536  # bytes to write as a trial


def check_writable(out: Path | None) -> None:
    """Raise ConfigurationError if the folder cannot be made or the disk is full. Its present files are not touched."""
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
    """Open the history, once everything else is known to be right. Unless ``resume``, this deletes the old history."""
    path = Path(os.devnull) if out is None else out / HISTORY
    try:
        if out is not None and not resume:
            path.write_bytes(b"\n" * DISK)
        return path.open("ab" if resume else "wb", buffering=0)
    except OSError as error:
        raise _unwritable(path.parent, error) from error


def _unwritable(out: Path, error: OSError) -> ConfigurationError:
    return ConfigurationError(f"{out} cannot be written: {error.strerror}")
