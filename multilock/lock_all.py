"""Locks of several names: `Client.lock_all`, and the code that the blocking and the asyncio API share.

A lock of several names acquires an ordinary lock for each name, one after the other. These locks are its *parts*. The
order is the same for every caller, so two callers with the same names never deadlock. A caller that holds a later name
never waits for an earlier one. If a part is lost before all parts are held, all parts are released, and the caller
begins again with the first.

No work is done under the parts before all of them are held. So a part has no lost callback, no hard fence, no
``hold_at_least`` and no ``max_hold`` of its own: the lease of the whole set has them. The lease of the set is held only
while all parts are held. If one part is lost, the other parts are kept until the work has ended.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from multilock.errors import CapabilityMissing
from multilock.kernel.acquire import Stop, Stopped, acquire
from multilock.kernel.fork import notice_fork
from multilock.kernel.holding import HELD, RELEASED, RELEASING, AnyHeld, EndOfBody, Holding
from multilock.kernel.lease_to_caller import Handing
from multilock.kernel.lock_options import Make, Want, want
from multilock.kernel.scopes import Scope
from multilock.lease import Lease
from multilock.lock import HeldLease, Lock, LockOfAFace, Waits
from multilock.model import LossReason
from multilock.names import check_name, escape

if TYPE_CHECKING:
    from multilock.client import Client
    from multilock.kernel.client import Kernel

__all__ = ["HeldSet", "LeaseSet", "LockSet", "SetOfAFace", "in_order"]

S = TypeVar("S", bound="HeldSet")


def in_order(names: Iterable[str]) -> list[str]:
    """Return the names without duplicates, in the order of the bytes of their keys. Raises ValueError, TypeError."""
    if isinstance(names, str):
        raise TypeError(f"lock_all takes several names, not the text {names!r:.60}: write lock_all([…])")
    found = sorted({check_name(name) for name in names}, key=lambda name: escape(name).encode())
    if not found:
        raise ValueError("lock_all was given no names: at least one is needed")
    return found


def want_all(kernel: Kernel, names: Iterable[str], make: Make, **options: Any) -> Want:
    """Return the options (`Want`) of a lock of all these names. Its ``parts`` have the options for each name. Raises
    the errors of `want`."""
    wants = [want(kernel, name, make, **options) for name in in_order(names)]
    parts = tuple(replace(part, on_lost=None, hard_fence=False, hold_at_least=0.0, max_hold=math.inf) for part in wants)
    return replace(wants[0], name=", ".join(part.name for part in parts), kind="set", parts=parts)


async def acquire_all(kernel: Kernel, want: Want, timeout: float | None, scope: Scope[Any]) -> list[Holding] | None:
    """Acquire all parts in their order. Returns None if a part was still taken after ``timeout`` seconds.

    Raises what `acquire` raises, and leaves nothing behind in any case. If the acquire fails, the parts that were
    already held are released within the remaining time. A release that takes longer continues in the background.
    """
    deadline = math.inf if timeout is None else kernel.now() + timeout
    held: list[tuple[Holding, EndOfBody]] = []  # this call counts as one `with` body of each part
    try:
        while True:
            stop = Stop()  # called when a part ends, so that we stop waiting for later parts
            try:
                for each in want.parts:
                    if not await _acquire_part(kernel, each, deadline, stop, scope, held):
                        break
            except Stopped:
                pass
            for holding, _ in held:
                holding._not_at_end(stop.call)
            complete = len(held) == len(want.parts)
            if complete and all(holding.is_held() for holding, _ in held):
                return [holding for holding, _ in held]
            until = kernel.now() + want.request_timeout
            until = until if timeout == 0 else min(until, deadline)
            while held:
                part, end = held[-1]
                await kernel.releases.release(part, until, body=end)
                held.pop()
            if not (complete or stop.called()) or kernel.now() >= deadline:
                return None
    except BaseException:  # nothing may be awaited while the coroutine unwinds
        for part, end in reversed(held):
            kernel.releases.take_back(part, end)
        raise


async def _acquire_part(
    kernel: Kernel,
    want: Want,
    deadline: float,
    stop: Stop,
    scope: Scope[Any],
    held: list[tuple[Holding, EndOfBody]],
) -> bool:
    """Acquire one part and append it to ``held``. Returns False if the part was still taken at the deadline, or is
    already lost."""
    handing: Handing[Any] = Handing(kernel)
    noted = len(held)
    try:
        part: Holding | None = handing.reenter(scope, want)
        if part is None:
            left = None if deadline == math.inf else max(0.0, deadline - kernel.now())
            part = await handing.acquire(acquire(kernel, want, left, stop, scope))
            if part is None:
                return False
        end = EndOfBody()
        part._open += 1  # no interrupt comes between this line and the next
        held.append((part, end))
    except BaseException:
        if len(held) == noted:
            handing.take_back()
        raise
    if part._at_end(stop.call):
        return True
    stop.call()
    return False


class HeldSet(AnyHeld):
    """A lease of several locks, blocking or asyncio. Each of its parts is a `Holding` with a claim of its own."""

    def __init__(self, kernel: Kernel, want: Want, parts: Sequence[Holding]) -> None:
        super().__init__(kernel, want)
        self._parts = tuple(parts)
        # None until the work has ended. From then on, the list of the parts that must still be released. This lease
        # counts as one open body in each part, so each part is stored with the end of this body.
        self._not_let_go: list[tuple[Holding, EndOfBody]] | None = None
        self._kept: list[HeldSet] = []  # contains this lease after a loss, until the other parts are released
        due = math.inf
        with kernel.lock:
            kernel.apart.add(self)
            self._adopt()
            self._begin_work(want)
            if want.max_hold < math.inf:
                until = kernel.now() + want.max_hold
                # A part that was held before, by a reentrant lease, keeps the max_hold of its first acquire.
                due = min((part._end_hold_at(until) for part in self._parts if part.count == 1), default=math.inf)
        if due < math.inf:
            kernel.poke(due)
        for part in self._parts:
            if not part._at_end(self._look):
                self._look()

    # Name, ttl, owner and token

    @property
    def name(self) -> str:
        return self.want.name

    @property
    def ttl(self) -> float:
        return min(part.ttl for part in self._parts)

    @property
    def owner(self) -> str:
        return self._parts[0].owner

    @property
    def token(self) -> int | None:
        """None, because each part has a token of its own: use ``leases[i].token``."""
        return None

    @property
    def leases(self) -> tuple[Any, ...]:
        return self._parts

    def fence(self) -> int:
        self.check()
        raise CapabilityMissing(
            f"{self.name!r} is a lease of several locks, each with a token of its own: use leases[i].fence()",
            name=self.name,
            backend=self._kernel.scheme,
        )

    # Validity

    def _proved(self, now: float) -> bool:
        return self.stage == HELD and all(part._proved(now) for part in self._parts)

    def _alive(self) -> bool:
        notice_fork()
        if self.stage == HELD:
            if all(part.is_held() for part in self._parts):
                return True
            self._look()
        return False

    def remaining(self) -> float:
        return min(part.remaining() for part in self._parts) if self.is_held() else 0.0

    def _at_risk(self) -> bool:
        return any(part._at_risk() for part in self._parts)

    def _look(self) -> None:
        """End this lease if a part has ended. Called by the thread that ended a part, or that noticed that a part has
        ended.

        A part that was released by hand does not count as lost.
        """
        if self.stage != HELD:
            return
        for part in self._parts:
            if part.loss:
                self._lose_with(part)
                return
        if any(part.stage == RELEASED for part in self._parts):
            with self._kernel.lock:
                self._abandon()
                self._callbacks = None
            self._call_hooks()

    def _lose_with(self, part: Holding, *, released: bool = False) -> None:
        """Lose this lease because ``part`` was lost. A second call changes nothing.

        The other parts are kept until the work has ended, but at most for the longest ttl of the parts.
        """
        kernel = self._kernel
        if part.loss is None:  # the process was forked meanwhile
            return
        if not released:
            self._kept.append(self)
            # The other parts must not be released before the hard fence of any part would kill the process, because the
            # work under the set may still be running until then.
            longest = max(part.ttl for part in self._parts)
            kernel.timers.at(kernel.now() + longest, partial(_give_rest_back, self._kept))
        loss = replace(part.loss, lease=self, message=f"part {part.name!r}: {part.loss.message}")
        if loss.reason is LossReason.HELD_TOO_LONG:  # all parts end now, not only this one
            loss = replace(loss, valid_until=min(each.valid_until for each in self._parts))
        kernel.losses.lose_with_a_part(self, loss, released)
        if loss.reason is not LossReason.CLOSED:  # a client that is closed releases its locks with their hold_at_least
            self._no_rest()

    def _tell_gone(self) -> None:
        for part in self._parts:
            if part.loss:
                self._lose_with(part, released=True)
                return

    # Work under the lease

    def _begin_work(self, want: Want) -> None:
        for part in self._parts:
            if part.stage == HELD:
                part._begin_work(want)

    def _let_go(self) -> None:
        if self._not_let_go is None:
            self._not_let_go = [(part, EndOfBody()) for part in reversed(self._parts)]
        while self._not_let_go:
            part, end = self._not_let_go[-1]
            # Other bodies may continue under a part that was released by hand, and other leases may hold that part too.
            if not part._body_ends(end) or part._count_down(end):
                part._not_at_end(self._look)
            elif not part._begin_release():
                part._end_of_work(end)
            self._not_let_go.pop()

    def _going_back(self) -> list[Holding]:
        return [part for part in reversed(self._parts) if part.stage == RELEASING]

    def _all_work_ended(self) -> None:
        self._give_back_parts()
        self._leave_scope()

    def _give_back_early(self) -> None:
        for part in self._parts:
            part._give_back_early()

    def _give_back_parts(self) -> None:
        """Release every part in the background, unless a release under way releases them. A second call changes
        nothing."""
        if self.stage == RELEASING:
            return
        with self._kernel.lock:
            self._let_go()
        for part in self._going_back():
            self._kernel.releases.soon(part)
        self._kept.clear()

    def _no_rest(self) -> None:
        for part in self._parts:
            if part.count == 1:
                part._no_rest()

    def _to_be_released(self) -> bool:
        return super()._to_be_released() or (self.stage == RELEASED and self._not_let_go is None)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} {self.state.value} remaining={self.remaining():.3f}>"


def _give_rest_back(kept: list[HeldSet]) -> None:
    """Release the parts of the lease in ``kept``, because its owner has not released it. If ``kept`` is empty, the
    parts have been released already.

    A timer calls this function after the loss of a part, when the longest ttl of the parts is over.
    """
    for lease in kept[:1]:
        lease._give_back_parts()


class LeaseSet(HeldSet, Waits):
    """The `Lease` of several locks. The lease is held as long as all these locks are held, and lost when one of these
    locks is lost."""

    @property
    def leases(self) -> tuple[Lease, ...]:
        return cast("tuple[Lease, ...]", self._parts)


class SetOfAFace(LockOfAFace[S]):
    """A lock of several names, blocking or asyncio. The backend only knows the single names."""

    def _make_set(self, kernel: Kernel, want: Want, parts: list[Holding]) -> S:
        raise NotImplementedError

    async def _wait_for(self, timeout: float | None, scope: Scope[S]) -> S | None:
        parts = await acquire_all(self._kernel, self._want, timeout, scope)
        if parts is None:
            return None
        try:
            self._newest = lease = self._make_set(self._kernel, self._want, parts)
        except BaseException:  # interrupted or closed before the caller has a lease that it could release
            for part in reversed(parts):
                self._kernel.releases.take_back(part, EndOfBody())
            raise
        return lease


class LockSet(SetOfAFace[LeaseSet], Lock):
    """The `DistributedLock` of several names, as `Client.lock_all` returns it."""

    def __init__(self, client: Client, names: Iterable[str], **options: Any) -> None:
        self._client = client
        self._begin(client._kernel, want_all(client._kernel, names, HeldLease, **options))

    def _make_set(self, kernel: Kernel, want: Want, parts: list[Holding]) -> LeaseSet:
        return LeaseSet(kernel, want, parts)
