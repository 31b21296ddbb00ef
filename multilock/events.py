"""Typed events: frozen values, one class for each thing that happens. Imported when a program first subscribes."""

from __future__ import annotations

from contextvars import Context
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


class InContext:
    """A value that remembers a context. The context is not a field of the value, because a context can be neither
    deep-copied nor pickled."""

    __slots__ = ("_context",)

    @property
    def context(self) -> Context | None:
        """A copy of the context (`contextvars`) in which acquire() was called, for example with its trace. See
        `Context.run`.

        Returns None for an event that belongs to no acquire(), or to an acquire() before the first subscription.
        """
        context: Context | None = getattr(self, "_context", None)
        return context.copy() if context else None


@dataclass(frozen=True, slots=True)
class Event(InContext):
    """Base of all events.

    ``name`` is the name of the lock. ``owner`` is the id of the acquisition, or None if there is none. ``at`` is in
    seconds on the clock `multilock.now()`.
    """

    name: str
    owner: str | None
    at: float


@dataclass(frozen=True, slots=True)
class Waiting(Event):
    """The name is taken, and this acquire() waits."""


@dataclass(frozen=True, slots=True)
class Acquired(Event):
    """The name is held from now on. ``token`` is None if the backend has no tokens."""

    token: int | None
    waited: float  #: seconds from the call of acquire()


@dataclass(frozen=True, slots=True)
class NotAcquired(Event):
    """A call of acquire() ended without the lock.

    ``result`` is ``"taken"`` (the timeout was over), ``"unavailable"``, ``"rejected"``, ``"closed"`` or
    ``"cancelled"`` (also after an interrupt, or because an election was stopped).
    """

    result: str
    waited: float  #: seconds from the call of acquire()


@dataclass(frozen=True, slots=True)
class Renewed(Event):
    """A renewal was acknowledged, and the lease is now proven until ``valid_until``."""

    valid_until: float
    ttl: float  #: seconds granted
    slack: float  #: seconds for which the lease would have stayed valid without this renewal
    took: float  #: seconds from the request to its reply


@dataclass(frozen=True, slots=True)
class RenewFailed(Event):
    """A renewal had no reply, or was refused. It is tried again."""

    message: str


@dataclass(frozen=True, slots=True)
class AtRisk(Event):
    """A renewal failed or is late. The lease is lost at ``lost_at``, unless a renewal is acknowledged before."""

    lost_at: float


@dataclass(frozen=True, slots=True)
class Lost(Event):
    """The lease ended without being released. ``held_for`` is the number of seconds from the grant to the loss."""

    loss: Loss
    held_for: float


@dataclass(frozen=True, slots=True)
class Released(Event):
    """The holder released the lock. ``at`` is the time of the call of release(), and ``held_for`` the number of seconds
    from the grant until then."""

    held_for: float


@dataclass(frozen=True, slots=True)
class Elected(Event):
    """This node is the leader now. ``term`` is the fencing token of its leadership."""

    identity: str
    term: int | None


@dataclass(frozen=True, slots=True)
class LeaderChanged(Event):
    """The leader has changed. ``leader`` is the new one, or None if nobody leads."""

    leader: LeaderInfo | None


@dataclass(frozen=True, slots=True)
class PushesDown(Event):
    """``connection`` has failed: waiters poll, and losses are noticed by renewals. The event's ``name`` is empty."""

    connection: str
    trouble: str


@dataclass(frozen=True, slots=True)
class PushesUp(Event):
    """``connection`` works again. The event's ``name`` is empty."""

    connection: str
