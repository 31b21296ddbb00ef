"""The one acquire loop of both faces: ask, wait for a wake-up or a timer, ask again.

It awaits two things only, "this request" and "wake me". asyncio awaits them; the blocking face drives the coroutine
over awaitables that never suspend. It awaits nothing while it unwinds: the claim goes to the background cancel.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from multilock.errors import BackendRejected, BackendUnavailable, ClientClosed, MultilockError, behind
from multilock.kernel import validity
from multilock.kernel.gate import SHORT, Line
from multilock.kernel.holding import Holding
from multilock.kernel.monitor import Waiting
from multilock.model import Busy, Claim, Granted
from multilock.telling import logger

if TYPE_CHECKING:
    from multilock.kernel.core import Kernel
    from multilock.kernel.runtime import Bell
    from multilock.kernel.scopes import Scope
    from multilock.kernel.want import Want

__all__ = ["Stop", "Stopped", "acquire"]

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0  # seconds between tries while the backend is silent


class Stop:
    """Calls off an acquire from another thread or task: it raises Stopped, and leaves nothing behind."""

    def __init__(self) -> None:
        self._called = False
        self.bell: Bell | None = None

    def called(self) -> bool:
        return self._called

    def call(self) -> None:
        self._called = True
        if self.bell:
            self.bell.ring()


class Stopped(Exception):
    """The acquire was called off."""


async def acquire(
    kernel: Kernel, want: Want, timeout: float | None, stop: Stop | None = None, scope: Scope[Any] | None = None
) -> Holding | None:
    """Hold ``want.name``, or None if it was still taken when ``timeout`` seconds were over. ``scope``: what who asks
    holds.

    Raises BackendUnavailable when the backend was silent for the whole outage_timeout, at the end of ``timeout``, or,
    with ``timeout=0``, once; BackendRejected and ClientClosed at once; CapabilityMissing, before it asks, where
    ``scope`` reads what it wants to write, or the other way round. Every way out leaves nothing behind.
    """
    if scope and (held := scope.blocks_itself(want)):
        raise kernel.blocked_by_itself(want, held)
    contender = _Contender(kernel, want, timeout, stop, scope)
    bell = contender.bell
    gate = None if timeout == 0 or want.queues else kernel.gate  # behind which one at a time talks to the server
    lease: Holding | None = None
    try:
        if contender.once and kernel.cancels.withdraws(want.name, bell):
            await contender.let_withdraw()
        line = gate.enter(want.name, bell) if gate else Line()
        if not gate or line.bells[0] is bell or await contender.stand_in(line):
            lease = await contender.contend(line)
        if gate:
            gate.leave(want.name, bell)
    except BaseException as error:  # an interrupt inside that leave() too: one who stays keeps out all behind him
        if gate:
            gate.leave(want.name, bell)
        if lease:
            kernel.giving_back.take_back(lease)
        if isinstance(error, MultilockError):
            kernel.name_error(error, want.name)
        if tell := kernel.events.tell:
            tell.not_acquired(want.name, _result_of(error), contender.started)
        raise
    if lease is None and (tell := kernel.events.tell):
        tell.not_acquired(want.name, "taken", contender.started)
    return lease


def _result_of(error: BaseException) -> str:
    known = ((BackendUnavailable, "unavailable"), (BackendRejected, "rejected"), (ClientClosed, "closed"))
    return next((result for kind, result in known if isinstance(error, kind)), "cancelled")


class _Contender:
    """One call of acquire()."""

    waiting_told = silence_told = False
    granted: Granted | None = None
    stands = False  # the present claim may stand in the backend's queue, or hold
    unsure = False  # some request of the present claim's id has no answer
    spent = 0.0  # seconds of the time for one request that are over before it

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
        """Of a single try: what this client withdraws from the same name must not cost it the name.

        That claim may stand before the try in the queue, or have been handed the name. Its answer has half of the time
        for one request, so that the try itself has the other half.
        """
        kernel, until = self.kernel, self.started + self.want.request_timeout / 2
        while kernel.cancels.withdraws(self.want.name, self.bell) and (left := until - kernel.now()) > 0:
            await self.bell.wait(left)
        self.spent = kernel.now() - self.started

    async def stand_in(self, line: Line) -> bool:
        """Wait for the first place at the gate; False at the deadline."""
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
                if line.unheard(self.started, now):  # by who is first, whose request is still under way
                    raise self._unavailable(BackendUnavailable("none since the wait began", unknown=False))
                return False
            # Silence may begin at any time: without one now, it cannot have lasted too long before this.
            look = patience_ends if line.silence else now + outage_timeout
            await self.bell.wait(min(self.deadline, look) - now)
        return True

    async def contend(self, line: Line) -> Holding | None:
        """Talk to the backend until it grants, the deadline passes, or it has been silent for too long."""
        kernel = self.kernel
        claim = self._claim()
        failures = 0
        try:
            while True:
                if self.waiting.gone:  # its node or key is gone, and an id that lost its place is never used again
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
                            self._heed_no_more(claim)
                            line.answered(kernel.now())
                            return lease
                        self._leave(claim, sure=False)  # an id whose time is over is never used again
                        claim = self._claim()
                        raise BackendUnavailable("its lease was over before the reply arrived")
                except BackendUnavailable as silence:
                    failures += 1
                    self._bear(line, sent_at, silence)
                    pause = self._pause(failures)
                else:
                    line.answered(kernel.now())
                    failures = 0
                    if answer.spent:
                        self._leave(claim)
                        claim = self._claim()
                    if self.once:
                        self._heed_no_more(claim)
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
        # Before the request that joins: no push is missed.
        self.waiting = self.kernel.monitor.waiting[claim.id] = Waiting(claim, self.bell)
        return claim

    def _pushed(self, claim: Claim) -> Granted | None:
        """What was pushed to the present claim. Looked at between two requests only, so that each of them was answered,
        or is known not to have been; where it is dropped, the next one asks for the same."""
        granted, self.waiting.granted = self.waiting.granted, None
        if granted is None or not claim.renew:
            return None
        self._check_wanted()
        self.kernel.ready()
        now = self.kernel.now()
        longest = max(claim.ttl, self.kernel.watchdog.sessions.ttl(granted.group))
        if granted.sent_at > now or granted.valid_for > longest:  # forged: whoever may publish can say anything
            return None
        if validity.half_over(now, granted.sent_at, granted.valid_for):
            return None
        self.stands, self.granted = True, granted
        return granted

    async def _attempt(self, claim: Claim) -> Granted | Busy:
        kernel = self.kernel
        self._check_wanted()
        within = self.within = self._within()
        unsure, self.unsure = self.unsure, True  # whatever interrupts us here: the request may be executed
        try:
            kernel.ready()
            answer = await self.face.attempt(claim, not self.once, within)
        except (BackendUnavailable, BackendRejected) as error:
            self.unsure = unsure or error.unknown
            raise
        if isinstance(answer, Granted):
            self.stands, self.granted = True, answer
        else:
            self.stands, self.granted = not self.once, None
            unsure |= answer.spent
        self.unsure = unsure  # last: an interrupt before this finds a claim that is to be cancelled
        return answer

    def _within(self) -> float:
        """Seconds for one request, not past the caller's timeout."""
        within = self.want.request_timeout
        if self.once:
            return max(within - self.spent, within / 3)
        if self.deadline is math.inf:
            return within
        return max(min(within, self.deadline - self.kernel.now()), 0.001)

    async def _renewed(self, claim: Claim, granted: Granted) -> Granted | None:
        """A newer proof than one that is half over; that one where there is no answer; None: it is not ours."""
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
        """Hand the claim to the background cancel, unless nothing of it can be at the backend."""
        if self.stands or self.unsure:
            self.kernel.cancels.add(claim, self.granted, self.unsure or not sure)
        self._heed_no_more(claim)  # not before: close() waits for those in it

    def _heed_no_more(self, claim: Claim) -> None:
        """Where an interrupt still gives the claim back: never in a ``finally`` after the lease was made."""
        self.kernel.monitor.waiting.pop(claim.id, None)

    # Silence and waiting

    def _bear(self, line: Line, sent_at: float, silence: BackendUnavailable) -> None:
        """Go on after an unanswered request, or raise."""
        if self.once:
            raise self._unavailable(silence) from behind(silence)
        if self.within >= SHORT or line.unheard(self.started, sent_at):
            line.unanswered(sent_at, silence)
        if not self.silence_told:
            self.silence_told = True
            logger.warning(
                "waiting for the lock %r: %s is silent: %s",
                self.want.name,
                self.kernel.scheme,
                silence,
                extra={"lock_name": self.want.name},
            )
        if self.kernel.now() >= line.patience_ends(self.started, self.want.outage_timeout):
            raise self._unavailable(silence) from behind(silence)

    def _unavailable(self, silence: BackendUnavailable) -> BackendUnavailable:
        undone = "; what may have been taken is being given back" if self.stands or self.unsure else ""
        return BackendUnavailable(
            f"lock {self.want.name!r}: no answer from {self.kernel.scheme} ({silence}){undone}",
            unknown=silence.unknown,
            name=self.want.name,
            backend=self.kernel.scheme,
        )

    def _pause(self, failures: int) -> float:
        pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(failures, 10))
        return pause * self.kernel.runtime.uniform(0.5, 1.0)

    def _look_again_in(self, busy: Busy) -> float:
        heartbeat = busy.heartbeat * self.kernel.runtime.uniform(0.9, 1.1)
        return heartbeat if busy.expires_in is None else min(heartbeat, busy.expires_in)

    def _tell_waiting(self, claim: Claim | None) -> None:
        if self.waiting_told:
            return
        self.waiting_told = True
        kernel = self.kernel
        if self.scope and self.scope.keeps_out(self.want):
            kernel.warn_of_itself(self.want.name)
        logger.debug("waiting for the lock %r", self.want.name, extra={"lock_name": self.want.name})
        if tell := kernel.events.tell:
            tell.waiting(self.want.name, claim.owner if claim else None)
