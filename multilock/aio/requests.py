"""`LoopFace`: how the asyncio API sends requests, on a few worker threads or on channels, and waits on the event loop.

Only a backend that answers at once is called on the loop itself. The loop never blocks on a backend. A turn is the
permission to send one request (`Turns`). A heartbeat is the request by which a waiter keeps its place in the queue of
the server. The kernel never waits for the loop: leases are renewed and lost on threads, even while the loop is stuck.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from multilock.aio.batches import AT_ONCE, Batches
from multilock.aio.callbacks import LoopCallbacks
from multilock.aio.channels import MOST, Channels, Kind, LoopChannel, Turns
from multilock.backend import AnswersAtOnce, AttemptsMany, Channel
from multilock.errors import BackendUnavailable
from multilock.kernel.blocking import NOT_SENT, NotAsked, WaiterBell
from multilock.kernel.callbacks import Callbacks
from multilock.kernel.inside_backend import call_inside
from multilock.log_thread import logger
from multilock.model import Busy, Claim, Granted, Returned

if TYPE_CHECKING:
    from multilock.kernel.client import Kernel

__all__ = ["LoopFace"]

R = TypeVar("R")
CARRIERS = 8  # threads that carry requests, each on a connection; one process rarely needs more requests at once
GRACE = 0.01  # seconds by which our timeout comes after the backend's own, whose message says more


class LoopFace:
    """The parts of one client that only the asyncio API needs. They belong to the event loop that first used the
    client.

    ``_answered_at`` is when the last request with a turn was answered, by the loop's clock. ``_open`` has the futures
    of requests and turns under way, each with the time at which its wait ends, by the loop's clock.
    """

    asynchronous = True

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._backend = kernel.backend
        self._workers = kernel.runtime.workers("multilock-request", CARRIERS + AT_ONCE)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._channels = Channels(kernel.backend)
        self._at_once = isinstance(kernel.backend, AnswersAtOnce) and kernel.backend.answers_at_once
        self._turns = self._all_turns()
        self._firsts = set[str]()  # names for which a first attempt is under way
        self._batches: Batches | None = None
        self._answered_at = -math.inf
        self._open: dict[asyncio.Future[Any], float] = {}
        self._sweep: asyncio.TimerHandle | None = None
        self._sweep_at = math.inf
        self._callbacks = LoopCallbacks(self.its_loop, kernel.runtime)
        self.callbacks: Callbacks = self._callbacks

    def loop(self) -> asyncio.AbstractEventLoop:
        """Return the client's loop. Raises RuntimeError if another loop is running."""
        running = asyncio.get_running_loop()
        if self._loop is not running:
            self.forget_closed_loop()
            if self._loop is not None:
                raise RuntimeError("this AsyncClient belongs to another event loop: make one for each loop")
            self._kernel.events.begin(self.callbacks)  # events not yet delivered on a closed loop are dropped
            self._loop = running
            if isinstance(self._backend, AttemptsMany):
                self._batches = Batches(running, self._send_batch)
        return running

    def _all_turns(self) -> Turns:
        return Turns(CARRIERS + (MOST if self._channels.offered else 0))

    def forget_closed_loop(self) -> None:
        """If the client's loop was closed, drop it and every call that ran on it."""
        if self._loop is None or not self._loop.is_closed():
            return
        self._loop = None
        self._open.clear()  # nothing can wake the coroutines of a closed loop
        self._turns = self._all_turns()
        self._firsts = set[str]()
        self._batches = None
        self._sweep, self._sweep_at = None, math.inf  # a timer of a closed loop never fires
        self._channels.close()
        self._callbacks.drop()
        self._kernel.drop_waiters()

    def abandoned(self) -> Sequence[str]:
        loop = self._loop
        if loop is None or not loop.is_closed():
            return ()
        waiting = list(self._kernel.monitor.waiting)
        # Claims of a new loop are added only after `_loop` was set to the new loop. So if `_loop` is still the closed
        # loop, all these claims belong to the closed loop.
        return waiting if self._loop is loop else ()

    def its_loop(self) -> asyncio.AbstractEventLoop | None:
        """Return the client's loop, or None if it has none yet. May be called on any thread."""
        return self._loop

    async def attempt(self, claim: Claim, join: bool, within: float) -> Granted | Busy:
        """Send an attempt, or a heartbeat of a claim that waits already.

        If the backend can send many attempts together, heartbeats take no turns. An attempt whose turn does not come in
        time is not sent. Such an attempt does not count as unanswered if the server has answered other requests
        meanwhile.
        """
        if self._at_once:
            await asyncio.sleep(0)  # otherwise a task that acquires in a loop would never let another task run
        waiting = self._kernel.monitor.waiting.get(claim.id)
        told, loop = waiting.told if waiting else None, self.loop()
        firsts = self._firsts
        kind = Kind.HEARTBEAT if told else Kind.CROWDED if claim.name in firsts else Kind.FIRST
        answer: Granted | Busy
        try:
            if kind is Kind.FIRST:
                firsts.add(claim.name)
            if self._batches and join and (told or not self._turns.free):
                answer = await self._in_a_batch(self._batches, claim, loop, loop.time() + within)
            else:
                answer = await self._send(
                    within, kind, lambda channel: channel.attempt(claim, join), self._backend.attempt, claim, join
                )
        except _NotSent:
            if not join or self._answered_at < loop.time() - within:
                raise
            return NotAsked(told.heartbeat if told else 0.0, 0.0)
        finally:
            if kind is Kind.FIRST:
                firsts.discard(claim.name)
        if waiting and isinstance(answer, Busy):
            waiting.told = answer
        return answer

    async def release(self, claim: Claim, granted: Granted, unsure: bool, within: float) -> Returned:
        answer: Returned = await self._send(
            within,
            Kind.RELEASE,
            lambda to: to.release(claim, granted, unsure),
            self._backend.release,
            claim,
            granted,
            unsure,
        )
        return answer

    async def ask(self, within: float, call: Callable[..., R], *args: Any) -> R:
        return await self._on_thread(self.loop(), within, call, args)

    async def _send(
        self, within: float, kind: Kind, send: Callable[[Channel], bool], call: Callable[..., Any], *args: Any
    ) -> Any:
        """Wait for a turn, then send the request on a channel (``send``) or on a thread (``call(*args, within)``).

        The thread is used if there is no channel, or if the channel could not answer. Raises _NotSent if the turn did
        not come in half of the time. The other half is left for the reply, because a request that is sent too late
        would look like a server that does not answer.
        """
        loop, turns = self.loop(), self._turns
        end = loop.time() + within
        if not turns.take():
            await self._turn(turns, loop, end - within / 2, kind)
        try:
            answer = None
            if channel := await self._channel(loop, end - loop.time()):
                future = self._begin(loop, end)
                try:
                    answer = await channel.ask(send, future)
                finally:
                    self._open.pop(future, None)
            if answer is None:
                answer = await self._on_thread(loop, end - loop.time(), call, args)
            self._answered_at = loop.time()
            return answer
        finally:
            turns.give_back()

    async def _in_a_batch(
        self, batches: Batches, claim: Claim, loop: asyncio.AbstractEventLoop, end: float
    ) -> Granted | Busy:
        """Send an attempt in a batch with other attempts. Raises _NotSent if it was not sent before ``end``."""
        future = self._begin(loop, end)
        batches.add(claim, end, future)
        try:
            result: Granted | Busy | Exception = await future
        except BackendUnavailable:
            if batches.drop(future):
                raise _NotSent(NOT_SENT, unknown=False) from None
            raise
        finally:
            batches.drop(future)
            self._open.pop(future, None)
        if isinstance(result, Exception):
            raise result
        return result

    def _send_batch(self, claims: Sequence[Claim], end: float) -> asyncio.Future[Any]:
        loop = self.loop()
        future: asyncio.Future[Any] = loop.create_future()
        call = cast("AttemptsMany", self._backend).attempt_all
        self._workers.submit(_Request(loop, self._kernel, end - loop.time(), call, (claims,), future, None).carry)
        future.add_done_callback(self._batch_answered)
        return future

    def _batch_answered(self, answer: asyncio.Future[Any]) -> None:
        if not answer.exception():
            self._answered_at = answer.get_loop().time()

    async def _turn(self, turns: Turns, loop: asyncio.AbstractEventLoop, end: float, kind: Kind) -> None:
        """Wait for a turn until ``end``."""
        turn = self._begin(loop, end)
        turns.wait(turn, kind)
        try:
            await turn
        except BackendUnavailable:
            raise _NotSent(NOT_SENT, unknown=False) from None
        except asyncio.CancelledError:
            # The turn may have been granted just before the cancellation.
            if turn.done() and not turn.cancelled() and not turn.exception():
                turns.give_back()
            raise
        finally:
            self._open.pop(turn, None)

    async def _channel(self, loop: asyncio.AbstractEventLoop, within: float) -> LoopChannel | None:
        """Return an idle or a new channel. Returns None if this backend has no channels, or if all of them are in
        use."""
        channels = self._channels
        if channels.idle:
            return channels.idle.pop()
        if not channels.may_open():
            return None
        channels.opening += 1
        try:
            channel = await self._on_thread(loop, within, channels.open, (), channels.drop)
            if self._kernel.finished:  # the client has ended, and its other channels are closed as well
                channels.drop(channel)
                return None
            return channels.add(loop, channel)
        finally:
            channels.opening -= 1

    async def _on_thread(
        self,
        loop: asyncio.AbstractEventLoop,
        within: float,
        call: Callable[..., R],
        args: tuple[Any, ...],
        unwanted: Callable[[R], None] | None = None,
    ) -> R:
        """Return the result of ``call(*args, within)``. The call runs on a worker thread, or on the loop if the backend
        answers at once.

        ``unwanted`` is called with a reply for which no caller waits any longer.
        """
        if self._at_once:
            return call_inside(call, *args, within)
        future = self._begin(loop, loop.time() + within)
        try:
            self._workers.submit(_Request(loop, self._kernel, within, call, args, future, unwanted).carry)
            result: R = await future
            return result
        except asyncio.CancelledError:
            # The reply may have come just before the cancellation.
            if unwanted and future.done() and not future.cancelled() and not future.exception():
                unwanted(future.result())
            raise
        finally:
            self._open.pop(future, None)

    def _begin(self, loop: asyncio.AbstractEventLoop, end: float) -> asyncio.Future[Any]:
        """Make a future that fails with BackendUnavailable shortly after ``end`` on the loop's clock."""
        future: asyncio.Future[Any] = loop.create_future()
        self._open[future] = due = end + GRACE
        if due < self._sweep_at:
            self._plan_sweep(loop, due)
        return future

    def _plan_sweep(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        if self._sweep:
            self._sweep.cancel()
        self._sweep_at = due
        self._sweep = loop.call_at(due, self._expire, loop)

    def _expire(self, loop: asyncio.AbstractEventLoop) -> None:
        """Fail the requests whose time is over.

        All requests share one timer, because a timer for each would take longer than most requests.
        """
        now = loop.time()
        self._sweep, self._sweep_at = None, math.inf
        for future, due in self._open.items():
            if due <= now and not future.done():
                future.set_exception(BackendUnavailable("no answer within the request timeout"))
        if rest := [due for due in self._open.values() if due > now]:
            self._plan_sweep(loop, min(rest))

    def bell(self) -> WaiterBell:
        return LoopBell(self.loop())

    def close(self) -> None:
        self._workers.close()
        self._channels.end()
        try:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._channels.close)
        except RuntimeError:  # the loop was closed, so nothing else uses the channels
            self._channels.close()


