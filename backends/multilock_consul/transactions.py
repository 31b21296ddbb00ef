"""Requests about keys: reads, and transactions. A server executes either every step of a transaction or none."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

from multilock import BackendRejected, BackendUnavailable
from multilock_consul.keys import Entry, Keys, entry_of, index_of, listed, no_answer
from multilock_consul.transport import RIGHTS, Agents, TooLarge
from multilock_consul.wire import Response

__all__ = ["AT_ONCE", "BYTES_AT_ONCE", "Refused", "Transactions", "operation", "whole_tree"]

AT_ONCE = 64  # operations that a server accepts in one transaction
# Bytes of all keys in one request, which names each key once or twice; the default limit of a server is 512 KiB.
BYTES_AT_ONCE = 32768
AROUND = 60  # bytes that a request needs for each key, besides the key itself
BURIED_AT_ONCE = (AT_ONCE - 1) // 2


class Refused(Exception):
    """The server refused a transaction (409): nothing was executed. ``verb`` and ``key`` name the refused operation."""

    def __init__(self, response: Response, operations: Sequence[dict[str, Any]]) -> None:
        try:
            errors = response.json()["Errors"]
            refused = operations[errors[0]["OpIndex"]]["KV"]
            self.verb: str = refused["Verb"]
            self.key: str = refused["Key"]
            self.why = "; ".join(error["What"] for error in errors)
        except (ValueError, LookupError, TypeError) as error:
            raise no_answer(response) from error
        super().__init__(self.why)


class Transactions:
    """Requests about keys. Each method raises the errors of `multilock.backend.Backend`, besides those that its own
    docstring names."""

    def __init__(self, agents: Agents, keys: Keys) -> None:
        self._agents = agents
        self._keys = keys
        self._writing = agents.target("/v1/txn")
        self._reading = agents.target("/v1/txn", consistent="")
        self._bytes = BYTES_AT_ONCE  # halved whenever a server refuses a request for its size

    def execute(self, operations: Sequence[dict[str, Any]], until: float) -> Mapping[str, Entry]:
        """Execute all of these operations. If one fails, none is executed, and this raises `Refused`.

        Returns the keys that the replies to these operations show. If several replies show a key, the last one counts.
        Only the reply to a ``get-tree`` shows values.
        """
        response, _ = self._agents.call("PUT", self._writing, self._left(until), json.dumps(operations).encode())
        return self._shown(operations, response)

    def look(self, operations: Sequence[dict[str, Any]], until: float) -> Mapping[str, Entry]:
        """Execute operations that only read. Otherwise this method is like `execute`."""
        response, _ = self._agents.call("PUT", self._reading, self._left(until), json.dumps(operations).encode())
        return self._shown(operations, response)

    def _shown(self, operations: Sequence[dict[str, Any]], response: Response) -> Mapping[str, Entry]:
        keys = {one["KV"]["Key"] for one in operations}
        trees = tuple(one["KV"]["Key"] for one in operations if one["KV"]["Verb"] == "get-tree")
        results = _results(response, operations)
        if not results or any(key not in keys and not key.startswith(trees) for key, _ in results):
            raise no_answer(response)
        return dict(results)

    def delete(self, key: str, session: Hashable, index: int, until: float) -> bool:
        """Delete this key if this session locks it and its index is ``index``. Returns whether it was deleted.

        A ``delete-cas`` alone would succeed for a missing key as well.
        """
        still = operation("check-session", key, Session=session)
        try:
            self.execute([still, operation("delete-cas", key, Index=index)], until)
        except Refused:
            return False
        return True

    def bury(self, keys: Sequence[str], still: dict[str, Any], session: Hashable, until: float) -> None:
        """Delete the keys of holders whose sessions have ended, if no lock delay keeps the keys any longer.

        Once the lock delay is over, such a holder has given up the name. The keys are deleted only if the operation
        ``still`` succeeds in the same transaction. Raises `Refused`.
        """

        def bury(some: Sequence[str]) -> None:
            steps = [still]
            for key in some:
                # Servers report a lock delay only to a request that locks the key.
                steps += [operation("lock", key, Session=session), operation("delete", key)]
            self.execute(steps, until)

        self.in_portions(keys, BURIED_AT_ONCE, bury)

    def in_portions(self, keys: Sequence[str], at_most: int, do: Callable[[Sequence[str]], object]) -> None:
        """Call ``do`` with all these keys, in portions that are as large as a server accepts."""
        left = list(keys)
        while left:
            some = self.portion(left, at_most)
            try:
                do(some)
            except TooLarge:
                if not self.ask_for_less(some):
                    raise
            else:
                del left[: len(some)]

    def portion(self, keys: Sequence[str], at_most: int = AT_ONCE) -> list[str]:
        """Return the first of these keys, as many as fit into one request."""
        size = 0
        for count, key in enumerate(keys[:at_most]):
            size += len(key) + AROUND
            if count and size > self._bytes:
                return list(keys[:count])
        return list(keys[:at_most])

    def ask_for_less(self, keys: Sequence[str]) -> bool:
        """Halve the size of all later portions, because the server refused this one with `TooLarge`.

        The limit is an option of the server that clients cannot read.

        Returns False if this portion cannot be made smaller.
        """
        self._bytes = min(self._bytes, sum(len(key) + AROUND for key in keys)) // 2
        return len(keys) > 1

    def read(self, key: str, until: float) -> tuple[Entry | None, int]:
        """Read this key. Returns it, and the Consul index after which to wait for its next change."""
        response, _ = self._agents.call("GET", self._keys.target(key), self._left(until))
        return entry_of(response, key)

    def read_folder(self, name: str, until: float) -> tuple[dict[str, Entry], int]:
        """Read all keys of this name. Returns them, and the Consul index after which to wait for their next change."""
        folder = self._keys.folder(name)
        response, _ = self._agents.call("GET", self._keys.target(folder, recurse=""), self._left(until))
        found = {} if response.status == 404 else dict(listed(response, folder))
        return found, index_of(response)

    def read_all(self, keys: Iterable[str], until: float) -> dict[str, Entry | None]:
        """Read the keys of one `portion`. This uses ``get-tree``, since a ``get`` of a missing key would make the
        transaction fail."""
        found: dict[str, Entry | None] = dict.fromkeys(keys)
        operations = [operation("get-tree", key) for key in found]
        response, _ = self._agents.call("PUT", self._reading, self._left(until), json.dumps(operations).encode())
        for key, entry in _results(response, operations):
            if key in found:
                found[key] = entry
            elif not key.startswith(tuple(found)):
                raise no_answer(response)
        return found

    def restless(self, key: str) -> BackendUnavailable:
        """Return the error to raise if another program changes this key so often that our change never succeeds."""
        return BackendUnavailable(
            f"another program changes the key {key!r} again and again", unknown=False, backend="consul"
        )

    def _left(self, until: float) -> float:
        return until - self._agents.now()


def operation(verb: str, key: str, **arguments: object) -> dict[str, Any]:
    """Return one operation of a transaction on a key."""
    return {"KV": {"Verb": verb, "Key": key, **arguments}}


def whole_tree(begin: str) -> list[dict[str, Any]]:
    """Return the operations that show all keys with this beginning, or fail if the token has no rights there.

    A ``get-tree`` leaves out what the token may not read, so an empty tree alone proves nothing. The second operation
    asks for one key of the tree, and is refused if the right is missing.
    """
    return [operation("get-tree", begin), operation("check-not-exists", f"{begin}!")]


def _results(response: Response, operations: Sequence[dict[str, Any]]) -> list[tuple[str, Entry]]:
    """Return the keys that a transaction's reply shows. Raises `Refused`."""
    if response.status == 409:
        refused = Refused(response, operations)
        if "ermission denied" in refused.why:
            raise BackendRejected(f"Consul refused: {refused.why}{RIGHTS}", backend="consul")
        raise refused
    try:
        results = response.json()["Results"] or []
        return [(result["KV"]["Key"], Entry.parse(result["KV"])) for result in results]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise no_answer(response) from error
