"""Consul sessions: one for all renewed locks of one ttl, one of its own for each lock that is not renewed.

A session is what keeps a lock: putting or locking a key does not renew it. A session is never revived, and it is not
used any more once its proof is too old: whoever comes then gets a new one.

What has no answer is remembered here, because it may still be executed while its session lives: an acquire whose answer
was lost, or is not here yet. Once nobody wants it, either its session ends, which is final, or (others hold locks in
it) its key is looked at with each renewal for a while.
"""

from __future__ import annotations

import json
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from multilock.backend import Notices
from multilock.errors import BackendRejected, BackendUnavailable
from multilock.model import Claim
from multilock_consul.http1 import Response
from multilock_consul.transport import Agents, judged

__all__ = ["LOCK_DELAY_MAX", "OWN", "REMOVED_AFTER", "Session", "Sessions", "safe_delay"]

OWN = "own sessions"
"""The group of all locks that are not renewed: each has a session of its own."""

LOOKED_AT = 60.0  # seconds after a cancel (or 2 × ttl) for which renewals look: a stopped server may execute it later
LOCK_DELAY_MAX = 60.0  # the server's
REMOVED_AFTER = 5.0  # seconds for which a node stands still before the others can take it out (seen: 9 to 13)
HEARD_WITHIN = 1.0  # seconds; a holder whose session was ended hears of it in milliseconds, as a rule
USABLE = 0.89  # of the ttl: from then on every lease of the session is lost by the clock
FRESH = 0.05  # of the ttl: an own session older than that is renewed before it takes a lock
NO_MORE = 60.0  # seconds after a cancel; no call that gave up earlier can still wait for a thread
REMEMBERED = 256  # sessions of which we know that they ended, so that releases in them need no request
_TTL_REFUSED = re.compile(r"must be between \[([0-9.hmsuµn]+)=")
_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}


