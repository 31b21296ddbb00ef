"""What operators ask: who holds a name, which names are held; and to take one away."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from urllib.parse import quote

from multilock.backend import LockInfo
from multilock.names import escape
from multilock.values import decode_value
from multilock_consul.keys import Entry, Keys, listed
from multilock_consul.sessions import Sessions
from multilock_consul.transactions import Transactions
from multilock_consul.transport import Agents

__all__ = ["Inspection"]

TRIES = 3  # an operator who writes a key again and again must not keep a call for ever


class Inspection:
    def __init__(self, agents: Agents, keys: Keys, transactions: Transactions, sessions: Sessions) -> None:
        self._agents = agents
        self._keys = keys
        self._transactions = transactions
        self._sessions = sessions

    def inspect(self, name: str, within: float) -> LockInfo | None:
        entry, _ = self._transactions.read(name, self._agents.now() + within)
        return _info(name, entry) if entry else None

    def inspect_all(self, prefix: str, within: float) -> Iterator[LockInfo]:
        # A name that is all dots is escaped otherwise than the beginning of a longer one.
        begin = self._keys.prefix + ("" if prefix in (".", "..") else escape(prefix))
        target = self._agents.target(f"/v1/kv/{quote(begin)}", recurse="", consistent="")
        until = self._agents.now() + within
        response, _ = self._agents.call("GET", target, within)
        if response.status == 404 and begin:
            # A list leaves out what the token may not read; a question for one key is refused.
            self._agents.call("GET", self._agents.target(f"/v1/kv/{quote(begin)}"), until - self._agents.now())
        for key, entry in [] if response.status == 404 else listed(response, begin):
            name = self._keys.name(key)
            if name is not None and name.startswith(prefix) and (info := _info(name, entry)):
                yield info

    def force_release(self, name: str, within: float) -> bool:
        until = self._agents.now() + within
        for _ in range(TRIES):
            entry, _ = self._transactions.read(name, until)
            if entry is None or not entry.session:
                return False
            if self._transactions.delete(name, entry.session, entry.index, until):
                if entry.rests:
                    self._sessions.end_rest(entry.session, until - self._agents.now())
                return True
        raise self._transactions.restless(name)


def _info(name: str, entry: Entry) -> LockInfo | None:
    if not entry.session:
        return None
    info = decode_value(entry.value)
    token = info.token if info.resting_until else entry.index
    return replace(info, name=name, owner=info.owner or f"session {entry.session}", token=token)
