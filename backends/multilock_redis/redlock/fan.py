"""One request to each server at once, by whichever thread asks: one connection to each and one selector.

Nobody waits for one server, and no thread is needed in between. What is still owed when the outcome is decided stays
owed: answers come in order on one connection, and whoever uses the fan next reads them first.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from multilock import BackendRejected, BackendUnavailable, MultilockError, system
from multilock.backend import start_worker
from multilock.telling import logger
from multilock_redis.redlock.guard import Guarded
from multilock_redis.redlock.place import majority_of
from multilock_redis.transport import Wire
from multilock_redis.wire import ScriptMissing

__all__ = ["SAYS_NOTHING", "Fan", "Lane", "Link", "Owed", "Pool"]

CONNECT_WITHIN = 3.0  # seconds for one connection
AT_ONCE = 4  # connections made at the same time to one server
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0  # seconds between connections to a server that is down
GRACE = 0.25  # seconds for which connections beyond a majority are waited for
SPARE = 4  # idle fans that are kept however long they were not used …
SPARE_FOR = 60.0  # … and seconds for which more than these are kept
LAST_WORDS = 0.1  # seconds for what is still to be sent and answered when the client is closed
FRESH = 0.01  # seconds; a connection idle for longer may have been closed by the server


class Owed(NamedTuple):
    """An answer that a connection owes."""

    handle: Callable[[Any], None]
    """Called once, with the answer or the exception, by whichever thread reads it."""
    until: float
    """When an answer is too late, in seconds."""
    again: Callable[[], bytes] | None = None
    """If the server does not know the script, what is sent then; empty if nobody wants that any longer."""


def SAYS_NOTHING(answer: Any) -> None:
    """Handle an answer on which nothing depends."""


class Link:
    """One server, as all fans of a client know it: its next connection, and whether it is down."""

    def __init__(self, endpoint: Guarded, now: Callable[[], float], back: Callable[[], None]) -> None:
        """``back`` is called when a server that was down can be connected to."""
        self.endpoint = endpoint
        self.now = now
        self._back = back
        self._spares: deque[Wire] = deque()
        self.changed = system.Condition()
        self.connecting = 0  # connections that are being made
        self._pause = 0.0  # 0: it is up
        self._again_at = 0.0
        self._closed = False
        self.why: Exception = BackendUnavailable(f"{endpoint.name}: not connected yet", unknown=False)

    @property
    def down(self) -> bool:
        """The last connection could not be made, or its answers were too late."""
        return self._pause > 0.0

    def take(self, *, again: bool = False) -> Wire | None:
        """A connection; None: it is being made, by a thread of its own, or the server was down just now. With ``again``
        the caller has asked before, and no connection is begun for it while one is being made."""
        with suppress(IndexError):
            while (wire := self._spares.popleft()).stale():  # the server was restarted
                wire.close()
            return wire
        with self.changed:
            if self._closed or self.connecting >= (1 if self.down or again else AT_ONCE) or self.now() < self._again_at:
                return None
            self.connecting += 1
        start_worker(self._connect, "multilock-redlock-connect", once=True, or_here=True)
        return None

    def is_silent(self, why: Exception) -> None:
        """A connection broke, or its answers were too late: the next one is not waited for."""
        with self.changed:
            self.why = why
            self._pause = max(FIRST_PAUSE, self._pause)

    def close(self) -> None:
        with self.changed:
            self._closed = True
            spares, self._spares = self._spares, deque()
        for wire in spares:
            wire.close()

    def _connect(self) -> None:
        wire = None
        try:
            wire = self.endpoint.connect(CONNECT_WITHIN, self.now)
            wire.never_block(tls=True)
        except Exception as error:
            why: Exception | None = error
        else:
            why = None
        with self.changed:
            self.connecting -= 1
            was_down, refused = self.down, isinstance(self.why, BackendRejected)
            if why is None and wire is not None and not self._closed:
                self._pause = self._again_at = 0.0
                self._spares.append(wire)
                wire = None
            elif why is not None:
                self.why = why
                self._pause = min(max(FIRST_PAUSE, 2 * self._pause), LONGEST_PAUSE)
                self._again_at = self.now() + self._pause
            self.changed.notify_all()
        if wire is not None:
            wire.close()
        if was_down and why is None:
            self._back()
        if isinstance(why, BackendRejected) and not refused:
            logger.warning("%s: locks are taken without this server", why)
        if why is not None and not isinstance(why, MultilockError):
            raise why


class Lane:
    """One connection of a fan. Requests are sent one behind the other, and answers come in that order."""

    __slots__ = ("_fan", "link", "owed", "wire")

    def __init__(self, fan: Fan, link: Link) -> None:
        self._fan = fan
        self.link = link
        self.wire: Wire | None = None
        self.owed: deque[Owed] = deque()

    def connect(self, *, again: bool = False) -> bool:
        if self.wire is None:
            self.wire = self.link.take(again=again)
            if self.wire is not None:
                self._fan.watch(self, self.wire)
        return self.wire is not None

    def send(self, request: bytes, owed: Sequence[Owed], now: float, patience: float = 0.0) -> bool:
        """False: it certainly did not leave whole, so that it cannot be executed. A long request may wait for
        ``patience`` seconds until the connection takes all of it.

        Handles no answer, since the caller holds the lock of a claim: another thread may hold that of the claim that
        an answer here is for, and wait for this one."""
        if not self.connect() or self.wire is None:
            return False
        self.wire.used = now
        if not self.wire.put(request, patience):
            self.end(
                BackendUnavailable(f"{self.link.endpoint.name}: the connection was closed", unknown=True), defer=True
            )
            return False
        self.owed.extend(owed)
        return True

    def read(self) -> None:
        """Handle the answers that are there."""
        while self.wire is not None:
            try:
                said = self.wire.finish()
            except BlockingIOError:
                return
            except ScriptMissing as missing:
                said = missing
            except Exception as error:
                if not self.wire.alive:
                    self._break(error)
                    return
                said = error
            if not self.owed:  # nobody asked
                self.end(BackendUnavailable("it sent what nobody asked for", unknown=True))
                return
            owed = self.owed.popleft()
            if isinstance(said, ScriptMissing):
                said = self._send_again(owed)
            if said is not None:
                owed.handle(said)
            if not self.owed and not (self.wire and self.wire.unread):
                return  # else: what nobody asked for

    def _break(self, error: Exception) -> None:
        """The connection ended. An answer that says so is of the first request; of the others nothing is known."""
        if self.owed and not getattr(error, "unknown", True):
            self.owed.popleft().handle(error)
        self.end(BackendUnavailable(str(error), unknown=True))

    def _send_again(self, owed: Owed) -> Exception | None:
        """Load the script and send again. Returns what the request is answered if that cannot be."""
        request = owed.again() if owed.again else b""
        if request and self.wire is not None and self.wire.put(request, 0.0):
            self.owed += (Owed(SAYS_NOTHING, owed.until), owed._replace(again=None))
            return None
        return BackendUnavailable("the server does not know the script, and nothing was executed", unknown=False)

    def expire(self, now: float) -> None:
        """End a connection whose answers are too late."""
        if self.owed and now > self.owed[0].until:
            self.read()
            if self.owed and now > self.owed[0].until:
                self.end(
                    BackendUnavailable(f"{self.link.endpoint.name} did not answer in time", unknown=True), late=True
                )

    def end(self, why: Exception, *, late: bool = False, defer: bool = False) -> None:
        wire, self.wire = self.wire, None
        owed, self.owed = self.owed, deque()
        if wire is None:
            return
        self._fan.forget(wire)
        wire.close()
        if owed and late:
            self.link.is_silent(why)
        self._fan.unanswered += [(each, why) for each in owed]
        if not defer:
            self._fan.settle()


class Fan:
    """A connection to each server. Used by one thread at a time."""

    def __init__(self, links: Sequence[Link]) -> None:
        self._selector = system.DefaultSelector()
        self.lanes = [Lane(self, link) for link in links]
        self.used = 0.0  # when it was given back
        self.unanswered: list[tuple[Owed, Exception]] = []  # by connections that broke, and not handled yet

    def fileno(self) -> int | None:
        """What a loop watches to learn that an answer is there; None: this system has no such thing."""
        fileno = getattr(self._selector, "fileno", None)
        return fileno() if fileno else None

    def look(self, within: float) -> bool:
        """Read what comes within so many seconds; False: nothing came."""
        if self.unanswered:
            self.settle()
            within = 0.0
        events = self._selector.select(within)
        for key, _ in events:
            lane: Lane = key.data
            lane.read()
        return bool(events)

    def settle(self) -> None:
        """Handle what was not answered by connections that broke. Under the lock of no claim."""
        unanswered, self.unanswered = self.unanswered, []
        for owed, why in unanswered:
            owed.handle(why)

    def refresh(self, now: float) -> None:
        """Read what came while nobody used it. What is owed since just now is read with what is asked next."""
        if now - self.used > FRESH or self.unanswered:
            self.look(0)
        self.expire(now)

    def ready(self, until: float) -> None:
        """Have a connection to a majority, if they can be had by then, and for a moment to the others that are up."""
        now = self.lanes[0].link.now
        self.refresh(now())
        missing = [lane for lane in self.lanes if not lane.connect()]
        if not missing:
            return
        need = majority_of(len(self.lanes))
        grace = now() + GRACE
        while missing and (at := now()) < until:
            hopeless = sum(lane.link.down and not lane.link.connecting for lane in missing)
            if len(self.lanes) - hopeless < need:
                return
            if len(self.lanes) - len(missing) >= need:
                missing = [lane for lane in missing if not lane.link.down]
                if not missing or at >= grace:
                    return
            with missing[0].link.changed:
                if missing[0].link.connecting:
                    missing[0].link.changed.wait(min(until - at, FRESH))
                    waited = True
                else:
                    waited = False
            if not waited:
                self._pause(min(until - at, FRESH))
            missing = [lane for lane in missing if not lane.connect(again=True)]

    def _pause(self, seconds: float) -> None:
        with self.lanes[0].link.changed:
            self.lanes[0].link.changed.wait(seconds)

    def connected(self) -> int:
        """How many servers it has a connection to; those that are missing are asked for."""
        return sum(lane.connect() for lane in self.lanes)

    def owes(self) -> bool:
        return bool(self.unanswered) or any(lane.owed for lane in self.lanes)

    def late_in(self, now: float) -> float | None:
        """Seconds until an answer that is owed is too late; None: none is owed."""
        if self.unanswered:
            return 0.0
        ends = [lane.owed[0].until for lane in self.lanes if lane.owed]
        return max(0.0, min(ends) - now) if ends else None

    def expire(self, now: float) -> None:
        for lane in self.lanes:
            lane.expire(now)

    def watch(self, lane: Lane, wire: Wire) -> None:
        self._selector.register(wire, system.EVENT_READ, lane)

    def forget(self, wire: Wire) -> None:
        with suppress(KeyError, ValueError, OSError):
            self._selector.unregister(wire)

    def close(self) -> None:
        for lane in self.lanes:
            lane.end(BackendUnavailable("the connection was closed", unknown=True))
        self._selector.close()

    def drop(self) -> None:
        """In a forked child: the connections are the parent's, and so is what the system watches for it."""
        self._selector.close()


