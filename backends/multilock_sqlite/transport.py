"""One database file: its connections, its transactions, and what its errors mean.

A connection is used by one thread at a time, and none is open while the process forks. SQLite remembers in the memory
of the process which file locks it has; a child, even on a connection that it opened itself, would believe in locks that
only its parent has, and another process could delete the log from under it. So all connections are closed before a
fork, and a child that was forked without that is refused.

SQLite finds a file's log (``-wal``, ``-shm``) by the file's name, so two names of one file have two logs, and the users
of one see nothing of the others. Each opening follows symbolic links first and refuses a file that has another name: a
second hard link, or a mount of the file by itself. Once is enough: whoever comes by another name later is refused.
For the same reason the log must not be deleted under its users: who comes later has another one. Each request looks
whether the file and its log are still those it has open.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import stat
import weakref
from collections.abc import Callable, Iterator, Set
from urllib.parse import quote

from multilock import BackendRejected, BackendUnavailable, MultilockError, system
from multilock_sqlite import host

__all__ = ["Connection", "Database", "transaction"]

IDLE = 4  # connections kept open for the next requests; more threads than that seldom ask at the same moment
SETUP_PAUSE = 0.005  # seconds between tries to set up a file: while another does it, SQLite fails without waiting
FORK_WAIT = 6.0  # seconds that a fork waits for requests under way; by default none takes longer than 5 s
FORK_STOP = 0.05  # … for which it stops the requests to all files at a time, before it finds that one of them is slow
FORK_PAUSE = 0.001  # seconds between two looks, of a fork at the requests and of a request at the fork


class Connection(sqlite3.Connection):
    """A connection, the file it was opened on (device, inode), and when the present request has to end."""

    path: str
    file: tuple[int, int]
    log: tuple[int, int] | None = None  # once it is set up
    deadline: float  # on system.now()
    _busy_timeout: int = -1

    def use_until(self, deadline: float) -> None:
        self.deadline = deadline
        self.wait_no_longer()

    def wait_no_longer(self) -> None:
        """SQLite waits for other writers only as long as this request has time."""
        milliseconds = max(0, int((self.deadline - system.now()) * 1000))
        if milliseconds != self._busy_timeout:
            self.execute(f"PRAGMA busy_timeout = {milliseconds}")
            self._busy_timeout = milliseconds

    def close(self) -> None:
        super().close()
        _live.discard(self)


@contextlib.contextmanager
def transaction(connection: Connection, *, durable: bool = False) -> Iterator[None]:
    """The only writer from here on; rolled back by any exception. ``durable``: on the disk before it ends."""
    connection.wait_no_longer()
    if durable:
        connection.execute("PRAGMA synchronous = FULL")
    try:
        connection.execute("BEGIN IMMEDIATE")
        yield
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        if durable:
            connection.execute("PRAGMA synchronous = NORMAL")


class Database:
    """The file at ``path``: created when it is first asked, opened again when somebody has replaced it."""

    def __init__(self, path: str, set_up: Callable[[Connection], None]) -> None:
        self._path = path
        self._set_up = set_up
        self._idle: list[Connection] = []
        self._closed = False
        _databases.append(weakref.ref(self, _databases.remove))

    @contextlib.contextmanager
    def request(self, within: float) -> Iterator[Connection]:
        """A connection for this thread alone. Errors of SQLite and the system become ours."""
        connection = None
        try:
            connection = self._take(system.now() + within)
            yield connection
        except MultilockError:
            raise
        except OSError as error:
            raise self._system_error(error) from error
        except sqlite3.Error as error:
            raise self._sqlite_error(error, within) from error
        finally:
            if connection is not None:
                self._give_back(connection)

    def close(self) -> None:
        self._closed = True
        _notice_fork()
        self.close_idle()

    def close_idle(self, files: Set[tuple[int, int]] | None = None) -> None:
        """All, or nothing unless one is open on one of ``files``."""
        if files is not None and not any(connection.file in files for connection in list(self._idle)):
            return
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return
            connection.close()

    def forget_idle(self) -> None:
        self._idle = []

    def _take(self, deadline: float) -> Connection:
        _notice_fork()
        file = self._file()
        while True:
            _wait_for_fork(file, deadline)
            try:
                connection = self._idle.pop()
            except IndexError:
                return self._open(deadline)
            if connection.file == file and connection.log is not None and connection.log == _log(connection.path):
                connection.use_until(deadline)
                return connection
            connection.close()  # the file or its log was deleted or replaced: what is in the old one is nobody's

    def _give_back(self, connection: Connection) -> None:
        # Kept during a fork, it would be taken again at once by another thread, and the fork would wait for long.
        forking = _forking is not None or connection.file in _draining
        if connection.in_transaction or forking or len(self._idle) >= IDLE:
            connection.close()
        else:
            self._idle.append(connection)
        if self._closed:
            self.close_idle()

    def _file(self) -> tuple[int, int] | None:
        try:
            found = os.stat(self._path)
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino

    def _open(self, deadline: float) -> Connection:
        while (connection := self._connect()) is None:  # a request ends, or a connection that is just being closed
            if system.now() >= deadline:
                raise BackendUnavailable(
                    f"the log of {self._path} was deleted while a request of this process was using it",
                    unknown=False,
                    backend="sqlite",
                )
            system.sleep(SETUP_PAUSE)
        try:
            connection.use_until(deadline)
            self._prepare(connection)
            connection.log = _log(connection.path)
        except BaseException:
            connection.close()
            raise
        return connection

    def _connect(self) -> Connection | None:
        """None: another connection of this process has a log that is gone."""
        # Nobody else in this process opens the file meanwhile: closing the one that creates it would take away the
        # locks that another connection has on it.
        with _opening:
            path = os.path.realpath(self._path)
            try:
                file = _only_name(path)
            except FileNotFoundError:
                _create(path)
                file = _only_name(path)
            if file in _torn:
                raise BackendRejected(
                    f"this process was forked while its parent had {self._path} open, and SQLite cannot go on there: "
                    "connect after the fork, or fork by os.fork() while no other thread uses the client",
                    backend="sqlite",
                )
            if not self._leave_deleted_log(path, file):
                return None
            connection = sqlite3.connect(
                f"file:{quote(path)}?mode=rw",
                uri=True,
                isolation_level=None,
                check_same_thread=False,
                factory=Connection,
            )
            connection.path, connection.file = path, file
            _live.add(connection)
        return connection

    def _leave_deleted_log(self, path: str, file: tuple[int, int]) -> bool:
        """Within one process SQLite gives a new connection the shared memory of those that are open. The last one that
        is closed takes its log with it, and is still known for a moment."""
        if _has_other_log(file, _log(path)):
            _close_idle({file})
        return not _has_other_log(file, _log(path))

    def _prepare(self, connection: Connection) -> None:
        while True:
            try:
                return self._set_up(connection)
            except sqlite3.OperationalError as error:
                if _primary_code(error) != sqlite3.SQLITE_BUSY or system.now() >= connection.deadline:
                    raise
            system.sleep(SETUP_PAUSE)

    def _system_error(self, error: OSError) -> MultilockError:
        directory = os.path.dirname(self._path)
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO):
            return BackendUnavailable(f"{self._path}: {error.strerror}", unknown=False, backend="sqlite")
        if error.errno in (errno.ENOENT, errno.ENOTDIR) and not os.path.isdir(directory):
            text = f"the directory {directory} does not exist: create it"
        elif error.errno in (errno.ENOSPC, errno.EDQUOT):
            text = f"no space is left for {self._path}: free some"
        elif error.errno == errno.EROFS:
            text = f"{directory} is on a read-only file system: name a file where this process may write"
        else:
            text = (
                f"{self._path} cannot be created ({error.strerror}): let this user write in the directory {directory}"
            )
        return BackendRejected(text, backend="sqlite")

    def _sqlite_error(self, error: sqlite3.Error, within: float) -> MultilockError:
        code = _primary_code(error)
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL):
            waited = f"for more than {within:.3g} s" if within >= 0.001 else "and less than 1 ms was left to wait"
            return BackendUnavailable(
                f"{self._path} was locked by another program {waited}: look who has it open (fuser, lsof)",
                unknown=False,
                backend="sqlite",
            )
        if code == sqlite3.SQLITE_CANTOPEN:
            if os.path.isdir(self._path):
                return BackendRejected(f"{self._path} is a directory: name a file in it", backend="sqlite")
            try:
                _need_files()  # SQLite does not tell that there were too many
            except OSError as reason:
                return self._system_error(reason)
        if remedy := _REJECTED.get(code):
            return BackendRejected(f"{self._path}: {error}: {remedy}", backend="sqlite")
        return BackendUnavailable(f"{self._path}: {error}", backend="sqlite")


def _only_name(path: str) -> tuple[int, int]:
    """The file at ``path``. Raises BackendRejected if it has another name, as far as that can be seen from here."""
    found = os.stat(path)
    if stat.S_ISREG(found.st_mode):
        if found.st_nlink > 1:
            raise BackendRejected(
                f"{path} is a file with {found.st_nlink} names (hard links), and users of another name do not see the "
                f"locks: delete the others (find / -xdev -inum {found.st_ino}), and share its directory instead",
                backend="sqlite",
            )
        if host.is_mount_point(path):
            raise BackendRejected(
                f"{path} is mounted by itself, and users of the file elsewhere do not see the locks, which are in the "
                "two files beside it: mount its directory instead",
                backend="sqlite",
            )
    return found.st_dev, found.st_ino


def _log(path: str) -> tuple[int, int] | None:
    """The inodes of the log and its shared memory, which are there as long as anybody has the file open."""
    try:
        return os.stat(f"{path}-wal").st_ino, os.stat(f"{path}-shm").st_ino
    except FileNotFoundError:
        return None


def _has_other_log(file: tuple[int, int], log: tuple[int, int] | None) -> bool:
    return any(connection.file == file and connection.log not in (None, log) for connection in _connections())


def _create(path: str) -> None:
    """An empty file for nobody but us, whose name survives a power failure."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        return
    with contextlib.suppress(OSError):  # not every file system can, nor may everybody read the directory
        directory = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


