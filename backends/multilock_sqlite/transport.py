"""One database file: its connections, its transactions and its errors.

A connection is used by one thread at a time. No connection is open while the process forks. SQLite records file locks
in the memory of the process, so a child would rely on locks that only its parent has. Another process could then delete
the log while the child uses it. So all connections are closed before a fork, and a child that was forked while a
connection was open is refused.

SQLite finds a file's log (``-wal``, ``-shm``) by the file's name. So two names of one file have two logs, and users of
one name see no locks of the other. Each opening follows symbolic links first, and refuses a file that has another name:
a second hard link, or a mount of the file by itself. Nor may the log be deleted while it is in use, because a later
user would get another log. So each request checks that its file and its log are still those at the path.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import stat
import weakref
from collections.abc import Callable, Iterator, Set
from typing import TypeVar
from urllib.parse import quote

from multilock import BackendRejected, BackendUnavailable, MultilockError, system
from multilock_sqlite import host
from multilock_sqlite.file_locks import Exclusion, forget_exclusions

__all__ = ["Connection", "Database", "look", "transaction"]

T = TypeVar("T")

# The greatest number of simultaneous requests of one client. Only one request can write at a time, and a thousand
# connections would delay each other until their requests time out.
CONNECTIONS = 8
SETUP_PAUSE = 0.005  # seconds between tries to set up a file, which fail while another process sets it up
FORK_WAIT = 6.0  # seconds that a fork waits for running requests; the default request timeout is at most 5 s
# Seconds of FORK_WAIT for which a fork blocks requests to all files. After that, the fork blocks only the files with
# slow requests.
FORK_STOP = 0.05
FORK_PAUSE = 0.001  # seconds between two checks whether requests have ended, or whether the fork is over


class Connection(sqlite3.Connection):
    """A connection, its file (device, inode), and the deadline of the present request."""

    path: str
    file: tuple[int, int]
    # inodes of the log (-wal) and its shared memory (-shm); None until the connection is set up
    log: tuple[int, int] | None = None
    exclusion: Exclusion
    deadline: float  # on the clock of system.now()
    _busy_timeout: int = -1

    def use_until(self, deadline: float) -> None:
        """Set the deadline of the present request."""
        self.deadline = deadline
        self.wait_no_longer()

    def wait_no_longer(self) -> None:
        """Let SQLite wait for other writers only as long as this request has time."""
        milliseconds = max(0, int((self.deadline - system.now()) * 1000))
        if milliseconds != self._busy_timeout:
            self.execute(f"PRAGMA busy_timeout = {milliseconds}")
            self._busy_timeout = milliseconds

    def close(self) -> None:
        try:
            # SQLite deletes the log by its name, so check that no other log has this name now
            if self.log is not None and _log(self.path) in (self.log, None):
                self.exclusion.leave_log()
            super().close()
        finally:
            try:
                self.exclusion.give_back()
            finally:
                _live.discard(self)  # this comes last, because a fork waits until the descriptors are closed


@contextlib.contextmanager
def transaction(connection: Connection, *, durable: bool = False) -> Iterator[None]:
    """Run the body as the only writer, and roll back after any exception.

    If ``durable`` is True, the transaction is written to the disk before this returns.
    """
    opening = connection.exclusion.is_inside
    try:
        if not opening:
            connection.exclusion.enter(connection.deadline)
        connection.wait_no_longer()
        if durable:
            connection.execute("PRAGMA synchronous = FULL")
        connection.execute("BEGIN IMMEDIATE")
        yield
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        if durable:
            connection.execute("PRAGMA synchronous = NORMAL")
        if not opening:
            connection.exclusion.leave()


def look(connection: Connection, read: Callable[[], T]) -> T:
    """Read without a lock. If that fails, perhaps because another process has written, read again inside a
    transaction."""
    try:
        return read()
    except sqlite3.DatabaseError:
        with transaction(connection):
            return read()


class Database:
    """The file at ``path``. The file is created at the first request, and opened again if another program has replaced
    it."""

    def __init__(self, path: str, set_up: Callable[[Connection], None]) -> None:
        self._path = path
        self._set_up = set_up
        self._idle: list[Connection] = []
        self._room: system.SimpleQueue[None] = system.SimpleQueue()  # an item for each connection that may be used
        for _ in range(CONNECTIONS):
            self._room.put(None)
        self._closed = False
        _databases.append(weakref.ref(self, _databases.remove))

    @contextlib.contextmanager
    def request(self, within: float) -> Iterator[Connection]:
        """Provide a connection for this thread alone. Errors of SQLite and of the operating system become errors of
        multilock."""
        deadline = system.now() + within
        connection, room = None, list[None]()
        try:
            system.take(self._room.get, within, room)
            connection = self._take(deadline)
            yield connection
        except system.Empty:
            raise BackendUnavailable(
                f"other requests of this client kept all of its {CONNECTIONS} connections to {self._path} for "
                f"{within:.3g} s: find out which program has the file locked (fuser, lsof)",
                unknown=False,
                backend="sqlite",
            ) from None
        except MultilockError:
            raise
        except OSError as error:
            raise self._system_error(error) from error
        except sqlite3.Error as error:
            raise self._sqlite_error(error, within) from error
        finally:
            try:
                if connection is not None:
                    self._give_back(connection)
            finally:
                if room:
                    self._room.put(None)

    def close(self) -> None:
        self._closed = True
        _notice_fork()
        self.close_idle()

    def close_idle(self, files: Set[tuple[int, int]] | None = None) -> None:
        """Close all idle connections. With ``files``, do so only if an idle connection has one of these files open."""
        if files is not None and not any(connection.file in files for connection in list(self._idle)):
            return
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return
            connection.close()

    def forget_idle(self) -> None:
        """Drop the idle connections of the parent in a forked child, without closing them."""
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
            connection.close()  # the file or its log was deleted or replaced

    def _give_back(self, connection: Connection) -> None:
        connection.exclusion.leave()
        # During a fork close the connection, because another thread could take it again, and the fork would have to
        # wait.
        forking = _forking is not None or connection.file in _draining
        if connection.in_transaction or forking:
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
        # wait until a request ends, or a connection has finished closing
        while (connection := self._connect()) is None:
            if system.now() >= deadline:
                raise BackendUnavailable(
                    f"the log of {self._path} was deleted while a request of this process was using it",
                    unknown=False,
                    backend="sqlite",
                )
            system.sleep(SETUP_PAUSE)
        try:
            connection.use_until(deadline)
            connection.exclusion.enter(deadline)
            self._prepare(connection)
            connection.log = _log(connection.path)
            connection.exclusion.leave()
        except BaseException:
            connection.close()
            raise
        return connection

    def _connect(self) -> Connection | None:
        """Return a new connection. Returns None if the caller must try again later: another connection of this process
        still uses a deleted log, or the file was replaced meanwhile."""
        # Only one thread at a time may open a file, since closing the descriptor that creates the file releases the
        # locks of other connections.
        with _opening:
            path = os.path.realpath(self._path)
            try:
                file = _only_name(path)
            except FileNotFoundError:
                _create(path)
                file = _only_name(path)
            if file in _torn:
                raise BackendRejected(
                    f"this process was forked while its parent had {self._path} open, and SQLite cannot work there: "
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
            exclusion = None
            try:
                exclusion = Exclusion.of(connection, path, file)
            except PermissionError as error:
                raise BackendRejected(f"{path}: {error.strerror}: {_MAY_WRITE}", backend="sqlite") from error
            finally:
                if exclusion is None:
                    sqlite3.Connection.close(connection)
            if exclusion is None:
                return None
            connection.exclusion = exclusion
            _live.add(connection)
        return connection

    def _leave_deleted_log(self, path: str, file: tuple[int, int]) -> bool:
        """Close the idle connections to this file if its log was deleted while one of them was open.

        Returns False if a connection of this process still uses the deleted log, because SQLite would give its shared
        memory to a new connection.
        """
        if _has_other_log(file, _log(path)):
            _close_idle({file})
        return not _has_other_log(file, _log(path))

    def _prepare(self, connection: Connection) -> None:
        while True:
            try:
                self._set_up(connection)
                return connection.exclusion.keep_log(connection.path)
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
                f"{self._path} was locked by another program {waited}: find out which one has it open (fuser, lsof)",
                unknown=False,
                backend="sqlite",
            )
        if code == sqlite3.SQLITE_CANTOPEN:
            if os.path.isdir(self._path):
                return BackendRejected(f"{self._path} is a directory: name a file inside it", backend="sqlite")
            try:
                _need_files()  # SQLite does not report too many open files
            except OSError as reason:
                return self._system_error(reason)
        if remedy := _REJECTED.get(code):
            return BackendRejected(f"{self._path}: {error}: {remedy}", backend="sqlite")
        return BackendUnavailable(f"{self._path}: {error}", backend="sqlite")


def _only_name(path: str) -> tuple[int, int]:
    """Return device and inode of the file at ``path``. Raises `BackendRejected` if it visibly has another name."""
    found = os.stat(path)
    if stat.S_ISREG(found.st_mode):
        if found.st_nlink > 1:
            raise BackendRejected(
                f"{path} is a file with {found.st_nlink} names (hard links), and users of another name do not see its "
                f"locks: delete the other names (find / -xdev -inum {found.st_ino}), and share its directory instead",
                backend="sqlite",
            )
        if host.is_mount_point(path):
            raise BackendRejected(
                f"{path} is mounted by itself, and users of the file elsewhere do not see its locks, which are in two "
                "other files next to it: mount its directory instead",
                backend="sqlite",
            )
    return found.st_dev, found.st_ino


def _log(path: str) -> tuple[int, int] | None:
    """Return the inodes of the log and its shared memory, which exist as long as any process has the file open."""
    try:
        return os.stat(f"{path}-wal").st_ino, os.stat(f"{path}-shm").st_ino
    except FileNotFoundError:
        return None


def _has_other_log(file: tuple[int, int], log: tuple[int, int] | None) -> bool:
    return any(connection.file == file and connection.log not in (None, log) for connection in _connections())


def _create(path: str) -> None:
    """Create an empty file that only this user may open, and make its name survive a power failure."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        return
    with contextlib.suppress(OSError):  # some file systems cannot do this
        directory = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


