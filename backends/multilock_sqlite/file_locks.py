"""Locks on the file that survive when this process closes another descriptor of the file.

SQLite uses POSIX locks. The system drops all of them as soon as the process closes any descriptor of the file: a
backup, a checksum or ``Path.read_bytes()`` is enough (https://sqlite.org/howtocorrupt.html, section 2.2). Then another
process may write during our transaction, or may assume that it is the only user and delete the log. So each process has
separate open file descriptions, and locks these as well (``F_OFD_SETLK``, Linux). Such a lock is dropped only when its
own description is closed. Systems without such locks only have SQLite's locks.

The gate is one byte of the database file that SQLite does not lock. Only one connection at a time may be inside the
gate, for a transaction, its opening or its closing. In addition a process with an open connection keeps the two locks
by which SQLite sees that the file is in use, so no process deletes the log or truncates its shared memory. Reads do not
enter the gate, so a process that is stopped while it reads delays no other. After another descriptor was closed, a read
may return anything. So a read alone never grants or refuses a claim.
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
SHARED = PENDING + 2, 510  # each open connection locks it for reading; the last one to close locks it for writing
IN_USE = 128, 1  # bytes of the shared memory that each process locks for reading while it uses it
GATE = PENDING + 1024, 1
EVERYTHING = 0, 0
PAUSE_FIRST, PAUSE_LAST = 0.0002, 0.005  # seconds between two tries to enter the gate

_SETLK = getattr(fcntl, "F_OFD_SETLK", None) if sys.platform == "linux" else None


class Closed(sqlite3.OperationalError):
    """Another process was inside the gate for too long. This counts as SQLite's own busy error."""

    sqlite_errorcode = sqlite3.SQLITE_BUSY
    sqlite_errorname = "SQLITE_BUSY"


class Exclusion:
    """The locks of one connection. The threads of a process exclude each other too."""

    def __init__(self, locks: _Locks, connection: sqlite3.Connection) -> None:
        self._locks = locks
        # An interrupt can end a close early. The callback then leaves the gate when the connection is
        # garbage-collected. The callback closes no descriptor, because SQLite still has the file open at that moment.
        self.user = weakref.ref(connection, lambda _: self.leave())

    @classmethod
    def of(cls, connection: sqlite3.Connection, path: str, file: tuple[int, int]) -> Exclusion | None:
        """Return the locks for a connection to ``file``, or None if another file is at ``path`` by now."""
        with _registering:
            locks = _all_locks.get(file)
            if locks is None:
                locks = _Locks(os.open(path, os.O_RDWR | os.O_CLOEXEC))
                if not locks.are_on(file):
                    locks.close()
                    return None
                _all_locks[file] = locks
            exclusion = cls(locks, connection)
            locks.exclusions.append(exclusion)
            return exclusion

    @property
    def is_inside(self) -> bool:
        return self._locks.inside.get(GATE) is self

    @property
    def lasts(self) -> bool:
        """Whether the system has locks on file descriptions. This is known once the connection has been inside the
        gate."""
        return self._locks.last is True

    def enter(self, deadline: float) -> None:
        """Wait until nobody else is inside the gate. Raises `Closed` at the deadline."""
        if self._try_to_enter():
            return
        pause = PAUSE_FIRST
        self._locks.waiting[self] = None
        try:
            while not self._try_to_enter():
                left = deadline - system.now()
                if left <= 0:
                    raise Closed("another process is using the file")
                self._locks.left.wait(min(pause, left))  # with a limit, since another process cannot end this wait
                pause = min(pause * 2, PAUSE_LAST)
        finally:
            self._locks.waiting.pop(self, None)

    def leave(self) -> None:
        if self.is_inside:
            self._locks.lock(self._locks.database, fcntl.F_UNLCK, GATE)
            # only after the unlock, because another thread may then lock the same file description
            self._locks.inside.pop(GATE, None)
            if self._locks.waiting:
                self._locks.left.ring()

    def _try_to_enter(self) -> bool:
        # Record this connection first, so that leave() works after an interrupt.
        if self._locks.inside.setdefault(GATE, self) is not self:
            return False
        try:
            entered = self._locks.lock(self._locks.database, fcntl.F_WRLCK, GATE)
        except OSError:
            self._locks.inside.pop(GATE, None)
            raise
        if not entered:
            self._locks.inside.pop(GATE, None)
        return entered

    def keep_log(self, path: str) -> None:
        """Show SQLite in every process that the file is in use. Raises `Closed` if another program prevents it.

        Call it inside the gate.
        """
        if self.lasts:
            self._locks.keep_log(path)

    def leave_log(self) -> None:
        """Let the connection delete the log as it closes, if nobody else uses the file.

        If another connection is inside the gate, this connection is not the last, and its locks stay until it is
        closed.
        """
        if self._try_to_enter() and all(other.user() is None for other in self._others()):
            self._locks.leave_log()

    def give_back(self) -> None:
        """End the locks of this connection, which has been closed."""
        try:
            self.leave()
        finally:
            with _registering:
                self._locks.exclusions = [other for other in self._others() if other.user() is not None]
                if not self._locks.exclusions:
                    self._locks.end()

    def _others(self) -> list[Exclusion]:
        return [exclusion for exclusion in self._locks.exclusions if exclusion is not self]


