"""The public interface of a lease: `Lease` in the blocking API, `AsyncLease` in the asyncio API.

Both are protocols, so a function annotated with one accepts the lease of any kind of lock, or a test double. ``help()``
of a lease shows the docstrings of this file. A proof is a reply of the backend that extends the lease.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

if TYPE_CHECKING:
    from multilock.model import LeaseState, Loss

__all__ = ["AnyLease", "AsyncLease", "Lease"]


class AnyLease(Protocol):
    """The members that `Lease` and `AsyncLease` share. None of them sends a request."""

    __slots__ = ()

    @property
    def name(self) -> str:
        """The name of the lock, without the client's prefix."""

    @property
    def ttl(self) -> float:
        """The lifetime in seconds that the backend granted. The granted lifetime may be longer than requested: see
        `Capabilities`."""

    @property
    def owner(self) -> str:
        """The random id of this acquisition, followed by host, pid and identity. ``inspect()`` shows the same text."""

    @property
    def token(self) -> int | None:
        """The fencing token, which is greater for every later holder of the name.

        None if the backend has no fencing tokens, and for a lease of several locks.
        """

    @property
    def state(self) -> LeaseState:
        """The state by the clock: HELD, AT_RISK (a renewal failed or is late, still held), LOST or RELEASED."""

    @property
    def leases(self) -> tuple[AnyLease, ...]:
        """The leases of the single locks: one for each name of `Client.lock_all`, otherwise only this lease."""

    def is_held(self) -> bool:
        """Return whether the lock is still proven to be ours. Compares the clock with the newest proof at every call.

        The result is also False after a pause of this process that outlived the lease, after a release, and in a forked
        child. True promises nothing about the time after the call. To be safe after the call as well, send the token of
        `fence` with every write.
        """

    def remaining(self) -> float:
        """Return the seconds until the lease is lost unless a renewal succeeds before, or 0.0 if it is not held."""

    def check(self) -> None:
        """Return at once if the lease is held. Raises LockLost if it was lost, NotHeld if it was released."""

    def fence(self) -> int:
        """Return the fencing token. Send the token with every write, so that the resource can refuse a write with an
        older token.

        Raises LockLost or NotHeld as `check` does. Raises CapabilityMissing if the backend has no tokens, for a
        semaphore with more than one permit, and for a lease of several locks (use the `leases` one by one there).
        """

    def on_lost(self, callback: Callable[[Loss[Self]], object]) -> None:
        """Have ``callback(loss)`` called exactly once if this lease is lost, at once if it was lost already.

        The callback starts before the backend can let another holder in (docs/guarantees.md names the limits). The
        callback runs on a thread of its own. With asyncio it runs on the event loop and may be ``async def``. It is
        never called after a release. If it raises, the error is logged and nothing else is affected.

        Raises TypeError if ``callback`` cannot be called, or if a blocking client is given a coroutine function.
        """


@runtime_checkable
class Lease(AnyLease, Protocol):
    """A lock that is held, as ``acquire()`` returns it. After the lease was released or lost, it is never held again.

    A lease is a context manager: the end of ``with`` releases it, and raises LockLost if it was lost. If several
    ``with`` have entered the same lease, the last to end releases it. Any thread may use and release it.
    ``is_held()``, ``remaining()``, ``state`` and ``check()`` compare the clock with the newest proof at every call, and
    send no request. None of them promises anything about actions that are already under way when the lease ends.
    """

    __slots__ = ()

    @property
    def leases(self) -> tuple[Lease, ...]:
        """The leases of the single locks: one for each name of `Client.lock_all`, otherwise only this lease."""

    def release(self) -> bool:
        """Release the lock.

        Returns True if the lock was ours until this call, False if it was lost before or released already. Never
        raises. Waits at most one ``request_timeout`` for the answer. Without an answer the release continues in the
        background, and this call returns True. If the release finds that the lock was gone, that is a loss: ``on_lost``
        runs and the end of ``with`` raises LockLost. For a reentrant lock every release counts down, and the last one
        releases the lock.
        """

    def renew(self) -> None:
        """Send one renewal now, which also asks the backend whether the lock is still ours.

        Raises LockLost if it is not, and NotHeld after a release. Raises BackendUnavailable if the backend does not
        answer: the lease is then held until its deadline. A lease of several locks (`Client.lock_all`) renews one lock
        after the other, and raises the first error after all of them.
        """

    def guard(self, connection: Any, *, idle_limit: float | None = None) -> None:
        """Keep the lock until the transaction that is open on ``connection`` ends, so that its writes are never late.

        Only for ``postgresql://``, with a connection to the lock's database: one of psycopg 3, psycopg2, SQLAlchemy
        (Connection or Session) or Django. Until the commit or rollback nobody else gets the lock, even if the lease
        ends before. Call `guard` at the outermost level, because a rollback to an earlier savepoint ends the guard.
        Call it before the transaction reads data on which its writes depend. The server ends the transaction if it is
        idle for ``idle_limit`` seconds. The default is the server's own setting.

        Raises LockLost if the lock is no longer ours; the transaction can then only be rolled back. Raises NotHeld
        after a release, ConfigurationError if no transaction is open, and any error of the connection itself. Raises
        CapabilityMissing on other backends: `multilock.guard` uses a table for their leases.
        """

    def wait_lost(self, timeout: float | None = None) -> Loss[Self] | None:
        """Block until the lease is lost, and return the `Loss`.

        Returns None if the lease is released, or if ``timeout`` seconds have passed (default: wait without limit).
        """

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@runtime_checkable
class AsyncLease(AnyLease, Protocol):
    """A lock that is held, as ``await lock.acquire()`` returns it. The asyncio twin of `multilock.Lease`.

    A lease is an asynchronous context manager. If the lease is lost, the body of ``async with`` is cancelled at that
    moment (unless the lock was made with ``cancel_on_lost=False``), and the end raises LockLost.
    """

    __slots__ = ()

    @property
    def leases(self) -> tuple[AsyncLease, ...]:
        """The leases of the single locks: one for each name of `AsyncClient.lock_all`, otherwise only this lease."""

    async def release(self) -> bool:
        """Release the lock. If this call is cancelled, the release continues in the background.

        Returns True if the lock was ours until this call, False if it was lost before or released already. Never
        raises, and waits for one ``request_timeout`` at most: see `multilock.Lease.release`.
        """

    async def renew(self) -> None:
        """Send one renewal now, which also asks the backend whether the lock is still ours.

        Raises LockLost if it is not, and NotHeld after a release. Raises BackendUnavailable if the backend does not
        answer: the lease is then held until its deadline. See `multilock.Lease.renew`.
        """

    async def guard(self, connection: Any, *, idle_limit: float | None = None) -> None:
        """Keep the lock until the transaction that is open on ``connection`` ends: see `multilock.Lease.guard`.

        The connection is an ``AsyncConnection`` of psycopg 3, or an ``AsyncConnection`` or ``AsyncSession`` of
        SQLAlchemy.
        """

    async def wait_lost(self, timeout: float | None = None) -> Loss[Self] | None:
        """Wait until the lease is lost, and return the `Loss`.

        Returns None if the lease is released, or if ``timeout`` seconds have passed (default: wait without limit).
        """

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
