"""Consul sessions: one for all renewed locks of one ttl, one for all its readers, one of its own for each lock that is
not renewed and for each permit.

A session is what keeps a lock: putting or locking a key does not renew it. A session is never revived, and it is not
used any more once its proof is too old: whoever comes then gets a new one.

What may still be executed while its session lives is remembered here: an acquire whose answer was lost, or is not here
yet, and a release that was refused. Once nobody wants it, either its session ends, which is final, or (others hold
locks in it) its key is looked at with each renewal, until that has shown for a while that nothing of ours is there.
Answered acquires are remembered too, after their release: a proxy may repeat any PUT, and we renew what that locks.

A name that rests is locked by a session that nobody remembers: it is not renewed, not destroyed by `close`, and ends by
the server's clock. Until a name has moved to it, the session that holds the name must neither end nor be swept.
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
from multilock.backend import Claim, Notices
from multilock_consul.keys import Keys, no_answer
from multilock_consul.transport import Agents, judged
from multilock_consul.wire import Response

__all__ = ["LOCK_DELAY_MAX", "OWN", "REMOVED_AFTER", "Session", "Sessions", "safe_delay", "shows"]

OWN = "own sessions"
"""The group of all locks that have a session of their own."""

DELETE, RELEASE = "delete", "release"
"""What becomes of a session's keys when it ends. That of a reader stays: it is the only trace of who may still believe,
for a writer that comes later. A free lock has no key, and its own lock delay keeps others out."""

LOOKED_AT = 60.0  # seconds after a cancel (or 2 × ttl) for which renewals look: a stopped server may execute it later
RELEASED_MAX = 512  # keys of answered releases that are looked at so long, the newest: eight requests
RELEASED_EVERY = 5.0  # seconds between two looks at those; nothing is known to be left there
LOCK_DELAY_MAX = 60.0  # the server's
REMOVED_AFTER = 5.0  # seconds for which a node stands still before the others can take it out (seen: 9 to 13)
HEARD_WITHIN = 1.0  # seconds; a holder whose session was ended hears of it in milliseconds, as a rule
USABLE = 0.89  # of the ttl: from then on every lease of the session is lost by the clock
FRESH = 0.05  # of the ttl: an own session older than that is renewed before it takes a lock
NO_MORE = 60.0  # seconds after a cancel; no call that gave up earlier can still wait for a thread
REMEMBERED = 256  # sessions of which we know that they ended, so that releases in them need no request
_TTL_REFUSED = re.compile(r"must be between \[([0-9.hmsuµn]+)=")
_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}


Purpose = tuple[float, str] | str


@dataclass(eq=False, slots=True)
class Session:
    id: str
    ttl: float  #: as the server granted it
    proved_at: float  #: when the newest answered request was sent that keeps it alive
    purpose: Purpose  #: the ttl that was asked for and the behaviour, or the id of the one claim that it is for
    ended: bool = False  # nobody begins anything in it any more
    held: set[str] = field(default_factory=set)  # ids of claims
    leaving: set[str] = field(default_factory=set)  # … that are being given back just now
    open: list[str] = field(default_factory=list)  # ids, one for each request that is under way or has no answer
    cancelled: dict[str, float] = field(default_factory=dict)  # id in `open` that nobody wants -> may come until
    left: dict[str, float] = field(default_factory=dict)  # key that may be locked for nobody -> looked at until
    rests: dict[str, float] = field(default_factory=dict)  # id that is to rest, and may not do so yet -> until
    released: dict[str, float] = field(default_factory=dict)  # … and only if something repeats requests; oldest first
    released_due: float = 0.0  # when to look at those
    unseen: dict[str, None] = field(default_factory=dict)  # keys that the last look did not come to

    @property
    def shared(self) -> bool:
        return not isinstance(self.purpose, str)

    def idle(self) -> bool:
        """Whether nobody would miss it."""
        wanted = self.held or self.rests
        return not wanted and all(claim_id in self.cancelled for claim_id in (*self.open, *self.leaving))


def _behaviour(claim: Claim) -> str:
    return RELEASE if claim.mode == "r" else DELETE


def _purpose(claim: Claim) -> Purpose:
    """One of its own for a permit too: Consul's semaphore knows its holders by their sessions."""
    return (claim.ttl, _behaviour(claim)) if claim.renew and claim.permits < 2 else claim.id


