"""Keeps leases alive: one thread per client looks at every lease when something is due, and carries out nothing itself.

A renewal is a request and may hang; the deadline of a lease is a timer and does not. So the ticking thread only decides
(`multilock.kernel.validity`), and hands renewals to workers: leases of one group (a server, a session) in one request,
each group on threads of its own, so that a dead server starves no other.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from multilock.errors import BackendUnavailable, MultilockError
from multilock.kernel import validity
from multilock.kernel.holding import HELD, Holding
from multilock.kernel.runtime import call_inside
from multilock.kernel.sessions import Sessions
from multilock.model import Granted, LossReason
from multilock.telling import logger

if TYPE_CHECKING:
    from multilock.kernel.core import Kernel
    from multilock.kernel.runtime import Workers

__all__ = ["Watchdog"]

CARRIERS = 4  # threads per group: a renewal that hangs must not keep the next from being tried
WATCHERS = 2
WATCH_AGAIN = 1.0  # seconds after a watch that could not be set

Batch = tuple[Hashable, float, int]  # group, request timeout, urgency


class Watchdog:
    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._heap: list[tuple[float, int, Holding]] = []  # a lease's valid entry is the one at lease._due
        self._stale = 0
        self._numbers = itertools.count()
        self._carriers: dict[Hashable, Workers] = {}
        self._watchers = kernel.runtime.workers("multilock-watch", WATCHERS)
        self.sessions = Sessions(kernel, self)

    # Called by the kernel under its lock

    def adopt(self, lease: Holding) -> float:
        """Look after this lease from now on; when it is looked at first.

        That is soon, and only then is anything planned: most locks have been given back by then.
        """
        granted = lease._granted
        if granted.short:  # sent long ago, perhaps: what counts from then may be past
            due = validity.first_renewal_at(lease._granted_at, lease._lost_at)
        else:
            due = granted.sent_at + granted.renew_every / 2
        if due > (look := validity.arm_at(lease._granted_at)):
            due = look
        if due > lease._lost_at:
            due = lease._lost_at
        self._look_at(lease, due)
        return due

    def drop(self, lease: Holding) -> None:
        if lease._due is not None:
            lease._due = None
            self._outdate()

    def plan(self, lease: Holding) -> float:
        due = lease._lost_at
        if lease._claim.renew:
            granted = lease._granted
            if not lease._renewing and granted.group not in self.sessions.of:
                due = min(due, self._renew_at(lease))
            if lease._failures == 0:
                due = min(due, validity.late_at(granted.sent_at, granted.renew_every))
        if not lease._armed:
            due = min(due, validity.arm_at(lease._granted_at))
        if lease._due != due:  # renewals fall on a grid: often it is planned for this very moment already
            self.drop(lease)
            self._look_at(lease, due)
        return due

    def _look_at(self, lease: Holding, due: float) -> None:
        lease._due = due
        heapq.heappush(self._heap, (due, next(self._numbers), lease))

    def _renew_at(self, lease: Holding) -> float:
        if lease._renew_at is None:
            kernel = self._kernel
            granted = lease._granted
            if granted.short:
                lease._renew_at = validity.first_renewal_at(lease._granted_at, lease._lost_at)
            else:
                jitter = kernel.runtime.uniform(0.9, 1.1)
                lease._renew_at = validity.renew_at(
                    granted.sent_at, granted.renew_every, granted.ttl, jitter, kernel.phase
                )
        return lease._renew_at

    def _outdate(self) -> None:
        """An entry of the heap is valid no more. It stays until it comes up, or until such are most of the heap."""
        self._stale += 1
        if self._stale > 64 and self._stale * 2 > len(self._heap):
            self._heap[:] = {entry[2]: entry for entry in self._heap if entry[2]._due == entry[0]}.values()
            heapq.heapify(self._heap)
            self._stale = 0

    # The ticking thread

    def step(self, now: float) -> float:
        """Lose what is over, hand out what is to be renewed; when to look again."""
        over: list[Holding] = []
        renew: dict[Batch, list[Holding]] = {}
        watch: dict[Hashable, list[Holding]] = {}
        late: list[Holding] = []
        following = math.inf
        with self._kernel.lock:
            heap = self._heap
            while heap and (heap[0][0] <= now or heap[0][2]._due != heap[0][0]):
                when, _, lease = heapq.heappop(heap)
                if lease._due != when:
                    self._stale -= 1
                    if when > now:
                        following = when  # locks come and go: a step then, instead of a poke by each that comes
                    continue
                lease._due = None
                if now >= lease._lost_at:
                    over.append(lease)
                    continue
                self._decide(lease, now, renew, watch, late)
                self.plan(lease)
            if heap and following == math.inf:
                following = heap[0][0]
        if over:
            with self._kernel.callbacks.gathering():
                for lease in over:
                    self._kernel.monitor.expire(lease)
        for lease in late:
            self._tell_risk(lease)
        for batch, leases in renew.items():
            self.carry(batch[0], partial(self._renew, batch[0], leases))
        for group, leases in watch.items():
            self._watchers.submit(partial(self._watch, group, leases))
        return following

    def _decide(
        self,
        lease: Holding,
        now: float,
        renew: dict[Batch, list[Holding]],
        watch: dict[Hashable, list[Holding]],
        late: list[Holding],
    ) -> None:
        granted = lease._granted
        if not lease._armed and now >= validity.arm_at(lease._granted_at):
            lease._armed = True
            watch.setdefault(granted.group, []).append(lease)
        if not lease._claim.renew:
            return
        if lease._failures == 0 and now >= validity.late_at(granted.sent_at, granted.renew_every):
            lease._failures = 1
            late.append(lease)
        if not lease._renewing and granted.group not in self.sessions.of and now >= self._renew_at(lease):
            lease._renewing = True
            timeout = self._kernel.request_timeout(granted.ttl)
            urgency = validity.urgency(lease._lost_at - now, timeout)
            renew.setdefault((granted.group, timeout, urgency), []).append(lease)

    def _tell_risk(self, lease: Holding) -> None:
        kernel = self._kernel
        logger.warning(
            "the lock %r is at risk: it is lost in %.3f s unless a renewal is acknowledged",
            lease.name,
            lease._lost_at - kernel.now(),
            extra=kernel.extra(lease),
        )
        if tell := kernel.events.tell:
            tell.at_risk(lease)

    def carry(self, group: Hashable, job: Callable[[], None]) -> None:
        carriers = self._carriers.get(group)
        if carriers is None:
            carriers = self._carriers[group] = self._kernel.runtime.workers("multilock-renew", CARRIERS)
        carriers.submit(job)

    # The carriers

    def _renew(self, group: Hashable, leases: Sequence[Holding]) -> None:
        """One request for these leases. Its timeout ends before the first deadline among them."""
        for lease in leases:
            lease._alive()  # a deadline that passed on the way here is noticed first
        leases = [lease for lease in leases if lease._state == HELD]
        if leases:
            within = min(self._kernel.request_timeout(lease._granted.ttl) for lease in leases)
            first = min(lease._lost_at for lease in leases)
            self.request(group, leases, min(within, first - self._kernel.now()))

    def request(self, group: Hashable, leases: Sequence[Holding], within: float) -> MultilockError | None:
        kernel = self._kernel
        try:
            held = [(lease._claim, lease._granted) for lease in leases]
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
        """The answer to one renewal. One that comes after ``lost_at`` revives nothing."""
        kernel = self._kernel
        if answer is None:
            kernel.monitor.lose(
                lease, LossReason.TAKEN, "the backend says that it is not ours any more", confirmed=True
            )
            return
        with kernel.lock:
            now = kernel.now()
            lease._renewing = False
            if lease._state != HELD or now >= lease._lost_at:
                return
            slack = lease._lost_at - now
            if session := self.sessions.of.get(answer.group):
                answer = session.cut(answer)
            if answer.sent_at >= lease._granted.sent_at:
                lease._accept(answer)
            due = self.plan(lease)
        kernel.poke(due)
        if tell := kernel.events.tell:
            tell.renewed(lease, now, slack, answer.sent_at)

    def unanswered(self, leases: Sequence[Holding], error: Exception) -> None:
        kernel = self._kernel
        unknown = not isinstance(error, MultilockError) or getattr(error, "unknown", False)
        if not isinstance(error, BackendUnavailable):
            logger.error("a renewal failed: %s", error, exc_info=not isinstance(error, MultilockError))
        at_risk = []
        due = math.inf
        with kernel.lock:
            for lease in leases:
                lease._renewing = False
                if lease._state != HELD:
                    continue
                lease._unsure |= unknown
                if not lease._failures:
                    at_risk.append(lease)
                lease._failures += 1
                pause = validity.retry_in(lease._failures, lease._granted.ttl, kernel.runtime.uniform(0.5, 1.5))
                lease._renew_at = kernel.now() + pause
                due = min(due, self.plan(lease))
        kernel.poke(due)
        for lease in at_risk:
            self._tell_risk(lease)
        if tell := kernel.events.tell:
            for lease in leases:
                tell.renew_failed(lease, error)

    def _watch(self, group: Hashable, leases: Sequence[Holding]) -> None:
        kernel = self._kernel
        held = [(lease._claim, lease._granted) for lease in leases if lease._state == HELD]
        try:
            if held:
                # No deadline depends on it, so the lease with the least time must not cut it short for the others.
                within = max(kernel.request_timeout(claim.ttl) for claim, _ in held)
                call_inside(kernel.backend.watch, group, held, within)
        except Exception as error:
            # Only the early notice is missing: the next renewal tells, and the watch is tried again.
            logger.debug("no watch on %d locks yet: %s", len(held), error)
            again = partial(self._watch, group, leases)
            kernel.timers.at(kernel.now() + WATCH_AGAIN, lambda: self._watchers.submit(again))

    def hurry(self, group: Hashable) -> None:
        """Renew at once: what kept this group alive broke."""
        if self.sessions.hurry(group):
            return
        kernel = self._kernel
        now = kernel.now()
        with kernel.lock:
            for lease in kernel.leases_of(group):
                if lease._claim.renew and lease._state == HELD:
                    lease._renew_at = now
                    self.plan(lease)
        kernel.poke(now)

    def dismiss(self, group: Hashable) -> None:
        """No more is carried for this group; what is under way still is."""
        if carriers := self._carriers.pop(group, None):
            carriers.close()

    def close(self) -> None:
        self.sessions.of.clear()
        for carriers in [self._watchers, *self._carriers.values()]:
            carriers.close()
