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
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any
from urllib.parse import quote

from multilock.backend import Held
from multilock.errors import BackendRejected, BackendUnavailable, MultilockError
from multilock.model import Busy, Claim, Granted, LockInfo
from multilock.names import escape, unescape
from multilock.telling import logger
from multilock.values import decode_value, encode_resting, encode_value
from multilock_consul.http1 import Response
from multilock_consul.sessions import OWN, Session, Sessions
from multilock_consul.transport import Agents

__all__ = ["LOCK_FLAGS", "Entry", "Keys", "Recipe", "entry_of"]


LOCK_FLAGS = 0x2DDCCBC058A50C18
SEMAPHORE_FLAGS = 0xE0F69A2BAA414DE0
AT_ONCE = 64  # operations a server takes in one transaction
BYTES_AT_ONCE = 32768  # … which may be larger by far; ordinary names take a fifth of this
LOOK_SHARE = 0.1  # of the ttl: a renewal begins no further look at its keys after so long
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

    @property
    def rests(self) -> bool:
        """Its claim was released, and left the name taken for a while."""
        return bool(self.session) and decode_value(self.value).resting_until is not None

    def held_by(self, claim_id: str, session: object) -> bool:
        """An operator may have overwritten the value, which takes the lock from nobody."""
        return bool(self.session) and self.session == session and self.claim_id in (claim_id, None)

    @classmethod
    def parse(cls, said: Mapping[str, Any]) -> Entry:
        """Raises LookupError, ValueError or TypeError for anything else."""
        session, flags, index = said.get("Session") or "", said["Flags"], said["ModifyIndex"]
        if not (isinstance(session, str) and isinstance(flags, int) and isinstance(index, int)):
            raise TypeError("no entry of a key")
        return cls(flags, session, b64decode(said["Value"] or ""), index)


