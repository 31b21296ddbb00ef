"""Report what weakens the lock: this host, the file's permissions, or the file system of its directory."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

from multilock import Finding
from multilock_sqlite import host

__all__ = ["weaknesses"]

# fmt: off
SHARED = frozenset({
    "9p", "afs", "beegfs", "ceph", "cifs", "coda", "fuse.ceph", "fuse.glusterfs", "fuse.juicefs", "fuse.s3fs",
    "fuse.sshfs", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "smb3", "smbfs",
    "virtiofs",
})
# fmt: on
VOLATILE = frozenset({"ramfs", "tmpfs"})


def weaknesses(path: str, lasting: bool = True) -> list[Finding]:
    """Return the findings for the lock file at ``path``. ``lasting`` is False if the system has no open file
    description locks there."""
    return [
        *([] if lasting else [_without_lasting_locks(path)]),
        *_about_file_system(os.path.dirname(path)),
        *_about_permissions(path),
        *_about_host(),
    ]


def _without_lasting_locks(path: str) -> Finding:
    return Finding(
        "no_lasting_locks",
        "warning",
        f"this system has no open file description locks for {path}: if a process that uses the lock also reads and "
        "closes one of its files, its file locks end, and two processes can hold one lock",
        f"read or back up {path}, its -wal and its -shm only in processes that do not use the lock",
    )


def _about_file_system(directory: str) -> Iterator[Finding]:
    kind = host.file_system(directory)
    if kind in SHARED:
        yield Finding(
            "network_file_system",
            "error",
            f"{directory} is on {kind}: its file locks and memory maps do not work across hosts, so two processes can "
            "hold one lock",
            "put the file on a local disk; between hosts use redis://",
        )
    if kind in VOLATILE:
        yield Finding(
            "volatile_file_system",
            "warning",
            f"{directory} is on {kind}: fencing tokens start again at 1 after a reboot",
            "put the file on a disk if a resource remembers tokens",
        )


def _about_permissions(path: str) -> Iterator[Finding]:
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        yield Finding(
            "writable_by_others",
            "info",
            f"{path} has the mode {stat.S_IMODE(mode):o}: other users can take and end its locks",
            f"run chmod 600 {path}, unless that is intended",
        )


def _about_host() -> Iterator[Finding]:
    if host.boot_id() is None:
        yield Finding(
            "no_boot_id",
            "warning",
            "/proc/sys/kernel/random/boot_id cannot be read: a lock held at a reboot may stay taken for one ttl",
            "make /proc/sys readable here",
        )
    if host.Process.current() is None:
        yield Finding(
            "no_process_identity",
            "info",
            "/proc does not show this process: if it is killed, its locks end with their ttl instead of at once",
            "mount /proc for this pid namespace",
        )
    if host.is_mount_point("/") is None:
        yield Finding(
            "no_mount_table",
            "warning",
            "/proc/self/mountinfo cannot be read: a lock file that is mounted by itself cannot be refused, and its "
            "users elsewhere do not see its locks",
            "mount /proc; mount the directory of the lock file, not the file",
        )
    if host.clock_is_shifted():
        yield Finding(
            "time_namespace",
            "error",
            "this process is in a time namespace with a shifted boot clock: it misjudges the leases of processes "
            "outside of it",
            "let all users of the file run in one time namespace",
        )
