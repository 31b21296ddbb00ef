"""The asyncio face of leader election. See `multilock.election`: the same members."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from multilock.aio.face import await_safely
from multilock.aio.lock import Acquiring, AsyncLease
from multilock.errors import ClientClosed
from multilock.model import Claim, Granted, LeaderInfo, Loss
from multilock.names import check_timeout
from multilock.standing import Observer, Standing, Term, leader_info

if TYPE_CHECKING:
    from multilock.kernel import Kernel, Want
    from multilock.scopes import Scope

__all__ = ["AsyncElection", "AsyncLeadership"]

logger = logging.getLogger("multilock")

R = TypeVar("R")


class AsyncLeadership(AsyncLease):
    """See `multilock.Leadership`."""

    __slots__ = ("_election", "_term")

    def __init__(
        self, kernel: Kernel, want: Want, claim: Claim, granted: Granted, unsure: bool, election: AsyncElection
    ) -> None:
        super().__init__(kernel, want, claim, granted, unsure, cancel_on_lost=True)
        self._election = election
        self._term: Term[AsyncLeadership] = Term()
        self._term.leadership = self

    @property
    def term(self) -> int | None:
        """The fencing token of this leadership: greater for every later leader."""
        return self.token

    @property
    def identity(self) -> str:
        return self._claim.identity

    def is_held(self) -> bool:
        return not self._term.resigning and self._alive()

    async def release(self) -> bool:
        return await self._election._resign(self)


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


class AsyncElection(Standing[AsyncLeadership]):
    """See `multilock.Election`. Callbacks run on the loop and may be ``async def``."""

    _background: asyncio.Task[Any] | None = None
    _watching: asyncio.Task[Any] | None = None

    def _make(self, kernel: Kernel, want: Want, claim: Claim, granted: Granted, unsure: bool) -> AsyncLeadership:
        return AsyncLeadership(kernel, want, claim, granted, unsure, self)

    def campaign(self, timeout: float | None = None) -> Acquiring[AsyncLeadership]:
        """See `multilock.Election.campaign`."""
        check_timeout(timeout)
        return Acquiring(self._campaign_once(timeout, self._scope()))

    async def _campaign_once(self, timeout: float | None, scope: Scope[Any] | None) -> AsyncLeadership:
        leadership = (await self._campaign(timeout)).leadership
        self._push(leadership, scope or self._scope())
        return leadership

    async def run(self, work: Callable[[AsyncLeadership], Awaitable[R]]) -> R | None:
        """See `multilock.Election.run`. ``work`` is cancelled on loss."""
        if not callable(work):
            raise TypeError(f"run takes a coroutine function of one argument, not {work!r:.60}")
        stop = self._begin_standing()
        try:
            result: R | None = await self._stand(work, stop)
            return result
        finally:
            self._end_standing(stop)

    def start(self) -> None:
        """See `multilock.Election.start`."""
        self._kernel.check_open()
        if self._stop is not None and not self._stop.called():
            return
        loop = asyncio.get_running_loop()
        stop = self._begin_standing()

        async def stand() -> None:
            try:
                await self._stand(None, stop)
            except Exception:
                logger.exception("the election %r ended", self.name)
            finally:
                self._end_standing(stop)

        self._background = loop.create_task(stand(), name="multilock-election")

    async def stop(self) -> None:
        """See `multilock.Election.stop`."""
        stop = self._stop
        self._call_off()
        await self._step_down()
        await self._until(
            lambda: self._stop is not stop or stop is None, self._kernel.request_timeout(self._want.grant)
        )

    async def resign(self) -> bool:
        """See `multilock.Election.resign`."""
        return await self._step_down()

    async def leader(self) -> LeaderInfo | None:
        """See `multilock.Election.leader`."""
        kernel = self._kernel
        return leader_info(await kernel.ask(kernel.backend.inspect, self.name, name=self.name))

    def observe(self) -> AsyncIterator[LeaderInfo | None]:
        """See `multilock.Election.observe`."""
        self._kernel.check_open()
        return AsyncLeaders(Observer(self._kernel, self.name))

    def _watch_leader(self, observer: Observer) -> None:
        self._watching = asyncio.get_running_loop().create_task(self._follow(observer), name="multilock-observer")

    async def _call(self, callback: Callable[..., object], *args: Any) -> None:
        await await_safely(callback, *args)

    async def _run_elected(self, term: Term[AsyncLeadership]) -> None:
        if not self._elected_begins(term):
            return
        term.elected_task = asyncio.current_task()
        try:
            if self._on_elected:  # also where it is over already: on_lost comes next, and they come in pairs
                result = self._on_elected(term.leadership)
                if inspect.isawaitable(result):
                    await result
        except asyncio.CancelledError:
            if not term.over():
                if term.elected_task.cancelling():
                    raise
                term.failed = True
                logger.exception(
                    "on_elected of the election %r was cancelled from within: this node resigns", self.name
                )
        except Exception:
            term.failed = True
            logger.exception("on_elected of the election %r raised: this node resigns", self.name)
        finally:
            self._elected_ended(term)
        if term.failed:
            await self._resign(term.leadership)

    async def _run_lost(self, term: Term[AsyncLeadership], loss: Loss) -> None:
        if not self._lost_begins(term):
            return
        if not term.elected_done:
            term.elected_task.cancel()
        try:
            if self._on_lost:
                await await_safely(self._on_lost, loss)
        finally:
            self._lost_ended(term)

    async def _do_work(self, term: Term[AsyncLeadership], work: Callable[[AsyncLeadership], Any]) -> Any:
        async def begin() -> Any:
            self._push(term.leadership, self._scope())
            working = work(term.leadership)
            if not inspect.isawaitable(working):
                raise TypeError(f"run takes a coroutine function, and {work!r:.60} returned {working!r:.60}")
            return await working

        task = asyncio.create_task(begin())
        task.add_done_callback(lambda _: self._ring())
        try:
            await self._until(lambda: task.done() or term.over())
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait([task])
            term.leadership._leave_scope()
        if task.cancelled() and term.over():
            return None
        return await task

    async def __aenter__(self) -> AsyncElection:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()
