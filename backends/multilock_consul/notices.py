"""Receive changes that the servers push. One thread keeps all blocking queries of a client open.

A query names a key, a folder or a session, and the last Consul index of it that the client has seen. The server replies
at the next change after this index, or after ten seconds. Each query has a separate connection. One query for a key
serves every claim that waits for the key or holds it, and every follower of the name. A query that is no longer needed
stays open until its reply comes, so that the next claim can use it. Closing it would save nothing: the agent keeps a
closed connection until the query has its reply.

A push is a hint, never proof. Pushes are lost when a connection breaks, so the next query asks for the present state.
Until then waiters find a free name by their safety timers, and holders find a loss by their renewals.
"""

from __future__ import annotations

import math
import socket
import ssl
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from multilock import BackendRejected, BackendUnavailable, LossReason, MultilockError, system
from multilock.backend import Claim, Notices, start_worker
from multilock.log_thread import logger
from multilock.timing import REASON_WITHIN, retry_pause
from multilock_consul.keys import Keys, entry_of, names_of
from multilock_consul.sessions import shows
from multilock_consul.transport import Agents, Wire, judged
from multilock_consul.wire import Reading, Response

__all__ = ["Listener"]

QUERIES = 64  # queries open at once; an agent accepts 200 connections from one address
HELD = 8  # queries for held keys; the next renewal finds the loss of a held key without a query
SPARE = 2  # idle connections kept for the next query
# Seconds until the server replies although nothing changed; the server adds up to 1/16 of WAIT. If a client ends, its
# query occupies a connection of the agent until this reply.
WAIT = 10
PATIENCE = WAIT * 17 / 16 + 5.0  # seconds until a query without a reply counts as dead
CONNECT_WITHIN = 5.0
REFUSED_PAUSE = 30.0  # seconds until a refused query is tried again; an operator must change the rights first
PACE = 0.01  # seconds between two requests of one query, however often its subject changes
# Limits for requests about free keys. A server replies to a query for a missing key whenever a key near it changes.
FREE_PACE = 0.1  # seconds between two requests for one missing key
FREE_EACH = 0.04  # seconds between two requests of this client for missing keys
LOST_RACE = 1.0  # seconds; if a woken waiter waits again within this time, another waiter got the lock
CONTESTED = 60.0  # seconds for which a name counts as contested after a lost race
SPREAD = 0.02  # seconds over which the wake-ups for a contested name are spread, so that not all processes ask at once

# Bytes of a reply. The value of a key has at most half a MiB, and a longer reply would delay all other notices.
ANSWER_MAX = 2 << 20

KEY, FOLDER, SESSION = "key", "folder", "session"
FAILED = "blocking queries to Consul"
REFUSED = "blocking query on the {0.kind} {0.subject!r}"


@dataclass(eq=False, slots=True)
class Query:
    """One blocking query: its subject, its connection, and the claims that need the reply."""

    kind: str
    subject: str  # the key, the beginning of all keys of the folder, or the id of the session
    index: int  # the Consul index after which to wait for a change; 0 asks for the present state
    waiting: set[str] = field(default_factory=set)  # claim ids
    held: dict[str, tuple[str, int]] = field(default_factory=dict)  # claim id -> its session, and the index of its lock
    followed: bool = False
    free: bool = False  # whether the last reply showed no holder
    seen: frozenset[str] | None = None  # the names in the folder at the last reply
    wire: Wire | None = None
    reading: Reading | None = None  # the parser of the awaited reply
    dialing: bool = False
    failures: int = 0
    trouble: str = ""  # the name under which its failure was reported to the kernel
    asked_at: float = 0.0
    due: float = 0.0  # when to send the request; while a reply is awaited, when to give up

    def wanted(self) -> bool:
        """Return whether any claim, session or follower still needs this query's reply."""
        return self.kind == SESSION or bool(self.waiting or self.held or self.followed)

    def pending(self) -> bool:
        """Return whether the query's connection is being made, or its reply is awaited."""
        return self.dialing or self.reading is not None


