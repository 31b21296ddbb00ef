"""The blocking face of one lock: `DistributedLock`, `Lease`, and the adapter to `threading.Lock`."""

from __future__ import annotations

import math
import threading
from itertools import count
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

from multilock.acquire import acquire, run
from multilock.errors import NotHeld
from multilock.holding import HELD, LOST, Holding
from multilock.model import Claim, Granted, Loss
from multilock.names import check_timeout

if TYPE_CHECKING:
    from multilock.client import Client
    from multilock.kernel import Kernel, Want

__all__ = ["DistributedLock", "Lease", "Lock", "ThreadingLock"]

_Key = tuple[int, int]  # the thread that acquired, and a number of its own for each acquire


class Lease(Holding):
    """One holding of a lock. A context manager: it is released at the end, and raises LockLost there if it was lost."""

    __slots__ = ()

    def release(self) -> bool:
        """Give it back. True: it was ours until we began to release; False: lost before, or released already.

        Never raises. Waits for one ``request_timeout`` at most; unanswered, it goes on in the background (True). A loss
        that is discovered here is a loss: ``on_lost`` runs and ``with`` raises LockLost. Of a reentrant lock every
        release counts down, and the last gives it back.
        """
        return run(self._kernel.release(self))

    def renew(self) -> None:
        """One renewal now, which also asks whether the lock is still ours.

        Raises LockLost if it is not, NotHeld after a release, BackendUnavailable without an answer; the lease then
        goes on until its deadline.
        """
        run(self._kernel.renew(self))

    def wait_lost(self, timeout: float | None = None) -> Loss | None:
        """Block until the lease is lost; None when ``timeout`` seconds are over or it was released."""
        seconds = check_timeout(timeout)
        ended = self._kernel.runtime.bell()
        if self._at_end(ended.set):
            ended.wait(math.inf if seconds is None else seconds)
            self._not_at_end(ended.set)
        return self._loss if self._is_lost() else None

    def __enter__(self) -> Self:
        self.check()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release_surely()
        if self._is_lost():
            self._raise_lost(error)

    def _release_surely(self) -> None:
        """Release it also where an interrupt comes before that has begun: nobody else would."""
        try:
            self.release()
        except BaseException:
            if self._count == 1:
                self._kernel.release_later(self)
            raise


@runtime_checkable
class DistributedLock(Protocol):
    """A name in a place. Making one does no I/O; ``with lock as lease:`` waits for it and releases it at the end."""

    @property
    def name(self) -> str: ...

    @property
    def ttl(self) -> float:
        """Seconds, as given or the client's default; a lease tells what was granted."""

    def acquire(self, timeout: float | None = None) -> Lease:
        """Wait for the lock, ``timeout`` seconds in all (None or inf: for ever; 0: one try).

        Raises LockTimeout if it was still taken then; BackendUnavailable if the backend was silent for the client's
        ``outage_timeout`` or at the end of ``timeout``; BackendRejected; ClientClosed.
        """

    def try_acquire(self, timeout: float = 0) -> Lease | None:
        """Like `acquire`, with None instead of LockTimeout."""

    def release(self) -> bool:
        """Release the newest lease that this thread took through this object and has not given back.

        False if that was lost. Raises NotHeld if there is none.
        """

    def is_locked(self) -> bool:
        """Ask the backend: does anyone hold it?"""

    def is_held(self) -> bool:
        """From the clock: does this object hold a lease that is still valid, in whatever thread?"""

    def as_threading_lock(self) -> ThreadingLock:
        """A drop-in for `threading.Lock` (`threading.RLock` when reentrant)."""

    def __enter__(self) -> Lease: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Lock:
    """A mutex; what `Client.lock` returns."""

    def __init__(self, client: Client, name: str, **options: Any) -> None:
        self._client = client
        self._kernel = client._kernel
        self._want = self._kernel.want(name, self._make, **options)
        self._entered: dict[int, list[Lease]] = {}  # by thread; a `threading.local` takes 740 bytes
        self._newest: Lease | None = None

    def _make(self, kernel: Kernel, want: Want, claim: Claim, granted: Granted, unsure: bool) -> Lease:
        # At most one lease of a mutex is valid at a time, and it is the one made last.
        self._newest = lease = Lease(kernel, want, claim, granted, unsure)
        return lease

    @property
    def name(self) -> str:
        return self._want.name

    @property
    def ttl(self) -> float:
        return self._want.ttl

    def acquire(self, timeout: float | None = None) -> Lease:
        seconds = check_timeout(timeout)
        if lease := self._acquire(seconds):
            return lease
        raise self._kernel.still_taken(self.name, seconds)

    def try_acquire(self, timeout: float = 0) -> Lease | None:
        return self._acquire(check_timeout(timeout))

    def _acquire(self, timeout: float | None) -> Lease | None:
        scope = self._client._scope()
        want = self._want
        if want.reentrant and (held := scope.reenter(want)):
            if not self.is_held():  # else it holds this one, or a newer one of another thread
                self._newest = held
            return held
        lease = run(acquire(self._kernel, want, timeout))
        if lease is None:
            return None
        try:
            assert isinstance(lease, Lease)
            scope.push(lease)
        except BaseException:  # interrupted: nobody has it to release it
            self._kernel.release_later(lease)
            raise
        return lease

    def release(self) -> bool:
        lease = self._client._scope().taken_through(self._want)
        if lease is None:
            raise self._kernel.not_held(self.name, "thread")
        return lease.release()

    def is_locked(self) -> bool:
        return self._client.inspect(self.name) is not None

    def is_held(self) -> bool:
        return self._newest is not None and self._newest.is_held()

    def as_threading_lock(self) -> ThreadingLock:
        return ThreadingLock(self)

    def __enter__(self) -> Lease:
        lease = self.acquire()
        try:
            self._entered.setdefault(threading.get_ident(), []).append(lease)
        except BaseException:  # interrupted: a `with` that has not begun releases nothing
            entered = self._entered.get(threading.get_ident(), [])
            if entered[-1:] == [lease]:
                entered.pop()
            if lease._count == 1:
                self._kernel.release_later(lease)
            else:
                lease.release()  # only counts down
            raise
        return lease

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        thread: int | None = threading.get_ident()
        if thread not in self._entered:  # it began in another, as that of an ExitStack may
            thread = next(reversed(self._entered), None)
            if thread is None:
                raise self._kernel.not_held(self.name, "thread")
        leases = self._entered[thread]
        try:
            leases[-1].__exit__(kind, error, trace)
        finally:
            leases.pop()
            if not leases:
                del self._entered[thread]

    def __repr__(self) -> str:
        return f"<Lock {self.name!r} in {self._kernel.scheme} ttl={self.ttl:g}{' held' if self.is_held() else ''}>"


