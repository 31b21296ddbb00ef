"""The asyncio API of one lock. It has the members of `multilock.lock`, which are awaited if they send a request or
wait.

A body is the block of an ``async with`` statement.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import sys
from collections.abc import Coroutine, Generator
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Generic, Never, Protocol, Self, TypeVar, runtime_checkable

from multilock.aio.cancel_on_lost import Body
from multilock.api_mistakes import ForAsyncWith, hides_foreign, refuse
from multilock.database_guard import guard_lease_async
from multilock.errors import NotHeld
from multilock.kernel.holding import AnyHeld, EndOfBody, Holding
from multilock.kernel.lease_to_caller import Handing
from multilock.kernel.lock_options import Want
from multilock.kernel.scopes import Scope, WithEntry
from multilock.lease import AsyncLease
from multilock.lock import AnyLock, LockOfAFace
from multilock.model import Claim, Granted, Loss
from multilock.names import check_timeout

if TYPE_CHECKING:
    from multilock.aio.client import AsyncClient
    from multilock.kernel.client import Kernel

__all__ = ["Acquiring", "AsyncDistributedLock", "AsyncLock", "Enters", "HeldAsyncLease", "check_cancel_on_lost"]

L = TypeVar("L", bound=AsyncLease, covariant=True)
R = TypeVar("R", covariant=True)


class Enters(ForAsyncWith, AnyHeld, AsyncLease):
    """The awaitable methods of a lease, whether it is a lease of one lock or of several."""

    __slots__ = ()

    _bodies: list[Body] | None
    _cancel_on_lost: bool

    async def release(self) -> bool:
        return await self._kernel.releases.release(self)

    async def renew(self) -> None:
        await self._kernel.renew(self)

    async def guard(self, connection: Any, *, idle_limit: float | None = None) -> None:
        await guard_lease_async(self, connection, idle_limit)

    async def __aenter__(self) -> Self:
        self._enter()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._exit(self._newest_body(), error)

    def _enter(self) -> Body:
        self._open += 1
        self._check_at_entry(EndOfBody())
        body = Body(self)
        if self._bodies is None:
            self._bodies = []  # type: ignore[misc]  # the slot is in the subclasses
        self._bodies.append(body)
        if self._cancel_on_lost:
            body.watch()
        return body

    async def _exit(self, body: Body | None, error: BaseException | None) -> None:
        """End ``body`` and release the lease. ``body`` is None if an exit stack was given the lease itself."""
        cancelled = entered = False
        if body is not None and self._bodies and body in self._bodies:
            self._bodies.remove(body)
            cancelled, entered = body.end(error), True
        await self._end_body(entered)
        if cancelled or self._is_lost():
            self._raise_lost(None if cancelled else error)

    async def _end_body(self, entered: bool) -> None:
        """Release the lease at the end of a body, unless that body has nothing to release."""
        await self._kernel.releases.release(self, body=EndOfBody() if entered else None)

    def _newest_body(self) -> Body | None:
        """Return the newest ``async with`` body of this task. If this task has none, return the newest of all tasks.

        The body of a fixture, for example, may begin in one task and end in another.
        """
        if not self._bodies:
            return None
        task = asyncio.current_task()
        return next((body for body in reversed(self._bodies) if body._task is task), self._bodies[-1])

    async def wait_lost(self, timeout: float | None = None) -> Loss[Self] | None:
        seconds = check_timeout(timeout)
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody waits any longer
                loop.call_soon_threadsafe(ended.set)

        if self._at_end(tell):
            try:
                async with asyncio.timeout(seconds):
                    await ended.wait()
            except TimeoutError:
                pass
            finally:
                self._not_at_end(tell)
        return self.loss if self._is_lost() else None


class HeldAsyncLease(Holding, Enters):
    """The `AsyncLease` of one lock, as `AsyncLock` returns it."""

    __slots__ = ("_bodies", "_cancel_on_lost")

    def __init__(
        self, kernel: Kernel, want: Want, claim: Claim, granted: Granted, unsure: bool, cancel_on_lost: bool
    ) -> None:
        super().__init__(kernel, want, claim, granted, unsure)
        self._cancel_on_lost = cancel_on_lost
        self._bodies: list[Body] | None = None


class Trying(Coroutine[Any, Any, R], Generic[R]):
    """A coroutine whose use as a condition raises TypeError.

    Otherwise ``if lock.try_acquire():``, where ``await`` was forgotten, would run its block without the lock.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, R]) -> None:
        self._coroutine = coroutine

    def __bool__(self) -> bool:
        self._coroutine.close()
        raise TypeError("await it: only then is it known whether the lock was acquired")

    if not TYPE_CHECKING:  # otherwise a type checker would accept any attribute

        def __getattr__(self, name: str) -> Never:
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}: await it to get the lease, "
                "or use acquire() in `async with`"
            )

    def send(self, value: Any) -> Any:
        return self._coroutine.send(value)

    def throw(self, *args: Any) -> Any:
        return self._coroutine.throw(*args)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, R]:
        return self._coroutine.__await__()


