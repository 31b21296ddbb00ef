"""Names and keys: where a lock is, and what its key says."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import quote

from multilock import BackendUnavailable
from multilock.names import escape, unescape
from multilock.values import decode_value
from multilock_consul.transport import Agents
from multilock_consul.wire import Response

__all__ = ["LOCK_FLAGS", "SEMAPHORE_FLAGS", "Entry", "Keys", "entry_of", "listed", "no_answer"]

LOCK_FLAGS = 0x2DDCCBC058A50C18
SEMAPHORE_FLAGS = 0xE0F69A2BAA414DE0


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
        raise no_answer(response) from error


def listed(response: Response, begin: str) -> list[tuple[str, Entry]]:
    """The answer to a GET of all keys with this beginning."""
    try:
        found = [(said["Key"], Entry.parse(said)) for said in response.json()]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise no_answer(response) from error
    if not all(key.startswith(begin) for key, _ in found):
        raise no_answer(response)
    return found


def no_answer(response: Response) -> BackendUnavailable:
    return BackendUnavailable(f"no answer of Consul: {response.text}", backend="consul")
