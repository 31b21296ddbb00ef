"""The keys of a name: the lock's key, and the keys of readers and permits. The value of a key names its owner."""

from __future__ import annotations

import re
from base64 import b64decode
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import quote

from multilock import BackendUnavailable
from multilock.backend import Claim
from multilock.names import escape, unescape
from multilock.values import decode_value
from multilock_consul.transport import Agents
from multilock_consul.wire import Response

__all__ = ["LOCK_FLAGS", "SEMAPHORE_FLAGS", "Entry", "Keys", "entry_of", "index_of", "listed", "names_of", "no_answer"]

LOCK_FLAGS = 0x2DDCCBC058A50C18
SEMAPHORE_FLAGS = 0xE0F69A2BAA414DE0
_OURS = re.compile(r"([^/]+)/(?:(\.lock)|!r/[^/]+|([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}))")


class Keys:
    """The mapping between names and keys, below one prefix."""

    def __init__(self, prefix: str, agents: Agents) -> None:
        self.prefix = prefix
        self._agents = agents
        self.of = lru_cache(maxsize=4096)(self._of)

    def _of(self, name: str) -> str:
        return f"{self.folder(name)}.lock"

    def folder(self, name: str) -> str:
        """Return the beginning of all keys of this name."""
        return f"{self.prefix}{escape(name)}/"

    def readers(self, name: str) -> str:
        """Return the beginning of the keys of this name's readers."""
        return f"{self.folder(name)}!r/"

    def place(self, claim: Claim, session_id: object) -> str:
        """Return the key that this claim locks for that session: the key of the name, or a separate key if the claim
        shares the name with others.

        A reader has a different key in each session, because the key of a session that ended may still have a lock
        delay.
        """
        if claim.permits > 1:
            return f"{self.folder(claim.name)}{session_id}"
        return f"{self.readers(claim.name)}{claim.id}.{session_id}" if claim.mode == "r" else self.of(claim.name)

    def places(self, claim: Claim, session_id: object) -> list[str]:
        """Return the keys that must be unchanged while this claim holds its name. For a permit these include the list
        of holders."""
        place = self.place(claim, session_id)
        return [place, self.of(claim.name)] if claim.permits > 1 else [place]

    def name(self, key: str) -> str | None:
        """Return the name of the lock to which this key belongs, or None for any other key."""
        found = _OURS.fullmatch(key.removeprefix(self.prefix)) if key.startswith(self.prefix) else None
        return unescape(found[1]) if found else None

    def target(self, key: str, **query: str | int) -> str:
        """Return the request target for this key. The key is percent-encoded a second time, after the name in it."""
        return self._agents.target(f"/v1/kv/{quote(key)}", consistent="", **query)


@dataclass(frozen=True, slots=True)
class Entry:
    """A key as the server returned it."""

    flags: int
    session: str  #: the session that locks the key, or ""
    value: bytes
    index: int  #: the index of the key's last change

    @property
    def claim_id(self) -> str | None:
        """The id of the multilock claim that wrote the key, or None if another program wrote the key."""
        owner = decode_value(self.value).owner
        return owner.partition("@")[0] if owner else None

    @property
    def rests(self) -> bool:
        """Whether the key's claim was released but keeps the name taken for a while."""
        return bool(self.session) and decode_value(self.value).resting_until is not None

    def held_by(self, claim_id: str, session: object) -> bool:
        """Return whether this claim holds the key in this session.

        If an operator has overwritten the value, the claim still holds the lock.
        """
        return bool(self.session) and self.session == session and self.claim_id in (claim_id, None)

    @classmethod
    def parse(cls, said: Mapping[str, Any]) -> Entry:
        """Parse one key of a reply. Raises LookupError, ValueError or TypeError if ``said`` is not a key."""
        session, flags, index = said.get("Session") or "", said["Flags"], said["ModifyIndex"]
        if not (isinstance(session, str) and isinstance(flags, int) and isinstance(index, int)):
            raise TypeError("not an entry of a key")
        return cls(flags, session, b64decode(said["Value"] or ""), index)


def entry_of(response: Response, key: str) -> tuple[Entry | None, int]:
    """Parse the reply to a GET of this key. Returns the key, and the Consul index after which to wait for its next
    change."""
    index = index_of(response)
    if response.status == 404:
        return None, index
    try:
        [said] = response.json()
        if said["Key"] != key:
            raise ValueError("it is about another key")
        return Entry.parse(said), index
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        raise no_answer(response) from error


def names_of(response: Response, folder: str) -> frozenset[str]:
    """Parse the reply to a GET of the names in this folder."""
    try:
        names = frozenset(response.json()) if response.status != 404 else frozenset()
        if not all(name.startswith(folder) for name in names):
            raise ValueError("it is about another folder")
    except (ValueError, TypeError, AttributeError) as error:
        raise no_answer(response) from error
    return names


def index_of(response: Response) -> int:
    """Return the Consul index of a reply, after which to wait for the next change. Raises `BackendUnavailable` if the
    reply has no index."""
    try:
        return int(response.headers["x-consul-index"])
    except (LookupError, ValueError) as error:
        raise no_answer(response) from error


def listed(response: Response, begin: str) -> list[tuple[str, Entry]]:
    """Parse the reply to a GET of all keys with this beginning."""
    try:
        found = [(said["Key"], Entry.parse(said)) for said in response.json()]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise no_answer(response) from error
    if not all(key.startswith(begin) for key, _ in found):
        raise no_answer(response)
    return found


def no_answer(response: Response) -> BackendUnavailable:
    """Return the error for a reply that cannot be Consul's, such as a proxy's page."""
    return BackendUnavailable(f"this is not a reply of Consul: {response.text}", backend="consul")
