"""Everything of a client that is the same for both faces: its leases, its watchdog, its backend; one per client.

A lease on its way: `claim` → `multilock.kernel.acquire` → `adopt` → the watchdog keeps it alive → `release`, or
`Monitor.lose`. State changes happen under `lock`, which is never held during a request or a callback.
"""

from __future__ import annotations

import logging
import math
import os
import weakref
from collections.abc import Callable, Coroutine, Hashable, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from multilock import system
from multilock.errors import (
    BackendUnavailable,
    CapabilityMissing,
    ClientClosed,
    ConfigurationError,
    LockTimeout,
    MultilockError,
    NotHeld,
    behind,
)
from multilock.kernel import process, validity, worker
from multilock.kernel.callbacks import check_callback
from multilock.kernel.ending import End
from multilock.kernel.fence import Fence
from multilock.kernel.gate import Gate
from multilock.kernel.giving_back import Cancels, GivingBack
from multilock.kernel.holding import HELD, RELEASING, AnyHeld, Holding
from multilock.kernel.monitor import Monitor
from multilock.kernel.observing import Followers
from multilock.kernel.pushes import Pushes
from multilock.kernel.subscribers import Events
from multilock.kernel.timers import Timers
from multilock.kernel.watchdog import Watchdog
from multilock.model import Claim, Finding, Granted, LockInfo, LossReason, owner_text
from multilock.names import default_identity
from multilock.telling import logger

if TYPE_CHECKING:
    from multilock.backend import Backend
    from multilock.kernel.ending import Ending
    from multilock.kernel.face import Face
    from multilock.kernel.runtime import Runtime, Ticker
    from multilock.kernel.want import Want

__all__ = ["Kernel", "Settings"]

R = TypeVar("R")
PAGE = 100  # locks listed in one go …
PAGE_WITHIN = 60.0  # … and seconds for that: it may be many requests, each with its own limit


class Settings(Protocol):
    """What the kernel reads of `multilock.config.Settings`."""

    @property
    def ttl(self) -> float: ...
    @property
    def prefix(self) -> str: ...
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


