"""The state of each claim of this client: its node, its session, and whether it was cancelled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from multilock import system
from multilock.backend import Claim
from multilock.timing import LATE_REQUEST_IN_SESSION

__all__ = ["ZkWaiter", "ZkWaiters"]


class ZkWaiter:
    """The state of one claim. ``unsure`` is True while a create has no reply, so that it may have made a node."""

    __slots__ = (
        "attempting",
        "cancelled",
        "end",
        "first_at",
        "listed_at",
        "path",
        "session",
        "token",
        "unsure",
        "value",
    )

    def __init__(self) -> None:
        self.path: str | None = None
        self.session: int | None = None  # the session that owns the node
        self.token: int | None = None
        self.listed_at = 0.0  # when the newest request for a listing was sent
        self.first_at: float | None = None  # when the listing was requested that first showed the claim as a holder
        self.end: int | None = None  # the number of the planned deletion of a node that is not renewed
        self.value = b""
        self.unsure = False
        self.cancelled = False
        self.attempting = system.Lock()  # held by the running attempt

    @property
    def parent(self) -> str:
        """The parent of our node and of its siblings."""
        assert self.path is not None
        return self.path.rpartition("/")[0]

    def settle(self, path: str, stat: Any) -> None:
        """Record our node from a reply. The number of the transaction that created the node is the fencing token."""
        self.path, self.session, self.token, self.unsure = path, stat.ephemeralOwner, stat.czxid, False


class ZkWaiters:
    """All claims of this client that may have a node.

    ``lock`` is held while a request that names a claim is sent, and while its `ZkWaiter` changes. So a thread that
    cancels the claim knows whether a request was sent, and no further request is sent.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.lock = system.Lock()
        self.of: dict[str, ZkWaiter] = {}  # claim id -> the waiter of the claim
        self._now = now
        self._cancelled: dict[str, float] = {}  # claim id -> when it may be forgotten; earliest first

    def enter(self, claim: Claim) -> ZkWaiter | None:
        """Return the claim's waiter, or None if the claim was cancelled before this attempt began."""
        with self.lock:
            return None if claim.id in self._cancelled else self.of.setdefault(claim.id, ZkWaiter())

    def cancel(self, claim: Claim, unsure: bool) -> ZkWaiter:
        """Mark the claim as cancelled. The caller holds ``lock``.

        A running attempt of the claim sends no further request. If ``unsure`` is True, a later attempt sends nothing
        either.
        """
        waiter = self.of.get(claim.id) or ZkWaiter()
        waiter.cancelled = True
        if unsure:
            self._forget_old()
            self._cancelled[claim.id] = self._now() + LATE_REQUEST_IN_SESSION
        return waiter

    def given_back(self, claim: Claim, waiter: ZkWaiter) -> None:
        """Drop the waiter of a claim whose release was answered."""
        with self.lock:
            waiter.unsure = False
            self.of.pop(claim.id, None)

    def forget(self, claim: Claim, waiter: ZkWaiter) -> None:
        """Drop the waiter of a claim that has no node at the server."""
        with self.lock:
            if self.of.get(claim.id) is waiter and not waiter.cancelled:
                del self.of[claim.id]

    def _forget_old(self) -> None:
        now = self._now()
        while self._cancelled and next(iter(self._cancelled.values())) < now:
            del self._cancelled[next(iter(self._cancelled))]
