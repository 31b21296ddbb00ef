"""The algorithm: each holder and each waiter has a row. Each call about a name first decides which rows still count.

A holder has the name until its lease ends, or until its process is known to be gone. All living holders have the same
mode. The name is kept for the first living waiters, as many as can hold it together with the holders. But between two
unfair claims, the name goes to the claim that asks first. A waiter is alive for `liveness` seconds after its last
heartbeat, unless its process is known to be gone.

`attempt`, `release`, `renew` and `force` run inside a transaction that is the only writer. All times are seconds since
the boot. Only ``since`` is wall clock time, for people to read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from math import inf
from typing import Any, NamedTuple

from multilock import system
from multilock.backend import Claim, LockInfo, parse_owner
from multilock.timing import LATE_REQUEST, liveness
from multilock_sqlite.host import Process
from multilock_sqlite.tables import sweep
from multilock_sqlite.transport import Connection

__all__ = ["ALONE", "Exhausted", "OtherNumber", "Recipe", "Stand"]

ALONE, READ = "x", "r"  # modes; the third is p<n>, for one of n permits
# Prefix of the id in the row of a released claim that still keeps the name taken. No claim has such an id.
RESTS = "!rests:"
SHOWN = 100  # the greatest number of holders of one name that inspect() returns
HOLDERS = "SELECT id, until, token, mode, space, pid, start FROM locks WHERE key = ? AND until > ?"
# These rows have an index that is ordered by the end of the lease.
OF_SHARED = "FROM locks WHERE key = ? AND until > ? AND mode <> 'x'"
QUEUE = "SELECT id, mode, fair, until, space, pid, start FROM queue WHERE key = ? ORDER BY ticket"
SHARED = f"SELECT id, until, token, mode, space, pid, start {OF_SHARED} ORDER BY until"
RESERVE = 1000  # tokens that one fsync reserves; a reboot skips at most this many unused tokens


class Exhausted(Exception):
    """The reserved tokens are used up. A durable transaction must reserve more."""


class OtherNumber(Exception):
    """The name has ``permits`` permits, but the claim asked for a different number of permits."""

    def __init__(self, permits: int) -> None:
        super().__init__(permits)
        self.permits = permits


class Stand(NamedTuple):
    """The row that keeps a claim out: a holder (perhaps the claim itself), or an earlier waiter, whose token is
    None."""

    id: str
    until: float
    token: int | None
    mode: str


@dataclass(frozen=True, slots=True)
class Recipe:
    """Decides for one process which claim gets a name. ``boot`` (the boot id) and ``me`` (this process) are None if
    /proc does not show them.

    If ``in_children`` is True, child processes work under the leases of this process. So a holder's row names no
    process, and the lease outlives this process.
    """

    boot: str | None
    me: Process | None
    in_children: bool = False

    def ahead(self, sql: Connection, key: str, claim: Claim, now: float) -> Stand | None:
        """Return the holder or waiter that keeps ``claim`` out, or None if the claim may have the name. Raises
        `OtherNumber`."""
        if (holder := self._first(sql, HOLDERS, key, now)) is None:
            return self._waits_behind(sql, key, claim, now)
        if holder.mode == ALONE:
            return holder
        if holder.mode != claim.mode:
            if claim.permits and holder.mode != READ:
                raise OtherNumber(_permits(holder.mode))
            return self._first(sql, f"{SHARED} DESC", key, now)  # the holder whose lease ends last
        own = sql.execute(
            "SELECT id, until, token, mode FROM locks WHERE key = ? AND id = ? AND until > ?", (key, claim.id, now)
        ).fetchone()
        return Stand(*own) if own else self._waits_behind(sql, key, claim, now)

    def _waits_behind(self, sql: Connection, key: str, claim: Claim, now: float) -> Stand | None:
        """Return the first earlier waiter that excludes the claim. If too few permits are left, returns the holder
        whose lease ends first, or an earlier waiter if no holder is left.

        Readers may overtake waiting readers. Otherwise many readers would enter one by one.
        """
        equals: list[Stand] = []
        rows = sql.execute(QUEUE, (key,))  # read row by row: most claims need only the first
        try:
            for id_, mode, fair, until, *process in rows:
                if id_ == claim.id:
                    break
                fits = mode == claim.mode != ALONE
                if (claim.permits if fits else claim.fair or fair) and self._is_alive(until, process, now):
                    if not fits:
                        return Stand(id_, until, None, mode)
                    equals.append(Stand(id_, until, None, mode))
        finally:
            rows.close()  # an unfinished query would keep reading an old state of the file
        if claim.permits and self._is_full(sql, key, claim.permits - len(equals), now):
            # Without a transaction, all permits may have been released since they were counted.
            return self._first(sql, SHARED, key, now) or next(iter(equals), None)
        return None

    def _is_full(self, sql: Connection, key: str, room: int, now: float) -> bool:
        """Return whether at least ``room`` living claims hold the name together.

        Rows of processes that are gone do not count. The processes are checked only if that can change the result.
        """
        (rows,) = sql.execute(f"SELECT count(*) {OF_SHARED}", (key, now)).fetchone()
        if rows < room:
            return False
        return self._count_living(sql, key, now) >= room

    def _count_living(self, sql: Connection, key: str, now: float) -> int:
        """Return how many living claims hold the name together."""
        groups = sql.execute(
            f"SELECT count(*), space, pid, start {OF_SHARED} GROUP BY space, pid, start", (key, now)
        ).fetchall()
        return sum(count for count, *process in groups if not self._is_gone(process))

    def next_in(self, sql: Connection, key: str, now: float) -> list[str]:
        """Return the first waiters that can hold the name together with the holders and each other, in order.

        The caller wakes these waiters, and their next `attempt` decides.
        """
        found: list[str] = []
        first, room = "", 0.0
        rows = sql.execute(QUEUE, (key,))
        try:
            for id_, mode, _, until, *process in rows:
                if not self._is_alive(until, process, now):
                    continue
                if not first:
                    first, room = mode, self._room(sql, key, mode, now)
                if mode != first or len(found) >= room:
                    break
                found.append(id_)
        finally:
            rows.close()  # an unfinished query would keep reading an old state of the file
        return found

    def _room(self, sql: Connection, key: str, mode: str, now: float) -> float:
        """Return how many more claims of this mode can hold the name together with the holders."""
        holder = self._first(sql, HOLDERS, key, now)
        if mode == ALONE:
            return 1 if holder is None else 0
        if holder and holder.mode != mode:
            return 0
        return inf if mode == READ else _permits(mode) - self._count_living(sql, key, now)

    def first_waiter(self, sql: Connection, key: str) -> list[str]:
        """Return the id of the first waiter, in a list that is empty if nobody waits."""
        return [id_ for (id_,) in sql.execute("SELECT id FROM queue WHERE key = ? ORDER BY ticket LIMIT 1", (key,))]

    def place(self, sql: Connection, key: str, claim_id: str, most: int) -> int:
        """Return how many waiters came before this claim, at most ``most``."""
        (before,) = sql.execute(
            "SELECT count(*) FROM (SELECT 1 FROM queue WHERE key = ? AND ticket < "
            "(SELECT ticket FROM queue WHERE id = ?) LIMIT ?)",
            (key, claim_id, most),
        ).fetchone()
        return int(before)

    def keep_places(self, sql: Connection, places: Sequence[tuple[float, str]]) -> None:
        """Let these waiters keep their places at least until the given times. A waiter that has left stays out."""
        sql.executemany("UPDATE queue SET until = max(until, ?) WHERE id = ?", places)

    def attempt(
        self, sql: Connection, key: str, claim: Claim, join: bool, durable: bool, now: float
    ) -> int | Stand | None:
        """Return the token, or the holder or waiter that keeps the claim out, or None if the claim's id was cancelled.

        Raises `OtherNumber`. Unless ``durable``, raises `Exhausted` if no reserved token is left.
        """
        ahead = self.ahead(sql, key, claim, now)
        if ahead and ahead.id == claim.id:
            sql.execute("UPDATE locks SET until = ? WHERE key = ? AND id = ?", (now + claim.ttl, key, claim.id))
            return ahead.token
        if sql.execute("SELECT 1 FROM cancelled WHERE id = ?", (claim.id,)).fetchone():
            return None
        if ahead is None:
            return self._take(sql, key, claim, durable, now)
        if join:
            sql.execute(
                "INSERT INTO queue (key, id, mode, fair, until, space, pid, start) VALUES (?, ?, ?, ?, ?, ?, ?, ?) "
                "ON CONFLICT (id) DO UPDATE SET until = excluded.until",
                (key, claim.id, claim.mode, claim.fair, now + liveness(claim.ttl), *self._columns()),
            )
        return ahead

    def release(self, sql: Connection, key: str, claim_id: str, unsure: bool, now: float) -> bool:
        """Release the name, or leave the queue. Returns True if this claim held the name until now."""
        held = (
            sql.execute("DELETE FROM locks WHERE key = ? AND id = ? AND until > ?", (key, claim_id, now)).rowcount == 1
        )
        if not held:
            sql.execute("DELETE FROM locks WHERE key = ? AND id = ?", (key, claim_id))
            sql.execute("DELETE FROM queue WHERE id = ?", (claim_id,))
        if unsure:
            # A call with this id may still run in a thread that was paused, and must then fail.
            sql.execute("INSERT OR REPLACE INTO cancelled VALUES (?, ?)", (claim_id, now + LATE_REQUEST))
        return held

    def rest(self, sql: Connection, key: str, claim_id: str, unsure: bool, seconds: float, now: float) -> bool:
        """Keep the name taken for ``seconds``. The claim's row then names neither an owner nor a process. Returns True
        if the claim held the name."""
        resting = RESTS + claim_id
        row = sql.execute(
            "SELECT id, until FROM locks WHERE key = ? AND id IN (?, ?)", (key, claim_id, resting)
        ).fetchone()
        if unsure:
            sql.execute("INSERT OR REPLACE INTO cancelled VALUES (?, ?)", (claim_id, now + LATE_REQUEST))
        if row is None or row[1] <= now:
            return False
        # a repeated request must not extend the time for which the name stays taken
        again = row[0] == resting
        sql.execute(
            "UPDATE locks SET id = ?, until = ?, ttl = ?, space = NULL, pid = NULL, start = NULL "
            "WHERE key = ? AND id = ?",
            (resting, min(row[1], now + seconds) if again else now + seconds, seconds, key, row[0]),
        )
        return True

    def renew(self, sql: Connection, held: Sequence[tuple[str, Claim]], now: float) -> list[bool]:
        """Extend the leases. Returns for each key and claim whether the claim still holds the name."""
        statement = "UPDATE locks SET until = ? WHERE key = ? AND id = ? AND until > ?"
        rows = [(now + claim.ttl, key, claim.id, now) for key, claim in held]
        if sql.executemany(statement, rows).rowcount == len(rows):
            return [True] * len(rows)
        # some leases are lost, so renew them one by one
        return [sql.execute(statement, row).rowcount == 1 for row in rows]

    def force(self, sql: Connection, key: str, now: float) -> bool:
        """Take the name from its holders. Returns whether there were any until now."""
        held = self._first(sql, HOLDERS, key, now) is not None
        sql.execute("DELETE FROM locks WHERE key = ?", (key,))
        return held

    def inspect(self, sql: Connection, key: str, now: float) -> LockInfo | None:
        """Return the oldest holder, the number of holders, and up to 99 more holders."""
        rows = sql.execute(
            "SELECT id, owner, token, since, until, mode, space, pid, start FROM locks WHERE key = ? AND until > ? "
            "ORDER BY token",
            (key, now),
        ).fetchall()
        living = list(self._living(rows))
        if not living:
            return None
        (waiting,) = sql.execute("SELECT count(*) FROM queue WHERE key = ? AND until > ?", (key, now)).fetchone()
        first, *others = (_shown(row, now) for row in living[:SHOWN])
        alone = living[0][5] == ALONE
        return replace(first, waiting=waiting, holders=None if alone else len(living), others=tuple(others))

    def _first(self, sql: Connection, query: str, key: str, now: float) -> Stand | None:
        """Return the first living row. One row is enough to keep a claim out, so most calls read a single row."""
        rows = sql.execute(query, (key, now))
        try:
            return next((Stand(*row) for row in self._living(rows)), None)
        finally:
            rows.close()  # an unfinished query would keep reading an old state of the file

    def _living(self, rows: Iterable[Sequence[Any]]) -> Iterator[Sequence[Any]]:
        """Yield each row whose process lives, without its last three columns, which identify the process. Each process
        is checked only once."""
        gone: dict[Sequence[Any], bool] = {}
        for row in rows:
            process = row[-3:]
            if process not in gone:
                gone[process] = self._is_gone(process)
            if not gone[process]:
                yield row[:-3]

    def _take(self, sql: Connection, key: str, claim: Claim, durable: bool, now: float) -> int:
        token: int
        token, reserved = sql.execute("SELECT token + 1, reserved FROM counter").fetchone()
        if token > reserved:
            if not durable:
                raise Exhausted
            reserved = token + RESERVE
            sweep(sql, now)
        sql.execute("UPDATE counter SET token = ?, reserved = ?", (token, reserved))
        # A renew=False lock lasts for its whole ttl even if this process dies, so its row names no process.
        process = self._columns() if claim.renew and not self.in_children else (None, None, None)
        if claim.mode == ALONE or self._first(sql, HOLDERS, key, now) is None:
            sql.execute("DELETE FROM locks WHERE key = ?", (key,))  # rows of ended leases and of dead processes
        sql.execute(
            "INSERT INTO locks VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                key,
                claim.id,
                claim.mode,
                claim.owner,
                token,
                (system.wall() / 1_000_000),
                claim.ttl,
                now + claim.ttl,
                self.boot,
                *process,
            ),
        )
        sql.execute("DELETE FROM queue WHERE key = ? AND (id = ? OR until <= ?)", (key, claim.id, now))
        return token

    def _columns(self) -> tuple[str | None, int | None, int | None]:
        return (self.me.space, self.me.pid, self.me.start) if self.me else (None, None, None)

    def _is_alive(self, until: float, process: Sequence[Any], now: float) -> bool:
        return until > now and not self._is_gone(process)

    def _is_gone(self, process: Sequence[Any]) -> bool:
        return self.me is not None and process[0] is not None and self.me.knows_gone(Process(*process))


def _permits(mode: str) -> int:
    return int(mode[1:])


def _shown(row: Sequence[Any], now: float) -> LockInfo:
    id_, owner, token, since, until, mode = row
    left = until - now
    return replace(
        parse_owner(owner),
        token=token,
        since=datetime.fromtimestamp(since, UTC),
        resting_until=datetime.now(UTC) + timedelta(seconds=left) if id_.startswith(RESTS) else None,
        remaining=left,
        permits=None if mode in (ALONE, READ) else _permits(mode),
    )
