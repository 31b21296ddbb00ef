"""How a client ends: closed, dropped, or with its process; and what a forked child is left with.

SIGTERM's default action and ``os._exit`` run none of this: then the ttl ends the locks.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from multilock import system, telling
from multilock.errors import BackendUnavailable
from multilock.kernel import process
from multilock.kernel.giving_back import call_to_give_back
from multilock.kernel.holding import HELD, RELEASING, Holding
from multilock.kernel.runtime import call_inside, wait_until
from multilock.model import Claim, Granted, LossReason
from multilock.telling import logger

if TYPE_CHECKING:
    from multilock.kernel.core import Kernel

__all__ = ["End", "Ending"]

LOOK_AGAIN = 5.0  # seconds between looks at whether a dropped client can end
TELL_WITHIN = 0.5  # seconds for which close() waits until the log handlers have what was said


class Ending(NamedTuple):
    """What an election says to the client that closes."""

    at: float  # when it has given back what it holds, at the latest
    awaits_caller: bool  # who closes is itself what it waits for


class End:
    """Of one client, once: by `close` or by `exit`."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self.dropped = False  # by its user, and not ended yet

    def close(self) -> None:
        """Blocking, bounded: callbacks and answers get one request timeout each, elections their grace if that is more.
        See ``Client.close``."""
        process.notice_fork()
        kernel = self._kernel
        leases: list[Holding] | None = None
        try:
            with kernel.lock:
                if kernel.closed:
                    return
                leases = list(kernel.held.values())
                kernel.closed = True
            self._close(leases)
        except BaseException:
            if leases is not None and not kernel.finished:  # interrupted: nobody else would end it
                kernel.closed = True
                kernel.spawn(lambda: self._close(leases), "multilock-close")
            raise

    def _close(self, leases: list[Holding]) -> None:
        """Of a closed client, what it held. Twice is harmless."""
        kernel = self._kernel
        budget = kernel.request_timeout()
        endings = [end() for end in list(kernel.closers)]
        kernel.monitor.wake(None)
        kernel.gate.wake_all()
        kernel.followers.changed(None)
        for lease in leases:
            if lease.is_held():  # a leadership is not any more: it was resigned, and is kept until its work has ended
                kernel.monitor.lose(
                    lease,
                    LossReason.CLOSED,
                    "the client was closed while it was held",
                    confirmed=False,
                    give_back=False,
                )
        until = max((ending.at for ending in endings), default=0.0)
        if process.in_the_middle() or any(ending.awaits_caller for ending in endings):
            kernel.spawn(lambda: self._give_all_back(leases, budget, until), "multilock-close")
        else:
            self._give_all_back(leases, budget, until)

    def _give_all_back(self, leases: list[Holding], budget: float, until: float) -> None:
        kernel = self._kernel
        try:
            kernel.monitor.wait(budget)  # which starts callbacks
            kernel.callbacks.wait(budget)
        finally:
            kernel.lift_fences()  # before any request: an outage must not kill who has ended in order
            for lease in leases:
                if lease._loss:
                    kernel.cancels.add(lease._claim, lease._granted, lease._unsure, rest_until=lease._rest_until)
        try:  # elections give back what they hold: this is no shorter, in case a timer of theirs is late
            wait_until(
                kernel.runtime, lambda: all(lease._state != HELD for lease in leases), until + budget - kernel.now()
            )
        finally:
            for lease in leases:
                if not lease._loss:
                    kernel.giving_back.later(lease)
        self._wait_for_requests(budget)
        kernel.cancels.wait(budget)
        self._finish()
        telling.flush(TELL_WITHIN)

    def drop(self) -> None:
        """Nobody has the client any more, and nobody closed it: its threads and connections end when nothing needs
        them. A lease keeps its client, so none is held."""
        kernel = self._kernel
        self.dropped = True
        kernel.poke(kernel.now())
        warnings.warn(f"a client of {kernel.scheme} was dropped: close() it, or use it in a with", ResourceWarning, 1)

    def look_at_dropped(self) -> float:
        """On the ticking thread: end it, if nothing needs it any more. Seconds after which to look again."""
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
        """Of acquires, which hand their claims to the background cancel on their way out, and of releases."""
        kernel = self._kernel
        wait_until(kernel.runtime, lambda: not (kernel.monitor.waiting or kernel.held), budget)

    def _finish(self) -> None:
        kernel = self._kernel
        with kernel.lock:
            kernel.finished = True
        kernel.followers.close()
        kernel.watchdog.close()
        kernel.cancels.close()
        kernel.face.close()
        kernel.backend.close()
        if kernel.ticker:
            kernel.ticker.close()

    def withdraw(self, deadline: float) -> bool:
        """The interpreter ends: nobody here waits any more. False: the client has ended before.

        For all clients before any of them gives a lock back, which could go to a waiter that ends with this process.
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
        """Then give back what is held, in this thread: no callbacks, nothing past ``deadline``."""
        kernel = self._kernel
        with kernel.lock:
            leases = list(kernel.held.values())
            # A release under way may not have sent anything yet, and its thread ends with this process.
            claims = [
                (lease._claim, lease._granted, lease._unsure or lease._state == RELEASING, lease._rest_until)
                for lease in leases
            ]
            for lease in leases:
                lease._abandon()
                kernel.forget(lease)
        self._give_back([*claims, *kernel.cancels.take()], deadline)
        self._finish()

    def _give_back(self, claims: Iterable[tuple[Claim, Granted | None, bool, float | None]], deadline: float) -> None:
        kernel = self._kernel
        for claim, granted, unsure, rest_until in claims:
            if (left := deadline - kernel.now()) <= 0:
                break
            try:
                call, *args = call_to_give_back(kernel.backend, kernel.now(), claim, granted, unsure, rest_until)
                call_inside(call, *args, min(left, kernel.request_timeout(claim.ttl)))
            except Exception as error:
                logger.warning("the lock %r could not be given back at exit: %s", claim.name, error)
                if isinstance(error, BackendUnavailable):
                    break  # the rest would only use up the time of other clients

    def forked(self) -> None:
        """In the child: every lease reads RELEASED, nothing is given back, and the client opens afresh."""
        kernel = self._kernel
        kernel.lock = system.RLock()  # another thread may have held it, also that of a closed client
        kernel.fence = None  # its timer is the parent's
        for lease in [*kernel.held.values(), *kernel.apart]:
            lease._reset_in_child()
        kernel.apart.clear()
        for election in list(kernel.elections):
            election._forked()
        if kernel.closed:
            kernel.finished = True  # what its parent still gives back, it does without us
        else:
            kernel.closers.clear()
            kernel.died = False
            kernel.start()
