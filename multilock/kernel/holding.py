"""The states of a lease, its acquire count, and the functions called at its end.

`Holding` is the lease of one lock. `multilock.lock_all` has the lease of several locks, each part of which is a
`Holding`. `AnyHeld` is the base of both.

A body is the block of a ``with`` statement. A piece of work lasts from an acquire to its release. A proof is a reply or
a notification of the backend from which the validity of a lease counts. A name rests while hold_at_least keeps it taken
after the release. A hard fence is a timer of the operating system that kills this process when the validity of a lease
ends.

Only the named transitions in this file assign the state (see docs/decisions/0015-the-house.md):

    NEW ── adopt ──▶ HELD ── begin_release ──▶ RELEASING ── end_release ──▶ RELEASED
                       └── lose ──▶ LOST ◀── lose_released ──┘

`abandon` leads from NEW, HELD and RELEASING to RELEASED, and `reset_in_child` leads to RELEASED from every state. The
caller of a transition holds the kernel's lock. A transition that does not start from the present state changes nothing
and returns False.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

from multilock.api_mistakes import NamesOurs
from multilock.errors import CapabilityMissing, LockLost, MultilockError, NotHeld
from multilock.kernel import validity
from multilock.kernel.fork import OURS, notice_fork, this_process
from multilock.kernel.interrupts import Once, surely
from multilock.kernel.no_pickling import OfThisProcess
from multilock.lease import AnyLease
from multilock.model import Claim, Granted, LeaseState, Loss

if TYPE_CHECKING:
    from contextvars import Context

    from multilock.kernel.client import Kernel
    from multilock.kernel.lease_to_caller import Handing
    from multilock.kernel.lock_options import Want
    from multilock.kernel.scopes import Scope

__all__ = ["HELD", "LOST", "NEW", "RELEASED", "RELEASING", "AnyHeld", "EndOfBody", "Holding"]

# The stored states. AT_RISK is computed, not stored. A lease is NEW until the kernel has adopted it, so that an
# interrupt before that leaves nothing held.
NEW, HELD, RELEASING, RELEASED, LOST = range(5)


class EndOfBody:
    """The progress of the end of one ``with`` body, so that an end that was interrupted can be finished.

    The lease itself only counts its open bodies. The count does not show which body has ended, because another body may
    end at the same time.
    """

    counted = False  # whether the body no longer counts as open
    done = False  # whether this end has released the acquire of the body, or found that the body has no acquire


class AnyHeld(OfThisProcess, NamesOurs, AnyLease):
    """A lease of one lock or of several, from its grant until it is released or lost. After its release or loss, a
    lease is never held again."""

    # Each public slot has a docstring, because help() of a lease shows it. Only multilock assigns them.
    __slots__ = {
        "__weakref__": None,
        "_callbacks": None,
        "_guests": None,
        "_hooks": None,
        "_kernel": None,
        "_open": None,
        "_scope": None,
        "count": "Acquires of this lease without their release.",
        "loss": "The loss, if the lease was lost, otherwise None.",
        "stage": "The stored state. `state` is computed from it and the clock.",
        "want": "The settings of the lock object.",
    }

    def __init__(self, kernel: Kernel, want: Want) -> None:
        self._kernel = kernel
        self.want = want
        self.stage = NEW
        self.loss: Loss[Any] | None = None
        self.count = 1  # acquires without their release; more than 1 only for a reentrant lock
        self._open = 0  # open bodies of `with` under this lease, plus leases of several locks that contain this lease
        self._guests = 0  # open bodies that had no acquire of their own when the last acquire was counted
        self._scope: Scope[Any] | None = None  # the leases of the thread or task that acquired this lease
        self._callbacks: list[Callable[[Loss[Any]], object]] | None = [want.on_lost] if want.on_lost else None
        self._hooks: list[Callable[[], None]] | None = None  # called by the thread that ends the lease

    # Transitions. A transition calls no function between its assignments, so an interrupt finds all of them or none.

    def _adopt(self) -> bool:
        """NEW → HELD: the kernel renews and watches the lease from now on."""
        if self.stage != NEW:
            return False
        self.stage = HELD
        return True

    def _count_down(self, end: EndOfBody | None = None) -> bool:
        """HELD → HELD: release one acquire of a reentrant lease that was acquired more than once."""
        return self.stage == HELD and self._one_acquire_less(end)

    def _one_acquire_less(self, end: EndOfBody | None) -> bool:
        """Lower the acquire count, and note that in ``end``. Returns False if only one acquire is left."""
        if self.count <= 1:
            return False
        self.count -= 1
        if end is not None:
            end.done = True
        return True

    def _body_ends(self, end: EndOfBody) -> bool:
        """Every state → itself: a body of ``with`` ends. Returns whether this end must still release the lease. A
        second call for the same end lowers no count.

        The end releases nothing if the body has no acquire of its own. Such a body entered a lease that another body
        had already entered, or its acquire was released by hand. If another open body has no acquire, it takes over the
        acquire of the body that ends.
        """
        if not end.counted:
            self._open -= 1
            end.done = self._guests > 0 or self.count <= self._open
            self._guests -= self._guests > 0
            end.counted = True
        elif self._to_be_released():  # a body that has begun since the interrupt has taken over the acquire
            end.done = end.done or self.count <= self._open
        return not end.done

    def _undo_acquire(self, end: EndOfBody | None, worked: bool) -> bool:
        """Undo one acquire without a request. Returns whether the lease must be released to undo it.

        ``end`` is the end of the body that the acquire began, or None. If ``worked`` is False, no work was done under
        the lease, so hold_at_least does not apply. The caller holds the kernel's lock until it has begun the release.
        Otherwise another ``with`` body could begin in between.
        """
        if (end is not None and not self._body_ends(end)) or self._one_acquire_less(end):
            return False
        if self.count <= self._open:  # another body has ended meanwhile, and released this acquire
            return False
        if not worked:
            self._no_rest()
        return True

    def _begin_release(self) -> bool:
        """HELD → RELEASING: begin the release. A notice that arrives during the request does not count as a loss."""
        if self.stage != HELD:
            return False
        self.stage = RELEASING
        self._let_go()
        return True

    def _end_release(self) -> bool:
        """RELEASING → RELEASED: the backend has answered, or the release continues in the background. No loss can
        follow."""
        if self.stage != RELEASING:
            return False
        self.stage = RELEASED
        self._callbacks = None
        return True

    def _lose(self, loss: Loss[Any]) -> bool:
        """HELD → LOST: the lease ended without a release."""
        return self._lost_from(HELD, loss)

    def _lose_released(self, loss: Loss[Any]) -> bool:
        """RELEASING → LOST: the release found the lock gone. Only the code that releases calls this."""
        return self._lost_from(RELEASING, loss)

    def _lost_from(self, state: int, loss: Loss[Any]) -> bool:
        if self.stage != state:
            return False
        once = [Once(callback, self._give_back_early) for callback in self._callbacks or ()]
        for lease in self.leases:
            lease._told = (*lease._told, *once)
        self._callbacks = [*once]
        self.loss = loss
        self.stage = LOST
        return True

    def _abandon(self) -> bool:
        """NEW, HELD, RELEASING → RELEASED: drop a lease that nobody can use. The caller releases its claim.

        Used at the exit of the interpreter, for a lease of several locks of which one was released by hand, and if an
        acquire is interrupted before it could return the lease.
        """
        if self.stage not in (NEW, HELD, RELEASING):
            return False
        self.stage = RELEASED
        return True

    def _reset_in_child(self) -> None:
        """Every state → RELEASED: in a forked child, the leases of the parent mean nothing."""
        self.stage = RELEASED
        self.loss = self._callbacks = self._hooks = None

    @property
    def leases(self) -> tuple[Any, ...]:
        """The leases of the single locks."""
        raise NotImplementedError

    # Validity

    def _proved(self, now: float) -> bool:
        """Return whether the lease is held and its deadline is after ``now``."""
        raise NotImplementedError

    def _alive(self) -> bool:
        """Return whether the lease is held, by the clock. If its deadline has passed, this call records the loss."""
        raise NotImplementedError

    def _at_risk(self) -> bool:
        raise NotImplementedError

    def is_held(self) -> bool:
        return self._alive()

    @property
    def state(self) -> LeaseState:
        if not self.is_held():
            return LeaseState.LOST if self.stage == LOST else LeaseState.RELEASED
        return LeaseState.AT_RISK if self._at_risk() else LeaseState.HELD

    def check(self) -> None:
        if not self.is_held():
            self._raise_over()

    def _raise_over(self) -> None:
        if self.stage == LOST:
            raise self._lock_lost()
        raise NotHeld(
            f"the lease of {self.name!r} was released: acquire the lock again",
            name=self.name,
            backend=self._kernel.scheme,
        )

    def _over(self) -> bool:
        """Return whether the lease is lost or released, so that nothing more happens to it."""
        return self.stage in (LOST, RELEASED)

    def _is_lost(self) -> bool:
        return not self._alive() and self.stage == LOST

    # Work under the lease. Each acquire begins a piece of work and each release ends one, even if the lease was lost
    # meanwhile.

    def _may_reenter(self, want: Want) -> bool:
        """Return whether ``want`` may acquire this lease once more: same names and kind, and both reentrant."""
        mine = self.want
        same = (mine.names, mine.kind, mine.permits) == (want.names, want.kind, want.permits)
        return mine.reentrant and want.reentrant and same

    def _reenter(self, want: Want, handing: Handing[Any]) -> bool:
        """Count one more acquire of this reentrant lease, and add ``want.on_lost``. Returns False if the lease is not
        held.

        The acquire is recorded in ``handing`` as soon as it is counted, so that an interrupt cannot leave it without an
        owner.
        """
        if not self.is_held():
            return False
        with self._kernel.lock:
            if self.stage != HELD:
                return False
            callbacks = self._callbacks or []
            if want.on_lost and want.on_lost not in callbacks:
                self._callbacks = [*callbacks, want.on_lost]
            if self._guests < self._open - self.count:  # the new acquire does not belong to a body that is open already
                self._guests = self._open - self.count
            self.count += 1
            handing.lease = self
            self._begin_work(want)
            return True

    def _begin_work(self, want: Want) -> None:
        """Apply the options of ``want`` that concern the work: hold_at_least and hard_fence.

        A release does not say which acquire it ends. So if one acquire asked for a fence, the fence stays until the
        last release. The caller holds the kernel's lock.
        """
        raise NotImplementedError

    def _end_of_work(self, end: EndOfBody | None) -> None:
        """Record that one piece of work under a lost or released lease has ended."""
        with self._kernel.lock:
            if self._one_acquire_less(end):
                return
        surely(self._all_work_ended)

    def _all_work_ended(self) -> None:
        """Clean up after the last piece of work under a lost or released lease. A second call changes nothing."""
        self._lift_fence()
        self._leave_scope()

    def _give_back_early(self) -> None:
        """Release a lost lease at the server now, not at ``valid_until``, if all its work has ended and its callbacks
        have begun.

        Called when the last piece of work has ended, and when a callback begins.
        """
        raise NotImplementedError

    def _check_at_entry(self, end: EndOfBody) -> None:
        """Raise LockLost or NotHeld at the beginning of ``with``, if the lease is over. The body counts as open
        already.

        Before it raises, this method ends the body, and its acquire if it has one, and records that in ``end``.
        """
        with self._kernel.lock:
            # Wait until no other body is just ending. Such a body either sees that this body is open and keeps the
            # lease, or has begun a release, which check() then sees.
            pass
        try:
            self.check()
        except MultilockError:
            if self._body_ends(end):
                self._end_of_work(end)
            raise

    def _lift_fence(self) -> None:
        """End the hard fence of this lease. A second call changes nothing.

        A lease of several locks has no fence of its own: the fence of each part ends with the last piece of work under
        that part.
        """

    def _let_go(self) -> None:
        """End the hard fence and the renewals when the release begins. A second call changes nothing.

        The caller holds the kernel's lock.
        """
        raise NotImplementedError

    def _going_back(self) -> list[Holding]:
        """Return the holdings that must be released at the backend, the last acquired first."""
        raise NotImplementedError

    def _tell_gone(self) -> None:
        """Lose a lease of several locks if the release of a part reported that the part was lost."""

    def _no_rest(self) -> None:
        """Cancel hold_at_least, so that the release frees the name at once."""
        raise NotImplementedError

    def _leave_scope(self) -> None:
        """Remove the lease from the leases of the thread or task that acquired it."""
        if self._scope is not None:
            self._scope.discard(self)

    def _to_be_released(self) -> bool:
        """Return whether the owner still has to release the lease. A lost lease must be released as well."""
        return self.stage in (HELD, LOST)

    # The end

    def on_lost(self, callback: Callable[[Loss[Self]], object]) -> None:
        if callback is None:
            raise TypeError("on_lost takes a function of one argument, not None")
        self._kernel.check_callback("on_lost", callback)
        self._alive()
        with self._kernel.lock:
            if self.loss is None:
                if not self._over():
                    self._callbacks = [*(self._callbacks or ()), callback]
                return
        self._kernel.callbacks.start(callback, self.loss)

    def _at_end(self, hook: Callable[[], None]) -> bool:
        """Have ``hook`` called when the lease ends, by the thread that ends it. Returns False if the lease is already
        over."""
        self._alive()
        with self._kernel.lock:
            if self._over():
                return False
            self._hooks = [*(self._hooks or ()), hook]
            return True

    def _not_at_end(self, hook: Callable[[], None]) -> None:
        """Undo `_at_end`."""
        with self._kernel.lock:
            if self._hooks and hook in self._hooks:
                self._hooks = [other for other in self._hooks if other != hook]

    def _lock_lost(self) -> LockLost:
        loss = self._loss_for_the_body()
        assert loss is not None
        return LockLost(
            f"lock {self.name!r} was lost ({loss.reason.value}): {loss.message}; "
            "what was done since may not be exclusive",
            loss=loss,
            name=self.name,
            backend=self._kernel.scheme,
        )

    def _loss_for_the_body(self) -> Loss[Any] | None:
        """Return the reason why the body of a ``with`` must end, or None if the body may continue."""
        return self.loss if self._is_lost() else None

    def _raise_lost(self, error: BaseException | None) -> None:
        """Raise LockLost at the end of ``with``. If the body raised ``error``, add a note to ``error`` instead."""
        lost = self._lock_lost()
        if error is None:
            raise lost
        if getattr(error, "loss", None) is not self.loss:
            error.add_note(str(lost))

    def _call_hooks(self) -> None:
        """Call the hooks of `_at_end`. A second call changes nothing."""
        if self._hooks:
            for hook in list(self._hooks):
                hook()
            self._hooks = None

    def __copy__(self) -> Self:
        """Return the lease itself, because a lease cannot exist twice. So a `Loss` that refers to a lease can be
        copied."""
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self


class Schedule:
    """The watchdog's notes about one lease. Times are seconds on the client's clock."""

    __slots__ = ("armed", "at", "due", "failures", "renewing")

    def __init__(self, armed: bool) -> None:
        self.armed = armed  # whether the backend was asked to report the loss, or cannot report losses
        self.at: float | None = None  # when to renew; chosen once for each proof, at the first check of the lease
        self.due: float | None = None  # when the watchdog checks the lease next
        self.failures = 0  # failed and late renewals since the last proof
        self.renewing = False  # whether a renewal is on its way


class Holding(AnyHeld):
    """The lease of one lock. `multilock.lease` documents its public members. The members in this class send no
    request."""

    __slots__ = {
        "_fenced": None,
        "_told": None,
        "_work_over": None,
        "claim": "The claim with which the backend granted the lock.",
        "context": "The context of the acquire, for events. None if nobody had subscribed to them.",
        "expires_at": "The time at which the lease is lost unless a newer proof arrives.",
        "granted": "The newest proof of the backend.",
        "granted_at": "The time of the grant.",
        "hold_until": "The time at which the lease is lost whatever arrives: see max_hold.",
        "lost_at": "The earlier of expires_at and hold_until.",
        "rest_until": "The time until which the name stays taken, or None: see hold_at_least.",
        "schedule": "The notes of the watchdog.",
        "unsure": "Whether a request with the id of the claim was never answered.",
        "valid_until": "The time until which no other holder can be let in.",
    }

    def __init__(self, kernel: Kernel, want: Want, claim: Claim, granted: Granted, unsure: bool) -> None:
        AnyHeld.__init__(self, kernel, want)  # super() would double the cost of this call
        self.claim = claim
        self.context: Context | None = None
        self._fenced = False  # whether a hard fence applies until the last piece of work has ended
        self.unsure = unsure  # a request with this id has no answer, so the release must also stop its late execution
        self.schedule = Schedule(armed=not kernel.push_loss)
        self.granted_at = kernel.now()
        self.hold_until = self.granted_at + want.max_hold
        # The lost callbacks of this lease, and of a lease of several locks that contains it.
        self._told: tuple[Once, ...] = ()
        self._work_over = False  # whether the last piece of work under this lease has ended, after its loss
        self.rest_until: float | None = None
        self._accept(granted)

    def _accept(self, granted: Granted) -> None:
        """Store a new proof. The caller has made sure that the proof arrived before the lease was lost."""
        ttl = granted.ttl
        self.granted = granted
        self.valid_until = until = validity.valid_until(granted.sent_at, granted.valid_for, ttl)
        self.expires_at = validity.lost_at(until, ttl)
        self.lost_at = min(self.expires_at, self.hold_until)
        if self._fenced and (fence := self._kernel.fence):  # `fence` is None if the client has ended
            fence.keep(self.claim.id, until)
        self.schedule.failures = 0
        self.schedule.at = None

    # Name, ttl, owner and token

    @property
    def name(self) -> str:
        return self.claim.name

    @property
    def ttl(self) -> float:
        return self.claim.ttl if self.granted.short else self.granted.ttl

    @property
    def owner(self) -> str:
        return self.claim.owner

    @property
    def token(self) -> int | None:
        return self.granted.token

    @property
    def leases(self) -> tuple[Self, ...]:
        return (self,)

    # Validity

    def _proved(self, now: float) -> bool:
        return self.stage == HELD and now < self.lost_at

    def _alive(self) -> bool:
        if this_process[0] != OURS:  # the check of `notice_fork`, inlined because this runs at each is_held()
            notice_fork()
        if self.stage == HELD:
            if self._kernel.now() < self.lost_at:
                return True
            self._kernel.losses.expire(self)
        return False

    def remaining(self) -> float:
        return max(0.0, self.lost_at - self._kernel.now()) if self.is_held() else 0.0

    def _at_risk(self) -> bool:
        if not self.claim.renew:
            return False
        granted = self.granted
        return self.schedule.failures > 0 or self._kernel.now() >= validity.late_at(
            granted.sent_at, granted.renew_every
        )

    def fence(self) -> int:
        self.check()
        if self.claim.permits > 1:
            raise CapabilityMissing(
                f"no token can fence {self.name!r}: it cannot show which of {self.claim.permits} permits is over. "
                "lease.token only distinguishes grants. If a resource must refuse outdated holders, use a lock",
                name=self.name,
                backend=self._kernel.scheme,
            )
        if (token := self.granted.token) is None:
            raise CapabilityMissing(
                f"{self._kernel.scheme} gives no fencing tokens with these options: choose another backend",
                name=self.name,
                backend=self._kernel.scheme,
            )
        return token

    # Work under the lease

    def _begin_work(self, want: Want) -> None:
        if want.hold_at_least:
            self.rest_until = max(self.rest_until or 0.0, self._kernel.now() + want.hold_at_least)
        if want.hard_fence and not self._fenced:
            self._fenced = True
            self._kernel.hard_fence().keep(self.claim.id, self.valid_until)

    def _end_hold_at(self, end: float) -> float:
        """End the lease at the time ``end`` at the latest. Returns the time at which the watchdog must check the lease.
        The caller holds the kernel's lock."""
        self.hold_until = end
        self.lost_at = min(self.expires_at, end)
        return self._kernel.watchdog.plan(self)

    def _all_work_ended(self) -> None:
        super()._all_work_ended()
        self._work_over = True
        self._give_back_early()

    def _give_back_early(self) -> None:
        if self._work_over and all(callback.begun() for callback in self._told):
            self._kernel.cancels.hurry(self.claim)

    def _lift_fence(self) -> None:
        if self._fenced:
            with self._kernel.lock:
                if fence := self._kernel.fence:
                    fence.lift(self.claim.id)
                self._fenced = False

    def _let_go(self) -> None:
        self._lift_fence()
        self._kernel.watchdog.drop(self)

    def _going_back(self) -> list[Holding]:
        return [self]

    def _no_rest(self) -> None:
        self.rest_until = None

    def __repr__(self) -> str:
        state = f"{self.state.value} token={self.token} remaining={self.remaining():.3f}"
        return f"<{type(self).__name__.removeprefix('Held')} {self.name!r} {state}>"
