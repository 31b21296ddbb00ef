"""Consul sessions. For each ttl, one session serves all renewed locks, and a second one serves all readers. Each permit
has a separate session, and so has each lock that is not renewed.

A lock lives as long as its session: writing or locking its key again does not extend it. Once the last acknowledged
renewal of a session is too old, the session is not used any longer: the next attempt gets a new session.

This module remembers every request that may still be executed while its session lives: an acquire whose reply was lost
or is still awaited, and a release that was refused. Once the caller has given up the claim of such a request, the key
must not stay locked. If the session holds no other lock, the session is ended, so that the request cannot be executed.
Otherwise each renewal of the session reads the key, until these reads have shown for a while that the key is not locked
for the claim. Released claims are remembered as well: a proxy may repeat the PUT of their acquire, and we would keep
renewing the lock that the repeated PUT acquires.

A name rests if ``hold_at_least`` keeps it taken after its release. The name is then locked by a session that this
module does not remember: the session is not renewed, `close` does not destroy it, and the server's clock ends it. Until
then the claim's own session must not end, and no renewal may delete the key.
"""

from __future__ import annotations

import json
import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from multilock import BackendRejected, BackendUnavailable, LossReason, MultilockError, system
from multilock.backend import Claim, Granted, Notices
from multilock.timing import CALLBACK_SHARE, DRIFT_SHARE, FRESH_SHARE, LATE_REQUEST, RENEWALS
from multilock_consul.keys import Keys, no_answer
from multilock_consul.transport import Agents, judged
from multilock_consul.wire import Response

__all__ = ["LOCK_DELAY_MAX", "OWN", "REMOVED_AFTER", "Cancelled", "Session", "Sessions", "safe_delay", "shows"]

OWN = "own sessions"
"""The group of all locks that have a separate session."""

DELETE, RELEASE = "delete", "release"
"""What the server does with a session's keys when the session ends. A reader's key stays, because only this key shows a
later writer that the reader may still believe that it holds the lock. Other keys are deleted, since a free lock has no
key. Their lock delay excludes other claims."""

# Number of keys of confirmed releases that are remembered. A renewal needs eight requests to read as many keys.
RELEASED_MAX = 512
RELEASED_EVERY = 5.0  # seconds between two reads of the keys of confirmed releases
LOCK_DELAY_MAX = 60.0  # seconds; the server's limit
# seconds for which a server must be frozen before the other servers can remove it (measured: 9 to 13)
REMOVED_AFTER = 5.0
# seconds within which a holder is notified that its session has ended; normally this takes milliseconds
HEARD_WITHIN = 1.0
# Share of the ttl after which the client counts every lease of the session as lost.
USABLE = 1 - CALLBACK_SHARE - DRIFT_SHARE
REMEMBERED = 256  # sessions known to have ended, so that a release in one of them needs no request
_TTL_REFUSED = re.compile(r"must be between \[([0-9.hmsuµn]+)=")
_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}

Purpose = tuple[float, str] | str


class Cancelled(Exception):
    """The caller gave up the claim before its attempt sent a request that could lock a key. The attempt must not send
    it, since it might have no time left to free the key."""


@dataclass(eq=False, slots=True)
class Session:
    """One session, and the claims that use it."""

    id: str
    ttl: float  #: the ttl that the server granted
    proved_at: float  #: when the last create or renewal request that got a reply was sent
    purpose: Purpose  #: for a shared session its requested ttl and behaviour, else the id of its only claim
    ended: bool = False  # no claim may begin a request in this session any longer
    held: set[str] = field(default_factory=set)  # ids of claims that hold a lock in this session
    leaving: set[str] = field(default_factory=set)  # ids of claims that are being released right now
    # The claim id of each request without a reply, which may still be under way
    open: list[str] = field(default_factory=list)
    # Id in `open` of an unwanted claim -> the time until which its request may still arrive
    cancelled: dict[str, float] = field(default_factory=dict)
    # Key that may be locked for an unwanted claim -> the time until which renewals read it
    left: dict[str, float] = field(default_factory=dict)
    # Id of a claim whose `rest` (release that keeps the name taken for a while) was not confirmed -> the time until
    # which its name stays taken
    rests: dict[str, float] = field(default_factory=dict)
    # Key of a confirmed release, oldest first -> the time until which renewals read it. Only a repeated request could
    # have locked it again.
    released: dict[str, float] = field(default_factory=dict)
    released_due: float = 0.0  # when to read the keys of `released` again
    unseen: dict[str, None] = field(default_factory=dict)  # keys that the last renewal had no time to read

    @property
    def shared(self) -> bool:
        """Whether several claims may use this session."""
        return not isinstance(self.purpose, str)

    def granted(self, index: int | None) -> Granted:
        """Return the grant of a lock in this session. ``index`` is its fencing token."""
        group = self.id if self.shared else OWN
        return Granted(index, self.ttl, self.proved_at, self.ttl, self.ttl / RENEWALS, group, self.id)

    def idle(self) -> bool:
        """Return whether no claim needs this session."""
        wanted = self.held or self.rests
        return not wanted and all(claim_id in self.cancelled for claim_id in (*self.open, *self.leaving))


