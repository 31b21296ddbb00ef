"""The state of each claim of this client: its lease, its key, and whether it was cancelled.

A lease here is a lease of etcd: the server deletes the claim's key when the lease ends. A released claim *rests* while
hold_at_least keeps its name taken.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from itertools import islice

from multilock import system
from multilock.backend import Claim, Granted
from multilock.timing import LATE_REQUEST_IN_SESSION
from multilock_etcd import transactions
from multilock_etcd.keys import EtcdKeyspace
from multilock_etcd.sessions import EtcdSession

__all__ = ["Waiter", "Waiters"]


class Waiter:
    """The state of one claim, from its first request until its release was answered.

    ``lease`` is set before a request that puts the claim's key on that lease is sent. ``revision`` is the revision of
    the key, or None until a reply has shown it. ``behind`` has the keys that the claim watches while it is far behind,
    with their create_revisions. ``position`` is set when the claim enters a `Queue`. ``pushed`` is set once the watch
    has admitted the claim, so that its owner may believe that it holds the name.
    """

    __slots__ = (
        "attempting",
        "behind",
        "cancelled",
        "claim",
        "lease",
        "own",
        "position",
        "pushed",
        "revision",
        "session",
    )

    position: transactions.Position

    def __init__(self, claim: Claim, own: bytes) -> None:
        self.claim = claim
        self.own = own  # the key of the claim
        self.session: EtcdSession | None = None
        self.lease: int | None = None
        self.revision: int | None = None
        self.behind: Mapping[bytes, int] = {}
        self.pushed = False
        self.cancelled = False
        self.attempting = system.Lock()  # held by the one attempt that runs

    def granted(self) -> Granted:
        """Return the grant for the claim's key."""
        assert self.session is not None
        return self.session.granted(self.revision)


class Waiters:
    """All claims of this client that may have a key or a lease at the server.

    A `Waiter` changes only with ``lock`` held. So a thread that cancels a claim knows every lease that a request of the
    claim names, and no further request is sent.
    """

    def __init__(self, keys: EtcdKeyspace, now: Callable[[], float]) -> None:
        self.lock = system.Lock()
        self._keys = keys
        self._now = now
        self._waiters: dict[str, Waiter] = {}  # by claim id
        self._cancelled: dict[str, float] = {}  # claim id -> when it may be forgotten; earliest first
        # Cancelled claims whose name must stay taken -> the lease of their key, or None once the server has moved the
        # key.
        self._rests: dict[str, Hashable] = {}
        # Name -> its waiting exclusive claims, in the order in which the server told them to wait.
        self._queued: dict[str, dict[str, Waiter]] = {}

    def enter(self, claim: Claim) -> Waiter | None:
        """Return the waiter of the claim, or None if the claim was cancelled before this attempt began."""
        with self.lock:
            if claim.id in self._cancelled:
                return None
            return self._waiters.get(claim.id) or self._waiters.setdefault(claim.id, self._new(claim))

    def has(self, waiter: Waiter) -> bool:
        """Return whether the claim still uses this waiter. Returns False if an earlier attempt has dropped the waiter,
        and the claim was not cancelled."""
        with self.lock:
            return waiter.cancelled or self._waiters.get(waiter.claim.id) is waiter

    def cancel(self, claim: Claim, unsure: bool) -> Waiter:
        """Mark the claim as cancelled. The caller holds ``lock``.

        An attempt that runs in another thread sends no further request. If ``unsure`` is True, an attempt that begins
        later sends nothing either.
        """
        waiter = self._waiters.get(claim.id) or self._new(claim)
        waiter.cancelled = True
        self._leave_queue(waiter)
        if unsure:
            self._forget_old()
            self._cancelled[claim.id] = self._now() + LATE_REQUEST_IN_SESSION
        return waiter

    def waits(self, waiter: Waiter) -> None:
        """Record that the claim waits, so that later claims of this client may wait behind it."""
        if waiter.claim.mode == "x":
            with self.lock:
                if not waiter.cancelled:
                    self._queued.setdefault(waiter.claim.name, {})[waiter.claim.id] = waiter

    def behind(self, claim: Claim) -> dict[bytes, int]:
        """Return a key of this client for which the claim has to wait, and its create_revision. Returns an empty
        mapping unless more than `NEAR` claims of this client wait.

        When the returned key is gone, at most `NEAR` keys should be left ahead of the claim. The queue may also have
        keys of joins without a reply. So this chooses the key that is half of `NEAR` from the end of the known queue.
        """
        if claim.name not in self._queued:
            return {}
        with self.lock:
            queued = self._queued.get(claim.name, {})
            if len(queued) > transactions.NEAR:
                for waiter in islice(reversed(queued.values()), transactions.NEAR // 2, None):
                    if waiter.revision and waiter.claim.id != claim.id:
                        return {waiter.own: waiter.revision}
        return {}

    def will_rest(self, claim: Claim, lease: Hashable) -> None:
        """Record that this cancelled claim's key, on this lease, must keep the name taken. The caller holds
        ``lock``."""
        self._rests[claim.id] = lease

    def may_rest(self, claim: Claim) -> bool:
        """Return whether a `rest` was sent for this claim. A later release must find out whether that `rest` has moved
        the key."""
        return claim.id in self._rests

    def given_back(self, claim: Claim) -> None:
        """Drop the waiter of a claim whose release or rest was answered."""
        with self.lock:
            self._waiters.pop(claim.id, None)
            if claim.id in self._rests:
                self._rests[claim.id] = None

    def forget(self, waiter: Waiter) -> None:
        """Drop a waiter that has no key at the server and sends no further request."""
        with self.lock:
            if self._waiters.get(waiter.claim.id) is waiter and not waiter.cancelled:
                del self._waiters[waiter.claim.id]
                self._leave_queue(waiter)

    def left(self) -> tuple[list[Waiter], set[Hashable]]:
        """Return the waiters that are not released, and the leases of claims whose `rest` had no reply."""
        unheard = {claim_id: lease for claim_id, lease in self._rests.copy().items() if lease}
        waiters = [waiter for id_, waiter in self._waiters.copy().items() if id_ not in unheard]
        return waiters, set(unheard.values())

    def _leave_queue(self, waiter: Waiter) -> None:
        queued = self._queued.get(waiter.claim.name)
        if queued and queued.pop(waiter.claim.id, None) and not queued:
            del self._queued[waiter.claim.name]

    def _new(self, claim: Claim) -> Waiter:
        return Waiter(claim, self._keys.own(claim))

    def _forget_old(self) -> None:
        now = self._now()
        while self._cancelled and next(iter(self._cancelled.values())) < now:
            oldest = next(iter(self._cancelled))
            del self._cancelled[oldest]
            self._rests.pop(oldest, None)
