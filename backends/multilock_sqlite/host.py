"""Find out about this host: which boot it is, which processes live, and where a directory is mounted.

This module reads /proc. A function returns None if /proc lacks the information, which proves nothing.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

__all__ = ["Process", "boot_id", "clock_is_shifted", "file_system", "is_mount_point"]


@dataclass(frozen=True, slots=True)
class Process:
    """The identity of a process.

    ``pid`` and ``start`` (clock ticks after the boot) identify a process within the namespaces that ``space`` names.
    """

    space: str
    pid: int
    start: int

    @classmethod
    def current(cls) -> Process | None:
        """Return this process, or None if /proc is missing or shows the processes of another pid namespace."""
        try:
            if os.readlink("/proc/self") != str(os.getpid()):
                return None
            space = os.readlink("/proc/self/ns/pid") + _time_namespace()
        except OSError:
            return None
        stat = _stat(os.getpid())
        return cls(space, os.getpid(), stat.start) if stat else None

    def knows_gone(self, other: Process) -> bool:
        """Return True only if ``other`` has provably ended."""
        if other == self or other.space != self.space:
            return False
        try:
            os.kill(other.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass  # the process exists, and belongs to another user
        stat = _stat(other.pid)  # None if /proc is mounted with hidepid
        return stat is not None and (stat.start != other.start or stat.is_dead)


@dataclass(frozen=True, slots=True)
class _Stat:
    start: int
    is_dead: bool


def _stat(pid: int) -> _Stat | None:
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            text = file.read()
    except OSError:
        return None
    fields = text[text.rindex(b")") + 2 :].split()  # the name before the bracket may contain any character
    # A killed process stays a zombie until its parent waits for it. A zombie with threads left is not dead, since only
    # its first thread has ended.
    return _Stat(start=int(fields[19]), is_dead=fields[0] in b"ZX" and int(fields[17]) <= 1)


def _time_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/time")
    except OSError:
        return ""  # Linux before 5.6 has only one time namespace


def boot_id() -> str | None:
    """Return a text that differs after each boot, or None if it is unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as file:
            return file.read().strip()
    except OSError:
        return None


def clock_is_shifted() -> bool:
    """Return whether CLOCK_BOOTTIME differs from that of processes outside our time namespace."""
    try:
        with open("/proc/self/timens_offsets", encoding="utf-8") as file:
            return any(line.split()[0] == "boottime" and line.split()[1:] != ["0", "0"] for line in file)
    except OSError:
        return False


def file_system(directory: str) -> str | None:
    """Return the type of the directory's file system as in /proc/mounts, such as ``"ext4"``, or None."""
    path = os.path.realpath(directory)
    found: tuple[int, str] | None = None
    try:
        with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as file:
            for line in file:
                _, escaped, kind, *_ = line.split(" ")
                point = _unescape(escaped).rstrip("/") + "/"
                # a later mount on the same point hides an earlier one
                if (path + "/").startswith(point) and (found is None or len(point) >= found[0]):
                    found = len(point), kind
    except OSError:
        return None
    return found[1] if found else None


def is_mount_point(path: str) -> bool | None:
    """Return whether something is mounted on exactly ``path``, which must not contain symbolic links.

    ``os.path.ismount`` does not detect a mounted file, because the file has the same device as its directory.
    """
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            return any(_unescape(line.split(" ", 5)[4]) == path for line in file)
    except OSError:
        return None


def _unescape(point: str) -> str:
    for code, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        point = point.replace(code, char)
    return point