def _behaviour(claim: Claim) -> str:
    return RELEASE if claim.mode == "r" else DELETE


def _purpose(claim: Claim) -> Purpose:
    """Return the purpose of this claim's session. A permit has a separate one: Consul's semaphore identifies its
    holders by their sessions."""
    return (claim.ttl, _behaviour(claim)) if claim.renew and claim.permits < 2 else claim.id


def safe_delay(ttl: float) -> float:
    """Return the lock delay in seconds after which the holder of an ended session has certainly given up its locks.

    A session can end without a notice to its holder. If the holder's agent is a server and freezes, the other servers
    remove the frozen server with all its sessions. The holder is then not notified, and continues until the end of its
    ttl.
    """
    return min(max(HEARD_WITHIN, ttl - REMOVED_AFTER), LOCK_DELAY_MAX)


class Sessions:
    """The sessions of one client, and the requests of each claim in them."""

    def __init__(
        self,
        agents: Agents,
        keys: Keys,
        notices: Notices,
        *,
        who: str,
        lock_delay: Callable[[float], float],
        ended: Callable[[str], None],
    ) -> None:
        self._agents = agents
        self._keys = keys
        self._notices = notices
        self._now = notices.now
        self._who = who
        self._lock_delay = lock_delay
        self._tell_ended = ended  # called with the id of a session that ended
        self._ttl_min = 0.0  # the server's minimum ttl; known once the server has refused a shorter one
        self._lock = system.Lock()  # never held during a request or a notice
        self._making = system.Lock()  # held during a request that makes a session
        self._by_id: dict[str, Session] = {}
        self._current: dict[Purpose, Session] = {}  # the sessions in use, by their purpose
        self._open: dict[str, list[Session]] = {}  # claim id -> sessions that have the claim in `Session.open`
        self._holding: dict[str, Session] = {}  # claim id -> session
        # Claim id -> ended sessions in which an attempt of the claim had no reply.
        self._ended_unanswered: dict[str, list[str]] = {}
        # Claim id -> the time of its cancel, oldest first. A late attempt of the claim may still begin.
        self._cancelled: dict[str, float] = {}
        self._beginning: set[str] = set()  # ids of claims whose separate session is being made
        self._over: deque[str] = deque(maxlen=REMEMBERED)
        self._closed = False

    # The session of an attempt

    @contextmanager
    def trying(self, claim: Claim, until: float) -> Iterator[Session]:
        """Provide the session for one attempt. If the attempt has no reply, the session remembers the attempt. Raises
        `Cancelled` if the claim was cancelled."""
        session = self._enter(claim, until)
        answered = True
        try:
            yield session
        except BackendUnavailable as silence:
            answered = not silence.unknown
            raise
        except BackendRejected:
            raise
        except BaseException:
            answered = False
            raise
        finally:
            if answered:
                self._answered(session, claim)

    def hold(self, session: Session, claim: Claim) -> bool:
        """Record that the claim has a lock in this session. Returns False if the lock is not wanted: the claim was
        cancelled meanwhile, or has a lock in a later session."""
        with self._lock:
            if claim.id in session.cancelled:
                return False
            if (before := self._holding.get(claim.id)) and before is not session:
                if session.ended:  # this attempt is late, and a later one has locked the key in a later session
                    return False
                before.held.discard(claim.id)  # the end of that session does not end this lock
            # Write this entry first: if an interrupt comes between the two lines, `cancel` still finds the lock.
            self._holding[claim.id] = session
            session.held.add(claim.id)
            return True

    def _enter(self, claim: Claim, until: float) -> Session:
        while True:
            session = self._find(claim)
            if session is None:
                own = isinstance(_purpose(claim), str)
                session = self._make_own(claim, until) if own else self._make(claim, until)
            elif not session.shared and self._now() > session.proved_at + FRESH_SHARE * session.ttl:
                # The ttl of a lock with a separate session counts from its grant, not from the wait before it.
                self.renew(session, until - self._now())
            with self._lock:
                self._reject_cancelled(claim)
                if not session.ended:
                    self._open.setdefault(claim.id, []).append(session)
                    session.open.append(claim.id)
                    return session

    def _find(self, claim: Claim) -> Session | None:
        with self._lock:
            session = self._current.get(_purpose(claim))
        if session and session.shared and self._now() >= session.proved_at + USABLE * session.ttl:
            self.end(session, "it was not renewed in time")
            return None
        return session

    def _answered(self, session: Session, claim: Claim) -> None:
        with self._lock:
            if claim.id not in session.open:  # the session has ended
                return
            session.open.remove(claim.id)
            self._forget_open(session, claim.id)
            if claim.id not in session.open:
                session.cancelled.pop(claim.id, None)

    def _forget_open(self, session: Session, claim_id: str) -> None:
        """Forget one request of the claim. Each request is recorded in two places, and an interrupt may have left only
        one record."""
        sessions = self._open.get(claim_id, [])
        if session in sessions:
            sessions.remove(session)
        if not sessions:
            self._open.pop(claim_id, None)

    def _forget_all(self, session: Session, claim_id: str) -> None:
        while session in self._open.get(claim_id, ()):
            self._forget_open(session, claim_id)

    # The life of a session

    def _make(self, claim: Claim, until: float) -> Session:
        with system.Taking(self._making, until - self._now(), _not_made):
            if session := self._find(claim):
                return session
            session = self._create(claim, until)
        self._notices.group(session.id, session.ttl, session.ttl / RENEWALS)
        return session

    def _make_own(self, claim: Claim, until: float) -> Session:
        """Make a session for this claim alone. Raises `Cancelled` if the claim was cancelled, because no later release
        would end the session. A release that comes during the request is refused, and must be repeated."""
        with self._lock:
            self._reject_cancelled(claim)
            self._beginning.add(claim.id)
        try:
            return self._create(claim, until)
        finally:
            with self._lock:
                self._beginning.discard(claim.id)

    def _create(self, claim: Claim, until: float) -> Session:
        session_id, ttl, sent_at = self._new(claim.ttl, self._lock_delay, _behaviour(claim), until)
        session = Session(session_id, ttl, sent_at, _purpose(claim))
        with self._lock:
            # if `close` has already run, it did not know this session, so the session is destroyed below
            closed = session.ended = self._closed
            self._current[session.purpose] = self._by_id[session.id] = session
        if closed:
            self.destroy(session, until - self._now())
            raise BackendUnavailable("the client was closed", unknown=False, backend="consul")
        return session

    def new_rest(self, seconds: float, until: float) -> tuple[str, float]:
        """Make a session that keeps a name taken for ``seconds``. Returns its id and the ttl that the server
        granted."""
        session_id, ttl, _ = self._new(math.ceil(seconds * 1000) / 1000, lambda ttl: 0.0, DELETE, until)
        return session_id, ttl

    def end_rest(self, session_id: str, within: float) -> None:
        """Destroy a session that `new_rest` made, but that no key needs. If the request fails, the session expires at
        the end of its ttl."""
        with suppress(MultilockError):
            self._agents.call("PUT", self._agents.target(f"/v1/session/destroy/{session_id}"), within)

    def _new(
        self, ttl: float, lock_delay: Callable[[float], float], behaviour: str, until: float
    ) -> tuple[str, float, float]:
        """Make a session. Returns its id, the ttl that the server granted, and when the request was sent."""
        ttl = max(ttl, self._ttl_min)
        response, sent_at = self._ask_for(ttl, lock_delay(ttl), behaviour, until - self._now())
        if least := _least_ttl(response):
            self._ttl_min = least
            ttl = max(ttl, least)
            response, sent_at = self._ask_for(ttl, lock_delay(ttl), behaviour, until - self._now())
        try:
            return str(judged(response).json()["ID"]), ttl, sent_at
        except (ValueError, LookupError, TypeError) as error:
            who = (
                "Consul" if "json" in response.headers.get("content-type", "") else "an HTTP server that is not Consul"
            )
            raise BackendUnavailable(f"{who} made no session: {response.text}", backend="consul") from error

    def _ask_for(self, ttl: float, lock_delay: float, behaviour: str, within: float) -> tuple[Response, float]:
        wanted = {
            "Name": f"multilock {self._who}",
            "TTL": f"{round(ttl * 1000)}ms",
            "LockDelay": f"{round(lock_delay * 1000)}ms",
            "Behavior": behaviour,
            # if the session depended on a check of the node, a short fault of the gossip protocol would end it
            "NodeChecks": [],
            "ServiceChecks": [],
        }
        try:
            return self._agents.exchange(
                "PUT", self._agents.target("/v1/session/create"), within, json.dumps(wanted).encode()
            )
        except BackendUnavailable as silence:
            # The session may exist, but no client has its id. So it holds no lock, and expires.
            raise BackendUnavailable(str(silence), unknown=False, backend="consul") from silence

    def renew(self, session: Session, within: float) -> bool:
        """Renew this session. Returns whether it still lives. Raises the errors of `Backend`."""
        if session.shared and self._now() >= session.proved_at + session.ttl:
            self.end(session, "it was not renewed in time")
            return False
        until = self._now() + within
        target = self._agents.target(f"/v1/session/renew/{session.id}")
        response, sent_at = self._agents.call("PUT", target, within, urgent=True)
        if response.status == 404 and session.id in response.text:
            # A server that has just become the leader may report a missing session before it has read its whole log.
            if self.exists(session.id, until - self._now()):
                raise BackendUnavailable("Consul's new leader still reads its log", unknown=False, backend="consul")
            self.gone(session, "the server no longer has it")
            return False
        if response.status != 200 or not shows(response, session.id):
            raise BackendUnavailable(
                f"this is not a reply of Consul ({response.status}): {response.text}", backend="consul"
            )
        with self._lock:
            session.proved_at = max(session.proved_at, sent_at)
        return True

    def exists(self, session_id: str, within: float) -> bool:
        """Return whether the server has this session. Raises the errors of `Backend`."""
        target = self._agents.target(f"/v1/session/info/{session_id}", consistent="")
        response, _ = self._agents.call("GET", target, within)
        return shows(response, session_id)

    def is_gone(self, session: Session, within: float) -> bool:
        """Return whether this session has ended. Called after a reply that did not show the session.

        A server also hides every session from a token without the right to read sessions. A renewal distinguishes the
        two cases: without the right the server refuses it, while an ended session gives 404 for any token. If the
        renewal has no reply, the session counts as ended.
        """
        target = self._agents.target(f"/v1/session/renew/{session.id}")
        try:
            response, _ = self._agents.call("PUT", target, within, urgent=True)
            if response.status == 200 and shows(response, session.id):
                return False
        except BackendRejected:
            return False
        except BackendUnavailable:
            pass
        self.gone(session, "the server ended it")
        return True

    def end(self, session: Session, why: str) -> None:
        """Stop using this session. A request sent in it earlier may still be executed until the session is gone."""
        with self._lock:
            first, session.ended = not session.ended, True
            self._unlist(session)
        if first:
            self._tell(session, why)

    def gone(self, session: Session, why: str) -> None:
        """Record that the server no longer has this session: no request in it can be executed any longer."""
        self.end(session, why)
        with self._lock:
            self._over.append(session.id)
            self._by_id.pop(session.id, None)
            for claim_id in session.open:
                self._ended_unanswered.setdefault(claim_id, []).append(session.id)
            for claim_id in {*session.open, *session.cancelled}:
                self._forget_all(session, claim_id)
            session.open.clear()
            for claim_id in session.held | session.leaving:
                if self._holding.get(claim_id) is session:  # a waiter may have locked its key again in a later session
                    del self._holding[claim_id]

    def end_if_idle(self, session: Session) -> bool:
        """Stop using this session if no claim needs it. Returns whether the session is out of use."""
        with self._lock:
            if not (session.ended or session.idle()):
                return False
            first, session.ended = not session.ended, True
            self._unlist(session)
        if first:
            self._tell(session, "it was released")
        return True

    def destroy(self, session: Session, within: float) -> None:
        """Destroy this session at the server, which then deletes its keys and starts their lock delay."""
        self.end(session, "it was released")
        response, _ = self._agents.call("PUT", self._agents.target(f"/v1/session/destroy/{session.id}"), within)
        if response.status != 200 or response.body.strip() != b"true":  # the reply may be a proxy's page
            raise no_answer(response)
        self.gone(session, "it was released")

    def _unlist(self, session: Session) -> None:
        if self._current.get(session.purpose) is session:
            del self._current[session.purpose]

    def _tell(self, session: Session, why: str) -> None:
        self._tell_ended(session.id)
        message = f"the session {session.id} ended: {why}"
        if session.shared:
            self._notices.group_gone(session.id, message)
            return
        for claim_id in tuple(session.held):  # `held` no longer contains a released claim
            self._notices.gone(claim_id, LossReason.SESSION_LOST, message)

    # Releases

    def get(self, session_id: object) -> Session | None:
        """Return the session with this id, or None if it is gone."""
        return self._by_id.get(session_id) if isinstance(session_id, str) else None

    def known_over(self, session_id: object) -> bool:
        """Return whether this session is known to have ended."""
        return session_id in self._over

    def own(self, claim: Claim) -> Session | None:
        """Return the separate session of this claim, if it has one."""
        return self._current.get(claim.id)

    def holds(self, claim: Claim) -> bool:
        """Return whether a key is locked for this claim. The claim may still wait for readers to leave."""
        return claim.id in self._holding

    def asked_before(self, claim: Claim) -> bool:
        """Return whether an earlier attempt of this claim got no reply."""
        return len(self._open.get(claim.id, ())) > 1

    def ended_unanswered(self, claim: Claim) -> list[str]:
        """Return the sessions that ended while an attempt of this claim in them had no reply, and forget them.

        The caller must release any key that such an attempt has locked.
        """
        with self._lock:
            return self._ended_unanswered.pop(claim.id, [])

    def cancel(self, claim: Claim, *, granted: bool) -> list[Session]:
        """Cancel this claim. Returns the sessions in which a request of the claim was executed, or may still be
        executed.

        The caller must call `left` after the release, even if the release failed.
        """
        with self._lock:
            doubtful = list(dict.fromkeys(self._open.get(claim.id, ())))
            for session in doubtful:
                self._look_after(session, claim)
            if holding := self._holding.get(claim.id):
                holding.held.discard(claim.id)
                holding.leaving.add(claim.id)
            if not granted:
                self._note_cancelled(claim.id)
        return [*doubtful, holding] if holding and holding not in doubtful else doubtful

    def will_rest(self, claim: Claim, seconds: float) -> None:
        """Record that the claim's name must stay locked for ``seconds``. If the reply to its `rest` is lost, a repeated
        `rest` must still find the lock."""
        with self._lock:
            if holding := self._holding.get(claim.id):
                holding.rests[claim.id] = self._now() + seconds

    def left(self, claim: Claim, *, answered: bool) -> None:
        """Record that the claim's release has ended. If the release had no reply, renewals look for keys that the claim
        holds."""
        with self._lock:
            if holding := self._holding.get(claim.id):
                holding.leaving.discard(claim.id)
                key = self._keys.place(claim, holding.id)
                holding.unseen.pop(key, None)
                if not answered:
                    holding.left[key] = max(self._now(), holding.rests.get(claim.id, 0.0))
                    return
                holding.rests.pop(claim.id, None)
                del self._holding[claim.id]
            session = holding or self._current.get(_purpose(claim))  # a claim without a lock was a waiter
            if session and session.shared:
                key = self._keys.place(claim, session.id)
                session.released.pop(key, None)
                session.released[key] = self._now() + LATE_REQUEST
                if len(session.released) > RELEASED_MAX:
                    del session.released[next(iter(session.released))]

    def wanted(self, session: Session, claim_id: str | None) -> bool:
        """Return whether a key that this session locks for the claim may stay locked. The key may stay locked while the
        claim holds it, may still acquire it or is releasing it, and while ``hold_at_least`` keeps the name taken.

        ``claim_id`` is None if the key does not show its claim. The result is then True.
        """
        with self._lock:
            if claim_id is None or claim_id in session.held or claim_id in session.leaving:
                return True
            if session.rests.get(claim_id, 0.0) > self._now():
                return True
            return claim_id in session.open and claim_id not in session.cancelled

    def is_beginning(self, claim: Claim) -> bool:
        """Return whether this claim's separate session is being made right now."""
        with self._lock:
            return claim.id in self._beginning

    def _reject_cancelled(self, claim: Claim) -> None:
        if claim.id in self._cancelled:
            raise Cancelled

    def _note_cancelled(self, claim_id: str) -> None:
        now = self._now()
        while (oldest := next(iter(self._cancelled), None)) and self._cancelled[oldest] < now - LATE_REQUEST:
            del self._cancelled[oldest]
        self._cancelled[claim_id] = now

    def _look_after(self, session: Session, claim: Claim) -> None:
        until = self._now() + max(LATE_REQUEST, 2 * session.ttl)
        session.cancelled[claim.id] = session.left[self._keys.place(claim, session.id)] = until

    def to_look_at(self, session: Session, held: Iterable[str]) -> dict[str, bool]:
        """Return the keys to read, in this order, and for each key whether it should exist.

        Keys that may be locked for an unwanted claim come first, then held keys. The held keys begin with those that
        the last renewal had no time to read.
        """
        now = self._now()
        with self._lock:
            keys = dict.fromkeys(session.left, True)
            rest = dict.fromkeys(held, True)
            if session.released and now >= session.released_due:
                session.released_due = now + RELEASED_EVERY
                rest = {**dict.fromkeys(session.released, False), **rest}
            keys.update((key, True) for key in session.unseen if key in rest and key not in keys)
            keys.update((key, likely) for key, likely in rest.items() if key not in keys)
        return keys

    def looked_at(self, session: Session, keys: Iterable[str], clean: Set[str]) -> None:
        """Record that a renewal has read these keys. ``clean`` contains those that need no clean-up: they are free, or
        locked for a claim that still wants its lock. The next renewal reads the other keys first."""
        now = self._now()
        with self._lock:
            for key in keys:
                if key in clean:
                    session.unseen.pop(key, None)
                else:
                    session.unseen[key] = None
            for remembered in (session.left, session.released):
                for key in [key for key, until in remembered.items() if until <= now and key in clean]:
                    del remembered[key]
            for claim_id in [claim_id for claim_id, until in session.rests.items() if until <= now]:
                del session.rests[claim_id]
            for claim_id in [claim_id for claim_id, until in session.cancelled.items() if until <= now]:
                del session.cancelled[claim_id]
                session.open = [each for each in session.open if each != claim_id]
                self._forget_all(session, claim_id)

    def close(self) -> list[Session]:
        """Close this object. Returns the sessions that must be destroyed.

        A session that is being made right now destroys itself. If a `rest` was not confirmed, its session is not
        returned, so that the name stays taken until the ttl ends.
        """
        with self._lock:
            self._closed = True
            return [session for session in self._by_id.values() if not session.rests]


def _not_made() -> BackendUnavailable:
    return BackendUnavailable("no session was made in time", unknown=False, backend="consul")


def shows(response: Response, session_id: str) -> bool:
    """Return whether this reply, a list of at most one session, contains the session. Raises `BackendUnavailable` if
    the list contains a different session: the reply then belongs to another request."""
    try:
        shown = [str(session["ID"]) for session in response.json()]
    except (ValueError, LookupError, TypeError) as error:
        raise BackendUnavailable(f"this is not a reply of Consul: {response.text}", backend="consul") from error
    if shown not in ([], [session_id]):
        raise BackendUnavailable(f"this reply belongs to another request: {response.text}", backend="consul")
    return bool(shown)


def _least_ttl(response: Response) -> float | None:
    """Return the server's minimum ttl if this reply refuses the requested ttl, else None."""
    if response.status == 200 or not (found := _TTL_REFUSED.search(response.body.decode(errors="replace"))):
        return None
    return sum(float(number) * _UNITS[unit] for number, unit in re.findall(r"([0-9.]+)(ms|us|µs|ns|h|m|s)", found[1]))
