"""Locks in a SQLite file, for all processes of one host: ``sqlite:////absolute/path``.

`recipe` decides which claim gets a name. `layout` defines the tables of the file. `transport` sends the statements, and
`exclusion` lets one process at a time write. `host` finds out about processes and boots. `diagnosis` reports what
weakens the lock here. SQLite pushes nothing, so there is no `notices`.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from urllib.parse import unquote

from multilock import BackendRejected, ConfigurationError
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
    other_number,
)
from multilock.names import escape, unescape
from multilock.options import prefix_of, reject_unknown, ttl_of
from multilock.timing import JITTER, LIVENESS_MIN, RENEWALS, heartbeat
from multilock_sqlite import host
from multilock_sqlite.diagnosis import weaknesses
from multilock_sqlite.layout import set_up
from multilock_sqlite.recipe import Exhausted, OtherNumber, Recipe, Stand
from multilock_sqlite.transport import Connection, Database, look, transaction

__all__ = ["SqliteBackend", "open_backend"]

GROUP = "sqlite"
POLL_FIRST, POLL_LAST = 0.01, 0.04  # seconds between two looks of a waiter; a look costs a read of a few 10 µs
POLL_GROWTH = 1 / 8  # the pause as a share of the time waited so far; the longest is reached after a third of a second


def open_backend(url: str, options: Mapping[str, object]) -> SqliteBackend:
    """Return the backend for the file of ``sqlite:////absolute/path`` (or three slashes).

    It has no options besides the common ones. Raises `ConfigurationError` if the URL does not name an absolute path.
    """
    reject_unknown(options, (), "sqlite")
    return SqliteBackend(
        _path(url),
        prefix=prefix_of(options),
        ttl=ttl_of(options),
    )


def _path(url: str) -> str:
    path = unquote(url.partition("://")[2])
    if path.strip("/") == ":memory:":
        raise ConfigurationError("a SQLite database in memory has one connection: use memory://", backend="sqlite")
    if not path.startswith("/") or path.endswith("/"):
        shown = url.rpartition("@")[2]  # a password may stand before it, as in other URLs
        raise ConfigurationError(
            f"{shown!r} does not name a file by its absolute path: write sqlite:////directory/file, with four slashes",
            backend="sqlite",
        )
    path = "/" + path.lstrip("/")
    if os.path.dirname(os.path.normpath(path)) == "/":  # sqlite:///locks.db is a relative path elsewhere
        raise ConfigurationError(
            f"{url!r} means the file {path} in the root directory, because the path is always absolute: write "
            "sqlite:////directory/file, with four slashes",
            backend="sqlite",
        )
    return path


class SqliteBackend:
    """The `multilock.backend.Backend` for one file."""

    scheme = "sqlite"
    spi_version = 1
    _database: Database

    def __init__(self, path: str, *, prefix: str, ttl: float) -> None:
        self._path = path
        self._prefix = prefix
        self._in_children = False
        self.capabilities = Capabilities(
            fencing=True,
            fencing_scope="the file",
            fair=True,
            push_wait=False,
            push_loss=False,
            cross_host=False,
            survives_failover=False,
            ttl_min=0.1,
            ttl_max=365 * 86400.0,
            ttl_step=0.001,
            # A waiter finds a killed holder, or a killed waiter before it, at its next look. If that process is in
            # another pid namespace, the waiter finds it only when the lease or the last heartbeat ends.
            takeover_bound=max(ttl, LIVENESS_MIN) + (1 + JITTER) * POLL_LAST,
            hold_at_least=True,
            read_write=True,
            semaphore=True,
        )

    def open(self, notices: Notices) -> None:
        self._now = notices.now
        self._recipe = Recipe(host.boot_id(), host.Process.current(), self._in_children)
        if "_database" in vars(self):  # opened again, in a forked child, where no connection is open any longer
            self._database.close()
        self._database = Database(self._path, lambda sql: set_up(self._path, notices.now, sql))
        self._waiting: dict[str, tuple[float, float]] = {}  # claim id -> when it began to wait, when a heartbeat is due

    def works_in_children(self) -> None:
        """See `multilock.backend.FindsTheDead`."""
        self._in_children = True
        self._recipe = replace(self._recipe, in_children=True)

    def attempt(self, claim: Claim, join: bool, within: float) -> Granted | Busy:
        key = self._key(claim.name)
        with self._database.request(within) as sql:
            now = self._now()
            try:
                ahead = self._look(sql, key, claim, now)
                if ahead and ahead.id != claim.id and not (join and self._heartbeat_is_due(claim, now)):
                    return self._busy(claim, ahead, now)
                answer, now = self._try(sql, key, claim, join)
            except OtherNumber as other:
                if self._waiting.pop(claim.id, None):
                    with transaction(sql):
                        self._recipe.release(sql, key, claim.id, False, now)
                raise other_number(claim, other.permits, self.scheme) from None
        if isinstance(answer, int):
            self._waiting.pop(claim.id, None)
            return _granted(claim, answer, now)
        if join:
            since, _ = self._waiting.get(claim.id, (now, now))
            self._waiting[claim.id] = since, now + heartbeat(claim.ttl)
        return self._busy(claim, answer, now)

    def release(self, claim: Claim, granted: Granted | None, unsure: bool, within: float) -> Returned:
        self._waiting.pop(claim.id, None)
        with self._database.request(within) as sql, transaction(sql):
            return Returned(self._recipe.release(sql, self._key(claim.name), claim.id, unsure, self._now()))

    def rest(self, claim: Claim, granted: Granted, unsure: bool, seconds: float, within: float) -> Returned:
        with self._database.request(within) as sql, transaction(sql):
            return Returned(self._recipe.rest(sql, self._key(claim.name), claim.id, unsure, seconds, self._now()))

    def renew(self, group: Hashable, held: Sequence[Held], within: float) -> Sequence[Granted | None]:
        with self._database.request(within) as sql, transaction(sql):
            now = self._now()
            renewed = self._recipe.renew(sql, [(self._key(claim.name), claim) for claim, _ in held], now)
        return [
            _granted(claim, granted.token, now) if still else None
            for (claim, granted), still in zip(held, renewed, strict=True)
        ]

    def watch(self, group: Hashable, held: Sequence[Held], within: float) -> None:
        """Do nothing: SQLite pushes nothing, so the next renewal finds a loss."""

    def follow(self, names: frozenset[str], within: float) -> bool:
        return False

    def inspect(self, name: str, within: float) -> LockInfo | None:
        with self._database.request(within) as sql:
            info = look(sql, lambda: self._recipe.inspect(sql, self._key(name), self._now()))
        return replace(info, name=name, others=tuple(replace(i, name=name) for i in info.others)) if info else None

    def inspect_all(self, prefix: str, within: float) -> Iterator[LockInfo]:
        with self._database.request(within) as sql:
            rows = look(sql, lambda: sql.execute("SELECT DISTINCT key FROM locks ORDER BY key").fetchall())
        for (key,) in rows:
            name = unescape(key.removeprefix(self._prefix)) if key.startswith(self._prefix) else None
            if name is not None and name.startswith(prefix) and (info := self.inspect(name, within)):
                yield replace(info, others=())

    def force_release(self, name: str, within: float) -> bool:
        with self._database.request(within) as sql, transaction(sql):
            return self._recipe.force(sql, self._key(name), self._now())

    def diagnose(self, within: float) -> list[Finding]:
        try:
            with self._database.request(within) as sql, transaction(sql):
                lasting = sql.exclusion.lasts
        except BackendRejected as error:
            return [Finding("unusable", "error", str(error), "as the message says"), *weaknesses(self._path)]
        return weaknesses(self._path, lasting)

    def ping(self, within: float) -> None:
        with self._database.request(within) as sql:
            look(sql, lambda: sql.execute("SELECT token FROM counter").fetchone())

    def close(self) -> None:
        self._database.close()

    def _try(self, sql: Connection, key: str, claim: Claim, join: bool) -> tuple[int | Stand | None, float]:
        """Make an attempt as the only writer. Returns what it found, and when."""
        for durable in (False, True):
            with contextlib.suppress(Exhausted), transaction(sql, durable=durable):
                # Read the clock while nobody else can write: then the lease in the file never ends before its holder
                # believes that it does.
                now = self._now()
                return self._recipe.attempt(sql, key, claim, join, durable, now), now
        raise AssertionError("a durable transaction has tokens")

    def _look(self, sql: Connection, key: str, claim: Claim, now: float) -> Stand | None:
        """Return what keeps the claim out, or None if only a transaction can tell. Reads alone refuse nothing."""
        with contextlib.suppress(OtherNumber, sqlite3.DatabaseError):
            return self._recipe.ahead(sql, key, claim, now)
        return None

    def _heartbeat_is_due(self, claim: Claim, now: float) -> bool:
        waiting = self._waiting.get(claim.id)
        return waiting is None or waiting[1] <= now

    def _busy(self, claim: Claim, ahead: Stand | None, now: float) -> Busy:
        since, _ = self._waiting.get(claim.id, (now, now))
        poll = min(max(POLL_FIRST, (now - since) * POLL_GROWTH), POLL_LAST)
        return Busy(poll, max(0.0, ahead.until - now) if ahead else None)

    def _key(self, name: str) -> str:
        return self._prefix + escape(name)


def _granted(claim: Claim, token: int | None, now: float) -> Granted:
    return Granted(token, claim.ttl, now, claim.ttl, claim.ttl / RENEWALS, GROUP)
