"""A complete backend for multilock: locks in a directory of one host, with one file for each held name.

A name is free if it has no file, or if the time in its file is over. Every call locks the file ``token`` with a lock of
the operating system, so nothing changes between its reads and its writes. A backend with a server would use
a transaction or a script instead of this lock.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from multilock import BackendRejected, BackendUnavailable, ConfigurationError, MultilockError, system
from multilock.backend import (
    Busy,
    Capabilities,
    Claim,
    Finding,
    Granted,
    Held,
    LockInfo,
    Notices,
    Returned,
    parse_owner,
)
from multilock.names import escape, unescape
from multilock.options import prefix_of, reject_unknown, ttl_of
from multilock.timing import JITTER, LATE_REQUEST, RENEWALS

POLL = 0.05  # seconds after which a waiter asks again, because nothing wakes it


def open_backend(url: str, options: Mapping[str, object]) -> DirectoryBackend:
    """Return the backend for ``directory:///srv/locks``. Does no I/O. The backend has only the common options."""
    reject_unknown(options, (), "directory")
    path = Path(unquote(url.partition("://")[2]))
    if not path.is_absolute():
        raise ConfigurationError(f"{url!r} has no absolute path: write directory:///srv/locks")
    return DirectoryBackend(path, prefix_of(options), ttl_of(options))


