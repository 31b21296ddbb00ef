"""A model of multilock's functions in PostgreSQL: the rows of the tables, and how each step (one function) changes
them.

The model runs one step at a time. PostgreSQL also runs the steps of one name one after the other, because each step
locks the row of its name. The model leaves out the functions' limits for hundreds of waiters. `test_postgresql_model`
compares the model with a real server. Times are microseconds.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from multilock_postgresql.transactions import StepQueries

__all__ = ["LOCK_WAIT", "STEPS", "Holder", "Name", "Refused", "Row", "Store", "Waiter"]

Row = tuple[bytes | None, ...]

MS, SECOND, MINUTE = 1000, 1_000_000, 60_000_000
LATEST_WRITE = 600_000  # µs; three times wal_writer_delay, after which each commit is on the disk
LOCK_WAIT = "55P03"
STEPS = StepQueries("multilock")


class Refused(Exception):
    """An error reply, whose text is the SQLSTATE. The step was not executed."""


class Name(NamedTuple):
    """A row of the table ``locks``."""

    key: str
    token: int
    id: str | None = None
    who: str | None = None
    ttl: int = 0
    until: int | None = None
    sure: int | None = None
    boot: str | None = None
    followed: int | None = None


class Holder(NamedTuple):
    """A row of the table ``holders``."""

    id: str
    key: str
    who: str
    token: int
    ttl: int
    until: int


class Waiter(NamedTuple):
    """A row of the table ``queue``."""

    ticket: int
    key: str
    id: str
    who: str
    mode: str
    until: int
    echo: str | None
    listens: bool

    def keeps_place(self, now: int) -> bool:
        """Return whether the waiter keeps its place at the time ``now``. No request keeps a place for more than 6 s, so
        a place beyond that is older than a step back of the clock."""
        return now < self.until <= now + 7 * SECOND


OfName = TypeVar("OfName", Holder, Waiter)
LOGGED = ("locks", "holders", "gone", "floor", "swept")  # the tables that survive a crash
TABLES = (*LOGGED, "queue", "boot")


class Store:
    """The tables of one server. ``clock`` returns its microseconds."""

    def __init__(self, clock: Callable[[], int], present: Callable[[str], bool]) -> None:
        """``present`` returns whether a session has the advisory lock of a client."""
        self._clock, self._present = clock, present
        self.locks: dict[str, Name] = {}
        self.holders: dict[str, Holder] = {}
        self.queue: dict[str, Waiter] = {}
        self.gone: dict[str, int] = {}
        self.floor, self.swept = 0, clock()
        self.boot: str | None = None
        #: The rows that another transaction has locked, by the key of a name or the id of a holder. The value is True
        #: if nobody may change the row. It is False if the row is guarded, so that its holder's lease cannot end.
        self.locked: dict[str, bool] = {}
        self.now = clock()
        self.flushes = True  # whether the commit of the last step waited for the disk
        # Channel and payload of each notification that the last step has sent.
        self.notices: dict[tuple[str, str], None] = {}
        self._tickets = 0
        # the time of the first commit that may be lost, and the tables before it
        self._unwritten: tuple[int, dict[str, Any]] = 0, {}
        self._calls: dict[bytes, tuple[Callable[..., list[Row]], str]] = {
            STEPS.attempt: (self._attempt, "ttttiibbti"),
            STEPS.release: (lambda *given: [(_bool(self._release(*given)),)], "ttbi"),
            STEPS.rest: (self._rest, "ttbii"),
            STEPS.renew: (lambda *given: _texts(self._renew(*given[:3])), "TTIi"),
            STEPS.force: (self._force, "ti"),
            STEPS.sweep: (self._sweep, ""),
            STEPS.lost: (self._lost, "TT"),
            STEPS.shut: (list, ""),  # in the simulation nobody locks a whole table
            STEPS.follow: (self._follow, "Tii"),
            STEPS.holder: (self._holder, "T"),
            STEPS.inspect: (self._inspect, "t"),
            STEPS.inspect_all: (self._inspect_all, "tti"),
        }

    def execute(self, sql: bytes, words: Sequence[bytes | None]) -> list[Row]:
        """Execute one step. Raises `Refused` without executing the step if a row is locked."""
        call, kinds = self._calls[sql]
        return self._transaction(lambda: call(*map(_value, kinds, words)))

    def delete(self, key: str) -> None:
        """Delete the row of a name, as an operator does."""
        self._transaction(lambda: self._delete(key))

    def saved(self, names: Iterable[str] = TABLES) -> dict[str, Any]:
        """Return a copy of these tables, for `restore`."""
        return {name: copy.copy(getattr(self, name)) for name in names}

    def restore(self, saved: dict[str, Any]) -> None:
        vars(self).update(saved)

    def crash(self, *, loses: bool = False) -> bool:
        """Empty the tables that do not survive a crash. With ``loses``, undo the last commits that did not wait for the
        disk.

        Returns whether any commit was undone.
        """
        self.queue, self.boot = {}, None
        since, saved = self._unwritten
        if loses and saved and self._clock() < since + LATEST_WRITE:
            self.restore(saved)
            return True
        return False

    Result = TypeVar("Result")

    def _transaction(self, call: Callable[[], Result]) -> Result:
        self.now, self.flushes, self.notices = self._clock(), True, {}
        before = self.saved()
        try:
            result = call()
        except Refused:
            self.restore(before)
            self.notices = {}
            raise
        if any(before[name] != getattr(self, name) for name in LOGGED):
            since, saved = self._unwritten
            if self.flushes:
                self._unwritten = 0, {}
            elif not saved or self.now > since + LATEST_WRITE // 2:
                self._unwritten = self.now, {name: before[name] for name in LOGGED}
        return result

    # Rows

    def _of(self, table: dict[str, OfName], key: str) -> list[OfName]:
        return [row for row in table.values() if row.key == key]

    def waiters(self, key: str) -> list[Waiter]:
        """Return the rows of the queue of one name, in order of arrival."""
        return sorted(self._of(self.queue, key))

    def _lock(self, row: str, *, ends: bool = False) -> None:
        """Lock a row, or raise `Refused`. ``ends`` means FOR UPDATE, which waits for guards too."""
        if self._skips(row, ends=ends):
            raise Refused(LOCK_WAIT)

    def _skips(self, row: str, *, ends: bool) -> bool:
        return row in self.locked and (ends or self.locked[row])

    def _set(self, key: str, **values: Any) -> Name:
        self._lock(key)
        self.locks[key] = row = self.locks[key]._replace(**values)
        return row

    def _extend(self, row: Holder, ttl: int) -> Holder:
        self._lock(row.id)
        self.holders[row.id] = row = row._replace(until=self.now + ttl * MS, ttl=ttl)
        return row

    def _alone(self, ttl: int) -> dict[str, int]:
        """Return the columns that describe the lease of an exclusive holder from now on."""
        return {"ttl": ttl, "until": self.now + ttl * MS, "sure": self.now + ttl * MS}

    def _longer(self, row: Name, ttl: int) -> Name:
        """Extend the lease of an exclusive holder."""
        columns = self._alone(ttl)
        if row.sure is not None:
            columns["sure"] = max(columns["sure"], min(row.sure, self.now + 15 * SECOND))
        return self._set(row.key, **columns)

    def _next(self, row: Name) -> int:
        """Return the token of the next grant."""
        return max(row.token + 1, self.now, self.floor + 1)

    def _is_far(self, row: Holder) -> bool:
        """Return whether this lease ends so late that the clock must have been stepped back."""
        return row.until > self.now + (row.ttl + 1000) * MS

    def _boot(self) -> str:
        self.boot = self.boot or str(self.now)
        return self.boot

    def _notify(self, channel: str, payload: str) -> None:
        self.notices[channel, payload] = None

    def _wake(self, claim: str | None) -> None:
        if claim and not claim.startswith("#"):
            self._notify(f"multilock_{claim[:16]}", claim)

    def _changed(self, row: Name) -> None:
        if row.followed is not None and row.followed > self.now:
            self._notify("multilock_changes", row.key)

    # The steps

    def _room(self, key: str, have: str, want: str) -> bool:
        most = 1
        if have == f"#{want}":
            if want == "r":
                return True
            most = int(want[1:])
            if len(self._of(self.holders, key)) < most:
                return True
        for each in self._of(self.holders, key):
            if self._is_far(each) and not self._skips(each.id, ends=False):
                self._extend(each, each.ttl)
        if have != f"#{want}" and any(each.until > self.now for each in self._of(self.holders, key)):
            return False
        for each in self._of(self.holders, key):
            if each.until <= self.now and not self._skips(each.id, ends=True):
                del self.holders[each.id]
        return len(self._of(self.holders, key)) < most

    def _pass(
        self, key: str, me: str | None, have: str | None, sure: int | None
    ) -> tuple[str | None, str | None, bool]:
        """Return the three results of the SQL function pass_1: heir, have and flush."""
        now, flush = self.now, False
        for each in self.waiters(key):
            if each.id != me:
                if not each.keeps_place(now):
                    del self.queue[each.id]
                    continue
                if each.listens and not self._present(each.id[:16]):
                    continue
            fits = have is None or self._room(key, have, each.mode)
            if fits and have is not None and have != f"#{each.mode}":
                have = None
            if each.id == me:
                return me if fits else "", have, flush
            if not fits:
                return each.id, have, flush
            del self.queue[each.id]
            ends, row = min(each.until, now + 6 * SECOND), self.locks[key]
            covered = each.echo is None or (sure is not None and ends <= sure)
            token = self._next(row)
            flush = flush or not covered or token > now
            if each.mode == "x":
                covers = sure and min(sure, now + 15 * SECOND) if covered else now + 15 * SECOND
                alone = {"id": each.id, "who": each.who, "until": ends, "ttl": 6000}
                self._set(key, **alone, token=token, sure=covers, boot=self._boot())
                have = "x"
            else:
                have = f"#{each.mode}"
                self._set(key, id=have, who=None, until=None, ttl=0, sure=None, token=token)
                self.holders[each.id] = Holder(each.id, key, each.who, token, 6000, ends)
            told = each.id if each.echo is None else f"{each.id} {each.echo} {token}"
            self._notify(f"multilock_{each.id[:16]}", told)
            if have == "x":
                return each.id, have, flush
        return None, have, flush

    def _attempt(self, *given: Any) -> list[Row]:
        return [tuple(None if each is None else b"%d" % each for each in self._acquire(*given))]

    def _acquire(
        self, key: str, me: str, who: str, mode: str, ttl: int, wait: int, barge: bool, listens: bool, echo: str | None,
        within: int,
    ) -> tuple[int | None, int | None, int]:  # fmt: skip
        now, r, ends = self.now, self.locks.get(key), None
        if r is not None and r.id is not None:
            shared = self._of(self.holders, key)
            if r.id == me:
                return self._longer(r, ttl).token, None, -1
            if r.until is not None:
                if now < r.until <= now + (r.ttl + 1000) * MS:
                    ends = r.until
            elif r.id == f"#{mode}":
                if me in self.holders:
                    return self._extend(self.holders[me], ttl).token, None, -1
                full = mode != "r" and sum(each.until > now for each in shared) >= int(mode[1:])
                if full and not any(map(self._is_far, shared)):
                    ends = min(each.until for each in shared)
            elif not any(map(self._is_far, shared)):
                ends = max((each.until for each in shared), default=None)
                if ends is not None and ends > now and r.id.startswith("#p") and mode.startswith("p"):
                    return self._other_number(me, r.id)
        if ends is not None and ends > now:
            if not wait:
                return None, _ms(ends - now), -1
            if me in self.queue:
                self.queue[me] = self.queue[me]._replace(until=now + wait * MS, echo=echo, listens=listens)
                self.flushes = False
                return None, _ms(ends - now), self._rank(me)

        row = self.locks.setdefault(key, Name(key, now))
        if mode == "x" and row.id is None:  # take the name first, then check
            row = self._set(key, id=me, who=who, **self._alone(ttl), boot=self._boot(), token=max(row.token + 1, now))
            if row.token > self.floor and me not in self.gone and (barge or not self.waiters(key)):
                self.queue.pop(me, None)
                if r is not None:
                    self._changed(r)
                return row.token, None, -1
            self._set(key, id=None, who=None, until=None)

        self._lock(key)
        r = self.locks[key]
        free, shut = r.id is None, False
        is_shared = not free and r.until is None
        if r.until is not None and r.until <= now:
            free = not self._skips(key, ends=True)
            if r.sure is not None and r.sure > now and (self.boot is None or r.boot != self.boot):
                free, shut = False, True
                r = r._replace(until=r.sure)
        if me in self.gone:
            return None, -2, -1
        old, flush, until = r.id, False, r.until
        if free or is_shared:
            heir, have = None, r.id if is_shared else None
            if not (barge and free):
                heir, have, flush = self._pass(key, me, have, None)
            if heir in (None, me) and (have is None or self._room(key, have, mode)):
                return self._take(r, heir, me, who, mode, ttl), None, -1
            row = self.locks[key]
            if old != row.id:
                self._changed(r)
            until = row.until
            if until is None and row.id is not None:
                if row.id.startswith("#p") and mode.startswith("p") and row.id != f"#{mode}":
                    return self._other_number(me, row.id)
                ends_of = [each.until for each in self._of(self.holders, key)]
                if row.id != f"#{mode}":
                    until = max(ends_of, default=None)
                elif mode != "r":
                    until = min(ends_of, default=None)
        elif not shut and until is not None and until > now + (r.ttl + 1000) * MS:  # the clock was stepped back
            sure = r.sure and min(r.sure, now + 6 * SECOND)
            until = self._set(key, until=now + r.ttl * MS, sure=sure).until
        rank = -1
        if wait:
            self._tickets += 1
            joined = self.queue.get(me) or Waiter(self._tickets, key, me, who, mode, 0, None, False)
            self.queue[me] = joined._replace(until=now + wait * MS, echo=echo, listens=listens)
            rank = self._rank(me)
        self.flushes = flush
        return None, 0 if until is None else max(0, _ms(until - now)), rank

    def _take(self, r: Name, heir: str | None, me: str, who: str, mode: str, ttl: int) -> int:
        key, now = r.key, self.now
        self.queue.pop(me, None)
        token = self._next(self.locks[key])
        if mode == "x":
            self._set(key, id=me, who=who, **self._alone(ttl), boot=self._boot(), token=token)
        else:
            self._set(key, id=f"#{mode}", who=None, ttl=0, until=None, sure=None, token=token)
            self.holders[me] = Holder(me, key, who, token, ttl, now + ttl * MS)
            if heir == me:
                self._pass(key, None, f"#{mode}", None)
        if r.id != f"#{mode}":
            self._changed(r)
        self._wake(r.id)
        return token

    def _other_number(self, me: str, marker: str) -> tuple[int | None, int | None, int]:
        self.queue.pop(me, None)
        return None, -3, int(marker[2:])

    def _rank(self, me: str) -> int:
        return min(3, sum(each.ticket < self.queue[me].ticket for each in self._of(self.queue, self.queue[me].key)))

    def _release(self, key: str, me: str, unsure: bool, within: int) -> bool:
        now = self.now
        if unsure:
            self.locks.setdefault(key, Name(key, now))
            self.gone[me] = now + 60 * MINUTE
        r = self.locks.get(key)
        alone, ours, have, flush = r is not None and r.id == me, False, None, False
        known = r is not None and r.boot == self.boot is not None
        if r is not None and alone:
            self._lock(key, ends=True)
            if unsure and r.sure is not None and r.sure > now and not known:
                [(ours_,)] = self._rest(key, me, unsure, -(-min(r.sure - now, 6 * SECOND) // MS), within)
                return ours_ == b"t"
            ours = r.until is not None and r.until > now
        else:
            if me in self.holders:
                self._lock(me, ends=True)
            self._lock(key)
            self.queue.pop(me, None)
            ended = self.holders.pop(me, None)
            ours, have = ended is not None and ended.until > now, r and r.id
        if r is not None and (alone or r.until is None):
            if self.waiters(key):
                _, have, flush = self._pass(key, None, have, r.sure if alone and known else None)
            empty = have is not None and have.startswith("#") and not self._of(self.holders, key)
            if (have is None and r.id is not None) or empty:
                self._set(key, id=None, who=None, until=None, sure=None)
                have = None
            if alone or have != r.id:
                self._changed(r)
        self.flushes = unsure or flush
        return ours

    def _rest(self, key: str, me: str, unsure: bool, ms: int, within: int) -> list[Row]:
        now, nobody = self.now, f"#rest.{me}"
        if unsure:
            self.gone[me] = now + 60 * MINUTE
        row: Name | Holder | None = self.locks.get(key)
        if row is None or row.id not in (me, nobody):
            row = self.holders.get(me) or self.holders.get(nobody)
            if row is None:
                return [(_bool(self._release(key, me, unsure, within)),)]
        assert row.until is not None
        until = now + ms * MS if row.id == me else min(row.until, now + ms * MS)
        if isinstance(row, Name):
            self._lock(key, ends=True)
            self._set(key, id=nobody, ttl=ms, sure=None, until=until)
        else:
            self._lock(row.id, ends=True)
            del self.holders[row.id]
            self.holders[nobody] = row._replace(id=nobody, ttl=ms, until=until)
        if row.id == me:
            for each in self.waiters(key)[:3]:
                self._wake(each.id)
            if isinstance(row, Name):
                self._changed(row)
        return [(_bool(row.until > now),)]

    def _force(self, key: str, within: int) -> list[Row]:
        ended: list[Name] | list[Holder] = self._of(self.holders, key)
        for holder in self._of(self.holders, key):
            self._lock(holder.id, ends=True)
        self._lock(key, ends=True)
        r = self.locks.get(key)
        if r is None or r.id is None:
            return []
        if r.until is not None:
            ended = [r]
        else:
            for each in ended:
                self.holders.pop(each.id or "")
        if self._pass(key, None, None, None)[1] is None:
            self._set(key, id=None, who=None, until=None, sure=None)
        for each in ended:
            if each.id and not each.id.startswith("#"):
                self.gone[each.id] = self.now + 60 * MINUTE
            self._wake(each.id)
        self._changed(r)
        return _texts(each.id or "" for each in ended if each.until is not None and each.until > self.now)

    def _renew(self, keys: list[str], ids: list[str], ttls: list[int]) -> list[str]:
        before, lost = self.saved(), []
        try:
            for key, claim, ttl in zip(keys, ids, ttls, strict=True):
                row = self.locks.get(key)
                if row is not None and row.id == claim:
                    self._longer(row, ttl)
                elif claim in self.holders:
                    self._extend(self.holders[claim], ttl)
                else:
                    lost.append(claim)
        except Refused:
            self.restore(before)
            if len(ids) == 1:
                return [f"?{ids[0]}"]
            each = zip(keys, ids, ttls, strict=True)
            return [told for key, claim, ttl in each for told in self._renew([key], [claim], [ttl])]
        return lost

    def _sweep(self) -> list[Row]:
        now = self.now
        if now - MINUTE <= self.swept <= now:
            return [(b"-1",)]
        old = [
            row
            for row in self.locks.values()
            if (row.id is None or (row.until is not None and row.until < now - MINUTE))
            and row.token < now - MINUTE
            and (row.followed is None or row.followed < now)
            and not self.waiters(row.key)
            and not self._skips(row.key, ends=True)
        ]
        for row in old:
            self._delete(row.key)
        for each in list(self.holders.values()):
            if self._is_far(each) and not self._skips(each.id, ends=False):
                self._extend(each, each.ttl)
        for row in list(self.locks.values()):
            if row.until is None and row.id is not None and not self._skips(row.key, ends=False):
                alive = any(each.until > now - MINUTE for each in self._of(self.holders, row.key))
                if not alive and self._room(row.key, row.id, "x"):
                    self._set(row.key, id=None)
        self.queue = {claim: each for claim, each in self.queue.items() if each.until >= now - MINUTE}
        self.gone = {claim: until for claim, until in self.gone.items() if until >= now}
        self.swept = now
        return [(b"%d" % len(old),)]

    def _delete(self, key: str) -> None:
        """Delete the row of a name, and execute its triggers."""
        self._lock(key, ends=True)
        row = self.locks.pop(key, None)
        if row is None:
            return
        self.floor = max(self.floor, row.token)
        if row.id is None:
            return
        self._wake(row.id)
        if row.until is None:
            for each in self._of(self.holders, key):
                self._lock(each.id, ends=True)
                del self.holders[each.id]
                self._wake(each.id)
        self._changed(row)

    # Questions

    def _lost(self, keys: list[str], ids: list[str]) -> list[Row]:
        rows = ((claim, self.locks.get(key)) for key, claim in zip(keys, ids, strict=True))
        return _texts(claim for claim, row in rows if claim not in self.holders and (row is None or row.id != claim))

    def _follow(self, keys: list[str], ms: int, within: int) -> list[Row]:
        self.flushes = False
        for key in keys:
            self.locks.setdefault(key, Name(key, self.now))
            self._set(key, followed=self.now + ms * MS)
        return self._holder(keys)

    def _holder(self, keys: list[str]) -> list[Row]:
        rows = (self.locks[key] for key in keys if key in self.locks)
        return [(row.key.encode(), _text(row.id), self._left(row.until)) for row in rows]

    def _inspect(self, key: str) -> list[Row]:
        return self._shown(self.locks[key], 100) if key in self.locks else []

    def _inspect_all(self, start: str, end: str | None, most: int) -> list[Row]:
        keys = [key for key in sorted(self.locks) if key >= start and (end is None or key < end)]
        return [(key.encode(), *row) for key in keys for row in self._shown(self.locks[key], 1)][:most]

    def _shown(self, row: Name, most: int) -> list[Row]:
        live = sorted(
            (each for each in self._of(self.holders, row.key) if each.until > self.now), key=lambda h: h.token
        )
        waiting = sum(each.until > self.now for each in self._of(self.queue, row.key))
        counts = (b"%d" % waiting, b"%d" % len(live))
        if row.id is None or (row.until is not None and row.until <= self.now):
            return []
        if row.until is not None:
            return [(*self._columns(row), None, None, None, None, *counts)]
        return [(*self._columns(row), *self._columns(each), *counts) for each in live[:most]]

    def _columns(self, row: Name | Holder) -> Row:
        return _text(row.id), _text(row.who), b"%d" % row.token, self._left(row.until)

    def _left(self, until: int | None) -> bytes | None:
        return None if until is None else f"{(until - self.now) / SECOND:.6f}".encode()


def _ms(micros: int) -> int:
    return -(-micros // MS)


def _text(value: str | None) -> bytes | None:
    return None if value is None else value.encode()


def _bool(value: bool) -> bytes:
    return b"t" if value else b"f"


def _texts(values: Iterable[str]) -> list[Row]:
    return [(value.encode(),) for value in values]


def _value(kind: str, word: bytes | None) -> Any:
    """Parse an argument that a client sent as text.

    ``kind`` is b for a boolean, i for an integer, I for an integer array, T for a text array, and any other letter for
    text.
    """
    if word is None:
        return None
    if kind in "TI":
        items = re.findall(r'"([^"\\]*)"', word.decode())
        return [int(item) for item in items] if kind == "I" else items
    return word == b"t" if kind == "b" else int(word) if kind == "i" else word.decode()
