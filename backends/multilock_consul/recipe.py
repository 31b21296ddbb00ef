"""The lock on Consul: what is asked of the servers, and what their answers mean.

A lock is the key ``<prefix><name>/.lock`` with the flags of the lock of Consul's own Go client, held by a session, so
that ``consul lock`` and that client exclude us and we them (https://developer.hashicorp.com/consul/docs/dynamic-app-
config/sessions/application-leader-election). Two things differ. A free lock has no key: a release deletes it, and so
does the server when the session ends. And a lock is taken by a transaction that creates the key; the bare verb
``lock`` would succeed again for our own session, and overwrite a key that is used for something else.
"""

from __future__ import annotations

import json
import random
from base64 import b64decode, b64encode
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any
from urllib.parse import quote

from multilock.backend import Held
from multilock.errors import BackendRejected, BackendUnavailable
from multilock.model import Busy, Claim, Granted, LockInfo
from multilock.names import escape, unescape
from multilock.values import decode_value, encode_value
from multilock_consul.http1 import Response
from multilock_consul.sessions import OWN, Session, Sessions
from multilock_consul.transport import Agents

__all__ = ["LOCK_FLAGS", "Entry", "Keys", "Recipe", "entry_of"]

LOCK_FLAGS = 0x2DDCCBC058A50C18
SEMAPHORE_FLAGS = 0xE0F69A2BAA414DE0
AT_ONCE = 64  # operations a server takes in one transaction
SAFETY = 10.0  # seconds after which a waiter looks again, although nothing was pushed
UNPUSHED = 1.0  # … where no push can come: too many keys are waited for
DELAYED = 0.25  # seconds between tries during a lock delay, whose end is not pushed; a refusal costs the servers little
AT_ONCE_AGAIN = 0.02  # seconds over which those are spread who found the key taken, and gone a moment later
TRIES = 3  # an operator who writes our key again and again must not keep a release for ever


@dataclass(frozen=True, slots=True)
class Entry:
    """A key as the server shows it."""

    flags: int
    session: str  #: "" for none
    value: bytes
    index: int  #: of its last change

    @property
    def claim_id(self) -> str | None:
        """Of the acquisition of multilock that wrote it."""
        owner = decode_value(self.value).owner
        return owner.partition("@")[0] if owner else None

    def held_by(self, claim_id: str, session: object) -> bool:
        """An operator may have overwritten the value, which takes the lock from nobody."""
        return bool(self.session) and self.session == session and self.claim_id in (claim_id, None)

    @classmethod
    def parse(cls, said: Mapping[str, Any]) -> Entry:
        return cls(said["Flags"], said.get("Session") or "", b64decode(said["Value"] or ""), said["ModifyIndex"])


def entry_of(response: Response) -> tuple[Entry | None, int]:
    """The answer to a GET of one key, and the index from which on to wait for its next change."""
    try:
        index = int(response.headers["x-consul-index"])
        return (None if response.status == 404 else Entry.parse(response.json()[0])), index
    except (LookupError, ValueError, TypeError) as error:
        raise BackendUnavailable(f"no answer of Consul: {response.text}", backend="consul") from error


class Keys:
    def __init__(self, prefix: str, agents: Agents) -> None:
        self.prefix = prefix
        self._agents = agents
        self.of = lru_cache(maxsize=4096)(self._of)

    def _of(self, name: str) -> str:
        return f"{self.prefix}{escape(name)}/.lock"

    def name(self, key: str) -> str | None:
        inner = key.removeprefix(self.prefix).removesuffix("/.lock")
        return None if "/" in inner or not inner or not key.endswith("/.lock") else unescape(inner)

    def target(self, name: str, **query: str | int) -> str:
        """In a path the key is quoted once more."""
        return self._agents.target(f"/v1/kv/{quote(self.of(name))}", consistent="", **query)


