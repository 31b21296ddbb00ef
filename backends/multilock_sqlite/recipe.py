"""The algorithm: one row for each holder, one for each waiter. Nothing happens by itself: whoever looks decides.

A name belongs to the claims in its rows until their leases end, or their processes are known to be gone; the living
ones are of one mode. It is kept for the living waiters, in order, as far as they fit beside the holders and each other:
for everybody if the waiter or the one who looks is fair, else it goes to whoever comes first. A waiter is alive for
`liveness` seconds after its last heartbeat, unless its process is known to be gone.

`attempt`, `release`, `renew` and `force` run inside a transaction that is the only writer, so what they see is true
until they end. All times are seconds on the clock of every deadline, which counts from the boot, but ``since``, which
only people read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from multilock import system
from multilock.backend import Claim, LockInfo, parse_owner
from multilock_sqlite.host import Process
from multilock_sqlite.layout import LIVENESS_MAX, LIVENESS_MIN, TOMBSTONE, sweep
from multilock_sqlite.transport import Connection

__all__ = ["Exhausted", "OtherNumber", "Recipe", "Stand", "liveness"]

ALONE, READ = "x", "r"  # modes; the other is p<n>, of n permits
RESTS = "!rests:"  # before the id of the claim that was released: no claim is called so
SHOWN = 100  # holders that inspect() tells of one name
HOLDERS = "SELECT id, until, token, mode, space, pid, start FROM locks WHERE key = ? AND until > ?"
OF_SHARED = "FROM locks WHERE key = ? AND until > ? AND mode <> 'x'"  # by their end: there is an index
SHARED = f"SELECT id, until, token, mode, space, pid, start {OF_SHARED} ORDER BY until"
RESERVE = 1000  # tokens that one fsync pays for; a reboot skips at most as many


class Exhausted(Exception):
    """The reserved tokens are used up: the transaction that reserves more must be durable."""


class OtherNumber(Exception):
    """Permits of which there are so many, where another number was asked for."""

    def __init__(self, permits: int) -> None:
        super().__init__(permits)
        self.permits = permits


class Stand(NamedTuple):
    """Who stands before a claim: the holder (perhaps itself), or a waiter that comes first, whose token is None."""

    id: str
    until: float
    token: int | None
    mode: str


def liveness(claim: Claim) -> float:
    """Seconds for which one heartbeat keeps a waiter's place: three periods, so that one may be late."""
    return min(max(claim.ttl, LIVENESS_MIN), LIVENESS_MAX)


