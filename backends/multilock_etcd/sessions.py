"""The leases of one client: one for all locks of the same ttl, and one of its own for each ``renew=False`` lock.

A lease is asked for under a new id each time, never again under one whose answer was lost: so a lease that has ended
cannot come back by a late grant, and whatever names it later is refused. An unanswered grant leaves a lease without
keys, which ends by itself.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable

from multilock.backend import Notices
from multilock.errors import BackendUnavailable, MultilockError
from multilock.model import Claim, Granted
from multilock_etcd import messages as m
from multilock_etcd.transport import LeaseMissing, Transport, calls

__all__ = ["ENDED", "Session", "Sessions"]

ENDED = "its etcd lease expired or was revoked"
RENEWALS = 3  # in one ttl
REVOKE_WITHIN = 0.5  # seconds; a lease that is not revoked ends by itself


class Session:
    """One lease. ``sent_at`` is when the newest request that was acknowledged to keep it alive was sent."""

    __slots__ = ("lease", "seen_at", "sent_at", "ttl")

    def __init__(self, lease: int, ttl: float, sent_at: float) -> None:
        self.lease = lease
        self.ttl = ttl
        self.sent_at = sent_at
        self.seen_at = 0  # a revision at which it was alive

    def granted(self, revision: int | None) -> Granted:
        """What a key of this revision on this lease is worth now."""
        return Granted(revision, self.ttl, self.sent_at, self.ttl, self.ttl / RENEWALS, self.lease, revision)


class Sessions:
    def __init__(self, transport: Transport, notices: Notices) -> None:
        self._transport = transport
        self._notices = notices
        self._now: Callable[[], float] = notices.now
        self._alive: dict[Hashable, Session] = {}
        self._shared: dict[float, Session] = {}  # by the ttl of the claims
        self._lock = threading.Lock()
        self._granting = threading.Lock()

    def of(self, claim: Claim, within: float) -> Session:
        """The lease for this claim's key; made where there is none. Raises as a request does."""
        if not claim.renew:
            return self._grant(claim.ttl, within)
        session = self._shared.get(claim.ttl)
        if session and not self._is_over(session):
            return session
        deadline = self._now() + within
        if not self._granting.acquire(timeout=max(0.0, within)):
            raise BackendUnavailable(f"{self._transport.name} did not grant a lease in time", unknown=False)
        try:
            return self._renewed_or_new(claim.ttl, deadline)
        finally:
            self._granting.release()

    def keep_alive(self, lease: Hashable, within: float) -> Session | None:
        """Extend this lease. None: the server said that it has ended."""
        session = self._alive.get(lease)
        if session is None:
            return None
        said, sent_at = self._transport.call(calls.KEEP_ALIVE, m.LeaseKeepAliveRequest(ID=session.lease), within)
        if said.TTL <= 0:
            self.end(lease)
            return None
        with self._lock:
            session.ttl = float(said.TTL)
            session.sent_at = max(session.sent_at, sent_at)
        return session

    def is_alive(self, lease: Hashable) -> bool:
        """False only if the server said so."""
        return lease in self._alive

    def leases(self) -> list[Hashable]:
        """Those that are renewed."""
        return [session.lease for session in list(self._shared.values())]

    def look(self, lease: Hashable, revision: int, within: float) -> bool:
        """A key on this lease was deleted at ``revision``. Was it because the lease ended? Then it is ended here."""
        session = self._alive.get(lease)
        if session is None:
            return True
        if session.seen_at >= revision:
            return False
        try:
            said, _ = self._transport.call(calls.TIME_TO_LIVE, m.LeaseTimeToLiveRequest(ID=session.lease), within)
        except MultilockError:
            return False
        if said.TTL <= 0:
            self.end(lease)
            return True
        session.seen_at = said.header.revision
        return False

    def end(self, lease: Hashable) -> None:
        """The server said that this lease has ended, and with it every key on it."""
        shared = any(session.lease == lease for session in list(self._shared.values()))
        if self._forget(lease) and shared:
            self._notices.group_gone(lease, ENDED)

    def revoke(self, session: Session, within: float) -> None:
        """End a lease that nothing needs any more; an answer is not important."""
        if self._forget(session.lease):
            self._try_revoke(session.lease, within)

    def revoke_all(self) -> None:
        for session in list(self._alive.values()):
            self._forget(session.lease)
            if not self._try_revoke(session.lease, REVOKE_WITHIN):
                return

    def _renewed_or_new(self, ttl: float, deadline: float) -> Session:
        session = self._shared.get(ttl)
        if session and self._is_over(session):
            # We did not run for a while. The server may have kept it, or not: it is the one to ask.
            session = self.keep_alive(session.lease, deadline - self._now())
        if session is None:
            session = self._grant(ttl, deadline - self._now())
            self._shared[ttl] = session
            self._notices.group(session.lease, session.ttl, session.ttl / RENEWALS)
        return session

    def _is_over(self, session: Session) -> bool:
        return self._now() >= session.sent_at + session.ttl

    def _grant(self, ttl: float, within: float) -> Session:
        said, sent_at = self._transport.call(calls.GRANT, m.LeaseGrantRequest(TTL=math.ceil(ttl)), within)
        session = Session(said.ID, float(said.TTL), sent_at)
        self._alive[session.lease] = session
        return session

    def _forget(self, lease: Hashable) -> bool:
        with self._lock:
            session = self._alive.pop(lease, None)
            for ttl, shared in list(self._shared.items()):
                if shared is session:
                    del self._shared[ttl]
        return session is not None

    def _try_revoke(self, lease: int, within: float) -> bool:
        try:
            self._transport.call(calls.REVOKE, m.LeaseRevokeRequest(ID=lease), min(within, REVOKE_WITHIN))
        except LeaseMissing:
            return True
        except MultilockError:
            return False
        return True
