"""The state of each claim of this client: its lease, its key, and whether it was cancelled."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from multilock import system
from multilock.backend import Claim
from multilock_etcd.sessions import Session

__all__ = ["REMEMBERED", "Place", "Places"]

# Seconds for which a cancel is remembered. No request survives longer in the buffers of a connection that is closed.
REMEMBERED = 600.0


class Place:
    """The state of one claim.

    ``lease`` is set once a request that puts the claim's key on that lease may have been executed. ``revision`` is the
    revision of the key, once a reply has shown it. ``pushed`` is set once the watch has granted the claim: its owner
    may believe so from then on.
    """

    __slots__ = ("cancelled", "claim", "lease", "pushed", "revision", "session")

    def __init__(self, claim: Claim) -> None:
        self.claim = claim
        self.session: Session | None = None
        self.lease: int | None = None
        self.revision: int | None = None
        self.pushed = False
        self.cancelled = False


class Places:
    """All claims of this client that may have something at the server.

    A `Place` changes only with ``lock`` held. So a thread that cancels a claim finds out which lease a request of that
    claim may have named, and can be sure that no other such request will be sent.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.lock = system.Lock()
        self._now = now
        self._places: dict[str, Place] = {}  # by claim id
        self._cancelled: dict[str, float] = {}  # claim id -> when it may be forgotten; in that order
        # Cancelled claims whose name must stay taken -> the lease of their key, or None once the server has moved it.
        self._rests: dict[str, Hashable] = {}

    def enter(self, claim: Claim) -> Place | None:
        """Return the claim's place, or None if the claim was cancelled before this attempt began."""
        with self.lock:
            return None if claim.id in self._cancelled else self._places.setdefault(claim.id, Place(claim))

    def cancel(self, claim: Claim, unsure: bool) -> Place:
        """Mark the claim as cancelled. The caller holds ``lock``.

        An attempt that runs in another thread sends nothing more. With ``unsure``, attempts that begin later send
        nothing either.
        """
        place = self._places.get(claim.id) or Place(claim)
        place.cancelled = True
        if unsure:
            self._forget_old()
            self._cancelled[claim.id] = self._now() + REMEMBERED
        return place

    def will_rest(self, claim: Claim, lease: Hashable) -> None:
        """Record that this cancelled claim's key, on this lease, must keep the name taken. The caller holds
        ``lock``."""
        self._rests[claim.id] = lease

    def may_rest(self, claim: Claim) -> bool:
        """Return whether this claim was asked to rest, so that a release must look first."""
        return claim.id in self._rests

    def given_back(self, claim: Claim) -> None:
        """Drop the place of a claim whose release or rest was answered."""
        with self.lock:
            self._places.pop(claim.id, None)
            if claim.id in self._rests:
                self._rests[claim.id] = None

    def forget(self, claim: Claim, place: Place) -> None:
        """Drop the place of a claim that has nothing at the server and sends nothing any longer."""
        with self.lock:
            if self._places.get(claim.id) is place and not place.cancelled:
                del self._places[claim.id]

    def left(self) -> tuple[list[Place], set[Hashable]]:
        """Return the places not given back, and the leases of claims whose request to rest had no reply."""
        unheard = {claim_id: lease for claim_id, lease in self._rests.copy().items() if lease}
        places = [place for id_, place in self._places.copy().items() if id_ not in unheard]
        return places, set(unheard.values())

    def _forget_old(self) -> None:
        now = self._now()
        while self._cancelled and next(iter(self._cancelled.values())) < now:
            oldest = next(iter(self._cancelled))
            del self._cancelled[oldest]
            self._rests.pop(oldest, None)
