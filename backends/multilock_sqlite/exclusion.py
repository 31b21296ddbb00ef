"""Locks on the file that last, although this process closes another descriptor of it.

SQLite uses POSIX locks. The system drops all of them as soon as the process closes any descriptor of the file: a
backup, a checksum or ``Path.read_bytes()`` is enough (https://sqlite.org/howtocorrupt.html, section 2.2). Then another
process writes during our transaction, or takes itself for the only user and deletes the log. So each connection has
open file descriptions of its own, and locks them as well (``F_OFD_SETLK``, Linux): only their own end drops these.

The gate is one byte of the database file that SQLite does not lock. Each transaction, opening and closing is inside
alone. In addition each open connection keeps the two locks by which SQLite sees that the file is in use, so no process
deletes the log or truncates its shared memory. Reads stay outside, so that a process that is stopped while it reads
holds nobody up. A read may therefore find anything after such a close, and decides nothing but to wait.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sqlite3
import struct
import sys
import weakref

from multilock import system

__all__ = ["Exclusion", "forget_exclusions"]

PENDING = 0x40000000  # where SQLite's own lock bytes begin
SHARED = PENDING + 2, 510  # locked for reading by each connection that is open; the last to close locks it for writing
IN_USE = 128, 1  # in the shared memory: locked for reading by each process that uses it
GATE = PENDING + 1024, 1
EVERYTHING = 0, 0
PAUSE_FIRST, PAUSE_LAST = 0.0002, 0.005  # seconds between two tries to enter

_SETLK = getattr(fcntl, "F_OFD_SETLK", None) if sys.platform == "linux" else None


class Closed(sqlite3.OperationalError):
    """Another process was inside for too long. The same as SQLite's own busy error."""

    sqlite_errorcode = sqlite3.SQLITE_BUSY
    sqlite_errorname = "SQLITE_BUSY"


class Exclusion:
    """The locks of one connection. Each has its own descriptors, so threads exclude each other like processes.

    The descriptors are closed only once this process has no connection to the file, because each closing drops SQLite's
    own locks. Until then another connection uses them again.
    """

    is_inside = False
    _memory: int | None = None

    @classmethod
    def of(cls, connection: sqlite3.Connection, path: str, file: tuple[int, int]) -> Exclusion | None:
        """Return the locks for a connection to ``file``, or None if another file is at ``path`` by now."""
        with _registering:
            exclusions = _exclusions.setdefault(file, [])
            for exclusion in exclusions:
                if exclusion._user() is None:
                    exclusion.leave()  # an interrupt may have ended its last user too early
                    exclusion._user = weakref.ref(connection)
                    return exclusion
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            found = os.fstat(descriptor)
            if (found.st_dev, found.st_ino) != file:
                os.close(descriptor)
                return None
            exclusions.append(exclusion := cls(descriptor, file, connection))
            return exclusion

    def __init__(self, descriptor: int, file: tuple[int, int], connection: sqlite3.Connection) -> None:
        self._descriptor, self._of = descriptor, file
        self._user: weakref.ref[sqlite3.Connection] | _Nobody = weakref.ref(connection)

    def enter(self, deadline: float) -> None:
        """Wait until nobody else is inside. Raises `Closed` at the deadline."""
        pause = PAUSE_FIRST
        while not self._try_to_enter():
            left = deadline - system.now()
            if left <= 0:
                raise Closed("another process is using the file")
            system.sleep(min(pause, left))
            pause = min(pause * 2, PAUSE_LAST)

    def leave(self) -> None:
        if self.is_inside:
            _lock(self._descriptor, fcntl.F_UNLCK, GATE)
            self.is_inside = False

    def _try_to_enter(self) -> bool:
        self.is_inside = True  # before the system is asked, so that leave() works after an interrupt
        self.is_inside = _lock(self._descriptor, fcntl.F_WRLCK, GATE)
        return self.is_inside

    def keep_log(self, path: str) -> None:
        """Let SQLite in every process see that the file is in use. Raises `Closed` if another program prevents it."""
        with contextlib.suppress(FileNotFoundError):  # deleted meanwhile: the next request opens the file again
            found = os.stat(f"{path}-shm").st_ino
            if self._memory is not None and os.fstat(self._memory).st_ino != found:
                os.close(self._memory)
                self._memory = None
            if self._memory is None:
                self._memory = os.open(f"{path}-shm", os.O_RDONLY | os.O_CLOEXEC)
            if not _lock(self._memory, fcntl.F_RDLCK, IN_USE):
                raise Closed("the shared memory is locked")
        if not _lock(self._descriptor, fcntl.F_RDLCK, SHARED):
            raise Closed("the file is locked")

    def leave_log(self) -> None:
        """Let the connection delete the log as it closes, if nobody else uses the file.

        If somebody is inside, this connection is not the last, and its locks stay until it is closed.
        """
        if self._try_to_enter():
            _lock(self._descriptor, fcntl.F_UNLCK, SHARED)
            if self._memory is not None:
                _lock(self._memory, fcntl.F_UNLCK, IN_USE)

    def give_back(self) -> None:
        """End all locks. The connection has been closed."""
        for descriptor in (self._descriptor, self._memory):
            if descriptor is not None:
                _lock(descriptor, fcntl.F_UNLCK, EVERYTHING)
        self.is_inside = False
        with _registering:
            self._user = _nobody
            if all(exclusion._user() is None for exclusion in _exclusions.get(self._of, ())):
                for exclusion in _exclusions.pop(self._of, ()):
                    exclusion.close()

    def close(self) -> None:
        for descriptor in (self._descriptor, self._memory):
            if descriptor is not None:
                os.close(descriptor)


class _Nobody:
    def __call__(self) -> None:
        return None


def forget_exclusions() -> None:
    """Close what a forked child has of its parent: the locks would last as long as the child has the descriptors."""
    global _registering
    _registering = system.Lock()
    inherited = [(file, exclusion) for file, exclusions in _exclusions.items() for exclusion in exclusions]
    _exclusions.clear()
    for file, exclusion in inherited:
        with contextlib.suppress(OSError):
            found = os.fstat(exclusion._descriptor)
            if (found.st_dev, found.st_ino) == file:  # a child of C code may have closed it, and used its number again
                exclusion.close()


def _lock(descriptor: int, kind: int, where: tuple[int, int]) -> bool:
    """Lock or unlock a range at once. Returns False if another open file description excludes it."""
    if _SETLK is None:
        return True
    try:
        fcntl.fcntl(descriptor, _SETLK, _REQUESTS[kind, where])
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        return False
    return True


_nobody = _Nobody()
_registering = system.Lock()  # held while exclusions are listed, taken or closed
_exclusions: dict[tuple[int, int], list[Exclusion]] = {}  # all of this process, by file
_REQUESTS = {
    (kind, where): struct.pack("hhqqi0q", kind, os.SEEK_SET, *where, 0)
    for kind in (fcntl.F_RDLCK, fcntl.F_WRLCK, fcntl.F_UNLCK)
    for where in (SHARED, IN_USE, GATE, EVERYTHING)
}
