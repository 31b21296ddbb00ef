"""The leases of one client: one for all locks of the same ttl, and a separate one for each ``renew=False`` lock.

Each request for a lease uses a new id. So a grant that is executed late cannot revive a lease that has ended. A grant
without a reply leaves a lease without keys, which expires.

The lease by which hold_at_least keeps a name taken is not one of these: it is not renewed, and `revoke_all` does not
revoke it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Container, Hashable
from contextlib import suppress

from multilock import BackendRejected, BackendUnavailable, MultilockError, system
from multilock.backend import Claim, Granted, Notices
from multilock.timing import RENEWALS
from multilock_etcd import wire
from multilock_etcd.transport import EtcdTransport, LeaseMissing, NotAcknowledged, calls

__all__ = ["ENDED", "REVOKE_WITHIN", "EtcdSession", "EtcdSessions"]

ENDED = "its etcd lease expired or was revoked"
REVOKE_WITHIN = 0.5  # seconds that the revocation of one lease may take


class EtcdSession:
    """One lease. ``sent_at`` is the time at which the newest acknowledged grant or keep-alive was sent."""

    __slots__ = ("lease", "seen_at", "sent_at", "ttl", "turn")

    def __init__(self, lease: int, ttl: float, sent_at: float) -> None:
        self.lease = lease
        self.ttl = ttl
        self.sent_at = sent_at
        self.seen_at = 0  # the newest revision at which the server reported the lease alive
        self.turn = 0  # index of the first key that the next renewal reads

    def granted(self, revision: int | None) -> Granted:
        """Return the grant for the key with this revision on this lease."""
        return Granted(revision, self.ttl, self.sent_at, self.ttl, self.ttl / RENEWALS, self.lease, revision)


class EtcdSessions:
    """The leases of one client. See the module's docstring for why no id is used twice."""

    def __init__(self, transport: EtcdTransport, notices: Notices) -> None:
        self._transport = transport
        self._notices = notices
        self._now: Callable[[], float] = notices.now
        self._alive: dict[Hashable, EtcdSession] = {}
        self._shared: dict[float, EtcdSession] = {}  # the sessions, by the ttl of their claims
        self._unwanted: deque[int] = deque()  # leases without keys whose revocation got no reply
        self._lock = system.Lock()
        self._granting = system.Lock()
        self._acknowledges = False  # whether the server has acknowledged a renewal yet

    def of(self, claim: Claim, within: float) -> EtcdSession:
        """Return the lease for this claim's key. If there is none, a new lease is granted. Raises the errors of a
        request."""
        if not claim.renew:
            return self._grant(claim.ttl, within)
        session = self._shared.get(claim.ttl)
        if session and not self._is_over(session):
            return session
        deadline = self._now() + within
        with system.Taking(self._granting, within, self._not_granted):
            return self._renewed_or_new(claim.ttl, deadline)

    def keep_alive(self, lease: Hashable, within: float) -> EtcdSession | None:
        """Extend this lease. Returns None if the server has reported that the lease ended."""
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
        """Return False only if the server has reported that the lease ended."""
        return lease in self._alive

    def leases(self) -> list[Hashable]:
        """Return the ids of the leases that are renewed."""
        return [session.lease for session in list(self._shared.values())]

    def look(self, lease: Hashable, revision: int, within: float) -> bool:
        """Return whether the lease has ended, after a key on it was deleted at ``revision``.

        If the server confirms that the lease has ended, this client forgets the lease. Returns False if the server does
        not reply.
        """
        session = self._alive.get(lease)
        if session is None:
            return True
        if session.seen_at >= revision:
            return False
        try:
            said, _ = self._transport.call(calls.TIME_TO_LIVE, wire.LeaseTimeToLiveRequest(ID=session.lease), within)
        except MultilockError:
            return False
        if said.TTL < 0:  # 0 means the last second of a lease, because the server rounds down
            self.end(lease)
            return True
        session.seen_at = said.header.revision
        return False

    def end(self, lease: Hashable) -> None:
        """Drop a lease that the server has ended, and report that to the kernel."""
        shared = any(session.lease == lease for session in list(self._shared.values()))
        if self._forget(lease) and shared:
            self._notices.group_gone(lease, ENDED)

    def revoke(self, session: EtcdSession, within: float) -> None:
        """Revoke a lease that no claim needs any longer. If the reply is lost, a later call tries again."""
        if not self._forget(session.lease):
            return
        deadline = self._now() + min(within, REVOKE_WITHIN)
        if not self._try_revoke(session.lease, deadline):
            self._unwanted.append(session.lease)
        elif self._unwanted:
            with suppress(IndexError):  # another thread may have taken the last lease
                old = self._unwanted.popleft()
                if not self._try_revoke(old, deadline):
                    self._unwanted.append(old)

    def new_rest(self, seconds: float, within: float) -> tuple[int, float]:
        """Grant a lease that keeps a name taken for ``seconds``. Returns its id and the ttl that the server granted."""
        said, _ = self._transport.call(calls.GRANT, wire.LeaseGrantRequest(TTL=math.ceil(seconds)), within)
        return said.ID, float(said.TTL)

    def end_rest(self, lease: int, within: float) -> None:
        """Revoke a lease that `new_rest` made. If the request fails, the lease expires at the end of its ttl."""
        self._try_revoke(lease, self._now() + min(within, REVOKE_WITHIN))

    def revoke_all(self, deadline: float, keep: Container[Hashable] = ()) -> None:
        """Revoke all leases except ``keep``, until the deadline. Leases not revoked by then expire. Shared leases come
        first, because many locks depend on them."""
        shared = list(self._shared.values())
        leases = [session.lease for session in [*shared, *self._alive.copy().values()]]
        self._shared.clear()
        self._alive.clear()
        for lease in dict.fromkeys([*leases, *self._unwanted]):
            if lease not in keep and not self._try_revoke(lease, deadline):
                return

    def _renewed_or_new(self, ttl: float, deadline: float) -> EtcdSession:
        session = self._shared.get(ttl)
        if session and self._is_over(session):
            # This process was paused, so ask the server whether the lease still exists.
            session = self.keep_alive(session.lease, deadline - self._now())
        if session is None:
            session = self._grant(ttl, deadline - self._now())
            self._shared[ttl] = session
            self._notices.group(session.lease, session.ttl, session.ttl / RENEWALS)
        return session

    def _not_granted(self) -> BackendUnavailable:
        return BackendUnavailable(f"{self._transport.name} did not grant a lease in time", unknown=False)

    def _is_over(self, session: EtcdSession) -> bool:
        return self._now() >= session.sent_at + session.ttl

    def _grant(self, ttl: float, within: float) -> EtcdSession:
        said, sent_at = self._transport.call(calls.GRANT, wire.LeaseGrantRequest(TTL=math.ceil(ttl)), within)
        session = EtcdSession(said.ID, float(said.TTL), sent_at)
        self._alive[session.lease] = session
        if not self._acknowledges:
            self._check(session, sent_at + within)
        return session

    def _check(self, session: EtcdSession, deadline: float) -> None:
        """Check once, before any lock is held, that renewals are acknowledged.

        An etcd grpc-proxy ends a renewal without a reply, or replies with the result of an older renewal, so every lock
        would be lost after its first ttl. The check takes at most half of the time.
        """
        try:
            self.keep_alive(session.lease, (deadline - self._now()) / 2)
        except BackendUnavailable as silence:
            if not isinstance(silence, NotAcknowledged):
                return  # the next request deals with a server that does not reply
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
