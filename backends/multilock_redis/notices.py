"""What the server pushes: wake-ups for waiters, and changes of keys that are held or followed.

Two connections of their own. One is subscribed, and a thread reads it. On the other the server tracks what was read
(``CLIENT TRACKING … REDIRECT``): it tells the first one when such a key changes, once per read. Both are opened when
they are first needed: a program whose locks are free and short has neither. A push is a hint and never proof, and it is
lost when a connection breaks: so after each reconnect everything is looked at once, and until then heartbeats and
renewals find out what no push told.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Iterable, Sequence

from multilock.backend import Notices
from multilock.errors import BackendRejected, BackendUnavailable, MultilockError
from multilock.model import Claim, LossReason
from multilock_redis.recipe import Keyspace
from multilock_redis.transport import Answer, Connections, Endpoint, Wire, pack

__all__ = ["Listener"]

logger = logging.getLogger("multilock")

INVALIDATED = b"__redis__:invalidate"
PING = pack("PING")
TEND_EVERY = 2.0  # seconds; a dead connection is found within two of them, before a waiter's place is lost
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0  # seconds between tries to connect again
RECONNECT_WITHIN = 2.0
LOOK_WITHIN = 1.0  # seconds; for as long a silent tracked connection may keep the thread from its wake-ups
REDIRECT_ENDED = "you want redirect to does not exist"


class Listener:
    def __init__(self, endpoint: Endpoint, connections: Connections, keys: Keyspace, notices: Notices) -> None:
        self._endpoint = endpoint
        self._connections = connections
        self._keys = keys
        self._notices = notices
        self._now = notices.now
        self._closed = threading.Event()
        self.listening = False  #: wake-ups are pushed, or the server refused that: waiting may begin
        self.refused: dict[str, str] = {}  #: what the server does not let us do, and what it said
        self._starting = threading.Lock()
        self._subscribed: Wire | None = None
        self._subscriber = 0  # its id at the server; 0: there is none that could hear of changes
        self._using_tracked = threading.Lock()
        self._tracked: Wire | None = None
        self._redirect = 0  # the subscriber that the tracked connection's changes go to
        self._watched: dict[str, Claim] = {}  # by name
        self._followed: dict[str, object] = {}  # name -> owner as last read

    def listen(self, within: float) -> None:
        """Subscribe, unless that is done. BackendUnavailable (nothing was executed) if there is no answer."""
        deadline = self._now() + within
        if not self._starting.acquire(timeout=max(0.0, within)):
            raise self._silence("subscribing takes too long")
        try:
            if not self.listening and not self._closed.is_set():
                wire = self._subscribe(deadline - self._now())
                threading.Thread(target=self._run, args=(wire,), name="multilock-redis-notices", daemon=True).start()
                self.listening = True
        finally:
            self._starting.release()

    def watch(self, claims: Sequence[Claim], within: float) -> None:
        """Report when one of these does not hold its name (any more)."""
        deadline = self._now() + within
        for claim in claims:
            old = self._watched.get(claim.name)
            self._watched[claim.name] = claim
            if old is not None and old.id != claim.id:
                self._notices.gone(old.id, LossReason.TAKEN, "another acquire of this client holds it now")
        self.listen(within)
        self._look([claim.name for claim in claims], deadline - self._now())

    def unwatch(self, claim: Claim) -> None:
        watched = self._watched.get(claim.name)
        if watched is not None and watched.id == claim.id:
            self._watched.pop(claim.name, None)

    def follow(self, names: frozenset[str], within: float) -> bool:
        """Report changes of holder of exactly these names. False: this server does not push them."""
        deadline = self._now() + within
        unread = object()
        followed = self._followed
        self._followed = {name: followed.get(name, unread) for name in names}
        if names:
            self.listen(within)
            if "changes" not in self.refused:
                self._look(names - followed.keys(), deadline - self._now())
        return "changes" not in self.refused

    def exchange(self, requests: Sequence[bytes], within: float) -> list[Answer]:
        """On the tracked connection, so that what a renewal reads stays tracked. On another when that is in use or
        down: then the renewal itself is pushed as a change, and looked at, which tracks it again."""
        if self._tracked is not None and self._using_tracked.acquire(blocking=False):
            try:
                wire = self._tracked
                if wire.alive and not wire.stale():
                    return wire.exchange(requests, within)
            finally:
                self._using_tracked.release()
        return self._connections.exchange(requests, within)

    def close(self) -> None:
        self._closed.set()
        for wire in (self._subscribed, self._tracked):
            if wire is not None:
                wire.interrupt()
        # Whoever uses a connection at this moment closes it.
        if self._using_tracked.acquire(blocking=False):
            if self._tracked is not None:
                self._tracked.close()
            self._using_tracked.release()

    # ---- the subscribed connection

    def _subscribe(self, within: float) -> Wire:
        wire = self._endpoint.connect(within, self._now)
        # The wake-ups last: after the answer to this one, and only then, messages may come at any time.
        channels = (INVALIDATED, f"multilock:wake:{self._notices.client}")
        requests = [pack("CLIENT", "ID"), *(pack("SUBSCRIBE", channel) for channel in channels)]
        (client, _), (changes, _), (wakes, _) = wire.exchange(requests, within)
        if isinstance(wakes, Exception):
            self._refuse("wake-ups", f"waiters are woken by timers only: {wakes}")
        for answer in (client, changes):
            if isinstance(answer, Exception):
                self._refuse("changes", f"a deleted key is noticed at the next renewal only: {answer}")
        self._subscriber = 0 if "changes" in self.refused else client
        self._subscribed = wire
        return wire

    def _run(self, wire: Wire) -> None:
        """The thread: reads until the connection breaks, and makes a new one, until the client is closed."""
        while True:
            try:
                self._read(wire)
            except Exception as error:
                known = isinstance(error, MultilockError)
                logger.log(logging.DEBUG if known else logging.ERROR, "not subscribed: %s", error, exc_info=not known)
            self._subscriber = 0
            wire.close()
            again = self._subscribe_again()
            if again is None:
                return
            wire = again
            # Whatever was pushed in between is lost.
            self._notices.wake(None)
            self._notices.changed(None)
            self._look_again(None)

    def _subscribe_again(self) -> Wire | None:
        """None: the client was closed."""
        pause = FIRST_PAUSE
        while not self._closed.wait(pause * random.uniform(0.5, 1.5)):
            try:
                return self._subscribe(RECONNECT_WITHIN)
            except MultilockError as error:
                logger.debug("not subscribed again yet: %s", error)
            pause = min(LONGEST_PAUSE, pause * 2)
        return None

    def _read(self, wire: Wire) -> None:
        tend_at = self._now() + TEND_EVERY
        heard = True
        while not self._closed.is_set():
            changed: set[str] = set()
            message = wire.receive(max(0.0, tend_at - self._now()))
            while message is not None:  # all that came are looked at in one request
                heard = True
                changed |= self._understand(message)
                message = wire.receive(0.0)
            if changed:
                self._look_again(changed)
            if self._now() >= tend_at:
                if not heard:
                    raise self._silence("the subscribed connection is dead")
                heard = False
                wire.send(PING, LOOK_WITHIN)
                self._look_again(())
                tend_at = self._now() + TEND_EVERY

    def _understand(self, message: list[object]) -> set[str]:
        """Wake who is meant; return the names that may have changed."""
        match message:
            case [b"message", channel, payload] if channel == INVALIDATED:
                ours = self._watched.keys() | self._followed.keys()
                if payload is None:  # the whole database
                    return ours
                assert isinstance(payload, list)
                return ours & {self._keys.name(key) for key in payload}
            case [b"message", _, bytes(payload)]:
                claim_id = payload.decode()
                self._notices.wake(claim_id)
                if "changes" in self.refused:  # force_release tells the former holder so
                    return {name for name, claim in list(self._watched.items()) if claim.id == claim_id}
        return set()

    # ---- the tracked connection

    def _look_again(self, names: Iterable[str] | None) -> None:
        """In the thread. A broken connection is replaced at once, then every name is looked at."""
        if not (self._watched or self._followed):
            return
        for _ in range(2):
            try:
                self._look(names, LOOK_WITHIN)
                break
            except MultilockError as error:
                logger.debug("changes of keys are not pushed at the moment: %s", error)
                names = None

    def _look(self, names: Iterable[str] | None, within: float) -> None:
        """Read who holds these names (None: all), and tell what changed. From then on the server tells of changes."""
        deadline = self._now() + within
        if not self._using_tracked.acquire(timeout=max(0.0, within)):
            raise self._silence("the tracked connection is busy")
        try:
            exchange = self._connections.exchange
            if "changes" not in self.refused and (wire := self._track(deadline - self._now())):
                names = None if wire is not self._tracked else names
                self._tracked = wire
                exchange = wire.exchange
            if names is None:
                names = self._watched.keys() | self._followed.keys()
            watched = {name: self._watched.get(name) for name in names}
            reads = [pack("GET", self._keys.of(name).lock) for name in watched]
            answers = exchange([PING, *reads], deadline - self._now())[1:]
        finally:
            self._using_tracked.release()
        for (name, claim), (owner, _) in zip(watched.items(), answers, strict=True):
            if isinstance(owner, Exception) and "WRONGTYPE" not in str(owner):
                raise owner
            self._tell(name, claim, owner)

    def _tell(self, name: str, claim: Claim | None, owner: object) -> None:
        # Looked up again: a release takes its claim out before it is sent, so a lock that it ended is not lost.
        if claim is not None and owner != claim.owner.encode() and self._watched.get(name) is claim:
            message = "its key was deleted or has expired" if owner is None else "its key has another owner"
            self._notices.gone(claim.id, LossReason.TAKEN, message)
        followed = self._followed
        if name in followed and followed[name] != owner:
            followed[name] = owner
            self._notices.changed(name)

    def _track(self, within: float) -> Wire | None:
        """The tracked connection, a new one if there is none that tells the present subscriber; None if refused."""
        wire = self._tracked
        if wire is not None and wire.alive and self._redirect == self._subscriber:
            return wire
        subscriber = self._subscriber
        if not subscriber or self._closed.is_set():
            raise self._silence("the subscribed connection is down")
        if wire is not None:
            wire.close()
        wire = self._endpoint.connect(within, self._now)
        command = pack("CLIENT", "TRACKING", "ON", "REDIRECT", subscriber, "NOLOOP")
        [(answer, _)] = wire.exchange([command], within)
        if not isinstance(answer, Exception):
            self._redirect = subscriber
            return wire
        wire.close()
        if not isinstance(answer, BackendRejected) or REDIRECT_ENDED in str(answer):
            raise self._silence(str(answer))
        self._refuse("changes", f"a deleted key is noticed at the next renewal only: {answer}")
        return None

    def _refuse(self, what: str, consequence: str) -> None:
        if what not in self.refused:
            self.refused[what] = consequence
            logger.warning("%s: %s", self._endpoint.name, consequence)

    def _silence(self, what: str) -> BackendUnavailable:
        return BackendUnavailable(f"{self._endpoint.name}: {what}", unknown=False)
