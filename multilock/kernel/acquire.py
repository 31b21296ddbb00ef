"""The acquire loop, the same for both faces (the blocking and the asyncio API).

The loop sends a request, waits for a wake-up or a timer, and sends the next request. A claim is the demand of one
caller for one name, and every request of the loop names it. The gate lets only one of several waiters of this client
send requests for a name, unless they wait in the server's own queue (`multilock.kernel.local_queue`).

The loop awaits only requests and wake-ups. With asyncio these suspend. The blocking face drives the same coroutine over
awaitables that block the thread and never suspend. Nothing is awaited while an error unwinds the loop: the claim is
handed to the background cancel instead.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from multilock.errors import BackendRejected, BackendUnavailable, ClientClosed, MultilockError, behind
from multilock.kernel import validity
from multilock.kernel.blocking import NOT_SENT, NotAsked
from multilock.kernel.holding import Holding
from multilock.kernel.inside_backend import check_outside
from multilock.kernel.local_queue import SHORT, Line
from multilock.kernel.messages import advised
from multilock.kernel.notices import UngrantedClaim
from multilock.log_thread import logger
from multilock.model import Busy, Claim, Granted
from multilock.timing import JITTER, retry_pause

if TYPE_CHECKING:
    from multilock.kernel.client import Kernel
    from multilock.kernel.lock_options import Want
    from multilock.kernel.runtime import Bell
    from multilock.kernel.scopes import Scope

__all__ = ["Stop", "Stopped", "acquire"]


class Stop:
    """A switch by which another thread or task cancels an acquire. The acquire then raises Stopped and leaves no claim
    behind."""

    def __init__(self) -> None:
        self._called = False
        self.bell: Bell | None = None

    def called(self) -> bool:
        """Return whether `call` was called."""
        return self._called

    def call(self) -> None:
        """Cancel the acquire. Any thread may do this, at any time."""
        self._called = True
        if self.bell:
            self.bell.ring()


class Stopped(Exception):
    """The acquire was cancelled through its `Stop`."""


async def acquire(
    kernel: Kernel, want: Want, timeout: float | None, stop: Stop | None = None, scope: Scope[Any] | None = None
) -> Holding | None:
    """Acquire ``want.name``. Returns None if the name was still taken after ``timeout`` seconds.

    ``scope`` holds the leases of the calling thread or task. Raises BackendUnavailable if the backend did not answer
    for the whole outage_timeout, or did not answer when ``timeout`` ended. With ``timeout=0``, one request without an
    answer is enough for this error. Raises BackendRejected and ClientClosed at once. Raises CapabilityMissing before
    any request if the caller holds the name as a reader and wants to write, or as a writer and wants to read. Whatever
    happens, no claim is left behind at the backend.
    """
    check_outside()
    if scope and (held := scope.blocks_itself(want)):
        raise kernel.messages.blocked_by_itself(want, held)
    contender = _Contender(kernel, want, timeout, stop, scope)
    bell = contender.bell
    gate = None if timeout == 0 or want.queues else kernel.gate
    lease: Holding | None = None
    try:
        if contender.once and kernel.cancels.withdraws(want.name, bell):
            await contender.let_withdraw()
        line = gate.enter(want.name, bell) if gate else Line()
        if not gate or line.bells[0] is bell or await contender.stand_in(line):
            lease = await contender.contend(line)
        if gate:
            gate.leave(want.name, bell)
    # An interrupt in leave() above also leads here. A waiter left in the gate would block the waiters behind it.
    except BaseException as error:
        if gate:
            gate.leave(want.name, bell)
        if lease:
            kernel.releases.take_back(lease)
        if isinstance(error, MultilockError):
            kernel.name_error(error, want.name)
        if tell := kernel.events.tell:
            tell.not_acquired(want.name, _result_of(error), contender.started)
        raise
    if lease is None and (tell := kernel.events.tell):
        tell.not_acquired(want.name, "taken", contender.started)
    return lease


def _result_of(error: BaseException) -> str:
    """Return the ``result`` of the event NotAcquired."""
    known = ((BackendUnavailable, "unavailable"), (BackendRejected, "rejected"), (ClientClosed, "closed"))
    return next((result for kind, result in known if isinstance(error, kind)), "cancelled")


class _Contender:
    """One call of acquire(), with the claim that it sends at present."""

    waiting_told = silence_told = False
    granted: Granted | None = None
    stands = False  # whether the present claim may be in the backend's queue, or hold the name
    unsure = False  # whether some request with the present claim's id has no answer
    spent = 0.0  # seconds of the request timeout that `let_withdraw` has used up
    refused_at = -math.inf  # when the newest refused request of the present claim was sent

    def __init__(
        self, kernel: Kernel, want: Want, timeout: float | None, stop: Stop | None, scope: Scope[Any] | None
    ) -> None:
        self.kernel = kernel
        self.face = kernel.face
        self.want = want
        self.once = timeout == 0
        self.bell = kernel.face.bell()
        self.stop = stop
        self.scope = scope
        if stop:
            stop.bell = self.bell
        self.started = kernel.now()
        self.arrived = kernel.runtime.wall()
        self.deadline = math.inf if timeout is None else self.started + timeout

    async def let_withdraw(self) -> None:
        """Before a single try (``timeout=0``), wait until the backend has answered this client's own cancels of the
        same name.

        A claim whose cancel is not answered yet may be ahead in the queue or hold the name, so that the try would fail.
        The wait takes at most half of the request timeout, and leaves the other half to the try.
        """
        kernel, until = self.kernel, self.started + self.want.request_timeout / 2
        while kernel.cancels.withdraws(self.want.name, self.bell) and (left := until - kernel.now()) > 0:
            await self.bell.wait(left)
        self.spent = kernel.now() - self.started

    async def stand_in(self, line: Line) -> bool:
        """Wait until this waiter is the first in the gate (see `multilock.kernel.local_queue`). Returns False at the
        deadline."""
        kernel = self.kernel
        outage_timeout = self.want.outage_timeout
        self._tell_waiting(None)
        while line.bells[0] is not self.bell:
            self._check_wanted()
            now = kernel.now()
            patience_ends = line.patience_ends(self.started, outage_timeout)
            if line.silence and (now >= patience_ends or now >= self.deadline):
                raise self._unavailable(line.silence) from behind(line.silence)
            if now >= self.deadline:
                if line.unheard(self.started, now):  # the request of the first waiter is still under way
                    raise self._unavailable(BackendUnavailable("none since the wait began", unknown=False))
                return False
            # Sleep until an outage may have lasted too long for this waiter. If there is no outage now, no outage
            # can have lasted too long before one ``outage_timeout`` is over.
            look = patience_ends if line.silence else now + outage_timeout
            await self.bell.wait(min(self.deadline, look) - now)
        return True

    async def contend(self, line: Line) -> Holding | None:
        """Send requests until the backend grants the name, the deadline passes, or the outage lasts too long."""
        kernel = self.kernel
        claim = self._claim()
        failures = 0
        try:
            while True:
                if self.waiting.gone:  # the server dropped the claim, and an id that was dropped is never used again
                    self._leave(claim, sure=False)
                    claim = self._claim()
                sent_at = line.asked_at = kernel.now()
                try:
                    answer = self._pushed(claim) or await self._attempt(claim)
                    if isinstance(answer, Granted):
                        granted: Granted | None = answer
                        if claim.renew and validity.half_over(kernel.now(), answer.sent_at, answer.valid_for):
                            granted = await self._renewed(claim, answer)
                        if granted and (lease := kernel.adopt(self.want, claim, granted, self.unsure, self.started)):
                            self._stop_listening(claim)
                            line.answered(kernel.now())
                            return lease
                        self._leave(claim, sure=False)  # an id whose lease has expired is never used again
                        claim = self._claim()
                        raise BackendUnavailable("the lease was over before the reply arrived")
                except BackendUnavailable as silence:
                    failures += 1
                    self._bear(line, sent_at, silence)
                    pause = self._pause(failures)
                else:
                    failures = 0
                    if not isinstance(answer, NotAsked):
                        self.refused_at = sent_at
                    if self.refused_at > -math.inf:
                        line.answered(kernel.now())
                    else:
                        line.not_asked(BackendUnavailable(NOT_SENT, unknown=False))
                    if answer.spent:
                        self._leave(claim)
                        claim = self._claim()
                    if self.once:
                        self._stop_listening(claim)
                        return None
                    self._tell_waiting(claim)
                    pause = self._look_again_in(answer)
                if (rest := self.deadline - kernel.now()) > 0:
                    await self.bell.wait(min(pause, rest))
                if kernel.now() >= self.deadline:
                    if line.silence:
                        raise self._unavailable(line.silence) from behind(line.silence)
                    self._leave(claim)
                    return None
        except BaseException as error:
            kernel.abandon(claim)
            self._leave(claim)
            if isinstance(error, MultilockError):
                kernel.name_error(error, self.want.name)
            raise

    def _check_wanted(self) -> None:
        self.kernel.check_open()
        if self.stop and self.stop.called():
            raise Stopped

    # The present claim

    def _claim(self) -> Claim:
        claim = self.kernel.claim(self.want, self.arrived)
        self.granted = None
        self.stands = self.unsure = False
        self.refused_at = -math.inf
        # The claim is registered before it joins the queue, so that no push is missed.
        self.waiting = self.kernel.monitor.waiting[claim.id] = UngrantedClaim(claim, self.bell)
        return claim

    def _pushed(self, claim: Claim) -> Granted | None:
        """Return the grant that the server pushed to this claim. Returns None if there is none, or if it cannot be
        trusted.

        Pushed grants are read only between two requests, so that the outcome of each request is known. A dropped grant
        is not lost: the next request asks the server for it again.
        """
        granted, self.waiting.granted = self.waiting.granted, None
        if granted is None or not claim.renew:
            return None
        self._check_wanted()
        self.kernel.ready()
        now = self.kernel.now()
        longest = max(claim.ttl, self.kernel.watchdog.sessions.ttl(granted.group))
        # A grant from the future, or one that is valid for too long, is forged: any client with the right to publish
        # can send such a grant.
        if granted.sent_at > now or granted.valid_for > longest:
            return None
        if validity.half_over(now, granted.sent_at, granted.valid_for):
            return None
        # The server has refused a request that was sent after the request of this grant. So an operator has released
        # the name since, and another claim may hold it.
        if granted.short and granted.sent_at < self.refused_at:
            return None
        self.stands, self.granted = True, granted
        return granted

    async def _attempt(self, claim: Claim) -> Granted | Busy:
        kernel = self.kernel
        self._check_wanted()
        within = self.within = self._within()
        unsure, self.unsure = self.unsure, True  # after an interrupt, the server may still execute the request
        try:
            kernel.ready()
            answer = await self.face.attempt(claim, not self.once, within)
        except (BackendUnavailable, BackendRejected) as error:
            self.unsure = unsure or error.unknown
            raise
        if isinstance(answer, Granted):
            self.stands, self.granted = True, answer
        elif not isinstance(answer, NotAsked):
            self.stands, self.granted = not self.once, None
            unsure |= answer.spent
        self.unsure = unsure  # set last: after an interrupt before this line, the claim is cancelled
        return answer

    def _within(self) -> float:
        """Return the timeout of the next request in seconds, which does not exceed the caller's timeout."""
        within = self.want.request_timeout
        if self.once:
            return max(within - self.spent, within / 3)
        if self.deadline is math.inf:
            return within
        return max(min(within, self.deadline - self.kernel.now()), 0.001)

    async def _renewed(self, claim: Claim, granted: Granted) -> Granted | None:
        """Renew a grant that has used up half of its time, before the caller gets its lease.

        Returns the newer grant, or ``granted`` if the renewal is not answered. Returns None if the claim does not hold
        the name.
        """
        kernel = self.kernel
        until = validity.valid_until(granted.sent_at, granted.valid_for, granted.ttl)
        left = validity.lost_at(until, granted.ttl) - kernel.now()
        if left <= 0:
            return None
        unsure, self.unsure = self.unsure, True
        try:
            within = min(self._within(), left)
            [newer] = await self.face.ask(within, kernel.backend.renew, granted.group, [(claim, granted)])
            if isinstance(newer, BackendUnavailable):
                raise newer
        except BackendUnavailable as silence:
            self.unsure = unsure or silence.unknown
            return granted
        self.unsure = unsure
        if newer is not None:
            self.granted = newer
        return newer

    def _leave(self, claim: Claim, *, sure: bool = True) -> None:
        """Hand the claim to the background cancel, unless the backend certainly keeps nothing of the claim."""
        if self.stands or self.unsure:
            self.kernel.cancels.add(claim, self.granted, self.unsure or not sure)
        self._stop_listening(claim)  # called last, because close() waits for all claims in `waiting`

    def _stop_listening(self, claim: Claim) -> None:
        """Remove the claim from the waiting claims, so that no notice reaches it any longer.

        Call this only where an interrupt would still release the claim: not in a ``finally`` after the lease was made.
        """
        self.kernel.monitor.waiting.pop(claim.id, None)

    # Silence and waiting

    def _bear(self, line: Line, sent_at: float, silence: BackendUnavailable) -> None:
        """Decide after an unanswered request: return to try again, or raise BackendUnavailable."""
        if self.once:
            raise self._unavailable(silence) from behind(silence)
        if self.within >= SHORT or line.unheard(self.started, sent_at):
            line.unanswered(sent_at, silence)
        if not self.silence_told:
            self.silence_told = True
            logger.warning(
                "waiting for the lock %r: %s does not answer (%s)",
                self.want.name,
                self.kernel.scheme,
                advised(str(silence)),
                extra={"lock_name": self.want.name},
            )
        if self.kernel.now() >= line.patience_ends(self.started, self.want.outage_timeout):
            raise self._unavailable(silence) from behind(silence)

    def _unavailable(self, silence: BackendUnavailable) -> BackendUnavailable:
        undone = "; what may have been taken is being released" if self.stands or self.unsure else ""
        return BackendUnavailable(
            f"lock {self.want.name!r}: no answer from {self.kernel.scheme} ({silence}){undone}",
            unknown=silence.unknown,
            name=self.want.name,
            backend=self.kernel.scheme,
        )

    def _pause(self, failures: int) -> float:
        return retry_pause(failures) * self.kernel.runtime.uniform(0.5, 1.0)

    def _look_again_in(self, busy: Busy) -> float:
        heartbeat = busy.heartbeat * self.kernel.runtime.uniform(1 - JITTER, 1 + JITTER)
        return heartbeat if busy.expires_in is None else min(heartbeat, busy.expires_in)

    def _tell_waiting(self, claim: Claim | None) -> None:
        if self.waiting_told:
            return
        self.waiting_told = True
        kernel = self.kernel
        if self.scope and self.scope.keeps_out(self.want):
            kernel.messages.warn_of_itself(self.want.name)
        kernel.messages.warn_of_stopped_loop(self.want.name)
        logger.debug("waiting for the lock %r", self.want.name, extra={"lock_name": self.want.name})
        if tell := kernel.events.tell:
            tell.waiting(self.want.name, claim.owner if claim else None)
