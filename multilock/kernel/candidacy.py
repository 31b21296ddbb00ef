"""`Candidacy`: campaign, lead, step down, campaign again and stop, the same for the blocking and the asyncio API.

An election is a contest for the lock of its name, and a leadership is a lease. A node is one candidate: this process or
another one. A term is one leadership of this node, and its work is the user's code that runs meanwhile.
`multilock.kernel.term` handles one leadership, with its callbacks and its end. This file handles the campaigns before a
leadership and the pauses after it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from multilock.errors import BackendRejected, BackendUnavailable, ClientClosed, LockTimeout
from multilock.kernel.acquire import Stop, Stopped, acquire
from multilock.kernel.closing import Ending
from multilock.kernel.election_state import Office
from multilock.kernel.holding import Holding
from multilock.kernel.leader_changes import Observer, Reporter
from multilock.kernel.lease_to_caller import Handing
from multilock.kernel.lock_options import Want, check_hold_at_least, want
from multilock.kernel.no_pickling import OfThisProcess
from multilock.kernel.term import INTERRUPTED, Leading, Term
from multilock.log_thread import logger
from multilock.model import Claim, Granted, LeaderInfo, Loss, LossReason
from multilock.names import check_grace, check_timeout

if TYPE_CHECKING:
    from multilock.kernel.client import Kernel
    from multilock.kernel.scopes import Scope

__all__ = ["Candidacy"]

T = TypeVar("T", bound=Holding)
POLITE = 2.0  # seconds for which a node that resigned lets other nodes go first, if the backend keeps no queue
LOOK_AGAIN = 0.1  # seconds between two requests for the leader, while this node waits until another node leads
FAILED_PAUSE = 1.0  # seconds until a node campaigns again after the backend refused, or its on_elected raised


class Candidacy(OfThisProcess, Generic[T]):
    """Base of `Election` and `AsyncElection`."""

    def __init__(
        self,
        kernel: Kernel,
        scope: Callable[[], Scope[Any] | None],
        name: str,
        on_elected: Callable[[T], object] | None,
        on_lost: Callable[[Loss[Any]], object] | None,
        on_leader_changed: Callable[[LeaderInfo | None], object] | None,
        grace: float | None,
        hold_at_least: float,
        **options: Any,
    ) -> None:
        check_grace(grace)
        self._hold_at_least = check_hold_at_least(kernel.backend, hold_at_least, name)
        callbacks = {"on_elected": on_elected, "on_lost": on_lost, "on_leader_changed": on_leader_changed}
        for what, callback in callbacks.items():
            kernel.check_callback(what, callback)
        self._kernel = kernel
        self._want = want(
            kernel,
            name,
            self._make,
            kind="leader",
            fair=kernel.backend.capabilities.fair,
            on_lost=_tell_term,
            patient=True,
            **options,
        )
        self._office: Office[T] = Office(kernel, name, scope, on_elected, on_lost, grace)
        self._reporter = Reporter(kernel, name, on_leader_changed, self._call, self._report_in_background)
        self._term: Term[T] | None = None
        self._stop: Stop | None = None  # stops the present run() or start()
        self._campaigns: set[Stop] = set()  # one for each running call of campaign()
        self._asking: Stop | None = None  # the `Stop` of the call that asks for the name: see `_turn`
        kernel.add_election(self)

    def _forked(self) -> None:
        """Reset everything in a forked child, where none of the parent's candidates and threads exist."""
        if term := self._term:
            term.work.done = term.elected.done = term.lost.done = True
        self._office.begin()
        self._reporter.forget()
        self._term = self._stop = self._asking = None
        self._campaigns.clear()

    # Methods that the blocking and the asyncio API implement

    def _make(self, kernel: Kernel, want: Want, claim: Claim, granted: Granted, unsure: bool) -> Holding:
        raise NotImplementedError

    def _report_in_background(self, report: Callable[[], Coroutine[Any, Any, None]], observer: Observer) -> None:
        """Run ``report()`` on a new thread or task."""
        raise NotImplementedError

    async def _call(self, callback: Callable[..., object], *args: Any) -> None:
        """Call a callback. If it raises, the exception is logged."""
        raise NotImplementedError

    # One campaign

    async def _campaign_once(self, timeout: float | None, scope: Scope[Any] | None) -> T:
        """See `Election.campaign`."""
        self._kernel.check_open()
        seconds = check_timeout(timeout)
        stop = Stop()
        handing: Handing[Any] = Handing(self._kernel)
        try:
            try:
                self._campaigns.add(stop)
                self._kernel.closers[self._close] = None
                term = await self._campaign(handing, seconds, stop)
                term.by_hand = True
                self._office.push(term.leadership, scope)
                return term.leadership
            finally:
                self._campaigns.discard(stop)
                self._close_no_longer()
                self._office.condition.notify()
        except Stopped:
            self._kernel.check_open()
            raise self._not_won("before stop() was called") from None
        except BaseException:
            self._interrupted(handing)
            raise

    async def _campaign(self, handing: Handing[Any], seconds: float | None, stop: Stop) -> Term[T]:
        """Campaign once, and return the term after on_elected was started.

        Raises Stopped if ``stop`` was called: then this node does not lead.
        """
        deadline = math.inf if seconds is None else self._kernel.now() + seconds
        self._reporter.begin()
        try:
            try:
                # A callback of this election does not wait for the end of the last term: it is a part of that term.
                if not self._office.inside() and not await self._turn(stop, deadline):
                    raise self._not_won(f"in {seconds:g} s: {self._before_us()}")
                left = None if seconds is None else max(0.0, deadline - self._kernel.now())
                lease = await handing.acquire(acquire(self._kernel, self._want, left, stop))
                if lease is None:
                    raise self._not_won(
                        f"in {seconds:g} s: another node leads, or holds a lock of that name. See who with inspect()"
                    )
            except BaseException:
                self._report_no_longer()
                raise
            term: Term[T] = lease._term
            self._take_office(term)
        finally:
            if self._asking is stop:
                self._asking = None
            self._office.condition.notify()
        if stop.called():  # stop() was called while the grant was on its way, and found no term that it could end
            await term.resign()
            raise Stopped
        return term

    async def _turn(self, stop: Stop, deadline: float) -> bool:
        """Wait until this call may ask for the name, or until ``stop`` is called. Returns False at ``deadline``.

        Several calls of campaign(), run() and start() can compete in one election object. Only one of them asks for the
        name at a time, and only after the callbacks of the last term have ended. So the terms of one election never
        overlap.
        """

        def ours() -> bool:
            with self._office.lock:
                asking, term = self._asking, self._term
                # After an interrupt `_asking` may be left over from a call that has ended.
                free = asking in (None, stop) or (asking not in self._campaigns and asking is not self._stop)
                if free and (term is None or term.callbacks_ended()):
                    self._asking = stop
                    return True
            return stop.called()

        return await self._office.condition.wait_for(ours, lambda: deadline)

    def _before_us(self) -> str:
        """Return the reason why `_turn` waits, for an error message."""
        if self.is_leader():
            return "this node leads already"
        if self._asking is not None:
            return "another call already campaigns in this election"
        return "callbacks of the last leadership still run"

    def _not_won(self, why: str) -> LockTimeout:
        return LockTimeout(
            f"the election {self._want.name!r} was not won {why}", name=self._want.name, backend=self._kernel.scheme
        )

    def _interrupted(self, handing: Handing[Any]) -> None:
        """Resign a leadership if its caller was interrupted before the leadership was returned."""
        if handing.lease is not None:
            term: Term[T] = handing.lease._term
            if not term.over():
                if not term.announced:
                    term.start_elected()  # on_lost will be called, and must not come without an on_elected
                term.abdicate(INTERRUPTED)

    def _take_office(self, term: Term[T]) -> None:
        """Begin a term: remember it, report it, and start on_elected."""
        kernel, lease = self._kernel, term.leadership
        self._term = term
        kernel.closers[self._close] = None
        if not lease._at_end(lambda: self._term_ended(term)):
            self._term_ended(term)
        if tell := kernel.events.tell:
            tell.elected(lease, self.identity)
        term.start_elected()

    def _term_ended(self, term: Term[T]) -> None:
        if not term.leadership._over():  # this node has resigned, but the lease is still kept
            return
        self._close_no_longer()
        self._report_no_longer()
        self._office.condition.notify()

    def _close_no_longer(self) -> None:
        """If this node neither campaigns nor leads, remove `_close` from the functions that the client's close()
        calls."""
        with self._office.lock:
            if self._stop is None and not self._campaigns and (self._term is None or self._term.leadership._over()):
                self._kernel.closers.pop(self._close, None)

    def _report_no_longer(self) -> None:
        if self._stop is None:
            self._reporter.end_without_callback()

    # Campaigning again after each term

    async def _stand(self, work: Callable[[T], Any] | None, stop: Stop, handing: Handing[Any]) -> Any:
        """Campaign, lead and campaign again, until ``stop`` is called or ``work`` ends by itself.

        ``handing`` contains the leadership that this call has won. `_term` is not used here, because it may belong to a
        campaign() that runs at the same time.

        Returns the result of ``work``, or None after ``stop`` and after the client was closed.
        """
        try:
            while not stop.called():
                handing.lease = None
                term = await self._elected(handing, stop, insist=work is None)
                if term is None:
                    await self._pause(stop)
                    continue
                ended, result = await self._lead(term, work, stop)
                if ended:
                    return result
                await self._stand_back(term, stop)
        except (Stopped, ClientClosed):
            pass
        finally:
            self._interrupted(handing)  # if the event loop was closed, this runs late: when the coroutine is deleted
        return None

    async def _elected(self, handing: Handing[Any], stop: Stop, *, insist: bool) -> Term[T] | None:
        """Campaign without a timeout. If the backend refuses the request, return None if ``insist`` is True, otherwise
        raise."""
        try:
            return await self._campaign(handing, None, stop)
        except BackendRejected as error:
            if not insist:
                raise
            logger.error(
                "the backend refuses the election %r, trying again: %s",
                self.name,
                error,
                extra={"lock_name": self.name},
            )
            return None

    async def _lead(self, term: Term[T], work: Callable[[T], Any] | None, stop: Stop) -> tuple[bool, Any]:
        """Do the work of one term. Returns whether the work ended by itself while this node led, and the result of the
        work."""
        if work is None:
            await self._office.condition.wait_for(term.over)
            return False, None
        if term.work_begins():
            try:
                result = await term.do_work(work)
            except Exception:
                if await self._ended_by_itself(term, stop):
                    raise
                logger.warning("the work of the election %r failed after its leadership", self.name, exc_info=True)
            else:
                if await self._ended_by_itself(term, stop):
                    return True, result
        await term.give_back()  # releases the lease after a resignation, does nothing after a loss
        return False, None

    async def _ended_by_itself(self, term: Term[T], stop: Stop) -> bool:
        """Return whether the work has ended while this node leads. If so, apply hold_at_least and resign."""
        if self._stop is not stop:  # the work has forked, and this is the child, which is not a candidate
            return True
        if term.over():
            return False
        if self._hold_at_least:
            term.leadership.rest_until = term.leadership.granted_at + self._hold_at_least
        await term.resign()
        return True

    async def _pause(self, stop: Stop) -> None:
        end = self._kernel.now() + FAILED_PAUSE
        await self._office.condition.wait_for(stop.called, lambda: end)

    async def _stand_back(self, term: Term[T], stop: Stop) -> None:
        """Wait after a term before this node campaigns again: after a failure, and to let other nodes go first."""
        if term.failed:
            await self._pause(stop)
        loss = term.leadership.loss
        gives_way = term.resigning or (loss and loss.reason is LossReason.HELD_TOO_LONG)
        if gives_way and not stop.called() and not self._kernel.backend.capabilities.fair:
            await self._office.condition.wait_for(lambda: stop.called() or term.callbacks_ended())
            await self._let_others(term, stop)

    async def _let_others(self, term: Term[T], stop: Stop) -> None:
        """Wait until another node has led, but at most 2 s. Used if the backend has no queue in which this node could
        join last."""
        kernel, name = self._kernel, self._want.name
        observer = Observer(kernel, name)
        end = kernel.now() + POLITE
        try:
            while not stop.called() and (left := end - kernel.now()) > 0:
                info = await kernel.ask(kernel.backend.inspect, name, name=name)
                if info and info.owner != term.leadership.owner:
                    return
                await observer.bell.wait(min(LOOK_AGAIN, left))
        except (BackendUnavailable, BackendRejected):
            pass  # if the backend does not reply, this node does not wait for another leader
        finally:
            observer.close()

    def _begin_standing(self, stop: Stop) -> None:
        """Make this node a candidate until `_end_standing` is called. The caller must call `_end_standing` even after
        an interrupt.

        Raises RuntimeError if this node is a candidate already.
        """
        self._kernel.check_open()
        with self._office.lock:
            if self._stop is not None:
                stopping = self._stop.called()
                state = "is still stopping: wait for its work to end" if stopping else "is running already"
                raise RuntimeError(f"the election {self.name!r} {state}")
            self._stop = stop
            self._kernel.closers[self._close] = None

    def _begin_unless_standing(self, stop: Stop) -> bool:
        """Call `_begin_standing`. Returns False if this node is a candidate already."""
        with self._office.lock:
            if self._stop is not None and not self._stop.called():
                return False
            self._begin_standing(stop)
            return True

    def _end_standing(self, stop: Stop) -> None:
        """End the candidacy that began with ``stop``. If this call is interrupted, call it again.

        If that candidacy has already ended, a candidacy that has begun since is not affected.
        """
        if self._stop is not stop:
            return
        self._reporter.end()
        self._stop = None
        self._close_no_longer()
        self._office.condition.notify()

    # The end

    async def _step_down(self, grace: float | None) -> bool:
        term = self._term
        return term is not None and await term.resign(grace)

    async def _end(self, grace: float | None) -> None:
        """See `Election.stop`."""
        stops = {*self._campaigns, self._stop}
        answered = self._kernel.now() + self._want.request_timeout  # the latest end of the request under way
        self._call_off()
        again = True
        while again:
            term = self._term
            if term:
                await term.resign(grace)
            again = not self._office.inside() and await self._another_term(term, stops - {None}, answered)

    async def _another_term(self, term: Term[T] | None, stops: set[Stop | None], answered: float) -> bool:
        """Wait until ``term`` and the candidacies of ``stops`` have ended.

        Returns True if another term began meanwhile, because a grant was already on its way when its candidacy was
        called off.
        """

        def ended() -> bool:
            return stops.isdisjoint({*self._campaigns, self._stop}) and (term is None or term.all_ended())

        def end() -> float:
            return answered if term is None or term.all_ended() else term.end_at

        await self._office.condition.wait_for(lambda: ended() or self._term is not term, end)
        return self._term is not term

    def _call_off(self) -> None:
        """Prevent further terms."""
        for stop in [*self._campaigns, self._stop]:
            if stop:
                stop.call()
        self._office.condition.notify()
        self._reporter.end()

    def _close(self) -> Ending:
        """End the candidacy, because the client is being closed. Returns the latest time at which the candidacy
        ends."""
        self._call_off()
        term = self._term
        if term:
            term.abdicate("the client was closed")
        return Ending(term.end_at if term else self._kernel.now(), self._office.inside())

    # Members that send no request

    @property
    def name(self) -> str:
        """The name as given to the client, without the client's prefix."""
        return self._want.name

    @property
    def identity(self) -> str:
        """The text by which other nodes identify this candidate."""
        return self._want.identity or self._kernel.identity

    def is_leader(self) -> bool:
        """Return whether this node leads, by the clock at every call, without a request.

        Returns False from the moment at which this node begins to step down.
        """
        term = self._term
        return term is not None and not term.over()

    def _stands(self) -> bool:
        """Return whether this node leads, or is a candidate: from ``start()`` or ``run()`` until ``stop()``."""
        return self._stop is not None or self.is_leader()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} {self.identity!r}{' leading' if self.is_leader() else ''}>"


def _tell_term(loss: Loss[Any]) -> None:
    """Report the loss of a lease to the term of that lease."""
    cast("Leading", loss.lease)._term.was_lost(loss)
