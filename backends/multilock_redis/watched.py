"""Which of our claims are watched, by claim and by name. Several threads add, take out and look up."""

from __future__ import annotations

from multilock import system

__all__ = ["Watched"]


class Watched:
    """Claim id -> its name, and the owner that the key of this name has as long as it is this claim's. Several claims
    may share a name: what is asked at each push is asked by name, and costs as much as there are claims of it."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}  # claim id -> name; this alone decides what is watched
        # Name -> claim id -> owner. No watched claim is missing here; one just taken out may still be in it.
        self._owners: dict[str, dict[str, bytes]] = {}
        self._indexing = system.RLock()  # for changes of it, moments each; a finalizer may come inside

    def add(self, claim_id: str, name: str, owner: bytes) -> None:
        with self._indexing:
            self._owners.setdefault(name, {})[claim_id] = owner
            self._names[claim_id] = name

    def take(self, claim_id: str) -> bool:
        """Take it out. False: it is not in; of two who take it out one is told True."""
        name = self._names.pop(claim_id, None)
        if name is None:
            return False
        with self._indexing:
            owners = self._owners.get(name)
            if owners is not None and claim_id not in self._names:  # it may have been added again
                owners.pop(claim_id, None)
                if not owners:
                    self._owners.pop(name, None)
        return True

    def name(self, claim_id: str) -> str | None:
        return self._names.get(claim_id)

    def names(self) -> set[str]:
        return set(self._owners)

    def has_name(self, name: str) -> bool:
        return name in self._owners

    def of_name(self, name: str) -> dict[str, bytes]:
        """Its claims at this moment, each with its owner."""
        return self._owners.get(name, {}).copy()

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, claim_id: str) -> bool:
        return claim_id in self._names
