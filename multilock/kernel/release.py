"""The release of a lease: one request, and the background cancel (`background_cancel`) if it is not answered in time.

A body is the block of a ``with`` statement. A part is one lock of a lease of several locks. The ticking thread is the
thread of a client that watches deadlines: it releases for callers that cannot wait.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from multilock import system
from multilock.kernel.background_cancel import call_to_give_back
from multilock.kernel.fork import notice_fork
from multilock.kernel.holding import HELD, RELEASED, RELEASING, AnyHeld, EndOfBody, Holding
from multilock.kernel.living_clients import in_the_middle
from multilock.log_thread import logger
from multilock.model import LossReason, Returned

if TYPE_CHECKING:
    from multilock.kernel.client import Kernel

__all__ = ["Releases"]

BRIEFLY = 0.1  # seconds for which a finalizer waits for the kernel's lock, whose holders never block


class Releases:
    """All releases of one client: those for which the holder waits, those in the background, and those by a finalizer
    or signal handler that has interrupted multilock itself.

    A lease of several locks begins its release as a whole. Then each part is released at the backend separately. If
    another lease holds the same part as well, only the acquire count of the part is lowered.
    """

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        # Leases that the ticking thread must release, each with the end of the body that releases it, or with None.
        self._late: deque[tuple[AnyHeld, EndOfBody | None]] = deque()

    async def release(self, lease: AnyHeld, until: float | None = None, *, body: EndOfBody | None = None) -> bool:
        """Release a lease: see ``Lease.release``. The lease is over from this call on, whatever the backend answers.

        Waits for answers until the time ``until``, by default for one request timeout. ``body``: The end of the
        ``with`` body that calls this. If `AnyHeld._body_ends` returns False for it, nothing is released.
        """
        notice_fork()
        if in_the_middle():
            return self._release_from_within(lease, body)
        kernel = self._kernel
        kernel.face.forget_closed_loop()
        released_at = kernel.now()
        part: Holding | None = None
        returned: Returned | None = None
        try:
            if (decided := self._decide(lease, released_at, body)) is not None:
                return decided
            ours = True
            end = released_at + lease.want.request_timeout if until is None else until
            for part in lease._going_back():
                returned = None
                returned = await self._ask_for_release(part, end)
                ours = self._finish(part, returned, released_at) and ours
            if lease is not part:
                self._finish_whole(lease)
            return ours
        except BaseException:
            # `surely` cannot be used: this is a coroutine, and the clean-up differs from the first attempt.
            if part and (part.stage in (RELEASING, RELEASED) or returned is not None):
                self._finish(part, returned, released_at)
            if lease.stage == RELEASING:
                self.go_on(lease)
            raise

    def _decide(self, lease: AnyHeld, now: float, body: EndOfBody | None) -> bool | None:
        """Return the result of the release if it needs no request, otherwise begin it and return None."""
        with self._kernel.lock:
            if body and not lease._body_ends(body):
                return True
            if lease._proved(now):
                if lease.count > 1 and lease._count_down(body):
                    return True
                lease._begin_release()
                return None
        lease._alive()  # this call loses the lease if its deadline has passed
        lease._end_of_work(body)
        return False

    async def _ask_for_release(self, lease: Holding, until: float) -> Returned | None:
        """Send one release. Returns None if it is not answered in time."""
        kernel = self._kernel
        within = min(lease.want.request_timeout, until - kernel.now())
        if within <= 0:
            return None
        try:
            if lease.rest_until is None:
                return await kernel.face.release(lease.claim, lease.granted, lease.unsure, within)
            call, *args = call_to_give_back(
                kernel.backend, kernel.now(), lease.claim, lease.granted, lease.unsure, lease.rest_until
            )
            return await kernel.face.ask(within, call, *args)
        except Exception as error:
            logger.warning(
                "the release of the lock %r continues in the background: %s",
                lease.name,
                error,
                extra=kernel.extra(lease),
            )
            return None

    def _finish(self, lease: Holding, returned: Returned | None, released_at: float) -> bool:
        """End the release of one lock. Returns False if the backend reports that this claim did not hold the lock.

        If ``returned`` is None, there was no answer, and the release continues in the background. A second call changes
        nothing.
        """
        kernel = self._kernel
        if returned is None:
            with kernel.lock:
                kernel.watchdog.drop(lease)  # an interrupt may have come before `_let_go` dropped it
        if returned is None or returned.again:
            kernel.cancels.add(lease.claim, lease.granted, unsure=True, rest_until=lease.rest_until)
        if returned is None or returned.ours:
            self._part_released(lease, released_at)
            return True
        kernel.losses.lose(
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
        """End the release. Returns True only at the first call. If this call is interrupted, the caller calls it
        again."""
        with self._kernel.lock:
            first = lease._end_release()
            if not first and lease.stage != RELEASED:  # the lease was lost during the release
                return False
        lease._lift_fence()  # an interrupt may have come before `_let_go` lifted it
        lease._leave_scope()
        lease._call_hooks()
        return first

    def _part_released(self, part: Holding, released_at: float) -> None:
        kernel = self._kernel
        first = self._released(part)
        kernel.held.pop(part.claim.id, None)
        if not first:
            return
        if logger.wants(logging.DEBUG):
            logger.debug("released the lock %r", part.name, extra=kernel.extra(part))
        if tell := kernel.events.tell:
            tell.released(part, released_at)

    # For callers that cannot wait

    def later(self, lease: AnyHeld, wanted: Callable[[], bool] | None = None) -> None:
        """Release a lease in the background, however often it was acquired.

        ``wanted()`` is called under the kernel's lock. If it returns False, there is nothing to release.
        """
        held = lease.stage == HELD
        try:
            with self._kernel.lock:
                if wanted and not wanted():
                    return
                begun = lease._begin_release()
            if begun:
                self._release_late(lease)
            else:
                lease._all_work_ended()
        except BaseException:  # interrupted: if we have begun the release, nothing else would finish it
            if held and lease.stage in (RELEASING, RELEASED):
                self.go_on(lease)
            raise

    def take_back(self, lease: AnyHeld, end: EndOfBody | None = None, *, worked: bool = False) -> None:
        """Undo an acquire whose caller was interrupted before it had the lease, or before it could release the lease.

        ``end`` is the end of the body that the acquire began, or None. ``worked`` says whether that body had begun. A
        lease that has no other acquire is released in the background. If it has other acquires, only their count is
        lowered. If the end of another body has already undone this acquire, this call does nothing. A second call with
        the same ``end`` changes nothing.
        """
        self.later(lease, lambda: lease._undo_acquire(end, worked))

    def go_on(self, lease: AnyHeld) -> None:
        """Finish a release in the background, because the caller that waited for its answer will not run again."""
        now = self._kernel.now()
        with self._kernel.lock:
            lease._let_go()
        for part in lease._going_back():
            self._finish(part, None, now)
        self._finish_whole(lease)

    def soon(self, lease: Holding) -> None:
        """Make the ticking thread release a lease, or lower its acquire count. Meant for callers that may hold the
        kernel's lock."""
        self._late.append((lease, None))
        self._kernel.nudge()

    def _release_from_within(self, lease: AnyHeld, body: EndOfBody | None) -> bool:
        """Release a lease from a finalizer or signal handler that interrupted a call of multilock in this thread.

        Such a caller must not wait for a lock that the same thread may hold, because that wait would never end. So the
        ticking thread sends the request.
        """
        kernel = self._kernel
        # The thread that holds the kernel's lock may run a finalizer too, and wait for a lock that this thread holds.
        # So this thread gives up soon, and leaves the whole release to the ticking thread.
        owned = locked = system.is_owned(kernel.lock)
        try:
            locked = owned or kernel.lock.acquire(timeout=BRIEFLY)
            if locked:
                if body and not lease._body_ends(body):
                    return True
                if not lease._proved(kernel.now()):
                    lease._end_of_work(body)
                    return False
                if lease._count_down(body):
                    return True
                lease._begin_release()
            self._late.append((lease, body))
        except BaseException:
            locked = system.is_owned(kernel.lock)  # an interrupt may have come just after `acquire`
            if lease.stage == RELEASING:  # nothing else would finish this release
                self._late.append((lease, body))
            raise
        finally:
            if locked and not owned:
                kernel.lock.release()
            kernel.nudge()
        return True

    def from_within(self, end: Callable[[], None]) -> None:
        """Call ``end()`` for a finalizer or signal handler that interrupted a call of multilock in this thread.

        ``end`` ends a leadership without waiting for anything but the kernel's lock. If that lock is not free soon, the
        ticking thread calls ``end``, for the reason that `_release_from_within` gives.
        """
        kernel = self._kernel
        try:
            with system.Taking(kernel.lock, BRIEFLY, system.Empty):
                end()
        except system.Empty:
            kernel.timers.at(kernel.now(), end)

    def step(self) -> None:
        """Release the leases that `soon` and `_release_from_within` left for the ticking thread. Called on that
        thread."""
        while self._late:
            self._release_late(*self._late.popleft())

    def _release_late(self, lease: AnyHeld, body: EndOfBody | None = None) -> None:
        """Lower the acquire count of a lease, or release the lease through the background cancel. A second call changes
        nothing."""
        kernel = self._kernel
        with kernel.lock:
            if (body and not lease._body_ends(body)) or lease._count_down(body):
                return
            begun = lease._begin_release() or lease.stage == RELEASING
            if begun:
                lease._let_go()
        if not begun:
            lease._end_of_work(body)
            return
        now = kernel.now()
        for part in lease._going_back():
            kernel.cancels.add(part.claim, part.granted, part.unsure, rest_until=part.rest_until)
            self._part_released(part, now)
        self._finish_whole(lease)
