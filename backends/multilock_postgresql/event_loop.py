"""A connection to PostgreSQL for an event loop. The loop waits for replies without a thread."""

from __future__ import annotations

from collections.abc import Callable

from multilock.backend import Busy, Claim, Granted, Returned
from multilock.timing import REQUEST_TIMEOUT_MAX, REQUESTS, heartbeat
from multilock_postgresql.acquire_release import Recipe
from multilock_postgresql.notices import Listener
from multilock_postgresql.transactions import StepQueries
from multilock_postgresql.transport import AT_REST, PgWire, patience
from multilock_postgresql.wire import LockWait, NotReadCommitted, NotThere, Row

__all__ = ["Channel"]


class Channel:
    """The `multilock.backend.Channel` to one server. After a minute without a request it closes."""

    def __init__(
        self,
        wire: PgWire,
        recipe: Recipe,
        steps: StepQueries,
        listener: Listener,
        now: Callable[[], float],
        request_timeout: float | None,
    ) -> None:
        """``request_timeout`` is the user's option in seconds, which limits how long the server waits for a locked
        row."""
        wire.watched = True
        self._wire = wire
        self._recipe = recipe
        self._steps = steps
        self._listener = listener
        self._now = now
        self._request_timeout = request_timeout
        self._attempting: Claim | None = None  # the claim of an attempt under way
        self._understand: Callable[[list[Row]], Granted | Busy | Returned | None] = _returned
        self._asking = False
        self._within = 0.0  # how long the request under way may take
        self.fileno = wire.fileno

    def attempt(self, claim: Claim, join: bool) -> bool:
        # A free lock needs no listener. But a waiter needs one for the notification of a handover, so without a
        # listener the claim does not join the queue.
        ready = self._listener.listening

        def understand(rows: list[Row]) -> Granted | Busy | None:
            told = self._recipe.attempted(claim, rows, self._wire.used)
            return told if ready or not join or isinstance(told, Granted) else None

        self._attempting = claim
        return self._ask(claim, self._steps.attempt, self._recipe.to_attempt(claim, join and ready), understand)

    def release(self, claim: Claim, granted: Granted | None, unsure: bool) -> bool:
        self._listener.unwatch(claim.id)  # before the request is sent, so that the release does not look like a loss
        self._attempting = None
        return self._ask(claim, self._steps.release, self._recipe.to_release(claim, unsure), _returned)

    def answer(self) -> Granted | Busy | Returned | None:
        try:
            rows = self._wire.finish()
        except BlockingIOError:
            raise
        except BaseException as error:
            self._asking = False
            if isinstance(error, (NotThere, NotReadCommitted)):
                return None
            if isinstance(error, LockWait) and self._attempting and self._ask_why(self._attempting, error):
                raise BlockingIOError from None
            raise
        self._asking = False
        return self._understand(rows)

    def idle(self) -> bool:
        """Return whether the connection is usable and was used in the last minute."""
        return self._wire.alive and not self._wire.stale() and self._now() < self._wire.used + AT_REST

    def look_in(self) -> float | None:
        """Return the seconds after which to call `idle`, or None while a request is under way."""
        return None if self._asking else max(0.0, self._wire.used + AT_REST - self._now())

    def close(self) -> None:
        # A caller that gives up much earlier, as by a cancel, proves no silence.
        if self._asking and self._now() >= self._wire.used + self._within / 2:
            self._wire.note_silence()
        self._wire.close()

    def _ask_why(self, claim: Claim, silence: LockWait) -> bool:
        """Ask why the attempt of this claim had to wait, as `Recipe.attempt` does. Returns False if that fails."""

        def understand(rows: list[Row]) -> Busy:
            if rows:
                raise silence
            return Busy(heartbeat(claim.ttl))

        self._attempting, self._understand = None, understand
        self._asking = self._wire.begin(self._steps.shut, [])
        return self._asking

    def _ask(
        self,
        claim: Claim,
        sql: bytes,
        arguments: list[bytes | None],
        understand: Callable[[list[Row]], Granted | Busy | Returned | None],
    ) -> bool:
        self._within = self._request_timeout or min(claim.ttl / REQUESTS, REQUEST_TIMEOUT_MAX)
        self._understand = understand
        self._asking = self._wire.begin(sql, [*arguments, patience(self._within)])
        return self._asking


def _returned(rows: list[Row]) -> Returned:
    return Returned(rows[0][0] == b"t")