_MAY_WRITE = "let this user read and write the file and its directory, where SQLite keeps two more files"
_REJECTED = {
    sqlite3.SQLITE_FULL: "free some space on its disk",
    sqlite3.SQLITE_READONLY: _MAY_WRITE,
    sqlite3.SQLITE_CANTOPEN: _MAY_WRITE,
    sqlite3.SQLITE_PERM: _MAY_WRITE,
    sqlite3.SQLITE_AUTH: _MAY_WRITE,
    sqlite3.SQLITE_NOTADB: "name a file that does not exist yet, or was made by multilock",
    sqlite3.SQLITE_CORRUPT: "end all programs that use it, then delete it; tokens start again at 1",
}


def _need_files() -> None:
    """Raise OSError unless six more files can be opened.

    A connection opens the database, its log, its shared memory and its directory. The first connection also opens two
    descriptors for the file locks.
    """
    with contextlib.ExitStack() as files:
        for _ in range(6):
            files.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))


def _primary_code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF


# ---- fork
#
# No connection may be open while the process forks. First requests to all files are blocked. If a running request takes
# longer than a moment, only its file stays blocked until it has ended, so that leases in other files are not lost.

_pid = os.getpid()  # the process that owns these connections
_opening = system.Lock()  # held while a connection is opened, and while the process forks
_databases: list[weakref.ref[Database]] = []
_live: weakref.WeakSet[Connection] = weakref.WeakSet()
# the parent's connections: never used, and never closed, because closing would touch the file
_inherited: list[Connection] = []
# files that the parent had open at the fork, and that SQLite cannot use in this child
_torn: set[tuple[int, int]] = set()
_forking: int | None = None  # the thread that holds _opening for a fork
_draining: set[tuple[int, int]] = set()  # files for which a fork waits, and on which no new request begins


