"""`End`: how a client ends (close(), garbage collector, exit of the process), and its reset in a forked child.

SIGTERM's default action and ``os._exit`` skip the end of the client. The locks then end with their ttl.

A claim is the demand of one caller for one name. The work of an election is the user's code that runs while this node
leads. The ticking thread is the thread of a client that watches deadlines.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from multilock import log_thread, system
from multilock.errors import BackendUnavailable
from multilock.kernel.background_cancel import call_to_give_back
from multilock.kernel.callbacks import CALLED
from multilock.kernel.fork import notice_fork
from multilock.kernel.holding import HELD, RELEASING, Holding
from multilock.kernel.inside_backend import call_inside
from multilock.kernel.living_clients import in_the_middle
from multilock.kernel.runtime import wait_until
from multilock.log_thread import logger
from multilock.model import Claim, Granted, LossReason

if TYPE_CHECKING:
    from multilock.kernel.client import Kernel

__all__ = ["End", "Ending"]

LOOK_AGAIN = 5.0  # seconds between checks whether a dropped client can end
LIMITS = 7  # request timeouts after which close() has certainly ended, besides the grace of elections
TELL_WITHIN = 0.5  # seconds for which close() waits until the log handlers have every line


class Ending(NamedTuple):
    """The answer of an election to the client that is being closed."""

    at: float  # the latest time at which the election releases its lease
    awaits_caller: bool  # whether close() was called by the work or a callback for which the election waits


class End:
    """The end of one client, which happens once: by `close` or by `exit`."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._closing: int | None = None  # the id of the thread that runs `close`
        self._awaits_work = False  # whether `close` still waits for the work of elections
        self._over_by = math.inf  # the latest time at which `close` returns
        self._ended = False  # whether the client has ended completely
        self.dropped = False  # whether no reference to the client is left, although the client has not ended yet

    def close(self) -> None:
        """End the client: see ``Client.close``.

        Blocks until the client has ended. That takes less time than `LIMITS` request timeouts and the grace of its
        elections together. A second call waits for the first.
        """
        notice_fork()
        kernel = self._kernel
        leases: list[Holding] | None = None
        try:
            with kernel.lock:
                if not kernel.closed:
                    leases = list(kernel.held.values())
                    self._closing, self._awaits_work = system.get_ident(), bool(kernel.closers)
                    kernel.closed = True
            if leases is None:
                self._wait_for_the_end()
            else:
                self._close(leases)
        except BaseException:
            if leases is not None and not self._ended:  # interrupted: nothing else would end the client
                kernel.closed = True
                kernel.spawn(lambda: self._close(leases), "multilock-close")
            raise

    def _wait_for_the_end(self) -> None:
        """Wait for the `close` of another thread, unless that thread may wait for this one.

        That is possible if this call comes from a finalizer or a callback, or while the other `close` waits for the
        work of an election.
        """
        kernel = self._kernel
        if not (in_the_middle() or CALLED.get() or self._awaits_work) and self._closing not in (
            None,
            system.get_ident(),
        ):
            wait_until(kernel.runtime, lambda: self._ended or kernel.now() >= self._over_by, math.inf)

    def _close(self, leases: list[Holding]) -> None:
        """Do the work of `close`, once the client accepts no new calls. ``leases`` are the leases that the client
        still held then. A second call changes nothing."""
        kernel = self._kernel
        budget = kernel.request_timeout()
        endings = [end() for end in list(kernel.closers)]
        kernel.monitor.wake(None)
        kernel.gate.wake_all()
        kernel.followers.changed(None)
        for lease in leases:
            if lease.is_held():  # False for a leadership, which was resigned and is kept until its work has ended
                kernel.losses.lose(
                    lease,
                    LossReason.CLOSED,
                    "the client was closed while it was held",
                    confirmed=False,
                    give_back=False,
                )
        until = max((ending.at for ending in endings), default=0.0)
        self._over_by = max(until, kernel.now()) + LIMITS * budget
        if in_the_middle() or any(ending.awaits_caller for ending in endings):
            kernel.spawn(lambda: self._give_all_back(leases, budget, until), "multilock-close")
        else:
            self._give_all_back(leases, budget, until)

    def _give_all_back(self, leases: list[Holding], budget: float, until: float) -> None:
        """Wait for callbacks, release every lease, wait for the answers, and end threads and connections.

        ``until`` is the time by which the elections have released their leases.
        """
        kernel = self._kernel
        self._closing = system.get_ident()
        try:
            kernel.losses.wait(budget)  # wait until every callback has been started
            kernel.callbacks.wait(budget)
        finally:
            kernel.lift_fences()  # before any request, because an outage must not kill a process during its orderly end
            for lease in leases:
                if lease.loss:
                    kernel.cancels.add(lease.claim, lease.granted, lease.unsure, rest_until=lease.rest_until)
        # Wait for elections, which release their own leases at ``until`` at the latest. `budget` is added because the
        # timer of an election may be late.
        try:
            wait_until(
                kernel.runtime, lambda: all(lease.stage != HELD for lease in leases), until + budget - kernel.now()
            )
        finally:
            for lease in leases:
                if not lease.loss:
                    kernel.releases.later(lease)
        self._awaits_work = False
        # Each request ends within one `budget`, but a busy machine may run its thread later. With a shorter wait, the
        # claim of such a request would not be cancelled.
        self._wait_for_requests(2 * budget)
        kernel.cancels.wait(budget)
        self._finish()
        log_thread.flush(TELL_WITHIN)

    def drop(self) -> None:
        """Plan the end of a client that nobody refers to and nobody has closed.

        A lease refers to its client, so if nobody refers to the client, no lease is held. Threads and connections end
        when nothing needs them.
        """
        kernel = self._kernel
        self.dropped = True
        kernel.poke(kernel.now())
        warnings.warn(
            f"a client of {kernel.scheme} was dropped without close(): close it, or use it in `with`",
            ResourceWarning,
            1,
        )

    def look_at_dropped(self) -> float:
        """End a dropped client if nothing needs it. Returns the seconds until the next check.

        Called on the ticking thread.
        """
        kernel = self._kernel
        if (
            kernel.held
            or kernel.monitor.waiting
            or kernel.closers
            or not kernel.cancels.wait(0)
            or kernel.followers.wanted()
        ):
            return LOOK_AGAIN
        kernel.spawn(self.close, "multilock-close")
        self.dropped = False
        return math.inf

    def _wait_for_requests(self, budget: float) -> None:
        """Wait for acquires and releases under way. The acquires have their claims released in the background."""
        kernel = self._kernel
        wait_until(kernel.runtime, lambda: not (kernel.monitor.waiting or kernel.held), budget)

    def _finish(self) -> None:
        """End the threads and connections of the client."""
        kernel = self._kernel
        with kernel.lock:
            kernel.finished = True
        for part in (kernel.followers, kernel.watchdog, kernel.cancels, kernel.face, kernel.backend):
            try:
                part.close()
            except Exception:  # log it, because the other parts must still be closed
                logger.exception("a part of the client could not be closed")
        if kernel.ticker:
            kernel.ticker.close()
        self._ended = True

    def withdraw(self, deadline: float) -> bool:
        """Cancel the claims of all waiters, because the interpreter ends. Returns False if the client had already
        ended.

        All clients do this before any of them releases a lock. Otherwise a waiter of this process could get the lock,
        and would then end with the process.
        """
        kernel = self._kernel
        kernel.lift_fences()
        with kernel.lock:
            kernel.closed = True
            waiting = [one.claim for one in kernel.monitor.waiting.copy().values() if one.claim.id not in kernel.held]
        if kernel.finished:
            return False
        self._give_back([*((claim, None, True, None) for claim in waiting), *kernel.cancels.take()], deadline)
        return True

    def exit(self, deadline: float) -> None:
        """Release all held locks, after `withdraw`, in this thread. Runs no callbacks, and ends by ``deadline``."""
        kernel = self._kernel
        with kernel.lock:
            leases = list(kernel.held.values())
            # A release under way may not have sent its request yet, and its thread ends with this process. So the
            # request is sent again here.
            claims = [
                (lease.claim, lease.granted, lease.unsure or lease.stage == RELEASING, lease.rest_until)
                for lease in leases
            ]
            for lease in leases:
                lease._abandon()
                kernel.forget(lease)
        self._give_back([*claims, *kernel.cancels.take()], deadline)
        self._finish()

    def _give_back(self, claims: Iterable[tuple[Claim, Granted | None, bool, float | None]], deadline: float) -> None:
        """Send one release for each claim, until ``deadline`` or the first outage."""
        kernel = self._kernel
        for claim, granted, unsure, rest_until in claims:
            if (left := deadline - kernel.now()) <= 0:
                break
            try:
                call, *args = call_to_give_back(kernel.backend, kernel.now(), claim, granted, unsure, rest_until)
                call_inside(call, *args, min(left, kernel.request_timeout(claim.ttl)))
            except Exception as error:
                logger.warning("the lock %r could not be released at exit: %s", claim.name, error)
                if isinstance(error, BackendUnavailable):
                    break  # further attempts would only use up the time of the other clients

    def forked(self) -> None:
        """Reset the client in a forked child: every lease becomes RELEASED there, and no release is sent.

        The child opens its own connections.
        """
        kernel = self._kernel
        self._closing = None
        kernel.lock = system.RLock()  # another thread of the parent may have held this lock, even in a closed client
        kernel.fence = None  # the timer belongs to the parent
        for lease in [*kernel.held.values(), *kernel.apart]:
            lease._reset_in_child()
        kernel.apart.clear()
        for election in list(kernel.elections):
            election._forked()
        if kernel.closed:
            kernel.finished = True  # the parent finishes the releases under way
        else:
            kernel.closers.clear()
            kernel.died = False
            kernel.start()
