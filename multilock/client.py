"""The blocking API: `connect` and `Client`. `multilock.aio.client` is the asyncio API."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Never, ParamSpec, Self, TypeVar, Unpack, overload

from multilock import log_thread, system
from multilock.api_mistakes import ForWith, hides_foreign, refuse
from multilock.config import open_configured, resolve, settings_for
from multilock.decorate import decorator, lock_for
from multilock.election import Election, Leadership
from multilock.kernel.blocking import BlockingFace, run
from multilock.kernel.client import Kernel
from multilock.kernel.fork import notice_fork
from multilock.kernel.no_pickling import OfThisProcess
from multilock.kernel.runtime import Threads
from multilock.kernel.scopes import Scope
from multilock.keywords import ConnectOptions
from multilock.lease import Lease
from multilock.lock import DistributedLock, HeldLease, Lock
from multilock.lock_all import LockSet
from multilock.model import Capabilities, Finding, LeaderInfo, LockInfo, Loss
from multilock.names import check_name, check_prefix
from multilock.shared import ReadWriteLock, Semaphore, SemaphoreLock

if TYPE_CHECKING:
    from multilock.backend import Backend
    from multilock.config import Settings
    from multilock.kernel.subscribers import Events

__all__ = ["Client", "ClientOfAFace", "connect"]

P = ParamSpec("P")
R = TypeVar("R")


def connect(
    url: str | Mapping[str, object] | None = None,
    *,
    profile: str | None = None,
    config: str | os.PathLike[str] | None = None,
    client: object = None,
    requires: Iterable[str] = (),
    **options: Unpack[ConnectOptions],
) -> Client:
    """Return a `Client` of a backend. Sends no request: the first call that needs the server connects.

    ``url``: Where the backend is, such as ``redis://host:6379/0``, or a mapping with ``url`` and options. Without
    ``url``, the first of these that is set decides: ``profile``, ``$MULTILOCK_URL``, ``$MULTILOCK_PROFILE``, the
    default profile of the config file.

    ``profile``: The name of a profile in the config file.

    ``config``: The path of the config file. Without ``config``, the first of these that exists is used:
    ``$MULTILOCK_CONFIG``, ``multilock.toml`` in the working directory, ``[tool.multilock]`` in ``pyproject.toml``
    there. ``${NAME}`` in a text of that file is replaced by the environment's variable, ``$$`` by a dollar.

    ``client``: An existing client object such as ``redis.Redis``, or a list of them for ``redlock://``. multilock uses
    it and never closes it.

    ``requires``: Names of capabilities. A backend that lacks one of them is refused with CapabilityMissing. The names
    in ``$MULTILOCK_REQUIRES`` (``cross_host,fencing``) are added.

    ``options``: They override the URL and the profile. Every backend has ``ttl`` (30 seconds), ``prefix``
    (``multilock/``), ``identity`` (host and pid), ``outage_timeout`` (30 seconds, None for no limit) and
    ``request_timeout`` (a fifth of the ttl, at most 5 seconds). The page of each backend lists its own options. Type
    checkers know all of them (`ConnectOptions`).

    Raises ConfigurationError if nothing is configured or an option is wrong, CapabilityMissing if the backend lacks one
    of ``requires``, and TypeError if an argument has the wrong type.
    """
    settings = resolve(url, profile=profile, config=config, client=client, requires=requires, options=options)
    return Client._of(open_configured(settings), settings)


class ClientOfAFace(OfThisProcess):
    """The members that `Client` and `AsyncClient` share. None of them waits."""

    _connect: str  # the name of the function that makes a client of this class from a URL
    _kernel: Kernel

    def __init__(self, backend: Backend, **options: Any) -> None:
        if not hasattr(backend, "scheme"):
            what = f"{type(self).__name__}() takes a backend object, not {type(backend).__name__}"
            raise TypeError(f"{what}: use multilock.{self._connect}(url) to make a client from a URL")
        self._begin(backend, settings_for(backend.scheme, options))

    @classmethod
    def _of(cls, backend: Backend, settings: Settings) -> Self:
        client = cls.__new__(cls)
        client._begin(backend, settings)
        return client

    def _begin(self, backend: Backend, settings: Settings) -> None:
        raise NotImplementedError

    @property
    def capabilities(self) -> Capabilities:
        """The promises of this backend with its options. Known without a request."""
        return self._kernel.backend.capabilities

    @property
    def events(self) -> Events:
        """The events of this client: ``unsubscribe = client.events.subscribe(callback)``.

        The callback of an `AsyncClient` runs on the event loop and may be ``async def``.
        """
        return self._kernel.events

    def is_healthy(self) -> bool:
        """Return whether renewals run on time, and every thread of multilock runs. A liveness probe can call it.

        Sends no request, so it says nothing about the server. Returns False after `close`.
        """
        return self._kernel.is_healthy()

    def __del__(self) -> None:
        # The attribute is missing if the arguments of the client were wrong.
        kernel: Kernel | None = getattr(self, "_kernel", None)
        if kernel and not kernel.closed:
            log_thread.defer(kernel.end.drop)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._kernel.settings!r}{' closed' if self._kernel.closed else ''}>"


class Client(ForWith, ClientOfAFace):
    """A connection to one backend, and the locks held through it. `connect` makes one from a URL.

    Threads may share a client and everything made with it. In a forked child the client opens its own connections and
    has its own identity. A client is a context manager whose end calls `close`.

    ``Client(backend, **options)`` takes a backend object and the options ``ttl``, ``identity``, ``outage_timeout`` and
    ``request_timeout``.
    """

    _connect = "connect"

    def _begin(self, backend: Backend, settings: Settings) -> None:
        self._kernel = Kernel(backend, settings, Threads(), BlockingFace)
        self._scopes = system.local()

    def _scope(self) -> Scope[HeldLease]:
        """Return the leases of this thread. A forked child has no lease of its parent."""
        notice_fork()
        scopes: dict[str, Scope[HeldLease]] = self._scopes.__dict__
        scope = scopes.get(self._kernel.client)
        if scope is None:
            scopes.clear()
            scope = scopes[self._kernel.client] = Scope()
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
        on_lost: Callable[[Loss[Lease]], object] | None = None,
        hard_fence: bool = False,
        **theirs: Never,
    ) -> DistributedLock:
        """Return a lock with this name. Sends no request, but checks every argument.

        ``name``: 1 to 1,000 characters, without control characters. Every backend accepts the same names.

        ``ttl``: Seconds for which the lock outlives a holder that died. Default: the client's ttl.

        ``renew``: True renews the lease until it is released or lost, or the client is closed. With False the lease
        ends ``ttl`` seconds after the grant.

        ``reentrant``: The thread that holds the lock may acquire it again and gets the same lease, with the options of
        the first acquire. Each acquire needs a release, and the last release frees the lock. If all acquires use
        ``with``, a call of ``release()`` inside a nested ``with`` replaces the release at its end. If the outer acquire
        does not use ``with``, do not call ``release()`` inside a nested ``with``: its end would release once more. In
        asyncio, acquires of one task that wait at the same time (`asyncio.gather`) wait for each other: acquire one
        after the other.

        ``fair``: True serves all waiters with ``fair=True`` in order of arrival. False promises no order.

        ``hold_at_least``: Seconds from the grant. A lock released earlier stays taken until then, so that a short job
        does not run again on a host whose clock is behind. The server counts this time, even if this process ends.
        ``hold_at_least`` may exceed the ttl, and does not apply after a loss.

        ``max_hold``: Seconds from the grant for which the lease is held at most; at least a tenth of the ttl. Then it
        is lost (reason HELD_TOO_LONG), although the backend would still renew it. After a loss for this reason no other
        holder gets the lock before ``loss.valid_until``, unless `release` or the end of ``with`` reports earlier that
        the work has ended. Default: no limit.

        ``on_lost``: ``on_lost(loss)`` is called once for each lease that is lost. See `Lease.on_lost`.

        ``hard_fence``: Linux only. The operating system kills this process (SIGKILL) if the validity of a lease passes
        without a renewal, even if the process is stopped or the interpreter is stuck. After a loss it kills the process
        too, unless `release` or the end of ``with`` has reported that the work has ended. If one acquire of a reentrant
        lock asks for a hard fence, the fence applies until the last release.

        Raises ValueError or TypeError if an argument is wrong, CapabilityMissing if the backend cannot do what an
        option asks, and ClientClosed.
        """
        if theirs:
            raise refuse("lock", theirs)
        return Lock(
            self,
            name,
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
        on_lost: Callable[[Loss[Lease]], object] | None = None,
        hard_fence: bool = False,
        **theirs: Never,
    ) -> ReadWriteLock:
        """Return a lock for many readers or one writer. Sends no request. The options of `lock` apply to both sides.

        Later waiters do not overtake a waiter that they would block, so neither readers nor writers starve. With
        Consul, only later readers wait for a writer. ``fair`` does not change this order. With True, a backend that
        keeps no order of arrival raises CapabilityMissing. With False, only one waiting writer of this client at a time
        asks the server. With None, the order is the one that the backend offers. Every other kind of lock with this
        name excludes readers and writers.

        A thread that has a read lease and asks for another one would wait for itself if a writer waits in between: use
        ``reentrant=True``. A reader that asks to write must release its read lease first, otherwise acquire() raises
        CapabilityMissing. Likewise, a writer that asks to read must release its write lease first.

        Raises ValueError, TypeError, CapabilityMissing or ClientClosed, as `lock` does.
        """
        if theirs:
            raise refuse("read_write_lock", theirs)
        return ReadWriteLock(
            self,
            name,
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
        on_lost: Callable[[Loss[Lease]], object] | None = None,
        hard_fence: bool = False,
        **theirs: Never,
    ) -> Semaphore:
        """Return a lock that up to ``permits`` holders have at a time, each with its own lease. Sends no request.

        ``permits``: 1 to 1,000,000. Every program must use the same number for this name: acquire() raises
        BackendRejected while the name is held with a different number of permits.

        The other options are those of `lock`, and ``fair`` is that of `read_write_lock`. Every other kind of lock with
        this name excludes the semaphore.

        Raises ValueError, TypeError, CapabilityMissing or ClientClosed, as `lock` does.
        """
        if theirs:
            raise refuse("semaphore", theirs)
        return SemaphoreLock(
            self,
            name,
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
        on_lost: Callable[[Loss[Lease]], object] | None = None,
        hard_fence: bool = False,
        **theirs: Never,
    ) -> DistributedLock:
        """Return a lock that holds all of these names, or none. Sends no request. Each name gets the options of `lock`.

        The locks are taken one after the other, in an order that is the same for every caller. So two callers never
        deadlock. The ``timeout`` of acquire() covers all of them.

        The lease is held as long as each of its ``leases`` is held. If one of them is lost, ``on_lost`` is called once.
        The other locks are kept until the release or the end of ``with``, but at most for one ttl, because the work may
        continue until then. The lease has no token of its own: use ``lease.leases[i].fence()``. The ``leases`` are
        sorted by key.

        Raises ValueError, TypeError, CapabilityMissing or ClientClosed, as `lock` does.
        """
        if theirs:
            raise refuse("lock_all", theirs)
        return LockSet(
            self,
            names,
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
    ) -> Callable[[Callable[P, R]], Callable[P, R]]: ...

    @overload
    def locked(
        self, name: str, *, timeout: float | None = None, skip: bool, **options: Any
    ) -> Callable[[Callable[P, R]], Callable[P, R | None]]: ...

    def locked(
        self, name: str, *, timeout: float | None = None, skip: bool = False, **options: Any
    ) -> Callable[[Callable[P, Any]], Callable[P, Any]]:
        """Decorate a function, so that each call holds the lock while the function runs.

        ``name``: May use the function's parameters, as in ``"order/{order_id}"``. Write ``{{`` for a brace.

        ``timeout``: Seconds that a call waits for the lock. Default: no limit, or one try with ``skip=True``.

        ``skip``: True returns None instead of raising LockTimeout if the lock is still taken.

        ``options``: Those of `lock`. With ``shared=True`` the function runs as a reader of `read_write_lock`, with
        ``permits=n`` as one of n holders of `semaphore`.

        A call raises what `DistributedLock.acquire` raises, and LockLost at its end if the lock was lost meanwhile.
        """
        return decorator(partial(lock_for, self), name, timeout, skip, options, asynchronous=False)

    def election(
        self,
        name: str,
        *,
        identity: str | None = None,
        ttl: float | None = None,
        on_elected: Callable[[Leadership], object] | None = None,
        on_lost: Callable[[Loss[Leadership]], object] | None = None,
        on_leader_changed: Callable[[LeaderInfo | None], object] | None = None,
        grace: float | None = None,
        hold_at_least: float = 0.0,
        max_hold: float | None = None,
        hard_fence: bool = False,
    ) -> Election:
        """Return a candidate in the election ``name``. Sends no request, and does not campaign yet.

        ``identity``: The text by which other nodes recognise this node. Default: the client's identity.

        ``ttl``: Seconds until another node can lead after this node died. Default: the client's ttl.

        ``on_elected``: ``on_elected(leadership)`` is called each time this node is elected.

        ``on_lost``: ``on_lost(loss)`` is called once for each ``on_elected``, on a loss or a resignation.

        ``on_leader_changed``: Called with the new `LeaderInfo`, or None if there is no leader, from the first campaign
        until `Election.stop`.

        ``grace``: Seconds for which a resignation waits for the end of work and callbacks before it releases the lease.
        Default: one ttl. ``math.inf`` waits without limit.

        ``hold_at_least``: Seconds from the election. If the ``work`` of `Election.run` ends by itself earlier, no other
        node is elected until then. See `lock`.

        ``max_hold``: The greatest number of seconds for which this node leads. Then the leadership is lost (reason
        HELD_TOO_LONG). Another node can lead once work, ``on_elected`` and ``on_lost`` have all ended, at the latest at
        ``loss.valid_until``. After the loss this node campaigns again, behind the candidates that wait. See `lock`.

        ``hard_fence``: Linux only. The operating system kills this process if the validity of a leadership passes
        before work, ``on_elected`` and ``on_lost`` have all ended. After `Election.campaign`, the work ends with
        ``leadership.release()`` or the end of ``with``. See `lock`.

        Raises ValueError, TypeError, CapabilityMissing or ClientClosed, as `lock` does.
        """
        return Election(
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

    def current_lease(self, name: str | None = None) -> Lease:
        """Return the innermost lease of this thread, or the innermost with this ``name``.

        Raises NotHeld if this thread has none, for example in a forked child.
        """
        lease = self._scope().newest(lambda lease: name is None or lease.name == name)
        if lease is None:
            raise self._kernel.messages.none_current(name)
        return lease

    # Questions to the backend

    def inspect(self, name: str) -> LockInfo | None:
        """Return the holder of ``name``, or None if it is free.

        Use the result for display only, because the holder may have changed when the answer arrives. Raises
        BackendUnavailable, BackendRejected or ClientClosed.
        """
        return run(self._kernel.ask(self._kernel.backend.inspect, check_name(name), name=name))

    def inspect_all(self, prefix: str = "") -> Iterator[LockInfo]:
        """Return an iterator over the held names that begin with ``prefix`` (default: all names).

        The names are not a snapshot of one moment. Each step of the iterator raises the errors of `inspect`.
        """
        self._kernel.check_open()
        check_prefix(prefix)
        return self._inspect_all(prefix)

    def _inspect_all(self, prefix: str) -> Iterator[LockInfo]:
        page = run(self._kernel.pages(prefix))
        while infos := run(page()):
            yield from infos

    def force_release(self, name: str) -> bool:
        """Release the lock by force, although it has a holder. Meant for operators. The holder's callback gets the
        reason TAKEN.

        Returns False if the lock had no holder. The holder's work is not stopped: only a fencing token protects the
        resource. Raises BackendUnavailable, BackendRejected or ClientClosed.
        """
        return run(self._kernel.ask(self._kernel.backend.force_release, check_name(name), name=name))

    def diagnose(self) -> list[Finding]:
        """Return a finding for everything that weakens the locks of this client, each with a remedy.

        Covers versions and settings of the server, push connections that are down, and threads that the operating
        system refused. Raises BackendUnavailable, BackendRejected or ClientClosed.
        """
        return run(self._kernel.diagnose())

    def ping(self) -> float:
        """Send one request and return the seconds until its reply. Raises BackendUnavailable, BackendRejected."""
        before = self._kernel.now()
        run(self._kernel.ask(self._kernel.backend.ping))
        return self._kernel.now() - before

    # The end

    def close(self) -> None:
        """Resign from elections, release every lock, and end all threads and connections of this client.

        A lease that is still held is lost (reason CLOSED): its callback starts first, then the lock is released.
        Waiters and later calls raise ClientClosed.

        Waits for the work and callbacks of elections for their ``grace``. Waits about one ``request_timeout`` for other
        callbacks, and about one for replies. Besides the grace, the whole call never takes more than six times the
        ``request_timeout``. A lock whose release has no reply when this returns ends with its ttl. If the work or a
        callback of an election calls `close`, the remaining steps happen in the background. A second call waits for the
        first, unless the first still waits for the work of an election.
        """
        self._kernel.end.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
