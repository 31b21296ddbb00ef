"""Typed events: frozen values, one class for each thing that happens. Imported when somebody listens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multilock.model import LeaderInfo, Loss

__all__ = [
    "Acquired",
    "AtRisk",
    "Elected",
    "Event",
    "LeaderChanged",
    "Lost",
    "NotAcquired",
    "PushesDown",
    "PushesUp",
    "Released",
    "RenewFailed",
    "Renewed",
    "Waiting",
]


@dataclass(frozen=True, slots=True)
class Event:
    """``at`` is seconds on the clock `multilock.now()`; ``owner`` is the id of the acquisition concerned."""

    name: str
    owner: str | None
    at: float


@dataclass(frozen=True, slots=True)
class Waiting(Event):
    """The name was taken; this acquire waits."""


@dataclass(frozen=True, slots=True)
class Acquired(Event):
    """The name is held from now on; ``token`` is None where the backend has none."""

    token: int | None
    waited: float  #: seconds from the call of acquire()


@dataclass(frozen=True, slots=True)
class NotAcquired(Event):
    """A call of acquire() ended without the lock.

    ``result``: ``"taken"`` (the time was over), ``"unavailable"``, ``"rejected"``, ``"closed"``, ``"cancelled"`` (also
    by an interrupt, or because an election was stopped).
    """

    result: str
    waited: float  #: seconds from the call of acquire()


@dataclass(frozen=True, slots=True)
class Renewed(Event):
    """A renewal was acknowledged; the proof now lasts until ``valid_until``."""

    valid_until: float
    ttl: float  #: seconds granted
    slack: float  #: seconds for which the lease would have gone on without it
    took: float  #: seconds from the send of the request to its answer


@dataclass(frozen=True, slots=True)
class RenewFailed(Event):
    """A renewal was not answered, or refused; it is tried again."""

    message: str


@dataclass(frozen=True, slots=True)
class AtRisk(Event):
    """A renewal failed or is late; the lease is lost at ``lost_at`` unless one is acknowledged before."""

    lost_at: float


@dataclass(frozen=True, slots=True)
class Lost(Event):
    """The lease ended without being released. ``held_for`` is the seconds from the grant to that."""

    loss: Loss
    held_for: float


@dataclass(frozen=True, slots=True)
class Released(Event):
    """``held_for`` is the seconds from the grant to the call of release()."""

    held_for: float


@dataclass(frozen=True, slots=True)
class Elected(Event):
    """This node leads, in this term."""

    identity: str
    term: int | None


@dataclass(frozen=True, slots=True)
class LeaderChanged(Event):
    """Another node leads, or none."""

    leader: LeaderInfo | None


@dataclass(frozen=True, slots=True)
class PushesDown(Event):
    """Nothing is pushed over ``connection``: waiters look by timer, renewals notice losses. It has no ``name``."""

    connection: str
    trouble: str


@dataclass(frozen=True, slots=True)
class PushesUp(Event):
    """``connection`` is back. It has no ``name``."""

    connection: str
