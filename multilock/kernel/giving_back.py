"""Giving a lock back: a release, whose holder waits for one answer, and the background cancel, which waits for as many
as it takes.

A request without an answer may still be executed. Nobody waits for that: the claim goes to the background cancel, and
is released again and again, with the means of the backend that make the cancel final, until an answer came.

A lease that nobody renews ends by itself, and so does this patience. But what was taken in a session lives as long as
that session does, which is renewed while the client is open: there a cancel that is given up leaves the lock taken for
ever. So it is tried on for as long as the session is renewed, and, when the server is back after an outage, not later
than the next renewal that would prolong it.

Until it is answered the claim may stand in the queue, or have the name: a single try of the same client lets the answer
come first (`Cancels.withdraws`).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from multilock import system
from multilock.errors import BackendUnavailable
from multilock.kernel import process
from multilock.kernel.holding import HELD, RELEASED, RELEASING, AnyHeld, Holding
from multilock.kernel.runtime import call_inside, wait_until
from multilock.model import Claim, Granted, LossReason, Returned
from multilock.telling import logger

if TYPE_CHECKING:
    from multilock.backend import Backend, Rests
    from multilock.kernel.core import Kernel
    from multilock.kernel.runtime import Bell

__all__ = ["Cancels", "GivingBack", "call_to_give_back"]

BRIEFLY = 0.1  # seconds for which a finalizer waits for the lock of a client, under which nothing is waited for
AT_LEAST = 60.0  # seconds after the last send, or 2 × ttl if that is more: what nobody renews has ended by then
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0

FAILED = "giving back the lock %r failed: %s"
STILL = (
    "the lock %r is still not given back (%s): it stays taken as long as the session of this client lives, and is "
    "tried on until it is answered"
)
GAVE_UP = "gave up giving back the lock %r (%s): it may stay taken until its ttl of %g s is over"

CARRIERS = 2


def call_to_give_back(
    backend: Backend, now: float, claim: Claim, granted: Granted | None, unsure: bool, rest_until: float | None
) -> tuple[Callable[..., Returned], *tuple[Any, ...]]:
    """The call that gives a claim back, with all arguments but the last: how long it may take."""
    if rest_until and granted and (seconds := rest_until - now) > 0:
        return cast("Rests", backend).rest, claim, granted, unsure, seconds
    return backend.release, claim, granted, unsure


class GivingBack:
    """Releases: by whoever holds the lease, in the background, and from inside a client.

    A lease of several locks begins its release as a whole. Then each part goes back to the backend by itself; one that
    another lease holds as well is only counted down.
    """

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._late: deque[AnyHeld] = deque()  # for the ticking thread

    async def release(self, lease: AnyHeld, until: float | None = None) -> bool:
        """See ``Lease.release``. The lease is over from here on, whatever the backend says or does not say.

        Answers are waited for until ``until``: the time of one request, unless it is given.
        """
        process.notice_fork()
        if process.in_the_middle():
            return self._release_from_within(lease)
        kernel = self._kernel
        kernel.face.forget_closed_loop()
        released_at = kernel.now()
        part: Holding | None = None
        returned: Returned | None = None
        try:
            if (decided := self._decide(lease, released_at)) is not None:
                return decided
            ours = True
            end = released_at + lease._want.request_timeout if until is None else until
            for part in lease._going_back():
                returned = None
                returned = await self._ask_for_release(part, end)
                ours = self._finish(part, returned, released_at) and ours
            if lease is not part:
                self._finish_whole(lease)
            return ours
        except BaseException:
            # By hand, not `surely`: it is a coroutine, and what is left to do is another thing than what it began with.
            if part and (part._state in (RELEASING, RELEASED) or returned is not None):
                self._finish(part, returned, released_at)
            if lease._state == RELEASING:
                self.go_on(lease)
            raise

    def _decide(self, lease: AnyHeld, now: float) -> bool | None:
        """None: requests are to be sent. Else what the release answers without any."""
        with self._kernel.lock:
            if lease._proved(now):
                if lease._count > 1 and lease._count_down():
                    return True
                lease._begin_release()
                return None
        lease._alive()  # which notices that it is over
        lease._end_of_work()
        return False

    async def _ask_for_release(self, lease: Holding, until: float) -> Returned | None:
        """None: it was not answered in time."""
        kernel = self._kernel
        within = min(lease._want.request_timeout, until - kernel.now())
        if within <= 0:
            return None
        try:
            if lease._rest_until is None:
                return await kernel.face.release(lease._claim, lease._granted, lease._unsure, within)
            call, *args = call_to_give_back(
                kernel.backend, kernel.now(), lease._claim, lease._granted, lease._unsure, lease._rest_until
            )
            return await kernel.face.ask(within, call, *args)
        except Exception as error:
            logger.warning(
                "the release of the lock %r goes on in the background: %s",
                lease.name,
                error,
                extra=kernel.extra(lease),
            )
            return None

    def _finish(self, lease: Holding, returned: Returned | None, released_at: float) -> bool:
        """The end of a release; None: it was not answered, and goes on in the background. Twice is harmless."""
        kernel = self._kernel
        if returned is None:
            with kernel.lock:
                kernel.watchdog.drop(lease)  # the interrupt may have come before that
        if returned is None or returned.again:
            kernel.cancels.add(lease._claim, lease._granted, unsure=True, rest_until=lease._rest_until)
        if returned is None or returned.ours:
            self._part_released(lease, released_at)
            return True
        kernel.monitor.lose(
            lease,
            LossReason.TAKEN,
            "it was gone when it was released",
            confirmed=True,
            give_back=False,
            released=True,
        )
        lease._leave_scope()
        return False

    def _finish_whole(self, lease: AnyHeld) -> None:
        """Of several locks, when each part is finished. Twice is harmless."""
        lease._tell_gone()
        self._released(lease)
        lease._leave_scope()

    def _released(self, lease: AnyHeld) -> bool:
        """End its release. Return True the first time: an interrupt may have it called again."""
        with self._kernel.lock:
            first = lease._end_release()
            if not first and lease._state != RELEASED:  # a child of a fork has reset it
                return False
        lease._lift_fence()  # again, if the release was interrupted
        lease._leave_scope()
        lease._call_hooks()
        return first

    def _part_released(self, part: Holding, released_at: float) -> None:
        kernel = self._kernel
        first = self._released(part)
        kernel.held.pop(part._claim.id, None)
        if not first:
            return
        if logger.wants(logging.DEBUG):
            logger.debug("released the lock %r", part.name, extra=kernel.extra(part))
        if tell := kernel.events.tell:
            tell.released(part, released_at)

    # For whoever cannot wait

    def later(self, lease: AnyHeld) -> None:
        """Release it in the background, however often it was acquired: somebody unwinds."""
        held = lease._state == HELD
        try:
            with self._kernel.lock:
                begun = lease._begin_release()
            if begun:
                self._release_late(lease)
            else:
                lease._all_work_ended()
        except BaseException:  # interrupted: what we have begun to release nobody else would give back
            if held and lease._state in (RELEASING, RELEASED):
                self.go_on(lease)
            raise

    def take_back(self, lease: AnyHeld) -> None:
        """The same for one that its acquire, interrupted, could not hand out: nothing was done for which the name
        would rest."""
        lease._no_rest()
        self.later(lease)

    def go_on(self, lease: AnyHeld) -> None:
        """One that is being released: whoever waits for the answer never unwinds."""
        now = self._kernel.now()
        with self._kernel.lock:
            lease._let_go()
        for part in lease._going_back():
            self._finish(part, None, now)
        self._finish_whole(lease)

    def soon(self, lease: Holding) -> None:
        """Have the ticking thread release it, or count it down, for whoever may hold a lock of the client."""
        self._late.append(lease)
        self._kernel.nudge()

    def _release_from_within(self, lease: AnyHeld) -> bool:
        """By a finalizer, or a signal handler, that came `process.in_the_middle`: what this thread holds would be
        waited for, for ever. The ticking thread does it."""
        kernel = self._kernel
        # Who has this lock may wait in the same way for that of another client, which we have: then it ends there.
        if not kernel.lock.acquire(timeout=BRIEFLY):
            self._late.append(lease)
        else:
            try:
                if not lease._proved(kernel.now()):
                    lease._end_of_work()
                    return False
                if lease._count_down():
                    return True
                lease._begin_release()
                self._late.append(lease)
            finally:
                kernel.lock.release()
        kernel.nudge()
        return True

    def step(self) -> None:
        """On the ticking thread."""
        while self._late:
            self._release_late(self._late.popleft())

    def _release_late(self, lease: AnyHeld) -> None:
        """Twice is harmless."""
        kernel = self._kernel
        with kernel.lock:
            if lease._count_down():
                return
            begun = lease._begin_release() or lease._state == RELEASING
            if begun:
                lease._let_go()
        if not begun:
            lease._end_of_work()
            return
        now = kernel.now()
        for part in lease._going_back():
            kernel.cancels.add(part._claim, part._granted, part._unsure, rest_until=part._rest_until)
            self._part_released(part, now)
        self._finish_whole(lease)


class _Cancel:
    __slots__ = ("bells", "claim", "granted", "pause", "rest_until", "told", "under_way", "unsure", "until")

    def __init__(
        self, claim: Claim, granted: Granted | None, unsure: bool, until: float, rest_until: float | None
    ) -> None:
        self.claim = claim
        self.granted = granted
        self.unsure = unsure
        self.until = until
        self.rest_until = rest_until
        self.pause = FIRST_PAUSE
        self.told: list[str] = []
        self.under_way = False  # to be asked now, or being asked; not while it pauses
        self.bells: set[Bell] = set()  # to be rung when it no longer is


class Cancels:
    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._workers = kernel.runtime.workers("multilock-cleanup", CARRIERS)
        self._open: set[_Cancel] = set()
        self._lock = system.RLock()

    def add(
        self,
        claim: Claim,
        granted: Granted | None,
        unsure: bool,
        *,
        not_before: float | None = None,
        rest_until: float | None = None,
    ) -> None:
        """Give this claim back in the background. ``unsure``: some request of its id was never answered.
        ``rest_until``: it was held, and leaves its name taken until then."""
        kernel = self._kernel
        start = kernel.now() if not_before is None else not_before
        cancel = _Cancel(claim, granted, unsure, start + max(AT_LEAST, 2 * claim.ttl), rest_until)
        with self._lock:
            self._open.add(cancel)
        if start > kernel.now():
            kernel.timers.at(start, lambda: self._submit(cancel))
        else:
            self._submit(cancel)

    def wait(self, timeout: float) -> bool:
        """Whether everything was answered within ``timeout`` seconds."""
        return wait_until(self._kernel.runtime, lambda: not self._open, timeout)

    def withdraws(self, name: str, bell: Bell) -> bool:
        """Whether a request that gives this name back is under way; then ``bell`` rings when it has ended."""
        if not self._open:
            return False
        with self._lock:
            found = [cancel for cancel in self._open.copy() if cancel.under_way and cancel.claim.name == name]
            for cancel in found:
                cancel.bells.add(bell)
        return bool(found)

    def take(self) -> list[tuple[Claim, Granted | None, bool, float | None]]:
        """What is still open, taken out: the caller releases it himself."""
        with self._lock:
            rest = [(cancel.claim, cancel.granted, cancel.unsure, cancel.rest_until) for cancel in self._open.copy()]
            self._open.clear()
        return rest

    def close(self) -> None:
        self._workers.close()

    def _submit(self, cancel: _Cancel) -> None:
        cancel.under_way = True
        self._workers.submit(lambda: self._try(cancel))

    def _try(self, cancel: _Cancel) -> None:
        if cancel not in self._open:
            return
        kernel = self._kernel
        claim = cancel.claim
        try:
            call, *args = call_to_give_back(
                kernel.backend, kernel.now(), claim, cancel.granted, cancel.unsure, cancel.rest_until
            )
            if call_inside(call, *args, kernel.request_timeout(claim.ttl)).again:
                raise BackendUnavailable("not all of its servers have confirmed it")
        except Exception as error:
            if not isinstance(error, BackendUnavailable):
                self._tell(cancel, FAILED, error)
            elif error.unknown:
                cancel.unsure = True
            if self._goes_on(cancel, error):
                self._ended(cancel, done=False)  # before it may begin again
                kernel.timers.at(
                    kernel.now() + cancel.pause * kernel.runtime.uniform(0.5, 1.0), lambda: self._submit(cancel)
                )
                cancel.pause = min(cancel.pause * 2, self._longest_pause(cancel))
                return
            self._tell(cancel, GAVE_UP, error, claim.ttl)
        self._ended(cancel, done=True)

    def _goes_on(self, cancel: _Cancel, error: Exception) -> bool:
        kernel = self._kernel
        if kernel.finished:
            return False
        if kernel.now() + cancel.pause < cancel.until:
            return True
        if not self._is_renewed(cancel):
            return False
        self._tell(cancel, STILL, error)
        return True

    def _longest_pause(self, cancel: _Cancel) -> float:
        return min(LONGEST_PAUSE, max(FIRST_PAUSE, cancel.claim.ttl / 3)) if self._is_renewed(cancel) else LONGEST_PAUSE

    def _is_renewed(self, cancel: _Cancel) -> bool:
        return self._kernel.watchdog.sessions.renews(cancel.granted.group if cancel.granted else None)

    def _tell(self, cancel: _Cancel, message: str, *about: object) -> None:
        """Each message once: this may go on for hours."""
        if message not in cancel.told:
            cancel.told.append(message)
            claim = cancel.claim
            extra = {"lock_name": claim.name, "lock_owner": claim.owner, "lock_token": None}
            logger.warning(message, claim.name, *about, extra=extra)

    def _ended(self, cancel: _Cancel, *, done: bool) -> None:
        with self._lock:
            if done:
                self._open.discard(cancel)
            cancel.under_way = False
            bells, cancel.bells = cancel.bells, set()
        for bell in bells:
            bell.ring()
