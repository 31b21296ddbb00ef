"""Receive what ZooKeeper pushes: deletions of nodes, changes of followed names, and the state of the session.

A node is watched by a watch on its children. This watch fires when the node is deleted, and not when a renewal writes
to it. A waiter for one of many nodes watches the children of their parent. Watches fire once, and end with the
connection. After a reconnect every node is watched again.

kazoo calls this module on its connection thread, which must not send. (If the program passed its own kazoo client as
``client=``, kazoo calls the watches on its callback thread.) So two threads of this module send the requests, and start
when they are first needed. One of these threads sets watches. The other reports losses, which must not wait for the
first.
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
from multilock.log_thread import logger
from multilock.timing import REASON_WITHIN
from multilock_zookeeper.session_validity import Session
from multilock_zookeeper.transport import Answer, NodeMissing, Transport

__all__ = ["AT_ONCE", "ENDED", "Watcher"]

T = TypeVar("T")

ENDED = "its ZooKeeper session expired or was closed"
LOOK_WITHIN = 2.0  # seconds that one step of setting missing watches may take
LOOK_AGAIN = 1.0  # seconds until the next try to set watches, if the connection is up
AT_ONCE = 250  # nodes watched in one step; a renewal waits for at most one step
ONE_BY_ONE = 16  # the greatest number of nodes that a waiter watches one by one


class Watcher:
    """The `multilock_zookeeper.transport.SessionListener` of one client."""

    def __init__(self, notices: Notices) -> None:
        self._notices = notices
        self._transport: Transport
        self._lock = system.Lock()
        self._connection = 0  # the number of the connection; watches of an earlier connection are gone
        # Claim id -> the paths that the claim watches: the nodes ahead and its own node, or the parent
        self._waiting: dict[str, tuple[str, ...]] = {}
        self._waiters: dict[str, set[str]] = {}  # path -> the ids of the claims that it wakes
        self._holding: dict[str, str] = {}  # path -> claim id
        self._covered: set[str] = set()  # held paths whose watch is set
        # Ids of claims whose node is gone, each with the session of the node
        self._lost: list[tuple[str, Session | None]] = []
        self._followed: dict[str, str] = {}  # path of a parent -> the name
        self._unwatched: dict[str, None] = {}  # followed paths whose watch is not set; in order
        self._look_at = math.inf  # when missing watches must be set next
        self._looks = _Worker(notices.now, "multilock-zookeeper-notices")
        self._losses = _Worker(notices.now, "multilock-zookeeper-losses")

    def attach(self, transport: Transport) -> None:
        """Use this transport for all requests."""
        self._transport = transport
        self._name = f"watch connection to {transport.name}"

    # ---- waiters

    def wait(self, claim_id: str, ahead: Sequence[str], own: str, deadline: float) -> bool:
        """Wake this claim when a node of ``ahead``, or its ``own`` node, is deleted. Returns False if one of these
        nodes is already deleted.

        If this user may not read one of the nodes, or if many nodes are ahead, the claim watches the children of the
        parent.
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
        """Watch these paths for this claim. Returns the children of each path, or [] if the paths are already
        watched."""
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
        """Stop notifying this claim, as a waiter and as the holder of the node ``own``."""
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
        """Report a claim of ``held`` (path -> claim id) when its node is deleted, or at once if it is already deleted.

        Raises if a watch could not be set. The watches that were set stay, so the next call has fewer to set.
        """
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
        """Return whether a watch reports the deletion of this node."""
        return path in self._covered

    def _watch(
        self, ask: Callable[..., Answer], paths: Sequence[str], deadline: float
    ) -> tuple[list[str], list[str], MultilockError | None]:
        """Watch these nodes, all at once. Returns the nodes that exist, the missing nodes, and the error for the
        others."""
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
        """Wake every claim that waits for this node or for a change among its children."""
        with self._lock:
            wake = self._waiters.pop(path, set())
            for waiter in wake:
                self._drop(waiter)
        for waiter in wake:
            self._notices.wake(waiter)

    def _tell_losses(self) -> None:
        """Report lost claims, and find out whether their session has ended.

        A server that ends a session first deletes its nodes and then closes the connection. So if the connection
        answers one more request, the session lived when the reported deletions were sent.
        """
        with self._lock:
            lost, self._lost = self._lost, []
        if not lost:
            return
        connected = self._transport.connected
        if connected and any(session and not session.over for _, session in lost):
            asked = self._transport.exists("/")
            try:
                self._transport.wait(asked, self._notices.now() + REASON_WITHIN)
            except MultilockError:  # the server may only be slow
                connected = asked.error is None and self._transport.connected
        for claim_id, session in lost:
            if connected and session and not session.over:
                self._notices.gone(claim_id, LossReason.TAKEN, "its node was deleted")
            else:
                self._notices.gone(claim_id, LossReason.SESSION_LOST, ENDED)

    # ---- names that are followed

    def follow(self, parents: Mapping[str, str], deadline: float) -> None:
        """Report each change among the contenders for these names, and stop reporting all other names.

        Raises if a watch could not be set. The watches that were set stay, so the next call has fewer to set.
        """
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
        """Watch these parents. Returns the parents that are watched now, and the error for the others.

        A parent exists from its first contender until a while after its last contender. While the parent is missing,
        the watch fires when it is created.
        """
        with self._lock:
            # Remove the paths before the requests are sent, because a watch that fires adds its path again.
            for path in paths:
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

    # ---- setting missing watches

    def _plan_look(self, pause: float = 0.0) -> None:
        when = self._notices.now() + pause
        with self._lock:
            if self._look_at <= when:
                return
            self._look_at = when
        self._looks.at(when, self._look)

    def _look(self) -> None:
        """Set the missing watches, and only then report changes, so that every later change is reported as well."""
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
                return  # the next connection sets all watches again
            if error := look(self._notices.now() + LOOK_WITHIN):
                self._report(error)
                failed = True
        if failed:
            self._plan_look(LOOK_AGAIN)
        else:
            self._report(None)

    def _report(self, error: MultilockError | None) -> None:
        """Report ``error`` as the reason why watches are missing. If it is None and no watch is missing, report that
        pushes work."""
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

    # ---- called by kazoo's threads

    def _event(self, event: Any) -> None:
        if event.type == EventType.NONE:
            return  # the connection broke, so `resumed` or `ended` follows
        path = self._transport.stripped(event.path)
        if event.type == EventType.DELETED:
            self._deleted(path)
        elif event.type == EventType.CHILD:
            self._wake(path)
        if path in self._followed:
            self._unwatch([path])
            self._plan_look()

    def began(self, session: Session) -> None:
        """Report a new session to the kernel, before anything can be granted in it."""
        self._notices.group(session.number, session.ttl, session.renew_every)
        if self._followed:
            self._plan_look()

    def shortened(self, session: Session) -> None:
        """Report to the kernel that the session's timeout was cut."""
        proof = session.validity()
        self._notices.shortened(session.number, proof.ttl, proof.until, proof.renew_every)

    def suspended(self, session: Session) -> None:
        """Report that the connection broke, and let the kernel renew the session."""
        self._forget_watches()
        self._notices.pushes(self._name, "the connection broke")
        self._notices.silent(session.number)

    def resumed(self, session: Session) -> None:
        """After a reconnect, let the kernel renew the session, and wake every waiter, so that it reads its queue
        again."""
        self._notices.silent(session.number)  # a renewal may have failed, and the next could come too late
        self._notices.wake(None)
        self._plan_look()

    def ended(self, session: Session) -> None:
        """Report the end of the session and the loss of all its locks."""
        self._forget_watches()
        with self._lock:
            self._holding.clear()
        self._notices.group_gone(session.number, ENDED)
        # no claim holds or waits before the next session begins, so no connection is needed
        self._notices.pushes(self._name, None)
        # This makes a client that follows names read them, which opens the next session.
        self._notices.changed(None)

    def _forget_watches(self) -> None:
        """Forget all watches: they ended with the connection."""
        with self._lock:
            self._connection += 1
            self._covered.clear()
            self._waiting.clear()
            self._waiters.clear()
            self._unwatched = dict.fromkeys(self._followed)

    # ---- planned jobs

    def at(self, when: float, job: Callable[[], object]) -> int:
        """Plan a job for this time. Returns its number, for `not_at`."""
        return self._looks.at(when, job)

    def not_at(self, number: int) -> None:
        """Drop a job that was planned with `at`."""
        self._looks.drop(number)

    def close(self) -> None:
        self._looks.close()
        self._losses.close()


def _steps(all_of_them: Sequence[T]) -> Iterator[Sequence[T]]:
    return (all_of_them[start : start + AT_ONCE] for start in range(0, len(all_of_them), AT_ONCE))


class _Worker:
    """One thread that runs jobs when they are due, in order. The first job starts it."""

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
        """Drop a job. It stays in the heap until it is due, or until most jobs in the heap are dropped."""
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
