"""The primary whose address comes from Redis Sentinels: ``redis+sentinel://``, or ``rediss+sentinel://`` with TLS.

Sentinels are asked before each connection is made, and the server at the address must confirm that it is the primary.
But after a failover the former primary still replies on its existing connections until a Sentinel demotes it. Until
then it would grant locks that the new primary grants as well. (The demotion takes 10 s if an operator asked for the
failover.) So the client subscribes to one Sentinel, and asks all of them in turn, including those that only another
Sentinel names. `followed_primary` decides from their replies which primary the client follows. When the client begins
to follow a new primary, it closes every connection to another server, even if a reply is awaited there: that reply
would come from a former primary.

The client follows the new primary from its promotion on (``+promoted-slave``). The Sentinel that leads the failover
sends ``+switch-master`` only after the last replica follows the new primary, which may take minutes.

A failover may lose locks, because Redis replicates a write only after its reply.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from multilock import BackendRejected, BackendUnavailable, MultilockError, system
from multilock.backend import start_worker
from multilock.log_thread import logger
from multilock.timing import LONGEST_PAUSE
from multilock_redis.connect_errors import not_connected
from multilock_redis.followed_primary import Following, Told
from multilock_redis.slot_table import Address
from multilock_redis.transport import Endpoint, Wire
from multilock_redis.wire import pack, spelled

__all__ = ["Sentinel", "SentinelEndpoint"]

ROLE = pack("ROLE")
PING = pack("PING")
MYID = pack("SENTINEL", "MYID")  # available since Redis 6.2
LISTEN = pack("SUBSCRIBE", "+promoted-slave", "+switch-master")
ASK_WITHIN = 1.0  # seconds for the reply of a Sentinel to a background thread
# seconds between two questions to the subscribed Sentinel, and between two rounds of questions to all Sentinels
TEND_EVERY = 2.0

# The errors of a Sentinel, and what the user should do. The login at a Sentinel is separate from the primary's.
_REMEDIES = {
    "unknown command": "it is not a Sentinel: give redis:// with this address, or the port of a Sentinel, often 26379",
    "NOAUTH": "give sentinel_password=, and sentinel_username= if the Sentinel has users",
    "No such master": "give the name that the Sentinels call the primary by, as in redis+sentinel://host/NAME",
}
_CHECK_LOGIN = "check sentinel_username= and sentinel_password="


class Sentinel(Endpoint):
    """One Sentinel. Each Sentinel has separate threads for connecting, so that a DNS look-up that hangs does not delay
    questions to other Sentinels."""

    def __init__(
        self, scheme: str, kind: Callable[..., Any], settings: Mapping[str, Any], *, learnt: bool = False
    ) -> None:
        """``learnt`` is True if another Sentinel has named this address, so that only one Sentinel is reached there."""
        self._scheme = scheme
        self.place = Address(settings.get("host", "localhost"), settings.get("port", 26379))
        super().__init__(f"{scheme}://{self.place} (a Sentinel)", kind, settings)
        self.learnt = learnt
        self.reached = self.place  #: the numeric address of the last connection
        self.silent = False  #: whether this Sentinel did not reply to the last question

    def at(self, place: Address) -> Sentinel:
        """Return another Sentinel with the same login."""
        settings = {**self._settings, "host": place.host, "port": place.port}
        return Sentinel(self._scheme, self._class, settings, learnt=True)

    def __str__(self) -> str:
        return str(self.place)


class SentinelEndpoint(Endpoint):
    """The address of the present primary. ``settings`` are for connections to any primary."""

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
        self.sentinels = tuple(sentinels)  #: the first Sentinel is the one that replied last
        self.primary = primary
        self.pushes: Callable[..., None] = _nobody  #: `multilock.backend.Notices.pushes`
        self._subscription = f"subscription to the Sentinels of {primary}"
        self._begin()

    def _begin(self) -> None:
        self._choosing = system.Lock()  # only threads of multilock take it, and no interrupt reaches these
        self._following = Following(len(self.sentinels))
        self._learnt: dict[Address, Sentinel] = {}
        self._closed = system.Event()
        self._look = system.Event()  # set when all Sentinels must be asked at once, or when the client is closed
        self._unwatched = [True]  # the caller that pops this item starts the threads of `_watch` and `_compare`
        self._listened_to: Wire | None = None

    @property
    def told(self) -> Told | None:
        """The last reply that named the followed primary."""
        return self._following.told

    def everybody(self) -> list[Sentinel]:
        """Return the Sentinels of the URL, then the Sentinels with other addresses that they have named."""
        with self._choosing:
            reached = {each.reached for each in self.sentinels} | {each.place for each in self.sentinels}
            others = [place for place in self._following.others() if place not in reached]
            self._learnt = {place: self._learnt.get(place) or self.sentinels[0].at(place) for place in others}
            return [*self.sentinels, *self._learnt.values()]

    def forget(self) -> None:
        super().forget()
        for sentinel in (*self.sentinels, *self._learnt.values()):
            sentinel.forget()
        self._begin()

    def close(self) -> None:
        super().close()
        for sentinel in (*self.sentinels, *self._learnt.values()):
            sentinel.close()
        self._closed.set()
        self._look.set()
        if wire := self._listened_to:
            wire.interrupt()

    # ---- a connection to the primary

    def _dial(self, within: float, now: Callable[[], float]) -> Wire:
        deadline = now() + within
        failures: list[MultilockError] = []
        tried: set[str] = set()
        first = self.told is None  # one reply is not enough at first if the URL names more Sentinels
        asked = list(self.sentinels) if first else self.everybody()
        answered: Sentinel | None = None
        for i, sentinel in enumerate(asked, 1):
            try:
                # Each Sentinel gets a share of the time, so that time is left for the others and for the primary.
                self._consult(sentinel, (deadline - now()) / (len(asked) + 2 - i), now)
                answered = sentinel
            except MultilockError as error:
                failures.append(error)
            told = self.told
            if told is None or answered is None or (first and i < len(asked) and not self._following.is_agreed()):
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
            self.sentinels = tuple(sorted(self.sentinels, key=lambda each: each is not answered))
            self._watch_from_now_on(now)
            return wire
        raise self._nowhere(failures)

    def _consult(self, sentinel: Sentinel, within: float, now: Callable[[], float]) -> None:
        """Ask this Sentinel, and count its reply. Raises as `ask` does, and BackendUnavailable if the client follows
        another primary."""
        try:
            told = self.ask(sentinel, within, now)
        except MultilockError:
            sentinel.silent = True
            with self._choosing:
                self._following.silent(sentinel.reached)
            raise
        sentinel.silent = False
        self._heed(told, sentinel, now)

    def _heed(self, told: Told, sentinel: Sentinel, now: Callable[[], float]) -> None:
        """Count a reply, and close the connections to servers that the client no longer follows."""
        with self._choosing:
            own = sentinel.learnt or told.place in self._following.others()
            agrees = self._following.note(told, own, now())
            followed = self._following.told
            if self._following.look_again:
                self._following.look_again = False
                self._look.set()
        if followed:
            here, anywhere = self._at(followed), f"{self.name} at "
            for wire in self._open:
                if wire.where.startswith(anywhere) and wire.where != here:
                    wire.interrupt()
        if not agrees:
            raise self._silence(f"{sentinel} does not know of the last failover yet")

    def ask(self, sentinel: Sentinel, within: float, now: Callable[[], float]) -> Told:
        """Ask one Sentinel. Raises BackendUnavailable (nothing was executed), or BackendRejected with the remedy."""
        wire = self._call_on(sentinel, within, now)
        try:
            return self._asked_on(wire, sentinel, within)
        finally:
            wire.close()

    def _asked_on(self, wire: Wire, sentinel: Sentinel, within: float) -> Told:
        # During a failover, the reply to MASTER has the new epoch, but the former primary's address. So ask for the
        # address twice.
        where, describe, others = (
            pack("SENTINEL", question, self.primary) for question in ("GET-MASTER-ADDR-BY-NAME", "MASTER", "SENTINELS")
        )
        try:
            answers = wire.exchange([where, describe, where, others, MYID], within)
            needed, (more, my_id) = [answer for answer, _ in answers[:3]], [answer for answer, _ in answers[3:]]
            for answer in needed:
                if isinstance(answer, Exception):
                    raise answer
            before, described, after = (_words(answer) for answer in needed)
            if before != after:
                raise self._silence(f"{sentinel} is just learning of a failover")
            facts = _facts(described)
            host, port = after
            place = Address(*wire.reached) if wire.reached else sentinel.place
            known = [] if isinstance(more, Exception) else [_facts(_words(each)) for each in more]
            return Told(
                int(facts["config-epoch"]),
                Address(host, int(port)),
                facts,
                str(place) if isinstance(my_id, Exception) else my_id.decode(),
                tuple(Address(each["ip"], int(each["port"])) for each in known if each["port"] != "0"),
                place,
                answers[0][1],
                "; ".join(str(answer) for answer in (more, my_id) if isinstance(answer, Exception)),
            )
        except BackendUnavailable as error:
            raise BackendUnavailable(str(error), unknown=False, backend="redis") from error
        except BackendRejected as error:
            raise self._refused(error) from error
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise self._silence(f"{sentinel} did not reply as a Sentinel does: {error!r}") from error

    def _call_on(self, sentinel: Sentinel, within: float, now: Callable[[], float]) -> Wire:
        try:
            wire = sentinel.connect(within, now)
        except BackendRejected as error:
            raise self._refused(error) from error
        sentinel.reached = Address(*wire.reached) if wire.reached else sentinel.place
        return wire

    def _refused(self, error: BackendRejected) -> BackendRejected:
        said, _, remedy = str(error).rpartition(" (")
        remedy = next((what for word, what in _REMEDIES.items() if word in said), "")
        if not remedy and "not trusted" in str(error):
            return error
        return BackendRejected(f"{said} ({spelled(remedy or _CHECK_LOGIN, self.name)})", backend="redis")

    def _connect_to(self, told: Told, where: str, within: float, now: Callable[[], float]) -> Wire:
        deadline = now() + within
        settings = {**self._settings, "host": told.primary.host, "port": told.primary.port}
        try:
            wire = self._open_wire(self._class, settings, where, max(within, 0.001), now)
        except Exception as error:
            raise not_connected(error, where) from error
        try:
            # ROLE only detects a replica. A primary that was paused or cut off does not know that it was replaced.
            role = wire.call(ROLE, max(deadline - now(), 0.001))[0]
            if role != b"master":
                raise self._silence(f"the Sentinels name {told.primary}, which is still a replica")
            with self._choosing:  # a thread that changes the primary after this check also ends this connection
                is_followed = self.told is not None and self.told.primary == told.primary
            if not is_followed:
                raise self._silence("there was a failover meanwhile")
        except BackendUnavailable as error:
            wire.close()
            raise BackendUnavailable(str(error), unknown=False, backend="redis") from error
        except BaseException:
            wire.close()
            raise
        return wire

    def _at(self, told: Told) -> str:
        return f"{self.name} at {told.primary}"

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
        try:
            self._unwatched.pop()
        except IndexError:  # another thread was first
            return
        start_worker(partial(self._watch, self._closed, now), "multilock-redis-sentinel")
        start_worker(partial(self._compare, self._closed, self._look, now), "multilock-redis-sentinel")

    def _watch(self, closed: system.Event, now: Callable[[], float]) -> None:
        """Subscribe to one Sentinel after the other, until the client is closed. A thread runs this."""
        turn = 0
        while not closed.is_set():
            sentinels = self.everybody()
            try:
                self._listen_to(sentinels[turn % len(sentinels)], closed, now)
            except Exception as error:
                if not closed.is_set():
                    self.pushes(self._subscription, str(error))
                known = isinstance(error, MultilockError)
                logger.log(
                    logging.DEBUG if known else logging.ERROR,
                    "changes of the primary are not pushed at the moment: %s",
                    error,
                    exc_info=not known,
                )
            turn += 1
            closed.wait(LONGEST_PAUSE * system.uniform(0.1, 1.0))

    def _compare(self, closed: system.Event, look: system.Event, now: Callable[[], float]) -> None:
        """Ask one Sentinel after the other. If they contradict each other, ask all of them without a pause.

        A thread runs this. Each round asks all Sentinels that reply, and one silent Sentinel.
        """
        turn = hurried = 0
        while not closed.is_set():
            everybody = self.everybody()
            silent = [each for each in everybody if each.silent]
            asked = [each for each in everybody if not each.silent] or everybody[:1]
            if silent:
                asked.append(silent[turn // len(asked) % len(silent)])
            try:
                self._consult(asked[turn % len(asked)], ASK_WITHIN, now)
            except MultilockError as error:
                logger.debug("a Sentinel has nothing newer at the moment: %s", error)
            turn += 1
            if look.is_set() and not closed.is_set():
                look.clear()
                hurried = len(everybody)
            if hurried:
                hurried -= 1
            else:
                look.wait(TEND_EVERY)

    def _listen_to(self, sentinel: Sentinel, closed: system.Event, now: Callable[[], float]) -> None:
        with ExitStack() as stack:
            wire = self._listened_to = self._call_on(sentinel, ASK_WITHIN, now)
            stack.callback(wire.close)
            asking = self._call_on(sentinel, ASK_WITHIN, now)
            stack.callback(asking.close)
            [(answer, _)] = wire.exchange([LISTEN], ASK_WITHIN, pushes=True)
            if isinstance(answer, BackendUnavailable):
                raise answer
            self._heed_on(asking, sentinel, now)  # a change before the subscription was not pushed
            if isinstance(answer, BackendRejected):  # this user may ask the Sentinel, but not subscribe
                self.pushes(self._subscription, str(answer), refused=True)
                while not closed.wait(TEND_EVERY):
                    self._heed_on(asking, sentinel, now)
            self.pushes(self._subscription, None)
            heard, ask_at = True, now() + TEND_EVERY
            while not closed.is_set():
                message = wire.receive(max(ask_at - now(), 0.001))
                heard = heard or message is not None
                if now() >= ask_at:
                    if not heard:
                        raise self._silence(f"{sentinel} no longer sends anything")
                    wire.send(PING, ASK_WITHIN)
                    heard = False
                elif not self._is_told_by(message):
                    continue
                self._heed_on(asking, sentinel, now)
                ask_at = now() + TEND_EVERY

    def _is_told_by(self, message: object) -> bool:
        """Return whether this message concerns our primary. Replies arrive on this connection as well."""
        match message:
            case [b"message", _, bytes(told)]:
                return self.primary.encode() in told.split()
        return False

    def _heed_on(self, asking: Wire, sentinel: Sentinel, now: Callable[[], float]) -> None:
        """Ask the Sentinel, because its pushes are only hints."""
        self._heed(self._asked_on(asking, sentinel, ASK_WITHIN), sentinel, now)


def _nobody(connection: str, trouble: str | None, *, refused: bool = False) -> None:
    """Ignore a report that comes before the client is open."""


def _words(answer: Any) -> list[str]:
    return [word.decode(errors="replace") for word in answer]


def _facts(words: list[str]) -> dict[str, str]:
    return dict(zip(words[::2], words[1::2], strict=True))
