"""The machine on which a comparison ran: its times are true for this machine only."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import Any

__all__ = ["describe", "host"]

PROC = Path("/proc")
GIB = 2**30


def host(proc: Path = PROC) -> dict[str, Any]:
    """Return the machine for the report. ``cpu`` (its model) and ``memory`` (bytes) only if ``proc`` has them."""
    found: dict[str, Any] = {
        "system": platform.platform(), "python": platform.python_version(), "cores": os.cpu_count(),
        "machine": platform.machine(),
    }  # fmt: skip
    if cpu := _told(proc / "cpuinfo", r"model name\s*:\s*(.+)"):
        found["cpu"] = cpu
    if memory := _told(proc / "meminfo", r"MemTotal:\s*(\d+) kB"):
        found["memory"] = int(memory) * 1024
    return found


def describe(its: dict[str, Any]) -> str:
    """Return the machine of a report, in words."""
    cpu = f" of {its['cpu']}" if "cpu" in its else ""
    memory = f", {its['memory'] / GIB:.1f} GiB of memory" if "memory" in its else ""
    return f"{its['system']}, {its['cores']} cores{cpu}{memory}"


def _told(file: Path, pattern: str) -> str:
    """Return the first match in the file, or an empty text."""
    try:
        found = re.search(f"^{pattern}$", file.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    except OSError:
        return ""
    return found[1].strip() if found else ""
