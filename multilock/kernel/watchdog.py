"""The watchdog: keeps leases alive, and loses those whose deadline passes.

One thread per client, the ticking thread, checks each lease when something is due. A renewal is a request and may hang,
but a deadline must be noticed in time. So the ticking thread only decides (`multilock.kernel.validity`) and hands
renewals to other threads (`multilock.kernel.renewal_threads`). The leases of one group (a server or a session) are
renewed in one request. A watch is a request to the server to report the loss of a lock
(`multilock.kernel.loss_watches`).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Hashable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from multilock.errors import BackendUnavailable, MultilockError
from multilock.kernel import validity
from multilock.kernel.holding import HELD, Holding
from multilock.kernel.inside_backend import call_inside
from multilock.kernel.loss_watches import LossWatches
from multilock.kernel.renewal_threads import RenewalThreads
from multilock.kernel.sessions import RenewedSessions
from multilock.log_thread import logger
from multilock.model import Granted, LossReason
from multilock.timing import JITTER

if TYPE_CHECKING:
    from multilock.kernel.client import Kernel

__all__ = ["Watchdog"]

Batch = tuple[Hashable, float, int]  # group, request timeout, urgency


class Watchdog:
    """The renewals and deadlines of one client's leases."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._heap: list[tuple[float, int, Holding]] = []  # an entry is valid if its time equals lease.schedule.due
        self._stale = 0  # entries of the heap that are not valid
        self._numbers = itertools.count()
        self.threads = RenewalThreads(kernel.runtime)
        self._watches = LossWatches(kernel)
        self.sessions = RenewedSessions(kernel, self)

    # Methods that need the kernel's lock

    def adopt(self, lease: Holding) -> float:
        """Watch over this lease from now on. Returns the time of the first check.

        That check plans the renewals. Nothing is planned before, because most locks are released before their first
        check.
        """
        granted = lease.granted
        if granted.short:  # the request may have been sent long ago, so a time counted from then may have passed
            due = validity.first_renewal_at(lease.granted_at, lease.expires_at)
        else:
            due = granted.sent_at + granted.renew_every / 2
        if due > (look := validity.arm_at(lease.granted_at)):
            due = look
        if due > lease.lost_at:
            due = lease.lost_at
        self._look_at(lease, due)
        return due

    def drop(self, lease: Holding) -> None:
        """Stop watching over this lease. A second call changes nothing."""
        if lease.schedule.due is not None:
            lease.schedule.due = None
            self._outdate()

    def plan(self, lease: Holding) -> float:
        """Plan the next check of this lease, and return the time of that check."""
        due = lease.lost_at
        if lease.claim.renew:
            granted = lease.granted
            if not lease.schedule.renewing and granted.group not in self.sessions.of:
                due = min(due, self._renew_at(lease))
            if lease.schedule.failures == 0:
                due = min(due, validity.late_at(granted.sent_at, granted.renew_every))
        if not lease.schedule.armed:
            due = min(due, validity.arm_at(lease.granted_at))
        if lease.schedule.due != due:  # renewals fall on a grid, so the check is often planned for this moment already
            self.drop(lease)
            self._look_at(lease, due)
        return due

    def _look_at(self, lease: Holding, due: float) -> None:
        lease.schedule.due = due
        heapq.heappush(self._heap, (due, next(self._numbers), lease))

    def _renew_at(self, lease: Holding) -> float:
        """Return when to renew this lease. The time is chosen once after each reply that extends the lease."""
        if lease.schedule.at is None:
            kernel = self._kernel
            granted = lease.granted
            if granted.short:
                lease.schedule.at = validity.first_renewal_at(lease.granted_at, lease.expires_at)
            else:
                jitter = kernel.runtime.uniform(1 - JITTER, 1 + JITTER)
                lease.schedule.at = validity.renew_at(
                    granted.sent_at, granted.renew_every, granted.ttl, jitter, kernel.phase
                )
        return lease.schedule.at

    def _outdate(self) -> None:
        """Count an entry of the heap that is no longer valid.

        The entry stays in the heap until its time comes, or until most entries are invalid.
        """
        self._stale += 1
        if self._stale > 64 and self._stale * 2 > len(self._heap):
            self._heap[:] = {entry[2]: entry for entry in self._heap if entry[2].schedule.due == entry[0]}.values()
            heapq.heapify(self._heap)
            self._stale = 0

    # The ticking thread

    def step(self, now: float) -> float:
        """Lose leases whose deadline has passed, hand out due renewals, and return the time of the next step."""
        over: list[Holding] = []
        renew: dict[Batch, list[Holding]] = {}
        watch: dict[Hashable, list[Holding]] = {}
        late: list[Holding] = []
        following = math.inf
        with self._kernel.lock:
            heap = self._heap
            while heap and (heap[0][0] <= now or heap[0][2].schedule.due != heap[0][0]):
                when, _, lease = heapq.heappop(heap)
                if lease.schedule.due != when:
                    self._stale -= 1
                    if when > now:
                        following = when  # this step does nothing, but while it is planned, a new lease wakes no thread
                    continue
                lease.schedule.due = None
                if now >= lease.lost_at:
                    over.append(lease)
                    continue
                self._decide(lease, now, renew, watch, late)
                self.plan(lease)
            if heap and following == math.inf:
                following = heap[0][0]
        if over:
            with self._kernel.callbacks.gathering():
                for lease in over:
                    self._kernel.losses.expire(lease)
        for lease in late:
            self._tell_risk(lease)
        for batch, leases in renew.items():
            self.threads.carry(batch[0], partial(self._renew, batch[0], leases))
        for group, leases in watch.items():
            self._watches.ask(group, leases)
        return following

    def _decide(
        self,
        lease: Holding,
        now: float,
        renew: dict[Batch, list[Holding]],
        watch: dict[Hashable, list[Holding]],
        late: list[Holding],
    ) -> None:
        """Add the lease to the renewals, watches and warnings that are due."""
        granted = lease.granted
        if not lease.schedule.armed and now >= validity.arm_at(lease.granted_at):
            lease.schedule.armed = True
            watch.setdefault(granted.group, []).append(lease)
        if not lease.claim.renew:
            return
        if lease.schedule.failures == 0 and now >= validity.late_at(granted.sent_at, granted.renew_every):
            lease.schedule.failures = 1
            late.append(lease)
        if not lease.schedule.renewing and granted.group not in self.sessions.of and now >= self._renew_at(lease):
            lease.schedule.renewing = True
            timeout = self._kernel.request_timeout(granted.ttl)
            urgency = validity.urgency(lease.expires_at - now, timeout)
            renew.setdefault((granted.group, timeout, urgency), []).append(lease)

    def _tell_risk(self, lease: Holding) -> None:
        kernel = self._kernel
        logger.warning(
            "the lock %r is at risk: it is lost in %.3f s unless a renewal is acknowledged",
            lease.name,
            lease.lost_at - kernel.now(),
            extra=kernel.extra(lease),
        )
        if tell := kernel.events.tell:
            tell.at_risk(lease)

    # The renewing threads

    def _renew(self, group: Hashable, leases: Sequence[Holding]) -> None:
        """Renew these leases in one request, whose timeout ends before the first of their deadlines."""
        for lease in leases:
            lease._alive()  # this call loses the lease if its deadline has passed meanwhile
        leases = [lease for lease in leases if lease.stage == HELD]
        if leases:
            within = min(self._kernel.request_timeout(lease.granted.ttl) for lease in leases)
            first = min(lease.expires_at for lease in leases)
            self.request(group, leases, min(within, first - self._kernel.now()))

    def request(self, group: Hashable, leases: Sequence[Holding], within: float) -> MultilockError | None:
        """Send one renewal for these leases and apply the answers. Returns the error if the whole request failed."""
        kernel = self._kernel
        try:
            held = [(lease.claim, lease.granted) for lease in leases]
            answers = call_inside(kernel.backend.renew, group, held, within)
        except Exception as error:
            self.unanswered(leases, error)
            return error if isinstance(error, MultilockError) else MultilockError(str(error))
        for lease, answer in zip(leases, answers, strict=True):
            if isinstance(answer, BackendUnavailable):
                self.unanswered([lease], answer)
            else:
                self.settle(lease, answer)
        return None

    def settle(self, lease: Holding, answer: Granted | None) -> None:
        """Apply the answer to the renewal of one lease. An answer after the deadline does not revive the lease."""
        kernel = self._kernel
        if answer is None:
            kernel.losses.lose(lease, LossReason.TAKEN, "the backend says that it is no longer ours", confirmed=True)
            return
        with kernel.lock:
            now = kernel.now()
            lease.schedule.renewing = False
            if lease.stage != HELD or now >= lease.lost_at:
                return
            slack = lease.lost_at - now
            if session := self.sessions.of.get(answer.group):
                answer = session.cut(answer)
            if answer.sent_at >= lease.granted.sent_at:
                lease._accept(answer)
            due = self.plan(lease)
        kernel.poke(due)
        if tell := kernel.events.tell:
            tell.renewed(lease, now, slack, answer.sent_at)

    def unanswered(self, leases: Sequence[Holding], error: Exception) -> None:
        """Record that the renewal of these leases failed, and plan the next attempt."""
        kernel = self._kernel
        unknown = not isinstance(error, MultilockError) or getattr(error, "unknown", False)
        if not isinstance(error, BackendUnavailable):
            logger.error("a renewal failed: %s", error, exc_info=not isinstance(error, MultilockError))
        at_risk = []
        due = math.inf
        with kernel.lock:
            for lease in leases:
                lease.schedule.renewing = False
                if lease.stage != HELD:
                    continue
                lease.unsure |= unknown
                if not lease.schedule.failures:
                    at_risk.append(lease)
                lease.schedule.failures += 1
                pause = validity.retry_in(lease.schedule.failures, lease.granted.ttl, kernel.runtime.uniform(0.5, 1.5))
                lease.schedule.at = kernel.now() + pause
                due = min(due, self.plan(lease))
        kernel.poke(due)
        for lease in at_risk:
            self._tell_risk(lease)
        if tell := kernel.events.tell:
            for lease in leases:
                tell.renew_failed(lease, error)

    def hurry(self, group: Hashable) -> None:
        """Renew the leases of this group at once, because the connection that kept them alive broke."""
        if self.sessions.hurry(group):
            return
        kernel = self._kernel
        now = kernel.now()
        with kernel.lock:
            for lease in kernel.leases_of(group):
                if lease.claim.renew and lease.stage == HELD:
                    lease.schedule.at = now
                    self.plan(lease)
        kernel.poke(now)

    def close(self) -> None:
        """End all sessions and threads of the watchdog."""
        self.sessions.of.clear()
        self._watches.close()
        self.threads.close()