class _Locks:
    """The locks of this process on one file. All connections share its two descriptors.

    The descriptors are closed only once this process has no connection to the file, because each closing drops SQLite's
    own locks.
    """

    def __init__(self, database: int) -> None:
        self.database, self._memory = database, -1
        self.exclusions: list[Exclusion] = []
        self.inside: dict[tuple[int, int], Exclusion] = {}  # GATE -> the connection of this process inside the gate
        self.waiting: dict[Exclusion, None] = {}  # the connections of this process that wait at the gate
        self.left = system.LockBell()  # rung for one of the waiting connections when another one has left the gate
        self.last: bool | None = None  # whether the system has locks on file descriptions; None before the first lock

    def are_on(self, file: tuple[int, int]) -> bool:
        found = os.fstat(self.database)
        return (found.st_dev, found.st_ino) == file

    def lock(self, descriptor: int, kind: int, where: tuple[int, int]) -> bool:
        """Lock or unlock a range at once. Returns False if another open file description excludes it.

        If the system has no locks on file descriptions, this returns True, and only SQLite's own locks exclude other
        processes.
        """
        if _SETLK is None or self.last is False:
            return True
        try:
            fcntl.fcntl(descriptor, _SETLK, _REQUESTS[kind, where])
        except OSError as error:
            if self.last is None and error.errno in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
                self.last = False
                return True
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            return False
        self.last = True
        return True

    def keep_log(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):  # the next request opens the file again
            found = os.stat(f"{path}-shm").st_ino
            if self._memory >= 0 and os.fstat(self._memory).st_ino != found:
                self._close_memory()
            if self._memory < 0:
                self._memory = os.open(f"{path}-shm", os.O_RDONLY | os.O_CLOEXEC)
            if not self.lock(self._memory, fcntl.F_RDLCK, IN_USE):
                raise Closed("the shared memory is locked")
        if not self.lock(self.database, fcntl.F_RDLCK, SHARED):
            raise Closed("the file is locked")

    def leave_log(self) -> None:
        self.lock(self.database, fcntl.F_UNLCK, SHARED)
        if self._memory >= 0:
            self.lock(self._memory, fcntl.F_UNLCK, IN_USE)

    def end(self) -> None:
        """Unlock everything, and close the descriptors. (A forked child may still have them open, so closing alone does
        not unlock.)"""
        for file in [file for file, locks in _all_locks.items() if locks is self]:
            for descriptor in (self.database, self._memory):
                if descriptor >= 0:
                    self.lock(descriptor, fcntl.F_UNLCK, EVERYTHING)
            self.close()
            del _all_locks[file]

    def close(self) -> None:
        self.inside.clear()
        if self.database >= 0:
            database, self.database = self.database, -1
            os.close(database)
        self._close_memory()

    def _close_memory(self) -> None:
        if self._memory >= 0:
            memory, self._memory = self._memory, -1
            os.close(memory)


def forget_exclusions() -> None:
    """Close the parent's descriptors in a forked child. Otherwise the parent's locks would last until the child closes
    them."""
    global _registering
    _registering = system.Lock()
    inherited = list(_all_locks.items())
    _all_locks.clear()
    for file, locks in inherited:
        with contextlib.suppress(OSError):
            if locks.are_on(file):  # C code in the child may have closed the descriptor and reused its number
                locks.close()


_registering = system.Lock()  # held while a connection gets its locks or releases them
_all_locks: dict[tuple[int, int], _Locks] = {}  # the locks of this process, by device and inode of the file
_REQUESTS = {
    (kind, where): struct.pack("hhqqi0q", kind, os.SEEK_SET, *where, 0)
    for kind in (fcntl.F_RDLCK, fcntl.F_WRLCK, fcntl.F_UNLCK)
    for where in (SHARED, IN_USE, GATE, EVERYTHING)
}
