"""`Term`: one leadership, from the election until its lease is released.

A term goes through these steps. Each change is a method of `Term`:

    elected → ``elected_begins`` → (``work_begins`` → work) → ``renounce`` or ``was_lost`` → ``lost_begins`` →
    ``part_ended`` of all → released

The parts of a term are its work and its two callbacks. A body is the block of a ``with`` statement that has entered the
leadership.

``on_elected`` and ``on_lost`` come in pairs. Each of the two begins once, and ``on_lost`` never begins before
``on_elected``. The lease is renewed until work, ``on_elected`` and ``on_lost`` have all ended, or the grace is over.
Then it is released. See docs/decisions/0011-orderly-end.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from multilock.kernel.election_state import Office, Part, is_inside, mark, set_marks, unmark
from multilock.kernel.holding import HELD, LOST, RELEASING, EndOfBody, Holding
from multilock.kernel.living_clients import in_the_middle
from multilock.log_thread import logger
from multilock.model import Loss, LossReason

__all__ = ["INTERRUPTED", "Leading", "Term"]

T = TypeVar("T", bound=Holding)
INTERRUPTED = "its work was interrupted"
STEPPED_DOWN = "this node stepped down"


class Leading(Holding):
    """A lease that is a leadership, blocking or asyncio."""

    __slots__ = ()

    _term: Term[Any]

    @property
    def term(self) -> int | None:
        """The fencing token of this leadership: greater for every later leader. None if the backend has no tokens.

        ``fence()`` returns the same number, but raises CapabilityMissing if there is none.
        """
        return self.token

    @property
    def identity(self) -> str:
        """The text by which other nodes identify this node."""
        return self.claim.identity

    def is_held(self) -> bool:
        return not self._term.resigning and self._alive()

    def _check_at_entry(self, end: EndOfBody) -> None:
        """See `AnyHeld._check_at_entry`. The body counts as open already. From this call on it also counts as work."""
        self._term.body_begins()
        super()._check_at_entry(end)

    def _body_ends(self, end: EndOfBody) -> bool:
        """See `AnyHeld._body_ends`. The end of the last body also begins the resignation, under the same lock, so that
        no other body can enter in between."""
        with self._kernel.lock:
            if end.counted and self._term.resigning:  # called again after an interrupt; no body has begun since then
                return not end.done
            last = super()._body_ends(end)
            if last and self.stage == HELD:
                self._term.resigning = True
        return last

    def _end_of_work(self, end: EndOfBody | None) -> None:
        """See `AnyHeld._end_of_work`. If a part of the term still runs, the part that ends last reports that all work
        has ended: see `Term.part_ended`."""
        self._term.by_hand = False
        self._term.end_lost()

    def _at_end(self, hook: Callable[[], None]) -> bool:
        """See `AnyHeld._at_end`. The hook is also called when this node begins to step down."""
        return super()._at_end(hook) and not self._term.resigning


class Term(Generic[T]):
    """One leadership, with the progress of its work and its callbacks.

    ``end_at`` is the time at which the lease of a resigned leadership is released, even if a part still runs. If
    ``nobody_waits`` is True, no caller waits for the end, so the part that ends last releases the lease.

    ``by_hand`` is True from the return of `Election.campaign` until the holder ends the leadership itself. The work of
    such a leadership is not a part of the term, so only the holder knows when the work has ended.
    """

    def __init__(self, office: Office[T], leadership: T) -> None:
        self.office = office
        self.leadership = leadership
        self.work = Part("its work", office, done=True)  # no work runs before run() begins it
        self.elected = Part("on_elected", office)
        self.lost = Part("on_lost", office)
        self.announced = False  # on_elected was started
        self.begun_at: float | None = None  # when on_elected began
        self.failed = False  # on_elected raised
        self.loss: Loss[Any] | None = None  # the argument of on_lost, stored before on_lost is called
        self.lost_begun = False
        self.resigning = False
        self.end_at = math.inf
        self.nobody_waits = False
        self.by_hand = False
        self._resigned_by_body = False
        self._body = False  # whether the body of a `with` is counted as work
        self.outlasted = False  # whether the warning about parts that outlast the grace is logged

    def over(self) -> bool:
        """Return whether this node no longer leads, even if the lease is still kept."""
        return self.resigning or not self.leadership._alive()

    # Methods that the blocking and the asyncio API implement

    def run_elected(self) -> object:
        """Call ``on_elected``, then `part_ended`."""
        raise NotImplementedError

    def run_lost(self, loss: Loss[Any]) -> object:
        """Call ``on_lost``, then `part_ended`."""
        raise NotImplementedError

    async def do_work(self, work: Callable[[T], Any]) -> Any:
        """Return the result of ``work(leadership)``. `part_ended` is called when the work has ended."""
        raise NotImplementedError

    def can_work(self) -> bool:
        """Return whether work and ``on_elected`` can still run. Returns False if their event loop was closed."""
        return True

    def can_tell(self) -> bool:
        """Return whether ``on_lost`` can still run."""
        return True

    # Beginnings. Each callback begins only once, even if its start was interrupted and is repeated.

    def start_elected(self) -> None:
        """Have on_elected called."""
        self.office.kernel.callbacks.start(self.run_elected)
        self.announced = True

    def elected_begins(self) -> bool:
        """Record that on_elected begins, so that on_lost may follow. Returns False if on_elected has already begun."""
        with self.office.lock:
            if self.begun_at is not None or self.elected.done:
                return False
            self.begun_at = self.office.kernel.now()
            waiting = self.loss
        if waiting:
            self.office.kernel.callbacks.start(self.run_lost, waiting)
        return True

    def elected_never_begins(self) -> None:
        """Skip both callbacks, because on_elected cannot begin. Does nothing if on_elected has begun."""
        with self.office.lock:
            if self.begun_at is not None:
                return
            self.elected.done = True
        self.part_ended(self.lost)

    def lost_begins(self) -> bool:
        """Record that on_lost begins. Returns False if it has already begun."""
        with self.office.lock:
            again, self.lost_begun = self.lost_begun, True
        return not again

    def work_begins(self, *, body: bool = False) -> bool:
        """Record that the work begins. Returns False if the term is over, because its lease may already be released.

        ``body``: The work is the body of a ``with``. A body inside or beside the work of ``run()`` is a part of that
        work.
        """
        if not self.leadership._alive():
            return False
        with self.office.lock:
            if not self.resigning:  # checked under the lock, so that a resignation either sees the work or prevents it
                self._body = body and (self._body or self.work.done)
                self.work.done = False
            return not self.resigning

    def work_ended(self) -> None:
        """Record that the work of ``run()`` has ended. Bodies that it has left open are the work from now on."""
        self._body = True  # set first: if the last body ends before the next line, its end also ends the work
        self.part_ended(self.work)

    def body_begins(self) -> None:
        """Count the body of a ``with`` as work: the lease is kept until the body has ended, or the grace is over."""
        if self.work_begins(body=True):
            mark(self.work)

    def no_body(self, before: tuple[Part, ...] | None) -> None:
        """Record that a body could not begin.

        ``before`` is the result of `marks` from before the attempt. ``before`` is None if an interrupt came before that
        call.
        """
        self.body_ends()
        if before is not None:
            set_marks(before)  # an outer body of this thread or task keeps its mark

    def loss_for_the_body(self) -> Loss[Any] | None:
        """Return the resignation that must be reported to the body.

        Returns None if there was no resignation, or if the body itself resigned. A body that resigned is notified when
        the grace is over, because the lease is released then.
        """
        if self._resigned_by_body and self.leadership.stage == HELD:
            return None
        return self.loss if self.resigning else None

    def body_ends(self) -> None:
        """Record that a body has ended, and the work too if that was the last body."""
        if self._body:
            self.part_ended(self.work)
        unmark(self.work)

    # Ends

    def part_ended(self, part: Part) -> None:
        """Record that a part has ended. If no caller waits for the end, the last part releases the lease.

        The work has not ended while a body is open. A body counts as open before it calls `work_begins`. So, because of
        the lock, the body either prevents the end of the work or begins the work again.
        """
        with self.office.lock:
            if part is not self.work or not self.leadership._open:
                part.done = True
        if self.nobody_waits and self.all_ended():
            self.office.kernel.releases.later(self.leadership)
        else:
            self.end_lost()
        self.office.condition.notify()

    def end_lost(self) -> None:
        """If the leadership was lost, and all work under it has ended, report that to the lease."""
        if self.leadership.stage == LOST and not self.by_hand and self.all_ended():
            self.office.kernel.releases.later(self.leadership)

    def callbacks_ended(self) -> bool:
        """Return whether both callbacks have ended, or can no longer run."""
        if self.can_work():
            return self.elected.done and self.lost.done
        return self.lost.done or not self.can_tell()

    def all_ended(self) -> bool:
        """Return whether work and both callbacks have ended, or can no longer run."""
        return (self.work.done or not self.can_work()) and self.callbacks_ended()

    def _running(self) -> str:
        """Return the names of the parts that still run, for a log message."""
        working, telling = self.can_work(), self.can_tell()
        parts = (
            (self.work, working),
            (self.elected, working and self.office.on_elected),
            (self.lost, telling and self.office.on_lost),
        )
        return ", ".join(part.name for part, runs in parts if runs and not part.done)

    # The two ends of a term: a loss, and a resignation

    def was_lost(self, loss: Loss[Any]) -> None:
        """Have on_lost called, because the lease was lost. Called once, by the lease's own lost callback."""
        if self.resigning and (running := self._running()):
            logger.warning(
                "the leadership of %r was lost (%s) before its orderly end. Still running while another node may lead: "
                "%s",
                self.office.name,
                loss.reason.value,
                running,
                extra=self.office.kernel.extra(self.leadership),
            )
        self._tell_lost(loss)

    def tell_again(self) -> None:
        """Have on_lost called if its first start failed, for example because its event loop was closed."""
        if loss := self.loss or self.leadership.loss:
            self._tell_lost(loss)

    def _tell_lost(self, loss: Loss[Any]) -> None:
        """Have on_lost called once, with the first loss. If on_elected has not begun, on_lost is called once on_elected
        begins."""
        with self.office.lock:
            loss = self.loss = self.loss or loss
            if self.begun_at is None or self.lost_begun:
                return
        self.office.kernel.callbacks.start(self.run_lost, loss)

    def renounce(self, why: str, grace: float | None = None) -> bool:
        """Stop leading: ``is_held()`` is False from here on, and on_lost (RESIGNED) begins. The lease is still kept.

        If several calls give a grace, the grace that ends first counts. Returns False if the term was already over.
        """
        lease, now = self.leadership, self.office.kernel.now
        if grace is None:
            grace = lease.ttl if self.office.grace is None else self.office.grace
        with self.office.lock:
            self.end_at = min(self.end_at, now() + grace)
        if not lease._alive():
            return False
        with self.office.lock:
            if not self.resigning:
                # The body that resigns is not notified if it is the only open body. Other bodies must be notified, even
                # in other tasks, and also if the work of run() resigns.
                self._resigned_by_body = self._body and is_inside(self.work) and self.leadership._open <= 1
            again, self.resigning = self.resigning, True
        # A second call also notifies all bodies and hooks, because an interrupt may have ended the first call too
        # early.
        self._tell_lost(Loss(lease, LossReason.RESIGNED, False, why, now(), lease.valid_until))
        for hook in list(lease._hooks or ()):  # wakes work that is in wait_lost(), which would otherwise delay the end
            hook()
        self.office.condition.notify()
        return not again

    # An orderly end. The caller that begins it waits for all parts and releases the lease. Two kinds of caller cannot
    # wait: one that an exception unwinds, and a part of the leadership itself. Such a caller leaves the release to the
    # part that ends last, and to a timer at the end of the grace.

    async def resign(self, grace: float | None = None) -> bool:
        """Stop leading, wait until all parts have ended, and release the lease.

        Returns True if this call ended the term, False after a loss or an earlier resignation.
        """
        self.leadership._leave_scope()
        try:
            if in_the_middle():
                first = self.leadership.stage == HELD and not self.resigning
                self.office.kernel.releases.from_within(lambda: self.abdicate(STEPPED_DOWN, grace))
                return first
            first = self.renounce(STEPPED_DOWN, grace)
            if self.office.inside():
                self._give_back_later()
                return first
            return await self.give_back() and first
        except BaseException:
            self.abdicate(INTERRUPTED, grace)
            raise

    def abdicate(self, why: str, grace: float | None = None) -> None:
        """Resign without waiting. This also completes a resignation whose caller was interrupted."""
        try:
            self.renounce(why, grace)
        finally:
            self._give_back_later()

    async def give_back(self) -> bool:
        """Wait until all parts have ended or the grace is over, then release the lease.

        Returns False if the lease was lost before. Several callers may do this at once.
        """
        kernel, leadership, condition = self.office.kernel, self.leadership, self.office.condition
        self.by_hand = False
        await condition.wait_for(lambda: self.all_ended() or leadership.stage != HELD, lambda: self.end_at)
        self._tell_outlasted()
        await kernel.releases.release(leadership)
        answered = kernel.now() + leadership.want.request_timeout
        await condition.wait_for(lambda: leadership.stage != RELEASING, lambda: answered)
        return leadership.stage != LOST

    def _give_back_later(self) -> None:
        """Do what `give_back` does for a caller that cannot wait. A second call changes nothing."""
        self.nobody_waits, self.by_hand = True, False
        kernel = self.office.kernel
        if self.all_ended():
            kernel.releases.later(self.leadership)
        elif self.end_at < math.inf:
            kernel.timers.at(self.end_at, self._grace_over)

    def _grace_over(self) -> None:
        if self.leadership.stage == LOST:  # a lost lease has no grace: the part that ends last reports the end
            return
        self._tell_outlasted()
        self.office.kernel.releases.later(self.leadership)

    def _tell_outlasted(self) -> None:
        if self.leadership.stage != HELD or self.outlasted or not (running := self._running()):
            return
        self.outlasted = True
        logger.warning(
            "the leadership of %r is released at the end of its grace. Still running while another node may lead: %s",
            self.office.name,
            running,
            extra=self.office.kernel.extra(self.leadership),
        )