_MAY_WRITE = "let this user read and write the file and its directory, which takes two more files beside it"
_REJECTED = {
    sqlite3.SQLITE_FULL: "free some space on its disk",
    sqlite3.SQLITE_READONLY: _MAY_WRITE,
    sqlite3.SQLITE_CANTOPEN: _MAY_WRITE,
    sqlite3.SQLITE_PERM: _MAY_WRITE,
    sqlite3.SQLITE_AUTH: _MAY_WRITE,
    sqlite3.SQLITE_NOTADB: "name a file that does not exist yet, or was made by multilock",
    sqlite3.SQLITE_CORRUPT: "end all programs that use it, then delete it; tokens begin again at 1",
}


def _need_files() -> None:
    """OSError unless a connection's database, log, shared memory and directory can be open at once."""
    with contextlib.ExitStack() as files:
        for _ in range(4):
            files.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))


def _primary_code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF


# ---- fork
#
# No connection may be open while the process forks. All files are stopped for a moment; if a request is not ended by
# then, only its file stays stopped until it is, and the others go on: a healthy file must not lose its leases because
# another program sits on a different one.

_pid = os.getpid()  # of the process that all this belongs to
_opening = system.Lock()  # held while a connection is opened, and while the process forks
_databases: list[weakref.ref[Database]] = []
_live: weakref.WeakSet[Connection] = weakref.WeakSet()
_inherited: list[Connection] = []  # of a parent: never used, and never closed, which would touch the parent's file
_torn: set[tuple[int, int]] = set()
_forking: int | None = None  # the thread that holds _opening for a fork
_draining: set[tuple[int, int]] = set()  # files that a fork waits for: no request to them begins


