"""One leadership: its work and its callbacks, how it ends in order, and when its lease is given back.

A term goes through these states, each change a method of `Term` named after it:

    elected → ``elected_begins`` → (``work_begins`` → work) → ``renounce`` or ``was_lost`` → ``lost_begins`` →
    ``part_ended`` of all → given back

``on_elected`` and ``on_lost`` come in pairs: each begins once, and ``on_lost`` not before ``on_elected``. The lease is
renewed until work, ``on_elected`` and ``on_lost`` have all ended, or the grace is over, and given back then. See
docs/decisions/0011-orderly-end.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from multilock.kernel.holding import HELD, LOST, RELEASING, Holding
from multilock.kernel.office import Office, Part
from multilock.model import Loss, LossReason
from multilock.telling import logger

__all__ = ["INTERRUPTED", "Leading", "Term"]

T = TypeVar("T", bound=Holding)
INTERRUPTED = "its work was interrupted"


class Leading(Holding):
    """What the leaderships of both faces add to their leases."""

    __slots__ = ()

    _term: Term[Any]

    @property
    def term(self) -> int | None:
        """The fencing token of this leadership: greater for every later leader."""
        return self.token

    @property
    def identity(self) -> str:
        """Who this node is, as others see it."""
        return self._claim.identity

    def is_held(self) -> bool:
        return not self._term.resigning and self._alive()

    def _at_end(self, hook: Callable[[], None]) -> bool:
        """It is called when this node begins to step down, too."""
        return super()._at_end(hook) and not self._term.resigning


class Term(Generic[T]):
    """One leadership, and how far its work and its callbacks are."""

    def __init__(self, office: Office[T], leadership: T) -> None:
        self.office = office
        self.leadership = leadership
        self.work = Part("its work", office, done=True)  # there is none before run() begins it
        self.elected = Part("on_elected", office)
        self.lost = Part("on_lost", office)
        self.announced = False  # on_elected is called, or going to be
        self.begun_at: float | None = None  # when on_elected was called
        self.failed = False  # on_elected raised
        self.loss: Loss[Any] | None = None  # what on_lost was, or is to be, called with
        self.lost_begun = False
        self.resigning = False
        self.end_at = math.inf  # resigned, it is given back then, whatever still runs
        self.nobody_waits = False  # for the end, in order to give the lease back: what ends last does
        self.outlasted = False  # it was said that something runs longer than the lease is kept

    def over(self) -> bool:
        return self.resigning or not self.leadership._alive()

    # For the faces to fill in

    def run_elected(self) -> object:
        """Call ``on_elected``, then `part_ended`."""
        raise NotImplementedError

    def run_lost(self, loss: Loss[Any]) -> object:
        """Call ``on_lost``, then `part_ended`."""
        raise NotImplementedError

    async def do_work(self, work: Callable[[T], Any]) -> Any:
        """The result of ``work(leadership)``. `part_ended` is called when it has ended."""
        raise NotImplementedError

    def can_work(self) -> bool:
        """Whether work and ``on_elected``, if they have not ended, still can."""
        return True

    def can_tell(self) -> bool:
        """The same of ``on_lost``."""
        return True

    # What begins. Both callbacks begin once: where an interrupt came as one was being started, it is started again.

    def start_elected(self) -> None:
        self.office.kernel.callbacks.start(self.run_elected)
        self.announced = True

    def elected_begins(self) -> bool:
        """on_elected is being called: from here on on_lost may be. False: it has begun already."""
        with self.office.lock:
            if self.begun_at is not None or self.elected.done:
                return False
            self.begun_at = self.office.kernel.now()
            waiting = self.loss
        if waiting:
            self.office.kernel.callbacks.start(self.run_lost, waiting)
        return True

    def elected_never_begins(self) -> None:
        """Where on_elected was never called, on_lost will not be, either. Has it begun, nothing happens."""
        with self.office.lock:
            if self.begun_at is not None:
                return
            self.elected.done = True
        self.part_ended(self.lost)

    def lost_begins(self) -> bool:
        """False: it has begun already."""
        with self.office.lock:
            again, self.lost_begun = self.lost_begun, True
        return not again

    def work_begins(self) -> bool:
        """False: the term is over already, and may have been given back."""
        if not self.leadership._alive():
            return False
        with self.office.lock:
            if not self.resigning:  # who resigns, under this lock, sees the work or keeps it from beginning
                self.work.done = False
            return not self.resigning

    # What ends

    def part_ended(self, part: Part) -> None:
        part.done = True
        if self.nobody_waits and self.all_ended():
            self.office.kernel.giving_back.later(self.leadership)
        self.office.condition.notify()

    def callbacks_ended(self) -> bool:
        if self.can_work():
            return self.elected.done and self.lost.done
        return self.lost.done or not self.can_tell()

    def all_ended(self) -> bool:
        return (self.work.done or not self.can_work()) and self.callbacks_ended()

    def _running(self) -> str:
        """What of the user's code runs still."""
        working, telling = self.can_work(), self.can_tell()
        parts = (
            (self.work, working),
            (self.elected, working and self.office.on_elected),
            (self.lost, telling and self.office.on_lost),
        )
        return ", ".join(part.name for part, runs in parts if runs and not part.done)

    # A loss, and a resignation

    def was_lost(self, loss: Loss[Any]) -> None:
        """Without our doing."""
        if self.resigning and (running := self._running()):
            logger.warning(
                "the leadership of %r was lost (%s) before its orderly end; still running beside the next one: %s",
                self.office.name,
                loss.reason.value,
                running,
                extra=self.office.kernel.extra(self.leadership),
            )
        self._tell_lost(loss)

    def tell_again(self) -> None:
        """Where on_lost could not be called as it should have been."""
        if loss := self.loss or self.leadership._loss:
            self._tell_lost(loss)

    def _tell_lost(self, loss: Loss[Any]) -> None:
        """Have on_lost called once, with the first loss, and not before on_elected."""
        with self.office.lock:
            loss = self.loss = self.loss or loss
            if self.begun_at is None or self.lost_begun:
                return
        self.office.kernel.callbacks.start(self.run_lost, loss)

    def renounce(self, why: str, grace: float | None = None) -> bool:
        """Lead no more: ``is_held()`` is False from here on, and on_lost (RESIGNED) begins; the lease is still kept.

        Of several graces the one that ends first counts. False: it was over already.
        """
        lease, now = self.leadership, self.office.kernel.now
        if grace is None:
            grace = lease.ttl if self.office.grace is None else self.office.grace
        with self.office.lock:
            self.end_at = min(self.end_at, now() + grace)
        if not lease._alive():
            return False
        with self.office.lock:
            again, self.resigning = self.resigning, True
        # Again too: who began may have been interrupted before this.
        self._tell_lost(Loss(lease, LossReason.RESIGNED, False, why, now(), lease._valid_until))
        for hook in list(lease._hooks or ()):  # a work that waits for its end, as by wait_lost(), would keep it
            hook()
        self.office.condition.notify()
        return not again

    # An orderly end. Who begins it waits, and gives the lease back. Who cannot wait, because it unwinds or is part of
    # what has to end, leaves that to whatever ends last, and to a timer.

    async def resign(self, grace: float | None = None) -> bool:
        """Renounce, and give the lease back at the end. True if this ended it; False after a loss or for a second."""
        self.leadership._leave_scope()
        try:
            first = self.renounce("this node stepped down", grace)
            if self.office.inside():
                self._give_back_later()
                return first
            return await self.give_back() and first
        except BaseException:
            self.abdicate(INTERRUPTED, grace)
            raise

    def abdicate(self, why: str, grace: float | None = None) -> None:
        """Resign without waiting. A resignation that has begun already goes on without whoever began it."""
        try:
            self.renounce(why, grace)
        finally:
            self._give_back_later()

    async def give_back(self) -> bool:
        """When all has ended or the grace is over; True unless it was lost before. Several may do this at once."""
        kernel, leadership, condition = self.office.kernel, self.leadership, self.office.condition
        await condition.wait_for(lambda: self.all_ended() or leadership._state != HELD, lambda: self.end_at)
        self._tell_outlasted()
        await kernel.giving_back.release(leadership)
        answered = kernel.now() + leadership._want.request_timeout
        await condition.wait_for(lambda: leadership._state != RELEASING, lambda: answered)
        return leadership._state != LOST

    def _give_back_later(self) -> None:
        """The same for somebody who cannot wait. Twice is harmless."""
        self.nobody_waits = True
        kernel = self.office.kernel
        if self.all_ended():
            kernel.giving_back.later(self.leadership)
        elif self.end_at < math.inf:
            kernel.timers.at(self.end_at, self._grace_over)

    def _grace_over(self) -> None:
        self._tell_outlasted()
        self.office.kernel.giving_back.later(self.leadership)

    def _tell_outlasted(self) -> None:
        if self.leadership._state != HELD or self.outlasted or not (running := self._running()):
            return
        self.outlasted = True
        logger.warning(
            "the leadership of %r is given back at the end of its grace; still running beside the next one: %s",
            self.office.name,
            running,
            extra=self.office.kernel.extra(self.leadership),
        )