def entry_of(response: Response, key: str) -> tuple[Entry | None, int]:
    """The answer to a GET of this key, and the index from which on to wait for its next change."""
    try:
        index = int(response.headers["x-consul-index"])
        if response.status == 404:
            return None, index
        [said] = response.json()
        if said["Key"] != key:
            raise ValueError("it is about another key")
        return Entry.parse(said), index
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        raise _no_answer(response) from error


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
            raise _no_answer(response) from error
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
        entry = self._transact([first, lock], until)
        if entry.session != session.id:
            raise BackendUnavailable("it was locked for another session", backend="consul")
        return self._hold(session, claim, entry.index, until)

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
        if entry.session and entry.claim_id == claim.id and not entry.rests:  # our own attempt, whose answer was lost
            if entry.session == session.id:
                return self._hold(session, claim, entry.index, until)
            self._delete(claim, entry.session, entry.index, until)  # in a session whose time is over
            return Busy(0.0)
        if not entry.session and entry.flags != LOCK_FLAGS:
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
        doubtful = self._sessions.cancel(claim, granted=granted is not None)
        answered = False
        try:
            ours = self._release(claim, granted, doubtful, until)
            answered = True
        finally:
            self._sessions.left(claim, answered=answered)
        return ours

    def _release(self, claim: Claim, granted: Granted | None, doubtful: Sequence[Session], until: float) -> bool:
        if self._sessions.is_beginning(claim):
            raise BackendUnavailable("its session is not made yet", unknown=False, backend="consul")
        if granted and granted.token is not None:
            over = self._sessions.known_over(granted.key)
            ours = not over and self._delete(claim, granted.key, granted.token, until)
        else:
            ours = bool(doubtful) and self._look_and_delete(claim, [one.id for one in doubtful], until)
        self._end_doubtful(claim, doubtful, until)
        return ours

    def _end_doubtful(self, claim: Claim, doubtful: Sequence[Session], until: float) -> None:
        own = self._sessions.own(claim)
        for session in doubtful:
            # Whatever of it is still on its way finds no session. Where others would lose their locks, the renewals
            # look after it.
            if claim.id in session.open and session is not own and self._sessions.end_if_idle(session):
                self._sessions.destroy(session, until - self._now())
        if own:
            self._sessions.destroy(own, until - self._now())

    def _look_and_delete(self, claim: Claim, sessions: Sequence[str], until: float) -> bool:
        entry, _ = self._entry(claim.name, until)
        if entry is None or entry.session not in sessions or entry.claim_id != claim.id:
            return False
        return self._delete(claim, entry.session, entry.index, until)

    def _delete(self, claim: Claim, session: Hashable, index: int, until: float) -> bool:
        """Whether the key was this claim's until now."""
        for _ in range(TRIES):
            if self._delete_at(claim.name, session, index, until):
                return True
            entry, _ = self._entry(claim.name, until)
            if entry is None or not entry.held_by(claim.id, session):
                return False
            index = entry.index  # an operator wrote the key
        raise self._restless(claim.name)

    def _delete_at(self, name: str, session: Hashable, index: int, until: float) -> bool:
        """A ``delete-cas`` alone says yes for a key that is not there."""
        key = self._keys.of(name)
        still = _operation("check-session", key, Session=session)
        try:
            self._transact([still, _operation("delete-cas", key, Index=index)], until)
        except _Refused:
            return False
        return True

    # Letting a name rest

    def rest(self, claim: Claim, granted: Granted, seconds: float, within: float) -> bool:
        until = self._now() + within
        doubtful = self._sessions.cancel(claim, granted=True)
        answered = False
        try:
            self._sessions.will_rest(claim, seconds)
            ours = self._rest(claim, granted, seconds, until)
            answered = True
        finally:
            self._sessions.left(claim, answered=answered)
        self._end_doubtful(claim, doubtful, until)
        return ours

    def _rest(self, claim: Claim, granted: Granted, seconds: float, until: float) -> bool:
        """Move the key to a session that only the server's clock ends.

        If the answer to that is lost, the session is left alone: the move may still be executed, and whoever asks again
        finds that it was.
        """
        if self._sessions.known_over(granted.key):  # it moved before, or was lost
            entry, _ = self._entry(claim.name, until)
            return _rests_for(claim, entry)
        session, seconds = self._sessions.new_rest(seconds, until)
        try:
            entry = self._move(claim, granted, session, seconds, until)
        except BackendRejected:
            self._sessions.end_rest(session, until - self._now())
            raise
        if entry is None or entry.session != session:  # nothing can come of it any more
            self._sessions.end_rest(session, until - self._now())
        return _rests_for(claim, entry)

    def _move(self, claim: Claim, granted: Granted, session: str, seconds: float, until: float) -> Entry | None:
        """The key after it was tried: it was moved, had moved before, or is not this claim's."""
        assert granted.token is not None
        index = granted.token
        for _ in range(TRIES):
            try:
                return self._move_at(claim, granted, session, index, seconds, until)
            except _Refused as refused:
                if "invalid session" in refused.why:  # this process stood still for longer than it lived
                    raise BackendUnavailable("it was to rest, too late", unknown=False, backend="consul") from refused
            entry, _ = self._entry(claim.name, until)
            if entry is None or not entry.held_by(claim.id, granted.key):
                return entry
            index = entry.index  # an operator wrote the key
        raise self._restless(claim.name)

    def _move_at(self, claim: Claim, granted: Granted, session: str, index: int, seconds: float, until: float) -> Entry:
        key = self._keys.of(claim.name)
        value = b64encode(encode_resting(claim, granted.token, seconds)).decode()
        steps = [
            _operation("check-session", key, Session=granted.key),
            _operation("check-index", key, Index=index),
            _operation("unlock", key, Value=value, Flags=LOCK_FLAGS, Session=granted.key),
            _operation("lock", key, Value=value, Flags=LOCK_FLAGS, Session=session),
        ]
        return replace(self._transact(steps, until), value=b64decode(value))  # a transaction shows no values

    def _hidden(self, name: str) -> BackendUnavailable:
        key = self._keys.of(name)
        return BackendUnavailable(
            f"a look at {key!r} is refused: Consul could not tell whether it is still ours",
            unknown=False,
            backend="consul",
        )

    def _restless(self, name: str) -> BackendUnavailable:
        key = self._keys.of(name)
        return BackendUnavailable(f"the key {key!r} changes all the time", unknown=False, backend="consul")

    # Keeping

    def renew(
        self, group: Hashable, held: Sequence[Held], within: float
    ) -> Sequence[Granted | BackendUnavailable | None]:
        """The proof is that of the session. A look at a key that has no answer yet takes nothing from anybody."""
        until = self._now() + within
        if group == OWN:
            sessions = [self._sessions.get(granted.key) for _, granted in held]
            return [self._renew(session, [one], until)[0] for session, one in zip(sessions, held, strict=True)]
        return self._renew(self._sessions.get(group), held, until)

    def _renew(
        self, session: Session | None, held: Sequence[Held], until: float
    ) -> list[Granted | BackendUnavailable | None]:
        if session is None or not self._sessions.renew(session, until - self._now()):
            return [None] * len(held)
        mine = {claim.name for claim, _ in held}
        names = self._sessions.to_look_at(session, mine)
        if len(held) == 1:  # it may be `Lease.renew()`, which asks whether the lock is still ours
            names = dict.fromkeys(mine, True) | names
        end = (self._now() + until) / 2  # or a look without an answer would take the proof's time
        found, hidden = self._look(session, names, mine, end)
        dirty = self._sweep(session, found, end)
        self._sessions.looked_at(session, names, found.keys() - dirty)
        answers: list[Granted | BackendUnavailable | None] = []
        for claim, granted in held:
            if claim.name in hidden:
                answers.append(self._hidden(claim.name))
            else:
                still = _may_be_held(found, claim, session.id)
                answers.append(self._granted(session, granted.token) if still else None)
        return answers

    def _look(
        self, session: Session, names: Mapping[str, bool], held: Set[str], end: float
    ) -> tuple[dict[str, Entry | None], set[str]]:
        """Those of these keys that there is time for: many keys over a long way take more than one renewal.

        ``names`` tells whether a key should be there. The second are names that the token may not look at.
        """
        found: dict[str, Entry | None] = {}
        hidden: set[str] = set()
        enough = self._now() + LOOK_SHARE * session.ttl
        for step in self._steps(names):
            now = self._now()
            if now >= end or (found and now >= enough):
                break
            try:
                entries = self._entries(step, end)
                missing = [name for name in step if entries[name] is None and names[name]]
                if missing and not self._may_look_at(next((name for name in missing if name in held), missing[0]), end):
                    hidden.update(missing)
                found.update((name, entry) for name, entry in entries.items() if name not in hidden)
            except BackendUnavailable as silence:
                logger.debug("the session %s was renewed, its keys were not looked at: %s", session.id, silence)
                break
            except BackendRejected as refusal:
                logger.debug("the session %s was renewed, a look at its keys was refused: %s", session.id, refusal)
                hidden.update(step)
        return found, hidden

    def _may_look_at(self, name: str, until: float) -> bool:
        """What the token may not read is left out of an answer about many keys; a question for one is refused."""
        try:
            self._entry(name, until)
        except BackendRejected:
            return False
        return True

    def _steps(self, names: Iterable[str]) -> Iterator[list[str]]:
        """Those that go into one request."""
        step: list[str] = []
        size = 0
        for name in names:
            wanted = len(self._keys.of(name)) + 50
            if step and (len(step) >= AT_ONCE or size + wanted > BYTES_AT_ONCE):
                yield step
                step, size = [], 0
            step.append(name)
            size += wanted
        if step:
            yield step

    def _sweep(self, session: Session, found: Mapping[str, Entry | None], end: float) -> set[str]:
        """Delete what is locked for nobody: an acquire that nobody wants any more was executed after all, or again.

        The names for which that is not done yet. That is nobody's concern who holds another lock of this session.
        """
        dirty = set()
        for name, entry in found.items():
            if entry and entry.session == session.id and not self._sessions.wanted(session, entry.claim_id):
                dirty.add(name)
                if self._now() < end:
                    try:
                        self._delete_at(name, session.id, entry.index, end)
                        dirty.discard(name)
                    except MultilockError as error:
                        logger.debug("the lock %r is not given back yet: %s", name, error)
        return dirty

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
        for key, entry in [] if response.status == 404 else _listed(response, begin):
            name = self._keys.name(key)
            if name is not None and name.startswith(prefix) and (info := _info(name, entry)):
                yield info

    def force(self, name: str, within: float) -> bool:
        until = self._now() + within
        for _ in range(TRIES):
            entry, _ = self._entry(name, until)
            if entry is None or not entry.session:
                return False
            if self._delete_at(name, entry.session, entry.index, until):
                if entry.rests:
                    self._sessions.end_rest(entry.session, until - self._now())
                return True
        raise self._restless(name)

    # Requests

    def _transact(self, operations: Sequence[dict[str, Any]], until: float) -> Entry:
        """All of them are executed, or none: _Refused. The key after the last of them that shows it."""
        key = operations[0]["KV"]["Key"]
        response, _ = self._agents.call("PUT", self._transaction, until - self._now(), json.dumps(operations).encode())
        results = _results(response)
        if not results or any(said != key for said, _ in results):
            raise _no_answer(response)
        return results[-1][1]

    def _entry(self, name: str, until: float) -> tuple[Entry | None, int]:
        response, _ = self._agents.call("GET", self._keys.target(name), until - self._now())
        return entry_of(response, self._keys.of(name))

    def _entries(self, names: Sequence[str], until: float) -> dict[str, Entry | None]:
        """Of all of them: one that is not there is left out of a ``get-tree``, where a ``get`` refuses all."""
        by_key = {self._keys.of(name): name for name in names}
        wanted = json.dumps([_operation("get-tree", key) for key in by_key]).encode()
        response, _ = self._agents.call("PUT", self._reading, until - self._now(), wanted)
        found: dict[str, Entry | None] = dict.fromkeys(names)
        for key, entry in _results(response):
            if key in by_key:
                found[by_key[key]] = entry
            elif not any(key.startswith(asked) for asked in by_key):
                raise _no_answer(response)
        return found