def _before_fork() -> None:
    """Wait until no request is under way; a signal handler that forks in the middle of one would wait for itself."""
    deadline = system.now() + FORK_WAIT
    while not _stop_all(deadline):
        slow = _open_files()
        _draining.update(slow)
        _go_on()
        while (still := slow & _close_idle(slow)) and system.now() < deadline:
            _draining.intersection_update(still)  # the last one stays stopped until all are
            system.sleep(FORK_PAUSE)


def _stop_all(deadline: float) -> bool:
    """Whether all is closed, or the time is over; then nothing can be opened until `_go_on`."""
    global _forking
    if _opening.acquire(timeout=max(0.0, deadline - system.now())):
        _forking = system.get_ident()
    until = min(deadline, system.now() + FORK_STOP)
    while _close_idle():
        if system.now() >= until:
            return system.now() >= deadline
        system.sleep(FORK_PAUSE)
    return True


def _after_in_parent() -> None:
    _draining.clear()
    _go_on()


def _go_on() -> None:
    global _forking
    if _forking == system.get_ident():
        _forking = None
        _opening.release()


def _close_idle(files: Set[tuple[int, int]] | None = None) -> set[tuple[int, int]]:
    """Close connections that are in no request; the files that are open all the same."""
    for reference in list(_databases):
        if database := reference():
            database.close_idle(files)
    return _open_files()


def _open_files() -> set[tuple[int, int]]:
    return {connection.file for connection in _connections()}


def _connections() -> list[Connection]:
    while True:
        with contextlib.suppress(RuntimeError):  # a set that another thread has changed meanwhile
            return list(_live)


def _wait_for_fork(file: tuple[int, int] | None, deadline: float) -> None:
    while file in _draining:
        if system.now() >= deadline:
            raise BackendUnavailable(
                "a fork of this process waits for a request to this file, which other requests must not overtake",
                unknown=False,
                backend="sqlite",
            )
        system.sleep(FORK_PAUSE)


def _notice_fork() -> None:
    """C code forks without calling Python's hooks."""
    if os.getpid() != _pid:
        _after_in_child()


def _after_in_child() -> None:
    global _pid, _opening, _forking
    _pid, _opening, _forking = os.getpid(), system.Lock(), None
    _draining.clear()
    _torn.update(connection.file for connection in _live)
    _inherited.extend(_live)
    _live.clear()
    for reference in list(_databases):
        if database := reference():
            database.forget_idle()


os.register_at_fork(before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
