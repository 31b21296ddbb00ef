"""What ZooKeeper pushes: nodes that are deleted, for waiters and holders; names that are followed; the session's fate.

A node is watched by a watch on its children: it has none, so that fires when the node is deleted, and not when a
renewal writes to it. Who waits for one of many nodes watches the children of their parent. Watches fire once, and end
with the connection: after a reconnect everything is looked at, and watched, again. kazoo calls us on its connection
thread, which must not send (watches of a client handed over: on its callback thread); so what needs a request is done
by threads of our own, which start when they are first needed: one sets watches, the other tells losses, which wait for
no look.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from kazoo.protocol.states import EventType

from multilock import BackendRejected, BackendUnavailable, LossReason, MultilockError, system
from multilock.backend import Notices, Worker, start_worker
from multilock.telling import logger
from multilock_zookeeper.sessions import Session
from multilock_zookeeper.transport import Answer, NodeMissing, Transport

__all__ = ["AT_ONCE", "ENDED", "Watcher"]

T = TypeVar("T")

ENDED = "its ZooKeeper session expired or was closed"
LOOK_WITHIN = 2.0
REASON_WITHIN = 0.1  # seconds that a loss may wait for its reason
LOOK_AGAIN = 1.0  # seconds after a look that failed although the connection is there
AT_ONCE = 250  # nodes looked at in one go: a renewal waits behind no more
ONE_BY_ONE = 16  # nodes that a waiter watches each by itself; of more, it is woken by whatever changes beside it


class Watcher:
    """The `multilock_zookeeper.transport.Listener` of one client."""

    def __init__(self, notices: Notices) -> None:
        self._notices = notices
        self._transport: Transport
        self._lock = system.Lock()
        self._connection = 0  # counts them: a watch answered on the one before is none
        self._waiting: dict[str, tuple[str, ...]] = {}  # claim id -> the paths ahead and its own, or its parent
        self._waiters: dict[str, set[str]] = {}  # path -> the claims that it wakes
        self._holding: dict[str, str] = {}  # path -> claim id
        self._covered: set[str] = set()  # paths held whose watch is set
        self._lost: list[tuple[str, Session | None]] = []  # claims whose node is gone, and the session that it was in
        self._followed: dict[str, str] = {}  # path of a parent -> the name
        self._unwatched: dict[str, None] = {}  # followed, and no watch is set; in order
        self._look_at = math.inf  # when the next look is planned
        self._looks = _Worker(notices.now, "multilock-zookeeper-notices")
        self._losses = _Worker(notices.now, "multilock-zookeeper-losses")

    def attach(self, transport: Transport) -> None:
        self._transport = transport
        self._name = f"watch connection to {transport.name}"

    # ---- waiters

    def wait(self, claim_id: str, ahead: Sequence[str], own: str, deadline: float) -> bool:
        """Wake this claim when one of these nodes is deleted. Returns False if one is already.

        A server notifies nobody of a node that it may not read. Then, as where many are ahead, the children of the
        parent are watched, which every waiter has listed.
        """
        nodes = (*ahead, own)
        try:
            if len(ahead) <= ONE_BY_ONE:
                with contextlib.suppress(BackendRejected):
                    self._await(claim_id, nodes, deadline)
                    return True
            answers = self._await(claim_id, (own.rpartition("/")[0],), deadline)
        except NodeMissing:
            return False
        for children in answers:
            if not {path.rpartition("/")[2] for path in nodes} <= set(children):
                self.stop(claim_id)
                return False
        return True

    def _await(self, claim_id: str, paths: tuple[str, ...], deadline: float) -> list[Sequence[str]]:
        """Watch these paths for this claim. Returns the children of each, or nothing if they are watched already."""
        with self._lock:
            if self._waiting.get(claim_id) == paths:
                return []
            self._drop(claim_id)
            self._waiting[claim_id] = paths
            for path in paths:
                self._waiters.setdefault(path, set()).add(claim_id)
        try:
            answers = [self._transport.children(path, self._event) for path in paths]
            return [self._transport.wait(answer, deadline) for answer in answers]
        except BaseException:
            self.stop(claim_id)
            raise

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
        """Report these claims, by their paths, when their nodes are deleted, also if that has happened already. Raises
        while a watch is missing; those that are set stay, so that it gets further each time."""
        with self._lock:
            self._holding.update(held)
            connection = self._connection
            uncovered = [path for path in held if path not in self._covered]
        there, missing, unanswered = self._watch(self._transport.children, uncovered, deadline)
        with self._lock:
            if connection == self._connection:
                self._covered.update(path for path in there if path in self._holding)
        for path in missing:
            self._deleted(path)
        self._report(unanswered)
        if unanswered:
            self._plan_look(LOOK_AGAIN)
            raise unanswered

    def covers(self, path: str) -> bool:
        """Whether the deletion of this node will be heard of."""
        return path in self._covered

    def _watch(
        self, ask: Callable[..., Answer], paths: Sequence[str], deadline: float
    ) -> tuple[list[str], list[str], MultilockError | None]:
        """Watch these nodes, all at once: those that are there, those that are not, and why others are neither."""
        there: list[str] = []
        missing: list[str] = []
        unanswered: MultilockError | None = None
        for path, answer in [(path, ask(path, self._event)) for path in paths]:
            try:
                (missing if self._transport.wait(answer, deadline) is None else there).append(path)
            except NodeMissing:
                missing.append(path)
            except MultilockError as error:
                unanswered = error
        return there, missing, unanswered

    def _deleted(self, path: str) -> None:
        self._wake(path)
        with self._lock:
            self._covered.discard(path)
            claim_id = self._holding.pop(path, None)
            if claim_id:
                self._lost.append((claim_id, self._transport.present()))
        if claim_id:
            self._losses.submit(self._tell_losses)

    def _wake(self, path: str) -> None:
        """Whoever waits for this node, or for what is below it."""
        with self._lock:
            wake = self._waiters.pop(path, set())
            for waiter in wake:
                self._drop(waiter)
        for waiter in wake:
            self._notices.wake(waiter)

    def _tell_losses(self) -> None:
        """Deleted alone, or with their session? A server that ends a session deletes its nodes, then hangs up. One
        question, sent now, is for all whose deletion was heard of by now."""
        with self._lock:
            lost, self._lost = self._lost, []
        if not lost:
            return
        connected = self._transport.connected
        if connected and any(session and not session.over for _, session in lost):
            asked = self._transport.exists("/")
            try:
                self._transport.wait(asked, self._notices.now() + REASON_WITHIN)
            except MultilockError:  # it may only be slow
                connected = asked.error is None and self._transport.connected
        for claim_id, session in lost:
            if connected and session and not session.over:
                self._notices.gone(claim_id, LossReason.TAKEN, "its node was deleted")
            else:
                self._notices.gone(claim_id, LossReason.SESSION_LOST, ENDED)

    # ---- names that are followed

    def follow(self, parents: Mapping[str, str], deadline: float) -> None:
        """Report each change among the contenders for these names, and for no others. Raises while a watch is missing;
        those that are set stay, so that it gets further each time."""
        with self._lock:
            unwatched = [path for path in parents if path in self._unwatched or path not in self._followed]
            self._followed = dict(parents)
            self._unwatched = dict.fromkeys(unwatched)
        failed: MultilockError | None = None
        for some in _steps(unwatched):
            failed = self._watch_parents(some, deadline)[1] or failed
            if isinstance(failed, BackendUnavailable):
                break
        if failed:
            raise failed

    def _watch_parents(self, paths: Sequence[str], deadline: float) -> tuple[list[str], MultilockError | None]:
        """Those that are watched now, and why others are not. A parent exists from the first contender on, until a
        while after the last; in between its coming is watched."""
        with self._lock:
            for path in paths:  # first: what fires, or breaks, from here on puts them in again
                self._unwatched.pop(path, None)
        watched: list[str] = []
        open_paths, unanswered = list(paths), None
        while open_paths and not unanswered:
            there, missing, unanswered = self._watch(self._transport.children, open_paths, deadline)
            watched += there
            open_paths = []
            if missing:
                open_paths, absent, failed = self._watch(self._transport.exists, missing, deadline)
                watched += absent
                unanswered = unanswered or failed
        if unanswered:
            known = set(watched)
            self._unwatch(path for path in paths if path not in known)
        return watched, unanswered

    def _unwatch(self, paths: Iterable[str]) -> None:
        with self._lock:
            self._unwatched.update((path, None) for path in paths if path in self._followed)

    # ---- looking again

    def _plan_look(self, pause: float = 0.0) -> None:
        when = self._notices.now() + pause
        with self._lock:
            if self._look_at <= when:
                return
            self._look_at = when
        self._looks.at(when, self._look)

    def _look(self) -> None:
        """Set the watches that are missing, and only then tell: what happens from here on is told again."""
        with self._lock:
            self._look_at = math.inf
            held = [(path, claim_id) for path, claim_id in self._holding.items() if path not in self._covered]
            unwatched = list(self._unwatched)
        steps: list[Callable[[float], MultilockError | None]]
        steps = [partial(self._look_at_held, dict(some)) for some in _steps(held)]
        steps += [partial(self._look_at_parents, some) for some in _steps(unwatched)]
        failed = False
        for look in steps:
            if not self._transport.connected:
                return  # it begins anew with the connection
            if error := look(self._notices.now() + LOOK_WITHIN):
                self._report(error)
                failed = True
        if failed:
            self._plan_look(LOOK_AGAIN)
        else:
            self._report(None)

    def _report(self, error: MultilockError | None) -> None:
        """Say what is wrong with the watches; None: nothing, unless some are missing still."""
        if error or (self._transport.connected and not self._unwatched and len(self._covered) >= len(self._holding)):
            trouble = str(error) if error else None
            self._notices.pushes(self._name, trouble, refused=isinstance(error, BackendRejected))

    def _look_at_held(self, held: Mapping[str, str], deadline: float) -> MultilockError | None:
        try:
            self.hold(held, deadline)
        except MultilockError as error:
            return error
        return None

    def _look_at_parents(self, paths: Sequence[str], deadline: float) -> MultilockError | None:
        watched, unanswered = self._watch_parents(paths, deadline)
        for path in watched:
            if name := self._followed.get(path):
                self._notices.changed(name)
        return unanswered

    # ---- what kazoo's threads tell

    def _event(self, event: Any) -> None:
        if event.type == EventType.NONE:
            return  # the connection broke; `resumed` or `ended` follows
        path = self._transport.stripped(event.path)
        if event.type == EventType.DELETED:
            self._deleted(path)
        elif event.type == EventType.CHILD:
            self._wake(path)
        if path in self._followed:
            self._unwatch([path])
            self._plan_look()

    def began(self, session: Session) -> None:
        """Before anything can be granted in it."""
        self._notices.group(session.number, session.ttl, session.renew_every)
        if self._followed:
            self._plan_look()

    def shortened(self, session: Session) -> None:
        proof = session.validity()
        self._notices.shortened(session.number, proof.ttl, proof.until, proof.renew_every)

    def suspended(self, session: Session) -> None:
        self._forget_watches()
        self._notices.pushes(self._name, "the connection broke")
        self._notices.silent(session.number)

    def resumed(self, session: Session) -> None:
        self._notices.silent(session.number)  # a renewal that failed meanwhile may pause for longer than is left
        self._notices.wake(None)
        self._plan_look()

    def ended(self, session: Session) -> None:
        self._forget_watches()
        with self._lock:
            self._holding.clear()
        self._notices.group_gone(session.number, ENDED)
        self._notices.pushes(self._name, None)  # nothing is held or awaited until the next session
        self._notices.changed(None)  # whoever looks makes the next session, in which names are followed again

    def _forget_watches(self) -> None:
        """They ended with the connection."""
        with self._lock:
            self._connection += 1
            self._covered.clear()
            self._waiting.clear()
            self._waiters.clear()
            self._unwatched = dict.fromkeys(self._followed)

    # ---- later

    def at(self, when: float, job: Callable[[], object]) -> int:
        return self._looks.at(when, job)

    def not_at(self, number: int) -> None:
        """What `at` was asked for is not wanted any more."""
        self._looks.drop(number)

    def close(self) -> None:
        self._looks.close()
        self._losses.close()


def _steps(all_of_them: Sequence[T]) -> Iterator[Sequence[T]]:
    return (all_of_them[start : start + AT_ONCE] for start in range(0, len(all_of_them), AT_ONCE))


class _Worker:
    """One thread that does what is due, in order; started by the first job."""

    def __init__(self, now: Callable[[], float], name: str) -> None:
        self._now = now
        self._name = name
        self._numbers = itertools.count()
        self._jobs: list[tuple[float, int, Callable[[], object]]] = []
        self._dropped: set[int] = set()
        self._changed = system.Condition()
        self._thread: Worker | None = None
        self._closed = False

    def submit(self, job: Callable[[], object]) -> None:
        self.at(0.0, job)

    def at(self, when: float, job: Callable[[], object]) -> int:
        with self._changed:
            number = next(self._numbers)
            if self._closed:
                return number
            heapq.heappush(self._jobs, (when, number, job))
            if self._jobs[0][1] == number:
                self._changed.notify()
            if self._thread is None:
                self._thread = start_worker(self._run, self._name)
            return number

    def drop(self, number: int) -> None:
        """It stays until it comes up, or until such are most of all."""
        with self._changed:
            self._dropped.add(number)
            if len(self._dropped) > 64 and len(self._dropped) * 2 > len(self._jobs):
                self._jobs = [job for job in self._jobs if job[1] not in self._dropped]
                heapq.heapify(self._jobs)
                self._dropped.clear()

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
                    _, number, job = heapq.heappop(self._jobs)
                    if number not in self._dropped:
                        return job
                    self._dropped.discard(number)
                else:
                    self._changed.wait(wait)
            return None
