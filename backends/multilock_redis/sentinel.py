"""A primary that Redis Sentinels name: ``redis+sentinel://``, ``rediss+sentinel://`` (TLS to all of them).

Its address is asked for before each connection is made, and the server at that address must say itself that it is the
primary. That is not enough: after a failover the former primary answers as before on the connections that it has, for
as long as it is not told (10 s where an operator asked for the failover), and would grant locks that the new one grants
too. So one Sentinel tells of each change, and then every connection that leads elsewhere is ended, also one on which an
answer is awaited: it would be that of a former primary. It counts from the promotion on (``+promoted-slave``). The
Sentinel that leads the failover says ``+switch-master``, and describes the new primary, only when the last replica has
followed it, which may take minutes.

A Sentinel that was cut off itself knows less than the others. The number of the failover that it knows of (its
``config-epoch``) shows that: an answer older than one that was heard before is not believed. So the others are asked
too, one after the other, though nobody needs a connection: else who listens to that one would hear of no failover.

What a failover forgets is not found again here: Redis replicates after it has answered.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count
from typing import Any, NamedTuple

from multilock import BackendRejected, BackendUnavailable, MultilockError, system
from multilock.backend import start_worker
from multilock.telling import logger
from multilock_redis.transport import Endpoint, Wire, not_connected
from multilock_redis.wire import pack

__all__ = ["Sentinel", "SentinelEndpoint", "Told"]

ROLE = pack("ROLE")
PING = pack("PING")
LISTEN = pack("SUBSCRIBE", "+promoted-slave", "+switch-master")
ASK_WITHIN = 1.0  # seconds, of a Sentinel that nobody waits for
TEND_EVERY = 2.0  # seconds between two questions to the Sentinel that is listened to, whatever it tells by itself
LONGEST_PAUSE = 1.0  # seconds before another Sentinel is listened to

# What a Sentinel says, and what to do about it. Its own login is not the primary's.
_REMEDIES = {
    "unknown command": "it is no Sentinel: give redis:// with this address, or the port of a Sentinel, often 26379",
    "NOAUTH": "give sentinel_password=, and sentinel_username= where it has users",
    "No such master": "give the name that the Sentinels call the primary by, as in redis+sentinel://host/NAME",
}
_CHECK_LOGIN = "check sentinel_username= and sentinel_password="


class Sentinel(Endpoint):
    """One of them. It is connected to on threads of its own: one whose name hangs in its look-up keeps nobody from
    asking the others."""

    def __init__(self, scheme: str, kind: Callable[..., Any], settings: Mapping[str, Any]) -> None:
        self._place = place(settings.get("host", "localhost"), settings.get("port", 26379))
        super().__init__(f"{scheme}://{self._place} (a Sentinel)", kind, settings)

    def __str__(self) -> str:
        return self._place


class Told(NamedTuple):
    """What one Sentinel knows of the primary."""

    epoch: int  #: greater after each failover
    host: str
    port: int
    facts: Mapping[str, str]


class SentinelEndpoint(Endpoint):
    """Where the primary is now. ``settings``: of connections to it, whatever its address."""

    def __init__(
        self,
        scheme: str,
        sentinels: Sequence[Sentinel],
        primary: str,
        kind: Callable[..., Any],
        settings: Mapping[str, Any],
    ) -> None:
        hosts = ",".join(map(str, sentinels))
        super().__init__(f"{scheme}://{hosts}/{primary}/{settings.get('db') or 0}", kind, settings)
        self.sentinels = tuple(sentinels)  #: the first one answered last
        self.primary = primary
        self._begin()

    def _begin(self) -> None:
        self._choosing = system.Lock()  # taken by threads of ours only: no interrupt comes to them
        self._newest: Told | None = None
        self._closed = system.Event()
        self._unwatched = [True]  # popped by who starts the thread
        self._listened_to: Wire | None = None

    def forget(self) -> None:
        super().forget()
        for sentinel in self.sentinels:
            sentinel.forget()
        self._begin()

    def close(self) -> None:
        self._closed.set()
        if wire := self._listened_to:
            wire.interrupt()

    # ---- a connection to the primary

    def _dial(self, within: float, now: Callable[[], float]) -> Wire:
        deadline = now() + within
        failures: list[MultilockError] = []
        behind: list[Told] = []
        tried: set[str] = set()
        sentinels = self.sentinels
        for i, sentinel in enumerate(sentinels):
            try:
                # One that hangs leaves time for the others, and for the primary.
                told = self.ask(sentinel, (deadline - now()) / (len(sentinels) + 1 - i), now)
                if self._is_behind(told):
                    behind.append(told)
                    raise self._silence(f"{sentinel} has not heard of the last failover")
            except MultilockError as error:
                failures.append(error)
                continue
            where = self._at(told)
            if where in tried:
                continue
            tried.add(where)
            try:
                wire = self._connect_to(told, where, deadline - now(), now)
            except BackendUnavailable as error:
                failures.append(error)
                continue
            self.sentinels = (sentinel, *(other for other in sentinels if other is not sentinel))
            self._watch_from_now_on(now)
            return wire
        if len(behind) == len(sentinels):
            self._newest = None  # all of them were set up anew
        raise self._nowhere(failures)

    def ask(self, sentinel: Sentinel, within: float, now: Callable[[], float]) -> Told:
        """Raises BackendUnavailable (nothing was executed), or BackendRejected with the remedy."""
        wire = self._call_on(sentinel, within, now)
        try:
            return self._asked_on(wire, sentinel, within)
        finally:
            wire.close()

    def _asked_on(self, wire: Wire, sentinel: Sentinel, within: float) -> Told:
        # While a failover goes on the description has the number of this one and the address of the former primary.
        where, describe = (
            pack("SENTINEL", question, self.primary) for question in ("GET-MASTER-ADDR-BY-NAME", "MASTER")
        )
        try:
            answers = [answer for answer, _ in wire.exchange([where, describe, where], within)]
            for answer in answers:
                if isinstance(answer, Exception):
                    raise answer
            before, described, after = ([word.decode(errors="replace") for word in answer] for answer in answers)
            if before != after:
                raise self._silence(f"{sentinel} has just heard of a failover")
            facts = dict(zip(described[::2], described[1::2], strict=True))
            host, port = after
            return Told(int(facts["config-epoch"]), host, int(port), facts)
        except BackendUnavailable as error:
            raise BackendUnavailable(str(error), unknown=False, backend="redis") from error
        except BackendRejected as error:
            raise self._refused(error) from error
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise self._silence(f"{sentinel} gave no answer of a Sentinel: {error!r}") from error

    def _call_on(self, sentinel: Sentinel, within: float, now: Callable[[], float]) -> Wire:
        try:
            return sentinel.connect(within, now)
        except BackendRejected as error:
            raise self._refused(error) from error

    def _refused(self, error: BackendRejected) -> BackendRejected:
        said, _, remedy = str(error).rpartition(" (")
        remedy = next((what for word, what in _REMEDIES.items() if word in said), "")
        if not remedy and "not trusted" in str(error):
            return error
        return BackendRejected(f"{said} ({remedy or _CHECK_LOGIN})", backend="redis")

    def _connect_to(self, told: Told, where: str, within: float, now: Callable[[], float]) -> Wire:
        deadline = now() + within
        settings = {**self._settings, "host": told.host, "port": told.port}
        try:
            wire = self._open_wire(self._class, settings, where, max(within, 0.001), now)
        except Exception as error:
            raise not_connected(error, where) from error
        try:
            # A primary that stood still, or was cut off, does not know that it is none any more; this one does.
            role = wire.call(ROLE, max(deadline - now(), 0.001))[0]
            if role != b"master":
                raise self._silence(f"the Sentinels name {place(told.host, told.port)}, which is a replica as yet")
            if not self._lead_to(told):
                raise self._silence("there was a failover meanwhile")
        except BackendUnavailable as error:
            wire.close()
            raise BackendUnavailable(str(error), unknown=False, backend="redis") from error
        except BaseException:
            wire.close()
            raise
        return wire

    def _at(self, told: Told) -> str:
        return f"{self.name} at {place(told.host, told.port)}"

    def _is_behind(self, told: Told) -> bool:
        return self._newest is not None and told.epoch < self._newest.epoch

    def _lead_to(self, told: Told) -> bool:
        """From now on it is the primary; connections to another end. False: a later failover is known already."""
        with self._choosing:
            if self._is_behind(told):
                return False
            self._newest = told
        here, anywhere = self._at(told), f"{self.name} at "
        for wire in self._open:
            if wire.where.startswith(anywhere) and wire.where != here:
                wire.interrupt()
        return True

    def _nowhere(self, failures: list[MultilockError]) -> MultilockError:
        rejected = [error for error in failures if isinstance(error, BackendRejected)]
        if len(rejected) == len(failures):
            return rejected[0]
        silence = self._silence("; ".join(dict.fromkeys(map(str, failures))))
        silence.__cause__ = next(iter(failures), None)
        return silence

    def _silence(self, what: str) -> BackendUnavailable:
        return BackendUnavailable(f"{self.name}: {what}", unknown=False, backend="redis")

    # ---- changes of the primary

    def _watch_from_now_on(self, now: Callable[[], float]) -> None:
        if not self._unwatched:
            return
        watches = (self._watch, self._compare) if len(self.sentinels) > 1 else (self._watch,)
        try:
            self._unwatched.pop()
        except IndexError:  # another thread was first
            return
        for watch in watches:
            start_worker(partial(watch, self._closed, now), "multilock-redis-sentinel")

    def _watch(self, closed: system.Event, now: Callable[[], float]) -> None:
        """The thread: listens to one Sentinel after the other, until the client is closed."""
        turn = 0
        while not closed.is_set():
            sentinels = self.sentinels
            try:
                self._listen_to(sentinels[turn % len(sentinels)], closed, now)
            except Exception as error:
                known = isinstance(error, MultilockError)
                logger.log(
                    logging.DEBUG if known else logging.ERROR,
                    "changes of the primary are not told at the moment: %s",
                    error,
                    exc_info=not known,
                )
            turn += 1
            closed.wait(LONGEST_PAUSE * system.uniform(0.1, 1.0))

    def _compare(self, closed: system.Event, now: Callable[[], float]) -> None:
        """The thread: asks one Sentinel after the other, and heeds who has heard of a later failover than those before.
        Of two that differ about the same one nobody knows more."""
        sentinels = self.sentinels
        for turn in count(1):
            try:
                told = self.ask(sentinels[turn % len(sentinels)], ASK_WITHIN, now)
                if self._newest is not None and told.epoch > self._newest.epoch:
                    self._lead_to(told)
            except MultilockError as error:
                logger.debug("what the Sentinels know is not compared at the moment: %s", error)
            if closed.wait(TEND_EVERY):
                return

    def _listen_to(self, sentinel: Sentinel, closed: system.Event, now: Callable[[], float]) -> None:
        with ExitStack() as stack:
            wire = self._listened_to = self._call_on(sentinel, ASK_WITHIN, now)
            stack.callback(wire.close)
            asking = self._call_on(sentinel, ASK_WITHIN, now)
            stack.callback(asking.close)
            [(answer, _)] = wire.exchange([LISTEN], ASK_WITHIN, pushes=True)
            if isinstance(answer, BackendUnavailable):
                raise answer
            self._heed(asking, sentinel)  # what changed before it was listened to
            if isinstance(answer, BackendRejected):  # it lets this user ask, but not listen
                while not closed.wait(TEND_EVERY):
                    self._heed(asking, sentinel)
            heard, ask_at = True, now() + TEND_EVERY
            while not closed.is_set():
                message = wire.receive(max(ask_at - now(), 0.001))
                heard = heard or message is not None
                if now() >= ask_at:
                    if not heard:
                        raise self._silence(f"{sentinel} says nothing any more")
                    wire.send(PING, ASK_WITHIN)
                    heard = False
                elif not self._is_told_by(message):
                    continue
                self._heed(asking, sentinel)
                ask_at = now() + TEND_EVERY

    def _is_told_by(self, message: object) -> bool:
        """Whether it concerns this primary; answers come on this connection too."""
        match message:
            case [b"message", _, bytes(told)]:
                return self.primary.encode() in told.split()
        return False

    def _heed(self, asking: Wire, sentinel: Sentinel) -> None:
        """What it says by itself is a hint: what counts is what it answers."""
        if not self._lead_to(self._asked_on(asking, sentinel, ASK_WITHIN)):
            raise self._silence(f"{sentinel} has not heard of the last failover")


def place(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
