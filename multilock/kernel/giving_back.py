"""Giving a lock back: the release, which sends one request, and the background cancel, which repeats it until answered.

A request without an answer may still be executed later. No caller waits for that. Its claim goes to the background
cancel, which releases it again and again until the backend answers. The backend makes that cancel final, for example
with a tombstone, so that a late request has no effect.

A lease that nobody renews expires, so its cancel may give up after a while. A lock in a session lives as long as the
session, which is renewed while the client is open. If its cancel gave up, the lock would stay taken forever. So that
cancel goes on for as long as the session is renewed. After an outage it tries again before the next renewal would
prolong the session.

Until the cancel is answered, the claim may be in the queue or hold the name. A single try by the same client waits for
that answer first (`Cancels.withdraws`).
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

BRIEFLY = 0.1  # seconds for which a finalizer waits for the kernel's lock, whose holders never block
AT_LEAST = 60.0  # seconds of trying, or 2 × ttl if that is more: a lease that nobody renews has expired by then
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0

FAILED = "giving back the lock %r failed: %s"
STILL = (
    "the lock %r is still not given back (%s): it stays taken as long as the session of this client lives. The client "
    "goes on trying until the backend answers"
)
GAVE_UP = "gave up giving back the lock %r (%s): it may stay taken until its ttl of %g s is over"

CARRIERS = 2


def call_to_give_back(
    backend: Backend, now: float, claim: Claim, granted: Granted | None, unsure: bool, rest_until: float | None
) -> tuple[Callable[..., Returned], *tuple[Any, ...]]:
    """Return the backend's function that gives the claim back, and its arguments except the last, the timeout."""
    if rest_until and granted and (seconds := rest_until - now) > 0:
        return cast("Rests", backend).rest, claim, granted, unsure, seconds
    return backend.release, claim, granted, unsure


class GivingBack:
    """Releases: those that the holder waits for, those in the background, and those from inside the library.

    A lease of several locks begins its release as a whole. Then each part is given back to the backend by itself. A
    part that another lease holds as well is only counted down.
    """

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._late: deque[AnyHeld] = deque()  # leases that the ticking thread must release

    async def release(self, lease: AnyHeld, until: float | None = None) -> bool:
        """Release a lease: see ``Lease.release``. From here on the lease is over, whatever the backend answers.

        Waits for answers until the time ``until``, by default for one request timeout.
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
            # `surely` does not fit: this is a coroutine, and the clean-up differs from the first attempt.
            if part and (part._state in (RELEASING, RELEASED) or returned is not None):
                self._finish(part, returned, released_at)
            if lease._state == RELEASING:
                self.go_on(lease)
            raise

    def _decide(self, lease: AnyHeld, now: float) -> bool | None:
        """Return the result of the release if it needs no request, otherwise begin it and return None."""
        with self._kernel.lock:
            if lease._proved(now):
                if lease._count > 1 and lease._count_down():
                    return True
                lease._begin_release()
                return None
        lease._alive()  # loses the lease if its deadline has passed
        lease._end_of_work()
        return False

    async def _ask_for_release(self, lease: Holding, until: float) -> Returned | None:
        """Send one release. Returns None if it is not answered in time."""
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
        """End the release of one lock. Returns False if the backend says that it was not ours.

        If ``returned`` is None, there was no answer, and the release goes on in the background. A second call changes
        nothing.
        """
        kernel = self._kernel
        if returned is None:
            with kernel.lock:
                kernel.watchdog.drop(lease)  # an interrupt may have come before `_let_go` did this
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
        """End the release of several locks, after each part has ended. A second call changes nothing."""
        lease._tell_gone()
        self._released(lease)
        lease._leave_scope()

    def _released(self, lease: AnyHeld) -> bool:
        """End the release, and return True the first time. After an interrupt it is called again."""
        with self._kernel.lock:
            first = lease._end_release()
            if not first and lease._state != RELEASED:  # lost meanwhile
                return False
        lease._lift_fence()  # an interrupt may have come before `_let_go` did this
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

    # For callers that cannot wait

    def later(self, lease: AnyHeld) -> None:
        """Release a lease in the background, however often it was acquired. Its holder is unwinding."""
        held = lease._state == HELD
        try:
            with self._kernel.lock:
                begun = lease._begin_release()
            if begun:
                self._release_late(lease)
            else:
                lease._all_work_ended()
        except BaseException:  # interrupted: if we have begun the release, nothing else would finish it
            if held and lease._state in (RELEASING, RELEASED):
                self.go_on(lease)
            raise

    def take_back(self, lease: AnyHeld) -> None:
        """Release a lease in the background whose acquire was interrupted. Nobody worked, so hold_at_least is void."""
        lease._no_rest()
        self.later(lease)

    def go_on(self, lease: AnyHeld) -> None:
        """Finish a release in the background, because the caller that waits for its answer will not go on."""
        now = self._kernel.now()
        with self._kernel.lock:
            lease._let_go()
        for part in lease._going_back():
            self._finish(part, None, now)
        self._finish_whole(lease)

    def soon(self, lease: Holding) -> None:
        """Make the ticking thread release a lease, or count it down. For callers that may hold the kernel's lock."""
        self._late.append(lease)
        self._kernel.nudge()

    def _release_from_within(self, lease: AnyHeld) -> bool:
        """Release a lease from a finalizer or signal handler that interrupted a call of multilock in this thread.

        It must not wait for a lock that its own thread may hold, because that wait would never end. So the ticking
        thread sends the request.
        """
        kernel = self._kernel
        # The thread that holds this lock may be in the same situation and wait for a lock that we hold. So we give up
        # soon, and leave the whole release to the ticking thread.
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
        """Release the leases of `soon` and `_release_from_within`. Called on the ticking thread."""
        while self._late:
            self._release_late(self._late.popleft())

    def _release_late(self, lease: AnyHeld) -> None:
        """Count a lease down, or release it through the background cancel. A second call changes nothing."""
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
    """One claim that the background cancel gives back.

    ``until`` is when it may give up. ``told`` has the messages logged so far. ``under_way`` is True while a request is
    planned for now or being sent, and False during a pause. The ``bells`` ring when that request has ended.
    """

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
        self.under_way = False
        self.bells: set[Bell] = set()


