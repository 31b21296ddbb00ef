"""The semaphore of Consul's own tools, so that ``consul lock -n`` shares permits with us
(https://developer.hashicorp.com/consul/tutorials/developer-configuration/distributed-semaphore).

Each contender has a separate session, which locks a separate key: ``<prefix><name>/<session>``. The key ``.lock``,
which no session locks, holds the number of permits and the sessions that hold one: ``{"Limit":3,"Holders":{…:true}}``.
The key ``.lock`` is changed by compare-and-set only:

* Step 1: read all keys of the name.
* Step 2: if there is room, lock the contender's key, and add its session to the holders.
* Step 3: if there is no room, wait until a key is deleted.
* Step 4: to release a permit, remove the session and delete the contender's key. With the last permit ``.lock`` is
  deleted as well, and the name is free.

A holder is dead once its session no longer locks its key. The official tools replace a dead holder at once. We wait
until the lock delay of its key is over. Steps 2 and 4 are transactions. So a crash never leaves a ``.lock`` without
holders.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from multilock import BackendRejected
from multilock.backend import Claim, Granted, other_number
from multilock.values import decode_value, encode_resting, encode_value
from multilock_consul.keys import LOCK_FLAGS, SEMAPHORE_FLAGS, Entry, Keys
from multilock_consul.sessions import Session
from multilock_consul.transactions import Refused, Transactions, operation, whole_tree

__all__ = ["Permits", "State"]

TRIES = 100  # tries; when several contenders change `.lock` at the same time, only one of them succeeds


@dataclass(frozen=True, slots=True)
class State:
    """The keys of one name, as one reply showed them."""

    lock: Entry | None
    readers: Mapping[str, Entry]
    index: int  #: the Consul index after which to wait for the next change
    limit: int | None = None  #: the number of permits, or None if `.lock` is not a semaphore's
    holders: frozenset[str] = frozenset()  #: sessions
    living: Mapping[str, Entry] = field(default_factory=dict)  #: session -> key, for the holders that are alive

    @property
    def read(self) -> bool:
        """Whether a reader holds the name."""
        return any(entry.session for entry in self.readers.values())

    @property
    def dead(self) -> list[str]:
        """The holders whose sessions no longer lock their keys."""
        return sorted(self.holders - self.living.keys())


class Permits:
    """The steps of the recipe that concern permits."""

    def __init__(self, keys: Keys, transactions: Transactions) -> None:
        self._keys = keys
        self._transactions = transactions

    def look(self, name: str, until: float) -> State:
        """Step 1: read all keys of the name. Raises `BackendRejected` if something else uses the name."""
        found, index = self._transactions.read_folder(name, until)
        return self.state(name, found, index)

    def state(self, name: str, found: Mapping[str, Entry], index: int = 0) -> State:
        """Interpret the keys of a name. Raises `BackendRejected` as `look` does."""
        lock = found.get(self._keys.of(name))
        readers = {key: entry for key, entry in found.items() if key.startswith(self._keys.readers(name))}
        state = State(lock, readers, index)
        if lock is None or lock.session or lock.flags == LOCK_FLAGS:
            return state
        limit, holders = self._said(name, lock)
        folder = self._keys.folder(name)
        contenders = {session: found.get(folder + session) for session in holders}
        living = {session: entry for session, entry in contenders.items() if entry and entry.session == session}
        return replace(state, limit=limit, holders=holders, living=living)

    def _said(self, name: str, lock: Entry) -> tuple[int, frozenset[str]]:
        try:
            if lock.flags != SEMAPHORE_FLAGS:
                raise ValueError("other flags")
            said = json.loads(lock.value)
            limit, holders = said["Limit"], frozenset(said["Holders"] or ())
            if not isinstance(limit, int) or any("/" in session for session in holders):
                raise TypeError("not a semaphore of Consul")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise BackendRejected(
                f"the key {self._keys.of(name)!r} is in use by another program: choose another name, or delete the key "
                "if it was left behind",
                name=name,
                backend="consul",
            ) from error
        return limit, holders

    def lists(self, name: str, lock: Entry | None, session: str) -> bool:
        """Return whether this ``.lock`` key lists the session among the holders."""
        try:
            return bool(lock and not lock.session and session in self._said(name, lock)[1])
        except BackendRejected:
            return False

    def places(self, name: str, sessions: Sequence[str]) -> list[str]:
        """Return the contenders' keys of these sessions."""
        return [self._keys.folder(name) + session for session in sessions]

    # ---- acquire

    def room(self, claim: Claim, state: State) -> bool:
        """Return whether a permit is free. A dead holder's permit counts as free.

        Raises `BackendRejected` if the claim asked for a different number of permits than the semaphore has.
        """
        if state.lock and state.lock.session and decode_value(state.lock.value).permits == 1:
            raise other_number(claim, 1, "consul")
        if state.living and state.limit is not None and state.limit != claim.permits:
            raise other_number(claim, state.limit, "consul")
        return not (state.lock and state.lock.session) and len(state.living) < claim.permits

    def sign(self, claim: Claim, state: State) -> tuple[str, int]:
        """Step 3: return the key or folder whose change may free a permit, and the index after which to watch it."""
        if state.lock and state.lock.session:
            return self._keys.of(claim.name), state.lock.index
        return self._keys.folder(claim.name), state.index

    def join(self, session: Session, claim: Claim, state: State, until: float) -> Mapping[str, Entry]:
        """Step 2: take a permit. Returns our own key, and the keys of readers that have not left. Raises `Refused`."""
        lock, mine = self._keys.of(claim.name), self._keys.place(claim, session.id)
        bare: dict[str, Any] = {"Session": session.id}
        if state.limit is None:  # `.lock` may still have the lock delay of a mutex
            there = operation("check-index", lock, Index=state.lock.index) if state.lock else _absent(lock)
            steps = [there, operation("lock", lock, **bare), operation("delete", lock)]
            state = replace(state, lock=None)
        else:
            steps = []
        holders = self._with_room(session, claim, state, until) if state.lock else frozenset()
        index = state.lock.index if state.lock else 0
        holding = _encode(claim.permits, holders | {session.id})
        value = b64encode(encode_value(claim)).decode()
        steps += [
            operation("lock", mine, Value=value, Flags=SEMAPHORE_FLAGS, **bare),
            operation("cas", lock, Index=index, Value=holding, Flags=SEMAPHORE_FLAGS),
            *whole_tree(self._keys.readers(claim.name)),
        ]
        return self._transactions.execute(steps, until)

    def _with_room(self, session: Session, claim: Claim, state: State, until: float) -> frozenset[str]:
        """Remove enough dead holders to make room. If the semaphore has a different number of permits, remove all dead
        holders. Returns the remaining holders."""
        assert state.lock
        still = operation("check-index", self._keys.of(claim.name), Index=state.lock.index)
        holders, delayed = state.holders, None
        for dead in state.dead:
            if state.limit == claim.permits and len(holders) < claim.permits:
                break
            try:
                self._transactions.bury([self._keys.folder(claim.name) + dead], still, session.id, until)
            except Refused as refused:
                if "lock delay" not in refused.why:
                    raise
                delayed = refused
            else:
                holders -= {dead}
        if delayed and (len(holders) >= claim.permits or state.limit != claim.permits):
            raise delayed
        return holders

    # ---- release

    def leave(self, claim: Claim, session: str, until: float) -> bool:
        """Step 4: release the permit. Returns whether this session held a permit until now."""
        lock, mine = self._keys.of(claim.name), self._keys.folder(claim.name) + session
        held = [operation("check-session", mine, Session=session), operation("delete", mine)]
        for _ in range(TRIES):
            entry, _ = self._transactions.read(lock, until)
            out = self._without(claim.name, entry, session)
            try:
                if held or out:
                    self._transactions.execute([*held, *out], until)
                return bool(held and out)
            except Refused as refused:
                if refused.verb == "check-session":  # the key was deleted with its session, or by an operator
                    held = []
        raise self._transactions.restless(lock)

    def _without(self, name: str, lock: Entry | None, session: str, instead: str | None = None) -> list[dict[str, Any]]:
        """Return the operations that remove a session from the holders, or none if the session is not a holder."""
        if lock is None or lock.session or lock.flags != SEMAPHORE_FLAGS:
            return []
        limit, holders = self._said(name, lock)
        if session not in holders:
            return []
        key, rest = self._keys.of(name), (holders - {session}) | ({instead} if instead else set())
        if not rest:
            return [operation("check-index", key, Index=lock.index), operation("delete", key)]
        value = _encode(limit, rest)
        return [operation("cas", key, Index=lock.index, Value=value, Flags=SEMAPHORE_FLAGS)]

    # ---- rest

    def rest(
        self, claim: Claim, granted: Granted, new: Callable[[], tuple[str, float]], until: float
    ) -> tuple[bool, str | None]:
        """Move the permit to a session that is never renewed, so that the server's clock ends the session.

        ``new`` makes that session, and returns its id and its ttl. The result is whether the new session or an earlier
        one now keeps the permit taken, and the new session if it was not needed.
        """
        folder = self._keys.folder(claim.name)
        old, mine = str(granted.key), folder + str(granted.key)
        session = ""
        for _ in range(TRIES):
            found, _ = self._transactions.read_folder(claim.name, until)
            if any(entry.rests and entry.claim_id == claim.id for entry in found.values()):
                return True, session or None
            lock, entry = found.get(self._keys.of(claim.name)), found.get(mine)
            if not entry or not entry.held_by(claim.id, old) or not self._without(claim.name, lock, old):
                return False, session or None
            if not session:
                session, seconds = new()
                value = b64encode(encode_resting(claim, granted.token, seconds)).decode()
            steps = [
                operation("check-session", mine, Session=old),
                operation("delete", mine),
                operation("lock", folder + session, Value=value, Flags=SEMAPHORE_FLAGS, Session=session),
                *self._without(claim.name, lock, old, session),
            ]
            try:
                self._transactions.execute(steps, until)
                return True, None
            except Refused as refused:
                if "invalid session" in refused.why:  # this process was paused for longer than the new session lived
                    session = ""
        raise self._transactions.restless(self._keys.of(claim.name))


def _absent(key: str) -> dict[str, Any]:
    return operation("cas", key, Index=0, Value="", Flags=LOCK_FLAGS)


def _encode(limit: int, holders: set[str] | frozenset[str]) -> str:
    said = {"Limit": limit, "Holders": dict.fromkeys(sorted(holders), True)}
    return b64encode(json.dumps(said, separators=(",", ":")).encode()).decode()
