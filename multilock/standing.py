"""Leader election, the same for both faces: stand, lead, step down, stand again; and who leads, as others see it.

An election is a contest for the lock of its name, and a leadership is a lease. What is added is order: callbacks in
pairs, ``on_lost`` before the lease is given back, and standing again only when the callbacks of the last term have
ended. The coroutines here await only the kernel's acquire and release, and bells.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from multilock.acquire import Stop, Stopped, Waiter, acquire
from multilock.errors import BackendRejected, BackendUnavailable, ClientClosed, LockTimeout
from multilock.holding import Holding
from multilock.model import Claim, Granted, LeaderInfo, LockInfo, Loss, LossReason
from multilock.names import check_timeout

if TYPE_CHECKING:
    from multilock.kernel import Kernel, Want
    from multilock.scopes import Scope

__all__ = ["Observer", "Standing", "Term", "leader_info"]

logger = logging.getLogger("multilock")

T = TypeVar("T", bound=Holding)
POLITE = 2.0  # seconds for which a node that resigned lets others go first, where the backend keeps no queue
FAILED_PAUSE = 1.0  # seconds before a node stands again that the backend refused, or whose on_elected raised


class Term(Generic[T]):
    """One leadership, and how far its callbacks are."""

    def __init__(self) -> None:
        self.leadership: T
        self.begun_at: float | None = None  # when on_elected was called
        self.resigning = False
        self.loss: Loss | None = None  # what on_lost was, or is to be, called with
        self.lost_begun = False
        self.elected_task: Any = None  # asyncio: on_elected, to be cancelled at the loss
        self.elected_done = False
        self.failed = False  # on_elected raised
        self.lost_done = False
        self.nobody_waits = False  # for on_lost, in order to give the lease back: whoever did was interrupted

    def over(self) -> bool:
        return self.resigning or not self.leadership._alive()


class Standing(Generic[T]):
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
    ) -> None:
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
        self._forked()
        kernel.elections.add(self)

    def _forked(self) -> None:
        """As at first: in a forked child nobody stands who stood in its parent."""
        self._lock = threading.Lock()
        self._bells: list[Waiter] = []
        self._term: Term[T] | None = None
        self._stop: Stop | None = None  # of the run() or start() under way
        self._observer: Observer | None = None
        self._runner: int | None = None  # the thread that is in run(), on the blocking face

    # For the faces to fill in

    def _make(self, kernel: Kernel, want: Want, claim: Claim, granted: Granted, unsure: bool) -> Holding:
        raise NotImplementedError

    def _run_elected(self, term: Term[T]) -> object:
        """Call ``on_elected``, then `_elected_ended`."""
        raise NotImplementedError

    def _run_lost(self, term: Term[T], loss: Loss) -> object:
        """Call ``on_lost``, then `_lost_ended`."""
        raise NotImplementedError

    async def _do_work(self, term: Term[T], work: Callable[[T], Any]) -> Any:
        """The result of ``work(leadership)``."""
        raise NotImplementedError

    def _watch_leader(self, observer: Observer) -> None:
        """Have `_follow` run, somewhere else."""
        raise NotImplementedError

    async def _call(self, callback: Callable[..., object], *args: Any) -> None:
        """Log what it raises."""
        raise NotImplementedError

    def _log_error(self, message: str, error: Exception) -> None:
        logger.error(message, self._want.name, error, extra={"lock_name": self._want.name})

    # Bells

    async def _until(self, condition: Callable[[], bool], seconds: float = float("inf")) -> bool:
        """Wait until ``condition()``, looked at after every ring; False when ``seconds`` are over."""
        bell = self._kernel.face.waiter()
        self._bells.append(bell)
        try:
            end = self._kernel.now() + seconds
            while not condition():
                if (left := end - self._kernel.now()) <= 0:
                    return False
                await bell.wait(left)
            return True
        finally:
            self._bells.remove(bell)

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
            self._abdicate(term)
            raise
        return term

    def _take_office(self, term: Term[T], lease: Holding) -> None:
        self._term = term
        self._kernel.closers[self._close] = None
        if not lease._at_end(self._term_ended):
            self._term_ended()
        kernel = self._kernel
        if kernel.events.listened:
            from multilock import events

            identity = self._want.identity or kernel.identity
            kernel.events.emit(events.Elected(lease.name, lease.owner, kernel.now(), identity, lease.token))
        kernel.callbacks.start(self._run_elected, term)

    def _term_ended(self) -> None:
        if self._stop is None:
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

    def _elected_ended(self, term: Term[T]) -> None:
        term.elected_done = True
        self._ring()

    def _lost_ended(self, term: Term[T]) -> None:
        term.lost_done = True
        if term.nobody_waits:
            self._kernel.release_later(term.leadership)
        self._ring()

    def _lost(self, loss: Loss) -> None:
        """The lease's own callback: it was lost without our doing."""
        self._tell_lost(loss.lease._term, loss)  # type: ignore[attr-defined]

    def _tell_lost(self, term: Term[T], loss: Loss) -> None:
        """Have on_lost called once, with the first loss, and not before on_elected."""
        with self._lock:
            loss = term.loss = term.loss or loss
            if term.begun_at is None or term.lost_begun:
                return
        self._kernel.callbacks.start(self._run_lost, term, loss)

    def _renounce(self, term: Term[T], why: str) -> bool:
        """Lead no more: ``is_held()`` is False from here on, and on_lost (RESIGNED) begins; the lease is still kept."""
        lease = term.leadership
        with self._lock:
            again, term.resigning = term.resigning, True
        if not lease._alive():
            return False
        # Again too: who began may have been interrupted before this.
        self._tell_lost(term, Loss(lease, LossReason.RESIGNED, False, why, self._kernel.now(), lease._valid_until))
        self._ring()
        return not again

    async def _resign(self, leadership: Holding) -> bool:
        """on_lost first, while the lease is still renewed, one ttl at most; then give it back."""
        kernel = self._kernel
        term: Term[T] = leadership._term  # type: ignore[attr-defined]
        leadership._leave_scope()
        try:
            if not self._renounce(term, "this node stepped down"):
                return False
            await self._until(lambda: term.lost_done, leadership.ttl)
            return await kernel.release(leadership)
        except BaseException:
            if term.resigning:
                self._abdicate(term)
            raise

    def _give_back_later(self, term: Term[T]) -> None:
        """The end of a resignation for somebody who unwinds and cannot wait for on_lost. Twice is harmless."""
        kernel, leadership = self._kernel, term.leadership
        term.nobody_waits = True
        if term.lost_done:
            kernel.release_later(leadership)
        else:
            kernel.timers.at(kernel.now() + leadership.ttl, lambda: kernel.release_later(leadership))

    async def _step_down(self) -> bool:
        term = self._term
        return term is not None and await self._resign(term.leadership)

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
                    await self._until(stop.called, FAILED_PAUSE)
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
                    await self._until(stop.called, FAILED_PAUSE)
                if term.resigning and not stop.called() and not kernel.backend.capabilities.fair:
                    await self._callbacks_ended(stop)
                    await self._let_others(stop)
        except (Stopped, ClientClosed):
            pass
        finally:
            if self._term and not self._term.over():
                self._abdicate(self._term)
        return None

    async def _lead(self, term: Term[T], work: Callable[[T], Any], stop: Stop) -> tuple[bool, Any]:
        """Whether the work ended by itself while we led, and its result."""
        try:
            result = await self._do_work(term, work)
        except Exception:
            if not term.over():
                await self._resign(term.leadership)
                raise
            logger.warning("the work of the election %r failed after its leadership", self._want.name, exc_info=True)
            return False, None
        if term.over():
            return False, None
        await self._resign(term.leadership)
        return True, result

    def _abdicate(self, term: Term[T]) -> None:
        """Resign without waiting: we are unwinding. One that has begun already is ended."""
        try:
            self._renounce(term, "its work was interrupted")
        finally:
            self._give_back_later(term)

    async def _callbacks_ended(self, stop: Stop) -> None:
        term = self._term
        if term is not None:
            await self._until(lambda: stop.called() or (term.elected_done and term.lost_done))

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
        self._kernel.closers.pop(self._close, None)
        self._end_observing()
        self._ring()

    def _close(self) -> None:
        """The client is being closed: resign, and let it give back the lease once on_lost has ended."""
        self._call_off()
        if self._term:
            self._renounce(self._term, "the client was closed")

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

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} {self.identity!r}{' leading' if self.is_leader() else ''}>"