@dataclass(eq=False, slots=True)
class Session:
    id: str
    ttl: float  #: as the server granted it
    proved_at: float  #: when the newest answered request was sent that keeps it alive
    purpose: float | str  #: the ttl that was asked for, or the id of the one claim that it is for
    ended: bool = False  # nobody begins anything in it any more
    held: set[str] = field(default_factory=set)  # ids of claims
    open: list[str] = field(default_factory=list)  # ids, one for each request that is under way or has no answer
    cancelled: dict[str, tuple[str, float]] = field(default_factory=dict)  # id nobody wants -> name, looked at until

    @property
    def shared(self) -> bool:
        return isinstance(self.purpose, float)

    def idle(self) -> bool:
        """Whether nobody would miss it."""
        return not self.held and all(claim_id in self.cancelled for claim_id in self.open)


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
        notices: Notices,
        *,
        who: str,
        lock_delay: Callable[[float], float],
        ended: Callable[[str], None],
    ) -> None:
        self._agents = agents
        self._notices = notices
        self._now = notices.now
        self._who = who
        self._lock_delay = lock_delay
        self._tell_ended = ended  # called with the id of a session that ended
        self._ttl_min = 0.0  # the server's, once it has refused
        self._lock = threading.Lock()  # never held during a request or a notice
        self._making = threading.Lock()  # held during one
        self._by_id: dict[str, Session] = {}
        self._current: dict[float | str, Session] = {}  # by purpose, those in use
        self._open: dict[str, list[Session]] = {}  # by claim id, those that have it in `Session.open`
        self._holding: dict[str, Session] = {}  # by claim id
        self._cancelled: dict[str, float] = {}  # claim id -> when, the oldest first; an attempt may still begin
        self._over: deque[str] = deque(maxlen=REMEMBERED)

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
                session = self._make(claim, until) if claim.renew else self._create(claim.ttl, claim.id, until)
            elif not claim.renew and self._now() > session.proved_at + FRESH * session.ttl:
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
            session = self._current.get(claim.ttl if claim.renew else claim.id)
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
            session = self._create(claim.ttl, claim.ttl, until)
        finally:
            self._making.release()
        self._notices.group(session.id, session.ttl, session.ttl / 3)
        return session

    def _create(self, ttl: float, purpose: float | str, until: float) -> Session:
        ttl = max(ttl, self._ttl_min)
        response, sent_at = self._ask_for(ttl, until - self._now())
        if least := _least_ttl(response):
            self._ttl_min = least
            ttl = max(ttl, least)
            response, sent_at = self._ask_for(ttl, until - self._now())
        try:
            session = Session(judged(response).json()["ID"], ttl, sent_at, purpose)
        except (ValueError, LookupError, TypeError) as error:
            raise BackendUnavailable(f"Consul made no session: {response.text}", backend="consul") from error
        with self._lock:
            self._current[purpose] = self._by_id[session.id] = session
        return session

    def _ask_for(self, ttl: float, within: float) -> tuple[Response, float]:
        wanted = {
            "Name": f"multilock {self._who}",
            "TTL": f"{round(ttl * 1000)}ms",
            "LockDelay": f"{round(self._lock_delay(ttl) * 1000)}ms",
            "Behavior": "delete",  # a free lock has no key
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
        response, sent_at = self._agents.call("PUT", target, within)
        if response.status == 404 and "ession" in response.text:
            # A server that has just become the leader may say so before it has read the whole of its log.
            if self.exists(session.id, until - self._now()):
                raise BackendUnavailable("Consul has not read its log yet", unknown=False, backend="consul")
            self.gone(session, "the server does not know it any more")
            return False
        if response.status != 200:
            raise BackendUnavailable(f"no answer of Consul ({response.status}): {response.text}", backend="consul")
        with self._lock:
            session.proved_at = max(session.proved_at, sent_at)
        return True

    def exists(self, session_id: str, within: float) -> bool:
        """Whether the server knows it. Raises as `Backend` says."""
        target = self._agents.target(f"/v1/session/info/{session_id}", consistent="")
        response, _ = self._agents.call("GET", target, within)
        try:
            return bool(response.json())
        except ValueError as error:
            raise BackendUnavailable(f"no answer of Consul: {response.text}", backend="consul") from error

    def is_gone(self, session: Session, within: float) -> bool:
        """Whether it ended, when the server showed none.

        Whoever has lost the right to read a session is shown none either. But a renewal is refused then, and 404 for a
        session that ended, whatever the token. Without an answer, what was shown is believed.
        """
        target = self._agents.target(f"/v1/session/renew/{session.id}")
        try:
            response, _ = self._agents.call("PUT", target, within)
        except BackendRejected:
            return False
        except BackendUnavailable:
            pass
        else:
            if response.status == 200:
                return False
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
            session.open.clear()

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
        self._agents.call("PUT", self._agents.target(f"/v1/session/destroy/{session.id}"), within)
        self.gone(session, "it was given back")

    def _unlist(self, session: Session) -> None:
        if self._current.get(session.purpose) is session:
            del self._current[session.purpose]

    def _tell(self, session: Session, why: str) -> None:
        self._tell_ended(session.id)
        if session.shared:
            self._notices.group_gone(session.id, f"the session {session.id} ended: {why}")

    # What is given back

    def get(self, session_id: object) -> Session | None:
        return self._by_id.get(session_id) if isinstance(session_id, str) else None

    def known_over(self, session_id: object) -> bool:
        return session_id in self._over

    def own(self, claim: Claim) -> Session | None:
        return self._current.get(claim.id)

    def cancel(self, claim: Claim, *, granted: bool) -> list[Session]:
        """Nobody wants this claim any more. The sessions in which a request of it may still be executed, or was."""
        with self._lock:
            doubtful = list(dict.fromkeys(self._open.get(claim.id, ())))
            for session in doubtful:
                self._look_after(session, claim)
            if holding := self._holding.pop(claim.id, None):
                holding.held.discard(claim.id)
            if not granted:
                self._note_cancelled(claim.id)
        return [*doubtful, holding] if holding and holding not in doubtful else doubtful

    def _note_cancelled(self, claim_id: str) -> None:
        now = self._now()
        while (oldest := next(iter(self._cancelled), None)) and self._cancelled[oldest] < now - NO_MORE:
            del self._cancelled[oldest]
        self._cancelled[claim_id] = now

    def _look_after(self, session: Session, claim: Claim) -> None:
        session.cancelled[claim.id] = (claim.name, self._now() + max(LOOKED_AT, 2 * session.ttl))

    def to_look_at(self, session: Session) -> dict[str, str]:
        """Ids and names of its cancelled claims, those whose time is over for the last time."""
        now = self._now()
        with self._lock:
            found = {claim_id: name for claim_id, (name, _) in session.cancelled.items()}
            for claim_id in [claim_id for claim_id, (_, until) in session.cancelled.items() if until <= now]:
                del session.cancelled[claim_id]
                while claim_id in session.open:
                    session.open.remove(claim_id)
                    self._forget_open(session, claim_id)
        return found

    def all(self) -> list[Session]:
        with self._lock:
            return list(self._by_id.values())


def _least_ttl(response: Response) -> float | None:
    """The server's minimum, if it refuses the ttl that it was asked for."""
    if response.status == 200 or not (found := _TTL_REFUSED.search(response.body.decode(errors="replace"))):
        return None
    return sum(float(number) * _UNITS[unit] for number, unit in re.findall(r"([0-9.]+)(ms|us|µs|ns|h|m|s)", found[1]))
