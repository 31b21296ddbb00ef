"""The blocking API of leader election: `Election` and `Leadership`.

The work is the user's code that runs while this node leads. After a resignation, work and callbacks must end within the
grace, a number of seconds.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from multilock import system
from multilock.api_mistakes import ForWith
from multilock.errors import ClientClosed, MultilockError
from multilock.kernel.acquire import Stop
from multilock.kernel.blocking import run
from multilock.kernel.callbacks import call_in_thread, refuse_awaitable
from multilock.kernel.candidacy import Candidacy
from multilock.kernel.election_state import Office, Part, inside, marks
from multilock.kernel.holding import EndOfBody
from multilock.kernel.leader_changes import Observer, leader_info
from multilock.kernel.lease_to_caller import Handing
from multilock.kernel.living_clients import in_the_middle
from multilock.kernel.term import INTERRUPTED, Leading, Term
from multilock.kernel.worker import SOON
from multilock.lock import HeldLease
from multilock.log_thread import logger
from multilock.model import Claim, Granted, LeaderInfo, Loss
from multilock.names import check_grace

if TYPE_CHECKING:
    from multilock.kernel.client import Kernel
    from multilock.kernel.lock_options import Want

__all__ = ["Election", "Leadership"]

R = TypeVar("R")
HEAD_START = 0.01  # seconds that on_elected has to begin on its own thread before on_lost begins on another


class Leadership(Leading, HeldLease):
    """The lease of a leader. ``release()`` does the same as `Election.resign`.

    ``is_held()`` is False from the moment at which this node begins to step down. The lease is kept for longer, so that
    no other node leads before the work, ``on_elected`` and ``on_lost`` of this node have all ended, or the grace is
    over.
    """

    __slots__ = ("_term",)

    def __init__(
        self, kernel: Kernel, want: Want, claim: Claim, granted: Granted, unsure: bool, office: Office[Leadership]
    ) -> None:
        super().__init__(kernel, want, claim, granted, unsure)
        self._term: ThreadTerm = ThreadTerm(office, self)

    def __enter__(self) -> Self:
        before: tuple[Part, ...] | None = None
        try:
            before = marks()
            return super().__enter__()
        except MultilockError:  # this node no longer leads
            self._term.no_body(before)
            raise
        except BaseException:  # interrupted: Python will not call __exit__ for this `with`
            self._term.no_body(before)
            if not self._open:  # another body that is still open resigns at its end
                self._term.abdicate(INTERRUPTED)
            raise

    def release(self) -> bool:
        return run(self._term.resign())

    def _end_body(self, end: EndOfBody) -> None:
        if in_the_middle():
            self._kernel.releases.from_within(lambda: self._release_after_interrupt(end))
            return
        last = self._body_ends(end)
        self._term.body_ends()
        if last:
            self.release()

    def _release_after_interrupt(self, end: EndOfBody) -> None:
        """Resign after an interrupt. Unlike other leases, a leadership is released only after its work and callbacks
        have ended, or after the grace."""
        last = self._body_ends(end)
        self._term.body_ends()
        if last:
            self._term.abdicate(INTERRUPTED)


class ThreadTerm(Term[Leadership]):
    """A term whose work runs in the thread of ``run()``. Each callback runs on a thread of its own."""

    def run_elected(self) -> None:
        if not self.elected_begins():
            return
        try:
            if self.office.on_elected:
                with inside(self.elected):
                    refuse_awaitable(self.office.on_elected, self.office.on_elected(self.leadership))
        except BaseException:  # including SystemExit, because no user code may end a thread of multilock
            self.failed = True
            logger.exception("on_elected of the election %r raised, so this node resigns", self.office.name)
        self.part_ended(self.elected)
        if self.failed and not self.over():
            self.abdicate("its on_elected raised")

    def run_lost(self, loss: Loss[Leadership]) -> None:
        if not self.lost_begins():
            return
        kernel = self.office.kernel
        if self.begun_at and not self.elected.done and (rest := self.begun_at + HEAD_START - kernel.now()) > 0:
            kernel.runtime.event().wait(rest)
        if self.office.on_lost:
            with inside(self.lost):
                call_in_thread(self.office.on_lost, loss)
        self.part_ended(self.lost)

    async def do_work(self, work: Callable[[Leadership], Any]) -> Any:
        try:
            with inside(self.work):
                self.office.push(self.leadership)
                result = work(self.leadership)
                if inspect.iscoroutine(result):
                    result.close()
                    raise TypeError(
                        f"run of a blocking client takes a plain function, but {work!r:.60} gave a coroutine"
                    )
                return result
        finally:
            self.leadership._leave_scope()
            self.work_ended()


class Leaders:
    """The iterator that `Election.observe` returns. An interrupted ``next()`` loses nothing: the next call continues.

    This class is not a generator, because a generator ends at the first interrupt.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> LeaderInfo | None:
        try:
            return run(self._observer.following())
        except ClientClosed:
            raise StopIteration from None

    def close(self) -> None:
        """End the iteration. A ``next()`` that waits in another thread raises StopIteration."""
        self._observer.close()

    def __del__(self) -> None:
        self._observer.drop()