@dataclass(frozen=True, slots=True)
class Recipe:
    """The decisions of one process. ``boot`` and ``me`` are None where /proc does not tell."""

    boot: str | None
    me: Process | None

    def ahead(self, sql: Connection, key: str, claim: Claim, now: float) -> Stand | None:
        """None: ``claim`` may have the name. Raises OtherNumber."""
        if (holder := self._first(sql, HOLDERS, key, now)) is None:
            return self._waits_behind(sql, key, claim, now)
        if holder.mode == ALONE:
            return holder
        if holder.mode != claim.mode:
            if claim.permits and holder.mode != READ:
                raise OtherNumber(_permits(holder.mode))
            return self._first(sql, f"{SHARED} DESC", key, now)  # the last to end
        own = sql.execute(
            "SELECT id, until, token, mode FROM locks WHERE key = ? AND id = ? AND until > ?", (key, claim.id, now)
        ).fetchone()
        return Stand(*own) if own else self._waits_behind(sql, key, claim, now)

    def _waits_behind(self, sql: Connection, key: str, claim: Claim, now: float) -> Stand | None:
        """Who came before and does not fit beside it; where there are too few permits, who ends first. Readers may pass
        readers: else a crowd of them would come in one by one."""
        equals: list[Stand] = []
        for id_, mode, fair, until, *process in sql.execute(
            "SELECT id, mode, fair, until, space, pid, start FROM queue WHERE key = ? ORDER BY ticket", (key,)
        ).fetchall():
            if id_ == claim.id:
                break
            fits = mode == claim.mode != ALONE
            if (claim.permits if fits else claim.fair or fair) and self._is_alive(until, process, now):
                if not fits:
                    return Stand(id_, until, None, mode)
                equals.append(Stand(id_, until, None, mode))
        if claim.permits and self._is_full(sql, key, claim.permits - len(equals), now):
            # Nobody is left where all were given back since they were counted: a look is no transaction.
            return self._first(sql, SHARED, key, now) or next(iter(equals), None)
        return None

    def _is_full(self, sql: Connection, key: str, room: int, now: float) -> bool:
        """Whether so many hold it together. Those of gone processes do not count; they are looked for only where they
        would make the difference."""
        (rows,) = sql.execute(f"SELECT count(*) {OF_SHARED}", (key, now)).fetchone()
        if rows < room:
            return False
        groups = sql.execute(
            f"SELECT count(*), space, pid, start {OF_SHARED} GROUP BY space, pid, start", (key, now)
        ).fetchall()
        living: int = sum(count for count, *process in groups if not self._is_gone(process))
        return living >= room

    def attempt(
        self, sql: Connection, key: str, claim: Claim, join: bool, durable: bool, now: float
    ) -> int | Stand | None:
        """The token, or who stands before; None: this id was cancelled. Raises Exhausted unless ``durable``;
        OtherNumber."""
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
                (key, claim.id, claim.mode, claim.fair, now + liveness(claim), *self._columns()),
            )
        return ahead

    def release(self, sql: Connection, key: str, claim_id: str, unsure: bool, now: float) -> bool:
        """Give back, or leave the queue. True: the name was this claim's."""
        held = (
            sql.execute("DELETE FROM locks WHERE key = ? AND id = ? AND until > ?", (key, claim_id, now)).rowcount == 1
        )
        if not held:
            sql.execute("DELETE FROM locks WHERE key = ? AND id = ?", (key, claim_id))
            sql.execute("DELETE FROM queue WHERE id = ?", (claim_id,))
        if unsure:
            # A call with this id may still be on its way, in a thread that was stopped: it must find nothing to take.
            sql.execute("INSERT OR REPLACE INTO cancelled VALUES (?, ?)", (claim_id, now + TOMBSTONE))
        return held

    def rest(self, sql: Connection, key: str, claim_id: str, unsure: bool, seconds: float, now: float) -> bool:
        """Let the name be nobody's, and taken, for so long; no process keeps it any more. True: it was this claim's."""
        resting = RESTS + claim_id
        row = sql.execute(
            "SELECT id, until FROM locks WHERE key = ? AND id IN (?, ?)", (key, claim_id, resting)
        ).fetchone()
        if unsure:
            sql.execute("INSERT OR REPLACE INTO cancelled VALUES (?, ?)", (claim_id, now + TOMBSTONE))
        if row is None or row[1] <= now:
            return False
        again = row[0] == resting  # the first answer was lost: its end stays
        sql.execute(
            "UPDATE locks SET id = ?, until = ?, ttl = ?, space = NULL, pid = NULL, start = NULL "
            "WHERE key = ? AND id = ?",
            (resting, min(row[1], now + seconds) if again else now + seconds, seconds, key, row[0]),
        )
        return True

    def renew(self, sql: Connection, held: Sequence[tuple[str, Claim]], now: float) -> list[bool]:
        """For each key and claim, whether the name is still this claim's; then its lease starts again."""
        statement = "UPDATE locks SET until = ? WHERE key = ? AND id = ? AND until > ?"
        rows = [(now + claim.ttl, key, claim.id, now) for key, claim in held]
        if sql.executemany(statement, rows).rowcount == len(rows):
            return [True] * len(rows)
        return [sql.execute(statement, row).rowcount == 1 for row in rows]  # some are lost: which?

    def force(self, sql: Connection, key: str, now: float) -> bool:
        """Whether somebody held the name until now."""
        held = self._first(sql, HOLDERS, key, now) is not None
        sql.execute("DELETE FROM locks WHERE key = ?", (key,))
        return held

    def inspect(self, sql: Connection, key: str, now: float) -> LockInfo | None:
        """The oldest holder, how many there are, and 99 more of them."""
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
        """The first that is alive. One is enough to keep a claim out, so one row is read unless processes are gone."""
        rows = sql.execute(query, (key, now))
        try:
            return next((Stand(*row) for row in self._living(rows)), None)
        finally:
            rows.close()  # or what is not read to its end goes on reading the past

    def _living(self, rows: Iterable[Sequence[Any]]) -> Iterator[Sequence[Any]]:
        """Without the three columns of the process, which is looked for once."""
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
        # renew=False promises the whole ttl, whatever becomes of this process: then nobody shall look for it.
        process = self._columns() if claim.renew else (None, None, None)
        if claim.mode == ALONE or self._first(sql, HOLDERS, key, now) is None:
            sql.execute("DELETE FROM locks WHERE key = ?", (key,))  # ended, or of processes that are gone
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
