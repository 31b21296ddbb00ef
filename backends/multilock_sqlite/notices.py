"""Messages between the processes that use a file: a release wakes the next waiter through a FIFO.

Each client that waits, or has held a lock for a while, reads a separate FIFO. The FIFOs are in a directory beside the
file, ``<file>-wake``. A FIFO has the name of its client, with which the ids of the client's claims begin. So no process
needs a list of the clients.

A message is a hint: a waiter that is woken asks again, and a holder that is warned renews. So a message may be lost,
late or forged. A waiter without messages polls.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial

from multilock import system
from multilock.backend import Notices, Worker, start_worker

__all__ = ["Mailbox"]

SUFFIX = "-wake"
NEWBORN = "new-"  # prefix of a FIFO that its client has not opened yet
STILLBORN = 60_000_000  # µs of the wall clock; a FIFO that has its NEWBORN name for longer belongs to a killed process
CLAIM = re.compile(r"([0-9a-f]{16})\.[0-9a-f]{1,64}")  # the id of a claim; the first part is its client
TAKEN = b"!"  # the message that an operator took a name from a claim of this client
CLIENT = re.compile(r"[0-9a-f]{16}")
WHOLE = 512  # bytes; a write of up to this length reaches a FIFO completely or not at all
ROOM = 32768  # bytes of one read; a full read may mean that further messages did not fit into the FIFO

_OPEN = os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | _OPEN


class Mailbox:
    """The FIFO of one client, and its messages to other clients. Its methods raise only interrupts."""

    def __init__(self, notices: Notices, group: Hashable, called: Callable[[str], object]) -> None:
        self._notices = notices
        self._group = group
        self._called = called  # called with the id of each claim that is about to be woken
        self._lock = system.Lock()
        self._fifo: _Fifo | None = None
        self._closed = False
        self._pid = system.pid()

    @property
    def is_read(self) -> bool:
        """Whether messages reach this client, as far as it knows. If they do not, its waiters must poll often."""
        fifo = self._fifo
        return fifo is not None and fifo.reader is not None and not fifo.reader.missing

    def open(self, database: str) -> bool:
        """Open a FIFO beside the file ``database``, if the system allows it. Returns whether the FIFO existed before.

        Call this once a claim has joined the queue, and after each heartbeat, because somebody may have deleted the
        FIFO. If this returns False, a message may have been lost, so the waiter must poll again soon.
        """
        path = f"{database}{SUFFIX}/{self._notices.client}"
        if self._fifo and self._fifo.is_at(path):
            return True
        with self._lock:
            if self._closed:
                return False
            if self._fifo and self._fifo.is_at(path):
                return True
            self._end()
            # OSError: no right to write there, no space, too many files, or a file system without FIFOs.
            with contextlib.suppress(OSError, NotImplementedError), _directory(database) as directory:
                fifo = _Fifo(path, _make_fifo(directory, self._notices.client, os.stat(database)))
                self._fifo = fifo
                fifo.reader = start_worker(partial(_read, fifo, weakref.ref(self)), "multilock-sqlite-notices")
                _sweep(directory)
        return False

    def send(self, database: str, woken: Sequence[str], taken: Sequence[str] = ()) -> None:
        """Wake the waiters with the claim ids of ``woken``, and let the clients of the holders in ``taken`` renew at
        once."""
        if not woken and not taken:
            return
        post: dict[str, dict[bytes, None]] = {}  # the messages to each client, in order and without repetitions
        for claims, message in ((taken, TAKEN), (woken, None)):
            for claim in claims:
                if found := CLAIM.fullmatch(claim):
                    post.setdefault(found[1], {})[message or claim.encode()] = None
        if own := post.pop(self._notices.client, None):
            self._deliver(own)
        if post:
            with contextlib.suppress(OSError, NotImplementedError), _directory(database) as directory:
                for client, messages in post.items():
                    _write(directory, client, messages)

    def close(self) -> None:
        """Delete the FIFO and end its thread. A forked child only closes its copy of the parent's descriptor."""
        if system.pid() != self._pid:  # take no lock, because a thread of the parent may have held it at the fork
            fifo, self._fifo = self._fifo, None
            if fifo:
                fifo.forget()
            return
        with self._lock:
            self._closed = True
            self._end()

    def __del__(self) -> None:
        self.close()

    def _end(self) -> None:
        fifo, self._fifo = self._fifo, None
        if fifo:
            fifo.end()

    def receive(self, data: bytes) -> None:
        """Deliver the messages that were read from the FIFO."""
        if len(data) < ROOM:
            self._deliver(data.split(b"\n"))
        else:
            self._notices.silent(self._group)
            self._notices.wake(None)

    def _deliver(self, messages: Iterable[bytes]) -> None:
        for message in messages:
            if message == TAKEN:
                self._notices.silent(self._group)
            elif message:
                claim = message.decode("ascii", "replace")
                self._called(claim)
                self._notices.wake(claim)


