"""What is asked about keys: transactions, of which all is executed or nothing, and reads."""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from typing import Any

from multilock import BackendRejected, BackendUnavailable
from multilock_consul.keys import Entry, Keys, entry_of, no_answer
from multilock_consul.transport import Agents
from multilock_consul.wire import Response

__all__ = ["AT_ONCE", "Refused", "Transactions", "operation"]

AT_ONCE = 64  # operations a server takes in one transaction


class Refused(Exception):
    """409: nothing of the transaction was executed."""

    def __init__(self, response: Response) -> None:
        try:
            errors = response.json()["Errors"]
            self.first: int = errors[0]["OpIndex"]
            self.why = "; ".join(error["What"] for error in errors)
        except (ValueError, LookupError, TypeError) as error:
            raise no_answer(response) from error
        super().__init__(self.why)


class Transactions:
    """Every one raises as `multilock.backend.Backend` says, besides what it says itself."""

    def __init__(self, agents: Agents, keys: Keys) -> None:
        self._agents = agents
        self._keys = keys
        self._writing = agents.target("/v1/txn")
        self._reading = agents.target("/v1/txn", consistent="")

    def execute(self, operations: Sequence[dict[str, Any]], until: float) -> Entry:
        """All of them, or none: `Refused`. The key after the last of them that shows it."""
        key = operations[0]["KV"]["Key"]
        response, _ = self._agents.call("PUT", self._writing, self._left(until), json.dumps(operations).encode())
        results = _results(response)
        if not results or any(said != key for said, _ in results):
            raise no_answer(response)
        return results[-1][1]

    def delete(self, name: str, session: Hashable, index: int, until: float) -> bool:
        """Delete the key of this name if it is this session's, at this index. A ``delete-cas`` alone says yes for a key
        that is not there."""
        key = self._keys.of(name)
        still = operation("check-session", key, Session=session)
        try:
            self.execute([still, operation("delete-cas", key, Index=index)], until)
        except Refused:
            return False
        return True

    def read(self, name: str, until: float) -> tuple[Entry | None, int]:
        """The key of this name, and the index from which on to wait for its next change."""
        response, _ = self._agents.call("GET", self._keys.target(name), self._left(until))
        return entry_of(response, self._keys.of(name))

    def read_all(self, names: Sequence[str], until: float) -> dict[str, Entry | None]:
        """The keys of `AT_ONCE` names at most. One that is not there is left out of a ``get-tree``, where a ``get``
        refuses all."""
        by_key = {self._keys.of(name): name for name in names}
        wanted = json.dumps([operation("get-tree", key) for key in by_key]).encode()
        response, _ = self._agents.call("PUT", self._reading, self._left(until), wanted)
        found: dict[str, Entry | None] = dict.fromkeys(names)
        for key, entry in _results(response):
            if key in by_key:
                found[by_key[key]] = entry
            elif not any(key.startswith(asked) for asked in by_key):
                raise no_answer(response)
        return found

    def restless(self, name: str) -> BackendUnavailable:
        """An operator writes this key again and again: what was to be done to it was not."""
        key = self._keys.of(name)
        return BackendUnavailable(f"the key {key!r} changes all the time", unknown=False, backend="consul")

    def _left(self, until: float) -> float:
        return until - self._agents.now()


def operation(verb: str, key: str, **arguments: object) -> dict[str, Any]:
    return {"KV": {"Verb": verb, "Key": key, **arguments}}


def _results(response: Response) -> list[tuple[str, Entry]]:
    """Keys and what they are, as a transaction shows them."""
    if response.status == 409:
        refused = Refused(response)
        if "ermission denied" in refused.why:
            raise BackendRejected(f"Consul refused: {refused.why} (see token=)", backend="consul")
        raise refused
    try:
        results = response.json()["Results"] or []
        return [(result["KV"]["Key"], Entry.parse(result["KV"])) for result in results]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise no_answer(response) from error
