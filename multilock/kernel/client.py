"""`Kernel`: the part of a client that is the same for the blocking and the asyncio API (the two faces). The kernel has
the leases, the watchdog and the backend of the client.

A lease passes through `Kernel.claim`, the loop in `multilock.kernel.acquire`, `Kernel.adopt`, renewals by the watchdog,
and then `Releases.release` or `Losses.lose`. State changes happen under `Kernel.lock`, which is never held during a
request or a callback. The ticking thread is the thread of a client that watches deadlines and runs timers, in short
steps.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Coroutine, Hashable, Iterable, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from multilock import system
from multilock.errors import (
    BackendUnavailable,
    ClientClosed,
    ConfigurationError,
    MultilockError,
    behind,
)
from multilock.identity import default_identity
from multilock.kernel import fork, living_clients, validity, worker
from multilock.kernel.background_cancel import Cancels
from multilock.kernel.callbacks import check_callback
from multilock.kernel.closing import End
from multilock.kernel.exit import ends_with_the_interpreter
from multilock.kernel.hard_fence import Fence
from multilock.kernel.holding import HELD, RELEASING, AnyHeld, Holding
from multilock.kernel.leader_changes import Followers
from multilock.kernel.local_queue import Gate
from multilock.kernel.losses import Losses
from multilock.kernel.messages import Messages, advised
from multilock.kernel.notices import Monitor
from multilock.kernel.push_outages import Pushes
from multilock.kernel.release import Releases
from multilock.kernel.subscribers import Events
from multilock.kernel.timers import Timers
from multilock.kernel.watchdog import Watchdog
from multilock.log_thread import logger
from multilock.model import Claim, Finding, Granted, LockInfo, LossReason, owner_text

if TYPE_CHECKING:
    from multilock.backend import Backend
    from multilock.kernel.blocking import Face
    from multilock.kernel.closing import Ending
    from multilock.kernel.lock_options import Want
    from multilock.kernel.runtime import Runtime
    from multilock.kernel.ticking_thread import Ticker

__all__ = ["Kernel", "KernelSettings"]

R = TypeVar("R")
PAGE = 100  # locks listed by one call to the backend
PAGE_WITHIN = 60.0  # seconds that the call for one page may take; it may send many requests, each with its own limit


class KernelSettings(Protocol):
    """The fields of `multilock.config.Settings` that the kernel reads."""

    @property
    def ttl(self) -> float:
        """The default ttl in seconds."""

    @property
    def prefix(self) -> str:
        """The prefix of every key."""

    @property
    def identity(self) -> str | None:
        """The identity, or None for host and pid."""

    @property
    def outage_timeout(self) -> float | None:
        """Seconds of outage after which a wait fails, or None for no limit."""

    @property
    def request_timeout(self) -> float | None:
        """Seconds for one request, or None for a fifth of the ttl."""


class Candidate(Protocol):
    """The members of an election that the kernel uses."""

    @property
    def name(self) -> str:
        """The name of the election."""

    def is_leader(self) -> bool:
        """Return whether this node leads."""

    def _stands(self) -> bool: ...
    def _forked(self) -> None: ...


class Kernel:
    """The state and the parts of one client."""

    def __init__(
        self,
        backend: Backend,
        settings: KernelSettings,
        runtime: Runtime,
        make_face: Callable[[Kernel], Face],
    ) -> None:
        if late := system.patched_late():
            raise ConfigurationError(
                f"{late} patched this interpreter after multilock was imported, so a waiting greenlet would stop all "
                "others: patch before the first `import multilock`",
                backend=backend.scheme,
            )
        self.backend = backend
        self.settings = settings
        self.runtime = runtime
        self.now = runtime.now
        self.scheme = backend.scheme
        self.push_loss = backend.capabilities.push_loss
        self.closed = False  # no new work begins
        self.finished = False  # all work has ended
        self.died = False  # whether the watchdog thread died at least once
        self._told_of_ttl = False  # whether the log has the warning that another ttl was granted
        self._make_face = make_face
        self.closers: dict[Callable[[], Ending], None] = {}  # active elections, which close() ends first
        self.elections: weakref.WeakSet[Candidate] = weakref.WeakSet()
        # Leases that are not in `held`: lost leases, and leases of several locks. A forked child resets them too.
        self.apart: weakref.WeakSet[AnyHeld] = weakref.WeakSet()
        self.events = Events(self.check_callback, self.now)
        self.end = End(self)
        self.start()
        living_clients.register(self)

    def start(self) -> None:
        """Create the parts of the kernel. A forked child calls this again, because the child uses no part of its
        parent."""
        self.lock = system.RLock()  # reentrant, because a finalizer may run while its thread holds the lock
        self.held: dict[str, Holding] = {}
        self.ticker: Ticker | None = None
        self.fence: Fence | None = None  # made by the first lease with hard_fence=True
        # Shifts this client's renewals, so that clients do not renew at the same time: see `validity.renew_at`.
        self.phase = self.runtime.uniform(0.0, 1.0)
        self.identity = self.settings.identity or default_identity()
        self._host, self._pid = system.host(), system.pid()
        self.client = system.urandom(8).hex()
        self.timers = Timers(self.poke)
        self.face = self._make_face(self)
        self.callbacks = self.face.callbacks
        self.events.begin(self.callbacks)
        self.messages = Messages(self.scheme, asynchronous=self.face.asynchronous)
        self.watchdog = Watchdog(self)
        self.losses = Losses(self)
        self.monitor = Monitor(self, self.client)
        self.releases = Releases(self)
        self.cancels = Cancels(self)
        self.followers = Followers(self)
        self.pushes = Pushes(self)
        self.gate = Gate()
        self.backend.open(self.monitor)

    def check_callback(self, what: str, callback: object) -> None:
        """Raise TypeError if this client could not call ``callback``."""
        check_callback(what, callback, asynchronous=self.face.asynchronous)

    def request_timeout(self, ttl: float | None = None) -> float:
        """Return the timeout of one request in seconds, for a lease with this ``ttl`` or for the client."""
        return validity.request_timeout(self.settings.request_timeout, self.settings.ttl if ttl is None else ttl)

    def hard_fence(self) -> Fence:
        """Return the hard fence of this client: the timer that kills this process when the validity of a lease ends.
        Raises ClientClosed. Raises CapabilityMissing if a hard fence cannot work on this system."""
        if fence := self.fence:
            return fence
        # The fence is made before the lock is taken, because the first fence loads a library, which takes long.
        fence = Fence(self.runtime.killer())
        with self.lock:
            if self.fence is None and not self.closed:
                self.fence = fence
                return fence
        fence.close()
        self.check_open()
        return self.hard_fence()

    def lift_fences(self) -> None:
        """End the hard fence of every lease, because the client ends."""
        with self.lock:
            fence, self.fence = self.fence, None
        if fence:
            fence.close()

    # The life of a lease

    def claim(self, want: Want, arrived: int) -> Claim:
        """Make a new claim for an acquire() that was called at ``arrived``."""
        claim_id = f"{self.client}.{system.urandom(16).hex()}"
        identity = want.identity or self.identity
        owner = owner_text(claim_id, want.kind, self._host, self._pid, identity, want.grant)
        name, kind, permits = want.name, want.kind, want.permits
        return Claim(name, kind, claim_id, owner, want.grant, want.renew, want.fair, identity, permits, arrived)

    def adopt(self, want: Want, claim: Claim, granted: Granted, unsure: bool, started: float) -> Holding | None:
        """Make a lease from a grant. The watchdog renews the lease from now on.

        Returns None if the grant is already over: it has expired, or the server has revoked it while the reply was on
        its way. Leases are made only here, so a refused grant never shows as held.
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
                "the lock %r got a ttl of %g s instead of the requested %g s, because %s grants no other (logged once "
                "for each client)",
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
        """Stop renewing and watching the lease. The caller holds the kernel's lock."""
        self.held.pop(lease.claim.id, None)
        self.watchdog.drop(lease)

    def leases_of(self, group: Hashable) -> list[Holding]:
        """Return the leases that one request renews together: those of one server or session."""
        return [lease for lease in list(self.held.values()) if lease.granted.group == group]

    def abandon(self, claim: Claim) -> None:
        """Drop the lease of this claim, if there is one. The acquire was interrupted before the caller had the
        lease."""
        with self.lock:
            if lease := self.held.get(claim.id):
                self.forget(lease)
                lease._abandon()
            if self.fence:  # the interrupt may have come before the lease was in `held`
                self.fence.lift(claim.id)

    def drop_waiters(self) -> None:
        """Cancel the claims of all waiters in the background, because their event loop was closed.

        Coroutines of a closed loop never run again. Call this before any acquire or release begins on another loop.
        """
        self.gate.clear()
        self.cancel_waiters(list(self.monitor.waiting))
        for lease in list(self.held.values()):
            if lease.stage == RELEASING:
                self.releases.go_on(lease)

    def cancel_waiters(self, claim_ids: Iterable[str]) -> None:
        for claim_id in claim_ids:
            if waiting := self.monitor.waiting.pop(claim_id, None):
                self.cancels.add(waiting.claim, None, unsure=True)

    # The ticking thread

    def ready(self) -> None:
        """Make sure that the watchdog has a thread. The kernel calls this before a request whose grant would need
        renewals.

        Raises BackendUnavailable if the operating system refuses the thread.
        """
        if self.ticker is None and (refusal := self._start_ticker()):
            raise BackendUnavailable(f"no thread for the watchdog: {refusal}", unknown=False)

    def poke(self, at: float) -> None:
        """Make the ticking thread run its next step no later than ``at``."""
        if self.ticker is None and (refusal := self._start_ticker()):
            # Without a thread, the planned work waits for the next call of `poke`.
            logger.error("no thread for the watchdog: %s", refusal)
        if ticker := self.ticker:
            ticker.poke(at)

    def nudge(self) -> None:
        """Make the ticking thread run a step now. If the client has no ticking thread, do nothing, because the
        caller must not start a thread."""
        if ticker := self.ticker:
            ticker.poke(self.now())

    def spawn(self, run: Callable[[], None], name: str) -> None:
        """Run ``run()`` on a new thread, as soon as the operating system grants one. A refusal raises nothing."""
        self.runtime.spawn(run, name)
        if worker.is_any_missing():
            self.poke(self.now())  # the ticking thread tries again

    def starts_threads(self) -> bool:
        """Return False if a thread was refused and no ticking thread will try again. Then the caller must call this
        again.

        Each call tries to start the missing threads.
        """
        return not (worker.is_any_missing() and worker.try_again()) or bool(worker.helpers)

    def _start_ticker(self) -> str | None:
        """Start the ticking thread if needed. Returns the reason if the operating system refuses it, otherwise None.

        If the client has ended, no thread is started, and the result is None too.
        """
        with self.lock:
            if self.ticker is None and not self.finished:
                ticker = self.ticker = self.runtime.ticker(self._step, self._watchdog_died, "multilock-watchdog")
                refusal: str | None = "its start was interrupted"
                try:
                    refusal = ticker.start()
                finally:  # after an interrupt the thread may run, and nothing else would end it
                    if refusal is not None:
                        self.ticker = None
                        ticker.close()
                return refusal
            return None

    def _step(self) -> float:
        now = self.now()
        self.releases.step()
        self.cancels.step()
        self.cancel_waiters(self.face.abandoned())
        following = min(self.watchdog.step(now), self.timers.step(now))
        return min(following, now + self.end.look_at_dropped()) if self.end.dropped else following

    def _watchdog_died(self, error: BaseException) -> None:
        self.died = True
        # The ticking thread is forgotten, so that the reports of the losses can start a new one. `is_healthy` stays
        # False because of `died`.
        self.ticker = None
        try:
            self.losses.lose_all(LossReason.WATCHDOG_DIED, f"the renewing thread ended: {type(error).__name__}")
        finally:
            logger.critical("the watchdog died; every lease of this client is lost", exc_info=error)

    def is_healthy(self) -> bool:
        """Return whether renewals run on time and no thread is missing."""
        ticker = self.ticker
        if self.closed or self.died or worker.is_any_missing():
            return False
        return ticker is None or ticker.late() <= self.settings.ttl / 10

    async def diagnose(self) -> list[Finding]:
        """Return findings about the threads of this process, then about push connections, then about the server."""
        troubles = worker.troubles()
        if self.died:
            troubles.append("the watchdog of this client died of a defect, and every lease was lost with it")
        ours = [
            Finding("threads", "error", trouble, "raise the limit of threads, or report the defect that the log shows")
            for trouble in troubles
        ]
        return ours + self.pushes.findings() + await self.ask(self.backend.diagnose)

    # Numbers for a dashboard, available at any moment and from any thread

    def held_names(self) -> list[str]:
        """Return the names of the leases that are held and not expired by the clock."""
        now = self.now()
        return [lease.name for lease in list(self.held.values()) if lease.stage == HELD and now < lease.lost_at]

    def waiting_names(self) -> list[str]:
        """Return the name of the lock for each acquire() that is under way."""
        asking = [one.claim.name for one in list(self.monitor.waiting.values()) if one.claim.id not in self.held]
        return asking + self.gate.behind()

    def watchdog_late(self) -> float:
        """Return by how many seconds the watchdog is overdue, inf if it died."""
        ticker = self.ticker
        return math.inf if self.died else ticker.late() if ticker else 0.0

    def add_election(self, election: Candidate) -> None:
        """Keep a weak reference to an election, for dashboards and for a forked child."""
        with self.lock:
            self.elections.add(election)

    def candidacies(self) -> list[tuple[str, bool]]:
        """Return the elections in which this client is a candidate, each with whether this client leads."""
        with self.lock:  # a WeakSet must not change while it is iterated
            elections = list(self.elections)
        standing = [election for election in elections if election._stands()]
        return [(election.name, election.is_leader()) for election in standing]

    # The end

    def check_open(self) -> None:
        """Raise ClientClosed if the client is closed. If a user's daemon thread calls this while the interpreter exits,
        it raises SystemExit instead."""
        if fork.this_process[0] != fork.OURS:
            fork.notice_fork()
        if self.closed:
            if ends_with_the_interpreter():
                raise SystemExit  # ends a thread without a traceback
            raise self.closed_error()

    def closed_error(self) -> ClientClosed:
        """Return the error of a call after close()."""
        return ClientClosed("this client is closed: make a new one with multilock.connect()", backend=self.scheme)

    # Names that messages show

    def name_error(self, error: MultilockError, name: str | None) -> None:
        """Add the lock's name, the client's scheme and advice to an error before the user gets it.

        A backend of several servers does not know the scheme under which it was opened.
        """
        error.name = error.name or name
        error.backend = self.scheme
        if isinstance(error, BackendUnavailable):
            error.args = (advised(str(error)),)
        if error.__cause__ is not None:
            error.__cause__ = behind(error.__cause__)

    def extra(self, lease: Holding) -> dict[str, Any]:
        """Return the ``extra`` of a log line about this lease."""
        return {"lock_name": lease.name, "lock_owner": lease.owner, "lock_token": lease.token}

    # Single requests to the backend

    async def ask(self, call: Callable[..., R], *args: Any, name: str | None = None, within: float | None = None) -> R:
        """Call ``call(*args, within)`` once, and return its result."""
        try:
            self.check_open()
            return await self.face.ask(self.request_timeout() if within is None else within, call, *args)
        except MultilockError as error:
            self.name_error(error, name)
            raise

    async def pages(self, prefix: str) -> Callable[[], Coroutine[Any, Any, list[LockInfo]]]:
        """Return a function that lists the held locks whose names begin with ``prefix``. Each call of that function
        returns the next locks, and [] after the last lock."""
        iterator = await self.ask(partial(self.backend.inspect_all, prefix))

        async def page() -> list[LockInfo]:
            return await self.ask(lambda _: list(islice(iterator, PAGE)), within=PAGE_WITHIN)

        return page

    async def renew(self, lease: AnyHeld) -> None:
        """Renew a lease now: see ``Lease.renew``. If one of several locks gets no answer, the other locks are renewed
        all the same."""
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
        granted = lease.granted
        if not lease.claim.renew and self.watchdog.sessions.renews(granted.group):
            # The watchdog renews this session in any case. Those renewals must not extend a lease with renew=False, but
            # this renewal by hand must. So the ttl of the lease counts from now.
            granted = granted._replace(sent_at=self.now())
        within = min(self.request_timeout(granted.ttl), lease.lost_at - self.now())
        try:
            [answer] = await self.face.ask(within, self.backend.renew, granted.group, [(lease.claim, granted)])
            if isinstance(answer, BackendUnavailable):
                raise answer
        except MultilockError as error:
            self.watchdog.unanswered([lease], error)
            self.name_error(error, lease.name)
            raise
        self.watchdog.settle(lease, answer)
