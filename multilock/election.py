"""The blocking face of leader election."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from multilock.errors import ClientClosed
from multilock.foreign import ForWith
from multilock.kernel.acquire import Stop
from multilock.kernel.callbacks import call_in_thread, refuse_awaitable
from multilock.kernel.candidacy import Candidacy
from multilock.kernel.face import run
from multilock.kernel.observing import Observer, leader_info
from multilock.kernel.office import Office, inside
from multilock.kernel.term import INTERRUPTED, Leading, Term
from multilock.lock import HeldLease
from multilock.model import Claim, Granted, LeaderInfo, Loss
from multilock.names import check_grace
from multilock.telling import logger

if TYPE_CHECKING:
    from multilock.kernel.core import Kernel
    from multilock.kernel.want import Want

__all__ = ["Election", "Leadership"]

R = TypeVar("R")
HEAD_START = 0.01  # seconds that on_elected, on its own thread, has to begin before on_lost begins on another


class Leadership(Leading, HeldLease):
    """A lease on being the leader. ``release()`` is ``Election.resign()``.

    ``is_held()`` is False from the moment this node begins to step down, although the lease is still kept from others
    until its work, ``on_elected`` and ``on_lost`` have all ended.
    """

    __slots__ = ("_term",)

    def __init__(
        self, kernel: Kernel, want: Want, claim: Claim, granted: Granted, unsure: bool, office: Office[Leadership]
    ) -> None:
        super().__init__(kernel, want, claim, granted, unsure)
        self._term: ThreadTerm = ThreadTerm(office, self)

    def release(self) -> bool:
        return run(self._term.resign())

    def _release_after_interrupt(self, count: int) -> None:
        """See `HeldLease`: but it is given back only at its orderly end."""
        self._term.abdicate(INTERRUPTED)


class ThreadTerm(Term[Leadership]):
    """A term whose work runs in the thread of ``run()``, and each callback in one of its own."""

    def run_elected(self) -> None:
        if not self.elected_begins():
            return
        try:
            if self.office.on_elected:
                with inside(self.elected):
                    refuse_awaitable(self.office.on_elected, self.office.on_elected(self.leadership))
        except BaseException:  # sys.exit() too: this thread is ours
            self.failed = True
            logger.exception("on_elected of the election %r raised: this node resigns", self.office.name)
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
            self.part_ended(self.work)


class Leaders:
    """What `Election.observe` returns. An interrupted ``next()`` misses nothing: the next one goes on.

    No generator, which would end at the first interrupt, and never notice that it is dropped before its first step.
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
        """Observe no more."""
        self._observer.close()

    def __del__(self) -> None:
        self._observer.drop()


class Election(ForWith, Candidacy[Leadership]):
    """A contest for the lock of a name. Never gives up during an outage. See docs/leader-election.md."""

    def _make(self, kernel: Kernel, want: Want, claim: Claim, granted: Granted, unsure: bool) -> Leadership:
        return Leadership(kernel, want, claim, granted, unsure, self._office)

    def campaign(self, timeout: float | None = None) -> Leadership:
        """Stand until elected, ``timeout`` seconds at most (None: for ever). One leadership, with the callbacks.

        The callbacks of its last leadership end first. Raises LockTimeout (also if `stop` is called meanwhile),
        BackendUnavailable (at the end of ``timeout``), BackendRejected, ClientClosed.
        """
        return run(self._campaign_once(timeout, None))

    def run(self, work: Callable[[Leadership], R]) -> R | None:
        """Lead again and again: campaign → ``work(leadership)`` in this thread → lost → work ends → campaign.

        ``work`` should watch ``leadership.is_held()``: nothing else stops it. When it ends by itself this node resigns,
        and its result or exception is passed on. None after `stop`.
        """
        if not callable(work):
            raise TypeError(f"run takes a function of one argument, not {work!r:.60}")
        if inspect.iscoroutinefunction(work):
            raise TypeError("run of a blocking client takes a plain function: make the client with connect_async()")
        stop = Stop()
        try:
            self._begin_standing(stop)
            result: R | None = run(self._stand(work, stop))
            return result
        finally:
            if self._stop is stop and self._term:  # an interrupt may have come before; what this thread did has ended
                self._term.part_ended(self._term.work)
            self._end_standing(stop)

    def start(self) -> None:
        """Stand in the background, with the callbacks, until `stop`. Started already: nothing happens.

        Raises RuntimeError after a `stop` that could not wait until all had ended, and BackendUnavailable where the
        process can have no more threads.
        """
        stop = Stop()

        def stand() -> None:
            try:
                run(self._stand(None, stop))
            except Exception:
                logger.exception("the election %r ended", self.name)
            finally:
                self._end_standing(stop)

        try:
            self._kernel.check_open()
            if self._begin_unless_standing(stop):
                self._kernel.spawn(stand, "multilock-election")
        except BaseException:  # interrupted: whether it began or not, it must not go on
            if self._stop is stop:
                self._end_interrupted()
            self._end_standing(stop)
            raise

    def stop(self, grace: float | None = None) -> None:
        """Stand no more, and end a leadership in order: see docs/leader-election.md.

        ``is_held()`` is False and ``on_lost`` (RESIGNED) begins at once; the lease is kept until work, ``on_elected``
        and ``on_lost`` have all ended, ``grace`` seconds at most (None: the election's); this returns after that. Work
        and callbacks that call it do not wait. Not for a signal handler, which interrupts whatever holds a lock.
        """
        seconds = check_grace(grace)
        try:
            run(self._end(seconds))
        except BaseException:
            self._end_interrupted(seconds)
            raise

    def _end_interrupted(self, grace: float | None = None) -> None:
        """Nobody waits for the end any more. A grant that is on its way is resigned when it comes."""
        self._call_off()
        if self._term:
            self._term.abdicate(INTERRUPTED, grace)

    def resign(self, grace: float | None = None) -> bool:
        """Step down now, as `stop` does; another candidate need not wait for a ttl. False if this node did not lead.

        Under `run` and `start` this node stands again, behind those waiting.
        """
        return run(self._step_down(check_grace(grace)))

    def leader(self) -> LeaderInfo | None:
        """Who leads, as the backend knows it; None for nobody."""
        kernel = self._kernel
        return leader_info(run(kernel.ask(kernel.backend.inspect, self.name, name=self.name)))

    def observe(self) -> Iterator[LeaderInfo | None]:
        """The present leader, then each change, without end: blocks for the next. An outage yields nothing.

        Pushed where the backend can, else within 0.5 s. Ends when the client is closed.
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