class _NotSent(BackendUnavailable):
    """The request was not sent, because its turn did not come in time."""


class _Request:
    """One call of the backend on a worker thread. The caller may have given up before the call ends."""

    __slots__ = ("_args", "_call", "_deadline", "_future", "_kernel", "_loop", "_unwanted")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        kernel: Kernel,
        within: float,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        future: asyncio.Future[Any],
        unwanted: Callable[[Any], None] | None,
    ) -> None:
        self._loop = loop
        self._kernel = kernel
        self._deadline = kernel.now() + within
        self._call = call
        self._args = args
        self._future = future
        self._unwanted = unwanted

    def carry(self) -> None:
        """Call the backend on the worker thread, and pass the result to the loop."""
        if self._future.cancelled():
            return
        left = self._deadline - self._kernel.now()
        try:
            if left <= 0:
                raise BackendUnavailable("all worker threads are busy with unanswered requests", unknown=False)
            result, error = call_inside(self._call, *self._args, left), None
        except BaseException as raised:
            result, error = None, raised
        try:
            self._loop.call_soon_threadsafe(self._settle, result, error)
        # The loop was closed. The claim is cancelled by its task, if the task unwinds, or by `forget_closed_loop`.
        except RuntimeError:
            logger.debug("an answer came after its event loop was closed")
            self._drop(result)

    def _settle(self, result: Any, error: BaseException | None) -> None:
        if self._future.done():
            self._drop(result)
        elif error is not None:
            self._future.set_exception(error)
        else:
            self._future.set_result(result)

    def _drop(self, result: Any) -> None:
        if self._unwanted:
            self._unwanted(result)


class LoopBell:
    """The bell of a coroutine. Any thread may ring it."""

    __slots__ = ("_future", "_loop", "_rung")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._rung = False
        self._future: asyncio.Future[None] | None = None

    def ring(self) -> None:
        self._rung = True
        if self._future is not None:
            try:
                self._loop.call_soon_threadsafe(self._wake)
            except RuntimeError:
                logger.debug("a wake-up came after its event loop was closed")

    async def wait(self, seconds: float) -> None:
        future = self._future = self._loop.create_future()
        timer = None if math.isinf(seconds) else self._loop.call_later(max(0.0, seconds), self._wake)
        try:
            if not self._rung:  # checked only after ring() can see the future, so that no ring is missed
                await future
        finally:
            self._future = None
            self._rung = False
            if timer:
                timer.cancel()

    def _wake(self) -> None:
        if self._future is not None and not self._future.done():
            self._future.set_result(None)
