"""The algorithm: one row for each held name, one for each waiter. Nothing happens by itself: whoever looks decides.

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

from multilock.model import Claim, LockInfo, parse_owner
from multilock_sqlite.host import Process
from multilock_sqlite.layout import LIVENESS_MAX, LIVENESS_MIN, TOMBSTONE, sweep
from multilock_sqlite.transport import Connection

__all__ = ["Exhausted", "Recipe", "Stand", "liveness"]

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
        row = sql.execute("SELECT id, until, token, space, pid, start FROM locks WHERE key = ?", (key,)).fetchone()
        if row and self._is_alive(row[1], row[3:], now):
            return Stand(*row[:3])
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
            sql.execute("UPDATE locks SET until = ? WHERE key = ?", (now + claim.ttl, key))
            return ahead.token
        if sql.execute("SELECT 1 FROM cancelled WHERE id = ?", (claim.id,)).fetchone():
            return None
        if ahead is None:
            return self._take(sql, key, claim, durable, now)
        if join:
            sql.execute(
                "INSERT INTO queue (key, id, fair, until, space, pid, start) VALUES (?, ?, ?, ?, ?, ?, ?) "
                "ON CONFLICT (id) DO UPDATE SET until = excluded.until",
                (key, claim.id, claim.fair, now + liveness(claim), *self._columns()),
            )
        return ahead

    def release(self, sql: Connection, key: str, claim_id: str, unsure: bool, now: float) -> bool:
        """Give back, or leave the queue. True: the name was this claim's."""
        row = sql.execute("SELECT until FROM locks WHERE key = ? AND id = ?", (key, claim_id)).fetchone()
        if row:
            sql.execute("DELETE FROM locks WHERE key = ?", (key,))
        else:
            sql.execute("DELETE FROM queue WHERE id = ?", (claim_id,))
        if unsure:
            # A call with this id may still be on its way, in a thread that was stopped: it must find nothing to take.
            sql.execute("INSERT OR REPLACE INTO cancelled VALUES (?, ?)", (claim_id, now + TOMBSTONE))
        return row is not None and row[0] > now

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
            "UPDATE locks SET id = ?, until = ?, ttl = ?, space = NULL, pid = NULL, start = NULL WHERE key = ?",
            (resting, min(row[1], now + seconds) if again else now + seconds, seconds, key),
        )
        return True

    def renew(self, sql: Connection, key: str, claim: Claim, now: float) -> bool:
        """Whether the name is still this claim's; then its lease starts again."""
        changed = sql.execute(
            "UPDATE locks SET until = ? WHERE key = ? AND id = ? AND until > ?", (now + claim.ttl, key, claim.id, now)
        )
        return changed.rowcount == 1

    def force(self, sql: Connection, key: str, now: float) -> bool:
        """Whether somebody held the name until now."""
        row = sql.execute("SELECT until, space, pid, start FROM locks WHERE key = ?", (key,)).fetchone()
        if row is None:
            return False
        sql.execute("DELETE FROM locks WHERE key = ?", (key,))
        return self._is_alive(row[0], row[1:], now)

    def inspect(self, sql: Connection, key: str, now: float) -> LockInfo | None:
        row = sql.execute(
            "SELECT owner, token, since, id, until, space, pid, start FROM locks WHERE key = ?", (key,)
        ).fetchone()
        if row is None or not self._is_alive(row[4], row[5:], now):
            return None
        owner, token, since, id_, until = row[:5]
        (waiting,) = sql.execute("SELECT count(*) FROM queue WHERE key = ? AND until > ?", (key, now)).fetchone()
        return replace(
            parse_owner(owner),
            token=token,
            since=datetime.fromtimestamp(since, UTC),
            waiting=waiting,
            resting_until=datetime.now(UTC) + timedelta(seconds=until - now) if id_.startswith(RESTS) else None,
            remaining=until - now,
        )

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
        sql.execute(
            "INSERT OR REPLACE INTO locks VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (key, claim.id, claim.owner, token, time.time(), claim.ttl, now + claim.ttl, self.boot, *process),
        )
        sql.execute("DELETE FROM queue WHERE key = ? AND (id = ? OR until <= ?)", (key, claim.id, now))
        return token

    def _columns(self) -> tuple[str | None, int | None, int | None]:
        return (self.me.space, self.me.pid, self.me.start) if self.me else (None, None, None)

    def _is_alive(self, until: float, process: Sequence[Any], now: float) -> bool:
        if until <= now:
            return False
        return self.me is None or process[0] is None or not self.me.knows_gone(Process(*process))