class ThreadingLock:
    """`threading.Lock` over a distributed lock: any thread may release. `threading.RLock` over a reentrant one.

    A lock that was lost is not passed off as held: ``release()`` and the end of ``with`` raise LockLost, in the thread
    that acquired it, also where another has acquired it since.
    """

    def __init__(self, lock: Lock) -> None:
        self._lock = lock
        self._reentrant = lock._want.reentrant
        self._numbers = count()
        # One for each acquire that was not released. There may be more than the holder's: a thread that lost its lease
        # hears of it only when it releases.
        self._taken: dict[_Key, Lease] = {}

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if not isinstance(timeout, (int, float)):
            raise TypeError(f"timeout must be a number of seconds, not {timeout!r:.60}: -1 waits for ever")
        if not blocking and timeout != -1:
            raise ValueError("can't specify a timeout for a non-blocking call")
        if timeout < 0 and timeout != -1:
            raise ValueError("timeout value must be a non-negative number")
        wait: float | None = 0 if not blocking else None if timeout == -1 else timeout
        key = threading.get_ident(), next(self._numbers)
        lease = self._lock._acquire(check_timeout(wait))
        if lease is None:
            return False
        try:
            self._taken[key] = lease
        except BaseException:  # interrupted: nobody has it to release it
            self._taken.pop(key, None)
            lease._release_surely()
            raise
        return True

    def release(self) -> None:
        self._give_back(self._pop())

    def locked(self) -> bool:
        """Whether anybody holds it; asks the backend unless it is held through this object."""
        return self._is_held() or self._lock.is_locked()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pop().__exit__(kind, error, trace)

    def _mine(self) -> list[tuple[_Key, Lease]]:
        """What this thread took, newest first. Where it took nothing: of a plain lock what any thread took last."""
        taken = list(self._taken.items())[::-1]
        thread = threading.get_ident()
        mine = [(key, lease) for key, lease in taken if key[0] == thread]
        if mine or self._reentrant:
            return mine
        return [(key, lease) for key, lease in taken if lease._state in (HELD, LOST)][:1]

    def _pop(self) -> Lease:
        """Before it is given back: two threads that release at the same time do not release the same."""
        for key, _ in self._mine():
            if lease := self._taken.pop(key, None):
                return lease
        raise NotHeld(
            f"release of the lock {self._lock.name!r}, which is not acquired",
            name=self._lock.name,
            backend=self._lock._kernel.scheme,
        )

    def _give_back(self, lease: Lease) -> None:
        lease._release_surely()
        if lease._is_lost():
            raise lease._lock_lost()

    def _is_held(self) -> bool:
        return any(lease.is_held() for lease in list(self._taken.values()))

    def __repr__(self) -> str:
        held = " held" if self._is_held() else ""
        return f"<ThreadingLock {self._lock.name!r} in {self._lock._kernel.scheme}{held}>"

    # What threading.Condition asks of an RLock

    def _is_owned(self) -> bool:
        return bool(self._mine())

    def _release_save(self) -> list[_Key]:
        """Give back every level. The leases stay in ``_taken`` until they are replaced: where a wait() does not get the
        lock back, its ``with`` still ends with what is its own, and not with the lease of another thread."""
        mine = self._mine()
        for _, lease in mine:
            self._give_back(lease)
        return [key for key, _ in mine]

    def _acquire_restore(self, keys: list[_Key]) -> None:
        for key in keys:
            self.acquire()
            self._taken.pop(key, None)
