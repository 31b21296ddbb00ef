"""Receive what etcd pushes: wake-ups for waiters, losses of keys that are held, changes of names that are followed.

Each client has one watch stream, opened when it is first needed and read by a thread. The watch of a key starts at the
revision at which the key was last seen, so it misses nothing. Its events are hints, never proof: a waiter that is woken
reads the queue again. Only the watch of a whole name proves something (`multilock_etcd.queue`). The stream may break,
and etcd may compact revisions that a watch has not read yet. Then this module reads every watched key, and watches it
again from the revision of that read on.

The watch of a name starts at the present revision. A watch that starts in the past would lag, because etcd brings such
watches up to date only ten times a second. All waiters of one client share the watch of a name, and it is kept open for
a while after the last of them has left.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Hashable, Mapping
from functools import partial
from typing import Any

from multilock import BackendRejected, BackendUnavailable, LossReason, MultilockError, system
from multilock.backend import Notices, start_worker
from multilock.log_thread import logger
from multilock.timing import LONGEST_PAUSE, REASON_WITHIN, retry_pause
from multilock_etcd import wire
from multilock_etcd.claims import Waiter
from multilock_etcd.keys import Range
from multilock_etcd.queue import Admission, Decision, Deletion, Queue
from multilock_etcd.sessions import ENDED, EtcdSessions
from multilock_etcd.transactions import AT_ONCE, EtcdTransactions, Position, present_revision
from multilock_etcd.transport import EtcdTransport

__all__ = ["EtcdWatcher"]

LOOK_WITHIN = 2.0  # seconds that one step of reading all keys may take
# Seconds. After a denied watch a new login token is requested. If the watch is denied again within this time, it counts
# as refused.
DENIED_AGAIN = 5.0
# seconds until a refused watch is requested again: the first and the longest pause
REFUSED_FOR, LONGEST_REFUSED = 5.0, 60.0
CONNECTION = "watch stream"  # the name of the connection in messages
# Before a loss is reported, etcd is asked for its reason. Losses within IN_A_ROW seconds of each other are delayed by
# at most REASON_WITHIN seconds in all.
IN_A_ROW = 1.0
# The number of watches of names that stay open although no waiter needs them, and the number of answers after which a
# watch without a waiter is closed.
KEPT_QUEUES = 8
KEPT_FOR = 32


class _Watch:
    """One watch of the stream.

    ``tell`` is called with each event. If ``once`` is True, the watch reports only one deletion, and then ends. If a
    ``queue`` is given, it receives all deletions of an answer at once instead.
    """

    __slots__ = ("confirmed", "id", "once", "queue", "start", "tell", "what")

    def __init__(
        self,
        number: int,
        what: Range,
        start: int,
        tell: Callable[[Any], None],
        once: bool = False,
        queue: Queue | None = None,
    ) -> None:
        self.id = number
        self.what = what
        self.start = start
        self.tell = tell
        self.once = once
        self.queue = queue
        self.confirmed = False

    def request(self) -> Any:
        filters = [wire.NOPUT] if self.once or self.queue is not None else []
        key, end = self.what
        create = wire.WatchCreateRequest(
            key=key, range_end=end, start_revision=self.start, filters=filters, watch_id=self.id
        )
        return wire.WatchRequest(create_request=create)


class _Holder:
    """A key that a claim holds. ``seen`` is True if the key's watch starts at a revision at which the key existed."""

    __slots__ = ("key", "lease", "revision", "seen", "watch")

    def __init__(self, key: bytes, revision: int, lease: Hashable) -> None:
        self.key = key
        self.revision = revision
        self.lease = lease
        self.watch: _Watch | None = None
        self.seen = True


