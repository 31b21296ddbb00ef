"""The leases of one client: one for all locks of the same ttl, and one of its own for each ``renew=False`` lock.

A lease is asked for under a new id each time, never again under one whose answer was lost: so a lease that has ended
cannot come back by a late grant, and whatever names it later is refused. An unanswered grant leaves a lease without
keys, which ends by itself.

The lease of a name that rests is not among them: nobody renews it, and no end of ours revokes it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Container, Hashable
from contextlib import suppress

from multilock import BackendRejected, BackendUnavailable, MultilockError, system
from multilock.backend import Claim, Granted, Notices
from multilock_etcd import wire
from multilock_etcd.transport import LeaseMissing, Transport, calls

__all__ = ["ACKNOWLEDGES_NOTHING", "ENDED", "RENEWALS", "REVOKE_WITHIN", "Session", "Sessions"]

ENDED = "its etcd lease expired or was revoked"
RENEWALS = 3  # in one ttl
ACKNOWLEDGES_NOTHING = "UNKNOWN: context canceled"  # as an etcd grpc-proxy answers a renewal
REVOKE_WITHIN = 0.5  # seconds for one lease


class Session:
    """One lease. ``sent_at`` is when the newest request that was acknowledged to keep it alive was sent."""

    __slots__ = ("lease", "seen_at", "sent_at", "ttl", "turn")

    def __init__(self, lease: int, ttl: float, sent_at: float) -> None:
        self.lease = lease
        self.ttl = ttl
        self.sent_at = sent_at
        self.seen_at = 0  # a revision at which it was alive
        self.turn = 0  # of its keys that no watch covers, the one to begin the next look with

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
        self._unwanted: deque[int] = deque()  # leases without keys whose revocation had no answer
        self._lock = system.Lock()
        self._granting = system.Lock()
        self._acknowledges = False  # the server, renewals: it has

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
        said, sent_at = self._transport.call(calls.KEEP_ALIVE, wire.LeaseKeepAliveRequest(ID=session.lease), within)
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
            said, _ = self._transport.call(calls.TIME_TO_LIVE, wire.LeaseTimeToLiveRequest(ID=session.lease), within)
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
        """End a lease that nothing needs any more. Without an answer it is done with the next one."""
        if not self._forget(session.lease):
            return
        deadline = self._now() + min(within, REVOKE_WITHIN)
        if not self._try_revoke(session.lease, deadline):
            self._unwanted.append(session.lease)
        elif self._unwanted:
            with suppress(IndexError):  # another thread may have taken it
                old = self._unwanted.popleft()
                if not self._try_revoke(old, deadline):
                    self._unwanted.append(old)

    def new_rest(self, seconds: float, within: float) -> tuple[int, float]:
        """A lease that keeps a name for so long, and for how long it really does, at least."""
        said, _ = self._transport.call(calls.GRANT, wire.LeaseGrantRequest(TTL=math.ceil(seconds)), within)
        return said.ID, float(said.TTL)

    def end_rest(self, lease: int, within: float) -> None:
        """If it cannot be told, the server ends it in its time."""
        self._try_revoke(lease, self._now() + min(within, REVOKE_WITHIN))

    def revoke_all(self, deadline: float, keep: Container[Hashable] = ()) -> None:
        """Those first that many locks live on. What there is no time for ends by itself, and so does ``keep``."""
        shared = list(self._shared.values())
        leases = [session.lease for session in [*shared, *self._alive.copy().values()]]
        self._shared.clear()
        self._alive.clear()
        for lease in dict.fromkeys([*leases, *self._unwanted]):
            if lease not in keep and not self._try_revoke(lease, deadline):
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
        said, sent_at = self._transport.call(calls.GRANT, wire.LeaseGrantRequest(TTL=math.ceil(ttl)), within)
        session = Session(said.ID, float(said.TTL), sent_at)
        self._alive[session.lease] = session
        if not self._acknowledges:
            self._check(session, sent_at + within)
        return session

    def _check(self, session: Session, deadline: float) -> None:
        """Once, before anything is held: an etcd grpc-proxy ends the stream of a renewal unanswered, and so every lock
        would be lost after its first ttl. (Where it answers, the answer may be to an earlier renewal of its own.) At
        most half of the time is used: the request to come needs the rest."""
        try:
            self.keep_alive(session.lease, (deadline - self._now()) / 2)
        except BackendUnavailable as silence:
            if ACKNOWLEDGES_NOTHING not in str(silence):
                return  # silence is the business of the request to come, and of the renewals
            self.revoke(session, deadline - self._now())
            raise BackendRejected(
                f"{self._transport.name} acknowledges no renewal, as an etcd grpc-proxy does not: "
                "name the members of the cluster in the URL"
            ) from silence
        self._acknowledges = True

    def _forget(self, lease: Hashable) -> bool:
        with self._lock:
            session = self._alive.pop(lease, None)
            for ttl, shared in list(self._shared.items()):
                if shared is session:
                    del self._shared[ttl]
        return session is not None

    def _try_revoke(self, lease: int, deadline: float) -> bool:
        try:
            self._transport.call(calls.REVOKE, wire.LeaseRevokeRequest(ID=lease), deadline - self._now())
        except LeaseMissing:
            return True
        except MultilockError:
            return False
        return True