class Pool:
    """The fans of one client: the one used last is taken first. Any thread may call."""

    def __init__(self, links: Sequence[Link], now: Callable[[], float]) -> None:
        self.links = links
        self._now = now
        self._lock = system.Lock()
        self.idle: list[Fan] = []
        self._all: weakref.WeakSet[Fan] = weakref.WeakSet()
        self._closed = False

    def make(self) -> Fan:
        """A fan of the caller's own."""
        fan = Fan(self.links)
        self._all.add(fan)
        return fan

    def take(self, preferred: object = None) -> Fan:
        with self._lock:
            if isinstance(preferred, Fan) and preferred in self.idle:
                self.idle.remove(preferred)
                return preferred
            if self.idle:
                return self.idle.pop()
        return self.make()

    def take_idle(self, fan: Fan) -> bool:
        """Take this one, if nobody uses it."""
        with self._lock:
            if fan not in self.idle:
                return False
            self.idle.remove(fan)
            return True

    def give(self, fan: Fan) -> None:
        fan.used = self._now()
        old: Fan | None = None
        with self._lock:
            if self._closed:
                old = fan
            else:
                self.idle.append(fan)
                if len(self.idle) > SPARE and self.idle[0].used < fan.used - SPARE_FOR and not self.idle[0].owes():
                    old = self.idle.pop(0)
        if old:
            old.close()

    def close(self) -> None:
        """Close the idle fans now, and each fan in use when it is given back.

        A server may answer a release that it does not know the script: then the release must be sent again. So a moment
        is spent on answers that are still owed.
        """
        with self._lock:
            self._closed = True
            idle, self.idle = self.idle, []
        until = self._now() + LAST_WORDS
        for fan in idle:
            while fan.owes() and (left := until - self._now()) > 0:
                fan.look(left)
            fan.close()

    def drop(self) -> None:
        """In a forked child."""
        for fan in list(self._all):
            fan.drop()