class _Refused(Exception):
    """409: nothing of the transaction was executed."""

    def __init__(self, response: Response) -> None:
        try:
            errors = response.json()["Errors"]
            self.first: int = errors[0]["OpIndex"]
            self.why = "; ".join(error["What"] for error in errors)
        except (ValueError, LookupError, TypeError) as error:
            raise BackendUnavailable(f"no answer of Consul: {response.text}", backend="consul") from error
        super().__init__(self.why)


class Recipe:
    """``wait(name, claim_id, index)`` is to wake this claim when the key changes; whether it will."""

    def __init__(
        self,
        agents: Agents,
        keys: Keys,
        sessions: Sessions,
        now: Callable[[], float],
        wait: Callable[[str, str, int], bool],
    ) -> None:
        self._agents = agents
        self._keys = keys
        self._sessions = sessions
        self._now = now
        self._wait = wait
        self._transaction = agents.target("/v1/txn")
        self._reading = agents.target("/v1/txn", consistent="")

    # Taking

    def attempt(self, claim: Claim, join: bool, within: float) -> Granted | Busy:
        until = self._now() + within
        try:
            answer = self._try(claim, join, until)
        except BackendRejected:
            self._leave_nothing(claim, until)
            raise
        if isinstance(answer, Busy) and not join:
            self._leave_nothing(claim, until)
        return answer

    def _try(self, claim: Claim, join: bool, until: float) -> Granted | Busy:
        for _ in range(2):  # a session found dead is replaced, once
            with self._sessions.trying(claim, until) as session:
                answer = self._take(session, claim, join, until)
            if answer is not None:
                return answer
        raise BackendUnavailable("sessions end as soon as they are made", unknown=False, backend="consul")

    def _leave_nothing(self, claim: Claim, until: float) -> None:
        if own := self._sessions.own(claim):
            with suppress(BackendUnavailable):  # it holds nothing, and ends by itself
                self._sessions.destroy(own, until - self._now())

    def _take(self, session: Session, claim: Claim, join: bool, until: float) -> Granted | Busy | None:
        """None: the session is gone."""
        key = self._keys.of(claim.name)
        created = _operation("cas", key, Index=0, Value="", Flags=LOCK_FLAGS)
        try:
            return self._locked(session, claim, created, until)
        except _Refused as refused:
            if refused.first == 1:
                return self._not_lockable(session, claim, refused)
        return self._taken(session, claim, join, until)

    def _locked(self, session: Session, claim: Claim, first: dict[str, Any], until: float) -> Granted | Busy:
        """``first`` is what must be true of the key before it is locked, in the same transaction."""
        key = self._keys.of(claim.name)
        value = b64encode(encode_value(claim)).decode()
        lock = _operation("lock", key, Value=value, Flags=LOCK_FLAGS, Session=session.id)
        results = self._transact([first, lock], until)
        return self._hold(session, claim, results[1]["KV"]["ModifyIndex"], until)

    def _hold(self, session: Session, claim: Claim, index: int, until: float) -> Granted | Busy:
        if self._sessions.hold(session, claim):
            return self._granted(session, index)
        self._delete(claim, session.id, index, until)  # it was cancelled while it was asked for
        return Busy(SAFETY)

    def _not_lockable(self, session: Session, claim: Claim, refused: _Refused) -> Busy | None:
        if "lock delay" in refused.why:
            return Busy(random.uniform(0.5, 1.5) * DELAYED)
        if "invalid session" in refused.why:
            self._sessions.gone(session, "the server does not know it any more")
            return None
        return Busy(random.uniform(0.0, AT_ONCE_AGAIN))  # somebody was faster between the two

    def _taken(self, session: Session, claim: Claim, join: bool, until: float) -> Granted | Busy:
        """The key exists: whose is it?"""
        entry, index = self._entry(claim.name, until)
        if entry is None:
            return Busy(random.uniform(0.0, AT_ONCE_AGAIN))
        if entry.session and entry.claim_id == claim.id:  # our own attempt, whose answer was lost
            if entry.session == session.id:
                return self._hold(session, claim, entry.index, until)
            self._delete(claim, entry.session, entry.index, until)  # in a session whose time is over
            return Busy(0.0)
        if entry.flags != LOCK_FLAGS:
            raise BackendRejected(
                f"the key {self._keys.of(claim.name)!r} is in use by something else"
                f"{' (a semaphore of Consul)' if entry.flags == SEMAPHORE_FLAGS else ''}: choose another name",
                name=claim.name,
                backend="consul",
            )
        if not entry.session:  # left behind by the Go client, which keeps the key of a free lock
            try:
                still = _operation("check-index", self._keys.of(claim.name), Index=entry.index)
                return self._locked(session, claim, still, until)
            except _Refused as refused:
                return self._not_lockable(session, claim, refused) or Busy(0.0)
        if not join:
            return Busy(SAFETY)
        return Busy(SAFETY if self._wait(claim.name, claim.id, index) else UNPUSHED)

    # Giving back

    def release(self, claim: Claim, granted: Granted | None, within: float) -> bool:
        until = self._now() + within
        own = self._sessions.own(claim)
        doubtful = self._sessions.cancel(claim, granted=granted is not None)
        if granted and granted.token is not None:
            over = self._sessions.known_over(granted.key)
            ours = not over and self._delete(claim, granted.key, granted.token, until)
        else:
            ours = bool(doubtful) and self._look_and_delete(claim, [one.id for one in doubtful], until)
        for session in doubtful:
            # Whatever of it is still on its way finds no session. Where others would lose their locks, the renewals
            # look after it.
            if claim.id in session.open and session is not own and self._sessions.end_if_idle(session):
                self._sessions.destroy(session, until - self._now())
        if own:
            self._sessions.destroy(own, until - self._now())
        return ours

    def _look_and_delete(self, claim: Claim, sessions: Sequence[str], until: float) -> bool:
        entry, _ = self._entry(claim.name, until)
        if entry is None or entry.session not in sessions or entry.claim_id != claim.id:
            return False
        return self._delete(claim, entry.session, entry.index, until)

    def _delete(self, claim: Claim, session: Hashable, index: int, until: float) -> bool:
        """Whether the key was this claim's until now. A ``delete-cas`` alone says yes for a key that is not there."""
        for _ in range(TRIES):
            if self._delete_at(claim.name, session, index, until):
                return True
            entry, _ = self._entry(claim.name, until)
            if entry is None or not entry.held_by(claim.id, session):
                return False
            index = entry.index  # an operator wrote the key
        raise self._restless(claim.name)

    def _delete_at(self, name: str, session: Hashable, index: int, until: float) -> bool:
        key = self._keys.of(name)
        still = _operation("check-session", key, Session=session)
        try:
            self._transact([still, _operation("delete-cas", key, Index=index)], until)
        except _Refused:
            return False
        return True

    def _restless(self, name: str) -> BackendUnavailable:
        key = self._keys.of(name)
        return BackendUnavailable(f"the key {key!r} changes all the time", unknown=False, backend="consul")

    # Keeping

    def renew(self, group: Hashable, held: Sequence[Held], within: float) -> Sequence[Granted | None]:
        until = self._now() + within
        if group == OWN:
            return [self._renew_one(claim, granted, until) for claim, granted in held]
        session = self._sessions.get(group)
        if session is None or not self._sessions.renew(session, within):
            return [None] * len(held)
        cancelled = self._sessions.to_look_at(session)
        entries = self._entries([*(claim.name for claim, _ in held), *cancelled.values()], until)
        for claim_id, name in cancelled.items():
            self._sweep(session, claim_id, name, entries.get(name), until)
        return [
            self._granted(session, granted.token) if _is_held(entries, claim, session.id) else None
            for claim, granted in held
        ]

    def _renew_one(self, claim: Claim, granted: Granted, until: float) -> Granted | None:
        session = self._sessions.get(granted.key)
        if session is None or not self._sessions.renew(session, until - self._now()):
            return None
        entries = self._entries([claim.name], until)
        return self._granted(session, granted.token) if _is_held(entries, claim, session.id) else None

    def _sweep(self, session: Session, claim_id: str, name: str, entry: Entry | None, until: float) -> None:
        """An acquire that nobody wants any more was executed after all."""
        if entry and entry.session == session.id and entry.claim_id == claim_id:
            self._delete_at(name, session.id, entry.index, until)

    def _granted(self, session: Session, index: int | None) -> Granted:
        ttl = session.ttl
        group = session.id if session.shared else OWN
        return Granted(index, ttl, session.proved_at, ttl, ttl / 3, group, session.id)

    # For operators

    def inspect(self, name: str, within: float) -> LockInfo | None:
        entry, _ = self._entry(name, self._now() + within)
        return _info(name, entry) if entry else None

    def inspect_all(self, prefix: str, within: float) -> Iterator[LockInfo]:
        # A name that is all dots is escaped otherwise than the beginning of a longer one.
        begin = self._keys.prefix + ("" if prefix in (".", "..") else escape(prefix))
        target = self._agents.target(f"/v1/kv/{quote(begin)}", recurse="", consistent="")
        until = self._now() + within
        response, _ = self._agents.call("GET", target, within)
        if response.status == 404 and begin:
            # A list leaves out what the token may not read; a question for one key is refused.
            self._agents.call("GET", self._agents.target(f"/v1/kv/{quote(begin)}"), until - self._now())
        for said in [] if response.status == 404 else response.json():
            name = self._keys.name(said["Key"])
            if name is not None and name.startswith(prefix) and (info := _info(name, Entry.parse(said))):
                yield info

    def force(self, name: str, within: float) -> bool:
        until = self._now() + within
        for _ in range(TRIES):
            entry, _ = self._entry(name, until)
            if entry is None or not entry.session:
                return False
            if self._delete_at(name, entry.session, entry.index, until):
                return True
        raise self._restless(name)

    # Requests

    def _transact(self, operations: Sequence[dict[str, Any]], until: float) -> list[Any]:
        """All of them are executed, or none: _Refused."""
        response, _ = self._agents.call("PUT", self._transaction, until - self._now(), json.dumps(operations).encode())
        return _results(response)

    def _entry(self, name: str, until: float) -> tuple[Entry | None, int]:
        response, _ = self._agents.call("GET", self._keys.target(name), until - self._now())
        return entry_of(response)

    def _entries(self, names: Sequence[str], until: float) -> dict[str, Entry]:
        """By name; those that are not there are left out, as ``get-tree`` does and ``get`` does not."""
        names = list(dict.fromkeys(names))
        found: dict[str, Entry] = {}
        for start in range(0, len(names), AT_ONCE):
            by_key = {self._keys.of(name): name for name in names[start : start + AT_ONCE]}
            wanted = json.dumps([_operation("get-tree", key) for key in by_key]).encode()
            response, _ = self._agents.call("PUT", self._reading, until - self._now(), wanted)
            for result in _results(response):
                if name := by_key.get(result["KV"]["Key"]):
                    found[name] = Entry.parse(result["KV"])
        return found


def _operation(verb: str, key: str, **arguments: object) -> dict[str, Any]:
    return {"KV": {"Verb": verb, "Key": key, **arguments}}


def _results(response: Response) -> list[Any]:
    if response.status == 409:
        refused = _Refused(response)
        if "ermission denied" in refused.why:
            raise BackendRejected(f"Consul refused: {refused.why} (see token=)", backend="consul")
        raise refused
    try:
        results: list[Any] = response.json()["Results"] or []
    except (ValueError, LookupError, TypeError) as error:
        raise BackendUnavailable(f"no answer of Consul: {response.text}", backend="consul") from error
    return results


def _is_held(entries: Mapping[str, Entry], claim: Claim, session_id: str) -> bool:
    entry = entries.get(claim.name)
    return entry is not None and entry.held_by(claim.id, session_id)


def _info(name: str, entry: Entry) -> LockInfo | None:
    if not entry.session:
        return None
    info = decode_value(entry.value)
    return replace(info, name=name, owner=info.owner or f"session {entry.session}", token=entry.index)