class Kernel:
    def __init__(
        self,
        backend: Backend,
        settings: Settings,
        runtime: Runtime,
        make_face: Callable[[Kernel], Face],
    ) -> None:
        if late := system.patched_late():
            raise ConfigurationError(
                f"{late} patched this interpreter after multilock was imported, so one greenlet that waits would stop "
                "all others: patch before the first `import multilock`",
                backend=backend.scheme,
            )
        self.backend = backend
        self.settings = settings
        self.runtime = runtime
        self.now = runtime.now
        self.scheme = backend.scheme
        self.push_loss = backend.capabilities.push_loss
        self.closed = False  # no new work
        self.finished = False  # no old work either
        self.died = False  # the watchdog did, once
        self._told_of_ttl = False  # that another one was granted
        self._make_face = make_face
        self.closers: dict[Callable[[], Ending], None] = {}  # what runs elections, stopped first by close()
        self.elections: weakref.WeakSet[Candidate] = weakref.WeakSet()
        self.apart: weakref.WeakSet[AnyHeld] = weakref.WeakSet()  # those not in `held`, for a forked child: the lost
        # ones, and the leases of several locks
        self.events = Events(self.check_callback, self.now)
        self.end = End(self)
        self.start()
        process.register(self)

    def start(self) -> None:
        """Made anew in a forked child: nothing of the parent's locks, threads and connections is used there."""
        self.lock = system.RLock()  # a finalizer may come while its thread is inside; see `release`
        self.held: dict[str, Holding] = {}
        self.ticker: Ticker | None = None
        self.fence: Fence | None = None  # of those with hard_fence=True
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
        self.pushes = Pushes(self)
        self.gate = Gate()
        self.backend.open(self.monitor)

    def check_callback(self, what: str, callback: object) -> None:
        check_callback(what, callback, asynchronous=self.face.asynchronous)

    def request_timeout(self, ttl: float | None = None) -> float:
        return validity.request_timeout(self.settings.request_timeout, self.settings.ttl if ttl is None else ttl)

    def hard_fence(self) -> Fence:
        """Raises CapabilityMissing where the process cannot be ended so, and ClientClosed."""
        if fence := self.fence:
            return fence
        fence = Fence(self.runtime.killer())  # without the lock: a library is loaded the first time
        with self.lock:
            if self.fence is None and not self.closed:
                self.fence = fence
                return fence
        fence.close()
        self.check_open()
        return self.hard_fence()

    def lift_fences(self) -> None:
        """The client ends, and with it all that was held through it."""
        with self.lock:
            fence, self.fence = self.fence, None
        if fence:
            fence.close()

    # The life of a lease

    def claim(self, want: Want, arrived: int) -> Claim:
        """A new one, for a call of acquire() of then."""
        claim_id = f"{self.client}.{os.urandom(16).hex()}"
        identity = want.identity or self.identity
        owner = owner_text(claim_id, want.kind, self._host, self._pid, identity, want.grant)
        name, kind, permits = want.name, want.kind, want.permits
        return Claim(name, kind, claim_id, owner, want.grant, want.renew, want.fair, identity, permits, arrived)

    def adopt(self, want: Want, claim: Claim, granted: Granted, unsure: bool, started: float) -> Holding | None:
        """A grant becomes a lease, and is looked after from now on. Returns None if the grant is over already: its time
        has passed, or the server said so while it was on its way.

        Only here is a lease made: one that is refused was never anybody's, and its lock never says that it is held.
        """
        with self.lock:
            self.check_open()
            waiting = self.monitor.waiting.get(claim.id)
            if waiting and waiting.is_contradicted(granted):
                return None
            granted = self.watchdog.sessions.as_known(claim, granted)
            until = validity.valid_until(granted.sent_at, granted.valid_for, granted.ttl)
            if self.now() >= validity.lost_at(until, granted.ttl):
                return None
            lease = self.held[claim.id] = want.make(self, want, claim, granted, unsure)
            lease._begin_work(want)
            lease._adopt()
            due = self.watchdog.adopt(lease)
        self.poke(due)
        if granted.ttl != want.ttl and not (granted.short or self._told_of_ttl):
            self._told_of_ttl = True
            logger.warning(
                "the lock %r has a ttl of %g s, where %g s were asked for: %s grants no other (said once a client)",
                claim.name,
                granted.ttl,
                want.ttl,
                self.scheme,
                extra=self.extra(lease),
            )
        if logger.wants(logging.DEBUG):
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
            if self.fence:  # the interrupt may have come before the lease was known here
                self.fence.lift(claim.id)

    def drop_waiters(self) -> None:
        """The event loop of all that wait was closed, and nothing there unwinds: the background does it for them.

        No acquire or release has begun on another loop yet.
        """
        self.gate.clear()
        waiting = self.monitor.waiting
        for claim_id in list(waiting):
            self.cancels.add(waiting.pop(claim_id).claim, None, unsure=True)
        for lease in list(self.held.values()):
            if lease._state == RELEASING:
                self.giving_back.go_on(lease)

    # The ticking thread

    def ready(self) -> None:
        """Before anything is sent that would have to be looked after. Raises BackendUnavailable."""
        if self.ticker is None and (refusal := self._start_ticker()):
            raise BackendUnavailable(f"the watchdog has no thread: {refusal}", unknown=False)

    def poke(self, at: float) -> None:
        """See to it that the ticking thread looks at ``at`` at the latest."""
        if self.ticker is None and (refusal := self._start_ticker()):
            logger.error("no thread for the watchdog: %s", refusal)  # what is planned waits for whoever pokes next
        if ticker := self.ticker:
            ticker.poke(at)

    def nudge(self) -> None:
        """Have the ticking thread look now, if there is one: who asks must start none."""
        if ticker := self.ticker:
            ticker.poke(self.now())

    def spawn(self, run: Callable[[], None], name: str) -> None:
        """Run it on a thread of its own, as soon as the process can have one."""
        self.runtime.spawn(run, name)
        if worker.is_any_missing():
            self.poke(self.now())  # somebody must keep time, and try again

    def _start_ticker(self) -> str | None:
        """Return why there is no thread for it. A client that has ended gets none, and does nothing more."""
        with self.lock:
            if self.ticker is None and not self.finished:
                ticker = self.ticker = self.runtime.ticker(self._step, self._watchdog_died, "multilock-watchdog")
                refusal: str | None = "its start was interrupted"
                try:
                    refusal = ticker.start()
                finally:  # an interrupt: its thread may have begun, and nobody would close it
                    if refusal is not None:
                        self.ticker = None
                        ticker.close()
                return refusal
            return None

    def _step(self) -> float:
        now = self.now()
        self.giving_back.step()
        following = min(self.watchdog.step(now), self.timers.step(now))
        return min(following, now + self.end.look_at_dropped()) if self.end.dropped else following

    def _watchdog_died(self, error: BaseException) -> None:
        self.died = True
        self.ticker = None  # what follows needs a clock; the client stays unhealthy
        try:
            self.monitor.lose_all(LossReason.WATCHDOG_DIED, f"the renewing thread ended: {type(error).__name__}")
        finally:
            logger.critical("the watchdog died; every lease of this client is lost", exc_info=error)

    def is_healthy(self) -> bool:
        ticker = self.ticker
        if self.closed or self.died or worker.is_any_missing():
            return False
        return ticker is None or ticker.late() <= self.settings.ttl / 10

    async def diagnose(self) -> list[Finding]:
        """What the backend finds about its server, after what this process finds about itself."""
        troubles = worker.troubles()
        if self.died:
            troubles.append("the watchdog of this client died of a defect, and every lease was lost with it")
        ours = [
            Finding("threads", "error", trouble, "raise the limit of threads, or report the defect that the log shows")
            for trouble in troubles
        ]
        return ours + self.pushes.findings() + await self.ask(self.backend.diagnose)

    # What a dashboard asks, at any moment and from any thread

    def held_names(self) -> list[str]:
        """Of what is held and proven to be; what is over by the clock is not."""
        now = self.now()
        return [lease.name for lease in list(self.held.values()) if lease._state == HELD and now < lease._lost_at]

    def waiting_names(self) -> list[str]:
        """Of the calls of acquire() that are under way."""
        asking = [one.claim.name for one in list(self.monitor.waiting.values()) if one.claim.id not in self.held]
        return asking + self.gate.behind()

    def watchdog_late(self) -> float:
        ticker = self.ticker
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
        if process.this_process[0] != process.OURS:
            process.notice_fork()
        if self.closed:
            if process.ends_with_the_interpreter():
                raise SystemExit  # which a thread ends with in silence
            raise self.closed_error()

    def closed_error(self) -> ClientClosed:
        return ClientClosed("this client is closed: make a new one with multilock.connect()", backend=self.scheme)

    # For messages

    @property
    def who(self) -> str:
        """What holds a lock of this client."""
        return "task" if self.face.asynchronous else "thread"

    def still_taken(self, name: str, timeout: float | None, by_itself: bool) -> LockTimeout:
        """``by_itself``: the thread or task that asks holds it."""
        remedy = "see who holds it with inspect(), or wait for it with a timeout"
        if by_itself:
            remedy = f"this {self.who} holds it itself: release it first, or make the lock with reentrant=True"
        elif timeout:
            remedy = "wait longer, or see who holds it with inspect()"
        return LockTimeout(
            f"lock {name!r} is {f'still taken after {timeout:g} s' if timeout else 'taken'}: {remedy}",
            name=name,
            backend=self.scheme,
        )

    def blocked_by_itself(self, want: Want, held: Holding) -> CapabilityMissing:
        """It would wait for itself, and two that read and want to write for each other."""
        verb, has = ("write", "read") if want.kind == "write" else ("read", "write")
        return CapabilityMissing(
            f"this {self.who} asks to {verb} {want.name!r}, of which it has a {has} lease, and neither is turned into "
            "the other: release that first, and look anew at what it protects",
            name=held.name,
            backend=self.scheme,
        )

    def warn_of_itself(self, name: str) -> None:
        logger.warning(
            "this %s waits for the lock %r, which it holds: make the lock with reentrant=True, or release it first",
            self.who,
            name,
            extra={"lock_name": name},
        )

    def not_held(self, name: str) -> NotHeld:
        """By who asks, through the lock that is asked."""
        return NotHeld(
            f"this {self.who} holds no lease of {name!r} through this lock: it was released, or taken elsewhere "
            f"(lease.release() works from any {self.who})",
            name=name,
            backend=self.scheme,
        )

    def none_current(self, name: str | None) -> NotHeld:
        """None of that name; None: none at all."""
        of = f" of {name!r}" if name else ""
        return NotHeld(f"this {self.who} holds no lease{of}", name=name, backend=self.scheme)

    def name_error(self, error: MultilockError, name: str | None) -> None:
        """As it leaves for the user: a backend of several servers does not know under which scheme it was opened."""
        error.name = error.name or name
        error.backend = self.scheme
        if error.__cause__ is not None:
            error.__cause__ = behind(error.__cause__)

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

    async def renew(self, lease: AnyHeld) -> None:
        """See ``Lease.renew``. Of several locks each is renewed, also after one that was not answered."""
        lease.check()
        parts: Sequence[Holding] = lease.leases
        errors: list[MultilockError] = []
        for part in parts:
            if not part.is_held():
                break
            try:
                await self._renew_one(part)
            except MultilockError as error:
                errors.append(error)
        lease.check()
        if errors:
            raise errors[0]

    async def _renew_one(self, lease: Holding) -> None:
        granted = lease._granted
        if not lease._claim.renew and self.watchdog.sessions.renews(granted.group):
            # Its session is proved all the time, so the proof tells nothing: its ttl counts anew from here.
            granted = granted._replace(sent_at=self.now())
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
