"""The blocking face of several locks at once: `Client.lock_all`.

Its parts are ordinary locks, taken one after the other in an order that is the same for everybody, so that no two who
want the same names wait for each other. Whoever holds a later name never waits for an earlier one: when a part is lost
meanwhile, all are given back, and it begins again with the first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from inspect import isawaitable
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from multilock.errors import CapabilityMissing, MultilockError, NotHeld
from multilock.foreign import NamesOurs
from multilock.kernel.acquire import Stop, Stopped, acquire
from multilock.kernel.face import run
from multilock.kernel.handing import Handing
from multilock.kernel.holding import HELD, LOST, RELEASED, RELEASING, AnyHeld, Holding
from multilock.kernel.interrupts import Once
from multilock.kernel.process import OfThisProcess
from multilock.kernel.scopes import Entered, Scope
from multilock.kernel.want import Want
from multilock.lease import Lease
from multilock.lock import Lock, Waits
from multilock.model import LeaseState, Loss
from multilock.names import check_name, escape

if TYPE_CHECKING:
    from multilock.client import Client
    from multilock.kernel.core import Kernel

__all__ = ["HeldSet", "LeaseSet", "LockSet", "acquire_all", "in_order", "newest_of"]


def in_order(names: Iterable[str]) -> list[str]:
    """Each once, by the bytes of its key. Raises ValueError, TypeError."""
    if isinstance(names, str):
        raise TypeError(f"lock_all takes several names, not the text {names!r:.60}: write lock_all([…])")
    found = sorted({check_name(name) for name in names}, key=lambda name: escape(name).encode())
    if not found:
        raise ValueError("lock_all was given no names: at least one is needed")
    return found


async def acquire_all(
    kernel: Kernel, wants: Sequence[Want], timeout: float | None, scope: Scope[Any]
) -> list[Holding] | None:
    """All of them, in the order given, or None if one was still taken when ``timeout`` seconds were over. Raises as
    `acquire`; every way out leaves nothing behind."""
    deadline = math.inf if timeout is None else kernel.now() + timeout
    held: list[Holding] = []
    try:
        while True:
            stop = Stop()  # called by the end of a part, so that nobody waits for a later one any more
            try:
                for want in wants:
                    if not await _acquire_part(kernel, want, deadline, stop, scope, held):
                        break
            except Stopped:
                pass
            if len(held) == len(wants) and all(part.is_held() for part in held):
                for part in held:
                    part._not_at_end(stop.call)
                return held
            lost = stop.called()
            while held:
                await _give_back(kernel, held.pop(), stop)
            if not lost or kernel.now() >= deadline:
                return None
    except BaseException:  # nothing is awaited while it unwinds
        while held:
            give_back_soon(kernel, held.pop())
        raise


async def _acquire_part(
    kernel: Kernel, want: Want, deadline: float, stop: Stop, scope: Scope[Any], held: list[Holding]
) -> bool:
    """False: it was still taken at the deadline, or is lost already."""
    handing: Handing[Any] = Handing(kernel)
    try:
        part: Holding | None = handing.reenter(scope, want)
        if part is None:
            left = None if deadline == math.inf else max(0.0, deadline - kernel.now())
            part = await handing.acquire(acquire(kernel, want, left, stop, scope), scope)
            if part is None:
                return False
        held.append(part)
    except BaseException:
        if handing.lease not in held:
            handing.take_back()
        raise
    if part._at_end(stop.call):
        return True
    stop.call()
    return False


async def _give_back(kernel: Kernel, part: Holding, stop: Stop) -> None:
    """What was held only to wait for others."""
    part._not_at_end(stop.call)
    if part._count == 1:
        part._rest_until = None  # nothing was done for which the name would rest
    try:
        await kernel.giving_back.release(part)
    except BaseException:
        give_back_soon(kernel, part)
        raise


def give_back_soon(kernel: Kernel, part: Holding) -> None:
    """In the background; one that was acquired more than once is counted down."""
    if part._count > 1:
        run(kernel.giving_back.release(part))  # asks nobody
    else:
        kernel.giving_back.later(part)


class _Told:
    """A callback, and what to do when it has ended."""

    __slots__ = ("_callback", "_ended")

    def __init__(self, callback: Callable[[Loss[Any]], object], ended: Callable[[], None]) -> None:
        self._callback = callback
        self._ended = ended

    def __call__(self, loss: Loss[Any]) -> object:
        result: object = None
        try:
            result = self._callback(loss)
        finally:
            if not isawaitable(result):
                self._ended()
        return self._await(result) if isawaitable(result) else result

    async def _await(self, result: Any) -> object:
        try:
            return await result
        finally:
            self._ended()

    def __repr__(self) -> str:
        return repr(self._callback)


class HeldSet(OfThisProcess, NamesOurs, AnyHeld):
    """What the leases of `lock_all` of both faces share. It is no holding of its own: its parts are."""

    _count = 1  # how often `Lock` would find it acquired; of a reentrant lock it is the parts that count

    def __init__(
        self,
        kernel: Kernel,
        parts: Sequence[Holding],
        on_lost: Callable[[Loss[Any]], object] | None,
        scope: Scope[Any],
    ) -> None:
        self._kernel = kernel
        self._parts = tuple(parts)
        self._scope = scope
        self._loss: Loss[Any] | None = None
        self._lost_part: Holding | None = None
        self._told = False  # all of the loss
        self._ending = self._ended = False  # of a release
        self._callbacks = [on_lost] if on_lost else None
        self._running = 0  # callbacks that were started and have not ended
        self._hooks: list[Callable[[], None]] | None = None
        self._at_ends = [(part, partial(self._part_ended, part)) for part in self._parts]
        for part, hook in self._at_ends:
            if not part._at_end(hook):
                self._part_ended(part)

    @property
    def name(self) -> str:
        return ", ".join(part.name for part in self._parts)

    @property
    def ttl(self) -> float:
        return min(part.ttl for part in self._parts)

    @property
    def owner(self) -> str:
        return self._parts[0].owner

    @property
    def token(self) -> int | None:
        """None: each part has its own."""
        return None

    @property
    def leases(self) -> tuple[Any, ...]:
        return self._parts

    def is_held(self) -> bool:
        return self._alive()

    def _alive(self) -> bool:
        return all(part.is_held() for part in self._parts) and not self._ending and self._loss is None

    def _is_lost(self) -> bool:
        """What the parent of a forked child has lost is nothing of the child's: its parts know."""
        return not self._alive() and self._loss is not None and any(part._loss for part in self._parts)

    def remaining(self) -> float:
        return min(part.remaining() for part in self._parts) if self.is_held() else 0.0

    @property
    def state(self) -> LeaseState:
        if not self.is_held():
            return LeaseState.LOST if self._is_lost() else LeaseState.RELEASED
        states = {part.state for part in self._parts}
        return LeaseState.HELD if states == {LeaseState.HELD} else LeaseState.AT_RISK

    @property
    def _state(self) -> int:
        """As `Holding` has it."""
        if self._is_lost():
            return LOST
        return RELEASED if self._ended else HELD if self._alive() else RELEASING

    def check(self) -> None:
        if self.is_held():
            return
        if self._is_lost():
            raise self._lock_lost()
        raise NotHeld(
            f"the lease of {self.name!r} was released: acquire the locks again",
            name=self.name,
            backend=self._kernel.scheme,
        )

    def fence(self) -> int:
        self.check()
        raise CapabilityMissing(
            f"{self.name!r} are several locks, each with a token of its own: use leases[i].fence()",
            name=self.name,
            backend=self._kernel.scheme,
        )

    async def _renew(self) -> None:
        """Each, also after one that was not answered: that one raises when all have been asked."""
        self.check()
        errors: list[MultilockError] = []
        for part in self._parts:
            try:
                await self._kernel.renew(part)
            except MultilockError as error:
                errors.append(error)
        self.check()
        if errors:
            raise errors[0]

    # The end

    def _over(self) -> bool:
        return self._ended or self._loss is not None

    def _part_ended(self, part: Holding) -> None:
        """By whoever ends it; after an interrupt again, by the same. A part that was released is no loss."""
        kernel = self._kernel
        with kernel.lock:
            if self._loss is None:
                if self._ended or part._loss is None:
                    return
                self._callbacks = [Once(_Told(callback, self._callback_ended)) for callback in self._callbacks or ()]
                self._running = len(self._callbacks)
                self._lost_part = part
                self._loss = replace(part._loss, lease=self, message=f"part {part.name!r}: {part._loss.message}")
            elif self._told or self._lost_part is not part:
                return
        for callback in self._callbacks or ():  # before anything that could block
            kernel.callbacks.start(callback, self._loss)
        self._call_hooks()
        # The others are kept until the callbacks have ended: nobody may be let in by what its owner forgot.
        if self._callbacks:
            kernel.timers.at(kernel.now() + self.ttl, self._give_back_rest)
        else:
            self._give_back_rest()
        self._told = True

    def _call_hooks(self) -> None:
        for hook in self._hooks or ():
            hook()

    def _callback_ended(self) -> None:
        with self._kernel.lock:
            self._running -= 1
            last = self._running == 0
        if last:
            self._give_back_rest()

    def _give_back_rest(self) -> None:
        """In the background; twice is harmless."""
        with self._kernel.lock:
            parts, self._at_ends = self._at_ends, []
        for part, hook in reversed(parts):
            part._not_at_end(hook)
            if part._state == HELD:
                give_back_soon(self._kernel, part)

    async def _release(self) -> bool:
        """See ``Lease.release``. After a loss, what is left is given back when the callbacks have ended."""
        kernel = self._kernel
        until = kernel.now() + self._parts[0]._want.request_timeout
        left = [(part, part._count) for part in self._parts]
        ours = True
        try:
            self._lift_fences()
            if not self._begin_release():
                return False
            while left:
                part, _ = left[-1]
                if kernel.now() < until:
                    ours = await kernel.giving_back.release(part) and ours
                else:  # nobody answers
                    ours = part.is_held() and ours
                    give_back_soon(kernel, part)
                left.pop()
            self._finish()
        except BaseException:  # nothing is awaited while it unwinds
            if self._ending:
                for part, count in reversed(left):
                    if part._count == count:
                        give_back_soon(kernel, part)
                self._finish()
            raise
        return ours

    def _begin_release(self) -> bool:
        with self._kernel.lock:
            if self._ending or self._loss is not None:
                return False
            self._ending = True
            return True

    def _finish(self) -> None:
        """A release has ended, or is left to the background. Twice is harmless."""
        with self._kernel.lock:
            self._ending = self._ended = True
        for part, hook in self._at_ends:
            part._not_at_end(hook)
        if self._loss is None:
            self._call_hooks()

    def _lift_fences(self) -> None:
        """Who releases has ended his work under all of them, lost or not; but for what another lock holds besides."""
        for part in self._parts:
            if part._count == 1:
                part._lift_fence()

    def _take_back(self) -> None:
        """Its acquire was interrupted before it could be handed out: nobody else would release it."""
        self._lift_fences()
        with self._kernel.lock:
            self._ending = self._ended = True
        self._give_back_rest()

    def _release_after_interrupt(self, count: int) -> None:
        """An interrupt came before the release had begun."""
        if not self._ending:
            self._take_back()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} {self.state.value} remaining={self.remaining():.3f}>"


