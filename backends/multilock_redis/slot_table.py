"""The table of a cluster's slots, built from the replies of its nodes. This module sends no request and reads no
clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from redis.crc import REDIS_CLUSTER_HASH_SLOTS as SLOTS
from redis.crc import key_slot

__all__ = ["SLOTS", "Address", "SlotTable", "key_slot"]


class Address(NamedTuple):
    """Host and port of a server."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class SlotTable:
    """The slots, each with the primary that serves it (or None), and the replicas of each primary."""

    def __init__(self, owners: list[Address | None], replicas: Mapping[Address, Sequence[Address]]) -> None:
        self._owners = owners
        self.replicas = replicas
        self.primaries: tuple[Address, ...] = tuple(dict.fromkeys(owner for owner in owners if owner))

    @classmethod
    def of(cls, answer: Iterable[Sequence[Any]], asked: Address) -> SlotTable:
        """Parse the reply to ``CLUSTER SLOTS``. Raises ValueError if ``answer`` is not such a reply.

        A node that does not know its own host name leaves the name out. Then the host of ``asked`` is used.
        """
        owners: list[Address | None] = [None] * SLOTS
        replicas: dict[Address, list[Address]] = {}
        try:
            for first, last, primary, *others in answer:
                owner = _address(primary, asked)
                if not 0 <= first <= last < SLOTS:
                    raise ValueError(f"slots {first} to {last}")
                owners[first : last + 1] = [owner] * (last + 1 - first)
                known = replicas.setdefault(owner, [])
                known += [each for each in (_address(other, asked) for other in others) if each not in known]
        except (TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"it does not say which node serves which slot: {error}") from error
        return cls(owners, replicas)

    def owner(self, slot: int) -> Address | None:
        """Return the primary that serves this slot, or None."""
        return self._owners[slot]

    def moved(self, slot: int, to: Address) -> None:
        """Record that one slot has another primary, as a node has just reported."""
        before, self._owners[slot] = self._owners[slot], to
        if to not in self.primaries or before not in self._owners:
            self.primaries = tuple(dict.fromkeys(owner for owner in self._owners if owner))

    def uncovered(self) -> int:
        """Return how many slots no node serves."""
        return self._owners.count(None)


def _address(node: Sequence[Any], asked: Address) -> Address:
    host, port = node[0], node[1]
    named = host.decode() if host else ""
    return Address(asked.host if named in ("", "?") else named, int(port) or asked.port)
