"""Sessions: groups of leases that the server keeps alive together, such as an etcd lease with all its locks.

A proof of the session is a proof of every lease in it. If the server cuts the session's ttl, that cuts the validity of
all these leases as well.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from multilock.kernel import validity
from multilock.kernel.holding import HELD, Holding
from multilock.model import Claim, Granted
from multilock.timing import JITTER

if TYPE_CHECKING:
    from multilock.kernel.client import Kernel
    from multilock.kernel.watchdog import Watchdog

__all__ = ["RenewedSession", "RenewedSessions"]


class RenewedSession:
    """One session of a server. A session is renewed even while it has no locks."""

    __slots__ = ("due", "failures", "proof", "renew_every", "ttl", "valid_until")

    def __init__(self, ttl: float, renew_every: float) -> None:
        self.ttl = ttl
        self.renew_every = renew_every
        self.valid_until = math.inf  # the end of the validity of leases that were granted before the server cut the ttl
        self.proof: Granted | None = None  # the newest proof that a renewal gave to the leases
        self.due = 0.0
        self.failures = 0

    def proved(self, granted: Granted) -> Granted:
        """Return the grant, with the session's newest proof if that is newer than the grant's."""
        if self.proof is None or self.proof.sent_at <= granted.sent_at:
            return granted
        return granted._replace(sent_at=self.proof.sent_at, valid_for=self.proof.valid_for)

    def cut(self, granted: Granted) -> Granted:
        """Return the grant, shortened if the server made the grant before it cut the session's ttl.

        Such a grant may arrive after the notice of the cut.
        """
        if granted.renew_every <= self.renew_every:
            return granted
        return granted._replace(
            ttl=min(granted.ttl, self.ttl),
            valid_for=min(granted.valid_for, self.valid_until - granted.sent_at),
            renew_every=self.renew_every,
        )


class RenewedSessions:
    """The sessions of one client. Each session is renewed by a separate timer."""

    def __init__(self, kernel: Kernel, watchdog: Watchdog) -> None:
        self._kernel = kernel
        self._watchdog = watchdog
        self.of: dict[Hashable, RenewedSession] = {}  # the sessions, by group

    def as_known(self, claim: Claim, granted: Granted) -> Granted:
        """Return the grant, updated if its session received a newer proof or a shorter ttl while the grant was on its
        way. The caller holds the kernel's lock."""
        session = self.of.get(granted.group)
        if session is None:
            return granted
        granted = session.cut(granted)
        return session.proved(granted) if claim.renew else granted

    def add(self, group: Hashable, ttl: float, renew_every: float) -> None:
        """Renew this session from now on, every ``renew_every`` seconds."""
        session = self.of[group] = RenewedSession(ttl, renew_every)
        self._plan(group, session, renew_every * self._kernel.runtime.uniform(1 - JITTER, 1.0))

    def shorten(self, group: Hashable, ttl: float, valid_until: float, renew_every: float) -> float | None:
        """See `multilock.backend.Notices.shortened`. Returns the former ttl, or None if nothing becomes shorter."""
        kernel = self._kernel
        due = math.inf
        with kernel.lock:
            session = self.of.get(group)
            if session is None or ttl >= session.ttl:
                return None
            before = session.ttl
            session.ttl, session.valid_until, session.renew_every = ttl, valid_until, renew_every
            session.proof = None  # the proof was computed with the former ttl
            for lease in kernel.leases_of(group):
                if lease.stage != HELD:
                    continue
                failures = lease.schedule.failures
                lease._accept(session.cut(lease.granted))
                # The number of failures is kept, because a shorter ttl proves nothing about the failed renewals.
                lease.schedule.failures = failures
                due = min(due, self._watchdog.plan(lease))
        kernel.poke(due)
        self.hurry(group)
        return before

    def drop(self, group: Hashable) -> bool:
        """Stop renewing this session. Returns False if ``group`` is not a session."""
        session = self.of.pop(group, None)
        self._watchdog.threads.dismiss(group)
        return session is not None

    def ttl(self, group: Hashable) -> float:
        """Return the ttl that the server granted this session, or 0.0 if ``group`` is not a session."""
        session = self.of.get(group)
        return session.ttl if session else 0.0

    def renews(self, group: Hashable | None) -> bool:
        """Return whether this session is renewed. If ``group`` is None, return whether any session is renewed."""
        return group in self.of if group is not None else bool(self.of)

    def hurry(self, group: Hashable) -> bool:
        """Renew this session at once. Returns False if ``group`` is not a session."""
        session = self.of.get(group)
        if session is not None:
            self._plan(group, session, 0.0)
        return session is not None

    def _plan(self, group: Hashable, session: RenewedSession, pause: float) -> None:
        """Plan the next renewal. A later call replaces this plan."""
        when = session.due = self._kernel.now() + pause

        def due() -> None:
            if session.due == when and self.of.get(group) is session:
                self._watchdog.threads.carry(group, lambda: self._renew(group, session))

        self._kernel.timers.at(when, due)

    def _renew(self, group: Hashable, session: RenewedSession) -> None:
        """Renew the session. The timeout ends before the last deadline of its leases, not before the first.

        Otherwise a lease near its end (renew=False, or an older proof) would shorten the timeout of all other leases.
        """
        kernel = self._kernel
        leases = [lease for lease in kernel.leases_of(group) if lease._alive()]
        within = kernel.request_timeout(session.ttl)
        if renewed := [lease.expires_at for lease in leases if lease.claim.renew]:
            within = min(within, max(renewed) - kernel.now())
        error = self._watchdog.request(group, leases, within)
        if self.of.get(group) is not session:
            return
        if not error:
            self._prove(group, session, leases)
        session.failures = session.failures + 1 if error else 0
        jitter = kernel.runtime.uniform(1 - JITTER, 1 + JITTER)
        pause = session.renew_every * jitter if not error else validity.retry_in(session.failures, session.ttl, jitter)
        self._plan(group, session, pause)

    def _prove(self, group: Hashable, session: RenewedSession, renewed: Sequence[Holding]) -> None:
        """Give the new proof of the session to leases that were granted while the renewal was under way.

        Otherwise these leases would count from the previous proof, which is two periods old when the next renewal is
        answered. They could then be lost if many keys or a slow network delay that answer.
        """
        kernel = self._kernel
        due = math.inf
        with kernel.lock:
            proofs = [lease.granted for lease in renewed if lease.claim.renew and lease.stage == HELD]
            if not proofs:
                return
            session.proof = max(proofs, key=lambda granted: granted.sent_at)
            known = set(map(id, renewed))  # a lease in `renewed` that got no proof must not get one here
            for lease in kernel.leases_of(group):
                if id(lease) in known or not lease.claim.renew or lease.stage != HELD:
                    continue
                proved = session.proved(lease.granted)
                if proved is not lease.granted and kernel.now() < lease.lost_at:
                    lease._accept(proved)
                    due = min(due, self._watchdog.plan(lease))
        if due < math.inf:
            kernel.poke(due)
