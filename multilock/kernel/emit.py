"""Send typed events to subscribers. Imported at the first subscription, because most programs never subscribe."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Context, copy_context
from typing import TYPE_CHECKING

from multilock import events

if TYPE_CHECKING:
    from multilock.kernel.holding import Holding
    from multilock.kernel.subscribers import Events
    from multilock.model import LeaderInfo, Loss

__all__ = ["Tell"]


class Tell:
    """The value of `Events.tell` while there are subscribers. Times are seconds on the client's clock."""

    def __init__(self, subscribers: Events, now: Callable[[], float]) -> None:
        self._to = subscribers
        self._now = now

    def waiting(self, name: str, owner: str | None) -> None:
        """Report that an acquire waits."""
        self._to.emit(events.Waiting(name, owner, self._now()))

    def acquired(self, lease: Holding, started: float) -> None:
        """Report that an acquire that began at ``started`` got the lock."""
        now = self._now()
        lease.context = copy_context()
        self._emit(events.Acquired(lease.name, lease.owner, now, lease.token, now - started), lease.context)

    def not_acquired(self, name: str, result: str, started: float) -> None:
        """Report that an acquire that began at ``started`` ended without the lock."""
        now = self._now()
        self._emit(events.NotAcquired(name, None, now, result, now - started), copy_context())

    def renewed(self, lease: Holding, now: float, slack: float, sent_at: float) -> None:
        """Report that a renewal was sent at ``sent_at``, and was acknowledged when ``slack`` seconds were left until
        the deadline."""
        event = events.Renewed(lease.name, lease.owner, now, lease.valid_until, lease.ttl, slack, now - sent_at)
        self._emit(event, lease.context)

    def renew_failed(self, lease: Holding, error: Exception) -> None:
        """Report that a renewal failed or was not answered."""
        self._emit(events.RenewFailed(lease.name, lease.owner, self._now(), str(error)), lease.context)

    def at_risk(self, lease: Holding) -> None:
        """Report that a lease became AT_RISK."""
        self._emit(events.AtRisk(lease.name, lease.owner, self._now(), lease.lost_at), lease.context)

    def lost(self, lease: Holding, loss: Loss) -> None:
        """Report that a lease was lost."""
        held_for = loss.detected_at - lease.granted_at
        self._emit(events.Lost(lease.name, lease.owner, loss.detected_at, loss, held_for), lease.context)

    def released(self, lease: Holding, released_at: float) -> None:
        """Report that a lease was released by its holder at ``released_at``."""
        event = events.Released(lease.name, lease.owner, released_at, released_at - lease.granted_at)
        self._emit(event, lease.context)

    def elected(self, lease: Holding, identity: str) -> None:
        """Report that this node was elected."""
        self._emit(events.Elected(lease.name, lease.owner, self._now(), identity, lease.token), lease.context)

    def pushes_down(self, connection: str, trouble: str) -> None:
        """Report that a push connection is down."""
        self._to.emit(events.PushesDown("", None, self._now(), connection, trouble))

    def pushes_up(self, connection: str) -> None:
        """Report that a push connection is up again."""
        self._to.emit(events.PushesUp("", None, self._now(), connection))

    def _emit(self, event: events.Event, context: Context | None) -> None:
        if context:
            object.__setattr__(event, "_context", context)
        self._to.emit(event)

    def leader_changed(self, name: str, leader: LeaderInfo | None) -> None:
        """Report that another node leads, or that nobody leads."""
        self._to.emit(events.LeaderChanged(name, None, self._now(), leader))
