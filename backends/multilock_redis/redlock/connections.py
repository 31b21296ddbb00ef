"""The connections to the servers. A *fan* has one connection to each server, so that one thread can ask all servers at
once.

Each connection of a fan is called a lane. A link is one server, with its spare connections. All fans of a client share
the links. An `Owed` is a missing reply. The thread that uses a fan never waits for a particular server. When the
outcome is decided, some replies may still be missing. The next user of the fan reads these late replies first.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from multilock import BackendRejected, BackendUnavailable, MultilockError, system
from multilock.backend import start_worker
from multilock.log_thread import logger
from multilock.timing import FIRST_PAUSE, LONGEST_PAUSE
from multilock_redis.redlock.restarts import Guarded
from multilock_redis.redlock.votes import majority_of
from multilock_redis.transport import Wire
from multilock_redis.wire import ScriptMissing

__all__ = ["SAYS_NOTHING", "Fan", "Lane", "Link", "Owed", "Pool"]

CONNECT_WITHIN = 3.0  # seconds that one connection may take to be made
AT_ONCE = 4  # connections to one server that are made at the same time
GRACE = 0.25  # seconds after which a majority of connections is enough
SPARE = 4  # idle fans that are always kept
SPARE_FOR = 60.0  # seconds after its last use for which a fan is kept if more than SPARE fans are idle
LAST_WORDS = 0.1  # seconds that the last requests and replies of a closing client may take
FRESH = 0.01  # seconds; if a connection was idle for longer, the server may have closed it


class Owed(NamedTuple):
    """A reply that is still missing on a connection."""

    handle: Callable[[Any], None]
    """Called once with the reply or an exception, by the thread that reads it."""
    until: float
    """When the reply is too late, in seconds."""
    again: Callable[[], bytes] | None = None
    """Returns the request to send if the server does not know the script; empty if the request is no longer wanted."""


def SAYS_NOTHING(answer: Any) -> None:
    """Ignore a reply on which nothing depends."""


class Link:
    """One server, its spare connections, and whether it is down. All fans of a client share it."""

    def __init__(self, endpoint: Guarded, now: Callable[[], float], back: Callable[[], None]) -> None:
        """``back`` is called when a connection to a server that was down succeeds."""
        self.endpoint = endpoint
        self.now = now
        self._back = back
        self._spares: deque[Wire] = deque()
        self.changed = system.Condition()
        self.connecting = 0  # connections that other threads are making
        self.wanted = 0  # callers that wait for a connection
        self._pause = 0.0  # seconds between attempts to connect; 0 while the server is up
        self._again_at = 0.0
        self._closed = False
        self.why: Exception = BackendUnavailable(f"{endpoint.name}: not connected yet", unknown=False)

    @property
    def down(self) -> bool:
        """Whether the last connection failed, or its replies were too late."""
        return self._pause > 0.0

    def take(self, *, again: bool = False) -> Wire | None:
        """Return a spare connection. If there is none, return None and have another thread make one.

        After a failure, no connection is begun until a pause is over. ``again`` is True if the caller repeats the call
        until it gets a connection. Then at most one connection for each waiting caller is being made.
        """
        with suppress(IndexError):
            while (wire := self._spares.popleft()).stale():  # the server has closed the connection
                wire.close()
            return wire
        with self.changed:
            most = 1 if self.down else min(AT_ONCE, self.wanted) if again else AT_ONCE
            if self._closed or self.connecting >= most or self.now() < self._again_at:
                return None
            self.connecting += 1
        start_worker(self._connect, "multilock-redlock-connect", once=True, or_here=True)
        return None

    def wants(self, more: int) -> None:
        """Add ``more``, which may be negative, to the number of callers that wait for a connection."""
        with self.changed:
            self.wanted += more

    def is_silent(self, why: Exception) -> None:
        """Record that replies on a connection were too late. The server counts as down until a new connection
        succeeds."""
        with self.changed:
            self.why = why
            self._pause = max(FIRST_PAUSE, self._pause)

    def close(self) -> None:
        with self.changed:
            self._closed = True
            spares, self._spares = self._spares, deque()
        for wire in spares:
            wire.close()
        self.endpoint.close()

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
    """One connection of a fan. Replies arrive in the order in which the requests were sent."""

    __slots__ = ("_fan", "link", "owed", "wire")

    def __init__(self, fan: Fan, link: Link) -> None:
        self._fan = fan
        self.link = link
        self.wire: Wire | None = None
        self.owed: deque[Owed] = deque()

    def connect(self, *, again: bool = False) -> Wire | None:
        """Return the connection. If there is none, take a spare one (see `Link.take`)."""
        if self.wire is None and (wire := self.link.take(again=again)):
            self.wire = wire
            self._fan.watch(self, wire)
        return self.wire

    def send(self, request: bytes, owed: Sequence[Owed], now: float, patience: float = 0.0) -> bool:
        """Send a request. Returns False if it was not sent completely, so that the server cannot execute it.

        If the connection does not accept a long request at once, wait up to ``patience`` seconds.

        This method handles no replies, because the caller holds the lock of a claim. A reply may need the lock of
        another claim, and waiting for it could be a deadlock.
        """
        wire = self.wire or self.connect()
        if wire is None:
            return False
        wire.used = now
        try:
            if wire.put(request, patience):
                self.owed.extend(owed)
                return True
        except BaseException:
            self.owed.extend(each for each in owed if not any(each is other for other in self.owed))
            self._interrupted()
            raise
        self._not_sent_whole()
        return False

    def _not_sent_whole(self) -> None:
        """End the connection, because the server would read the next request as the remaining part of this one."""
        self.end(BackendUnavailable(f"{self.link.endpoint.name}: the connection was closed", unknown=True), defer=True)

    def _interrupted(self) -> None:
        """End the connection after an interrupt. The next request could otherwise get the reply to an earlier one, such
        as a vote for another claim."""
        self.end(BackendUnavailable(f"{self.link.endpoint.name}: a request was interrupted", unknown=True), defer=True)

    def read(self) -> None:
        """Handle the replies that have arrived."""
        try:
            self._read()
        except BaseException:
            self._interrupted()
            raise

    def _read(self) -> None:
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
            if not self.owed:  # a reply without a request
                self.end(BackendUnavailable("it sent a reply without a request", unknown=True))
                return
            owed = self.owed.popleft()
            if isinstance(said, ScriptMissing):
                said = self._send_again(owed)
            if said is not None:
                owed.handle(said)
            if not self.owed and not (self.wire and self.wire.unread):
                return  # the next call ends the connection if further bytes arrive

    def _break(self, error: Exception) -> None:
        """End the connection after an error.

        If the error proves that nothing was executed, this holds for the first request only. The server may have
        executed the later requests.
        """
        if self.owed and not getattr(error, "unknown", True):
            self.owed.popleft().handle(error)
        self.end(BackendUnavailable(str(error), unknown=True))

    def _send_again(self, owed: Owed) -> Exception | None:
        """Load the script and send the request again. Returns the error for the request if that is impossible."""
        request = owed.again() if owed.again else b""
        if request and self.wire is not None:
            if self.wire.put(request, 0.0):
                self.owed += (Owed(SAYS_NOTHING, owed.until), owed._replace(again=None))
                return None
            self._not_sent_whole()
        return BackendUnavailable("the server does not know the script, and nothing was executed", unknown=False)

    def is_late(self, now: float) -> bool:
        """Return whether a missing reply is too late."""
        return any(now > owed.until for owed in self.owed)

    def expire(self, now: float) -> None:
        """End the connection if a reply is too late."""
        if self.is_late(now):
            self.read()
            if self.is_late(now):
                self.end(
                    BackendUnavailable(f"{self.link.endpoint.name} did not answer in time", unknown=True), late=True
                )

    def end(self, why: Exception, *, late: bool = False, defer: bool = False) -> None:
        """Close the connection. Each missing reply is replaced by the error ``why``.

        `Fan.settle` handles these errors. This method calls it, or with ``defer`` the next use of the fan does.
        """
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
    """One connection to each server. Only one thread at a time uses a fan."""

    def __init__(self, links: Sequence[Link]) -> None:
        self._selector = system.DefaultSelector()
        self.lanes = [Lane(self, link) for link in links]
        self.used = 0.0  # the time at which the fan last returned to the pool
        self.unanswered: list[tuple[Owed, Exception]] = []  # missing replies of connections that ended

    def fileno(self) -> int | None:
        """Return the descriptor that is readable when a reply has arrived, or None if this system has none."""
        fileno = getattr(self._selector, "fileno", None)
        return fileno() if fileno else None

    def look(self, within: float) -> bool:
        """Wait up to ``within`` seconds for replies, and handle them. Returns False if none came."""
        if self.unanswered:
            self.settle()
            within = 0.0
        events = self._selector.select(within)
        for key, _ in events:
            lane: Lane = key.data
            lane.read()
        return bool(events)

    def settle(self) -> None:
        """Report an error for each missing reply of an ended connection. The caller must not hold the lock of a
        claim."""
        unanswered, self.unanswered = self.unanswered, []
        for owed, why in unanswered:
            owed.handle(why)

    def refresh(self, now: float) -> None:
        """Read the replies that came while no thread used the fan, unless it was used just now."""
        if now - self.used > FRESH or self.unanswered:
            self.look(0)
        self.expire(now)

    def ready(self, until: float) -> None:
        """Connect to a majority by ``until`` if possible, and wait a moment for the other servers that are up."""
        now = self.lanes[0].link.now
        self.refresh(now())
        missing = [lane for lane in self.lanes if lane.wire is None and not lane.connect()]
        if not missing:
            return
        links = [lane.link for lane in missing]
        for link in links:
            link.wants(1)
        try:
            self._wait_for(missing, until)
        finally:
            for link in links:
                link.wants(-1)

    def _wait_for(self, missing: list[Lane], until: float) -> None:
        now = self.lanes[0].link.now
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
                missing[0].link.changed.wait(min(until - at, FRESH))
            missing = [lane for lane in missing if not lane.connect(again=True)]

    def connect_to(self, which: set[int], until: float) -> None:
        """Connect to these servers by ``until``, unless they are down."""
        now = self.lanes[0].link.now
        missing = [lane for lane in (self.lanes[i] for i in which) if not lane.connect()]
        while (missing := [lane for lane in missing if not lane.link.down]) and (left := until - now()) > 0:
            with missing[0].link.changed:
                missing[0].link.changed.wait(min(left, FRESH))
            missing = [lane for lane in missing if not lane.connect(again=True)]

    def connected(self) -> int:
        """Return how many servers are connected, and ask for a connection to each server that is not."""
        return sum(lane.connect() is not None for lane in self.lanes)

    def owes(self) -> bool:
        """Return whether any reply is missing or not handled yet."""
        return bool(self.unanswered) or any(lane.owed for lane in self.lanes)

    def late_in(self, now: float) -> float | None:
        """Return the seconds until the first missing reply is too late, or None if no reply is missing."""
        if self.unanswered:
            return 0.0
        ends = [owed.until for lane in self.lanes for owed in lane.owed]
        return max(0.0, min(ends) - now) if ends else None

    def expire(self, now: float) -> None:
        """End each connection on which a reply is too late."""
        for lane in self.lanes:
            if lane.owed:
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

    def finish(self, until: float) -> None:
        """Read the replies that are still missing, and close. Stop reading at the time ``until``."""
        now = self.lanes[0].link.now
        while self.owes() and (left := until - now()) > 0:
            self.look(left)
        self.close()

    def drop(self) -> None:
        """Close the selector in a forked child. The connections belong to the parent, which still watches them."""
        self._selector.close()


class Pool:
    """The fans of one client. Any thread may call any method."""

    def __init__(self, links: Sequence[Link], now: Callable[[], float]) -> None:
        self.links = links
        self._now = now
        self._lock = system.Lock()
        self.idle: list[Fan] = []
        self._all: weakref.WeakSet[Fan] = weakref.WeakSet()
        self._closed = False

    def make(self) -> Fan:
        """Return a new fan for the caller alone."""
        fan = Fan(self.links)
        self._all.add(fan)
        return fan

    def take(self, preferred: object = None) -> Fan:
        """Return the preferred fan if it is idle, else the idle fan that was used last, else a new one."""
        with self._lock:
            if isinstance(preferred, Fan) and preferred in self.idle:
                self.idle.remove(preferred)
                return preferred
            if self.idle:
                return self.idle.pop()
        return self.make()

    def take_idle(self, fan: Fan) -> bool:
        """Take this fan if no thread uses it. Returns False otherwise."""
        with self._lock:
            if fan not in self.idle:
                return False
            self.idle.remove(fan)
            return True

    def give(self, fan: Fan) -> None:
        """Return a fan to the pool after use."""
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
        """Close the idle fans now, and each fan in use when its user gives it back.

        An idle fan first waits a moment for missing replies. If a server replies to a release that it does not know the
        script, the release must be sent again.
        """
        with self._lock:
            self._closed = True
            idle, self.idle = self.idle, []
        until = self._now() + LAST_WORDS
        for fan in idle:
            fan.finish(until)

    def drop(self) -> None:
        """Drop every fan in a forked child."""
        for fan in list(self._all):
            fan.drop()