def _before_fork() -> None:
    """Wait until no request is under way, for at most `FORK_WAIT` seconds.

    If a signal handler forks during a request of its own thread, this request cannot end, so the fork waits until the
    limit.
    """
    deadline = system.now() + FORK_WAIT
    while not _stop_all(deadline):
        slow = _open_files()
        _draining.update(slow)
        _go_on()
        while (still := slow & _close_idle(slow)) and system.now() < deadline:
            _draining.intersection_update(still)  # only files with a running request stay blocked
            system.sleep(FORK_PAUSE)


def _stop_all(deadline: float) -> bool:
    """Stop all requests. Returns True once all connections are closed or the time is over.

    After that no connection can be opened until `_go_on`.
    """
    global _forking
    me, taken = system.get_ident(), list[bool]()
    system.take(_opening.acquire, deadline - system.now(), taken)
    if True in taken:  # no call is made here, so that no interrupt can come before the owner of the lock is recorded
        _forking = me
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
    """Close connections that serve no request. Returns the files that are still open."""
    for reference in list(_databases):
        if database := reference():
            database.close_idle(files)
    return _open_files()


def _open_files() -> set[tuple[int, int]]:
    return {connection.file for connection in _connections()}


def _connections() -> list[Connection]:
    while True:
        with contextlib.suppress(RuntimeError):  # another thread changed the set during the copy
            return list(_live)


def _wait_for_fork(file: tuple[int, int] | None, deadline: float) -> None:
    while file in _draining:
        if system.now() >= deadline:
            raise BackendUnavailable(
                "a fork of this process waits for a request to this file, and no further request may begin until then",
                unknown=False,
                backend="sqlite",
            )
        system.sleep(FORK_PAUSE)


def _notice_fork() -> None:
    """Do the work of `_after_in_child` if C code has forked without calling Python's hooks."""
    if os.getpid() != _pid:
        _after_in_child()


def _after_in_child() -> None:
    global _pid, _opening, _forking
    _pid, _opening, _forking = os.getpid(), system.Lock(), None
    _draining.clear()
    _torn.update(connection.file for connection in _live)
    _inherited.extend(_live)
    _live.clear()
    forget_exclusions()
    for reference in list(_databases):
        if database := reference():
            database.forget_idle()


os.register_at_fork(before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
# Registered a second time, because an interrupt may end the first call.
os.register_at_fork(after_in_parent=_after_in_parent)
