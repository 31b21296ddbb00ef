"""What a lease is for its user: `Lease` of the blocking face, `AsyncLease` of the asyncio face.

Both are protocols: a function that takes one is given the lease of any kind of lock, or a stand-in of a test. Their
text is what ``help()`` of a lease shows.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, runtime_checkable

if TYPE_CHECKING:
    from multilock.model import LeaseState, Loss

__all__ = ["AnyLease", "AsyncLease", "Lease"]


class AnyLease(Protocol):
    """What the leases of both faces have in common. Nothing of it asks the backend."""

    __slots__ = ()

    @property
    def name(self) -> str:
        """Of the lock."""

    @property
    def ttl(self) -> float:
        """Seconds granted by the backend."""

    @property
    def owner(self) -> str:
        """The random id of this acquisition, followed by who holds it, as ``inspect()`` shows it."""

    @property
    def token(self) -> int | None:
        """Fencing token: greater for every later holder of the name. None where the backend cannot give one."""

    @property
    def state(self) -> LeaseState:
        """HELD, AT_RISK (a renewal failed or is late; still held), LOST or RELEASED."""

    @property
    def leases(self) -> tuple[AnyLease, ...]:
        """Of a single lock: itself."""

    def is_held(self) -> bool:
        """From the clock at every call: False from the moment at which no proof is left, also after a pause."""

    def remaining(self) -> float:
        """Seconds of proven validity left, or 0.0."""

    def check(self) -> None:
        """Raise LockLost if the lease was lost, NotHeld if it was released; else return at once."""

    def fence(self) -> int:
        """The token, after `check`; send it with every write so that the resource can refuse an older one.

        Raises CapabilityMissing where the backend has no tokens, and for a permit of which there are several.
        """

    def on_lost(self, callback: Callable[[Loss[Self]], object]) -> None:
        """Call ``callback(loss)`` exactly once if this lease is lost; at once if it already is; never after a release.

        It starts before the backend could let another holder in (see docs/guarantees.md), on a thread of its own
        (asyncio: on the loop; there it may be ``async def``). One that raises is logged and harms nothing else.
        """


@runtime_checkable
class Lease(AnyLease, Protocol):
    """One holding of a lock; what ``acquire()`` returns. It is never held again after it was released or lost.

    A context manager: it is released at the end, and raises LockLost there if it was lost. ``is_held()``,
    ``remaining()``, ``state`` and ``check()`` compare the clock with the newest proof at every call, without I/O. None
    of them promises anything about actions already under way when the lease ends.
    """

    __slots__ = ()

    @property
    def leases(self) -> tuple[Lease, ...]: ...

    def release(self) -> bool:
        """Give it back. True: it was ours until we began to release; False: lost before, or released already.

        Never raises. Waits for one ``request_timeout`` at most; unanswered, it goes on in the background (True). A loss
        that is discovered here is a loss: ``on_lost`` runs and ``with`` raises LockLost. Of a reentrant lock every
        release counts down, and the last gives it back.
        """

    def renew(self) -> None:
        """One renewal now, which also asks whether the lock is still ours.

        Raises LockLost if it is not, NotHeld after a release, BackendUnavailable without an answer; the lease then
        goes on until its deadline. Of several locks (`Client.lock_all`) each is renewed, one after the other, and what
        one of them was not answered is raised at the end.
        """

    def wait_lost(self, timeout: float | None = None) -> Loss[Self] | None:
        """Block until the lease is lost; None when ``timeout`` seconds are over or it was released."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@runtime_checkable
class AsyncLease(AnyLease, Protocol):
    """See `multilock.Lease`. An asynchronous context manager, whose body is cancelled at the moment of a loss."""

    __slots__ = ()

    @property
    def leases(self) -> tuple[AsyncLease, ...]: ...

    async def release(self) -> bool:
        """See `multilock.Lease.release`. Cancelled, it goes on in the background."""

    async def renew(self) -> None:
        """See `multilock.Lease.renew`."""

    async def wait_lost(self, timeout: float | None = None) -> Loss[Self] | None:
        """Wait until the lease is lost; None when ``timeout`` seconds are over or it was released."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
