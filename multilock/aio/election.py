"""The asyncio face of leader election. See `multilock.election`: the same members."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from multilock.aio.face import LoopFace, await_safely, go_on_if_cancelled
from multilock.aio.lock import Acquiring, HeldAsyncLease
from multilock.errors import ClientClosed
from multilock.foreign import ForAsyncWith
from multilock.kernel.acquire import Stop
from multilock.kernel.candidacy import Candidacy
from multilock.kernel.observing import Observer, leader_info
from multilock.kernel.office import Office, inside
from multilock.kernel.term import INTERRUPTED, Leading, Term
from multilock.model import Claim, Granted, LeaderInfo, Loss, LossReason
from multilock.names import check_grace, check_timeout
from multilock.telling import logger

if TYPE_CHECKING:
    from multilock.kernel.core import Kernel
    from multilock.kernel.scopes import Scope
    from multilock.kernel.want import Want

__all__ = ["AsyncElection", "AsyncLeadership"]

R = TypeVar("R")


class AsyncLeadership(Leading, HeldAsyncLease):
    """See `multilock.Leadership`."""

    __slots__ = ("_election", "_term")

    def __init__(
        self, kernel: Kernel, want: Want, claim: Claim, granted: Granted, unsure: bool, election: AsyncElection
    ) -> None:
        super().__init__(kernel, want, claim, granted, unsure, cancel_on_lost=True)
        self._election = election
        self._term: LoopTerm = LoopTerm(election._office, self)

    async def release(self) -> bool:
        self._election._come_to_loop()
        return await self._term.resign()


class LoopTerm(Term[AsyncLeadership]):
    """A term whose work and callbacks are tasks of the client's loop, and are cancelled at its end."""

    def __init__(self, office: Office[AsyncLeadership], leadership: AsyncLeadership) -> None:
        super().__init__(office, leadership)
        self._elected_task: asyncio.Task[Any] | None = None
        self._loop = asyncio.get_running_loop()  # on which work and on_elected run …
        self._lost_loop: asyncio.AbstractEventLoop | None = None  # … and on_lost: another, if that one was closed

    def can_work(self) -> bool:
        return not self._loop.is_closed()

    def can_tell(self) -> bool:
        if self.begun_at is None and not self.can_work():
            return False  # on_elected was never called, nor will on_lost be
        loop = self._lost_loop or cast("LoopFace", self.office.kernel.face).its_loop()
        return loop is not None and not loop.is_closed()

    def run_elected(self) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(self._run_elected())
        # Cancelled before its first step it does not even begin.
        task.add_done_callback(lambda _: self.elected_never_begins())
        return task

    async def _run_elected(self) -> None:
        if not self.elected_begins():
            return
        task = self._elected_task = asyncio.current_task()
        try:
            if self.office.on_elected:  # also where it is over already: on_lost comes next, and they come in pairs
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
                    "on_elected of the election %r was cancelled from within: this node resigns", self.office.name
                )
        except Exception:
            self.failed = True
            logger.exception("on_elected of the election %r raised: this node resigns", self.office.name)
        finally:
            self.part_ended(self.elected)
        if self.failed and not self.over():
            self.abdicate("its on_elected raised")

    def run_lost(self, loss: Loss[AsyncLeadership]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(self._run_lost(loss))
        task.add_done_callback(lambda _: self.tell_again())  # the same, and it must not stay away
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
        # At the end of its loop it is cancelled already: once more would cut off its clean-up.
        if not (loss.reason is LossReason.RESIGNED and task.cancelling()):
            task.cancel()

    async def do_work(self, work: Callable[[AsyncLeadership], Any]) -> Any:
        task = asyncio.create_task(self._begin_work(work))
        task.add_done_callback(lambda _: self.part_ended(self.work))
        try:
            await self.office.condition.wait_for(lambda: task.done() or self.over())
        except asyncio.CancelledError:
            self.abdicate(INTERRUPTED)  # at once: the work may take its time to end
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
    """See `multilock.election.Leaders`: a cancelled ``anext()``, as of ``asyncio.wait_for``, misses nothing."""

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
        """Observe no more."""
        self._observer.close()

    def __del__(self) -> None:
        self._observer.drop()


class AsyncElection(ForAsyncWith, Candidacy[AsyncLeadership]):
    """See `multilock.Election`. Callbacks run on the loop and may be ``async def``."""

    _background: asyncio.Task[Any] | None = None
    _watching: asyncio.Task[Any] | None = None
    _loop: asyncio.AbstractEventLoop | None = None

    def _forked(self) -> None:
        super()._forked()
        self._loop = None

    def _come_to_loop(self) -> None:
        """What stood on a loop that was closed never unwinds: it is ended here, as if it had been cancelled."""
        before, self._loop = self._loop, cast("LoopFace", self._kernel.face).loop()  # where on_lost runs
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
        """See `multilock.Election.campaign`."""
        check_timeout(timeout)
        return Acquiring(self._campaign_on_loop(timeout, self._office.scope()))

    async def _campaign_on_loop(self, timeout: float | None, scope: Scope[Any] | None) -> AsyncLeadership:
        self._come_to_loop()
        return await self._campaign_once(timeout, scope)

    async def run(self, work: Callable[[AsyncLeadership], Awaitable[R]]) -> R | None:
        """See `multilock.Election.run`. ``work`` is cancelled on loss."""
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
        try:
            return await self._stand(work, stop)
        except asyncio.CancelledError:
            # Its loop may end with it: what was cancelled cleans up before that, and on_lost ends. Cancelled once more,
            # it is given back in the background.
            if self._term:
                await self._term.give_back()
            raise

    def start(self) -> None:
        """See `multilock.Election.start`."""
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

        # Cancelled before its first step it ends nothing by itself.
        again, ended = partial(self._stand_in_background, stop), partial(self._end_standing, stop)
        self._background = go_on_if_cancelled(stand(), "multilock-election", again, ended)

    async def stop(self, grace: float | None = None) -> None:
        """See `multilock.Election.stop`. Async work and an async ``on_elected`` are cancelled, and awaited."""
        seconds = check_grace(grace)
        self._come_to_loop()
        await self._end(seconds)

    async def resign(self, grace: float | None = None) -> bool:
        """See `multilock.Election.resign`."""
        seconds = check_grace(grace)
        self._come_to_loop()
        return await self._step_down(seconds)

    async def leader(self) -> LeaderInfo | None:
        """See `multilock.Election.leader`."""
        kernel = self._kernel
        return leader_info(await kernel.ask(kernel.backend.inspect, self.name, name=self.name))

    def observe(self) -> AsyncIterator[LeaderInfo | None]:
        """See `multilock.Election.observe`."""
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
