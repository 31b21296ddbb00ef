"""What ZooKeeper pushes: nodes that are deleted, for waiters and holders; names that are followed; the session's fate.

A node is watched by a watch on its children: it has none, so that fires when the node is deleted, and not when a
renewal writes to it. Watches fire once, and end with the connection: after a reconnect everything is looked at, and
watched, again. kazoo calls us on its callback thread and, for the session, on its connection thread, which must not
send; so what needs a request is done by a thread of our own, which starts when it is first needed.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from kazoo.protocol.states import EventType

from multilock.backend import Notices
from multilock.errors import MultilockError
from multilock.model import LossReason
from multilock_zookeeper.session import Session
from multilock_zookeeper.transport import Answer, NodeMissing, Transport

__all__ = ["ENDED", "Watcher"]

logger = logging.getLogger("multilock")

ENDED = "its ZooKeeper session expired or was closed"
LOOK_WITHIN = 2.0
REASON_WITHIN = 0.1  # seconds that a loss may wait for its reason
LOOK_AGAIN = 1.0  # seconds after a look that failed although the connection is there


class Watcher:
    """The `multilock_zookeeper.transport.Listener` of one client."""

    def __init__(self, notices: Notices) -> None:
        self._notices = notices
        self._transport: Transport
        self._lock = threading.Lock()
        self._waiting: dict[str, tuple[str, str]] = {}  # claim id -> its predecessor's path and its own
        self._waiters: dict[str, set[str]] = {}  # path -> the claims that it wakes
        self._holding: dict[str, str] = {}  # path -> claim id
        self._covered: set[str] = set()  # paths held whose watch is set
        self._followed: dict[str, str] = {}  # path of a parent -> the name
        self._worker = _Worker(notices.now)

    def attach(self, transport: Transport) -> None:
        self._transport = transport

    # ---- waiters

    def wait(self, claim_id: str, ahead: str, own: str, deadline: float) -> bool:
        """Wake this claim when one of these nodes is deleted. False: one is already."""
        with self._lock:
            if self._waiting.get(claim_id) == (ahead, own):
                return True
            self._drop(claim_id)
            self._waiting[claim_id] = (ahead, own)
            for path in (ahead, own):
                self._waiters.setdefault(path, set()).add(claim_id)
        try:
            answers = [self._transport.children(path, self._event) for path in (ahead, own)]
            for answer in answers:
                self._transport.wait(answer, deadline)
        except BaseException as error:
            self.stop(claim_id)
            if isinstance(error, NodeMissing):
                return False
            raise
        return True

    def stop(self, claim_id: str, own: str | None = None) -> None:
        """It waits no more, and holds ``own`` no more."""
        with self._lock:
            self._drop(claim_id)
            if own is not None:
                self._holding.pop(own, None)
                self._covered.discard(own)

    def _drop(self, claim_id: str) -> None:
        for path in self._waiting.pop(claim_id, ()):
            claims = self._waiters.get(path)
            if claims is not None:
                claims.discard(claim_id)
                if not claims:
                    del self._waiters[path]

    # ---- holders

    def hold(self, held: Mapping[str, str], deadline: float) -> None:
        """Report these claims, by their paths, when their nodes are deleted, also if that has happened already."""
        with self._lock:
            self._holding.update(held)
        answers = {path: self._transport.children(path, self._event) for path in held}
        for path, answer in answers.items():
            self._cover(path, answer, deadline)

    def covers(self, path: str) -> bool:
        """Whether the deletion of this node will be heard of."""
        return path in self._covered

    def _cover(self, path: str, answer: Answer, deadline: float) -> None:
        try:
            self._transport.wait(answer, deadline)
        except NodeMissing:
            self._deleted(path)
            return
        with self._lock:
            if path in self._holding:
                self._covered.add(path)

    def _deleted(self, path: str) -> None:
        with self._lock:
            self._covered.discard(path)
            claim_id = self._holding.pop(path, None)
            wake = self._waiters.pop(path, set())
            for waiter in wake:
                self._waiting.pop(waiter, None)
        for waiter in wake:
            self._notices.wake(waiter)
        if claim_id:
            self._worker.submit(partial(self._tell_loss, claim_id, self._transport.present()))

    def _tell_loss(self, claim_id: str, session: Session | None) -> None:
        """Deleted alone, or with its session? A server that ends a session deletes its nodes, then hangs up."""
        alive = session is not None and not session.over and self._transport.connected
        if alive:
            try:
                self._transport.wait(self._transport.exists("/"), self._notices.now() + REASON_WITHIN)
            except MultilockError:
                alive = self._transport.connected  # it is only slow
        if alive:
            self._notices.gone(claim_id, LossReason.TAKEN, "its node was deleted")
        else:
            self._notices.gone(claim_id, LossReason.SESSION_LOST, ENDED)

    # ---- names that are followed

    def follow(self, parents: Mapping[str, str], deadline: float) -> None:
        """Report each change among the contenders for these names, and for no others."""
        with self._lock:
            new = parents.keys() - self._followed.keys()
            self._followed = dict(parents)
        for path in new:
            self._watch_parent(path, deadline)

    def _watch_parent(self, path: str, deadline: float) -> None:
        """The parent exists from the first contender on, until a while after the last."""
        while True:
            try:
                self._transport.wait(self._transport.children(path, self._event), deadline)
                return
            except NodeMissing:
                if self._transport.wait(self._transport.exists(path, self._event), deadline) is None:
                    return

    def _look_at_parent(self, path: str) -> None:
        """Watch it again, and only then tell: what happens from here on is told again."""
        name = self._followed.get(path)
        if name is None:
            return
        try:
            self._watch_parent(path, self._notices.now() + LOOK_WITHIN)
        except MultilockError as error:
            logger.debug("not followed yet: %s", error)
            if self._transport.present():
                self._worker.at(self._notices.now() + LOOK_AGAIN, partial(self._look_at_parent, path))
            return
        self._notices.changed(name)

    # ---- what kazoo's threads tell

    def _event(self, event: Any) -> None:
        if event.type == EventType.NONE:
            return  # the connection broke; `resumed` or `ended` follows
        path = self._transport.stripped(event.path)
        if event.type == EventType.DELETED:
            self._deleted(path)
        if path in self._followed:
            self._worker.submit(partial(self._look_at_parent, path))

    def began(self, session: Session) -> None:
        self._notices.group(session.number, session.ttl, session.renew_every)
        if self._followed:
            self._worker.submit(self._look_at_everything)

    def suspended(self, session: Session) -> None:
        with self._lock:
            self._covered.clear()
            self._waiting.clear()
            self._waiters.clear()
        self._notices.silent(session.number)

    def resumed(self, session: Session) -> None:
        self._worker.submit(self._look_at_everything)

    def ended(self, session: Session) -> None:
        with self._lock:
            self._covered.clear()
            self._holding.clear()
            self._waiting.clear()
            self._waiters.clear()
        self._notices.group_gone(session.number, ENDED)

    def _look_at_everything(self) -> None:
        """After a reconnect all that was watched is looked at once."""
        deadline = self._notices.now() + LOOK_WITHIN
        with self._lock:
            held = {path: claim_id for path, claim_id in self._holding.items() if path not in self._covered}
            followed = list(self._followed)
        try:
            self.hold(held, deadline)
            for path in followed:
                self._watch_parent(path, deadline)
        except MultilockError as error:
            logger.debug("the watches are not set again yet: %s", error)
            if self._transport.present():
                self._worker.at(self._notices.now() + LOOK_AGAIN, self._look_at_everything)
        self._notices.changed(None)
        self._notices.wake(None)

    # ---- later

    def at(self, when: float, job: Callable[[], object]) -> None:
        self._worker.at(when, job)

    def close(self) -> None:
        self._worker.close()


class _Worker:
    """One thread that does what is due, in order; started by the first job."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._numbers = itertools.count()
        self._jobs: list[tuple[float, int, Callable[[], object]]] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, job: Callable[[], object]) -> None:
        self.at(0.0, job)

    def at(self, when: float, job: Callable[[], object]) -> None:
        with self._changed:
            if self._closed:
                return
            heapq.heappush(self._jobs, (when, next(self._numbers), job))
            self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="multilock-zookeeper-notices", daemon=True)
                self._thread.start()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._jobs.clear()
            self._changed.notify()

    def _run(self) -> None:
        while job := self._next():
            try:
                job()
            except MultilockError as error:
                logger.debug("not done: %s", error)
            except Exception:
                logger.exception("a notice of ZooKeeper failed")

    def _next(self) -> Callable[[], object] | None:
        with self._changed:
            while not self._closed:
                wait = self._jobs[0][0] - self._now() if self._jobs else None
                if wait is not None and wait <= 0:
                    return heapq.heappop(self._jobs)[2]
                self._changed.wait(wait)
            return None
