"""Everything of a client that is the same for both faces: its leases, its watchdog, its backend; one per client.

A lease on its way: `claim` → `multilock.kernel.acquire` → `adopt` → the watchdog keeps it alive → `release`, or
`Monitor.lose`. State changes happen under `lock`, which is never held during a request or a callback.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Coroutine, Hashable, Iterable
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from multilock import telling
from multilock.errors import (
    BackendUnavailable,
    ClientClosed,
    LockTimeout,
    MultilockError,
    NotHeld,
)
from multilock.kernel import process, validity
from multilock.kernel.callbacks import check_callback
from multilock.kernel.gate import Gate
from multilock.kernel.giving_back import Cancels, GivingBack, call_to_give_back
from multilock.kernel.holding import HELD, RELEASING, Holding
from multilock.kernel.monitor import Monitor
from multilock.kernel.observing import Followers
from multilock.kernel.runtime import call_inside, wait_until
from multilock.kernel.subscribers import Events
from multilock.kernel.timers import Timers
from multilock.kernel.watchdog import Watchdog
from multilock.model import Claim, Granted, LockInfo, LossReason, owner_text
from multilock.names import default_identity
from multilock.telling import logger

if TYPE_CHECKING:
    from multilock.backend import Backend
    from multilock.kernel.face import Face
    from multilock.kernel.runtime import Runtime, Ticker
    from multilock.kernel.want import Want

__all__ = ["Ending", "Kernel", "Settings"]

R = TypeVar("R")
PAGE = 100  # locks listed in one go …
PAGE_WITHIN = 60.0  # … and seconds for that: it may be many requests, each with its own limit
LOOK_AGAIN = 5.0  # seconds between looks at whether a dropped client can end
SOON = 0.1  # seconds until a thread that was refused is asked for again
TELL_WITHIN = 0.5  # seconds for which close() waits until the log handlers have what was said


class Settings(Protocol):
    """What the kernel reads of `multilock.config.Settings`."""

    @property
    def ttl(self) -> float: ...
    @property
    def identity(self) -> str | None: ...
    @property
    def outage_timeout(self) -> float | None: ...
    @property
    def request_timeout(self) -> float | None: ...


class Candidate(Protocol):
    @property
    def name(self) -> str: ...
    def is_leader(self) -> bool: ...
    def _stands(self) -> bool: ...
    def _forked(self) -> None: ...


class Ending(NamedTuple):
    """What an election says to the client that closes."""

    at: float  # when it has given back what it holds, at the latest
    awaits_caller: bool  # who closes is itself what it waits for


class Kernel:
    def __init__(
        self,
        backend: Backend,
        settings: Settings,
        runtime: Runtime,
        make_face: Callable[[Kernel], Face],
    ) -> None:
        self.backend = backend
        self.settings = settings
        self.runtime = runtime
        self.now = runtime.now
        self.scheme = backend.scheme
        self.push_loss = backend.capabilities.push_loss
        self.closed = False  # no new work
        self.finished = False  # no old work either
        self.died = False  # the watchdog did, once
        self._dropped = False  # by its user, and not ended yet
        self._told_of_ttl = False  # that another one was granted
        self._make_face = make_face
        self.closers: dict[Callable[[], Ending], None] = {}  # what runs elections, stopped first by close()
        self.elections: weakref.WeakSet[Candidate] = weakref.WeakSet()
        self.lost: weakref.WeakSet[Holding] = weakref.WeakSet()  # a forked child must not believe it lost them
        self.events = Events(self.check_callback, self.now)
        self._start()
        process.register(self)

    def _start(self) -> None:
        """Made anew in a forked child: nothing of the parent's locks, threads and connections is used there."""
        self.lock = threading.RLock()  # a finalizer may come while its thread is inside; see `release`
        self.held: dict[str, Holding] = {}
        self._ticker: Ticker | None = None
        self.phase = self.runtime.uniform(0.0, 1.0)  # of this client's renewal grid
        self.identity = self.settings.identity or default_identity()
        self._host, self._pid = os.uname().nodename, os.getpid()
        self.client = os.urandom(8).hex()
        self.timers = Timers(self.poke)
        self.face = self._make_face(self)
        self.callbacks = self.face.callbacks
        self.events.begin(self.callbacks)
        self.watchdog = Watchdog(self)
        self.monitor = Monitor(self, self.client)
        self.giving_back = GivingBack(self)
        self.cancels = Cancels(self)
        self.followers = Followers(self)
        self.gate = Gate()
        self.backend.open(self.monitor)

    def check_callback(self, what: str, callback: object) -> None:
        check_callback(what, callback, asynchronous=self.face.asynchronous)

    def request_timeout(self, ttl: float | None = None) -> float:
        return validity.request_timeout(self.settings.request_timeout, self.settings.ttl if ttl is None else ttl)

    # The life of a lease

    def claim(self, want: Want, arrived: int) -> Claim:
        """A new one, for a call of acquire() of then."""
        claim_id = f"{self.client}.{os.urandom(16).hex()}"
        identity = want.identity or self.identity
        owner = owner_text(claim_id, want.kind, self._host, self._pid, identity, want.grant)
        return Claim(want.name, want.kind, claim_id, owner, want.grant, want.renew, want.fair, identity, 0, arrived)

    def adopt(self, want: Want, claim: Claim, granted: Granted, unsure: bool, started: float) -> Holding | None:
        """A grant becomes a lease, and is looked after from now on; None: it is over already.

        Only here is a lease made: one that is refused was never anybody's, and its lock never says that it is held.
        """
        with self.lock:
            if self.closed:
                raise self._closed_error()
            granted = self.watchdog.as_known(claim, granted)
            until = validity.valid_until(granted.sent_at, granted.valid_for, granted.ttl)
            if self.now() >= validity.lost_at(until, granted.ttl):
                return None
            lease = self.held[claim.id] = want.make(self, want, claim, granted, unsure)
            lease._adopt()
            due = self.watchdog.adopt(lease)
        self.poke(due)
        if granted.ttl != want.ttl and not self._told_of_ttl:
            self._told_of_ttl = True
            logger.warning(
                "the lock %r has a ttl of %g s, where %g s were asked for: %s grants no other (said once a client)",
                claim.name,
                granted.ttl,
                want.ttl,
                self.scheme,
                extra=self.extra(lease),
            )
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("acquired the lock %r", claim.name, extra=self.extra(lease))
        if tell := self.events.tell:
            tell.acquired(lease, started)
        return lease

    def forget(self, lease: Holding) -> None:
        """Under the lock: nobody looks after it any more."""
        self.held.pop(lease._claim.id, None)
        self.watchdog.drop(lease)

    def leases_of(self, group: Hashable) -> list[Holding]:
        return [lease for lease in list(self.held.values()) if lease._granted.group == group]

    def abandon(self, claim: Claim) -> None:
        """The acquire that made this lease was interrupted before it could hand it out."""
        with self.lock:
            if lease := self.held.get(claim.id):
                self.forget(lease)
                lease._abandon()

    def drop_waiters(self) -> None:
        """The event loop of all that wait was closed, and nothing there unwinds: the background does it for them.

        No acquire or release has begun on another loop yet.
        """
        self.gate.clear()
        waiting = self.monitor.waiting
        for claim_id in list(waiting):
            claim, _ = waiting.pop(claim_id)
            self.cancels.add(claim, None, unsure=True)
        for lease in list(self.held.values()):
            if lease._state == RELEASING:
                self.giving_back.go_on(lease)

    # The ticking thread

    def ready(self) -> None:
        """Before anything is sent that would have to be looked after. Raises BackendUnavailable."""
        if self._ticker is None:
            try:
                self._start_ticker()
            except RuntimeError as error:
                raise BackendUnavailable(f"the watchdog has no thread: {error}", unknown=False) from error

    def poke(self, at: float) -> None:
        """See to it that the ticking thread looks at ``at`` at the latest."""
        try:
            ticker = self._ticker or self._start_ticker()
        except RuntimeError as error:  # what is planned waits for whoever pokes next
            logger.error("no thread for the watchdog: %s", error)
            return
        if ticker:
            ticker.poke(at)

    def nudge(self) -> None:
        """Have the ticking thread look now, if there is one: who asks must start none."""
        if ticker := self._ticker:
            ticker.poke(self.now())

    def later(self, call: Callable[[], None]) -> None:
        """Soon, on the ticking thread."""
        self.timers.at(self.now() + SOON, call)

    def spawn_soon(self, run: Callable[[], None], name: str) -> None:
        """In a thread of its own, as soon as the process can have one."""

        def again() -> None:
            try:
                self.runtime.spawn(run, name)
            except RuntimeError:
                self.later(again)

        try:
            self.runtime.spawn(run, name)
        except RuntimeError as error:
            logger.error("no thread for %s yet: %s", name, error)
            self.later(again)

    def _start_ticker(self) -> Ticker | None:
        """None: the client has ended, and what is still planned in it is not done."""
        with self.lock:
            if self._ticker is None and not self.finished:
                ticker = self._ticker = self.runtime.ticker(self._step, self._watchdog_died, "multilock-watchdog")
                try:
                    ticker.start()
                except BaseException:  # interrupted: its thread may have begun, and nobody would close it
                    self._ticker = None
                    ticker.close()
                    raise
            return self._ticker

    def _step(self) -> float:
        now = self.now()
        self.giving_back.step()
        following = min(self.watchdog.step(now), self.timers.step(now))
        return min(following, now + self._end_if_dropped()) if self._dropped else following

    def _watchdog_died(self, error: BaseException) -> None:
        self.died = True
        self._ticker = None  # what follows needs a clock; the client stays unhealthy
        try:
            self.monitor.lose_all(LossReason.WATCHDOG_DIED, f"the renewing thread ended: {type(error).__name__}")
        finally:
            logger.critical("the watchdog died; every lease of this client is lost", exc_info=error)

    def is_healthy(self) -> bool:
        ticker = self._ticker
        return not (self.closed or self.died) and (ticker is None or ticker.late() <= self.settings.ttl / 10)

    # What a dashboard asks, at any moment and from any thread

    def held_names(self) -> list[str]:
        """Of what is held and proven to be; what is over by the clock is not."""
        now = self.now()
        return [lease.name for lease in list(self.held.values()) if lease._state == HELD and now < lease._lost_at]

    def waiting_names(self) -> list[str]:
        """Of the calls of acquire() that are under way."""
        asking = [claim.name for claim, _ in list(self.monitor.waiting.values()) if claim.id not in self.held]
        return asking + self.gate.behind()

    def watchdog_late(self) -> float:
        ticker = self._ticker
        return math.inf if self.died else ticker.late() if ticker else 0.0

    def add_election(self, election: Candidate) -> None:
        with self.lock:
            self.elections.add(election)

    def candidacies(self) -> list[tuple[str, bool]]:
        """The elections in which this client stands, and whether it leads."""
        with self.lock:  # a set of weak references cannot be looked through while another thread adds to it
            elections = list(self.elections)
        standing = [election for election in elections if election._stands()]
        return [(election.name, election.is_leader()) for election in standing]

    # The end

    def check_open(self) -> None:
        if self.closed:
            raise self._closed_error()

    def _closed_error(self) -> ClientClosed:
        return ClientClosed("this client is closed: make a new one with multilock.connect()", backend=self.scheme)

    def close(self) -> None:
        """Blocking, bounded: callbacks and answers get one request timeout each, elections their grace if that is more.
        See ``Client.close``."""
        with self.lock:
            if self.closed:
                return
            self.closed = True
        budget = self.request_timeout()
        endings = [end() for end in list(self.closers)]
        self.monitor.wake(None)
        self.gate.wake_all()
        self.followers.changed(None)
        leases = list(self.held.values())
        for lease in leases:
            if lease.is_held():  # a leadership is not any more: it was resigned, and is kept until its work has ended
                self.monitor.lose(
                    lease,
                    LossReason.CLOSED,
                    "the client was closed while it was held",
                    confirmed=False,
                    give_back=False,
                )
        until = max((ending.at for ending in endings), default=0.0)
        if process.in_the_middle() or any(ending.awaits_caller for ending in endings):
            self.spawn_soon(lambda: self._give_all_back(leases, budget, until), "multilock-close")
        else:
            self._give_all_back(leases, budget, until)

    def _give_all_back(self, leases: list[Holding], budget: float, until: float) -> None:
        try:
            self.callbacks.wait(budget)
        finally:
            for lease in leases:
                if lease._loss:
                    self.cancels.add(lease._claim, lease._granted, lease._unsure, rest_until=lease._rest_until)
        try:  # elections give back what they hold: this is no shorter, in case a timer of theirs is late
            wait_until(self.runtime, lambda: all(lease._state != HELD for lease in leases), until + budget - self.now())
        finally:
            for lease in leases:
                if not lease._loss:
                    self.giving_back.later(lease)
        self._wait_for_requests(budget)
        self.cancels.wait(budget)
        self._finish()
        telling.flush(TELL_WITHIN)

    def dropped(self) -> None:
        """Nobody has the client any more, and nobody closed it: its threads and connections end when nothing needs
        them. A lease keeps its client, so none is held."""
        self._dropped = True
        self.poke(self.now())
        warnings.warn(f"a client of {self.scheme} was dropped: close() it, or use it in a with", ResourceWarning, 1)

    def _end_if_dropped(self) -> float:
        """Seconds after which to look again."""
        if self.held or self.monitor.waiting or self.closers or not self.cancels.wait(0) or self.followers.wanted():
            return LOOK_AGAIN
        try:
            self.runtime.spawn(self.close, "multilock-close")
        except RuntimeError:  # the process has no thread for it now
            return LOOK_AGAIN
        self._dropped = False
        return math.inf

    def _wait_for_requests(self, budget: float) -> None:
        """Of acquires, which hand their claims to the background cancel on their way out, and of releases."""
        wait_until(self.runtime, lambda: not (self.monitor.waiting or self.held), budget)

    def _finish(self) -> None:
        with self.lock:
            self.finished = True
        self.followers.close()
        self.watchdog.close()
        self.cancels.close()
        self.face.close()
        self.backend.close()
        if self._ticker:
            self._ticker.close()

    def withdraw(self, deadline: float) -> bool:
        """The interpreter ends: nobody here waits any more. False: the client has ended before.

        For all clients before any of them gives a lock back, which could go to a waiter that ends with this process.
        """
        with self.lock:
            self.closed = True
            waiting = [claim for claim, _ in self.monitor.waiting.copy().values() if claim.id not in self.held]
        if self.finished:
            return False
        self._give_back([*((claim, None, True, None) for claim in waiting), *self.cancels.take()], deadline)
        return True

    def exit(self, deadline: float) -> None:
        """Then give back what is held, in this thread: no callbacks, nothing past ``deadline``."""
        with self.lock:
            leases = list(self.held.values())
            # A release under way may not have sent anything yet, and its thread ends with this process.
            claims = [
                (lease._claim, lease._granted, lease._unsure or lease._state == RELEASING, lease._rest_until)
                for lease in leases
            ]
            for lease in leases:
                lease._abandon()
                self.forget(lease)
        self._give_back([*claims, *self.cancels.take()], deadline)
        self._finish()

    def _give_back(self, claims: Iterable[tuple[Claim, Granted | None, bool, float | None]], deadline: float) -> None:
        for claim, granted, unsure, rest_until in claims:
            if (left := deadline - self.now()) <= 0:
                break
            try:
                call, *args = call_to_give_back(self.backend, self.now(), claim, granted, unsure, rest_until)
                call_inside(call, *args, min(left, self.request_timeout(claim.ttl)))
            except Exception as error:
                logger.warning("the lock %r could not be given back at exit: %s", claim.name, error)
                if isinstance(error, BackendUnavailable):
                    break  # the rest would only use up the time of other clients

    def forked(self) -> None:
        """In the child: every lease reads RELEASED, nothing is given back, and the client opens afresh."""
        self.lock = threading.RLock()  # another thread may have held it, also that of a closed client
        for lease in [*self.held.values(), *self.lost]:
            lease._reset_in_child()
        self.lost.clear()
        for election in list(self.elections):
            election._forked()
        if self.closed:
            self.finished = True  # what its parent still gives back, it does without us
        else:
            self.closers.clear()
            self.died = False
            self._start()

    # For messages

    def still_taken(self, name: str, timeout: float | None, by_itself: bool) -> LockTimeout:
        """``by_itself``: who asks holds it."""
        remedy = "see who holds it with inspect(), or wait for it with a timeout"
        if by_itself:
            remedy = "who asks holds it: release it first, or make the lock with reentrant=True"
        elif timeout:
            remedy = "wait longer, or see who holds it with inspect()"
        return LockTimeout(
            f"lock {name!r} is {f'still taken after {timeout:g} s' if timeout else 'taken'}: {remedy}",
            name=name,
            backend=self.scheme,
        )

    def warn_of_itself(self, name: str) -> None:
        logger.warning(
            "this %s waits for the lock %r, which it holds: make the lock with reentrant=True, or release it first",
            "task" if self.face.asynchronous else "thread",
            name,
            extra={"lock_name": name},
        )

    def not_held(self, name: str, who: str) -> NotHeld:
        """``who`` asked: "thread" or "task"."""
        return NotHeld(
            f"this {who} holds no lease of {name!r} through this lock: it was released, or taken elsewhere "
            f"(lease.release() works from any {who})",
            name=name,
            backend=self.scheme,
        )

    def name_error(self, error: MultilockError, name: str | None) -> None:
        error.name = error.name or name
        error.backend = error.backend or self.scheme

    def extra(self, lease: Holding) -> dict[str, Any]:
        return {"lock_name": lease.name, "lock_owner": lease.owner, "lock_token": lease.token}

    # One question to the backend

    async def ask(self, call: Callable[..., R], *args: Any, name: str | None = None, within: float | None = None) -> R:
        """``call(*args, within)``, once; ``within`` is the client's request timeout unless it is given."""
        try:
            self.check_open()
            return await self.face.ask(self.request_timeout() if within is None else within, call, *args)
        except MultilockError as error:
            self.name_error(error, name)
            raise

    async def pages(self, prefix: str) -> Callable[[], Coroutine[Any, Any, list[LockInfo]]]:
        """What gives the next locks held whose names begin with ``prefix``, an empty list at the end."""
        iterator = await self.ask(partial(self.backend.inspect_all, prefix))

        async def page() -> list[LockInfo]:
            return await self.ask(lambda _: list(islice(iterator, PAGE)), within=PAGE_WITHIN)

        return page

    async def renew(self, lease: Holding) -> None:
        """See ``Lease.renew``."""
        lease.check()
        granted = lease._granted
        within = min(self.request_timeout(granted.ttl), lease._lost_at - self.now())
        try:
            [answer] = await self.face.ask(within, self.backend.renew, granted.group, [(lease._claim, granted)])
            if isinstance(answer, BackendUnavailable):
                raise answer
        except MultilockError as error:
            self.watchdog.unanswered([lease], error)
            self.name_error(error, lease.name)
            raise
        self.watchdog.settle(lease, answer)
        lease.check()