class Listener:
    """The blocking queries of one client, and the thread that reads their replies.

    ``exists(session_id, within)`` asks the server for a session. ``ended(session_id, within)`` is called if a reply did
    not show this session, and returns whether the session is gone.
    """

    def __init__(
        self,
        agents: Agents,
        keys: Keys,
        notices: Notices,
        exists: Callable[[str, float], bool],
        ended: Callable[[str, float], bool],
    ) -> None:
        self._agents = agents
        self._keys = keys
        self._notices = notices
        self._now = notices.now
        self._exists = exists
        self._ended = ended
        self._unseen: deque[str] = deque(maxlen=100)  # the last sessions that the server did not show
        self._jobs: deque[Callable[[], None]] = deque()
        self._known: set[str] = set()  # ids of claims that may be in a query
        self._starting = system.Lock()
        self._bell: socket.socket | None = None  # wakes the thread
        self._closed = False
        # Only the thread that reads the replies changes the fields below. Other threads read how many queries there
        # are, and whether there is one for a certain key.
        self._queries: dict[tuple[str, str], Query] = {}
        self._serves: dict[str, Query] = {}  # claim id -> the query that contains the claim
        # Ids of claims that are leaders of an election. No other claim takes their queries.
        self._leaders: set[str] = set()
        self._woken: dict[str, float] = {}  # name -> when its waiters were woken last
        self._contested: dict[str, float] = {}  # name -> when a waiter last lost the race for the name
        self._alarms: list[tuple[float, str]] = []  # later wake-ups: their time and claim id
        self._spare: list[Wire] = []

    # Called from any thread

    def wait(self, key: str, claim_id: str, index: int) -> bool:
        """Wake this claim when the key is free. If ``key`` is a folder, wake this claim when a key of the folder is
        deleted.

        A change between ``index`` and this call wakes the claim too. Returns False if too many queries are open. If
        other claims take the last query before the thread runs, this claim is woken at once.
        """
        kind = FOLDER if key.endswith("/") else KEY
        if (kind, key) not in self._queries and len(self._queries) >= QUERIES - HELD:
            return False
        self._known.add(claim_id)
        return self._post(lambda: self._wait(kind, key, claim_id, index))

    def hold(self, claim: Claim, session_id: str, index: int) -> None:
        """Report when this claim's key is deleted, or was deleted since ``index``. Does nothing if too many queries are
        open."""
        self._known.add(claim.id)
        self._post(lambda: self._hold(claim, session_id, index))

    def forget(self, claim_id: str) -> None:
        """Stop notifying this claim."""
        if claim_id in self._known:
            self._known.discard(claim_id)
            self._post(lambda: self._forget(claim_id))

    def watch_session(self, session_id: str) -> None:
        """Report the end of this session."""
        if (SESSION, session_id) not in self._queries:
            self._post(lambda: self._watch_session(session_id))

    def forget_session(self, session_id: str) -> None:
        """Stop watching this session."""
        if self._bell:
            self._post(lambda: self._forget_session(session_id))

    def follow(self, names: frozenset[str]) -> bool:
        """Report when the holder of one of these names changes, and stop reporting all other names. Returns False if
        too many queries would be needed."""
        keys = frozenset(map(self._keys.of, names))
        new = sum((KEY, key) not in self._queries for key in keys)
        if len(self._queries) + new > QUERIES:
            keys = frozenset()
        return self._post(lambda: self._follow(keys)) and bool(keys)

    def close(self) -> None:
        with self._starting:
            if self._bell and not self._closed:
                self._bell.close()  # this wakes the thread
            self._closed = True

    def _post(self, job: Callable[[], None]) -> bool:
        """Have the thread run this job. Returns False if the client is closed, so that nothing is pushed any longer."""
        with self._starting:
            if self._closed:
                return False
            self._jobs.append(job)
            if self._bell is None:
                self._bell, ear = socket.socketpair()
                self._bell.setblocking(False)
                ear.setblocking(False)
                start_worker(lambda: self._run(ear), "multilock-consul-notices")
            self._ring()
            return True

    def _ring(self) -> None:
        assert self._bell is not None
        with suppress(OSError):  # a full buffer wakes the thread as well
            self._bell.send(b"!")

    # Jobs of the thread

    def _wait(self, kind: str, key: str, claim_id: str, index: int) -> None:
        if claim_id not in self._known:
            return
        if (before := self._serves.get(claim_id)) and (before.kind, before.subject) != (kind, key):
            self._forget(claim_id)  # a claim waits for one key at a time
        now = self._now()
        if now - self._woken.get(key, -math.inf) < LOST_RACE:
            self._contested[key] = now
        if query := self._query(kind, key, index, QUERIES - HELD):
            query.waiting.add(claim_id)
            self._serves[claim_id] = query
        else:  # other claims that came at the same time have used the last free query
            self._notices.wake(claim_id)

    def _hold(self, claim: Claim, session_id: str, index: int) -> None:
        if claim.id not in self._known:
            return
        holders = [claim_id for query in self._queries.values() for claim_id in query.held]
        if len(holders) >= HELD:
            displaced = next((claim_id for claim_id in holders if claim_id not in self._leaders), None)
            if claim.kind != "leader" or displaced is None:
                return
            self._forget(displaced)
        if query := self._query(KEY, self._keys.place(claim, session_id), index):
            query.held[claim.id] = session_id, index
            self._serves[claim.id] = query
            if claim.kind == "leader":
                self._leaders.add(claim.id)

    def _forget(self, claim_id: str) -> None:
        if query := self._serves.pop(claim_id, None):
            query.waiting.discard(claim_id)
            query.held.pop(claim_id, None)
            self._leaders.discard(claim_id)
            self._drop_unwanted(query)

    def _watch_session(self, session_id: str) -> None:
        self._query(SESSION, session_id, 0)

    def _forget_session(self, session_id: str) -> None:
        if query := self._queries.get((SESSION, session_id)):
            del self._queries[SESSION, session_id]
            self._put_away(query)

    def _follow(self, keys: frozenset[str]) -> None:
        for query in list(self._queries.values()):
            if query.followed and query.subject not in keys:
                query.followed = False
                self._drop_unwanted(query)
        for key in keys:
            before = self._queries.get((KEY, key))
            # the query served no follower, so earlier changes were not reported
            if before and not before.followed:
                self._notices.changed(self._keys.name(key))
            if found := before or self._query(KEY, key, 0):
                found.followed = True

    def _query(self, kind: str, subject: str, index: int, at_most: int = QUERIES) -> Query | None:
        """Return the query for this subject. The query then reports all changes since ``index``.

        Returns None if a new query would exceed ``at_most``.
        """
        query = self._queries.get((kind, subject))
        if query is None:
            if kind != SESSION and len(self._queries) >= at_most:
                return None
            query = self._queries[kind, subject] = Query(kind, subject, index)
        elif query.index > index:  # the query would skip the changes since ``index``
            self._hang_up(query)
            query.index = index
            query.seen = None
            query.due = 0.0
        return query

    def _drop_unwanted(self, query: Query) -> None:
        if not query.wanted() and not query.pending():
            self._queries.pop((query.kind, query.subject), None)
            self._put_away(query)

    def _put_away(self, query: Query) -> None:
        """Keep the connection of a query that is no longer needed, unless it still awaits a reply."""
        self._report(query, None)
        wire = query.wire
        if wire and wire.alive and query.reading is None and len(self._spare) < SPARE:
            query.wire = None
            self._spare.append(wire)
        self._hang_up(query)

    def _hang_up(self, query: Query) -> None:
        wire, query.wire = query.wire, None
        reading, query.reading = query.reading, None
        if wire:
            if reading:
                self._selector.unregister(wire.sock)
            wire.close()

    # The thread

    def _run(self, ear: socket.socket) -> None:
        self._selector = system.DefaultSelector()
        self._selector.register(ear, system.EVENT_READ)
        try:
            while not self._closed:
                for key, _ in self._selector.select(self._pause()):
                    if key.data is None:
                        ear.recv(4096)
                    elif key.data.reading:  # the agent has not closed the connection since select() returned
                        self._receive(key.data)
                while self._jobs:
                    self._jobs.popleft()()
                self._tick()
        finally:
            self._put_down(ear)

    def _put_down(self, ear: socket.socket) -> None:
        """Close all connections when the thread ends. The client was closed, or a bug ended the thread, which is then
        restarted."""
        for query in self._queries.values():
            self._hang_up(query)
            query.index = 0
            query.due = 0.0
        if self._closed:
            while self._jobs:  # a job may hand over a new connection
                self._jobs.popleft()()
            for query in self._queries.values():
                self._hang_up(query)
            for wire in self._spare:
                wire.close()
            ear.close()
        self._selector.close()

    def _pause(self) -> float | None:
        if self._jobs:
            return 0.0
        due = [query.due for query in self._queries.values() if not query.dialing]
        due += [when for when, _ in self._alarms]
        return max(0.0, min(due) - self._now()) if due else None

    def _tick(self) -> None:
        now = self._now()
        for query in list(self._queries.values()):
            if now < query.due or query.dialing:
                continue
            if query.reading:
                self._failed(query, BackendUnavailable(f"no reply in {PATIENCE:g} s"))
            else:
                self._ask(query)
        ripe = [claim_id for when, claim_id in self._alarms if when <= now]
        if ripe:
            self._alarms = [alarm for alarm in self._alarms if alarm[0] > now]
            for claim_id in ripe:
                self._notices.wake(claim_id)

    def _ask(self, query: Query) -> None:
        while query.wire is None and self._spare:
            wire = self._spare.pop()
            if wire.stale():
                wire.close()
            else:
                query.wire = wire
        if query.wire is None:
            self._dial(query)
            return
        target = self._target(query)
        request = query.wire.request("GET", target)
        try:
            if query.wire.sock.send(request) != len(request):
                raise ConnectionError("the connection does not accept a whole request")
        except OSError as error:
            self._failed(query, error)
            return
        query.reading = Reading(ANSWER_MAX)
        query.asked_at = self._now()
        query.due = query.asked_at + PATIENCE
        self._selector.register(query.wire.sock, system.EVENT_READ, query)

    def _target(self, query: Query) -> str:
        since: dict[str, str | int] = {"index": query.index, "wait": f"{WAIT}s"} if query.index else {}
        if query.kind == KEY:
            return self._keys.target(query.subject, **since)
        if query.kind == FOLDER:
            return self._keys.target(query.subject, keys="", separator="/", **since)
        return self._agents.target(f"/v1/session/info/{query.subject}", consistent="", **since)

    def _dial(self, query: Query) -> None:
        """Connect on a separate thread, because a DNS look-up and a handshake take time."""
        query.dialing = True

        def dial() -> None:
            outcome: Wire | Exception
            try:
                outcome = self._agents.dial(CONNECT_WITHIN)
            except Exception as error:
                outcome = error
            if not self._post(lambda: self._dialed(query, outcome)) and isinstance(outcome, Wire):
                outcome.close()

        start_worker(dial, "multilock-consul-connect", once=True)

    def _dialed(self, query: Query, outcome: Wire | Exception) -> None:
        query.dialing = False
        if isinstance(outcome, Exception):
            self._failed(query, outcome)
            return
        outcome.sock.setblocking(False)
        query.wire = outcome
        if self._queries.get((query.kind, query.subject)) is not query:
            self._put_away(query)
            return
        query.due = 0.0
        self._drop_unwanted(query)

    def _failed(self, query: Query, error: Exception) -> None:
        self._hang_up(query)
        if not query.wanted():
            self._drop_unwanted(query)
            return
        query.index = 0  # so that the next reply comes at once and shows the present state
        query.failures += 1
        pause = retry_pause(query.failures) * system.uniform(0.5, 1.0)
        query.due = self._now() + (REFUSED_PAUSE if isinstance(error, BackendRejected) else pause)
        logger.debug("Consul does not push changes of the %s %r: %s", query.kind, query.subject, error)
        self._report(query, error)
        if query.kind == SESSION and query.failures == 1 and not isinstance(error, BackendRejected):
            self._notices.silent(query.subject)

    def _report(self, query: Query, error: Exception | None) -> None:
        """Report to the kernel whether changes are pushed.

        The failure of an agent concerns all queries, so it is reported once. If the token may not read a subject, the
        refusal is reported with the name of the subject.
        """
        refused = isinstance(error, BackendRejected)
        known = query.trouble
        query.trouble = (REFUSED.format(query) if refused else FAILED) if error else ""
        if known and known != query.trouble and not any(each.trouble == known for each in self._queries.values()):
            self._notices.pushes(known, None)
        if error:
            self._notices.pushes(query.trouble, str(error) or type(error).__name__, refused=refused)

    def _receive(self, query: Query) -> None:
        assert query.wire is not None
        assert query.reading is not None
        try:
            response = None
            while response is None:
                if not (data := query.wire.sock.recv(65536)):
                    raise ConnectionError("the agent ended the connection")
                response = query.reading.feed(data)
            self._selector.unregister(query.wire.sock)
            query.reading = None
            if response.closes:
                self._hang_up(query)
            self._answered(query, judged(response))
        except (BlockingIOError, ssl.SSLWantReadError):
            return
        except (OSError, ValueError, LookupError, TypeError, MultilockError) as error:
            self._failed(query, error)

    def _answered(self, query: Query, response: Response) -> None:
        index = int(response.headers["x-consul-index"])
        changed = index != query.index
        # The index goes backwards if the servers were restored from a backup, or started with empty data.
        query.index = 0 if index < query.index else index
        query.failures = 0
        self._report(query, None)
        query.due = query.asked_at + PACE
        if query.kind == KEY:
            self._look_at_key(query, response)
            # If the key was taken and released between two replies, only the index shows the change.
            if query.followed and changed:
                self._notices.changed(self._keys.name(query.subject))
            self._drop_unwanted(query)
        elif query.kind == FOLDER:
            self._look_into_folder(query, response)
            self._drop_unwanted(query)
        elif not shows(response, query.subject):
            self._unseen.append(query.subject)
            self._explain(lambda: self._ended(query.subject, REASON_WITHIN))

    def _look_at_key(self, query: Query, response: Response) -> None:
        entry, index = entry_of(response, query.subject)
        for claim_id, (session_id, since) in list(query.held.items()):
            if index < since:  # this reply was sent before the claim got the lock
                continue
            if entry is None or not entry.held_by(claim_id, session_id):
                self._forget(claim_id)
                self._explain(lambda claim_id=claim_id, session_id=session_id: self._lost(claim_id, session_id))  # type: ignore[misc]
        was_free, query.free = query.free, not (entry and entry.session)
        if query.free and was_free:
            query.due = query.asked_at + max(FREE_PACE, FREE_EACH * sum(each.free for each in self._queries.values()))
        if query.free and query.waiting:
            self._wake(query)

    def _look_into_folder(self, query: Query, response: Response) -> None:
        """Wake the waiters if a name has disappeared from the folder.

        A new name in the folder frees nothing, so it wakes no waiter. The first reply also wakes the waiters, because
        names may have gone before it.
        """
        seen, query.seen = query.seen, names_of(response, query.subject)
        if query.waiting and (seen is None or seen - query.seen):
            self._wake(query)

    def _wake(self, query: Query) -> None:
        now = self._now()
        if len(self._woken) > 1000:
            self._woken.clear()
            self._contested.clear()
        self._woken[query.subject] = now
        contested = now - self._contested.get(query.subject, -math.inf) < CONTESTED
        for claim_id in query.waiting:
            self._serves.pop(claim_id, None)
            if contested:
                self._alarms.append((now + system.uniform(0.0, SPREAD), claim_id))
            else:
                self._notices.wake(claim_id)
        query.waiting.clear()

    def _explain(self, tell: Callable[[], object]) -> None:
        start_worker(tell, "multilock-consul-loss", once=True)

    def _lost(self, claim_id: str, session_id: str) -> None:
        """Report the loss of a claim whose key has gone, and find out whether its session has ended."""
        try:
            alive = self._exists(session_id, REASON_WITHIN)
        except MultilockError:
            alive = session_id not in self._unseen
        if alive or not self._ended(session_id, REASON_WITHIN):
            self._notices.gone(claim_id, LossReason.TAKEN, "its key was deleted or taken over")
        else:
            self._notices.gone(claim_id, LossReason.SESSION_LOST, f"the session {session_id} ended")