class _Fifo:
    """An open FIFO. It is also open for writing, because otherwise a read would return the end of the file."""

    reader: Worker | None = None
    ended = False

    def __init__(self, path: str, descriptor: int) -> None:
        self.path, self.descriptor = path, descriptor
        self._lock = system.Lock()  # held while the descriptor is used or closed
        self._inode = _inode(os.fstat(descriptor))

    def is_at(self, path: str) -> bool:
        """Return whether a sender finds this FIFO at ``path``."""
        try:
            return self.path == path and _inode(os.lstat(path)) == self._inode
        except OSError:
            return False

    def end(self) -> None:
        """Delete the FIFO, and end the wait of its reader, which closes the descriptor."""
        with contextlib.suppress(OSError):
            if self.is_at(self.path):
                os.unlink(self.path)
        with self._lock, contextlib.suppress(OSError):  # if the FIFO is full, the reader is not waiting
            self.ended = True
            os.write(self.descriptor, b"\n")

    def close(self) -> None:
        """Close the descriptor, in the thread that reads it."""
        with self._lock:
            os.close(self.descriptor)

    def forget(self) -> None:
        """Close the descriptor in a forked child, so that the FIFO has no reader once the parent has ended."""
        with contextlib.suppress(OSError):
            # C code in the child may have reused the descriptor's number
            if _inode(os.fstat(self.descriptor)) == self._inode:
                os.close(self.descriptor)


def _read(fifo: _Fifo, reference: weakref.ref[Mailbox]) -> None:
    """Deliver the messages of a FIFO until it ends.

    The thread holds only a weak reference to the mailbox, so that a client without close() can be garbage-collected.
    """
    poll = system.poll()
    poll.register(fifo.descriptor, system.POLLIN)
    while not fifo.ended:
        poll.poll()
        try:
            data = os.read(fifo.descriptor, ROOM)
        except BlockingIOError:
            continue
        if mailbox := reference():
            mailbox.receive(data)
        del mailbox
    fifo.close()


