"""The hooks for PyInstaller, which finds this package by the entry point ``pyinstaller40``.

multilock imports a backend only when a URL needs it. So without these hooks, a program that PyInstaller builds would
contain no backend.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["hook_dirs"]


def hook_dirs() -> list[str]:
    """Return the directory of the hooks."""
    return [str(Path(__file__).parent)]