def _operation(verb: str, key: str, **arguments: object) -> dict[str, Any]:
    return {"KV": {"Verb": verb, "Key": key, **arguments}}


def _results(response: Response) -> list[tuple[str, Entry]]:
    """Keys and what they are, as a transaction shows them."""
    if response.status == 409:
        refused = _Refused(response)
        if "ermission denied" in refused.why:
            raise BackendRejected(f"Consul refused: {refused.why} (see token=)", backend="consul")
        raise refused
    try:
        results = response.json()["Results"] or []
        return [(result["KV"]["Key"], Entry.parse(result["KV"])) for result in results]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise _no_answer(response) from error


def _listed(response: Response, begin: str) -> list[tuple[str, Entry]]:
    """All keys with this beginning."""
    try:
        listed = [(said["Key"], Entry.parse(said)) for said in response.json()]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise _no_answer(response) from error
    if not all(key.startswith(begin) for key, _ in listed):
        raise _no_answer(response)
    return listed


def _no_answer(response: Response) -> BackendUnavailable:
    return BackendUnavailable(f"no answer of Consul: {response.text}", backend="consul")


def _may_be_held(found: Mapping[str, Entry | None], claim: Claim, session_id: str) -> bool:
    """What was not looked at is held as long as its session is."""
    if claim.name not in found:
        return True
    entry = found[claim.name]
    return entry is not None and entry.held_by(claim.id, session_id)


def _rests_for(claim: Claim, entry: Entry | None) -> bool:
    return entry is not None and entry.rests and entry.claim_id == claim.id


def _info(name: str, entry: Entry) -> LockInfo | None:
    if not entry.session:
        return None
    info = decode_value(entry.value)
    token = info.token if info.resting_until else entry.index
    return replace(info, name=name, owner=info.owner or f"session {entry.session}", token=token)
