"""The data of a simulated Consul: keys, sessions, and their indexes.

The store executes only requests that multilock's backend sends. `test_consul_model` compares it with a real server.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from os.path import commonprefix
from typing import Any

__all__ = ["WRITES", "Entry", "Session", "Store", "shown"]

DELAY_MAX = 60.0  # seconds; the longest lock delay
WRITES = {"cas", "lock", "unlock", "delete", "delete-cas"}
Row = dict[str, Any]
Watch = tuple[str, str]
"""What is watched: ``leaf`` and a key, ``prefix`` and the beginning of keys, or ``session`` and an id."""


@dataclass(frozen=True, slots=True)
class Entry:
    key: str
    flags: int
    value: str  # in base64
    session: str
    locked: int  # how often a session has locked the key
    created: int
    modified: int

    def row(self, *, with_value: bool) -> Row:
        """Return the key as a reply shows it."""
        session = {"Session": self.session} if self.session else {}
        return {
            "LockIndex": self.locked,
            "Key": self.key,
            "Flags": self.flags,
            "Value": self.value or None if with_value else None,
            **session,
            "CreateIndex": self.created,
            "ModifyIndex": self.modified,
        }


@dataclass(frozen=True, slots=True)
class Session:
    """A session. ``ttl`` and ``delay`` are seconds."""

    id: str
    name: str
    ttl: float
    shown_ttl: str
    delay: float
    behavior: str
    index: int

    def row(self) -> Row:
        """Return the session as a reply shows it."""
        return {
            "ID": self.id,
            "Name": self.name,
            "Node": "n0",
            "LockDelay": round(self.delay * 1e9),
            "Behavior": self.behavior,
            "TTL": self.shown_ttl,
            "NodeChecks": [],
            "ServiceChecks": [],
            "CreateIndex": self.index,
            "ModifyIndex": self.index,
        }


class Refused(Exception):
    """One operation of a transaction failed."""


class Store:
    """Keys and sessions. ``now`` returns the seconds of the server's clock, for lock delays."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.index = 10  # the index of the last entry of the log
        self.keys: dict[str, Entry] = {}
        self.sessions: dict[str, Session] = {}
        self.delays: dict[str, tuple[float, float]] = {}  # key -> the end of its lock delay, and its length
        self.changed: list[Watch] = []  # changes of the last request
        self._keys_index = self._sessions_index = 0
        self._graves: dict[str, int] = {}  # deleted key -> the index of its deletion
        self._writes: dict[str, Entry | None] = {}  # changes of the present transaction so far

    # Sessions

    def create(self, session: Session) -> None:
        self.index += 1
        self._sessions_index = self.index
        self.sessions[session.id] = replace(session, index=self.index)
        self.changed = [("session", session.id)]

    def destroy(self, session_id: str) -> list[str]:
        """End a session. Return the keys that it locked."""
        self.index += 1
        self.changed = []
        session = self.sessions.pop(session_id, None)
        if session is None:
            return []
        self._sessions_index = self.index
        locked = [entry for entry in self.keys.values() if entry.session == session_id]
        for entry in locked:
            self._write(entry.key, None if session.behavior == "delete" else replace(entry, session=""))
            if delay := min(session.delay, DELAY_MAX):
                self.delays[entry.key] = self._now() + delay, delay
        self._commit()
        self.changed.append(("session", session_id))
        return [entry.key for entry in locked]

    # Transactions

    def execute(self, steps: list[Row]) -> tuple[list[Row], list[Row]]:
        """Execute a transaction. Return its results and its errors; after an error, nothing has changed."""
        self.changed = []
        delayed = [
            {"OpIndex": number, "What": f'failed to lock key "{step["Key"]}" due to lock delay'}
            for number, step in enumerate(steps)
            if step["Verb"] == "lock" and self.is_delayed(step["Key"])
        ]
        if delayed:
            return [], delayed
        self.index += any(step["Verb"] in WRITES for step in steps)
        results: list[Row] = []
        errors: list[Row] = []
        for number, step in enumerate(steps):
            try:
                results += self._step(step["Verb"], step)
            except Refused as refused:
                errors.append({"OpIndex": number, "What": str(refused)})
        if errors:
            self._writes = {}
            return [], errors
        self._commit()
        return results, []

    def fits(self, step: Row) -> bool:
        """Return whether the key of a ``check-session`` step has that session now."""
        entry = self.keys.get(step["Key"])
        return entry is not None and entry.session == step["Session"]

    def is_delayed(self, key: str) -> bool:
        """Return whether the key has a lock delay now."""
        end, _ = self.delays.get(key, (0.0, 0.0))
        return end > self._now()

    def _step(self, verb: str, step: Row) -> list[Row]:
        key: str = step["Key"]
        if verb == "get-tree":
            return [{"KV": entry.row(with_value=True)} for entry in self.below(key)]
        entry = self._find(key)
        check = getattr(self, "_do_" + verb.replace("-", "_"))
        after: Entry | None = check(key, entry, step)
        return [{"KV": after.row(with_value=False)}] if after else []

    def _do_check_session(self, key: str, entry: Entry | None, step: Row) -> Entry:
        if entry is None:
            raise Refused(f'failed to check session, key "{key}" doesn\'t exist')
        if entry.session != step["Session"]:
            shown = f'current session "{entry.session}" != "{step["Session"]}"'
            raise Refused(f'failed session check for key "{key}", {shown}')
        return entry

    def _do_check_index(self, key: str, entry: Entry | None, step: Row) -> Entry:
        if entry is None:
            raise Refused(f'failed to check index, key "{key}" doesn\'t exist')
        if entry.modified != step["Index"]:
            raise Refused(
                f'failed index check for key "{key}", current modify index {entry.modified} != {step["Index"]}'
            )
        return entry

    def _do_check_not_exists(self, key: str, entry: Entry | None, step: Row) -> None:
        if entry is not None:
            raise Refused(f'key "{key}" exists')

    def _do_cas(self, key: str, entry: Entry | None, step: Row) -> Entry:
        if step["Index"] != (entry.modified if entry else 0):
            raise Refused(f'failed to set key "{key}", index is stale')
        return self._set(key, entry, step, entry.session if entry else "", 0)

    def _do_lock(self, key: str, entry: Entry | None, step: Row) -> Entry:
        session = step["Session"]
        if session not in self.sessions:
            raise Refused(f'invalid session "{session}"')
        if entry and entry.session not in ("", session):
            raise Refused(f'failed to lock key "{key}", lock is already held')
        times = entry.locked if entry else 0
        return self._set(key, entry, step, session, times + (not entry or entry.session != session))

    def _do_unlock(self, key: str, entry: Entry | None, step: Row) -> Entry:
        if entry is None or entry.session != step["Session"]:
            raise Refused(f'failed to unlock key "{key}", lock isn\'t held, or is held by another session')
        return self._set(key, entry, step, "", entry.locked)

    def _do_delete(self, key: str, entry: Entry | None, step: Row) -> None:
        if entry is not None:
            self._writes[key] = None

    def _do_delete_cas(self, key: str, entry: Entry | None, step: Row) -> None:
        if entry is not None and entry.modified != step["Index"]:
            raise Refused(f'failed to delete key "{key}", index is stale')
        self._do_delete(key, entry, step)

    def _set(self, key: str, entry: Entry | None, step: Row, session: str, locked: int) -> Entry:
        created = entry.created if entry else self.index
        new = Entry(key, step.get("Flags", 0), step.get("Value") or "", session, locked, created, self.index)
        if entry and replace(new, modified=entry.modified) == entry:  # a write that changes nothing is ignored
            return entry
        self._writes[key] = new
        return new

    def _write(self, key: str, entry: Entry | None) -> None:
        self._writes[key] = replace(entry, modified=self.index) if entry else None

    def _find(self, key: str) -> Entry | None:
        return self._writes[key] if key in self._writes else self.keys.get(key)

    def _commit(self) -> None:
        for key, entry in self._writes.items():
            if entry:
                self.keys[key] = entry
            else:
                self.keys.pop(key, None)
                self._graves[key] = self.index
            self._keys_index = self.index
            self.changed.append(("leaf", key))
        self._writes = {}

    # Reads. Each returns the index of the reply, and the reply as it is sent, or None if nothing was found.

    def below(self, begin: str) -> list[Entry]:
        """Return the keys with this beginning, in order, as the present transaction sees them."""
        found = {**self.keys, **self._writes} if self._writes else self.keys
        return [found[key] for key in sorted(found) if key.startswith(begin) and found[key]]  # type: ignore[misc]

    def read(self, kind: str, subject: str) -> tuple[int, str | None]:
        """Read a key ("key"), all keys with a beginning ("recurse"), their names ("keys"), or a session ("session")."""
        if kind == "session":
            session = self.sessions.get(subject)
            return max(self._sessions_index, 1), json.dumps([session.row()] if session else [])
        if kind == "key":
            entry = self.keys.get(subject)
            if entry is None:
                return max(self._keys_index, 1), None
            return entry.modified, json.dumps([entry.row(with_value=True)])
        found = self.below(subject)
        graves = (index for key, index in self._graves.items() if key.startswith(subject))
        index = max([*graves, *(entry.modified for entry in found)], default=0) or max(self._keys_index, 1)
        if kind == "recurse":
            rows: list[object] = [entry.row(with_value=True) for entry in found]
        else:
            rows = list(dict.fromkeys(_folded(entry.key, subject) for entry in found))
        return index, json.dumps(rows) if rows else None

    def watch(self, kind: str, subject: str) -> Watch:
        """Return the node of the radix tree that a blocking query watches. A missing key has no leaf, so its query
        watches the lowest node above, which changes with each key below it."""
        if kind == "session":
            return "session", subject  # our backend does not wait for a missing session
        if kind == "key" and subject in self.keys:
            return "leaf", subject
        word, path, watched = subject + "\0" * (kind == "key"), "", ""
        while len(path) < len(word) and word.startswith(path):
            begin = word[: len(path) + 1]
            under = [key for each in self.keys if (key := each + "\0").startswith(begin)]
            if not under:
                break
            watched, path = begin, commonprefix(under)  # noqa: RUF071
        return "prefix", watched

    def has_fired(self, watch: Watch) -> bool:
        """Return whether the last request has changed this node."""
        kind, subject = watch
        if kind != "prefix":
            return watch in self.changed
        return any(what == "leaf" and f"{key}\0".startswith(subject) for what, key in self.changed)


def _folded(key: str, begin: str) -> str:
    """Return the key, or only its beginning up to the next slash."""
    head, slash, _ = key[len(begin) :].partition("/")
    return begin + head + slash


def shown(rows: Iterable[Row], errors: Iterable[Row]) -> str:
    """Return the body of the reply to a transaction."""
    return json.dumps({"Results": list(rows) or None, "Errors": list(errors) or None})
