"""What the server pushes: wake-ups for waiters, and changes of keys that are held or followed.

Two connections of their own. One is subscribed, and a thread reads it. On the other the server tracks what is read
after a ``CLIENT CACHING YES`` (``CLIENT TRACKING … REDIRECT … OPTIN``): it tells the first one when such a key changes,
once per read. Renewals go over the other one too, since what it changes itself is not pushed (``NOLOOP``), and read
again what they renewed. (Without ``OPTIN`` a 7.0 server remembers all keys of a script at each read in it: renewing
500 locks took 98 ms instead of 1.1.)

Both are opened when they are first needed: a program whose locks are free and short has neither. A push is lost when a
connection breaks: so after each reconnect everything is looked at once, and until then heartbeats and renewals find out
what no push told. The push of a hand-over is proof, for as long as the time of sending in it vouches for
(`Recipe.pushed`); every other is a hint.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from contextlib import suppress
from typing import Any

from multilock import BackendRejected, BackendUnavailable, LossReason, MultilockError, system
from multilock.backend import Granted, Held, Notices, start_worker
from multilock.telling import logger
from multilock_redis.keys import Keyspace
from multilock_redis.recipe import Recipe
from multilock_redis.transport import Answer, Connections, Endpoint, Wire
from multilock_redis.watched import Watched
from multilock_redis.wire import IS_REPLICA, Redirected, pack, refused

__all__ = ["Listener"]

INVALIDATED = b"__redis__:invalidate"
PING = pack("PING")
CACHING = pack("CLIENT", "CACHING", "YES")  # the next command's keys are tracked
READ_AT_ONCE = 500  # keys
TEND_EVERY = 2.0  # seconds; a dead connection is found within two of them, before a waiter's place is lost
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0  # seconds between tries to connect again
RECONNECT_WITHIN = 2.0
LOOK_WITHIN = 1.0  # seconds; for as long a silent tracked connection may keep the thread from its wake-ups
FIRST_AGAIN, LONGEST_AGAIN = 5.0, 300.0  # seconds until what was refused is asked for again
UNTRACKED = "a deleted key is noticed at the next renewal only"
REDIRECT_ENDED = "you want redirect to does not exist"

Before = tuple[str, dict[str, bytes]]
"""A name that is asked for, and which of our claims were watched then, each with what its key should hold."""

Owner = bytes | Redirected | None
"""What a key holds; or that another node of a cluster serves it."""

Moving = list[tuple[str, str, bytes]]
"""Claims that another node is to watch: id, name, and what its key should hold."""


class Listener:
    def __init__(
        self, endpoint: Endpoint, connections: Connections, keys: Keyspace, recipe: Recipe, notices: Notices
    ) -> None:
        self._recipe = recipe
        self._endpoint = endpoint
        self._connections = connections
        self._keys = keys
        self._notices = notices
        self._now = notices.now
        self._closed = system.Event()
        self.listening = False  #: wake-ups are pushed, or the server refused that: waiting may begin
        self.refused: dict[str, str] = {}  #: what the server does not let us do, and what it said
        self._again_at, self._again_in = 0.0, FIRST_AGAIN  # when what is refused is asked for again, and how often
        self._subscription = f"subscription to {endpoint.name}"
        self._tracking = f"tracked connection to {endpoint.name}"
        # An interrupt (Ctrl-C) comes when a call returns or a Python function begins. So these two locks are taken by
        # `taken += map(lock.acquire, …)`, which has no such moment between the acquire and the note of it, and a
        # `finally` lets go of them by a call of its own: else one would stay taken for ever.
        self._starting = system.Lock()
        self._subscribed: Wire | None = None
        self._subscriber = 0  # its id at the server; 0: there is none that could hear of changes
        self._using_tracked = system.Lock()
        self._tracked: Wire | None = None
        self._redirect = 0  # the subscriber that the tracked connection's changes go to
        self._watched = Watched()
        self._followed: dict[str, object] = {}  # name -> owner as last read
        self._elsewhere: set[str] = set()  # names of these that another node of a cluster serves, as this one says
        #: In the thread, of such names, and of all after each connection that broke: has those looked after that
        #: another node serves, and returns the others. What is elsewhere is neither free nor lost: it is not told of.
        self.hand_on: Callable[[set[str]], set[str]] = _nowhere

    def listen(self, within: float) -> None:
        """Subscribe, unless that is done. BackendUnavailable (nothing was executed) if there is no answer."""
        deadline = self._now() + within
        taken: list[bool] = []
        try:
            taken += map(self._starting.acquire, [True], [max(0.0, within)])
            if taken != [True]:
                raise self._silence("subscribing takes too long")
            if not self.listening and not self._closed.is_set():
                wire = self._subscribe(deadline - self._now())
                start_worker(lambda: self._run(wire), "multilock-redis-notices")
                self.listening = True
        finally:
            if taken == [True]:
                self._starting.release()

    def watch(self, held: Sequence[Held], within: float) -> None:
        """Report when one of these does not hold its name (any more)."""
        deadline = self._now() + within
        for claim, granted in held:
            self._watched.add(claim.id, claim.name, str(granted.key).encode())
        self.listen(within)
        self._look([claim.name for claim, _ in held], deadline - self._now())

    def unwatch(self, claim_id: str) -> None:
        self._watched.take(claim_id)

    def follow(self, names: frozenset[str], within: float) -> bool:
        """Report changes of holder of exactly these names. False: this server does not push them."""
        deadline = self._now() + within
        unread = object()
        followed = self._followed
        self._followed = {name: followed.get(name, unread) for name in names}
        if names:
            self.listen(within)
            if "changes" in self.refused:
                return False
            self._look(names - followed.keys(), deadline - self._now())
        return "changes" not in self.refused

    def renew(self, held: Sequence[Held], within: float) -> list[Granted | BackendUnavailable | None]:
        """Over the tracked connection, and what is watched stays tracked. Over another when that is in use or down:
        then the renewal itself is pushed as a change, and looked at, which tracks it again."""
        if self._tracked is None:
            return self._recipe.renew(held, self._connections.exchange, within)
        taken: list[bool] = []
        owners: list[Owner] = []
        before: list[Before] = []
        try:
            taken += map(self._using_tracked.acquire, [False])
            wire = self._tracked
            if taken != [True] or not wire.alive or wire.stale():
                return self._recipe.renew(held, self._connections.exchange, within)
            # By name: what one of its holders changes here is pushed to none of them.
            before = self._before({claim.name for claim, _ in held if self._matters(claim.name)})
            reads = self._reads(before, tracked=True)

            def exchange(requests: Sequence[bytes], within: float) -> list[Answer]:
                answers = wire.exchange([*requests, *reads], within)
                with suppress(MultilockError):  # a read that is refused harms no renewal
                    owners[:] = self._owners(answers[len(requests) :])
                return answers[: len(requests)]

            answers = self._recipe.renew(held, exchange, within)
        finally:
            if taken == [True]:
                self._using_tracked.release()
        self._tell(zip(before, owners, strict=False))  # without an answer there is nothing to tell
        return answers

    def watches(self) -> bool:
        return bool(self._watched or self._followed)

    def doubt(self) -> None:
        """All of that may be elsewhere by now: it is looked at soon."""
        self._elsewhere |= self._names()

    def leave(self, names: Collection[str]) -> tuple[Moving, dict[str, object]]:
        """What is watched and followed of these; from now on it is not, here: `take_over` it at another node."""
        watched = [(claim_id, name, owner) for name in names for claim_id, owner in self._watched.of_name(name).items()]
        watched = [each for each in watched if self._watched.take(each[0])]  # what a release took out stays out
        followed = {name: owner for name, owner in self._followed.items() if name in names}
        self._followed = {name: owner for name, owner in self._followed.items() if name not in names}
        return watched, followed

    def take_over(self, watched: Moving, followed: dict[str, object], wanted: Container[str], within: float) -> None:
        """What another node was left with; ``wanted``: the claims that were not released meanwhile."""
        deadline = self._now() + within
        for each in watched:
            self._watched.add(*each)
        for claim_id, _, _ in watched:
            if claim_id not in wanted:
                self._watched.take(claim_id)
        self._followed = followed | self._followed
        names = {name for _, name, _ in watched} | followed.keys()
        self._elsewhere |= names  # looked at again until an answer comes
        self.listen(within)
        self._look(names, deadline - self._now())

    def close(self) -> None:
        self._closed.set()
        for wire in (self._subscribed, self._tracked):
            if wire is not None:
                wire.interrupt()

    # ---- the subscribed connection

    def _subscribe(self, within: float) -> Wire:
        wire = self._endpoint.connect(within, self._now)
        # The wake-ups last: after the answer to this one, and only then, messages may come at any time.
        channels = (INVALIDATED, f"multilock:wake:{self._notices.client}")
        requests = [pack("CLIENT", "ID"), *(pack("SUBSCRIBE", channel) for channel in channels)]
        answers = [answer for answer, _ in wire.exchange(requests, within, pushes=True)]
        client, changes, wakes = answers
        for answer in answers:
            if isinstance(answer, BackendUnavailable):  # silence, as LOADING or BUSY: no refusal
                raise answer
        self.refused = {}  # what was refused once may be allowed by now
        if isinstance(wakes, Exception):
            self._refuse("wake-ups", f"waiters are woken by timers only: {wakes}")
        for answer in (client, changes):
            if isinstance(answer, Exception):
                self._refuse("changes", f"{UNTRACKED}: {answer}")
        self._recipe.told = "wake-ups" not in self.refused
        if self._recipe.told:
            self._notices.pushes(self._subscription, None)
        self._subscriber = 0 if "changes" in self.refused else client
        self._subscribed = wire
        return wire

    def _run(self, wire: Wire) -> None:
        """The thread: reads until the connection breaks, and makes a new one, until the client is closed."""
        self.listening = True  # here too: an interrupt may end listen() while it waits for this thread to begin
        while True:
            again: Wire | None
            try:
                self._read(wire)
                again = self._ask_again(wire)
            except Exception as error:
                known = isinstance(error, MultilockError)
                logger.log(logging.DEBUG if known else logging.ERROR, "not subscribed: %s", error, exc_info=not known)
                self._subscriber = 0
                wire.close()
                self._notices.pushes(self._subscription, str(error))
                again = self._subscribe_again()
            if again is None:
                break
            if again is wire:
                continue
            wire = again
            # Whatever was pushed in between is lost.
            self._notices.wake(None)
            self._notices.changed(None)
            self._look_again(None)
        for connection in (self._subscription, self._tracking):
            self._notices.pushes(connection, None)  # not needed any more
        # Here, since who closes the client may find it in use, or not made yet. No other is made after it, and no
        # interrupt comes to a thread of ours.
        with self._using_tracked:
            if self._tracked is not None:
                self._tracked.close()

    def _ask_again(self, wire: Wire) -> Wire | None:
        """Something was refused: another connection, in case it is allowed by now; this one where there is none. None:
        the client was closed."""
        if self._closed.is_set():
            wire.close()
            return None
        self._put_off()
        try:
            again = self._subscribe(RECONNECT_WITHIN)
        except MultilockError as error:
            logger.debug("what was refused could not be asked for again: %s", error)
            return wire
        wire.close()
        return again

    def _subscribe_again(self) -> Wire | None:
        """None: the client was closed."""
        pause = FIRST_PAUSE
        while not self._closed.wait(pause * system.uniform(0.5, 1.5)):
            self.hand_on(self._names())
            if self._closed.is_set():
                break
            try:
                return self._subscribe(RECONNECT_WITHIN)
            except MultilockError as error:
                logger.debug("not subscribed again yet: %s", error)
                self._notices.pushes(self._subscription, str(error), refused=isinstance(error, BackendRejected))
            # Requests may go on all the same, over connections that are there. Then the scripts must not take our
            # waiters for dead, and nobody but us looks for changes.
            self._recipe.told = False
            self._look_again(None)
            pause = min(LONGEST_PAUSE, pause * 2)
        return None

    def _read(self, wire: Wire) -> None:
        """Until it breaks, or until something that was refused is to be asked for again."""
        tend_at = self._now() + TEND_EVERY
        heard = True
        while not self._closed.is_set():
            changed: set[str] = set()
            message = wire.receive(max(0.0, tend_at - self._now()))
            while message is not None:  # changes that came together are looked at together
                heard = True
                changed |= self._understand(message)
                # After a wake-up it is the woken thread that needs the interpreter.
                message = wire.receive(0.0) if 0 < len(changed) < READ_AT_ONCE else None
            if changed := {name for name in changed if self._matters(name)}:
                self._look_again(changed)
                self._hand_on()
            if self._now() >= tend_at:
                if not heard:
                    raise self._silence("the subscribed connection is dead")
                heard = False
                wire.send(PING, LOOK_WITHIN)
                self._look_again(self._took_elsewhere())
                self._hand_on()
                tend_at = self._now() + TEND_EVERY
                if self.refused and self._now() >= self._again_at:
                    return

    def _hand_on(self) -> None:
        if names := self._took_elsewhere():
            self._elsewhere |= self.hand_on(names)

    def _took_elsewhere(self) -> set[str]:
        names: set[str] = set()
        with suppress(KeyError):  # other threads add to it
            while True:
                names.add(self._elsewhere.pop())
        return {name for name in names if self._matters(name)}

    def _understand(self, message: list[Any]) -> set[str]:
        """Wake who is meant; return the names that may have changed."""
        match message:
            case [b"message", _, bytes(payload)]:  # first: somebody waits for it
                claim_id, granted = self._recipe.pushed(payload)
                if granted:
                    self._notices.granted(claim_id, granted)
                else:
                    self._notices.wake(claim_id)
                if "changes" in self.refused:  # force_release tells the former holder so
                    name = self._watched.name(claim_id)
                    return {name} if name is not None else set()
            case [b"message", channel, None] if channel == INVALIDATED:  # the whole database
                return self._names()
            case [b"message", channel, [*keys]] if channel == INVALIDATED:
                return {known for key in keys if (known := self._keys.name(key)) is not None}
        return set()

    # ---- the tracked connection

    def _look_again(self, names: Iterable[str] | None) -> None:
        """In the thread."""
        if not (self.watches() or self._tracked):
            if "changes" not in self.refused:
                self._notices.pushes(self._tracking, None)  # not needed any more
            return
        try:
            self._look(names, 2 * LOOK_WITHIN)
        except MultilockError as error:
            logger.debug("changes of keys are not pushed at the moment: %s", error)
            if self._subscriber:
                self._notices.pushes(self._tracking, str(error))

    def _look(self, names: Iterable[str] | None, within: float) -> None:
        """Read who holds these names (None: all), and tell what changed. From then on the server tells of changes,
        where it can. A tracked connection that is broken or silent is replaced at once, and every name is read."""
        deadline = self._now() + within
        taken: list[bool] = []
        try:
            taken += map(self._using_tracked.acquire, [True], [max(0.0, within)])
            if taken != [True]:
                raise self._silence("the tracked connection is busy")
            before = self._tracked
            try:
                looked = self._look_within(names, min(within / 2, LOOK_WITHIN) if before else within)
            except BackendUnavailable:
                if before is None or not self._subscriber:
                    raise
                looked = self._look_within(None, deadline - self._now())
        except BackendRejected as error:
            self._refuse("changes", f"{UNTRACKED}: {error}")
            return
        finally:
            if taken == [True]:
                self._using_tracked.release()
        self._tell(looked)

    def _look_within(self, names: Iterable[str] | None, within: float) -> list[tuple[Before, Owner]]:
        """BackendRejected: they may not be read; and nothing else."""
        deadline = self._now() + within
        wire = None
        if self._subscriber and "changes" not in self.refused:
            try:
                wire = self._track(within)
                names = None if wire is not self._tracked else names
                self._tracked = wire
            except BackendRejected as error:
                self._refuse("changes", f"{UNTRACKED}: {error}")
        before = self._before(self._names() if names is None else names)
        requests = self._reads(before, tracked=wire is not None)
        try:
            answers = (wire or self._connections).exchange(requests, deadline - self._now())
        except BackendRejected as error:  # of the connection
            raise refused(error) from error
        return list(zip(before, self._owners(answers), strict=True))

    def _names(self) -> set[str]:
        """All that are of interest."""
        return self._followed.keys() | self._watched.names()

    def _matters(self, name: str) -> bool:
        return name in self._followed or self._watched.has_name(name)

    def _before(self, names: Iterable[str]) -> list[Before]:
        """Who of us has these names, before it is asked who has them."""
        return [(name, self._watched.of_name(name)) for name in dict.fromkeys(names)]

    def _reads(self, before: list[Before], *, tracked: bool) -> list[bytes]:
        """Requests for the owners of these names, and a write that does nothing: a replica refuses it, which may lag
        behind, or be empty. Without a name it is a ping."""
        requests = []
        # Of a slot that is being moved a node answers for one key at a time.
        at_once = 1 if self._keys.in_slots else READ_AT_ONCE
        for start in range(0, len(before), at_once):
            keys = [self._keys.lock(name) for name, _ in before[start : start + at_once]]
            requests += [CACHING, pack("MGET", *keys)] if tracked else [pack("MGET", *keys)]
        return [*requests, self._keys.primary_only(before[0][0]) if before else PING]

    def _owners(self, answers: Sequence[Answer]) -> list[Owner]:
        """What was answered to `_reads`."""
        owners: list[Owner] = []
        *reads, (proof, _) = answers
        if isinstance(proof, BackendUnavailable) and IS_REPLICA in str(proof):
            raise proof
        for answer, _ in reads:
            if isinstance(answer, Redirected) and self._keys.in_slots:
                owners.append(answer)
            elif isinstance(answer, Exception):
                raise answer
            elif isinstance(answer, list):
                owners += answer
        return owners

    def _tell(self, looked: Iterable[tuple[Before, Owner]]) -> None:
        for (name, watched), owner in looked:
            if isinstance(owner, Redirected):
                self._elsewhere.add(name)
                continue
            message = "its key was deleted or has expired" if owner is None else "its key has another owner"
            for claim_id in [claim_id for claim_id, its_owner in watched.items() if its_owner != owner]:
                # Taken out by who tells: a release takes its claim out before it is sent, so what it ended is not lost.
                if self._watched.take(claim_id):
                    self._notices.gone(claim_id, LossReason.TAKEN, message)
            followed = self._followed
            if name in followed and followed[name] != owner:
                followed[name] = owner
                self._notices.changed(name)

    def _track(self, within: float) -> Wire:
        """The tracked connection, a new one if there is none that tells the present subscriber."""
        wire = self._tracked
        if wire is not None and wire.alive and self._redirect == self._subscriber and not wire.stale():
            return wire
        subscriber = self._subscriber
        if not subscriber or self._closed.is_set():
            raise self._silence("the subscribed connection is down")
        if wire is not None:
            wire.close()
        try:
            wire = self._endpoint.connect(within, self._now)
        except BackendRejected as error:  # of the connection, not of what it is for
            raise refused(error) from error
        track = pack("CLIENT", "TRACKING", "ON", "REDIRECT", subscriber, "OPTIN", "NOLOOP")
        answers = [answer for answer, _ in wire.exchange([track, CACHING], within)]
        if not isinstance(answers[0], Exception) and not isinstance(answers[1], Exception):
            self._redirect = subscriber
            self._notices.pushes(self._tracking, None)
            self._again_in = FIRST_AGAIN
            return wire
        wire.close()
        refusal = next(answer for answer in answers if isinstance(answer, Exception))
        if REDIRECT_ENDED in str(refusal):
            raise self._silence(str(refusal))
        raise refusal

    def _put_off(self) -> None:
        self._again_at = self._now() + self._again_in
        self._again_in = min(LONGEST_AGAIN, 2 * self._again_in)

    def _refuse(self, what: str, consequence: str) -> None:
        if what in self.refused:
            return
        if not self.refused:
            self._again_at = self._now() + self._again_in
        self.refused[what] = consequence
        connection = self._subscription if what == "wake-ups" else self._tracking
        self._notices.pushes(connection, consequence, refused=True)

    def _silence(self, what: str) -> BackendUnavailable:
        return BackendUnavailable(f"{self._endpoint.name}: {what}", unknown=False)


def _nowhere(names: set[str]) -> set[str]:
    """Of a server that is in no cluster."""
    return names
