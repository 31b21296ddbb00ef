"""The blocking face: `connect` and `Client`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Never, ParamSpec, TypeVar, overload

from multilock import system, telling
from multilock.config import open_configured, resolve, settings_for
from multilock.decorate import decorator, lock_for
from multilock.election import Election, Leadership
from multilock.foreign import ForWith, refuse
from multilock.kernel.core import Kernel
from multilock.kernel.face import BlockingFace, run
from multilock.kernel.process import OfThisProcess, notice_fork
from multilock.kernel.runtime import Threads
from multilock.kernel.scopes import Scope
from multilock.lease import Lease
from multilock.lock import DistributedLock, HeldLease, Lock
from multilock.many import LockSet
from multilock.model import Capabilities, Finding, LeaderInfo, LockInfo, Loss
from multilock.names import check_name, check_prefix
from multilock.shared import ReadWriteLock, Semaphore, SemaphoreLock

if TYPE_CHECKING:
    from multilock.backend import Backend
    from multilock.config import Settings
    from multilock.kernel.subscribers import Events

__all__ = ["Client", "connect"]

P = ParamSpec("P")
R = TypeVar("R")


def connect(
    url: str | Mapping[str, object] | None = None,
    *,
    profile: str | None = None,
    config: str | os.PathLike[str] | None = None,
    client: object = None,
    requires: Iterable[str] = (),
    **options: Any,
) -> Client:
    """A client of the backend that ``url``, a profile, the environment or ``multilock.toml`` names. No I/O.

    ``client`` is a client object of the field (``redis.Redis``), used and never closed. ``requires`` names
    capabilities without which the backend is refused. ``options`` go before those of the URL and of the profile:
    ``ttl`` (30 s), ``prefix`` (``multilock/``), ``identity`` (host and pid), ``outage_timeout`` (30 s; None:
    unlimited), ``request_timeout`` (ttl/5, at most 5 s), and the backend's own.

    Raises ConfigurationError, CapabilityMissing, TypeError.
    """
    settings = resolve(url, profile=profile, config=config, client=client, requires=requires, options=options)
    return Client._of(open_configured(settings), settings)


class Client(ForWith, OfThisProcess):
    """One backend and what is held in it. Threads may share it; a forked child gets its own connections and identity.

    ``Client(backend, **options)`` takes a backend object and the options ``ttl``, ``identity``, ``outage_timeout`` and
    ``request_timeout``; `connect` finds the backend by its URL.
    """

    def __init__(self, backend: Backend, **options: Any) -> None:
        if not hasattr(backend, "scheme"):
            what = f"Client() takes a backend object, not {type(backend).__name__}"
            raise TypeError(f"{what}: multilock.connect(url) makes a client of a URL")
        self._begin(backend, settings_for(backend.scheme, options))

    @classmethod
    def _of(cls, backend: Backend, settings: Settings) -> Client:
        client = cls.__new__(cls)
        client._begin(backend, settings)
        return client

    def _begin(self, backend: Backend, settings: Settings) -> None:
        self._kernel = Kernel(backend, settings, Threads(), BlockingFace)
        self._scopes = system.local()

    def _scope(self) -> Scope[HeldLease]:
        """The leases of this thread; none of the parent's after a fork."""
        notice_fork()
        scopes: dict[str, Scope[HeldLease]] = self._scopes.__dict__
        scope = scopes.get(self._kernel.client)
        if scope is None:
            scopes.clear()
            scope = scopes[self._kernel.client] = Scope()
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
        on_lost: Callable[[Loss[Lease]], object] | None = None,
        hard_fence: bool = False,
        **theirs: Never,
    ) -> DistributedLock:
        """A lock with this name. No I/O; everything that can be wrong with the arguments is said here.

        ``ttl`` (seconds; default: the client's) is how long the lock outlives a holder that died. ``renew=True`` keeps
        it alive until it is released, lost or closed; ``renew=False`` lets it end at ``ttl``. ``reentrant``: the thread
        that holds it may acquire it again, and gets the same lease, as the first acquire made it. ``fair``: in order of
        arrival among those that ask for it. ``hold_at_least`` (seconds; may exceed the ttl): a release before that time
        since the grant leaves the name taken until then, by the server's own clock and whatever becomes of this
        process, so that a short job does not run again on a host whose clock is behind; not after a loss.
        ``on_lost(loss)`` is called once for each lease that is lost. ``hard_fence`` (Linux): the operating system kills
        this process (SIGKILL) when the validity of a lease passes without a renewal, even while it is stopped or its
        interpreter is stuck; so too after a loss, unless `release` or the end of ``with`` says before that the work has
        ended.

        Raises ValueError, TypeError, CapabilityMissing, ClientClosed.
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
        on_lost: Callable[[Loss[Lease]], object] | None = None,
        hard_fence: bool = False,
        **theirs: Never,
    ) -> ReadWriteLock:
        """Many readers, or one writer. No I/O. The options are those of `lock`, for both.

        Nobody overtakes a waiter whom it would keep out, so that neither readers nor writers starve (Consul: later
        readers wait for a writer). ``fair`` therefore changes no order: True refuses a backend that keeps none, False
        lets one writer of this client at a time ask. Every other lock of that name excludes both. A thread that reads
        waits for itself if it reads again behind a waiting writer: use ``reentrant=True``; to write it must give its
        reading back first, else CapabilityMissing.

        Raises ValueError, TypeError, CapabilityMissing, ClientClosed.
        """
        if theirs:
            raise refuse("read_write_lock", theirs)
        return ReadWriteLock(
            self, name, ttl=ttl, renew=renew, reentrant=reentrant, fair=fair, on_lost=on_lost, hard_fence=hard_fence
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
        on_lost: Callable[[Loss[Lease]], object] | None = None,
        hard_fence: bool = False,
        **theirs: Never,
    ) -> Semaphore:
        """A lock that up to ``permits`` (1 to 1,000,000) may hold, each with a lease of its own. No I/O.

        All must name the same number: acquire() raises BackendRejected beside a holder with another one. The options
        are those of `lock`; ``fair`` as of `read_write_lock`. Every other lock of that name excludes it.

        Raises ValueError, TypeError, CapabilityMissing, ClientClosed.
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
        on_lost: Callable[[Loss[Lease]], object] | None = None,
        hard_fence: bool = False,
        **theirs: Never,
    ) -> DistributedLock:
        """All locks of these names, or none. No I/O. The options are those of `lock`, for each.

        They are taken one after the other in an order that is the same for everybody, so that two callers never wait
        for each other; ``timeout`` is for all of them. The lease is held as long as each of its ``leases`` is. When one
        is lost, ``on_lost`` is called once; the others are kept until the release or the end of ``with``, one ttl at
        most, since the work under them may go on until then. Its ``token`` is None: ``lease.leases[i].fence()``, in the
        order of their keys.

        Raises ValueError, TypeError, CapabilityMissing, ClientClosed.
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
        """Decorate a function so that it runs while the lock is held; it raises LockLost if it was lost meanwhile.

        ``name`` may use the function's parameters: ``"order/{order_id}"`` (``{{`` for a brace). ``skip=True`` returns
        None where the lock is taken, after one try or after ``timeout``, instead of LockTimeout. ``options`` are those
        of `lock`; with ``shared=True`` the function runs as a reader (`read_write_lock`), with ``permits=n`` as one of
        n (`semaphore`).
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
    ) -> Election:
        """A candidate in the election ``name``. No I/O yet. ``identity`` (default: the client's) is what others see.
        ``grace`` (default: one ttl; math.inf allowed): seconds for which an orderly end waits for work and callbacks.
        ``hold_at_least``: as of `lock`, where the work of `run` ends by itself; nobody is elected before that.

        Raises ValueError, TypeError, CapabilityMissing, ClientClosed.
        """
        return Election(
            self._kernel, self._scope, name, identity, ttl, on_elected, on_lost, on_leader_changed, grace, hold_at_least
        )

    def current_lease(self, name: str | None = None) -> Lease:
        """The innermost lease of this thread, of ``name`` if given. Raises NotHeld if there is none."""
        lease = self._scope().newest(lambda lease: name is None or lease.name == name)
        if lease is None:
            raise self._kernel.none_current(name)
        return lease

    # What the backend knows

    @property
    def capabilities(self) -> Capabilities:
        """What this backend promises with its options; no I/O."""
        return self._kernel.backend.capabilities

    @property
    def events(self) -> Events:
        """``events.subscribe(callback) -> unsubscribe``."""
        return self._kernel.events

    def inspect(self, name: str) -> LockInfo | None:
        """Who holds ``name``; None if nobody does. For display: it may be over when you read it."""
        return run(self._kernel.ask(self._kernel.backend.inspect, check_name(name), name=name))

    def inspect_all(self, prefix: str = "") -> Iterator[LockInfo]:
        """All names held that begin with ``prefix``; not a snapshot of one moment."""
        self._kernel.check_open()
        check_prefix(prefix)
        return self._inspect_all(prefix)

    def _inspect_all(self, prefix: str) -> Iterator[LockInfo]:
        page = run(self._kernel.pages(prefix))
        while infos := run(page()):
            yield from infos

    def force_release(self, name: str) -> bool:
        """Take the lock from whoever holds it: an operator's act. The holder's callback gets TAKEN.

        False if nobody held it. It does not stop what the holder is doing: only a fencing token does.
        """
        return run(self._kernel.ask(self._kernel.backend.force_release, check_name(name), name=name))

    def diagnose(self) -> list[Finding]:
        """Return what weakens the lock, each with a remedy: versions and settings of the server, push connections that
        are down, threads that this process was refused."""
        return run(self._kernel.diagnose())

    def ping(self) -> float:
        """Seconds of one round trip. Raises BackendUnavailable, BackendRejected."""
        before = self._kernel.now()
        run(self._kernel.ask(self._kernel.backend.ping))
        return self._kernel.now() - before

    def is_healthy(self) -> bool:
        """Return whether the renewing thread runs on time, and no thread of multilock is missing. No I/O: for a
        liveness probe."""
        return self._kernel.is_healthy()

    # The end

    def close(self) -> None:
        """Stop elections, in order; another lease still held is LOST (CLOSED; its callback first) and then given back.

        Waiters and later calls get ClientClosed. Waits for the work and callbacks of elections, for their ``grace`` at
        most, and for other callbacks and answers, one ``request_timeout`` each at most; what is unanswered then ends by
        its ttl. Called by work or a callback of an election, it does the rest in the background. Twice is harmless.
        """
        self._kernel.end.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        kernel: Kernel | None = getattr(self, "_kernel", None)  # none where the arguments were wrong
        if kernel and not kernel.closed:
            telling.defer(kernel.end.drop)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._kernel.settings!r}{' closed' if self._kernel.closed else ''}>"
