"""Leader election, the same for both faces: stand, lead, step down, stand again; and who leads, as others see it.

An election is a contest for the lock of its name, and a leadership is a lease. What is added is order: callbacks in
pairs, an orderly end (the lease is given back when the work, ``on_elected`` and ``on_lost`` have all ended, or after
the grace), and standing again only then. The coroutines here await only the acquire and release of the kernel, and
bells.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from multilock.errors import BackendRejected, BackendUnavailable, ClientClosed, LockTimeout
from multilock.kernel import process
from multilock.kernel.acquire import Stop, Stopped, Waiter, acquire
from multilock.kernel.core import Ending
from multilock.kernel.holding import HELD, LOST, RELEASING, Holding
from multilock.kernel.process import OfThisProcess
from multilock.model import Claim, Granted, LeaderInfo, LockInfo, Loss, LossReason
from multilock.names import check_grace, check_timeout
from multilock.telling import logger

if TYPE_CHECKING:
    from multilock.kernel.core import Kernel, Want
    from multilock.kernel.scopes import Scope

__all__ = ["Observer", "Standing", "Term", "inside", "leader_info"]

T = TypeVar("T", bound=Holding)
INTERRUPTED = "its work was interrupted"
POLITE = 2.0  # seconds for which a node that resigned lets others go first, where the backend keeps no queue
FAILED_PAUSE = 1.0  # seconds before a node stands again that the backend refused, or whose on_elected raised


class Part:
    """What has to end before a leadership is given back: the work, ``on_elected``, ``on_lost``."""

    __slots__ = ("done", "election", "name")

    def __init__(self, name: str, election: object, *, done: bool = False) -> None:
        self.name = name
        self.election = election
        self.done = done


# What this thread or task, or the task that started it, runs for an election. Ending the leadership from there does not
# wait: it would wait for itself, or for what may wait for it.
_INSIDE: ContextVar[tuple[Part, ...]] = ContextVar("multilock_inside", default=())


@contextlib.contextmanager
def inside(part: Part) -> Iterator[None]:
    token = _INSIDE.set((*_INSIDE.get(), part))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # its loop was closed, and the garbage collector unwinds it elsewhere
            _INSIDE.reset(token)


class Term(Generic[T]):
    """One leadership, and how far its work and its callbacks are."""

    def __init__(self, election: object) -> None:
        self.leadership: T
        self.work = Part("its work", election, done=True)  # there is none before run() begins it
        self.elected = Part("on_elected", election)
        self.lost = Part("on_lost", election)
        self.begun_at: float | None = None  # when on_elected was called
        self.resigning = False
        self.end_at = math.inf  # resigned, it is given back then, whatever still runs
        self.loss: Loss | None = None  # what on_lost was, or is to be, called with
        self.lost_begun = False
        self.elected_task: Any = None  # asyncio: on_elected, to be cancelled at the end
        self.loop: Any = None  # asyncio: on which work and on_elected run …
        self.lost_loop: Any = None  # … and on which on_lost does, which may be another, if that one was closed
        self.failed = False  # on_elected raised
        self.nobody_waits = False  # for the end, in order to give the lease back: what ends last does
        self.outlasted = False  # it was said that something runs longer than the lease is kept

    def over(self) -> bool:
        return self.resigning or not self.leadership._alive()


class Standing(OfThisProcess, Generic[T]):
    """What `Election` and `AsyncElection` share."""

    def __init__(
        self,
        kernel: Kernel,
        scope: Callable[[], Scope[Any] | None],
        name: str,
        identity: str | None,
        ttl: float | None,
        on_elected: Callable[[T], object] | None,
        on_lost: Callable[[Loss], object] | None,
        on_leader_changed: Callable[[LeaderInfo | None], object] | None,
        grace: float | None,
        hold_at_least: float,
    ) -> None:
        self._grace = check_grace(grace)
        self._hold_at_least = kernel.check_hold_at_least(hold_at_least, name)
        for what, callback in (
            ("on_elected", on_elected),
            ("on_lost", on_lost),
            ("on_leader_changed", on_leader_changed),
        ):
            kernel.check_callback(what, callback)
        self._kernel = kernel
        self._scope = scope  # the leases of the thread or task that asks
        self._want = kernel.want(
            name,
            self._make,
            kind="leader",
            ttl=ttl,
            fair=kernel.backend.capabilities.fair,
            identity=identity,
            on_lost=self._lost,
            patient=True,
        )
        self._on_elected = on_elected
        self._on_lost = on_lost
        self._on_leader_changed = on_leader_changed
        self._term: Term[T] | None = None
        self._forked()
        kernel.elections.add(self)

    def _forked(self) -> None:
        """As at first: in a forked child nobody stands who stood in its parent, and nothing of that runs."""
        if self._term:
            self._term.work.done = self._term.elected.done = self._term.lost.done = True
        self._lock = threading.Lock()
        self._bells: list[Waiter] = []
        self._term = None
        self._stop: Stop | None = None  # of the run() or start() under way
        self._observer: Observer | None = None

    # For the faces to fill in

    def _make(self, kernel: Kernel, want: Want, claim: Claim, granted: Granted, unsure: bool) -> Holding:
        raise NotImplementedError

    def _run_elected(self, term: Term[T]) -> object:
        """Call ``on_elected``, then `_part_ended`."""
        raise NotImplementedError

    def _run_lost(self, term: Term[T], loss: Loss) -> object:
        """Call ``on_lost``, then `_part_ended`."""
        raise NotImplementedError

    async def _do_work(self, term: Term[T], work: Callable[[T], Any]) -> Any:
        """The result of ``work(leadership)``. `_part_ended` is called when it has ended."""
        raise NotImplementedError

    def _can_work(self, term: Term[T]) -> bool:
        """Whether work and ``on_elected``, if they have not ended, still can."""
        return True

    def _can_tell(self, term: Term[T]) -> bool:
        """The same of ``on_lost``."""
        return True

    def _watch_leader(self, observer: Observer) -> None:
        """Have `_follow` run, somewhere else."""
        raise NotImplementedError

    async def _call(self, callback: Callable[..., object], *args: Any) -> None:
        """Log what it raises."""
        raise NotImplementedError

    def _log_error(self, message: str, error: Exception) -> None:
        logger.error(message, self._want.name, error, extra={"lock_name": self._want.name})

    # Bells

    async def _until(self, condition: Callable[[], bool], end: Callable[[], float] = lambda: math.inf) -> bool:
        """Wait until ``condition()``; False at ``end()``. Both are looked at after every ring."""
        bell = self._kernel.face.waiter()
        self._bells.append(bell)
        try:
            while not condition():
                if (left := end() - self._kernel.now()) <= 0:
                    return False
                await bell.wait(left)
            return True
        finally:
            self._bells.remove(bell)

    async def _pause(self, stop: Stop) -> None:
        end = self._kernel.now() + FAILED_PAUSE
        await self._until(stop.called, lambda: end)

    def _ring(self) -> None:
        for bell in list(self._bells):
            bell.set()

    # One leadership

    def _push(self, leadership: T, scope: Scope[Any] | None) -> None:
        """It is the innermost lease of who works under it."""
        if scope:
            scope.push(leadership)

    async def _campaign(self, timeout: float | None, stop: Stop | None = None) -> Term[T]:
        seconds = check_timeout(timeout)
        self._begin_observing()
        try:
            lease = await acquire(self._kernel, self._want, seconds, stop)
        except BaseException:
            self._observe_no_longer()
            raise
        if lease is None:
            self._observe_no_longer()
            raise LockTimeout(
                f"the election {self._want.name!r} still has another leader after {seconds:g} s",
                name=self._want.name,
                backend=self._kernel.scheme,
            )
        term: Term[T] = lease._term  # type: ignore[attr-defined]
        try:
            self._take_office(term, lease)
        except BaseException:  # interrupted: nobody has it to resign it
            self._kernel.callbacks.start(self._run_elected, term)  # they come in pairs; begun already, nothing happens
            self._abdicate(term, INTERRUPTED)
            raise
        return term

    def _take_office(self, term: Term[T], lease: Holding) -> None:
        self._term = term
        self._kernel.closers[self._close] = None
        ended = partial(self._term_ended, term)
        if not lease._at_end(ended):
            ended()
        kernel = self._kernel
        if kernel.events.listened:
            from multilock import events

            identity = self._want.identity or kernel.identity
            kernel.events.emit(events.Elected(lease.name, lease.owner, kernel.now(), identity, lease.token))
        kernel.callbacks.start(self._run_elected, term)

    def _term_ended(self, term: Term[T]) -> None:
        if not term.leadership._over():
            return  # resigned, and still kept
        with self._lock:
            if self._stop is None and self._term is term:
                self._kernel.closers.pop(self._close, None)
        self._observe_no_longer()
        self._ring()

    # Both callbacks begin once: where an interrupt came as one was being started, it is started again.

    def _elected_begins(self, term: Term[T]) -> bool:
        """on_elected is being called: from here on on_lost may be. False: it has begun already."""
        with self._lock:
            if term.begun_at is not None:
                return False
            term.begun_at = self._kernel.now()
            waiting = term.loss
        if waiting:
            self._kernel.callbacks.start(self._run_lost, term, waiting)
        return True

    def _lost_begins(self, term: Term[T]) -> bool:
        """False: it has begun already."""
        with self._lock:
            again, term.lost_begun = term.lost_begun, True
        return not again

    def _lost(self, loss: Loss) -> None:
        """The lease's own callback: it was lost without our doing."""
        term: Term[T] = loss.lease._term  # type: ignore[attr-defined]
        if term.resigning and (running := self._running(term)):
            logger.warning(
                "the leadership of %r was lost (%s) before its orderly end; still running beside the next one: %s",
                self._want.name,
                loss.reason.value,
                running,
                extra=self._kernel.extra(loss.lease),
            )
        self._tell_lost(term, loss)

    def _tell_lost(self, term: Term[T], loss: Loss) -> None:
        """Have on_lost called once, with the first loss, and not before on_elected."""
        with self._lock:
            loss = term.loss = term.loss or loss
            if term.begun_at is None or term.lost_begun:
                return
        self._kernel.callbacks.start(self._run_lost, term, loss)

    # An orderly end. Who begins it waits, and gives the lease back. Who cannot wait, because it unwinds or is part of
    # what has to end, leaves that to whatever ends last, and to a timer.

    def _work_begins(self, term: Term[T]) -> bool:
        """False: the term is over already, and may have been given back."""
        if not term.leadership._alive():
            return False
        with self._lock:
            if not term.resigning:  # who resigns, under this lock, sees the work or keeps it from beginning
                term.work.done = False
            return not term.resigning

    def _part_ended(self, term: Term[T], part: Part) -> None:
        part.done = True
        if term.nobody_waits and self._all_ended(term):
            self._kernel.release_later(term.leadership)
        self._ring()

    def _callbacks_done(self, term: Term[T]) -> bool:
        if self._can_work(term):
            return term.elected.done and term.lost.done
        return term.lost.done or not self._can_tell(term)

    def _all_ended(self, term: Term[T]) -> bool:
        return (term.work.done or not self._can_work(term)) and self._callbacks_done(term)

    def _running(self, term: Term[T]) -> str:
        """What of the user's code runs still."""
        working, telling = self._can_work(term), self._can_tell(term)
        parts = (
            (term.work, working),
            (term.elected, working and self._on_elected),
            (term.lost, telling and self._on_lost),
        )
        return ", ".join(part.name for part, runs in parts if runs and not part.done)

    def _inside(self) -> bool:
        """Whether who asks must not wait: it is work or a callback of this election that has not ended, or was started
        by it, or comes in the middle of ours."""
        return any(part.election is self and not part.done for part in _INSIDE.get()) or process.in_the_middle()

    def _renounce(self, term: Term[T], why: str, grace: float | None = None) -> bool:
        """Lead no more: ``is_held()`` is False from here on, and on_lost (RESIGNED) begins; the lease is still kept.

        Of several graces the one that ends first counts.
        """
        lease = term.leadership
        if grace is None:
            grace = lease.ttl if self._grace is None else self._grace
        with self._lock:
            term.end_at = min(term.end_at, self._kernel.now() + grace)
        if not lease._alive():
            return False
        with self._lock:
            again, term.resigning = term.resigning, True
        # Again too: who began may have been interrupted before this.
        self._tell_lost(term, Loss(lease, LossReason.RESIGNED, False, why, self._kernel.now(), lease._valid_until))
        for hook in list(lease._hooks or ()):  # a work that waits for its end, as by wait_lost(), would keep it
            hook()
        self._ring()
        return not again

    async def _resign(self, leadership: Holding, grace: float | None = None) -> bool:
        """Renounce, and give the lease back at the end. True if this ended it; False after a loss or for a second."""
        term: Term[T] = leadership._term  # type: ignore[attr-defined]
        leadership._leave_scope()
        try:
            first = self._renounce(term, "this node stepped down", grace)
            if self._inside():
                self._give_back_later(term)
                return first
            return await self._give_back(term) and first
        except BaseException:
            self._abdicate(term, INTERRUPTED, grace)
            raise

    async def _give_back(self, term: Term[T]) -> bool:
        """When all has ended or the grace is over; True unless it was lost before. Several may do this at once."""
        kernel, leadership = self._kernel, term.leadership
        await self._until(lambda: self._all_ended(term) or leadership._state != HELD, lambda: term.end_at)
        self._tell_outlasted(term)
        await kernel.release(leadership)
        answered = kernel.now() + self._want.request_timeout
        await self._until(lambda: leadership._state != RELEASING, lambda: answered)
        return leadership._state != LOST

    def _give_back_later(self, term: Term[T]) -> None:
        """The same for somebody who cannot wait. Twice is harmless."""
        term.nobody_waits = True
        if self._all_ended(term):
            self._kernel.release_later(term.leadership)
        elif term.end_at < math.inf:
            self._kernel.timers.at(term.end_at, lambda: self._grace_over(term))

    def _grace_over(self, term: Term[T]) -> None:
        self._tell_outlasted(term)
        self._kernel.release_later(term.leadership)

    def _tell_outlasted(self, term: Term[T]) -> None:
        leadership = term.leadership
        if leadership._state != HELD or term.outlasted or not (running := self._running(term)):
            return
        term.outlasted = True
        logger.warning(
            "the leadership of %r is given back at the end of its grace; still running beside the next one: %s",
            self._want.name,
            running,
            extra=self._kernel.extra(leadership),
        )

    def _abdicate(self, term: Term[T], why: str, grace: float | None = None) -> None:
        """Resign without waiting. A resignation that has begun already goes on without whoever began it."""
        try:
            self._renounce(term, why, grace)
        finally:
            self._give_back_later(term)

    async def _step_down(self, grace: float | None) -> bool:
        term = self._term
        return term is not None and await self._resign(term.leadership, grace)

    async def _end(self, grace: float | None) -> None:
        """See `Election.stop`."""
        stop = self._stop
        answered = self._kernel.now() + self._want.request_timeout  # a request that is under way
        self._call_off()
        again = True
        while again:
            term = self._term
            if term:
                await self._resign(term.leadership, grace)
            again = not self._inside() and await self._another_term(term, stop, answered)

    async def _another_term(self, term: Term[T] | None, stop: Stop | None, answered: float) -> bool:
        """Wait until this one and the standing have ended. Whether another began: its grant was on its way."""

        def ended() -> bool:
            return (stop is None or self._stop is not stop) and (term is None or self._all_ended(term))

        def end() -> float:
            return answered if term is None or self._all_ended(term) else term.end_at

        await self._until(lambda: ended() or self._term is not term, end)
        return self._term is not term

    # Again and again

    async def _stand(self, work: Callable[[T], Any] | None, stop: Stop) -> Any:
        """Campaign, lead, stand again, until ``stop`` is called or ``work`` ends by itself."""
        kernel = self._kernel
        try:
            while not stop.called():
                await self._callbacks_ended(stop)
                try:
                    term = await self._campaign(None, stop)
                except BackendRejected as error:
                    if work is not None:
                        raise
                    self._log_error("the election %r is refused, and tried again: %s", error)
                    await self._pause(stop)
                    continue
                if stop.called():  # it came while the grant was on its way: stop() saw no term to end
                    await self._resign(term.leadership)
                    break
                if work is None:
                    await self._until(term.over)
                else:
                    ended, result = await self._lead(term, work, stop)
                    if ended:
                        return result
                if term.failed:
                    await self._pause(stop)
                if term.resigning and not stop.called() and not kernel.backend.capabilities.fair:
                    await self._callbacks_ended(stop)
                    await self._let_others(stop)
        except (Stopped, ClientClosed):
            pass
        finally:
            if self._term and not self._term.over():
                self._abdicate(self._term, INTERRUPTED)
        return None

    async def _lead(self, term: Term[T], work: Callable[[T], Any], stop: Stop) -> tuple[bool, Any]:
        """Whether the work ended by itself while we led, and its result."""
        if self._work_begins(term):
            try:
                result = await self._do_work(term, work)
            except Exception:
                if not term.over():
                    await self._end_by_itself(term)
                    raise
                logger.warning(
                    "the work of the election %r failed after its leadership", self._want.name, exc_info=True
                )
            else:
                if not term.over():
                    await self._end_by_itself(term)
                    return True, result
        await self._give_back(term)  # whoever resigned; nothing is left to do after a loss
        return False, None

    async def _end_by_itself(self, term: Term[T]) -> None:
        """The work has ended: it is not done again before its name has rested."""
        if self._hold_at_least:
            term.leadership._rest_until = term.leadership._granted_at + self._hold_at_least
        await self._resign(term.leadership)

    async def _callbacks_ended(self, stop: Stop) -> None:
        term = self._term
        if term is not None:
            await self._until(lambda: stop.called() or self._callbacks_done(term))

    async def _let_others(self, stop: Stop) -> None:
        """Where there is no queue to stand at the end of: wait until another has led, for 2 s at most."""
        observer = Observer(self._kernel, self._want.name)
        mine = self._term.leadership.owner if self._term else None
        end = self._kernel.now() + POLITE
        try:
            while not stop.called() and (left := end - self._kernel.now()) > 0:
                info = await self._kernel.ask(self._kernel.backend.inspect, self._want.name, name=self._want.name)
                if info and info.owner != mine:
                    return
                await observer.bell.wait(min(0.1, left))  # who resigned first is the first to stand again
        except (BackendUnavailable, BackendRejected):
            pass  # who does not learn whether another leads does not wait for it
        finally:
            observer.close()

    def _begin_observing(self) -> None:
        wanted = self._on_leader_changed is not None or self._kernel.events.listened
        if wanted and self._observer is None:
            self._observer = Observer(self._kernel, self._want.name, told=None)
            self._watch_leader(self._observer)

    def _observe_no_longer(self) -> None:
        """A campaign is over: without callback, what was observed for it alone was observed for its events."""
        if self._stop is None and self._on_leader_changed is None:
            self._end_observing()

    def _end_observing(self) -> None:
        if self._observer is not None:
            self._observer.close()
            self._observer = None

    async def _follow(self, observer: Observer) -> None:
        """Tell each change, until the observer is closed."""
        kernel = self._kernel
        try:
            while True:
                try:
                    leader = await observer.following()
                except BackendRejected as error:
                    self._log_error("who leads %r is not told, and asked again: %s", error)
                    await observer.bell.wait(FAILED_PAUSE)
                    continue
                if kernel.events.listened:
                    from multilock import events

                    kernel.events.emit(events.LeaderChanged(self._want.name, None, kernel.now(), leader))
                if self._on_leader_changed:
                    await self._call(self._on_leader_changed, leader)
        except ClientClosed:
            pass
        finally:
            observer.close()
            if self._observer is observer:
                self._observer = None

    def _begin_standing(self) -> Stop:
        self._kernel.check_open()
        stop = Stop()
        try:
            with self._lock:
                if self._stop is not None:
                    stopping = self._stop.called()
                    state = "is still stopping: wait for its work to end" if stopping else "is running already"
                    raise RuntimeError(f"the election {self.name!r} {state}")
                self._stop = stop
                self._kernel.closers[self._close] = None
        except BaseException:
            if self._stop is stop:  # interrupted
                self._end_standing(stop)
            raise
        return stop

    def _end_standing(self, stop: Stop) -> None:
        with self._lock:
            if self._stop is stop:
                self._stop = None
            if self._term is None or self._term.leadership._over():
                self._kernel.closers.pop(self._close, None)
        self._end_observing()
        self._ring()

    def _close(self) -> Ending:
        """The client is being closed."""
        self._call_off()
        term = self._term
        if term:
            self._abdicate(term, "the client was closed")
        return Ending(term.end_at if term else self._kernel.now(), self._inside())

    def _call_off(self) -> None:
        """No further term."""
        if self._stop:
            self._stop.call()
        self._ring()
        self._end_observing()

    # What can be asked without I/O

    @property
    def name(self) -> str:
        return self._want.name

    @property
    def identity(self) -> str:
        """Who this candidate is, as others see it."""
        return self._want.identity or self._kernel.identity

    def is_leader(self) -> bool:
        """From the clock, never a cached flag; False from the moment this node begins to step down."""
        term = self._term
        return term is not None and not term.over()

    def _stands(self) -> bool:
        """Whether it campaigns, leads, or will again: between ``start()`` or ``run()`` and ``stop()``."""
        return self._stop is not None or self.is_leader()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} {self.identity!r}{' leading' if self.is_leader() else ''}>"


