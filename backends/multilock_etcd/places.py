"""Where each claim of this client stands, and which were given up."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from multilock import system
from multilock.backend import Claim
from multilock_etcd.sessions import Session

__all__ = ["REMEMBERED", "Place", "Places"]

REMEMBERED = 600.0  # seconds for which a cancel counts; no request lies longer in a buffer of a connection now closed


class Place:
    """Where a claim stands. ``lease``: a request that puts its key there may have been executed. ``revision``: of its
    key, once seen. ``pushed``: its claim was told that it is first, and may believe so at any moment."""

    __slots__ = ("cancelled", "claim", "lease", "pushed", "revision", "session")

    def __init__(self, claim: Claim) -> None:
        self.claim = claim
        self.session: Session | None = None
        self.lease: int | None = None
        self.revision: int | None = None
        self.pushed = False
        self.cancelled = False


class Places:
    """``lock`` is held while a `Place` changes: whoever cancels its claim then knows on which lease a request that
    names the claim may be, and that none will be sent."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.lock = system.Lock()
        self._now = now
        self._places: dict[str, Place] = {}  # by claim id
        self._cancelled: dict[str, float] = {}  # claim id -> when it may be forgotten; in that order
        self._rests: dict[str, Hashable] = {}  # of those the claims that are to rest, and their lease until they do

    def enter(self, claim: Claim) -> Place | None:
        """None: it was cancelled, and this very attempt comes late."""
        with self.lock:
            return None if claim.id in self._cancelled else self._places.setdefault(claim.id, Place(claim))

    def cancel(self, claim: Claim, unsure: bool) -> Place:
        """With ``lock`` held. An attempt that runs now in another thread sends nothing more; if ``unsure``, none that
        begins later does."""
        place = self._places.get(claim.id) or Place(claim)
        place.cancelled = True
        if unsure:
            self._forget_old()
            self._cancelled[claim.id] = self._now() + REMEMBERED
        return place

    def will_rest(self, claim: Claim, lease: Hashable) -> None:
        """With ``lock`` held. It is cancelled, and its key on this lease is to keep the name."""
        self._rests[claim.id] = lease

    def may_rest(self, claim: Claim) -> bool:
        return claim.id in self._rests

    def given_back(self, claim: Claim) -> None:
        with self.lock:
            self._places.pop(claim.id, None)
            if claim.id in self._rests:
                self._rests[claim.id] = None

    def forget(self, claim: Claim, place: Place) -> None:
        """Nothing of it is at the server, nor will be."""
        with self.lock:
            if self._places.get(claim.id) is place and not place.cancelled:
                del self._places[claim.id]

    def left(self) -> tuple[list[Place], set[Hashable]]:
        """What was not given back, and the leases of claims that could not be told to rest."""
        unheard = {claim_id: lease for claim_id, lease in self._rests.copy().items() if lease}
        places = [place for id_, place in self._places.copy().items() if id_ not in unheard]
        return places, set(unheard.values())

    def _forget_old(self) -> None:
        now = self._now()
        while self._cancelled and next(iter(self._cancelled.values())) < now:
            oldest = next(iter(self._cancelled))
            del self._cancelled[oldest]
            self._rests.pop(oldest, None)
