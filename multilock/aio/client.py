"""The asyncio face: `connect_async` and `AsyncClient`. See `multilock.client`, whose members it has."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable, Mapping
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Never, ParamSpec, TypeVar, cast, overload

from multilock import telling
from multilock.aio.election import AsyncElection, AsyncLeadership
from multilock.aio.face import LoopFace
from multilock.aio.lock import AsyncDistributedLock, AsyncLock, HeldAsyncLease
from multilock.aio.many import AsyncLockSet
from multilock.aio.shared import AsyncReadWriteLock, AsyncSemaphore, AsyncSemaphoreLock
from multilock.config import open_configured, resolve, settings_for
from multilock.decorate import decorator, lock_for
from multilock.foreign import ForAsyncWith, refuse
from multilock.kernel.core import Kernel
from multilock.kernel.process import OfThisProcess, notice_fork
from multilock.kernel.runtime import Threads
from multilock.kernel.scopes import Scope
from multilock.lease import AsyncLease
from multilock.model import Capabilities, Finding, LeaderInfo, LockInfo, Loss
from multilock.names import check_name, check_prefix

if TYPE_CHECKING:
    from multilock.backend import Backend
    from multilock.config import Settings
    from multilock.kernel.subscribers import Events

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
    **options: Any,
) -> AsyncClient:
    """The asyncio client of a backend; the arguments of `multilock.connect`. No I/O; it may be awaited as well."""
    settings = resolve(url, profile=profile, config=config, client=client, requires=requires, options=options)
    return AsyncClient._of(open_configured(settings), settings)


class AsyncClient(ForAsyncWith, OfThisProcess):
    """One backend and what is held in it, for the tasks of one event loop. See `multilock.Client`."""

    def __init__(self, backend: Backend, **options: Any) -> None:
        if not hasattr(backend, "scheme"):
            what = f"AsyncClient() takes a backend object, not {type(backend).__name__}"
            raise TypeError(f"{what}: multilock.connect_async(url) makes one of a URL")
        self._begin(backend, settings_for(backend.scheme, options))

    @classmethod
    def _of(cls, backend: Backend, settings: Settings) -> AsyncClient:
        client = cls.__new__(cls)
        client._begin(backend, settings)
        return client

    def _begin(self, backend: Backend, settings: Settings) -> None:
        self._kernel = Kernel(backend, settings, Threads(), LoopFace)
        self._scopes: weakref.WeakKeyDictionary[asyncio.Task[Any], tuple[str, Scope[HeldAsyncLease]]]
        self._scopes = weakref.WeakKeyDictionary()

    def _scope(self) -> Scope[HeldAsyncLease] | None:
        """The leases of this task, if it is a task that asks; none of the parent's after a fork."""
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

    def lock(
        self,
        name: str,
        *,
        ttl: float | None = None,
        renew: bool = True,
        reentrant: bool = False,
        fair: bool = False,
        hold_at_least: float = 0.0,
        on_lost: Callable[[Loss[AsyncLease]], object] | None = None,
        cancel_on_lost: bool = True,
        hard_fence: bool = False,
        **theirs: Never,
    ) -> AsyncDistributedLock:
        """See `multilock.Client.lock`. ``on_lost`` may be ``async def``. ``cancel_on_lost``: the body of ``async with``
        is cancelled when the lease is lost; False: LockLost is raised only at its end."""
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
            on_lost=on_lost,
            hard_fence=hard_fence,
        )

    def read_write_lock(
        self,
        name: str,
        *,
        ttl: float | None = None,
        renew: bool = True,
        reentrant: bool = False,
        fair: bool | None = None,
        on_lost: Callable[[Loss[AsyncLease]], object] | None = None,
        cancel_on_lost: bool = True,
        hard_fence: bool = False,
        **theirs: Never,
    ) -> AsyncReadWriteLock:
        """See `multilock.Client.read_write_lock`; ``on_lost`` and ``cancel_on_lost`` as of `lock`."""
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
            on_lost=on_lost,
            hard_fence=hard_fence,
        )

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
        on_lost: Callable[[Loss[AsyncLease]], object] | None = None,
        cancel_on_lost: bool = True,
        hard_fence: bool = False,
        **theirs: Never,
    ) -> AsyncSemaphore:
        """See `multilock.Client.semaphore`; ``on_lost`` and ``cancel_on_lost`` as of `lock`."""
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
            on_lost=on_lost,
            hard_fence=hard_fence,
        )

    def lock_all(
        self,
        names: Iterable[str],
        *,
        ttl: float | None = None,
        renew: bool = True,
        reentrant: bool = False,
        fair: bool = False,
        hold_at_least: float = 0.0,
        on_lost: Callable[[Loss[AsyncLease]], object] | None = None,
        cancel_on_lost: bool = True,
        hard_fence: bool = False,
        **theirs: Never,
    ) -> AsyncDistributedLock:
        """See `multilock.Client.lock_all`; ``on_lost`` and ``cancel_on_lost`` as of `lock`."""
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
        """See `multilock.Client.locked`; for coroutine functions."""
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
    ) -> AsyncElection:
        """See `multilock.Client.election`. The callbacks may be ``async def``."""
        return AsyncElection(
            self._kernel, self._scope, name, identity, ttl, on_elected, on_lost, on_leader_changed, grace, hold_at_least
        )

    def current_lease(self, name: str | None = None) -> AsyncLease:
        """The innermost lease of this task, of ``name`` if given. Raises NotHeld if there is none."""
        scope = self._scope()
        lease = scope.newest(lambda lease: name is None or lease.name == name) if scope else None
        if lease is None:
            raise self._kernel.none_current(name)
        return lease

    @property
    def capabilities(self) -> Capabilities:
        """See `multilock.Client.capabilities`."""
        return self._kernel.backend.capabilities

    @property
    def events(self) -> Events:
        """``events.subscribe(callback) -> unsubscribe``; the callback runs on the loop."""
        return self._kernel.events

    async def inspect(self, name: str) -> LockInfo | None:
        """See `multilock.Client.inspect`."""
        return await self._kernel.ask(self._kernel.backend.inspect, check_name(name), name=name)

    def inspect_all(self, prefix: str = "") -> AsyncIterator[LockInfo]:
        """See `multilock.Client.inspect_all`."""
        self._kernel.check_open()
        check_prefix(prefix)
        return self._inspect_all(prefix)

    async def _inspect_all(self, prefix: str) -> AsyncIterator[LockInfo]:
        page = await self._kernel.pages(prefix)
        while infos := await page():
            for info in infos:
                yield info

    async def force_release(self, name: str) -> bool:
        """See `multilock.Client.force_release`."""
        return await self._kernel.ask(self._kernel.backend.force_release, check_name(name), name=name)

    async def diagnose(self) -> list[Finding]:
        """See `multilock.Client.diagnose`."""
        return await self._kernel.diagnose()

    async def ping(self) -> float:
        """See `multilock.Client.ping`."""
        before = self._kernel.now()
        await self._kernel.ask(self._kernel.backend.ping)
        return self._kernel.now() - before

    def is_healthy(self) -> bool:
        """See `multilock.Client.is_healthy`."""
        return self._kernel.is_healthy()

    async def close(self) -> None:
        """See `multilock.Client.close`. Cancelled, it goes on in the background.

        Raises BackendUnavailable, and the client stays open, where the process can have no more threads.
        """
        loop = asyncio.get_running_loop()
        face = cast("LoopFace", self._kernel.face)
        face.forget_closed_loop()
        if face.its_loop() is None:
            face.loop()  # callbacks run on this one then
        closed = asyncio.Event()

        def close() -> None:
            try:
                self._kernel.end.close()
            finally:
                with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits any more
                    loop.call_soon_threadsafe(closed.set)

        here = contextvars.copy_context()  # an election asks whether it is its own work that closes
        self._kernel.spawn(lambda: here.run(close), "multilock-close")
        await closed.wait()

    def __await__(self) -> Generator[Any, Any, AsyncClient]:
        yield from ()  # a generator that never suspends
        return self

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __del__(self) -> None:
        kernel: Kernel | None = getattr(self, "_kernel", None)  # none where the arguments were wrong
        if kernel and not kernel.closed:
            telling.defer(kernel.end.drop)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._kernel.settings!r}{' closed' if self._kernel.closed else ''}>"