class LeaseSet(HeldSet, Waits):
    """The `Lease` of several locks: held as long as all of them are, and lost when one is."""

    @property
    def leases(self) -> tuple[Lease, ...]:
        return cast("tuple[Lease, ...]", self._parts)

    def release(self) -> bool:
        return run(self._release())

    def renew(self) -> None:
        run(self._renew())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.release()
        except BaseException:
            self._release_after_interrupt(1)
            raise
        if self._is_lost():
            self._raise_lost(error)


def newest_of(sets: Sequence[Any], scope: object) -> Any:
    """What a release through the object of ``lock_all`` is about: the newest that was taken here."""
    return next((lease for lease in reversed(sets) if lease._scope is scope and not lease._ended), None)


class LockSet(Lock):
    """What `Client.lock_all` returns: a `DistributedLock` that has no name of its own at the backend."""

    def __init__(self, client: Client, names: Iterable[str], on_lost: Any, **options: Any) -> None:
        client._kernel.check_callback("on_lost", on_lost)
        self._client = client
        self._kernel = client._kernel
        self._on_lost = on_lost
        self._locks = [Lock(client, name, **options) for name in in_order(names)]
        self._want = self._locks[0]._want
        self._entered: Entered[Any] = Entered()
        self._sets: list[LeaseSet] = []  # not given back

    @property
    def name(self) -> str:
        return ", ".join(lock.name for lock in self._locks)

    def is_held(self) -> bool:
        return any(lease.is_held() for lease in list(self._sets))

    def is_locked(self) -> bool:
        return any(lock.is_locked() for lock in self._locks)

    def _acquire_or_raise(self, timeout: float | None) -> Any:
        if lease := self._acquire(timeout):
            return lease
        scope = self._client._scope()
        raise self._kernel.still_taken(self.name, timeout, any(scope.keeps_out(lock._want) for lock in self._locks))

    def _acquire(self, timeout: float | None) -> Any:
        scope = self._client._scope()
        parts = run(acquire_all(self._kernel, [lock._want for lock in self._locks], timeout, scope))
        if parts is None:
            return None
        lease: LeaseSet | None = None
        try:
            lease = LeaseSet(self._kernel, parts, self._on_lost, scope)
            self._sets = [*(other for other in self._sets if not other._ended), lease]
        except BaseException:  # interrupted: nobody has it to release it
            for part in reversed(parts):
                give_back_soon(self._kernel, part)
            raise
        return lease

    def release(self) -> bool:
        lease = newest_of(self._sets, self._client._scope())
        if lease is None:
            raise self._kernel.not_held(self.name)
        self._sets = [other for other in self._sets if other is not lease]
        return bool(lease.release())