def safe_delay(ttl: float) -> float:
    """Seconds for which the server must keep others out after a session ended, so that its holder has given up.

    A session can end while its holder hears of nothing: the server that is its agent stands still, and the others take
    that node out with all its sessions. The holder then goes on for what is left of its ttl.
    """
    return min(max(HEARD_WITHIN, ttl - REMOVED_AFTER), LOCK_DELAY_MAX)


class Sessions:
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
        self._ttl_min = 0.0  # the server's, once it has refused
        self._lock = system.Lock()  # never held during a request or a notice
        self._making = system.Lock()  # held during one
        self._by_id: dict[str, Session] = {}
        self._current: dict[Purpose, Session] = {}  # by purpose, those in use
        self._open: dict[str, list[Session]] = {}  # by claim id, those that have it in `Session.open`
        self._holding: dict[str, Session] = {}  # by claim id
        self._ended_unanswered: dict[str, list[str]] = {}  # by claim id, sessions that ended with an attempt under way
        self._cancelled: dict[str, float] = {}  # claim id -> when, the oldest first; an attempt may still begin
        self._beginning: set[str] = set()  # ids of claims whose own session is being made
        self._over: deque[str] = deque(maxlen=REMEMBERED)
        self._closed = False

    # What a claim is tried in

    @contextmanager
    def trying(self, claim: Claim, until: float) -> Iterator[Session]:
        """The session for one attempt. An attempt that ends without an answer is remembered."""
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
        """The claim has a lock in it. False: nobody wants it any more."""
        with self._lock:
            if claim.id in session.cancelled:
                return False
            session.held.add(claim.id)
            self._holding[claim.id] = session
            return True

    def _enter(self, claim: Claim, until: float) -> Session:
        while True:
            session = self._find(claim)
            if session is None:
                own = isinstance(_purpose(claim), str)
                session = self._make_own(claim, until) if own else self._make(claim, until)
            elif not session.shared and self._now() > session.proved_at + FRESH * session.ttl:
                # Its time begins with the lock, and not with the wait for it.
                self.renew(session, until - self._now())
            with self._lock:
                if not session.ended:
                    session.open.append(claim.id)
                    self._open.setdefault(claim.id, []).append(session)
                    if claim.id in self._cancelled:  # it waited for a thread longer than its caller did
                        self._look_after(session, claim)
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
            if claim.id not in session.open:  # the session is gone
                return
            session.open.remove(claim.id)
            self._forget_open(session, claim.id)
            if claim.id not in session.open:
                session.cancelled.pop(claim.id, None)

    def _forget_open(self, session: Session, claim_id: str) -> None:
        sessions = self._open[claim_id]
        sessions.remove(session)
        if not sessions:
            del self._open[claim_id]

    # Their life

    def _make(self, claim: Claim, until: float) -> Session:
        if not self._making.acquire(timeout=max(until - self._now(), 0.0)):
            raise BackendUnavailable("no session was made in time", unknown=False, backend="consul")
        try:
            if session := self._find(claim):
                return session
            session = self._create(claim, until)
        finally:
            self._making.release()
        self._notices.group(session.id, session.ttl, session.ttl / 3)
        return session

    def _make_own(self, claim: Claim, until: float) -> Session:
        """Not for a claim that was cancelled: nobody would end it. `release` waits for one that is being made."""
        with self._lock:
            if claim.id in self._cancelled:
                raise BackendUnavailable("it was given up", unknown=False, backend="consul")
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
            closed = session.ended = self._closed  # if so nobody was told of it
            self._current[session.purpose] = self._by_id[session.id] = session
        if closed:
            self.destroy(session, until - self._now())
            raise BackendUnavailable("the client was closed", unknown=False, backend="consul")
        return session

    def new_rest(self, seconds: float, until: float) -> tuple[str, float]:
        """The id of a session that keeps a name for so long, and for how long it really does, at least."""
        session_id, ttl, _ = self._new(math.ceil(seconds * 1000) / 1000, lambda ttl: 0.0, DELETE, until)
        return session_id, ttl

    def end_rest(self, session_id: str, within: float) -> None:
        """If it cannot be told, the server ends it in its time."""
        with suppress(MultilockError):
            self._agents.call("PUT", self._agents.target(f"/v1/session/destroy/{session_id}"), within)

    def _new(
        self, ttl: float, lock_delay: Callable[[float], float], behaviour: str, until: float
    ) -> tuple[str, float, float]:
        """Its id, its ttl as the server granted it, and when it was asked for."""
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
            "NodeChecks": [],  # not the node's health: a short hiccup of gossip would take all its locks away
            "ServiceChecks": [],
        }
        try:
            return self._agents.exchange(
                "PUT", self._agents.target("/v1/session/create"), within, json.dumps(wanted).encode()
            )
        except BackendUnavailable as silence:
            # It may have been made. It holds nothing, nobody knows its id, and it ends by itself.
            raise BackendUnavailable(str(silence), unknown=False, backend="consul") from silence

    def renew(self, session: Session, within: float) -> bool:
        """Whether it still lives, and does for another ttl. Raises as `Backend` says."""
        if session.shared and self._now() >= session.proved_at + session.ttl:
            self.end(session, "it was not renewed in time")
            return False
        until = self._now() + within
        target = self._agents.target(f"/v1/session/renew/{session.id}")
        response, sent_at = self._agents.call("PUT", target, within, urgent=True)
        if response.status == 404 and session.id in response.text:
            # A server that has just become the leader may say so before it has read the whole of its log.
            if self.exists(session.id, until - self._now()):
                raise BackendUnavailable("Consul has not read its log yet", unknown=False, backend="consul")
            self.gone(session, "the server does not know it any more")
            return False
        if response.status != 200 or not shows(response, session.id):
            raise BackendUnavailable(f"no answer of Consul ({response.status}): {response.text}", backend="consul")
        with self._lock:
            session.proved_at = max(session.proved_at, sent_at)
        return True

    def exists(self, session_id: str, within: float) -> bool:
        """Whether the server knows it. Raises as `Backend` says."""
        target = self._agents.target(f"/v1/session/info/{session_id}", consistent="")
        response, _ = self._agents.call("GET", target, within)
        return shows(response, session_id)

    def is_gone(self, session: Session, within: float) -> bool:
        """Whether it ended, when the server showed none.

        Whoever has lost the right to read a session is shown none either. But a renewal is refused then, and 404 for a
        session that ended, whatever the token. Without an answer, what was shown is believed.
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
        """Nobody begins anything in it any more; what was begun may still be executed until it is gone."""
        with self._lock:
            first, session.ended = not session.ended, True
            self._unlist(session)
        if first:
            self._tell(session, why)

    def gone(self, session: Session, why: str) -> None:
        """The server said that it does not exist: nothing can be executed in it any more."""
        self.end(session, why)
        with self._lock:
            self._over.append(session.id)
            self._by_id.pop(session.id, None)
            for claim_id in session.open:
                self._forget_open(session, claim_id)
                self._ended_unanswered.setdefault(claim_id, []).append(session.id)
            session.open.clear()
            for claim_id in session.held | session.leaving:
                self._holding.pop(claim_id, None)

    def end_if_idle(self, session: Session) -> bool:
        """Whether it is over, now or since long."""
        with self._lock:
            if not (session.ended or session.idle()):
                return False
            first, session.ended = not session.ended, True
            self._unlist(session)
        if first:
            self._tell(session, "it was given back")
        return True

    def destroy(self, session: Session, within: float) -> None:
        """End it at the server. What it holds is deleted there, and its lock delay begins."""
        self.end(session, "it was given back")
        response, _ = self._agents.call("PUT", self._agents.target(f"/v1/session/destroy/{session.id}"), within)
        if response.status != 200 or response.body.strip() != b"true":  # a proxy's page, perhaps
            raise no_answer(response)
        self.gone(session, "it was given back")

    def _unlist(self, session: Session) -> None:
        if self._current.get(session.purpose) is session:
            del self._current[session.purpose]

    def _tell(self, session: Session, why: str) -> None:
        self._tell_ended(session.id)
        message = f"the session {session.id} ended: {why}"
        if session.shared:
            self._notices.group_gone(session.id, message)
            return
        for claim_id in tuple(session.held):  # nothing, where it is given back
            self._notices.gone(claim_id, LossReason.SESSION_LOST, message)

    # What is given back

    def get(self, session_id: object) -> Session | None:
        return self._by_id.get(session_id) if isinstance(session_id, str) else None

    def known_over(self, session_id: object) -> bool:
        return session_id in self._over

    def own(self, claim: Claim) -> Session | None:
        return self._current.get(claim.id)

    def holds(self, claim: Claim) -> bool:
        """Whether something is locked for it, perhaps only to keep others out."""
        return claim.id in self._holding

    def asked_before(self, claim: Claim) -> bool:
        """Whether an attempt of this claim, besides the one under way, has no answer."""
        return len(self._open.get(claim.id, ())) > 1

    def ended_unanswered(self, claim: Claim) -> list[str]:
        """Return, once, the sessions that ended while an attempt of this claim had no answer: what it left there is for
        nobody."""
        with self._lock:
            return self._ended_unanswered.pop(claim.id, [])

    def cancel(self, claim: Claim, *, granted: bool) -> list[Session]:
        """Nobody wants this claim any more. The sessions in which a request of it may still be executed, or was.

        Followed by `left`, however the release ends.
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
        """Until this is answered its name stays locked, or the one who asks again would find nothing to let rest."""
        with self._lock:
            if holding := self._holding.get(claim.id):
                holding.rests[claim.id] = self._now() + seconds

    def left(self, claim: Claim, *, answered: bool) -> None:
        """Its release has ended. Without an answer, what it holds is looked for with each renewal."""
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
            session = holding or self._current.get(_purpose(claim))  # it may have waited only
            if session and session.shared:
                key = self._keys.place(claim, session.id)
                session.released.pop(key, None)
                session.released[key] = self._now() + LOOKED_AT
                if len(session.released) > RELEASED_MAX:
                    del session.released[next(iter(session.released))]

    def wanted(self, session: Session, claim_id: str | None) -> bool:
        """Whether what this claim has locked is held, may become so, or is being given back. None: who knows?"""
        with self._lock:
            if claim_id is None or claim_id in session.held or claim_id in session.leaving:
                return True
            if session.rests.get(claim_id, 0.0) > self._now():
                return True
            return claim_id in session.open and claim_id not in session.cancelled

    def is_beginning(self, claim: Claim) -> bool:
        """Whether its own session is being made just now."""
        with self._lock:
            return claim.id in self._beginning

    def _note_cancelled(self, claim_id: str) -> None:
        now = self._now()
        while (oldest := next(iter(self._cancelled), None)) and self._cancelled[oldest] < now - NO_MORE:
            del self._cancelled[oldest]
        self._cancelled[claim_id] = now

    def _look_after(self, session: Session, claim: Claim) -> None:
        until = self._now() + max(LOOKED_AT, 2 * session.ttl)
        session.cancelled[claim.id] = session.left[self._keys.place(claim, session.id)] = until

    def to_look_at(self, session: Session, held: Iterable[str]) -> dict[str, bool]:
        """Keys, in the order in which to look at them, and whether they should be there or may well be.

        First what may be locked for nobody, then what is held, of that first what the last look did not come to.
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
        """Of these keys, ``clean`` are not locked for nobody; what is not in there will be looked at again first."""
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
                while claim_id in session.open:
                    session.open.remove(claim_id)
                    self._forget_open(session, claim_id)

    def close(self) -> list[Session]:
        """Those that are to be destroyed. One that is being made just now ends itself, and one that keeps a name which
        could not be told to rest keeps it for what is left of its ttl."""
        with self._lock:
            self._closed = True
            return [session for session in self._by_id.values() if not session.rests]


def shows(response: Response, session_id: str) -> bool:
    """Whether this list has the session; that of another one answers another question. Raises BackendUnavailable."""
    try:
        shown = [str(session["ID"]) for session in response.json()]
    except (ValueError, LookupError, TypeError) as error:
        raise BackendUnavailable(f"no answer of Consul: {response.text}", backend="consul") from error
    if shown not in ([], [session_id]):
        raise BackendUnavailable(f"not what was asked for: {response.text}", backend="consul")
    return bool(shown)


def _least_ttl(response: Response) -> float | None:
    """The server's minimum, if it refuses the ttl that it was asked for."""
    if response.status == 200 or not (found := _TTL_REFUSED.search(response.body.decode(errors="replace"))):
        return None
    return sum(float(number) * _UNITS[unit] for number, unit in re.findall(r"([0-9.]+)(ms|us|µs|ns|h|m|s)", found[1]))