class DirectoryBackend:
    """The `multilock.backend.Backend` for one directory."""

    scheme = "directory"
    spi_version = 1

    def __init__(self, path: Path, prefix: str, ttl: float) -> None:
        self._path, self._prefix = path, prefix
        self.capabilities = Capabilities(
            fencing=True,
            fencing_scope="the directory",
            fair=False,
            push_wait=False,
            push_loss=False,
            cross_host=False,
            survives_failover=False,
            ttl_min=0.1,
            ttl_max=365 * 86400.0,
            ttl_step=0.001,
            takeover_bound=ttl + (1 + JITTER) * POLL,  # the lease ends, and then the waiter asks again
            why_one="it has one file for each name",
        )

    def open(self, notices: Notices) -> None:
        self._now = notices.now

    def attempt(self, claim: Claim, join: bool, within: float) -> Granted | Busy:
        with self._alone(within) as (mutex, now):
            holder = _live(self._file(claim.name), now)
            if holder and holder["id"] != claim.id:
                return Busy(POLL, holder["until"] - now)
            if _live(self._tombstone(claim), now):  # the call was cancelled before this request was executed
                return Busy(POLL)
            if holder is None:
                key = self._prefix + escape(claim.name)
                holder = {"key": key, "id": claim.id, "owner": claim.owner, "since": system.wall() / 1_000_000}
                holder["token"] = int(os.pread(mutex, 20, 0) or 0) + 1
                os.pwrite(mutex, b"%020d" % holder["token"], 0)
                os.fsync(mutex)  # so that no token is issued twice after a power failure
            return self._keep(claim, holder, now)

    def release(self, claim: Claim, granted: Granted | None, unsure: bool, within: float) -> Returned:
        with self._alone(within) as (_, now):
            if unsure:
                for tombstone in self._path.glob("*.cancelled"):
                    _live(tombstone, now)  # deletes the file if its time is over
                _save(self._tombstone(claim), {"ttl": LATE_REQUEST, "until": now + LATE_REQUEST})
            holder = _live(self._file(claim.name), now)
            ours = holder is not None and holder["id"] == claim.id
            if ours:
                self._file(claim.name).unlink()
            return Returned(ours)

    def renew(self, group: Hashable, held: Sequence[Held], within: float) -> Sequence[Granted | None]:
        with self._alone(within) as (_, now):
            holders = [(claim, _live(self._file(claim.name), now)) for claim, _ in held]
            return [self._keep(claim, it, now) if it and it["id"] == claim.id else None for claim, it in holders]

    def watch(self, group: Hashable, held: Sequence[Held], within: float) -> None:
        """Do nothing: a directory cannot report a loss, so the next renewal finds the loss."""

    def follow(self, names: frozenset[str], within: float) -> bool:
        return False  # a directory reports no change, so the kernel polls

    def inspect(self, name: str, within: float) -> LockInfo | None:
        with self._alone(within) as (_, now):
            holder = _live(self._file(name), now)
            return _info(name, holder, now) if holder else None

    def inspect_all(self, prefix: str, within: float) -> Iterator[LockInfo]:
        with self._alone(within) as (_, now):  # the lock is not kept while the caller iterates, which may take hours
            holders = [holder for file in sorted(self._path.glob("*.held")) if (holder := _live(file, now))]
        for holder in holders:
            key = holder["key"]
            name = unescape(key.removeprefix(self._prefix)) if key.startswith(self._prefix) else None
            if name is not None and name.startswith(prefix):
                yield _info(name, holder, now)

    def force_release(self, name: str, within: float) -> bool:
        with self._alone(within) as (_, now):
            held = _live(self._file(name), now) is not None
            self._file(name).unlink(missing_ok=True)
            return held

    def diagnose(self, within: float) -> list[Finding]:
        with self._alone(within):
            if not self._path.stat().st_mode & 0o002:
                return []
        message = f"every user of this host can delete locks in {self._path}"
        return [Finding("writable-by-all", "warning", message, f"chmod o-w {self._path}")]

    def ping(self, within: float) -> None:
        with self._alone(within):
            pass

    def close(self) -> None:
        """Do nothing: there is neither a connection nor a thread."""

    @contextmanager
    def _alone(self, within: float) -> Iterator[tuple[int, float]]:
        """Exclude all other users of the directory. Yields the descriptor of the file ``token``, and the time after the
        lock was obtained.

        Errors of the operating system become errors of multilock here, and nowhere else.
        """
        deadline = self._now() + within
        try:
            mutex = os.open(self._path / "token", os.O_RDWR | os.O_CREAT, 0o666)
            try:
                while not _lock(mutex):
                    if self._now() > deadline:  # nothing was executed, so nothing is unknown
                        raise BackendUnavailable(f"another process uses {self._path}", unknown=False)
                    system.sleep(0.002)
                yield mutex, self._now()
            finally:
                fcntl.flock(mutex, fcntl.LOCK_UN)  # closing does not unlock the file if a child was forked meanwhile
                os.close(mutex)
        except MultilockError:
            raise  # this comes first, because a BackendUnavailable is an OSError too
        except (FileNotFoundError, NotADirectoryError, PermissionError) as error:  # trying again cannot help
            raise BackendRejected(f"{error}: make this a directory that the program may write to") from error
        except OSError as error:
            raise BackendUnavailable(str(error)) from error

    def _keep(self, claim: Claim, holder: dict[str, Any], now: float) -> Granted:
        """Let the claim hold the name until ``now + ttl``. The kernel counts from the same ``now``."""
        _save(self._file(claim.name), {**holder, "ttl": claim.ttl, "until": now + claim.ttl})
        return Granted(holder["token"], claim.ttl, now, claim.ttl, claim.ttl / RENEWALS, self.scheme)

    def _file(self, name: str) -> Path:
        """Return the file of a name. Its file name is a hash, because a file name has at most 255 bytes and a key may
        be longer."""
        return self._path / f"{sha256((self._prefix + escape(name)).encode()).hexdigest()}.held"

    def _tombstone(self, claim: Claim) -> Path:
        return self._path / f"{claim.id}.cancelled"


def _lock(mutex: int) -> bool:
    try:
        fcntl.flock(mutex, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _live(file: Path, now: float) -> dict[str, Any] | None:
    """Return the content of the file if its time is not over. Otherwise delete the file."""
    try:
        content: dict[str, Any] = json.loads(file.read_bytes())
        # The clock starts again at a reboot. So a time that is further away than a ttl was written before a reboot.
        if now < content["until"] <= now + content["ttl"]:
            return content
    except FileNotFoundError:
        return None
    except ValueError:
        pass  # the file was cut by a power failure, which also ended its holder
    file.unlink()
    return None


def _save(file: Path, content: dict[str, Any]) -> None:
    """Replace the file in one step: if the process is killed here, the old file remains."""
    new = file.with_suffix(".new")
    new.write_text(json.dumps(content))
    new.replace(file)


def _info(name: str, holder: dict[str, Any], now: float) -> LockInfo:
    since = datetime.fromtimestamp(holder["since"], UTC)
    left = holder["until"] - now
    return replace(parse_owner(holder["owner"]), name=name, token=holder["token"], since=since, remaining=left)