class Cancels:
    """The background cancel of one client: gives claims back until the backend has answered."""

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
        """Give this claim back in the background.

        ``unsure``: Some request with its id was never answered. ``not_before``: The time of the first request.
        ``rest_until``: The claim was held, and hold_at_least keeps its name taken until then.
        """
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
        """Wait until every claim is given back. Returns False after ``timeout`` seconds."""
        return wait_until(self._kernel.runtime, lambda: not self._open, timeout)

    def withdraws(self, name: str, bell: Bell) -> bool:
        """Return whether a request that gives this name back is under way. If so, its end will ring ``bell``."""
        if not self._open:
            return False
        with self._lock:
            found = [cancel for cancel in self._open.copy() if cancel.under_way and cancel.claim.name == name]
            for cancel in found:
                cancel.bells.add(bell)
        return bool(found)

    def take(self) -> list[tuple[Claim, Granted | None, bool, float | None]]:
        """Remove and return all open claims. The caller gives them back itself."""
        with self._lock:
            rest = [(cancel.claim, cancel.granted, cancel.unsure, cancel.rest_until) for cancel in self._open.copy()]
            self._open.clear()
        return rest

    def close(self) -> None:
        """End the threads, after the requests that were submitted already."""
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
                self._ended(cancel, done=False)  # before the timer, which may start the next request at once
                kernel.timers.at(
                    kernel.now() + cancel.pause * kernel.runtime.uniform(0.5, 1.0), lambda: self._submit(cancel)
                )
                cancel.pause = min(cancel.pause * 2, self._longest_pause(cancel))
                return
            self._tell(cancel, GAVE_UP, error, claim.ttl)
        self._ended(cancel, done=True)

    def _goes_on(self, cancel: _Cancel, error: Exception) -> bool:
        """Return whether to try again after ``error``."""
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
        """Return whether a renewed session may keep this claim alive."""
        return self._kernel.watchdog.sessions.renews(cancel.granted.group if cancel.granted else None)

    def _tell(self, cancel: _Cancel, message: str, *about: object) -> None:
        """Log each message only once for a claim, because the attempts may go on for hours."""
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
