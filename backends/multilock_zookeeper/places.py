"""Where each claim of this client stands, and which were given up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from multilock import system
from multilock.backend import Claim

__all__ = ["Place", "Places"]

REMEMBERED = 600.0  # seconds for which a cancelled id is refused


class Place:
    """Where a claim stands. ``unsure``: a create was sent, and whether its node exists is not known."""

    __slots__ = ("cancelled", "end", "first_at", "listed_at", "path", "session", "token", "unsure", "value")

    def __init__(self) -> None:
        self.path: str | None = None
        self.session: int | None = None  # that owns the node at the path
        self.token: int | None = None
        self.listed_at = 0.0  # sending of the newest listing …
        self.first_at: float | None = None  # … and of the one that showed us first
        self.end: int | None = None  # the deletion that is planned then
        self.value = b""
        self.unsure = False
        self.cancelled = False

    @property
    def parent(self) -> str:
        """Of our node and its rivals."""
        assert self.path is not None
        return self.path.rpartition("/")[0]

    def settle(self, path: str, stat: Any) -> None:
        """Our node was seen there. The transaction that created it is the fencing token."""
        self.path, self.session, self.token, self.unsure = path, stat.ephemeralOwner, stat.czxid, False


class Places:
    """``lock`` is held while a request that names a claim is sent, or while its `Place` changes: whoever cancels the
    claim then knows whether such a request was sent, and that none will be."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.lock = system.Lock()
        self.of: dict[str, Place] = {}  # by claim id
        self._now = now
        self._cancelled: dict[str, float] = {}  # claim id -> when it may be forgotten; in that order

    def enter(self, claim: Claim) -> Place | None:
        """None: it was cancelled, and this very attempt comes late."""
        with self.lock:
            return None if claim.id in self._cancelled else self.of.setdefault(claim.id, Place())

    def cancel(self, claim: Claim, unsure: bool) -> Place:
        """With ``lock`` held. An attempt that runs now in another thread sends nothing more; if ``unsure``, none that
        begins later does."""
        place = self.of.get(claim.id) or Place()
        place.cancelled = True
        if unsure:
            self._forget_old()
            self._cancelled[claim.id] = self._now() + REMEMBERED
        return place

    def given_back(self, claim: Claim, place: Place) -> None:
        with self.lock:
            place.unsure = False
            self.of.pop(claim.id, None)

    def forget(self, claim: Claim, place: Place) -> None:
        """Nothing of it is at the server."""
        with self.lock:
            if self.of.get(claim.id) is place and not place.cancelled:
                del self.of[claim.id]

    def _forget_old(self) -> None:
        now = self._now()
        while self._cancelled and next(iter(self._cancelled.values())) < now:
            del self._cancelled[next(iter(self._cancelled))]