class Election(ForWith, Candidacy[Leadership]):
    """A candidate for leadership of a name. Made by `Client.election`.

    An election is a contest for the lock of its name, so it also excludes other locks with that name. An outage alone
    never ends a campaign. ``with election:`` calls `start` and `stop`. docs/leader-election.md lists what is promised.
    """

    def _make(self, kernel: Kernel, want: Want, claim: Claim, granted: Granted, unsure: bool) -> Leadership:
        return Leadership(kernel, want, claim, granted, unsure, self._office)

    def campaign(self, timeout: float | None = None) -> Leadership:
        """Wait until this node is elected, and return the `Leadership`. The election's callbacks are called for this
        leadership too.

        ``timeout``: Seconds for the whole wait. Default: no limit. The whole wait includes waiting for other calls that
        campaign in this election, and for the callbacks of the last leadership to end.

        Raises LockTimeout if the election was not won in time, or if `stop` was called meanwhile. Raises
        BackendUnavailable if the backend did not answer at the end of ``timeout``, BackendRejected if it refuses the
        request, and ClientClosed. When the leadership is lost or resigned, this node does not campaign again by itself.
        """
        return run(self._campaign_once(timeout, None))

    def run(self, work: Callable[[Leadership], R]) -> R | None:
        """Campaign, run ``work(leadership)`` in this thread while leading, and campaign again after a loss.

        ``work``: A function that should check ``leadership.is_held()`` often, because nothing else stops it. If the
        function ends while this node leads, this node resigns, and `run` returns its result or raises its exception.

        Returns None after `stop`, and when the client is closed. Raises RuntimeError if this election runs already,
        BackendRejected if the backend refuses the request, and TypeError if ``work`` is a coroutine function.
        """
        if not callable(work):
            raise TypeError(f"run takes a function of one argument, not {work!r:.60}")
        if inspect.iscoroutinefunction(work):
            raise TypeError("run of a blocking client takes a plain function: make the client with connect_async()")
        stop = Stop()
        handing: Handing[Leadership] = Handing(self._kernel)
        try:
            self._begin_standing(stop)
            result: R | None = run(self._stand(work, stop, handing))
            return result
        finally:
            if handing.lease is not None:  # an interrupt may have come before do_work reported the end of the work
                handing.lease._term.work_ended()
            self._end_standing(stop)

    def start(self) -> None:
        """Campaign in the background until `stop`, and call the callbacks. A second call does nothing.

        Raises ClientClosed. Raises RuntimeError if an earlier `stop` has returned, but work or callbacks still run. If
        the operating system refuses every thread, this call waits until there is one.
        """
        stop = Stop()

        def stand() -> None:
            try:
                run(self._stand(None, stop, Handing(self._kernel)))
            except Exception:
                logger.exception("the election %r ended", self.name)
            finally:
                self._end_standing(stop)

        try:
            self._kernel.check_open()
            if self._begin_unless_standing(stop):
                self._kernel.spawn(stand, "multilock-election")
                while not self._kernel.starts_threads():
                    system.sleep(SOON)
        except BaseException:  # interrupted: the thread may have begun, and must not continue
            if self._stop is stop:
                self._end_interrupted()
            self._end_standing(stop)
            raise

    def stop(self, grace: float | None = None) -> None:
        """Stop campaigning, and resign if this node leads.

        ``is_held()`` is False and ``on_lost`` (reason RESIGNED) begins at once. The lease is kept until work,
        ``on_elected`` and ``on_lost`` have all ended, and `stop` returns after that.

        ``grace``: Seconds after which the lease is released even if something still runs. Default: the election's.

        A call of `stop` by the work or a callback of this election does not wait. Do not call `stop` in a signal
        handler, which may have interrupted a thread that holds a lock of multilock.
        """
        seconds = check_grace(grace)
        try:
            run(self._end(seconds))
        except BaseException:
            self._end_interrupted(seconds)
            raise

    def _end_interrupted(self, grace: float | None = None) -> None:
        """End the candidacy without waiting, after an interrupt. If a grant is on its way, this node resigns when it
        arrives."""
        self._call_off()
        if self._term:
            self._term.abdicate(INTERRUPTED, grace)

    def resign(self, grace: float | None = None) -> bool:
        """End a leadership as `stop` does. Another candidate can then be elected without waiting for a ttl.

        ``grace``: Seconds after which the lease is released even if something still runs. Default: the election's.

        Returns True if this call ended the leadership, False if this node did not lead. Under `run` and `start` this
        node campaigns again, behind the candidates that wait.
        """
        return run(self._step_down(check_grace(grace)))

    def leader(self) -> LeaderInfo | None:
        """Ask the backend who leads. Returns None if nobody does. The leader may have changed when the answer arrives.

        Raises BackendUnavailable, BackendRejected or ClientClosed.
        """
        kernel = self._kernel
        return leader_info(run(kernel.ask(kernel.backend.inspect, self.name, name=self.name)))

    def observe(self) -> Iterator[LeaderInfo | None]:
        """Return an iterator over the leaders: the present one at once, then each change.

        None means that nobody leads. ``next()`` blocks until the next change. A change arrives as soon as the backend
        pushes it, otherwise within 0.5 s. Quick changes may be merged, but the last one always arrives. An outage
        yields nothing. The iterator ends when the client is closed. If the backend refuses the request, ``next()``
        raises BackendRejected and may be called again.
        """
        self._kernel.check_open()
        return Leaders(Observer(self._kernel, self.name))

    def _report_in_background(self, report: Callable[[], Coroutine[Any, Any, None]], observer: Observer) -> None:
        self._kernel.spawn(lambda: run(report()), "multilock-observer")

    async def _call(self, callback: Callable[..., object], *args: Any) -> None:
        call_in_thread(callback, *args)

    def __enter__(self) -> Election:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.stop()
        except BaseException:  # interrupted, perhaps before stop() itself could notice
            self._end_interrupted()
            raise
