"""Sessions: groups of leases that live and are renewed as one, as a server's lease or session with all its locks does.

A proof of the session is one of everything granted in it; so is a cut of its ttl.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from multilock.kernel import validity
from multilock.kernel.holding import HELD, Holding
from multilock.model import Claim, Granted

if TYPE_CHECKING:
    from multilock.kernel.core import Kernel
    from multilock.kernel.watchdog import Watchdog

__all__ = ["Session", "Sessions"]


class Session:
    """A group that is renewed as one: a server's session or lease with all its locks, also when it has none."""

    __slots__ = ("due", "failures", "proof", "renew_every", "ttl", "valid_until")

    def __init__(self, ttl: float, renew_every: float) -> None:
        self.ttl = ttl
        self.renew_every = renew_every
        self.valid_until = math.inf  # of what was granted before the server cut the ttl, if it did
        self.proof: Granted | None = None  # as the last renewal gave it to its leases
        self.due = 0.0
        self.failures = 0

    def proved(self, granted: Granted) -> Granted:
        """A grant that counts from an older proof than a renewal has brought since."""
        if self.proof is None or self.proof.sent_at <= granted.sent_at:
            return granted
        return granted._replace(sent_at=self.proof.sent_at, valid_for=self.proof.valid_for)

    def cut(self, granted: Granted) -> Granted:
        """A grant of before the cut, which may come after it, for as long as it is worth since."""
        if granted.renew_every <= self.renew_every:
            return granted
        return granted._replace(
            ttl=min(granted.ttl, self.ttl),
            valid_for=min(granted.valid_for, self.valid_until - granted.sent_at),
            renew_every=self.renew_every,
        )


class Sessions:
    """Those of one client, each renewed by a timer of its own, also while nothing is held in it."""

    def __init__(self, kernel: Kernel, watchdog: Watchdog) -> None:
        self._kernel = kernel
        self._watchdog = watchdog
        self.of: dict[Hashable, Session] = {}  # a group

    def as_known(self, claim: Claim, granted: Granted) -> Granted:
        """Under the kernel's lock: a grant, with what became known of its session while it was under way."""
        session = self.of.get(granted.group)
        if session is None:
            return granted
        granted = session.cut(granted)
        return session.proved(granted) if claim.renew else granted

    def add(self, group: Hashable, ttl: float, renew_every: float) -> None:
        session = self.of[group] = Session(ttl, renew_every)
        self._plan(group, session, renew_every * self._kernel.runtime.uniform(0.9, 1.0))

    def shorten(self, group: Hashable, ttl: float, valid_until: float, renew_every: float) -> float | None:
        """See `multilock.backend.Notices.shortened`. The ttl that it had until now."""
        kernel = self._kernel
        due = math.inf
        with kernel.lock:
            session = self.of.get(group)
            if session is None or ttl >= session.ttl:
                return None
            before = session.ttl
            session.ttl, session.valid_until, session.renew_every = ttl, valid_until, renew_every
            session.proof = None  # it was reckoned under the ttl of before
            for lease in kernel.leases_of(group):
                if lease._state != HELD:
                    continue
                failures = lease._failures
                lease._accept(session.cut(lease._granted))
                lease._failures = failures  # it proves nothing
                due = min(due, self._watchdog.plan(lease))
        kernel.poke(due)
        self.hurry(group)
        return before

    def drop(self, group: Hashable) -> bool:
        """Renew it no longer. Returns False if it is not a session."""
        session = self.of.pop(group, None)
        self._watchdog.dismiss(group)
        return session is not None

    def ttl(self, group: Hashable) -> float:
        """What the server granted this session, which may be more than was asked for. 0: it is not a session."""
        session = self.of.get(group)
        return session.ttl if session else 0.0

    def renews(self, group: Hashable | None) -> bool:
        """Whether this session is kept alive; None: any of them."""
        return group in self.of if group is not None else bool(self.of)

    def hurry(self, group: Hashable) -> bool:
        """Renew it at once. False: it is not a session."""
        session = self.of.get(group)
        if session is not None:
            self._plan(group, session, 0.0)
        return session is not None

    def _plan(self, group: Hashable, session: Session, pause: float) -> None:
        when = session.due = self._kernel.now() + pause

        def due() -> None:
            if session.due == when and self.of.get(group) is session:
                self._watchdog.carry(group, lambda: self._renew(group, session))

        self._kernel.timers.at(when, due)

    def _renew(self, group: Hashable, session: Session) -> None:
        """Its timeout is that of the leases which it renews: it ends before the last deadline among them. One that is
        about to end by itself (renew=False), or whose own proof is older, must not cut it short for all the others."""
        kernel = self._kernel
        leases = [lease for lease in kernel.leases_of(group) if lease._alive()]
        within = kernel.request_timeout(session.ttl)
        if renewed := [lease._lost_at for lease in leases if lease._claim.renew]:
            within = min(within, max(renewed) - kernel.now())
        error = self._watchdog.request(group, leases, within)
        if self.of.get(group) is not session:
            return
        if not error:
            self._prove(group, session, leases)
        session.failures = session.failures + 1 if error else 0
        jitter = kernel.runtime.uniform(0.9, 1.1)
        pause = session.renew_every * jitter if not error else validity.retry_in(session.failures, session.ttl, jitter)
        self._plan(group, session, pause)

    def _prove(self, group: Hashable, session: Session, renewed: Sequence[Holding]) -> None:
        """What was granted while the renewal of these was under way lives in the same session, and counts from the
        proof before it: of two periods ago when the next one comes, and that is too late where looks at many keys, or
        a long way, delay its answer."""
        kernel = self._kernel
        due = math.inf
        with kernel.lock:
            proofs = [lease._granted for lease in renewed if lease._claim.renew and lease._state == HELD]
            if not proofs:
                return
            session.proof = max(proofs, key=lambda granted: granted.sent_at)
            known = set(map(id, renewed))  # for one of these that did not get the proof it does not count
            for lease in kernel.leases_of(group):
                if id(lease) in known or not lease._claim.renew or lease._state != HELD:
                    continue
                proved = session.proved(lease._granted)
                if proved is not lease._granted and kernel.now() < lease._lost_at:
                    lease._accept(proved)
                    due = min(due, self._watchdog.plan(lease))
        if due < math.inf:
            kernel.poke(due)
