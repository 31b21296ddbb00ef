"""Receive pushes: wake-ups for waiters, and changes of the keys of names that this client holds or *follows*
(observes).

This takes two connections. A thread reads the *subscribed connection*. The *tracked connection* is for reads: the
server tracks each key that is read there after a ``CLIENT CACHING YES`` (``CLIENT TRACKING … REDIRECT … OPTIN``). When
such a key changes, the server reports it on the subscribed connection, once per read. Renewals use the tracked
connection as well, because the server does not report changes made over it (``NOLOOP``). A renewal also reads the
renewed keys, so that they stay tracked. (Without ``OPTIN`` a 7.0 server tracks all keys of a script at each read in it:
renewing 500 locks took 98 ms instead of 1.1.)

Both connections are opened when they are first needed. Pushes are lost while a connection is broken, so every key is
read once after each reconnect. Until then waiters find a free name by their heartbeats, and holders find a loss by
their renewals. The push of a handover is itself the grant (`Recipe.pushed`). Every other push is a hint, which makes
the waiter or the holder send a request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from multilock import BackendRejected, BackendUnavailable, LossReason, MultilockError, system
from multilock.backend import Held, Notices, start_worker
from multilock.log_thread import logger
from multilock.timing import retry_pause
from multilock_redis.acquire_release import Recipe
from multilock_redis.connections import Connections
from multilock_redis.keys import Keyspace
from multilock_redis.transactions import Exchange
from multilock_redis.transport import Answer, Endpoint, Wire
from multilock_redis.watched_claims import Watched
from multilock_redis.wire import IS_REPLICA, Redirected, pack, refused

__all__ = ["Listener"]

R = TypeVar("R")

INVALIDATED = b"__redis__:invalidate"
PING = pack("PING")
CACHING = pack("CLIENT", "CACHING", "YES")  # makes the server track the keys of the next command
READ_AT_ONCE = 500  # keys in one read
# Seconds between two pings over the subscribed connection. If nothing arrives between two pings, the connection counts
# as dead.
TEND_EVERY = 2.0
RECONNECT_WITHIN = 2.0
LOOK_WITHIN = 1.0  # seconds for which a tracked connection without a reply may delay the wake-ups
# seconds; the first and the longest pause before a refused subscription or tracking is tried again
FIRST_AGAIN, LONGEST_AGAIN = 5.0, 300.0
UNTRACKED = "a deleted key is noticed at the next renewal only"
REDIRECT_ENDED = "you want redirect to does not exist"

Before = tuple[str, dict[str, bytes]]
"""A name whose key is about to be read, and its watched claims at that time: claim id -> the owner that the key has
while the claim holds the lock."""

Owner = bytes | Redirected | None
"""The value of a key, or the report that another node of a cluster serves it."""

Moving = list[tuple[str, str, bytes]]
"""Claims that another node must watch from now on: id, name, and the owner that the key has while the claim holds the
lock."""


class Listener:
    """The subscribed and the tracked connection of one client to one server, and the thread that reads them."""

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
        #: whether claims may wait: True once the server has accepted or refused the subscription
        self.listening = False
        #: the refused kind of push, "wake-ups" or "changes" -> the consequence, for messages
        self.refused: dict[str, str] = {}
        # The time of the next try after a refusal, and the pause in seconds after that try.
        self._again_at, self._again_in = 0.0, FIRST_AGAIN
        self._subscription = f"subscription to {endpoint.name}"
        self._tracking = f"tracked connection to {endpoint.name}"
        self._starting = system.Lock()
        self._subscribed: Wire | None = None
        self._subscriber = 0  # the server's id of the subscribed connection; 0 if that cannot receive changes
        self._using_tracked = system.Lock()
        self._tracked: Wire | None = None
        self._redirect = 0  # the id of the subscriber that receives the tracked connection's changes
        self._watched = Watched()
        self._followed: dict[str, object] = {}  # name -> its owner at the last read
        self._elsewhere: set[str] = set()  # watched or followed names to read again, since another node may serve them
        #: The thread calls this with the names of `_elsewhere`, and after each reconnect with all names. The function
        #: hands each name that another node now serves to that node's listener, and returns the remaining names.
        self.hand_on: Callable[[set[str]], set[str]] = _nowhere

    def listen(self, within: float) -> None:
        """Subscribe, unless this client has already subscribed. Raises BackendUnavailable if there is no reply."""
        deadline = self._now() + within
        with system.Taking(self._starting, within, lambda: self._silence("subscribing takes too long")):
            if not self.listening and not self._closed.is_set():
                wire = self._subscribe(deadline - self._now())
                start_worker(lambda: self._run(wire), "multilock-redis-notices")
                self.listening = True

    def watch(self, held: Sequence[Held], within: float) -> None:
        """Report when one of these claims is lost, or was already lost."""
        deadline = self._now() + within
        for claim, granted in held:
            self._watched.add(claim.id, claim.name, str(granted.key).encode())
        self.listen(within)
        self._look([claim.name for claim, _ in held], deadline - self._now())

    def unwatch(self, claim_id: str) -> None:
        """Stop watching this claim."""
        self._watched.take(claim_id)

    def follow(self, names: frozenset[str], within: float) -> bool:
        """Report when the holder of one of these names changes, and stop reporting all other names. Returns False if
        this server does not push such changes."""
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

    def tracking(self, names: Collection[str], use: Callable[[Exchange], R]) -> R:
        """Return ``use(exchange)``, where ``exchange`` sends requests over the tracked connection, so that these names
        stay tracked.

        If that connection is in use or broken, ``exchange`` uses another one. The server then pushes the renewal as a
        change, and the thread reads the keys, which tracks them again. (A context manager would keep the mutex after an
        interrupt, as long as the exception is referenced.)
        """
        if self._tracked is None:
            return use(self._connections.exchange)
        taken: list[bool] = []
        owners: list[Owner] = []
        before: list[Before] = []
        try:
            system.take(self._using_tracked.acquire, 0.0, taken)
            wire = self._tracked
            if taken != [True] or not wire.alive or wire.stale():
                return use(self._connections.exchange)
            # Compare each read with all watched claims of the name, even with those that are not renewed now, because
            # the server pushes no change that is made over this connection.
            before = self._before({name for name in names if self._matters(name)})
            reads = self._reads(before, tracked=True)

            def exchange(requests: Sequence[bytes], within: float) -> list[Answer]:
                answers = wire.exchange([*requests, *reads], within)
                with suppress(MultilockError):  # a refused read does not affect the renewal
                    owners[:] = self._owners(answers[len(requests) :])
                return answers[: len(requests)]

            result = use(exchange)
        finally:
            if taken == [True]:
                self._using_tracked.release()
        self._tell(zip(before, owners, strict=False))
        return result

    def watches(self) -> bool:
        """Return whether any claim is watched or any name followed."""
        return bool(self._watched or self._followed)

    def doubt(self) -> None:
        """Read all names again soon, because another node may serve them now."""
        self._elsewhere |= self._names()

    def leave(self, names: Collection[str]) -> tuple[Moving, dict[str, object]]:
        """Stop watching and following these names. Returns the watched claims and the followed names, for the
        `take_over` of another node."""
        watched = [(claim_id, name, owner) for name in names for claim_id, owner in self._watched.of_name(name).items()]
        # a release may have removed a claim just now
        watched = [each for each in watched if self._watched.take(each[0])]
        followed = {name: owner for name, owner in self._followed.items() if name in names}
        self._followed = {name: owner for name, owner in self._followed.items() if name not in names}
        return watched, followed

    def take_over(self, watched: Moving, followed: dict[str, object], wanted: Container[str], within: float) -> None:
        """Watch the claims and follow the names that another node's `leave` has returned. ``wanted`` has the ids of the
        claims that were not released meanwhile."""
        deadline = self._now() + within
        for each in watched:
            self._watched.add(*each)
        for claim_id, _, _ in watched:
            if claim_id not in wanted:
                self._watched.take(claim_id)
        self._followed = followed | self._followed
        names = {name for _, name, _ in watched} | followed.keys()
        self._elsewhere |= names  # read until there is a reply
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
        # Subscribe to wake-ups last. Wake-ups may arrive from then on, and must not come between the other replies.
        channels = (INVALIDATED, f"multilock:wake:{self._notices.client}")
        requests = [pack("CLIENT", "ID"), *(pack("SUBSCRIBE", channel) for channel in channels)]
        answers = [answer for answer, _ in wire.exchange(requests, within, pushes=True)]
        client, changes, wakes = answers
        for answer in answers:
            if isinstance(answer, BackendUnavailable):  # for example LOADING or BUSY, which is not a refusal
                raise answer
        self.refused = {}  # the server may now allow what it refused earlier
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
        """Read the subscribed connection until the client is closed. Make a new connection whenever it breaks. The
        thread runs this."""
        self.listening = True  # an interrupt may have ended listen() before it could set this
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
            # all pushes since the connection broke are lost
            self._notices.wake(None)
            self._notices.changed(None)
            self._look_again(None)
        for connection in (self._subscription, self._tracking):
            self._notices.pushes(connection, None)  # the connection is no longer needed
        # The thread closes the tracked connection, because close() may find it in use, or not made yet.
        with self._using_tracked:
            if self._tracked is not None:
                self._tracked.close()

    def _ask_again(self, wire: Wire) -> Wire | None:
        """Make a new connection after a refusal, because the server may now allow the subscription or the tracking.
        Returns the present connection if no new one can be made.

        Returns None if the client was closed.
        """
        if self._closed.is_set():
            wire.close()
            return None
        self._put_off()
        try:
            again = self._subscribe(RECONNECT_WITHIN)
        except MultilockError as error:
            logger.debug("a refused subscription or tracking could not be tried again: %s", error)
            return wire
        wire.close()
        return again

    def _subscribe_again(self) -> Wire | None:
        """Try to connect until that succeeds. Returns None if the client was closed."""
        failures = 0
        while not self._closed.wait(retry_pause(failures) * system.uniform(0.5, 1.5)):
            self.hand_on(self._names())
            if self._closed.is_set():
                break
            try:
                return self._subscribe(RECONNECT_WITHIN)
            except MultilockError as error:
                logger.debug("not subscribed again yet: %s", error)
                self._notices.pushes(self._subscription, str(error), refused=isinstance(error, BackendRejected))
            # The scripts must not count our waiters as dead now, because their requests may still succeed over other
            # connections. No change is pushed meanwhile, so read all names.
            self._recipe.told = False
            self._look_again(None)
            failures += 1
        return None

    def _read(self, wire: Wire) -> None:
        """Read until the connection breaks, or until a refused subscription or tracking must be tried again."""
        tend_at = self._now() + TEND_EVERY
        heard = True
        while not self._closed.is_set():
            changed: set[str] = set()
            message = wire.receive(max(0.0, tend_at - self._now()))
            while message is not None:  # collect the changes that arrived together, to read their names together
                heard = True
                changed |= self._understand(message)
                # After a wake-up read no further message at once, because the woken thread needs the interpreter.
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
        with suppress(KeyError):  # other threads add to this set
            while True:
                names.add(self._elsewhere.pop())
        return {name for name in names if self._matters(name)}

    def _understand(self, message: list[Any]) -> set[str]:
        """Notify the claim that this message concerns. Returns the names that may have changed."""
        match message:
            case [b"message", _, bytes(payload)]:
                claim_id, granted = self._recipe.pushed(payload)
                if granted:
                    self._notices.granted(claim_id, granted)
                else:
                    self._notices.wake(claim_id)
                # force_release wakes the holder's claim. If the server refuses to report changes, only this wake-up
                # shows the loss.
                if "changes" in self.refused:
                    name = self._watched.name(claim_id)
                    return {name} if name is not None else set()
            case [b"message", channel, None] if channel == INVALIDATED:  # the whole database was flushed
                return self._names()
            case [b"message", channel, [*keys]] if channel == INVALIDATED:
                return {known for key in keys if (known := self._keys.name(key)) is not None}
        return set()

    # ---- the tracked connection

    def _look_again(self, names: Iterable[str] | None) -> None:
        """Read these names, or all if None, and report a failure. Only the thread calls this."""
        if not (self.watches() or self._tracked):
            if "changes" not in self.refused:
                self._notices.pushes(self._tracking, None)  # the connection is no longer needed
            return
        try:
            self._look(names, 2 * LOOK_WITHIN)
        except MultilockError as error:
            logger.debug("changes of keys are not pushed at the moment: %s", error)
            if self._subscriber:
                self._notices.pushes(self._tracking, str(error))

    def _look(self, names: Iterable[str] | None, within: float) -> None:
        """Read the holders of these names, or of all if None, and report the changes. The server then tracks these
        names, if it can.

        If the tracked connection breaks or gets no reply, it is replaced at once, and every name is read.
        """
        deadline = self._now() + within
        try:
            with system.Taking(self._using_tracked, within, lambda: self._silence("the tracked connection is busy")):
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
        self._tell(looked)

    def _look_within(self, names: Iterable[str] | None, within: float) -> list[tuple[Before, Owner]]:
        """Read these names within this time. Raises BackendRejected only if reading them is refused."""
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
        except BackendRejected as error:  # the server refused the connection, not the reads
            raise refused(error) from error
        return list(zip(before, self._owners(answers), strict=True))

    def _names(self) -> set[str]:
        """Return all names that are watched or followed."""
        return self._followed.keys() | self._watched.names()

    def _matters(self, name: str) -> bool:
        return name in self._followed or self._watched.has_name(name)

    def _before(self, names: Iterable[str]) -> list[Before]:
        """Return our claims of these names, for a comparison with the owners that a read returns."""
        return [(name, self._watched.of_name(name)) for name in dict.fromkeys(names)]

    def _reads(self, before: list[Before], *, tracked: bool) -> list[bytes]:
        """Return requests for the owners of these names, followed by a write that changes nothing.

        A replica refuses that write. Its replies then do not count, because a replica may lag behind or be empty. If
        there is no name, a ping replaces the write.
        """
        requests = []
        # While a slot is being moved, its node may refuse a request for several keys of the slot.
        at_once = 1 if self._keys.in_slots else READ_AT_ONCE
        for start in range(0, len(before), at_once):
            keys = [self._keys.lock(name) for name, _ in before[start : start + at_once]]
            requests += [CACHING, pack("MGET", *keys)] if tracked else [pack("MGET", *keys)]
        return [*requests, self._keys.primary_only(before[0][0]) if before else PING]

    def _owners(self, answers: Sequence[Answer]) -> list[Owner]:
        """Return the owners, from the replies to `_reads`."""
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
                # Only the thread that removes the claim reports its loss. A release removes the claim before it sends
                # its request, so a released lock is not reported as lost.
                if self._watched.take(claim_id):
                    self._notices.gone(claim_id, LossReason.TAKEN, message)
            followed = self._followed
            if name in followed and followed[name] != owner:
                followed[name] = owner
                self._notices.changed(name)

    def _track(self, within: float) -> Wire:
        """Return the tracked connection. If its changes do not go to the present subscriber, make a new tracked
        connection."""
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
        except BackendRejected as error:  # the server refused the connection, not the tracking
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
    """Return all names, because a server outside a cluster has no other nodes."""
    return names
