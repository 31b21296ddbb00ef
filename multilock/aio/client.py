"""The asyncio API: `connect_async` and `AsyncClient`, with the members of `multilock.client`."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable, Mapping
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Never, ParamSpec, TypeVar, Unpack, cast, overload

from multilock.aio.election import AsyncElection, AsyncLeadership
from multilock.aio.lock import AsyncDistributedLock, AsyncLock, HeldAsyncLease
from multilock.aio.lock_all import AsyncLockSet
from multilock.aio.requests import LoopFace
from multilock.aio.shared import AsyncReadWriteLock, AsyncSemaphore, AsyncSemaphoreLock
from multilock.api_mistakes import ForAsyncWith, hides_foreign, refuse
from multilock.client import ClientOfAFace
from multilock.config import open_configured, resolve
from multilock.decorate import decorator, lock_for
from multilock.kernel.client import Kernel
from multilock.kernel.fork import notice_fork
from multilock.kernel.runtime import Threads
from multilock.kernel.scopes import Scope
from multilock.kernel.worker import SOON
from multilock.keywords import ConnectOptions
from multilock.lease import AsyncLease
from multilock.model import Finding, LeaderInfo, LockInfo, Loss
from multilock.names import check_name, check_prefix

if TYPE_CHECKING:
    from multilock.backend import Backend
    from multilock.config import Settings

__all__ = ["AsyncClient", "connect_async"]

P = ParamSpec("P")
R = TypeVar("R")


def connect_async(
    url: str | Mapping[str, object] | None = None,
    *,
    profile: str | None = None,
    config: str | os.PathLike[str] | None = None,
    client: object = None,
    requires: Iterable[str] = (),
    **options: Unpack[ConnectOptions],
) -> AsyncClient:
    """Return an `AsyncClient` of a backend. Sends no request: the first call that needs the server connects.

    The arguments and errors are those of `multilock.connect`. ``await connect_async(…)`` returns the same client.
    """
    settings = resolve(url, profile=profile, config=config, client=client, requires=requires, options=options)
    return AsyncClient._of(open_configured(settings), settings)


class AsyncClient(ForAsyncWith, ClientOfAFace):
    """A connection to one backend, and the locks held through it, for the tasks of one event loop.

    `connect_async` makes one from a URL. Methods that send a request or wait are awaited, the others are plain. A
    client is an asynchronous context manager whose end calls `close`. See `multilock.Client`, which has the same
    members.
    """

    _connect = "connect_async"

    def _begin(self, backend: Backend, settings: Settings) -> None:
        self._kernel = Kernel(backend, settings, Threads(), LoopFace)
        self._scopes: weakref.WeakKeyDictionary[asyncio.Task[Any], tuple[str, Scope[HeldAsyncLease]]]
        self._scopes = weakref.WeakKeyDictionary()

    def _scope(self) -> Scope[HeldAsyncLease] | None:
        """Return the leases of this task, or None if no task is running. A forked child has no lease of its parent."""
        notice_fork()
        try:
            task = asyncio.current_task()
        except RuntimeError:  # no loop runs in this thread
            return None
        if task is None:
            return None
        whose, scope = self._scopes.get(task, ("", None))
        if scope is None or whose != self._kernel.client:
            scope = Scope()
            self._scopes[task] = (self._kernel.client, scope)
        return scope

    @hides_foreign
    def lock(
        self,
        name: str,
        *,
        ttl: float | None = None,
        renew: bool = True,
        reentrant: bool = False,
        fair: bool = False,
        hold_at_least: float = 0.0,
        max_hold: float | None = None,
        on_lost: Callable[[Loss[AsyncLease]], object] | None = None,
        cancel_on_lost: bool = True,
        hard_fence: bool = False,
        **theirs: Never,
    ) -> AsyncDistributedLock:
        """Return a lock with this name. Sends no request, but checks every argument.

        The options are those of `multilock.Client.lock`. Where its docstring says "thread", read "task".

        ``on_lost``: May be ``async def``. It runs on the event loop.

        ``cancel_on_lost``: True cancels the body of ``async with`` when the lease is lost. With False, LockLost is
        raised only at the end of the body.

        Raises ValueError or TypeError if an argument is wrong, CapabilityMissing if the backend cannot do what an
        option asks, and ClientClosed.
        """
        if theirs:
            raise refuse("lock", theirs)
        return AsyncLock(
            self,
            name,
            cancel_on_lost,
            ttl=ttl,
            renew=renew,
            reentrant=reentrant,
            fair=fair,
            hold_at_least=hold_at_least,
            max_hold=max_hold,
            on_lost=on_lost,
            hard_fence=hard_fence,
        )

    @hides_foreign
    def read_write_lock(
        self,
        name: str,
        *,
        ttl: float | None = None,
        renew: bool = True,
        reentrant: bool = False,
        fair: bool | None = None,
        max_hold: float | None = None,
        on_lost: Callable[[Loss[AsyncLease]], object] | None = None,
        cancel_on_lost: bool = True,
        hard_fence: bool = False,
        **theirs: Never,
    ) -> AsyncReadWriteLock:
        """Return a lock for many readers or one writer. Sends no request.

        See `multilock.Client.read_write_lock` for the order of waiters and the errors, and `lock` for the options.
        """
        if theirs:
            raise refuse("read_write_lock", theirs)
        return AsyncReadWriteLock(
            self,
            name,
            cancel_on_lost,
            ttl=ttl,
            renew=renew,
            reentrant=reentrant,
            fair=fair,
            max_hold=max_hold,
            on_lost=on_lost,
            hard_fence=hard_fence,
        )

    @hides_foreign
    def semaphore(
        self,
        name: str,
        permits: int,
        *,
        ttl: float | None = None,
        renew: bool = True,
        reentrant: bool = False,
        fair: bool | None = None,
        hold_at_least: float = 0.0,
        max_hold: float | None = None,
        on_lost: Callable[[Loss[AsyncLease]], object] | None = None,
        cancel_on_lost: bool = True,
        hard_fence: bool = False,
        **theirs: Never,
    ) -> AsyncSemaphore:
        """Return a lock that up to ``permits`` (1 to 1,000,000) holders have at a time. Sends no request.

        Every program must use the same number for this name. See `multilock.Client.semaphore` for the errors, and
        `lock` for the options.
        """
        if theirs:
            raise refuse("semaphore", theirs)
        return AsyncSemaphoreLock(
            self,
            name,
            cancel_on_lost,
            kind="permit",
            permits=permits,
            ttl=ttl,
            renew=renew,
            reentrant=reentrant,
            fair=fair,
            hold_at_least=hold_at_least,
            max_hold=max_hold,
            on_lost=on_lost,
            hard_fence=hard_fence,
        )

    @hides_foreign
    def lock_all(
        self,
        names: Iterable[str],
        *,
        ttl: float | None = None,
        renew: bool = True,
        reentrant: bool = False,
        fair: bool = False,
        hold_at_least: float = 0.0,
        max_hold: float | None = None,
        on_lost: Callable[[Loss[AsyncLease]], object] | None = None,
        cancel_on_lost: bool = True,
        hard_fence: bool = False,
        **theirs: Never,
    ) -> AsyncDistributedLock:
        """Return a lock that holds all of these names, or none. Sends no request.

        See `multilock.Client.lock_all` for what a loss of one name means, and `lock` for the options.
        """
        if theirs:
            raise refuse("lock_all", theirs)
        return AsyncLockSet(
            self,
            names,
            cancel_on_lost,
            ttl=ttl,
            renew=renew,
            reentrant=reentrant,
            fair=fair,
            hold_at_least=hold_at_least,
            max_hold=max_hold,
            on_lost=on_lost,
            hard_fence=hard_fence,
        )

    @overload
    def locked(
        self, name: str, *, timeout: float | None = None, skip: Literal[False] = False, **options: Any
    ) -> Callable[[Callable[P, Coroutine[Any, Any, R]]], Callable[P, Coroutine[Any, Any, R]]]: ...

    @overload
    def locked(
        self, name: str, *, timeout: float | None = None, skip: bool, **options: Any
    ) -> Callable[[Callable[P, Coroutine[Any, Any, R]]], Callable[P, Coroutine[Any, Any, R | None]]]: ...

    def locked(
        self, name: str, *, timeout: float | None = None, skip: bool = False, **options: Any
    ) -> Callable[[Callable[P, Coroutine[Any, Any, Any]]], Callable[P, Coroutine[Any, Any, Any]]]:
        """Decorate a coroutine function, so that each call holds the lock while the function runs.

        The arguments and errors are those of `multilock.Client.locked`.
        """
        return decorator(partial(lock_for, self), name, timeout, skip, options, asynchronous=True)

    def election(
        self,
        name: str,
        *,
        identity: str | None = None,
        ttl: float | None = None,
        on_elected: Callable[[AsyncLeadership], object] | None = None,
        on_lost: Callable[[Loss[AsyncLeadership]], object] | None = None,
        on_leader_changed: Callable[[LeaderInfo | None], object] | None = None,
        grace: float | None = None,
        hold_at_least: float = 0.0,
        max_hold: float | None = None,
        hard_fence: bool = False,
    ) -> AsyncElection:
        """Return a candidate in the election ``name``. Sends no request, and does not campaign yet.

        The arguments and errors are those of `multilock.Client.election`. The callbacks may be ``async def``.
        """
        return AsyncElection(
            self._kernel,
            self._scope,
            name,
            on_elected,
            on_lost,
            on_leader_changed,
            grace,
            hold_at_least,
            identity=identity,
            ttl=ttl,
            max_hold=max_hold,
            hard_fence=hard_fence,
        )

    def current_lease(self, name: str | None = None) -> AsyncLease:
        """Return the innermost lease of this task, or the innermost with this ``name``.

        Raises NotHeld if this task has none, for example in a forked child.
        """
        scope = self._scope()
        lease = scope.newest(lambda lease: name is None or lease.name == name) if scope else None
        if lease is None:
            raise self._kernel.messages.none_current(name)
        return lease

    async def inspect(self, name: str) -> LockInfo | None:
        """Return the holder of ``name``, or None if it is free. For display only: see `multilock.Client.inspect`."""
        return await self._kernel.ask(self._kernel.backend.inspect, check_name(name), name=name)

    def inspect_all(self, prefix: str = "") -> AsyncIterator[LockInfo]:
        """Return an asynchronous iterator over the held names that begin with ``prefix`` (default: all).

        The names are not a snapshot of one moment. Each step raises what `inspect` raises.
        """
        self._kernel.check_open()
        check_prefix(prefix)
        return self._inspect_all(prefix)

    async def _inspect_all(self, prefix: str) -> AsyncIterator[LockInfo]:
        page = await self._kernel.pages(prefix)
        while infos := await page():
            for info in infos:
                yield info

    async def force_release(self, name: str) -> bool:
        """Release the lock by force, although it has a holder. Returns False if it had no holder.

        Meant for operators. The holder's work is not stopped: see `multilock.Client.force_release`.
        """
        return await self._kernel.ask(self._kernel.backend.force_release, check_name(name), name=name)

    async def diagnose(self) -> list[Finding]:
        """Return a finding for everything that weakens the locks of this client, each with a remedy.

        See `multilock.Client.diagnose`.
        """
        return await self._kernel.diagnose()

    async def ping(self) -> float:
        """Send one request and return the seconds until its reply. Raises BackendUnavailable, BackendRejected."""
        before = self._kernel.now()
        await self._kernel.ask(self._kernel.backend.ping)
        return self._kernel.now() - before

    async def close(self) -> None:
        """Resign from elections, release every lock, and end all threads and connections of this client.

        See `multilock.Client.close` for the order of these steps, and for how long the call waits. If this call is
        cancelled, closing continues in the background.

        If the operating system refuses the thread that closes, this call waits until there is one.
        """
        loop = asyncio.get_running_loop()
        face = cast("LoopFace", self._kernel.face)
        face.forget_closed_loop()
        if face.its_loop() is None:
            face.loop()  # the client was never used, so its callbacks run on this loop
        closed = asyncio.Event()

        def close() -> None:
            try:
                self._kernel.end.close()
            finally:
                with contextlib.suppress(RuntimeError):  # the loop has ended, so no caller waits any longer
                    loop.call_soon_threadsafe(closed.set)

        here = contextvars.copy_context()  # shows an election whether its own work calls this close()
        self._kernel.spawn(lambda: here.run(close), "multilock-close")
        while not self._kernel.starts_threads():  # noqa: ASYNC110 - nothing reports a free thread
            await asyncio.sleep(SOON)
        await closed.wait()

    def __await__(self) -> Generator[Any, Any, AsyncClient]:
        yield from ()  # the ``yield from`` makes the function a generator, and suspends nothing
        return self

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
