"""The asyncio API of leader election, with the members of `multilock.election`.

A term is one leadership, and its work is the user's code that runs meanwhile.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from multilock.aio.callbacks import await_safely, go_on_if_cancelled
from multilock.aio.cancel_on_lost import Body
from multilock.aio.lock import Acquiring, HeldAsyncLease
from multilock.aio.requests import LoopFace
from multilock.api_mistakes import ForAsyncWith
from multilock.errors import ClientClosed
from multilock.kernel.acquire import Stop
from multilock.kernel.candidacy import Candidacy
from multilock.kernel.election_state import Office, inside, marks
from multilock.kernel.holding import EndOfBody
from multilock.kernel.leader_changes import Observer, leader_info
from multilock.kernel.lease_to_caller import Handing
from multilock.kernel.term import INTERRUPTED, Leading, Term
from multilock.log_thread import logger
from multilock.model import Claim, Granted, LeaderInfo, Loss, LossReason
from multilock.names import check_grace, check_timeout

if TYPE_CHECKING:
    from multilock.kernel.client import Kernel
    from multilock.kernel.lock_options import Want
    from multilock.kernel.scopes import Scope

__all__ = ["AsyncElection", "AsyncLeadership"]

R = TypeVar("R")


class AsyncLeadership(Leading, HeldAsyncLease):
    """The lease of a leader. ``await leadership.release()`` does the same as `AsyncElection.resign`.

    ``is_held()`` is False from the moment at which this node begins to step down: see `multilock.Leadership`.
    """

    __slots__ = ("_election", "_term")

    def __init__(
        self, kernel: Kernel, want: Want, claim: Claim, granted: Granted, unsure: bool, election: AsyncElection
    ) -> None:
        super().__init__(kernel, want, claim, granted, unsure, cancel_on_lost=True)
        self._election = election
        self._term: LoopTerm = LoopTerm(election._office, self)

    def _enter(self) -> Body:
        before = marks()
        try:
            return super()._enter()
        except BaseException:
            self._term.no_body(before)
            raise

    def _loss_for_the_body(self) -> Loss[Any] | None:
        return super()._loss_for_the_body() or self._term.loss_for_the_body()

    async def _end_body(self, entered: bool) -> None:
        last = not entered or self._body_ends(EndOfBody())
        self._term.body_ends()
        if last:
            await self.release()

    async def release(self) -> bool:
        self._election._come_to_loop()
        return await self._term.resign()


class LoopTerm(Term[AsyncLeadership]):
    """A term whose work and callbacks are tasks of the client's loop. Work and ``on_elected`` are cancelled at the end
    of the term.

    ``_loop`` is the loop of work and on_elected. ``_lost_loop`` is the loop of on_lost, which is another loop if the
    first was closed.
    """

    def __init__(self, office: Office[AsyncLeadership], leadership: AsyncLeadership) -> None:
        super().__init__(office, leadership)
        self._elected_task: asyncio.Task[Any] | None = None
        self._loop = asyncio.get_running_loop()
        self._lost_loop: asyncio.AbstractEventLoop | None = None

    def can_work(self) -> bool:
        return not self._loop.is_closed()

    def can_tell(self) -> bool:
        if self.begun_at is None and not self.can_work():
            return False  # on_elected was never called, so on_lost will not be called either
        loop = self._lost_loop or cast("LoopFace", self.office.kernel.face).its_loop()
        return loop is not None and not loop.is_closed()

    def run_elected(self) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(self._run_elected())
        # A task that is cancelled before its first step never runs its coroutine. The end of the task reports that.
        task.add_done_callback(lambda _: self.elected_never_begins())
        return task

    async def _run_elected(self) -> None:
        if not self.elected_begins():
            return
        task = self._elected_task = asyncio.current_task()
        try:
            # on_elected is called even if the term is over, because on_lost follows, and must not be called without it.
            if self.office.on_elected:
                with inside(self.elected):
                    result = self.office.on_elected(self.leadership)
                    if inspect.isawaitable(result):
                        await result
        except asyncio.CancelledError:
            if not self.over():
                if task and task.cancelling():
                    raise
                self.failed = True
                logger.exception(
                    "on_elected of the election %r cancelled itself, so this node resigns", self.office.name
                )
        except Exception:
            self.failed = True
            logger.exception("on_elected of the election %r raised, so this node resigns", self.office.name)
        finally:
            self.part_ended(self.elected)
        if self.failed and not self.over():
            self.abdicate("its on_elected raised")

    def run_lost(self, loss: Loss[AsyncLeadership]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(self._run_lost(loss))
        task.add_done_callback(lambda _: self.tell_again())  # on_lost must run even if the task was cancelled
        return task

    async def _run_lost(self, loss: Loss[AsyncLeadership]) -> None:
        if not self.lost_begins():
            return
        self._lost_loop = asyncio.get_running_loop()
        self._cancel_elected(loss)
        try:
            if self.office.on_lost:
                with inside(self.lost):
                    await await_safely(self.office.on_lost, loss)
        finally:
            self.part_ended(self.lost)

    def _cancel_elected(self, loss: Loss[AsyncLeadership]) -> None:
        task = self._elected_task
        if task is None or self.elected.done or not self.can_work():
            return
        # A loop that ends cancels all its tasks: the work, which makes this node resign, and the task of on_elected. A
        # second cancellation would cut off the clean-up of on_elected.
        if not (loss.reason is LossReason.RESIGNED and task.cancelling()):
            task.cancel()

    async def do_work(self, work: Callable[[AsyncLeadership], Any]) -> Any:
        task = asyncio.create_task(self._begin_work(work))
        task.add_done_callback(lambda _: self.work_ended())
        try:
            await self.office.condition.wait_for(lambda: task.done() or self.over())
        except asyncio.CancelledError:
            self.abdicate(INTERRUPTED)  # called before the work has ended, because that may take long
            raise
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait([task])
            self.leadership._leave_scope()
        if task.cancelled() and self.over():
            return None
        return await task

    async def _begin_work(self, work: Callable[[AsyncLeadership], Any]) -> Any:
        with inside(self.work):
            self.office.push(self.leadership)
            working = work(self.leadership)
            if not inspect.isawaitable(working):
                raise TypeError(f"run takes a coroutine function, but {work!r:.60} returned {working!r:.60}")
            return await working


class AsyncLeaders:
    """The iterator that `AsyncElection.observe` returns.

    If ``anext()`` is cancelled, for example by ``asyncio.wait_for``, nothing is lost: the next call continues.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> LeaderInfo | None:
        try:
            return await self._observer.following()
        except ClientClosed:
            raise StopAsyncIteration from None

    async def aclose(self) -> None:
        """End the iteration. A task that waits in ``anext()`` gets StopAsyncIteration."""
        self._observer.close()

    def __del__(self) -> None:
        self._observer.drop()


