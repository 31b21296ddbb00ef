"""The lock on the majority of several primaries that know nothing of each other: ``redlock://``.

Redlock, as Redis documents it (https://redis.io/docs/latest/develop/clients/patterns/distributed-locks/), with what it
lacks. Every server runs the scripts of `multilock_redis.recipe`, queue and hand-over included, and a contender has the
same place in all queues, by when it called: so they hand over to the same one. Who has some servers but no majority
gives way there to who came before it, and keeps what nobody else is first for. Nobody tries again at random.

What a server said is a vote: it lets in nobody else for as long, counted from the sending of the request. A majority of
votes is the lock; its token is one more than those that came with the votes, kept by a majority before anybody sees it.
A server that has restarted may have forgotten whom it let in: until every such lease is over its votes do not count.

`quorum` counts, `crew` asks all servers at once.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from multilock import BackendRejected, BackendUnavailable, ConfigurationError, LossReason
from multilock.backend import Busy, Capabilities, Claim, Finding, Granted, Held, LockInfo, Notices, Returned
from multilock.options import number, reject_unknown, ttl_of, yes_or_no
from multilock.telling import logger
from multilock_redis.crew import Crew
from multilock_redis.diagnosis import diagnose
from multilock_redis.endpoints import OPTIONS, endpoints_of_clients, endpoints_of_redlock, keyspace
from multilock_redis.keys import Keyspace
from multilock_redis.node import Node
from multilock_redis.quorum import Quorum, Verdict
from multilock_redis.recipe import liveness
from multilock_redis.transport import Endpoint, Wire
from multilock_redis.wire import pack

__all__ = ["RedlockBackend", "open_redlock"]

Said = TypeVar("Said")

GROUP = "redlock"  # all that is held is renewed together, by one request to each server
LEAST_LIMIT = 0.25  # seconds for one request to one server, connecting included, however short the lease
FIRST_PAUSE = 0.012  # seconds at most for which a minority is kept, before it gives way …
ROUGHLY = 1 / 3, 1.0  # … of which so much, at random
REMEMBERED = 60.0  # seconds for which a claim that was given up is known: a thread may not have come to ask for it yet
INFO = pack("INFO", "server")


def open_redlock(url: str, scheme: str, options: Mapping[str, object]) -> RedlockBackend:
    """The backend of ``redlock://h1,h2,h3[/db]`` or ``redlocks://…``; ``client`` is a list of ``redis.Redis``.

    Own options besides those of ``redis://``: ``token`` (true; false saves a round trip, and leases have none) and
    ``restart_guard`` (seconds for which a server that restarted does not count; the client's ttl, 0 for never).
    """
    reject_unknown(options, (*OPTIONS, "client", "token", "restart_guard"), scheme)
    keys, ttl = keyspace(options, scheme), ttl_of(options)
    if "client" in options:
        endpoints = endpoints_of_clients(url, options["client"], options)
    else:
        endpoints = endpoints_of_redlock(url, scheme, options)
    places = [endpoint.name for endpoint in endpoints]
    if len(places) < 2:
        raise ConfigurationError(f"{scheme}:// takes three or five servers, as in {scheme}://h1,h2,h3: one is redis://")
    if twice := sorted({place for place in places if places.count(place) > 1}):
        raise ConfigurationError(f"{', '.join(twice)} is named twice: each server has one vote")
    guard = number(float, options.get("restart_guard", ttl))
    if guard is None or not 0 <= guard < math.inf:
        raise ConfigurationError("restart_guard must be seconds, or 0 for servers that never forget")
    token = yes_or_no("token", options.get("token", True))
    return RedlockBackend(scheme, endpoints, keys, ttl=ttl, token=token, guard=guard)


class Guarded(Endpoint):
    """A server that is asked, on each new connection, for how long it has been up."""

    counts_from = 0.0  #: on our clock; before that it may have forgotten what it granted

    @classmethod
    def around(cls, endpoint: Endpoint, guard: float) -> Guarded:
        guarded = cls(endpoint.name, endpoint._class, endpoint._settings)
        guarded.guard = guard
        return guarded

    guard: float

    def _dial(self, within: float, now: Callable[[], float]) -> Wire:
        deadline = now() + within
        wire = super()._dial(within, now)
        try:
            told = wire.call(INFO, deadline - now())
        except BackendRejected as refused:
            if not self.guard:
                return wire
            wire.close()
            raise BackendRejected(
                f"{refused}: allow this user INFO, or give restart_guard=0: a server that restarted has to be known"
            ) from refused
        if self.guard:
            up = next((line for line in told.splitlines() if line.startswith(b"uptime_in_seconds:")), b"")
            if not up:
                wire.close()
                raise BackendRejected(f"{self.name} does not say for how long it has been up: give restart_guard=0")
            # It was up for so long at least when it said so, and no later than now. A second, since both clocks differ.
            counts_from = now() - int(up.partition(b":")[2]) + self.guard + 1
            if counts_from > now():
                self.counts_from = max(self.counts_from, counts_from)
        return wire


class _At:
    """What is known of one claim at one server. Changed under the claim's lock."""

    __slots__ = (
        "asked",
        "cleared",
        "ends",
        "floor",
        "gone",
        "number",
        "push",
        "released",
        "touched",
        "under_way",
        "unsure",
        "void",
        "vote",
    )

    def __init__(self) -> None:
        self.touched = False  # something of it may be there
        self.number = 0  # of questions
        self.under_way = False  # a request that takes or keeps it
        self.unsure = False  # some such request has no answer, and may be executed at any time
        self.void = False  # one that gives way has none yet: what this server says proves nothing for this claim …
        self.cleared = 0.0  # … nor what was sent before this: one that gave way was executed at some time until then
        self.vote: Granted | None = None
        self.push: Granted | None = None  # came while a request was under way, whose answer comes first
        self.floor = 0.0  # what was vouched for before that was given away since
        self.asked = 0.0  # when the last request was sent, or later
        self.ends: float | None = None  # when what it told us of can be over
        self.gone = False  # it has said that this claim does not hold the name
        self.released: bool | None = None  # whether it was ours; None: not told, or no answer

    def vouches(self, sent_at: float) -> bool:
        """Whether what it said of a request sent then still is so: nothing can have given it away since."""
        return not self.void and sent_at > self.cleared

    def spends(self) -> bool:
        """Whether the claim has to go on as another: nothing else undoes a request without an answer. Nor can it give
        way where there is one, and whoever keeps a minority for good may keep everybody waiting."""
        return self.unsure and (self.void or self.vote is not None)


class _Standing:
    """A claim, from its first request until nothing of it can be anywhere."""

    __slots__ = (
        "agreeing",
        "answers",
        "asking",
        "at",
        "claim",
        "held",
        "leaving",
        "lock",
        "pause",
        "short",
        "token",
        "told_gone",
        "until",
        "woken",
    )

    def __init__(self, claim: Claim, nodes: int) -> None:
        self.claim = claim
        self.lock = threading.Lock()
        self.at = [_At() for _ in range(nodes)]
        self.answers = _Answers()
        self.agreeing = False  # on the token of what pushes have proved
        self.token: int | None = None  # as it was granted …
        self.until = 0.0  # … and until when a majority certainly is its
        self.asking = False  # an attempt is under way, and counts for itself
        self.held = False
        self.short = False  # held for less than its ttl yet: renewed soon
        self.leaving = False  # nothing more is asked for it
        self.told_gone = False
        self.pause = FIRST_PAUSE
        self.woken: set[int] = set()

    def votes(self, now: float, fresh: bool = False) -> list[Granted]:
        with self.lock:
            votes = [at.vote for at in self.at if at.vote and not at.void]
        share = 0.5 if fresh else 1.0
        return [vote for vote in votes if now - vote.sent_at < vote.valid_for * share]

    def anywhere(self) -> bool:
        return any(at.touched or at.under_way for at in self.at)


class _Ear:
    """The kernel's ear, for what one server tells: counted to a majority."""

    def __init__(self, backend: RedlockBackend, which: int, notices: Notices) -> None:
        self._backend = backend
        self._which = which
        self._notices = notices
        self.client = notices.client
        self.now = notices.now

    def wake(self, claim_id: str | None) -> None:
        if claim_id is None:
            self._notices.wake(None)
        elif standing := self._backend.standing.get(claim_id):
            with standing.lock:
                standing.woken.add(self._which)
                ours = standing.woken | {which for which, at in enumerate(standing.at) if at.vote}
                enough = len(ours) >= self._backend.quorum.needed
            if enough:
                self._notices.wake(claim_id)

    def granted(self, claim_id: str, granted: Granted) -> None:
        if standing := self._backend.standing.get(claim_id):
            self._backend.pushed(standing, self._which, granted)

    def gone(self, claim_id: str, reason: LossReason, message: str) -> None:
        if standing := self._backend.standing.get(claim_id):
            with standing.lock:
                standing.at[self._which].gone = True
                lost = self._backend.quorum.lost(sum(at.gone for at in standing.at)) and not standing.told_gone
                standing.told_gone |= lost
            if lost:
                self._notices.gone(claim_id, reason, f"{message}, on a majority")

    def changed(self, name: str | None) -> None:
        self._notices.changed(name)  # each: the last of a majority is not known to be the last

    # No server of this kind has sessions.

    def group(self, group: Hashable, ttl: float, renew_every: float) -> None:
        raise NotImplementedError

    def shortened(self, group: Hashable, ttl: float, valid_until: float, renew_every: float) -> None:
        raise NotImplementedError

    def group_gone(self, group: Hashable, message: str) -> None:
        raise NotImplementedError

    def silent(self, group: Hashable) -> None:
        raise NotImplementedError


class RedlockBackend:
    """See `multilock.backend.Backend` for what each method promises."""

    spi_version = 2

    def __init__(
        self, scheme: str, endpoints: Sequence[Endpoint], keys: Keyspace, *, ttl: float, token: bool, guard: float
    ) -> None:
        self.scheme = scheme
        self.quorum = Quorum(len(endpoints))
        self._endpoints = [Guarded.around(endpoint, guard) for endpoint in endpoints]
        self._keys = keys
        self._token = token
        self._guard = guard
        wait = liveness(ttl)
        self.capabilities = Capabilities(
            fencing=token,
            fencing_scope=(
                "unless a majority of the servers loses the token's key, or a minority loses it and the clocks of the "
                "others differ by more than the time since the last grant"
                if token
                else "none: token=False"
            ),
            fair=True,
            push_wait=True,
            push_loss=True,
            cross_host=True,
            survives_failover=True,
            ttl_min=0.1,
            ttl_max=365 * 86400.0,
            ttl_step=0.001,
            takeover_bound=max(ttl, wait) + 1.1 * wait / 3,
            hold_at_least=True,
            why_one="two who share a name may have it from majorities of which no server knows both",
        )

    def __repr__(self) -> str:
        return f"<RedlockBackend {', '.join(endpoint.name for endpoint in self._endpoints)}>"

    def open(self, notices: Notices) -> None:
        self.now = notices.now
        self._notices = notices
        self.standing: dict[str, _Standing] = {}
        self._left_lock = threading.Lock()  # for changes
        self._left: OrderedDict[str, float] = (
            OrderedDict()
        )  # claims that are not to be asked for any more, and since when
        self._nodes = [
            Node(endpoint, self._keys, _Ear(self, which, notices)) for which, endpoint in enumerate(self._endpoints)
        ]
        named = list(zip(self._nodes, self._endpoints, strict=True))
        self._crews = [Crew(node, endpoint.name, notices.now) for node, endpoint in named]
        # What is held is kept and given back, however many wait: their questions are not before these.
        self._keepers = [Crew(node, endpoint.name, notices.now) for node, endpoint in named]

    # ---- acquire

    def attempt(self, claim: Claim, join: bool, within: float) -> Granted | Busy:
        deadline = self.now() + within
        standing = self.standing.setdefault(claim.id, _Standing(claim, self.quorum.nodes))
        if claim.id in self._left:  # looked at second: whoever gives it up notes that first, and looks here second
            return Busy(liveness(claim.ttl) / 3, spent=True)
        standing.asking, standing.held = True, False
        try:
            answer = self._attempted(standing, join, deadline)
        except (BackendUnavailable, BackendRejected) as error:
            if standing.anywhere():
                vars(error)["unknown"] = True  # also of one that refuses: what the others have taken is given back
            else:
                self.standing.pop(claim.id, None)
            raise
        finally:
            standing.asking = False
        if isinstance(answer, Busy):
            self._tell_if_held(standing)  # it came just now
        return answer

    def _attempted(self, standing: _Standing, join: bool, deadline: float) -> Granted | Busy:
        silences = self._round(standing, join, deadline)
        granted = self.quorum.proof(standing.votes(self.now()))
        if granted is not None and self._token:
            granted = self._agreed(standing, deadline)
        if granted is None:
            return self._refused(standing, join, silences)
        return self._holds(standing, granted)

    def _holds(self, standing: _Standing, proof: Granted) -> Granted:
        claim = standing.claim
        short = proof.valid_for < claim.ttl
        standing.held, standing.short, standing.token = True, short, proof.token
        standing.until = proof.sent_at + 0.99 * proof.valid_for - 0.002  # clocks may differ in speed by 1 %
        token = proof.token if self._token else None
        return proof._replace(token=token, group=GROUP, key=claim.owner, short=short)

    def _round(self, standing: _Standing, join: bool, deadline: float) -> list[Exception]:
        """Ask every server, until it is decided. Returns what was no answer."""
        now = self.now()
        votes = standing.votes(now)
        gives_way = join and bool(votes) and len(votes) < self.quorum.needed
        standing.woken.clear()
        until = min(deadline, now + self.limit(standing.claim, deadline - now))
        for which in range(self.quorum.nodes):
            self._ask_for(standing, which, join, gives_way, until, standing.answers.put)
        said: dict[int, Any] = {}
        while True:
            silences = [each for each in said.values() if isinstance(each, Exception)]
            yes = sum(isinstance(each, Granted) and standing.at[which].vote is not None for which, each in said.items())
            verdict = self.quorum.asked(yes, len(said) - len(silences) - yes, len(silences))
            if verdict is not Verdict.OPEN:
                return silences if verdict is Verdict.SILENCE else []
            answer = standing.answers.get(until - self.now())
            if answer is None:
                late = BackendUnavailable("the others did not answer in time", unknown=True)
                no = len(said) - len(silences) - yes
                answered = self.quorum.asked(yes, no, self.quorum.nodes - yes - no)
                return [*silences, late] if answered is Verdict.SILENCE else []
            which, number, what = answer
            if number == standing.at[which].number:
                said[which] = what

    def _ask_for(
        self,
        standing: _Standing,
        which: int,
        join: bool,
        gives_way: bool,
        until: float,
        tell: Callable[[int, int, Any], None],
    ) -> None:
        """Ask one server, unless it was asked and has not answered yet: that answer will do, and of two at once nobody
        would know which was executed first. ``tell`` gets its number, which the question has, and what it said."""
        at = standing.at[which]
        with standing.lock:
            if at.under_way:
                return
            at.under_way = True
            at.number += 1
            number = at.number
            gives_way = gives_way and not at.unsure
            if gives_way:
                at.vote = at.push = None
                at.floor = at.asked
                at.void = True  # from now on it may be executed

        def stand(node: Node, within: float) -> Granted | Busy:
            if standing.leaving:
                raise BackendUnavailable("the claim was given up", unknown=False)
            return node.stand(standing.claim, join, gives_way, within)

        def told(said: Granted | Busy | Exception) -> None:
            self._note_answer(standing, which, join, gives_way, said)
            tell(which, number, said)

        self._crews[which].ask(stand, until, told)

    def _note_answer(
        self, standing: _Standing, which: int, join: bool, gives_way: bool, said: Granted | Busy | Exception
    ) -> None:
        """On a thread of the crew, whoever still waits for it."""
        at = standing.at[which]
        with standing.lock:
            at.under_way = False
            at.asked = self.now()
            if isinstance(said, Exception):
                unknown = not isinstance(said, BackendRejected) and getattr(said, "unknown", True)
                at.unsure |= unknown
                at.touched |= unknown
            else:
                unknown = False
                at.touched |= join or isinstance(said, Granted)
                at.gone = at.gone and not isinstance(said, Granted)
                push, at.push = at.push, None
                vote = said if isinstance(said, Granted) else push
                at.vote = vote if vote and self.counts(which) else None
                ends = said.expires_in if isinstance(said, Busy) else 0.0
                at.ends = None if ends is None else at.asked + ends
            if gives_way and not unknown:
                at.void, at.cleared = False, at.asked
        if at.vote:
            self._tell_if_held(standing)

    def counts(self, which: int) -> bool:
        return self.now() >= self._endpoints[which].counts_from

    def pushed(self, standing: _Standing, which: int, granted: Granted) -> None:
        """A hand-over by one server."""
        at = standing.at[which]
        with standing.lock:
            if standing.leaving or granted.sent_at <= at.floor or granted.valid_for > standing.claim.ttl:
                return
            at.touched = True
            at.gone = False
            tops_up = standing.held and not standing.short and not at.under_way
            if at.under_way:
                at.push = granted
            elif not standing.held:
                at.vote = granted if self.counts(which) else None
        if standing.held:
            if tops_up:
                self.top_up(standing, which)
        else:
            self._tell_if_held(standing)

    def _tell_if_held(self, standing: _Standing) -> None:
        """A majority has it, without an attempt under way that would see so."""
        votes = standing.votes(self.now(), fresh=True)
        proof = self.quorum.proof(votes)
        with standing.lock:
            if proof is None or standing.asking or standing.held or standing.agreeing or standing.leaving:
                return
            if not proof.short:  # the answer came late: it is asked again, for the whole ttl
                self._notices.wake(standing.claim.id)
                return
            standing.agreeing = self._token
        if self._token:
            _Agreement(self, standing, proof, 1 + max(vote.token or 0 for vote in votes)).ask()
        else:
            self.tell(standing, proof)

    def tell(self, standing: _Standing, proof: Granted | None) -> None:
        """What pushes have proved; None: an attempt is to find out."""
        with standing.lock:
            standing.agreeing = False
            if standing.asking or standing.leaving:
                return
        if proof is None:
            self._notices.wake(standing.claim.id)
        else:
            self._notices.granted(standing.claim.id, self._holds(standing, proof))

    def agree(self, token: int, name: str, tell: Callable[[int, Any], None], until: float) -> None:
        """Have every server keep this token; one that does not count says nothing."""

        def agree(which: int, node: Node, within: float) -> tuple[bool, int]:
            answer = node.recipe.agree(name, token, within)
            if not self.counts(which):
                raise BackendUnavailable(f"{self._endpoints[which].name} has restarted just now")
            return answer

        for which, crew in enumerate(self._crews):
            crew.ask(partial(agree, which), until, partial(tell, which))

    def limit(self, claim: Claim, within: float) -> float:
        """Seconds for one request to one server: one that is silent must not use up the time of the others' votes."""
        return min(within, max(LEAST_LIMIT, claim.ttl / 10))

    def _agreed(self, standing: _Standing, deadline: float) -> Granted | None:
        """The proof, with a token that a majority keeps. None: it took longer than the votes are good for."""
        votes = standing.votes(self.now())
        if standing.token and self.now() < standing.until:
            # A server counts each time that it lets somebody in: where it has not, the name was ours all the time.
            kept = [vote for vote in votes if (vote.token or 0) <= standing.token]
            if (proof := self.quorum.proof(kept)) is not None:
                return proof._replace(token=standing.token)
        highest = max(vote.token or 0 for vote in votes)
        while (proof := self.quorum.proof(standing.votes(self.now()))) is not None:
            token = highest + 1
            yes, no = 0, 0
            silences: list[Exception] = []
            now = self.now()
            until = min(deadline, now + self.limit(standing.claim, deadline - now))
            answers = _Answers()
            self.agree(token, standing.claim.name, answers.tell, until)
            while self.quorum.asked(yes, no, len(silences)) is Verdict.OPEN:
                answer = answers.get(until - self.now())
                said = answer[2] if answer else BackendUnavailable("no answer in time", unknown=True)
                if isinstance(said, Exception):
                    silences.append(said)
                else:
                    kept, present = said
                    highest = max(highest, present)
                    yes, no = yes + kept, no + (not kept)
            if yes >= self.quorum.needed:
                return proof._replace(token=token)
            if not no or self.now() >= deadline:
                raise self.silence(silences, "keep its token")
        return None

    def _refused(self, standing: _Standing, join: bool, silences: list[Exception]) -> Busy:
        """No majority is ours: when to look again."""
        if silences:
            raise self.silence(silences, "answer")
        claim, now = standing.claim, self.now()
        heartbeat = liveness(claim.ttl) / 3
        if not join:
            spent = standing.anywhere()
            if not spent:
                self.standing.pop(claim.id, None)
            return Busy(heartbeat, spent=spent)
        if standing.votes(now):
            pause = min(standing.pause * random.uniform(*ROUGHLY), heartbeat)
            standing.pause = min(2 * standing.pause, heartbeat)
        else:
            pause = heartbeat
            standing.pause = FIRST_PAUSE
        ends = self.quorum.soonest(
            None if at.ends is None else max(at.ends, endpoint.counts_from)
            for at, endpoint in zip(standing.at, self._endpoints, strict=True)
        )
        expires_in = None if ends is None or ends <= now else ends - now
        return Busy(pause, expires_in, spent=any(at.spends() for at in standing.at))

    # ---- release, rest

    def release(self, claim: Claim, granted: Granted | None, unsure: bool, within: float) -> Returned:
        return self._end(claim, unsure, within, Node.release)

    def rest(self, claim: Claim, granted: Granted, unsure: bool, seconds: float, within: float) -> Returned:
        def rest(node: Node, claim: Claim, unsure: bool, within: float) -> bool:
            return node.rest(claim, unsure, seconds, within)

        return self._end(claim, unsure, within, rest)

    def _end(
        self, claim: Claim, unsure: bool, within: float, how: Callable[[Node, Claim, bool, float], bool]
    ) -> Returned:
        """Tell every server where something of it may be, and that has not confirmed it yet."""
        self._forget_left()
        if unsure:
            with self._left_lock:
                self._left[claim.id] = self.now()
        standing = self.standing.get(claim.id)
        if standing is None:  # told again, or nobody knows where it may be
            standing = self.standing[claim.id] = _Standing(claim, self.quorum.nodes)
            for at in standing.at:
                at.touched, at.unsure, at.asked = True, unsure, self.now()
        for node in self._nodes:
            node.listener.unwatch(claim.id)  # before it is sent: what follows is no loss
        with standing.lock:
            standing.leaving = True
            told = [which for which, at in enumerate(standing.at) if at.released is None and self._stays(at, claim)]
        answers = _Answers()
        start = self.now()
        until = start + min(within, self.limit(claim, within))
        for which in told:
            end = partial(self._end_at, standing, which, how)
            self._keepers[which].ask(end, until, partial(answers.put, which, 0))
        pending = len(told)
        while pending:
            decided = self._was_ours(standing) is not Verdict.OPEN
            # The others as a rule answer just after; what does not is told again in the background.
            left = until - self.now() if not decided else 2 * (self.now() - start) + 0.001
            if answers.get(min(left, until - self.now())) is None:
                break
            pending -= 1
        with standing.lock:
            again = any(at.released is None and self._stays(at, claim) for at in standing.at)
        was_ours = self._was_ours(standing)
        if not again:
            self.standing.pop(claim.id, None)
            return Returned(was_ours is Verdict.YES)
        with self._left_lock:
            self._left.setdefault(claim.id, self.now())
        if was_ours is not Verdict.YES and was_ours is not Verdict.NO:
            raise BackendUnavailable("too few servers have confirmed the release", unknown=True)
        return Returned(was_ours is Verdict.YES, again)

    def _end_at(
        self,
        standing: _Standing,
        which: int,
        how: Callable[[Node, Claim, bool, float], bool],
        node: Node,
        within: float,
    ) -> None:
        at = standing.at[which]
        with standing.lock:
            unsure = at.unsure or at.under_way
        ours = how(node, standing.claim, unsure, within)
        with standing.lock:
            at.released = ours

    def _stays(self, at: _At, claim: Claim) -> bool:
        """Whether something of it may be there. What nobody keeps alive has ended by itself after a while; a request
        without an answer may be executed at any time, and is undone for longer than the kernel asks for that."""
        if at.under_way:
            return True
        if at.unsure:
            return self.now() < at.asked + max(REMEMBERED, 2 * claim.ttl) + REMEMBERED
        return at.touched and self.now() < at.asked + claim.ttl + liveness(claim.ttl)

    def _was_ours(self, standing: _Standing) -> Verdict:
        yes = sum(at.released is True for at in standing.at)
        no = sum(at.released is False or not at.touched for at in standing.at)
        return self.quorum.kept(yes, no, 0)

    def _forget_left(self) -> None:
        """Those that no request is on its way to us for, nor a cancel that was given up."""
        with self._left_lock:
            for claim_id in list(self._left)[:2]:
                standing = self.standing.get(claim_id)
                if standing and any(self._stays(at, standing.claim) for at in standing.at):
                    self._left.move_to_end(claim_id)  # it is never missing: an attempt may look just now
                elif self.now() - self._left[claim_id] > REMEMBERED:
                    self.standing.pop(claim_id, None)
                    del self._left[claim_id]

    # ---- renew

    def renew(
        self, group: Hashable, held: Sequence[Held], within: float
    ) -> Sequence[Granted | BackendUnavailable | None]:
        shortest = min(held, key=lambda each: each[0].ttl)[0]
        until = self.now() + self.limit(shortest, within)
        renewal = _Renewal(self, held)
        for which, crew in enumerate(self._keepers):
            crew.ask(partial(_renew, held), until, partial(renewal.told, which))
        return renewal.decided(until)

    def proves(self, claim: Claim, which: int, renewed: Granted) -> bool:
        """Whether this server's renewal counts."""
        standing = self.standing.get(claim.id)
        return self.counts(which) and (standing is None or standing.at[which].vouches(renewed.sent_at))

    def proof_of_renewal(self, claim: Claim, granted: Granted, votes: Sequence[Granted]) -> Granted | None:
        proof = self.quorum.proof(votes)
        if proof is None:
            return None
        if standing := self.standing.get(claim.id):
            standing.short = False
        return proof._replace(token=granted.token, group=GROUP, key=claim.owner)

    def note(self, claim: Claim, which: int, answer: Granted | None) -> _Standing | None:
        standing = self.standing.get(claim.id)
        if standing:
            at = standing.at[which]
            with standing.lock:
                at.asked = max(at.asked, self.now())
                at.gone = answer is None
        return standing

    def top_up(self, standing: _Standing, which: int) -> None:
        """Ask a server that a holder does not have for it: so that it has more than it needs. It proves nothing."""
        claim, now = standing.claim, self.now()
        self._ask_for(standing, which, True, False, now + self.limit(claim, claim.ttl), _nobody)

    # ---- what is watched

    def watch(self, group: Hashable, held: Sequence[Held], within: float) -> None:
        def watch(node: Node, within: float) -> None:
            node.listener.watch(held, within)

        self._of_all(watch, within, "watch it")

    def follow(self, names: frozenset[str], within: float) -> bool:
        def follow(node: Node, within: float) -> bool:
            return node.listener.follow(names, within)

        # A majority may come to be on any of them: so each must tell, or they are asked.
        told = self._of_all(follow, within, "follow it", everybody=True)
        return len(told) == self.quorum.nodes and all(told.values())

    # ---- for operators

    def inspect(self, name: str, within: float) -> LockInfo | None:
        """Between its votes and its token a holder is told of nobody: whoever reads just then would keep what it read,
        since nothing pushes a token. So it is asked again for a moment."""
        deadline = self.now() + within
        settled = self.now() + min(within / 2, LEAST_LIMIT)
        while True:
            info = self._inspected(name, deadline)
            agreed = info is None or info.kind is None or info.token is not None or not self._token
            if agreed or self.now() >= settled:
                return info
            time.sleep(0.002)

    def _inspected(self, name: str, deadline: float) -> LockInfo | None:
        def inspect(node: Node, within: float) -> LockInfo | None:
            return node.inspection.inspect(name, within)

        infos: list[LockInfo | None] = []
        silences: list[Exception] = []
        for _, said in self._ask(inspect, deadline):
            if isinstance(said, Exception):
                silences.append(said)
            else:
                infos.append(said)
            if (
                self.quorum.named((info.owner, self._token and info.token) if info else () for info in infos)
                is not None
            ):
                return self._by_majority(infos)
        if self._hides(len(silences), infos, 0):
            raise self.silence(silences, "tell who holds it")
        return self._by_majority(infos)

    def _hides(self, silent: int, infos: Sequence[LockInfo | None], free: int) -> bool:
        """Whether those that are silent can make a majority of what others say."""
        found = Counter(info.owner if info else None for info in infos)
        found[None] += free
        return max(found.values()) < self.quorum.needed <= max(found.values()) + silent

    def inspect_all(self, prefix: str, within: float) -> Iterator[LockInfo]:
        found: dict[str, list[LockInfo | None]] = {}
        silences: list[Exception] = []
        for node in self._nodes:
            try:
                for info in node.inspection.inspect_all(prefix, within):
                    found.setdefault(info.name, []).append(info)
            except BackendUnavailable as silence:
                silences.append(silence)
        if len(silences) > self.quorum.spare:
            raise self.silence(silences, "tell what is held")
        for name, infos in found.items():
            if self._hides(len(silences), infos, self.quorum.nodes - len(silences) - len(infos)):
                told = self.inspect(name, within)  # one may have been asked before it changed: not so, all at once
            else:
                told = self._by_majority(infos)
            if told:
                yield told

    def _by_majority(self, infos: Sequence[LockInfo | None]) -> LockInfo | None:
        owner = self.quorum.named(info.owner if info else None for info in infos)
        ours = [info for info in infos if info and info.owner == owner]
        if owner is None or not ours:
            return None
        token = self.quorum.named(info.token for info in ours) if self._token else None  # servers alone differ
        waiting = max(info.waiting or 0 for info in infos if info)
        first = next((info for info in ours if info.resting_until is not None), ours[0])
        return replace(first, token=token, waiting=waiting)

    def force_release(self, name: str, within: float) -> bool:
        def force(node: Node, within: float) -> bool:
            return node.inspection.force_release(name, within)

        forced = 0
        silences: list[Exception] = []
        for _, said in self._ask(force, self.now() + within):
            if isinstance(said, Exception):
                silences.append(said)
            else:
                forced += said
        if forced < self.quorum.needed <= forced + len(silences):
            failure = self.silence(silences, "release it")
            if forced:
                vars(failure)["unknown"] = True
            raise failure
        return forced >= self.quorum.needed

    def diagnose(self, within: float) -> list[Finding]:
        findings = []
        if self.quorum.nodes % 2 == 0:
            findings.append(
                Finding(
                    "even",
                    "warning",
                    f"{self.quorum.nodes} servers bear the loss of no more than {self.quorum.nodes - 1} do",
                    f"use {self.quorum.nodes - 1} or {self.quorum.nodes + 1} servers",
                )
            )

        def look(node: Node, within: float) -> list[Finding]:
            return diagnose(node.connections, node.listener.refused.values(), within)

        told = sorted(self._ask(look, self.now() + within), key=lambda each: each[0])
        silences = [said for _, said in told if isinstance(said, Exception)]
        if len(silences) > self.quorum.spare:
            raise self.silence(silences, "answer")
        for which, said in told:
            endpoint = self._endpoints[which]
            if isinstance(said, Exception):
                said = [Finding("down", "warning", str(said), "start it: the others bear the loss of few")]
            if not self.counts(which):
                left = endpoint.counts_from - self.now()
                said.append(
                    Finding(
                        "restarted",
                        "warning",
                        f"this server has restarted: it counts again in {left:.0f} s (restart_guard={self._guard:g})",
                        "wait: what it granted before may be in use",
                    )
                )
            # Its restart is what the guard is for.
            kept = [finding for finding in said if finding.code != "persistence" or not self._guard]
            findings += [replace(finding, message=f"{endpoint.name}: {finding.message}") for finding in kept]
        return findings

    def ping(self, within: float) -> None:
        def ping(node: Node, within: float) -> None:
            node.connections.call(pack("PING"), within)

        self._of_all(ping, within, "answer")

    def close(self) -> None:
        for crew in [*self._crews, *self._keepers]:
            crew.close()
        for node in self._nodes:
            node.close()

    # ---- asking all

    def name_of(self, which: int) -> str:
        return self._endpoints[which].name

    def _ask(self, question: Callable[[Node, float], Said], until: float) -> Iterator[tuple[int, Said | Exception]]:
        """All at once; what each said, as it comes. One that is late is BackendUnavailable."""
        answers = _Answers()
        missing = dict.fromkeys(range(self.quorum.nodes))
        for which, crew in enumerate(self._crews):
            crew.ask(question, until, partial(answers.put, which, 0))
        while missing:
            answer = answers.get(until - self.now())
            if answer is None:
                break
            which, _, said = answer
            missing.pop(which)
            yield which, said
        for which in missing:
            yield which, BackendUnavailable(f"{self._endpoints[which].name} did not answer in time", unknown=True)

    def _of_all(
        self, question: Callable[[Node, float], Said], within: float, what: str, *, everybody: bool = False
    ) -> dict[int, Said]:
        """What a majority says, at least; with ``everybody`` each that answers."""
        said: dict[int, Said] = {}
        silences: list[Exception] = []
        for which, answer in self._ask(question, self.now() + within):
            if isinstance(answer, Exception):
                silences.append(answer)
            else:
                said[which] = answer
            if not everybody and len(said) >= self.quorum.needed:
                break
        if len(silences) > self.quorum.spare:
            raise self.silence(silences, what)
        return said

    def silence(self, silences: Sequence[Exception], what: str) -> BackendUnavailable | BackendRejected:
        """What is raised where no majority answers: refused, if so many refuse that asking again cannot help."""
        said = "; ".join(str(silence) for silence in silences) or "no answer in time"
        message = f"too few of {self.quorum.nodes} servers {what}: {said}"
        refusals = [silence for silence in silences if isinstance(silence, BackendRejected)]
        for silence in silences:
            if not isinstance(silence, (BackendUnavailable, BackendRejected)):
                logger.error("%s: %s", self.scheme, silence, exc_info=silence)
        if len(refusals) > self.quorum.spare:
            return BackendRejected(message, backend=self.scheme)
        unknown = any(getattr(silence, "unknown", True) for silence in silences if silence not in refusals)
        return BackendUnavailable(message, unknown=unknown, backend=self.scheme)


class _Answers:
    """What the crews tell, for the one who waits: which server, to its how manieth question, what."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[int, int, Any]] = SimpleQueue()

    def put(self, which: int, number: int, said: Any) -> None:
        self._queue.put((which, number, said))

    def tell(self, which: int, said: Any) -> None:
        self.put(which, 0, said)

    def get(self, within: float) -> tuple[int, int, Any] | None:
        try:
            return self._queue.get(timeout=max(0.0, within))
        except Empty:
            return None


class _Agreement:
    """The token of what pushes have proved: nobody waits for it."""

    def __init__(self, backend: RedlockBackend, standing: _Standing, proof: Granted, token: int) -> None:
        self._backend = backend
        self._standing = standing
        self._proof = proof._replace(token=token)
        self._lock = threading.Lock()
        self._yes = self._no = self._silent = 0
        self._over = False

    def ask(self) -> None:
        backend, claim = self._backend, self._standing.claim
        backend.agree(self._proof.token or 0, claim.name, self._told, self._proof.sent_at + self._proof.valid_for)

    def _told(self, which: int, said: Any) -> None:
        with self._lock:
            if isinstance(said, Exception):
                self._silent += 1
            elif said[0]:
                self._yes += 1
            else:
                self._no += 1
            verdict = self._backend.quorum.asked(self._yes, self._no, self._silent)
            if self._over or verdict is Verdict.OPEN:
                return
            self._over = True
        self._backend.tell(self._standing, self._proof if verdict is Verdict.YES else None)


class _Renewal:
    """The answers to one renewal; those that nobody waits for any more too."""

    def __init__(self, backend: RedlockBackend, held: Sequence[Held]) -> None:
        self._backend = backend
        self._held = held
        self._answers = _Answers()
        self._lock = threading.Lock()
        self._kept: set[int] | None = None  # of what is held, once that is decided

    def told(self, which: int, said: Any) -> None:
        with self._lock:
            kept = self._kept
            if kept is None:
                self._answers.tell(which, said)
        if kept is not None and not isinstance(said, Exception):
            self._look_after(which, said, kept)

    def decided(self, until: float) -> list[Granted | BackendUnavailable | None]:
        backend, quorum = self._backend, self._backend.quorum
        votes: list[list[Granted]] = [[] for _ in self._held]
        gone = [0] * len(self._held)
        silent = [0] * len(self._held)
        silences: list[Exception] = []
        answered: list[tuple[int, Sequence[Granted | None]]] = []

        def is_open(i: int) -> bool:
            return quorum.kept(len(votes[i]), gone[i], silent[i]) is Verdict.OPEN

        while any(map(is_open, range(len(self._held)))):
            answer = self._answers.get(until - backend.now())
            if answer is None:
                silences.append(BackendUnavailable("the others did not answer in time", unknown=True))
                break
            which, _, said = answer
            if isinstance(said, Exception):
                silences.append(said)
                silent = [each + 1 for each in silent]
                continue
            answered.append((which, said))
            uncounted = False
            for i, each in enumerate(said):
                if each is None:
                    gone[i] += 1
                elif backend.proves(self._held[i][0], which, each):
                    votes[i].append(each)
                else:
                    silent[i] += 1
                    uncounted = True
            if uncounted:
                silences.append(BackendUnavailable(f"what {backend.name_of(which)} says does not count yet"))
        renewed: list[Granted | BackendUnavailable | None] = []
        for i, (claim, granted) in enumerate(self._held):
            proof = backend.proof_of_renewal(claim, granted, votes[i])
            if proof is not None or quorum.lost(gone[i]):
                renewed.append(proof)
            else:  # a server that refuses now may have kept it
                why = str(backend.silence(silences, "renew it"))
                renewed.append(BackendUnavailable(why, backend=backend.scheme))
        kept = {i for i, each in enumerate(renewed) if isinstance(each, Granted)}
        with self._lock:
            self._kept = kept
        while answer := self._answers.get(0):
            if not isinstance(answer[2], Exception):
                answered.append((answer[0], answer[2]))
        for which, said in answered:
            self._look_after(which, said, kept)
        return renewed

    def _look_after(self, which: int, said: Sequence[Granted | None], kept: set[int]) -> None:
        for i, each in enumerate(said):
            claim = self._held[i][0]
            if (standing := self._backend.note(claim, which, each)) and each is None and i in kept:
                self._backend.top_up(standing, which)


def _renew(held: Sequence[Held], node: Node, within: float) -> Sequence[Granted | None]:
    answers: list[Granted | None] = []
    for answer in node.listener.renew(held, within):
        if isinstance(answer, BackendUnavailable):
            raise answer
        answers.append(answer)
    return answers


def _nobody(which: int, number: int, said: object) -> None:
    """Nobody waits for a top-up."""
