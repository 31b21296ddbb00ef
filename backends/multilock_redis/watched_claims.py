"""The claims whose loss the listener must report, indexed by claim and by name. Several threads may use this index at
the same time."""

from __future__ import annotations

from multilock import system

__all__ = ["Watched"]


class Watched:
    """Claims, each with its name, and with the owner that the name's key contains as long as this claim holds the name.

    Several claims may share a name. A push of the server contains a name, so the claims are indexed by name as well.
    """

    def __init__(self) -> None:
        self._names: dict[str, str] = {}  # claim id -> name; a claim is watched if and only if it is in here
        # Name -> claim id -> owner. May contain claims that were just removed.
        self._owners: dict[str, dict[str, bytes]] = {}
        self._indexing = system.RLock()  # held to change _owners; reentrant, since a finalizer may run inside

    def add(self, claim_id: str, name: str, owner: bytes) -> None:
        """Watch a claim."""
        with self._indexing:
            self._owners.setdefault(name, {})[claim_id] = owner
            self._names[claim_id] = name

    def take(self, claim_id: str) -> bool:
        """Remove a claim. Returns False if the claim is not watched. If two threads remove it, only one gets True."""
        name = self._names.pop(claim_id, None)
        if name is None:
            return False
        with self._indexing:
            owners = self._owners.get(name)
            if owners is not None and claim_id not in self._names:  # otherwise the claim was added again
                owners.pop(claim_id, None)
                if not owners:
                    self._owners.pop(name, None)
        return True

    def name(self, claim_id: str) -> str | None:
        """Return the name of a watched claim."""
        return self._names.get(claim_id)

    def names(self) -> set[str]:
        """Return the names of all watched claims."""
        return set(self._owners)

    def has_name(self, name: str) -> bool:
        """Return whether a claim of this name is watched."""
        return name in self._owners

    def of_name(self, name: str) -> dict[str, bytes]:
        """Return the claims of this name at this moment, each with its owner."""
        return self._owners.get(name, {}).copy()

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, claim_id: str) -> bool:
        return claim_id in self._names