class Acquiring(ForAsyncWith, Trying[L], Generic[L]):
    """A coroutine that ``async with`` can enter as well: ``async with lock.acquire(timeout=5) as lease:``."""

    def __init__(self, coroutine: Coroutine[Any, Any, L]) -> None:
        super().__init__(coroutine)
        self._lease: Enters | None = None
        self._body: Body | None = None

    async def __aenter__(self) -> L:
        lease = await self._coroutine
        assert isinstance(lease, Enters)
        self._body = lease._enter()
        self._lease = lease
        return lease

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lease is None:
            raise NotHeld("this acquire() was not entered: use it in `async with`, or give the exit stack the lease")
        await self._lease._exit(self._body, error)


@runtime_checkable
class AsyncDistributedLock(AnyLock, Protocol):
    """A lock with a name, for the tasks of one event loop. The asyncio twin of `multilock.DistributedLock`.

    ``async with lock as lease:`` waits for the lock and releases it at the end. If the lease is lost, the body is
    cancelled at that moment and the end raises LockLost. Made by `AsyncClient.lock`.
    """

    def acquire(self, timeout: float | None = None) -> Acquiring[AsyncLease]:
        """Wait until the lock is ours. Await the result for the `AsyncLease`, or enter it with ``async with``.

        ``timeout``: Seconds for the whole wait. Without it, or with ``math.inf``, the wait has no limit. 0 tries once.

        The lease belongs to the task that calls `acquire`, even if another task awaits the result. If the wait is
        cancelled, a lock that was taken all the same is released in the background.

        Raises LockTimeout, BackendUnavailable, BackendRejected or ClientClosed: see
        `multilock.DistributedLock.acquire`.
        """

    async def try_acquire(self, timeout: float = 0) -> AsyncLease | None:
        """Try to acquire the lock: once, or for ``timeout`` seconds. Returns None if the lock is still taken.

        Raises what `acquire` raises, except LockTimeout.
        """

    async def release(self) -> bool:
        """Release the newest lease that this task took through this lock object and has not released.

        Returns True if the lock was ours until this call, False if the lease was lost. Raises NotHeld if this task has
        no such lease: only ``lease.release()`` works from any task.
        """

    async def is_locked(self) -> bool:
        """Ask the backend whether the lock has a holder. The reply may be outdated when it arrives.

        Raises BackendUnavailable, BackendRejected or ClientClosed.
        """

    async def __aenter__(self) -> AsyncLease: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class AsyncLock(ForAsyncWith, LockOfAFace[HeldAsyncLease], AsyncDistributedLock):
    """The `AsyncDistributedLock` that is a mutex, as `AsyncClient.lock` returns it."""

    def __init__(self, client: AsyncClient, name: str, cancel_on_lost: bool, **options: Any) -> None:
        self._client = client
        self._cancel_on_lost = check_cancel_on_lost(cancel_on_lost)
        super().__init__(client._kernel, name, **options)

    def _make(self, kernel: Kernel, want: Want, claim: Claim, granted: Granted, unsure: bool) -> HeldAsyncLease:
        self._newest = lease = HeldAsyncLease(kernel, want, claim, granted, unsure, self._cancel_on_lost)
        return lease

    @hides_foreign
    def acquire(self, timeout: float | None = None, **theirs: Never) -> Acquiring[AsyncLease]:
        if theirs:
            raise refuse("acquire", theirs)
        seconds = check_timeout(timeout)
        # The lease belongs to the task that calls acquire(), because asyncio.wait_for() may await in a task of its own.
        # If no task calls it, as in asyncio.run(lock.acquire()), the lease belongs to the task that awaits.
        return Acquiring(self._acquire_or_raise(seconds, self._client._scope()))

    async def _acquire_or_raise(self, timeout: float | None, scope: Scope[HeldAsyncLease] | None) -> HeldAsyncLease:
        if lease := await self._acquire(timeout, scope):
            return lease
        scope = scope or self._client._scope()
        raise self._kernel.messages.still_taken(self.name, timeout, scope is not None and scope.keeps_out(self._want))

    @hides_foreign
    def try_acquire(self, timeout: float = 0, **theirs: Never) -> Coroutine[Any, Any, AsyncLease | None]:
        if theirs:
            raise refuse("try_acquire", theirs)
        # The lease belongs to the caller's task, as in acquire().
        return Trying(self._acquire(check_timeout(timeout), self._client._scope()))

    async def _acquire(self, timeout: float | None, scope: Scope[HeldAsyncLease] | None) -> HeldAsyncLease | None:
        scope = scope or self._client._scope() or Scope()  # a new scope if no task drives this coroutine
        handing: Handing[HeldAsyncLease] = Handing(self._kernel)
        try:
            if held := handing.reenter(scope, self._want):
                self._reentered(held)
                return held
            return await handing.acquire(self._wait_for(timeout, scope), scope)
        except BaseException:
            handing.take_back()
            raise

    def release(self) -> Coroutine[Any, Any, bool]:
        return self._release(self._client._scope())  # the leases of the caller's task, as in acquire()

    async def _release(self, scope: Scope[HeldAsyncLease] | None) -> bool:
        scope = scope or self._client._scope()
        lease = scope.taken_through(self._want) if scope else None
        if lease is None:
            raise self._kernel.messages.not_held(self.name)
        return await lease.release()

    async def is_locked(self) -> bool:
        return any([await self._client.inspect(name) is not None for name in self._want.names])

    async def __aenter__(self) -> AsyncLease:
        frame = _frame_of_with(sys._getframe(1))
        lease = await self._acquire_or_raise(None, self._client._scope())
        entry = WithEntry(lease, frame)
        entry.body = lease._enter()
        self._entered.add(entry)
        return lease

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        frame = _frame_of_with(sys._getframe(1))
        entry: WithEntry[HeldAsyncLease] | None = None
        while entry is None or not entry.close():
            entry = self._entered.ending(frame, self._client._scope())
            if entry is None:
                raise self._kernel.messages.not_held(self.name)
        self._entered.discard(entry)
        await entry.lease._exit(entry.body, error)


def check_cancel_on_lost(value: bool) -> bool:
    """Return ``value``. Raises TypeError if it is not a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"cancel_on_lost must be True or False, not {value!r:.60}")
    return value


def _frame_of_with(frame: FrameType) -> FrameType | None:
    """Return the frame that contains the ``async with``, or None if there is none.

    ``async with`` is always in a coroutine or an asynchronous generator. If a program wraps ``__aenter__()`` in a task,
    the caller's frame belongs to the event loop instead.
    """
    return frame if frame.f_code.co_flags & (inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR) else None
