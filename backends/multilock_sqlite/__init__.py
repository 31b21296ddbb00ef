"""Locks in a SQLite file, for all processes of one host: ``sqlite:////absolute/path``.

`acquire_release` decides which claim gets a name. `tables` defines the tables of the file. `transport` sends the
statements, and `file_locks` lets one process at a time write. `host` finds out which processes are alive, and
identifies the present boot. `diagnosis` reports what weakens the lock on this host. SQLite itself pushes nothing, so
with `notices` the processes wake each other's waiters.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
from multilock.timing import HEARTBEATS, JITTER, LIVENESS_MIN, RENEWALS, liveness
from multilock_sqlite import host
from multilock_sqlite.acquire_release import ALONE, Exhausted, OtherNumber, Recipe, Stand
from multilock_sqlite.diagnosis import weaknesses
from multilock_sqlite.notices import Mailbox
from multilock_sqlite.tables import set_up
from multilock_sqlite.transport import Connection, Database, look, transaction

__all__ = ["SqliteBackend", "open_backend"]

GROUP = "sqlite"
POLL_FIRST, POLL_LAST = 0.01, 0.04  # seconds between two polls of a waiter; a poll is a read of a few 10 µs
# the pause as a share of the time that the claim has waited; POLL_LAST is reached after a third of a second
POLL_GROWTH = 1 / 8
# Longest pause in seconds between two polls of a waiter that messages can wake. The pause is POLL_LAST seconds times
# the number of waiters before it. So the first waiter still polls often, because a killed holder sends no message.
POLL_BEHIND = 1.0


def open_backend(url: str, options: Mapping[str, object]) -> SqliteBackend:
    """Return the backend for the file of ``sqlite:////absolute/path`` (or three slashes).

    This backend has no options besides the common ones. Raises `ConfigurationError` if the URL does not name an
    absolute path.
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
        shown = url.rpartition("@")[2]  # hide a password, which other URLs have before an @
        raise ConfigurationError(
            f"{shown!r} does not name a file by its absolute path: write sqlite:////directory/file, with four slashes",
            backend="sqlite",
        )
    path = "/" + path.lstrip("/")
    if os.path.dirname(os.path.normpath(path)) == "/":  # other libraries read sqlite:///locks.db as a relative path
        raise ConfigurationError(
            f"{url!r} means the file {path} in the root directory, because the path is always absolute: write "
            "sqlite:////directory/file, with four slashes",
            backend="sqlite",
        )
    return path


@dataclass(slots=True)
class QueuedClaim:
    """A claim of this client in the queue. It keeps its place for ``lives`` seconds after its last attempt."""

    since: float
    lives: float
    looked: float
    until: float  # when its place ends, according to the file
    called: bool = False  # whether a message has woken it since its last poll began

    def heartbeat_at(self) -> float:
        return self.until - self.lives * (1 - 1 / HEARTBEATS)


