"""The algorithm: one row for each holder, one for each waiter. Nothing happens by itself: whoever looks decides.

A name belongs to the claim in its row until the lease ends, or its process is known to be gone. A free name is kept for
the first living waiter: for everybody if the waiter or the one who looks is fair, else it goes to whoever comes first.
A waiter is alive for `liveness` seconds after its last heartbeat, unless its process is known to be gone.

`attempt`, `release`, `renew` and `force` run inside a transaction that is the only writer, so what they see is true
until they end. All times are seconds on the clock of every deadline, which counts from the boot, but ``since``, which
only people read.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from multilock.backend import Claim, LockInfo, parse_owner
from multilock_sqlite.host import Process
from multilock_sqlite.layout import LIVENESS_MAX, LIVENESS_MIN, TOMBSTONE, sweep
from multilock_sqlite.transport import Connection

__all__ = ["Exhausted", "Recipe", "Stand", "liveness"]

ALONE = "x"  # the mode of a holder beside whom there is no other; the file has room for modes that share a name
RESTS = "!rests:"  # before the id of the claim that was released: no claim is called so
RESERVE = 1000  # tokens that one fsync pays for; a reboot skips at most as many


class Exhausted(Exception):
    """The reserved tokens are used up: the transaction that reserves more must be durable."""


class Stand(NamedTuple):
    """Who stands before a claim: the holder (perhaps itself), or a waiter that comes first, whose token is None."""

    id: str
    until: float
    token: int | None


def liveness(claim: Claim) -> float:
    """Seconds for which one heartbeat keeps a waiter's place: three periods, so that one may be late."""
    return min(max(claim.ttl, LIVENESS_MIN), LIVENESS_MAX)


@dataclass(frozen=True, slots=True)
class Recipe:
    """The decisions of one process. ``boot`` and ``me`` are None where /proc does not tell."""

    boot: str | None
    me: Process | None

    def ahead(self, sql: Connection, key: str, claim: Claim, now: float) -> Stand | None:
        """None: ``claim`` may have the name."""
        if holder := self._holder(sql, key, now):
            return holder
        for id_, fair, until, *process in sql.execute(
            "SELECT id, fair, until, space, pid, start FROM queue WHERE key = ? ORDER BY ticket", (key,)
        ).fetchall():
            if id_ == claim.id:
                break
            if (claim.fair or fair) and self._is_alive(until, process, now):
                return Stand(id_, until, None)
        return None

    def attempt(
        self, sql: Connection, key: str, claim: Claim, join: bool, durable: bool, now: float
    ) -> int | Stand | None:
        """The token, or who stands before; None: this id was cancelled. Raises Exhausted unless ``durable``."""
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
                (key, claim.id, ALONE, claim.fair, now + liveness(claim), *self._columns()),
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
        held = self._holder(sql, key, now) is not None
        sql.execute("DELETE FROM locks WHERE key = ?", (key,))
        return held

    def inspect(self, sql: Connection, key: str, now: float) -> LockInfo | None:
        holder = self._holder(sql, key, now)
        if holder is None:
            return None
        row = sql.execute("SELECT owner, since FROM locks WHERE key = ? AND id = ?", (key, holder.id)).fetchone()
        if row is None:
            return None  # given back between these two looks
        owner, since = row
        (waiting,) = sql.execute("SELECT count(*) FROM queue WHERE key = ? AND until > ?", (key, now)).fetchone()
        left = holder.until - now
        return replace(
            parse_owner(owner),
            token=holder.token,
            since=datetime.fromtimestamp(since, UTC),
            waiting=waiting,
            resting_until=datetime.now(UTC) + timedelta(seconds=left) if holder.id.startswith(RESTS) else None,
            remaining=left,
        )

    def _holder(self, sql: Connection, key: str, now: float) -> Stand | None:
        """Somebody alive: one is enough to keep a claim out, so one row is read unless processes are gone."""
        rows = sql.execute(
            "SELECT id, until, token, space, pid, start FROM locks WHERE key = ? AND until > ?", (key, now)
        )
        try:
            for row in rows:
                if self._is_alive(row[1], row[3:], now):
                    return Stand(*row[:3])
        finally:
            rows.close()  # or what is not read to its end goes on reading the past
        return None

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
        sql.execute("DELETE FROM locks WHERE key = ?", (key,))  # ended, or of processes that are gone
        sql.execute(
            "INSERT INTO locks VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (key, claim.id, ALONE, claim.owner, token, time.time(), claim.ttl, now + claim.ttl, self.boot, *process),
        )
        sql.execute("DELETE FROM queue WHERE key = ? AND (id = ? OR until <= ?)", (key, claim.id, now))
        return token

    def _columns(self) -> tuple[str | None, int | None, int | None]:
        return (self.me.space, self.me.pid, self.me.start) if self.me else (None, None, None)

    def _is_alive(self, until: float, process: Sequence[Any], now: float) -> bool:
        if until <= now:
            return False
        return self.me is None or process[0] is None or not self.me.knows_gone(Process(*process))
