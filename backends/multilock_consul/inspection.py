"""The operators' requests: show who holds a name, list all held names, and take a name away."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from urllib.parse import quote

from multilock import BackendRejected
from multilock.backend import LockInfo
from multilock.names import escape
from multilock.values import decode_value
from multilock_consul.keys import Entry, Keys, index_of, listed
from multilock_consul.semaphore import Permits, State
from multilock_consul.sessions import Sessions
from multilock_consul.transactions import Refused, Transactions, operation
from multilock_consul.transport import Agents

__all__ = ["Inspection"]

TRIES = 3  # tries; an operator who writes a key again and again must not block a call forever
TAKEN_AT_ONCE = 32  # readers in one transaction
OTHERS_MAX = 99


class Inspection:
    """The operators' requests of one client."""

    def __init__(self, agents: Agents, keys: Keys, transactions: Transactions, sessions: Sessions) -> None:
        self._agents = agents
        self._keys = keys
        self._transactions = transactions
        self._sessions = sessions
        self._semaphore = Permits(keys, transactions)

    def inspect(self, name: str, within: float) -> LockInfo | None:
        return self._info(name, self._read(name, self._agents.now() + within))

    def _read(self, name: str, until: float) -> Mapping[str, Entry]:
        """Read all keys of this name.

        A list leaves out keys that the token may not read. So this raises `BackendRejected` if the token may not read
        one of the three kinds of keys.
        """
        found, _ = self._transactions.read_folder(name, until)
        one_of_each = [self._keys.of(name), f"{self._keys.folder(name)}!", f"{self._keys.readers(name)}!"]
        # No key has index 0, so these checks always fail. But without the right to read a key, its check fails with a
        # different error.
        asked = [operation("check-index", key, Index=0) for key in one_of_each]
        with suppress(Refused):
            self._transactions.look(asked, until)
        return found

    def inspect_all(self, prefix: str, within: float) -> Iterator[LockInfo]:
        # escape() changes the names "." and "..", but not the dots of a longer name. So list all keys for these two
        # prefixes.
        begin = self._keys.prefix + ("" if prefix in (".", "..") else escape(prefix))
        target = self._agents.target(f"/v1/kv/{quote(begin)}", recurse="", consistent="")
        until = self._agents.now() + within
        response, _ = self._agents.call("GET", target, within)
        if response.status == 404 and begin:
            # A list leaves out the keys that the token may not read, while a query for one such key is refused.
            self._agents.call("GET", self._agents.target(f"/v1/kv/{quote(begin)}"), until - self._agents.now())
        index_of(response)  # a 404 without an index comes from a proxy
        entries = [] if response.status == 404 else listed(response, begin)
        names: dict[str, dict[str, Entry]] = {}
        for key, entry in entries:
            if (name := self._keys.name(key)) is not None and name.startswith(prefix):
                names.setdefault(name, {})[key] = entry
        for name, found in names.items():
            if info := self._info(name, found):
                yield replace(info, others=())

    def _info(self, name: str, found: Mapping[str, Entry]) -> LockInfo | None:
        state = self._state(name, found)
        held = self._held(name, state)
        if readers := [entry for key, entry in held.items() if key in state.readers]:
            behind = [state.lock] if state.lock and state.lock.session else state.living.values()
            waiting = sum(entry.claim_id is not None for entry in behind)
            return _together(name, readers, "read", waiting=waiting or None)
        if alone := held.get(self._keys.of(name)):
            return _holder(name, alone)
        return _together(name, list(held.values()), "permit", permits=state.limit) if held else None

    def _state(self, name: str, found: Mapping[str, Entry]) -> State:
        try:
            return self._semaphore.state(name, found)
        except BackendRejected:  # another program uses the name, so it has no holder
            return State(None, {}, 0)

    def force_release(self, name: str, within: float) -> bool:
        until = self._agents.now() + within
        for _ in range(TRIES):
            held = self._held(name, self._state(name, self._read(name, until)))
            if not held:
                return False
            if taken := self._take_away(held, until):
                self._end_rests(taken, until)
                return True
        raise self._transactions.restless(self._keys.of(name))

    def _held(self, name: str, state: State) -> Mapping[str, Entry]:
        """Return the keys of the claims that hold the name now.

        A claim that has locked the key of the name may still wait for readers, or for the lock delay of dead readers.
        Such a claim is left out.
        """
        lock = {self._keys.of(name): state.lock} if state.lock and state.lock.session else {}
        if state.readers:
            readers = {key: entry for key, entry in state.readers.items() if entry.session}
            return {**readers, **{key: entry for key, entry in lock.items() if entry.claim_id is None}}
        folder = self._keys.folder(name)
        return lock or {folder + session: entry for session, entry in state.living.items()}

    def _take_away(self, held: Mapping[str, Entry], until: float) -> list[Entry]:
        """Delete these keys. Return the keys that were still held."""
        taken: list[Entry] = []

        def take(keys: Sequence[str]) -> None:
            if self._delete([(key, held[key]) for key in keys], until):
                taken.extend(held[key] for key in keys)
            else:  # a holder has just released its key, so delete each key in a separate transaction
                taken.extend(held[key] for key in keys if self._delete([(key, held[key])], until))

        self._transactions.in_portions(list(held), TAKEN_AT_ONCE, take)
        return taken

    def _delete(self, held: Sequence[tuple[str, Entry]], until: float) -> bool:
        """Delete all of these keys, or none. Returns whether they were deleted."""
        steps = []
        for key, entry in held:
            steps += [operation("check-session", key, Session=entry.session), operation("delete", key)]
        try:
            self._transactions.execute(steps, until)
        except Refused:
            return False
        return True

    def _end_rests(self, taken: Sequence[Entry], until: float) -> None:
        for entry in taken:
            if entry.rests:
                self._sessions.end_rest(entry.session, until - self._agents.now())


def _holder(name: str, entry: Entry) -> LockInfo:
    info = decode_value(entry.value)
    token = info.token if info.resting_until else entry.index
    return replace(info, name=name, owner=info.owner or f"session {entry.session}", token=token)


def _together(
    name: str, entries: Sequence[Entry], kind: str, *, permits: int | None = None, waiting: int | None = None
) -> LockInfo:
    """Return one `LockInfo` for claims that share a name. The `LockInfo` describes the claim that has held the name
    longest, and contains the other claims."""
    oldest = sorted(entries, key=lambda entry: entry.index)[: OTHERS_MAX + 1]
    first, *others = (replace(_holder(name, entry), kind=kind, permits=permits) for entry in oldest)
    return replace(first, holders=len(entries), waiting=waiting, others=tuple(others))