def _inode(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


@contextlib.contextmanager
def _directory(database: str) -> Iterator[int]:
    """Open the directory of the FIFOs. Raises OSError if no directory can be trusted.

    Other users may be able to write beside the file. So a symbolic link is not followed, the directory must belong to
    the owner of the file, and only that user or root creates it. The FIFOs are opened through this descriptor, even if
    the path changes meanwhile.
    """
    path, like = database + SUFFIX, os.stat(database)
    makes = os.geteuid() in (0, like.st_uid)
    try:
        directory = os.open(path, _DIRECTORY)
    except FileNotFoundError:
        if not makes:
            raise
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        directory = os.open(path, _DIRECTORY)
    try:
        if makes and not _is_shared(os.fstat(directory), like):
            _share_new(directory, path, like)
        if os.fstat(directory).st_uid != like.st_uid:
            raise PermissionError(errno.EPERM, "it belongs to another user than the file", path)
        yield directory
    finally:
        os.close(directory)


def _is_shared(found: os.stat_result, like: os.stat_result) -> bool:
    return found.st_uid == like.st_uid and found.st_mode & 0o777 == _mode_of_directory(like)


def _share_new(directory: int, path: str, like: os.stat_result) -> None:
    """Share a new directory, perhaps that of a process that was killed. An older directory is not changed."""
    found = os.fstat(directory)
    if found.st_uid == os.geteuid() and found.st_mode & 0o777 == 0o700 and not os.listdir(directory):
        _share(directory, like, _mode_of_directory(like))
        if os.fstat(directory).st_uid != like.st_uid:  # in a container this may be refused even to root
            os.rmdir(path)


def _share(descriptor: int, like: os.stat_result, mode: int) -> None:
    """Let the users of the file use this directory or FIFO too, as SQLite does with its log."""
    with contextlib.suppress(OSError):
        os.fchown(descriptor, like.st_uid if os.geteuid() == 0 else -1, like.st_gid)
    os.fchmod(descriptor, mode)


def _mode(like: os.stat_result) -> int:
    return like.st_mode & 0o666


def _mode_of_directory(like: os.stat_result) -> int:
    return _mode(like) | (_mode(like) & 0o444) >> 2


def _make_fifo(directory: int, client: str, like: os.stat_result) -> int:
    """Make the FIFO of a client, and return its descriptor. The FIFO gets its name only once it has a reader."""
    newborn = NEWBORN + client
    with contextlib.suppress(FileNotFoundError):
        os.unlink(newborn, dir_fd=directory)
    os.mkfifo(newborn, 0o600, dir_fd=directory)
    descriptor = -1
    try:
        descriptor = os.open(newborn, os.O_RDWR | _OPEN, dir_fd=directory)
        found = os.fstat(descriptor)
        if not stat.S_ISFIFO(found.st_mode) or found.st_uid != os.geteuid():
            raise FileExistsError(errno.EEXIST, "somebody has replaced it", newborn)
        _share(descriptor, like, _mode(like))
        os.rename(newborn, client, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        if descriptor >= 0:
            os.close(descriptor)
        with contextlib.suppress(OSError):
            os.unlink(newborn, dir_fd=directory)
        raise
    return descriptor


def _write(directory: int, client: str, messages: Iterable[bytes]) -> None:
    """Write messages to the FIFO of a client. Messages are lost if the FIFO is full or has no reader."""
    # Open for reading too: without a reader, a write would kill a program in which SIGPIPE has its default action.
    with contextlib.suppress(OSError):
        descriptor = os.open(client, os.O_RDWR | _OPEN, dir_fd=directory)
        try:
            if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
                for part in _parts(messages):
                    os.write(descriptor, part)
        finally:
            os.close(descriptor)


def _parts(messages: Iterable[bytes]) -> Iterator[bytes]:
    """Join messages into parts, each of which is written completely or not at all."""
    part = b""
    for message in messages:
        if len(part) + len(message) + 1 > WHOLE:
            yield part
            part = b""
        part += message + b"\n"
    yield part


def _sweep(directory: int) -> None:
    """Delete the FIFOs of killed processes, which have no reader."""
    for name in os.listdir(directory):
        with contextlib.suppress(OSError):
            if name.startswith(NEWBORN):
                born = os.stat(name, dir_fd=directory, follow_symlinks=False).st_mtime
                stale = born * 1_000_000 < system.wall() - STILLBORN
            else:
                stale = CLIENT.fullmatch(name) is not None and not _has_reader(directory, name)
            if stale:
                os.unlink(name, dir_fd=directory)


def _has_reader(directory: int, name: str) -> bool:
    """Return whether any process has the FIFO open for reading. Returns True for a file that is no FIFO."""
    try:
        os.close(os.open(name, os.O_WRONLY | _OPEN, dir_fd=directory))
    except OSError as error:
        return error.errno != errno.ENXIO
    return True