def leader_info(info: LockInfo | None) -> LeaderInfo | None:
    return LeaderInfo(info.identity, info.token, info.host, info.since) if info else None


class Observer:
    """The present leader, then each change; quick changes may be merged, the last is never missed."""

    def __init__(self, kernel: Kernel, name: str, told: str | None = "") -> None:
        self._kernel = kernel
        self._name = name
        self._closed = False
        self._last = told  # the owner told last, None for nobody; no owner is "", so that the first is always told
        self.bell = kernel.face.waiter()
        kernel.followers.add(name, self.bell)

    async def following(self) -> LeaderInfo | None:
        """The next leader, None for nobody. An outage is waited out.

        Raises ClientClosed at the end, and BackendRejected, after which it may be asked again.
        """
        kernel = self._kernel
        while True:
            if self._closed:
                raise ClientClosed("this observer was closed", name=self._name, backend=kernel.scheme)
            try:
                info = await kernel.ask(kernel.backend.inspect, self._name, name=self._name)
            except BackendUnavailable as error:
                logger.debug("who leads %r is not known: %s", self._name, error)
            else:
                owner = (info.owner or repr(info)) if info else None
                if owner != self._last:
                    self._last = owner
                    return leader_info(info)
            await self.bell.wait(kernel.followers.look_again_in(self._name))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._kernel.followers.remove(self._name, self.bell)
            self.bell.set()

    def drop(self) -> None:
        """Like `close`, by the garbage collector."""
        if not self._closed:
            self._closed = True
            self._kernel.followers.drop(self._name, self.bell)