def leader_info(info: LockInfo | None) -> LeaderInfo | None:
    """None while the name rests: nobody leads then."""
    if info is None or info.resting_until:
        return None
    return LeaderInfo(info.identity, info.token, info.host, info.since)


class Observer:
    """The present leader, then each change; quick changes may be merged, the last is never missed."""

    def __init__(self, kernel: Kernel, name: str, told: str | None = "") -> None:
        self._kernel = kernel
        self._name = name
        self.closed = False
        self._last = told  # the owner told last, None for nobody; no owner is "", so that the first is always told
        self.bell = kernel.face.waiter()
        kernel.followers.add(name, self.bell)

    async def following(self) -> LeaderInfo | None:
        """The next leader, None for nobody. An outage is waited out.

        Raises ClientClosed at the end, and BackendRejected, after which it may be asked again.
        """
        kernel = self._kernel
        while True:
            if self.closed:
                raise ClientClosed("this observer was closed", name=self._name, backend=kernel.scheme)
            try:
                info = await kernel.ask(kernel.backend.inspect, self._name, name=self._name)
            except BackendUnavailable as error:
                logger.debug("who leads %r is not known: %s", self._name, error)
            else:
                leader = leader_info(info)
                owner = (info.owner or repr(leader)) if info and leader else None
                if owner != self._last:
                    self._last = owner
                    return leader
            await self.bell.wait(kernel.followers.look_again_in(self._name))

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._kernel.followers.remove(self._name, self.bell)
            self.bell.set()

    def drop(self) -> None:
        """Like `close`, by the garbage collector."""
        if not self.closed:
            self.closed = True
            self._kernel.followers.drop(self._name, self.bell)