class SqliteBackend:
    """The `multilock.backend.Backend` for one file."""

    scheme = "sqlite"
    spi_version = 1
    _database: Database
    _mailbox: Mailbox

    def __init__(self, path: str, *, prefix: str, ttl: float) -> None:
        self._path = path
        self._prefix = prefix
        self._in_children = False
        self.capabilities = Capabilities(
            fencing=True,
            fencing_scope="the file",
            fair=True,
            push_wait=True,
            push_loss=False,
            cross_host=False,
            survives_failover=False,
            ttl_min=0.1,
            ttl_max=365 * 86400.0,
            ttl_step=0.001,
            # A waiter's next poll notices that a holder, or a waiter before it, was killed. If that process was in
            # another pid namespace, the waiter must wait until its lease or its last heartbeat expires.
            takeover_bound=max(ttl, LIVENESS_MIN) + (1 + JITTER) * POLL_BEHIND,
            hold_at_least=True,
            read_write=True,
            semaphore=True,
        )

    def open(self, notices: Notices) -> None:
        self._now = notices.now
        self._recipe = Recipe(host.boot_id(), host.Process.current(), self._in_children)
        if "_database" in vars(self):  # opened again in a forked child, where no connection is open
            self._database.close()
            self._mailbox.close()
        self._database = Database(self._path, lambda sql: set_up(self._path, notices.now, sql))
        self._mailbox = Mailbox(notices, GROUP, self._note_call)
        self._waiting: dict[str, QueuedClaim] = {}  # by claim id

    def works_in_children(self) -> None:
        """See `multilock.backend.FindsTheDead`."""
        self._in_children = True
        self._recipe = replace(self._recipe, in_children=True)

    def attempt(self, claim: Claim, join: bool, within: float) -> Granted | Busy:
        key = self._key(claim.name)
        with self._database.request(within) as sql:
            now, called = self._now(), False
            if waiting := self._waiting.get(claim.id):
                waiting.looked = now
                called, waiting.called = waiting.called, False
            # A new claim need not read first, because it must write in any case, to get the name or to join the queue.
            if waiting or not join:
                ahead = self._look(sql, key, claim, now)
                if ahead and ahead.id != claim.id and not (waiting and now >= waiting.heartbeat_at()):
                    return self._busy(sql, key, claim, ahead, now)
            # A release wakes all waiters that can hold the name together. But if the holder was killed, no message
            # came, so this waiter wakes the others.
            follow = bool(waiting) and not called and claim.mode != ALONE
            answer, woken, now = self._try(sql, key, claim, join, follow)
            self._mailbox.send(sql.path, woken)
            if isinstance(answer, OtherNumber):
                raise other_number(claim, answer.permits, self.scheme)
            if isinstance(answer, int):
                return _granted(claim, answer, now)
            # The first waiter of a client joins the queue before the client has a FIFO for messages. An earlier message
            # may have been lost, so this waiter polls again soon.
            missed = join and not self._mailbox.open(sql.path)
            return self._busy(sql, key, claim, answer, now, missed)

    def release(self, claim: Claim, granted: Granted | None, unsure: bool, within: float) -> Returned:
        with self._database.request(within) as sql:
            with transaction(sql):
                ours, woken = self._release(sql, self._key(claim.name), claim, unsure, self._now())
            self._mailbox.send(sql.path, woken)
        return Returned(ours)

    def rest(self, claim: Claim, granted: Granted, unsure: bool, seconds: float, within: float) -> Returned:
        key = self._key(claim.name)
        with self._database.request(within) as sql:
            with transaction(sql):
                ours = self._recipe.rest(sql, key, claim.id, unsure, seconds, self._now())
                woken = self._recipe.first_waiter(sql, key)
            self._mailbox.send(sql.path, woken)
        return Returned(ours)

    def renew(self, group: Hashable, held: Sequence[Held], within: float) -> Sequence[Granted | None]:
        with self._database.request(within) as sql, transaction(sql):
            now = self._now()
            renewed = self._recipe.renew(sql, [(self._key(claim.name), claim) for claim, _ in held], now)
        return [
            _granted(claim, granted.token, now) if still else None
            for (claim, granted), still in zip(held, renewed, strict=True)
        ]

    def watch(self, group: Hashable, held: Sequence[Held], within: float) -> None:
        """Open a FIFO, by which an operator's `force_release` makes this client renew at once."""
        self._mailbox.open(os.path.realpath(self._path))

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
        key = self._key(name)
        with self._database.request(within) as sql:
            with transaction(sql):
                now = self._now()
                taken = [id_ for (id_,) in sql.execute("SELECT id FROM locks WHERE key = ?", (key,))]
                held = self._recipe.force(sql, key, now)
                woken = self._recipe.next_in(sql, key, now)
            self._mailbox.send(sql.path, woken, taken)
        return held

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
        self._mailbox.close()
        self._database.close()

    def _try(
        self, sql: Connection, key: str, claim: Claim, join: bool, follow: bool
    ) -> tuple[int | Stand | OtherNumber | None, list[str], float]:
        """Make an attempt as the only writer. Returns its result, the waiters to wake, and the time of the attempt.

        If ``follow`` is True and the claim gets the name, the waiters that can hold the name together with it are
        woken. The waiter is recorded inside the transaction, so that no release misses it.
        """
        for durable in (False, True):
            with contextlib.suppress(Exhausted), transaction(sql, durable=durable):
                # Read the clock while no other process can write, so that the lease in the file does not end before the
                # holder's deadline.
                now = self._now()
                try:
                    answer = self._recipe.attempt(sql, key, claim, join, durable, now)
                except OtherNumber as other:
                    if claim.id not in self._waiting:
                        return other, [], now
                    return other, self._release(sql, key, claim, False, now)[1], now
                if isinstance(answer, Stand) and join:
                    self._keep_place(sql, claim, now)
                    return answer, [], now
                self._waiting.pop(claim.id, None)
                woken = self._recipe.next_in(sql, key, now) if follow and isinstance(answer, int) else []
                return answer, woken, now
        raise AssertionError("a durable transaction has tokens")

    def _release(self, sql: Connection, key: str, claim: Claim, unsure: bool, now: float) -> tuple[bool, list[str]]:
        """Release the name or leave the queue. Returns whether the claim held the name, and the waiters to wake.

        Call it inside a transaction.
        """
        self._waiting.pop(claim.id, None)
        ours = self._recipe.release(sql, key, claim.id, unsure, now)
        return ours, self._recipe.next_in(sql, key, now)

    def _keep_place(self, sql: Connection, claim: Claim, now: float) -> None:
        """Record the place of this claim in the queue, and send the heartbeats of this client that are due soon.

        So a client with many waiters writes rarely.
        """
        lives = liveness(claim.ttl)
        waiting = self._waiting.get(claim.id)
        if waiting is None:
            self._waiting[claim.id] = QueuedClaim(now, lives, now, now + lives)
            return
        waiting.until = now + lives
        soon = now + lives / HEARTBEATS / 2
        due = [(id_, it) for id_, it in list(self._waiting.items()) if it.heartbeat_at() < soon]
        self._recipe.keep_places(sql, [(it.looked + it.lives, id_) for id_, it in due])
        for _, it in due:  # waiters instead of ids, because a release may have removed a waiter meanwhile
            it.until = max(it.until, it.looked + it.lives)

    def _note_call(self, claim_id: str) -> None:
        if waiting := self._waiting.get(claim_id):
            waiting.called = True

    def _look(self, sql: Connection, key: str, claim: Claim, now: float) -> Stand | None:
        """Return the holder or waiter that keeps the claim out, or None if only a transaction can decide that."""
        with contextlib.suppress(OtherNumber, sqlite3.DatabaseError):
            return self._recipe.ahead(sql, key, claim, now)
        return None

    def _busy(
        self, sql: Connection, key: str, claim: Claim, ahead: Stand | None, now: float, missed: bool = False
    ) -> Busy:
        waiting = self._waiting.get(claim.id)
        poll = POLL_FIRST
        if waiting:
            poll = min(max(POLL_FIRST, (now - waiting.since) * POLL_GROWTH), POLL_LAST)
            if self._mailbox.is_read and not missed:
                with contextlib.suppress(sqlite3.DatabaseError):  # a read without a lock may fail
                    before = self._recipe.place(sql, key, claim.id, round(POLL_BEHIND / POLL_LAST))
                    poll = max(poll, min(before * POLL_LAST, waiting.heartbeat_at() - now))
        return Busy(poll, max(0.0, ahead.until - now) if ahead else None)

    def _key(self, name: str) -> str:
        return self._prefix + escape(name)


def _granted(claim: Claim, token: int | None, now: float) -> Granted:
    return Granted(token, claim.ttl, now, claim.ttl, claim.ttl / RENEWALS, GROUP)