class AsyncElection(ForAsyncWith, Candidacy[AsyncLeadership]):
    """A candidate for the leadership of a name. The asyncio twin of `multilock.Election`.

    Callbacks run on the event loop and may be ``async def``. ``async with election:`` calls `start` and `stop`. Made by
    `AsyncClient.election`.
    """

    _background: asyncio.Task[Any] | None = None
    _watching: asyncio.Task[Any] | None = None
    _loop: asyncio.AbstractEventLoop | None = None

    def _forked(self) -> None:
        super()._forked()
        self._loop = None

    def _come_to_loop(self) -> None:
        """Move to the running loop. If the former loop was closed, end the calls that ran there, as a cancellation
        would.

        Coroutines of a closed loop never unwind, so they cannot clean up themselves.
        """
        before, self._loop = self._loop, cast("LoopFace", self._kernel.face).loop()
        if before is None or not before.is_closed():
            return
        self._reporter.end()
        self._office.condition.forget()
        self._campaigns.clear()
        if term := self._term:
            term.tell_again()
        if stop := self._stop:
            self._call_off()
            if self._term and not self._term.over():
                self._term.abdicate(INTERRUPTED)
            self._end_standing(stop)

    def _make(self, kernel: Kernel, want: Want, claim: Claim, granted: Granted, unsure: bool) -> AsyncLeadership:
        return AsyncLeadership(kernel, want, claim, granted, unsure, self)

    def campaign(self, timeout: float | None = None) -> Acquiring[AsyncLeadership]:
        """Wait until this node is elected. Await the result for the `AsyncLeadership`, or enter it with ``async with``.

        ``timeout``: Seconds for the whole wait. Default: no limit. See `multilock.Election.campaign` for the errors.
        """
        check_timeout(timeout)
        return Acquiring(self._campaign_on_loop(timeout, self._office.scope()))

    async def _campaign_on_loop(self, timeout: float | None, scope: Scope[Any] | None) -> AsyncLeadership:
        self._come_to_loop()
        return await self._campaign_once(timeout, scope)

    async def run(self, work: Callable[[AsyncLeadership], Awaitable[R]]) -> R | None:
        """Campaign, run ``work(leadership)`` while leading, and campaign again after a loss.

        ``work``: A coroutine function, which is cancelled when the leadership ends. If it ends while this node leads,
        this node resigns, and `run` returns its result or raises its exception.

        Returns None after `stop`. If `run` is cancelled, this node resigns. See `multilock.Election.run` for
        the errors.
        """
        if not callable(work):
            raise TypeError(f"run takes a coroutine function of one argument, not {work!r:.60}")
        self._come_to_loop()
        self._begin_standing(stop := Stop())
        try:
            result: R | None = await self._stand_to_the_end(work, stop)
            return result
        finally:
            self._end_standing(stop)

    async def _stand_to_the_end(self, work: Callable[[AsyncLeadership], Any] | None, stop: Stop) -> Any:
        handing: Handing[AsyncLeadership] = Handing(self._kernel)
        try:
            return await self._stand(work, stop, handing)
        except asyncio.CancelledError:
            # The loop may end with this task. So wait here until the cancelled work has cleaned up and on_lost has
            # ended. If this wait is cancelled too, the leadership is released in the background.
            if handing.lease is not None:
                await handing.lease._term.give_back()
            raise

    def start(self) -> None:
        """Campaign in the background until `stop`, and call the callbacks. A second call does nothing.

        See `multilock.Election.start` for the errors.
        """
        self._kernel.check_open()
        self._come_to_loop()
        if self._begin_unless_standing(stop := Stop()):
            self._stand_in_background(stop)

    def _stand_in_background(self, stop: Stop) -> None:
        if stop.called():
            self._end_standing(stop)
            return

        async def stand() -> None:
            try:
                await self._stand_to_the_end(None, stop)
            except Exception:
                logger.exception("the election %r ended", self.name)

        # A task that is cancelled before its first step never runs its coroutine, so `ended` does its clean-up.
        again, ended = partial(self._stand_in_background, stop), partial(self._end_standing, stop)
        self._background = go_on_if_cancelled(stand(), "multilock-election", again, ended)

    async def stop(self, grace: float | None = None) -> None:
        """Stop campaigning, and resign if this node leads. Work and ``on_elected`` are cancelled and awaited.

        ``grace``: Seconds after which the lease is released even if something still runs. Default: the election's.

        See `multilock.Election.stop` for the order of events.
        """
        seconds = check_grace(grace)
        self._come_to_loop()
        await self._end(seconds)

    async def resign(self, grace: float | None = None) -> bool:
        """End a leadership as `stop` does. Another candidate can then be elected without waiting for a ttl.

        Returns True if this call ended the leadership, False if this node did not lead: see
        `multilock.Election.resign`.
        """
        seconds = check_grace(grace)
        self._come_to_loop()
        return await self._step_down(seconds)

    async def leader(self) -> LeaderInfo | None:
        """Ask the backend for the leader. Returns None if there is none. The leader may have changed when the reply
        arrives.

        Raises BackendUnavailable, BackendRejected or ClientClosed.
        """
        kernel = self._kernel
        return leader_info(await kernel.ask(kernel.backend.inspect, self.name, name=self.name))

    def observe(self) -> AsyncIterator[LeaderInfo | None]:
        """Return an asynchronous iterator over the leaders: the present one at once, then each change.

        None means that nobody leads. An outage yields nothing, and the iterator ends when the client is closed. See
        `multilock.Election.observe` for how soon a change arrives.
        """
        self._kernel.check_open()
        return AsyncLeaders(Observer(self._kernel, self.name))

    def _report_in_background(self, report: Callable[[], Coroutine[Any, Any, None]], observer: Observer) -> None:
        self._watching = go_on_if_cancelled(report(), "multilock-observer", partial(self._reporter.resume, observer))

    async def _call(self, callback: Callable[..., object], *args: Any) -> None:
        await await_safely(callback, *args)

    async def __aenter__(self) -> AsyncElection:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()