class EtcdWatcher:
    """The watch stream of one client, and the thread that reads it."""

    def __init__(
        self, transport: EtcdTransport, transactions: EtcdTransactions, sessions: EtcdSessions, notices: Notices
    ) -> None:
        self._transport = transport
        self._transactions = transactions
        self._sessions = sessions
        self._notices = notices
        self._lock = system.RLock()
        self._numbers = itertools.count(1)
        self._waiting: dict[str, list[_Watch]] = {}
        self._queues: dict[Range, _Watch] = {}
        # The watches of names for which no claim waits, longest unused first.
        self._unused: dict[Range, _Watch] = {}
        self._counting: dict[str, _Watch] = {}  # claim id -> the watch of the name for which the claim waits
        self._holding: dict[str, _Holder] = {}
        self._followed: dict[str, Range] = {}
        self._following: dict[str, _Watch] = {}
        # The watches of the present stream. Between two streams, those of the next stream.
        self._watches: dict[int, _Watch] = {}
        self._outbox: system.SimpleQueue[Any] | None = None
        self._call: Any = None
        self._started = False
        self._denied_at = -math.inf  # when a watch was last denied, and the token dropped
        self._is_down = False
        self._awaited: set[int] = set()  # watches that the server has not confirmed since the stream was opened
        self._refused = False  # the present stream lacks a watch that the server refused
        self._refused_for = REFUSED_FOR
        self._explained_at = -math.inf  # when the server was last asked for the reason of a loss
        self._patience = 0.0  # seconds that further questions for reasons may take
        self._closed = system.Event()

    # ---- what is watched

    def wait(self, claim_id: str, ranges: Collection[Range], start: int) -> None:
        """Wake this claim when a key in one of these ranges is deleted at revision ``start`` or later."""
        wake = partial(self._notices.wake, claim_id)
        with self._lock:
            watched = {watch.what: watch for watch in self._waiting.get(claim_id, []) if watch.id in self._watches}
            self._drop([watched.pop(what) for what in watched.keys() - set(ranges)])
            self._waiting[claim_id] = [
                watched.get(what) or self._add(what, start, lambda _: wake(), once=True) for what in ranges
            ]
        self._start()

    def count(self, keys: Range, waiter: Waiter, position: Position) -> None:
        """Grant this claim once all keys ahead of it are deleted. Wake the claim if the watch cannot decide that."""
        if waiter.revision != position.revision:
            return  # a later attempt of this claim has put another key
        with self._lock:
            self._drop(self._waiting.pop(waiter.claim.id, []))
            watch = self._queues.get(keys)
            if watch is None or watch.id not in self._watches:
                watch = self._queues[keys] = self._add(keys, 0, _nothing, queue=Queue(keys))
            self._unused.pop(keys, None)
            self._counting[waiter.claim.id] = watch
            assert watch.queue is not None
            decisions = self._decided(watch, watch.queue.enter(waiter, position))
        self._tell(decisions)
        self._start()

    def count_no_more(self, claim_id: str) -> None:
        """Stop counting deletions for this claim."""
        with self._lock:
            if watch := self._counting.pop(claim_id, None):
                assert watch.queue is not None
                watch.queue.leave(claim_id)
                self._decided(watch, [])

    def hold(self, claim_id: str, key: bytes, revision: int, lease: Hashable) -> None:
        """Report this claim lost when its key, created at ``revision``, is deleted or has already been deleted."""
        with self._lock:
            self.stop(claim_id)
            holder = self._holding[claim_id] = _Holder(key, revision, lease)
            self._arm(claim_id, holder, revision + 1)
        self._start()

    def stop(self, claim_id: str) -> None:
        """Stop notifying this claim."""
        if claim_id not in self._waiting and claim_id not in self._holding and claim_id not in self._counting:
            # most claims were never added, and this check needs no lock
            return
        with self._lock:
            self.count_no_more(claim_id)
            watches = self._waiting.pop(claim_id, [])
            if (holder := self._holding.pop(claim_id, None)) and holder.watch:
                watches.append(holder.watch)
            self._drop(watches)

    def covers(self, claim_id: str) -> bool:
        """Return whether the server has confirmed the watch that reports the loss of this claim's key."""
        with self._lock:
            holder = self._holding.get(claim_id)
            watch = holder.watch if holder and holder.seen else None
            return watch is not None and watch.confirmed and watch.id in self._watches

    def follow(self, ranges: Mapping[str, Range], start: int) -> None:
        """Report each change in these ranges from revision ``start`` on, and stop following all other names."""
        with self._lock:
            for name in self._followed.keys() - ranges.keys():
                del self._followed[name]
                self._drop([self._following.pop(name)])
            for name in ranges.keys() - self._followed.keys():
                self._followed[name] = ranges[name]
                self._arm_followed(name, start)
        self._start()

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            if self._outbox:
                self._outbox.put(None)
            call = self._call
        if call:
            self._transport.end(call)

    def _add(
        self,
        what: Range,
        start: int,
        tell: Callable[[Any], None],
        once: bool = False,
        queue: Queue | None = None,
    ) -> _Watch:
        watch = _Watch(next(self._numbers), what, start, tell, once, queue)
        self._watches[watch.id] = watch
        if self._outbox:
            self._outbox.put(watch.request())
        return watch

    def _arm(self, claim_id: str, holder: _Holder, start: int, *, seen: bool = True) -> None:
        holder.seen = seen
        lost = partial(self._lost, claim_id)
        holder.watch = self._add((holder.key, b""), start, lambda event: lost(event.kv.mod_revision), once=True)

    def _arm_followed(self, name: str, start: int) -> None:
        changed = partial(self._notices.changed, name)
        self._following[name] = self._add(self._followed[name], start, lambda _: changed())

    def _drop(self, watches: list[_Watch]) -> None:
        for watch in watches:
            if self._watches.pop(watch.id, None) and self._outbox:
                self._outbox.put(wire.WatchRequest(cancel_request=wire.WatchCancelRequest(watch_id=watch.id)))

    # ---- queues

    def _decided(self, watch: _Watch, decisions: list[Decision]) -> list[Decision]:
        """Update the records of claims and watches after a change in a queue. The caller holds the lock."""
        for waiter, admission, _ in decisions:
            if admission is Admission.ADMITTED:
                waiter.pushed = True
            else:
                self._counting.pop(waiter.claim.id, None)
        queue = watch.queue
        if queue is not None and not queue and self._queues.get(queue.keys) is watch:
            self._unused.setdefault(queue.keys, watch)
            if queue.unheeded > KEPT_FOR:
                self._close_queue(queue.keys)
            elif len(self._unused) > KEPT_QUEUES:
                self._close_queue(next(iter(self._unused)))
        return decisions

    def _close_queue(self, keys: Range) -> None:
        self._drop([self._unused.pop(keys)])
        del self._queues[keys]

    def _tell(self, decisions: list[Decision]) -> None:
        for waiter, admission, revision in decisions:
            claim, session = waiter.claim, waiter.session
            assert session is not None
            if admission is Admission.ADMITTED and claim.renew and self._sessions.is_alive(session.lease):
                self._notices.granted(claim.id, session.granted(revision))
                continue
            self._notices.wake(claim.id)  # this also cancels a grant that the claim has not taken yet
            if admission is Admission.TAKEN_BACK:
                self._gone(claim.id, session.lease, revision)

    # ---- the reading thread

    def _start(self) -> None:
        with self._lock:
            started, self._started = self._started, True
        if not started:
            start_worker(self._run, "multilock-etcd-notices")

    def _run(self) -> None:
        failures = 0
        while not self._closed.is_set():
            began = self._notices.now()
            trouble = "the server ended it"
            try:
                self._listen()
            except MultilockError as error:
                trouble = str(error)
            except Exception as error:  # this thread must go on, or no claim would be notified
                trouble = repr(error)
                logger.exception("the watch stream is no longer opened")
            failures = 0 if self._notices.now() - began > LONGEST_PAUSE else failures + 1
            self._down(trouble)
            while not self._closed.is_set() and not self._look_at_everything():
                failures += 1
                self._closed.wait(self._pause(failures))
            if failures > 1:
                self._closed.wait(self._pause(failures))

    def _pause(self, failures: int) -> float:
        return retry_pause(failures) * system.uniform(0.5, 1.0)

    def _listen(self) -> None:
        """Open the stream with all watches, and handle its answers until it ends."""
        outbox: system.SimpleQueue[Any] = system.SimpleQueue()
        try:
            with self._transport.watch(iter(outbox.get, None)) as stream:
                with self._lock:
                    self._call = stream
                    self._outbox = outbox
                    for watch in self._watches.values():
                        outbox.put(watch.request())
                    self._awaited = set(self._watches)
                    self._refused = False
                if self._closed.is_set():
                    return
                self._up_if_complete()
                for answer in stream:
                    self._hear(answer)
        finally:
            outbox.put(None)  # ends gRPC's thread that waits for our next request

    def _up_if_complete(self) -> None:
        """Report the stream as up once the server has confirmed every watch that it was opened with."""
        if self._is_down and not (self._awaited or self._refused):
            self._is_down = False
            self._refused_for = REFUSED_FOR
            self._notices.pushes(CONNECTION, None)

    def _report(self, trouble: str, *, refused: bool = False) -> None:
        if not self._closed.is_set():
            self._is_down = True
            self._notices.pushes(CONNECTION, trouble, refused=refused)

    def _down(self, trouble: str) -> None:
        """Record that the stream has ended, and report it. Renew all leases now, because the connection of the renewals
        may be broken as well."""
        if not self._refused:  # the refusal was reported already
            self._report(trouble)
        with self._lock:
            self._outbox = self._call = None
            for mine in (self._watches, self._queues, self._unused, self._counting):
                mine.clear()
        if not self._closed.is_set():
            for lease in self._sessions.leases():
                self._notices.silent(lease)

    def _look_at_everything(self) -> bool:
        """Read the present state, and watch from its revision on. Returns whether the server has replied to all
        requests.

        Thousands of keys take many requests. If a later request fails, keys that were already read keep their watches.
        """
        try:
            revision = present_revision(self._transport, LOOK_WITHIN)
            with self._lock:
                for name in self._followed:
                    if self._following[name].id not in self._watches:
                        self._arm_followed(name, revision + 1)
            self._notices.changed(None)
            self._notices.wake(None)  # every waiter asks the server again, which creates its watch again
            for lease in self._sessions.leases():  # leases first: the keys of an ended lease need not be read
                self._sessions.look(lease, revision, LOOK_WITHIN)
            self._look_at_held(revision)
        except MultilockError as error:
            self._report(str(error))
            return False
        except Exception as error:
            self._report(repr(error))
            logger.exception("the watch stream cannot be opened again yet")
            return False
        return True

    def _look_at_held(self, revision: int) -> None:
        """Read the keys that claims hold, and watch these keys.

        If the server refuses the read, repeating it does not help. The keys are then watched from this revision on, and
        each renewal reads them as well.
        """
        try:
            while step := self._unwatched():
                self._look_at(step)
        except BackendRejected as error:
            logger.warning("etcd does not let us look at the locks that are held: %s", error)
            with self._lock:
                while step := self._unwatched():
                    for claim_id, holder in step.items():
                        self._arm(claim_id, holder, revision + 1, seen=False)

    def _unwatched(self) -> dict[str, _Holder]:
        """Return some of the held keys that no watch covers."""
        with self._lock:
            unwatched = (
                (claim_id, holder)
                for claim_id, holder in self._holding.items()
                if holder.watch is None or holder.watch.id not in self._watches
            )
            return dict(itertools.islice(unwatched, AT_ONCE))

    def _look_at(self, holders: Mapping[str, _Holder]) -> None:
        """Read the first of these keys, as many as fit into one request. Watch those that still exist, and report the
        others as lost."""
        keys = [(holder.key, holder.revision, holder.lease) for holder in holders.values()]
        looked = self._transactions.missing(keys, self._notices.now() + LOOK_WITHIN)
        first = list(holders.items())[: looked.many]
        with self._lock:
            for claim_id, holder in first:
                if self._holding.get(claim_id) is holder and holder.key not in looked.gone:
                    self._arm(claim_id, holder, looked.revision + 1)
        for claim_id, holder in first:
            if holder.key in looked.gone:
                self._lost(claim_id, looked.revision)

    def _hear(self, answer: Any) -> None:
        watch = self._watches.get(answer.watch_id)
        if answer.created or answer.canceled:
            self._awaited.discard(answer.watch_id)
        if answer.canceled and (watch or answer.watch_id < 0):
            self._cancelled(watch, answer)
        elif watch:
            if answer.created:
                watch.confirmed = True
                self._up_if_complete()
            if watch.queue is not None:
                self._hear_deletions(watch, watch.queue, answer)
                return
            if answer.events and watch.once:
                with self._lock:
                    self._drop([watch])
            for event in answer.events:
                watch.tell(event)

    def _hear_deletions(self, watch: _Watch, queue: Queue, answer: Any) -> None:
        deletions = [Deletion(event.kv.key, event.kv.mod_revision) for event in answer.events]
        with self._lock:
            decisions = queue.begins(answer.header.revision) if answer.created else []
            decisions = self._decided(watch, decisions + (queue.hear(deletions) if deletions else []))
        self._tell(decisions)

    def _cancelled(self, watch: _Watch | None, answer: Any) -> None:
        """Deal with the end of a watch.

        If etcd refuses to create a watch, its answer does not name the watch. So any unconfirmed watch may be the
        refused one.
        """
        if watch:
            with self._lock:
                self._watches.pop(watch.id, None)
        if answer.compact_revision:
            raise BackendUnavailable(f"what happened before revision {answer.compact_revision} was compacted")
        now = self._notices.now()
        if now >= self._denied_at + DENIED_AGAIN:
            # The token with which the stream was opened may have expired.
            self._denied_at = now
            self._transport.token_over()
            raise BackendUnavailable(f"a watch was denied: {answer.cancel_reason}")
        if watch is None:
            with self._lock:
                self._drop_unconfirmed_queues()
        self._report(f"etcd refuses a watch: {answer.cancel_reason}", refused=True)
        if not self._refused:
            self._refused = True
            self._ask_again_later()

    def _ask_again_later(self) -> None:
        """Open the stream again later, because etcd may then allow the refused watches."""
        stream, pause = self._call, self._refused_for
        self._refused_for = min(LONGEST_REFUSED, 2 * pause)

        def ask_again() -> None:
            if not self._closed.wait(pause):
                stream.cancel()

        start_worker(ask_again, "multilock-etcd-again", once=True)

    def _drop_unconfirmed_queues(self) -> None:
        """Drop every queue whose watch may be the refused one.

        The waiters of such a queue are not notified, and ask the server when their safety timers are over. The next
        waiter creates a new watch.
        """
        for queue, watch in list(self._queues.items()):
            if not watch.confirmed:
                self._drop([watch])
                del self._queues[queue]
                self._unused.pop(queue, None)

    def _lost(self, claim_id: str, revision: int) -> None:
        """Report that a claim has lost its key, which was missing at this revision."""
        with self._lock:
            holder = self._holding.pop(claim_id, None)
        if holder is not None:
            self._gone(claim_id, holder.lease, revision)

    def _gone(self, claim_id: str, lease: Hashable, revision: int) -> None:
        """Report a lost claim. A question for the reason may delay the report. Losses in a row share that delay."""
        began = self._notices.now()
        if began > self._explained_at + IN_A_ROW:
            self._patience = REASON_WITHIN
        ended = self._sessions.look(lease, revision, self._patience)
        self._explained_at = self._notices.now()
        self._patience -= self._explained_at - began
        if ended:
            self._notices.gone(claim_id, LossReason.SESSION_LOST, ENDED)
        else:
            self._notices.gone(claim_id, LossReason.TAKEN, "its key was deleted")


def _nothing(_: Any) -> None:
    pass
