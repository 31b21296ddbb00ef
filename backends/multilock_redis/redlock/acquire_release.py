"""Acquire and release: a claim asks all servers at once until a majority votes for it with one stamp.

A stamp is the number that a vote contains. The stamp on which a majority agrees is the fencing token. A claim *gives
way* when it asks a server to pass the vote on to an earlier waiter. `votes` decides what the replies of the servers
mean. The caller's thread sends the requests over a fan (one connection to each server). The clerk, which is the
background thread, reads late replies and acts for waiters.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import Any

from multilock import BackendRejected, BackendUnavailable, system
from multilock.backend import Busy, Claim, Granted, Notices, Returned
from multilock.timing import LATE_REQUEST, RENEWALS, heartbeat, liveness
from multilock_redis.acquire_release import RESTS, TOMBSTONE
from multilock_redis.keys import Keyspace
from multilock_redis.redlock.background_thread import CONFIRMED_WITHIN, Clerk
from multilock_redis.redlock.connections import CONNECT_WITHIN, Fan, Lane, Owed, Pool
from multilock_redis.redlock.notices import MajorityNotices
from multilock_redis.redlock.restarts import Guarded
from multilock_redis.redlock.servers import Servers, limit
from multilock_redis.redlock.votes import OUT, VOTES, WAITS, YIELDS, Evidence, Proof
from multilock_redis.transactions import GIVE, REST, STAND, Script
from multilock_redis.wire import bulks

__all__ = ["GROUP", "Joins", "Round", "RoundState", "Rounds"]

GROUP = "redlock"  # all held leases are renewed together, by one request to each server
ASK, PAST, GIVE_WAY, RAISE, TOP_UP = b"0", b"1", b"2", b"3", b"4"  # modes of stand.lua
LEAST_PATIENCE, MOST_PATIENCE = 0.001, 0.25  # seconds that a minority waits for more votes before it gives way
LEAST_GRACE = 0.003  # the least number of seconds to wait for the other replies, after a majority has replied
TRIES = 10  # rounds of a *single try* (an acquire that does not wait), unless a claim is seen to have the name
AT_ONCE = 0.01  # seconds until the kernel tries again with a new claim
# Seconds after which the connection of a missing reply is ended. A round waits less, but a reply that is late for its
# round still counts.
LATEST = 1.0
QUIET = 1000  # ms for which a single try has a place in the queue
BETWEEN = 0.005  # seconds between two checks of replies that another thread reads


class Joins(Enum):
    """Whether a request takes a place in the queue."""

    NO = 0
    YES = 1
    QUIETLY = 2  #: join for a moment, and ask for no notification of a handover


class RoundState(Enum):
    """The state of a round of requests that has not led to a grant."""

    OPEN = "open"  #: the missing replies can still decide the round
    SPLIT = "split"  #: a majority votes for the claim, but with several stamps
    BUSY = "busy"  #: no majority is possible in this round
    SHORT = "short"  #: too few servers reply, or too few of them count (see `Guarded`)


OPEN, SPLIT, BUSY, SHORT = RoundState


class Round:
    """The requests of one attempt, from their sending until the round is decided."""

    def __init__(self, rounds: Rounds, evidence: Evidence, fan: Fan, until: float) -> None:
        """Create this once the requests were sent. The round ends at ``until`` (seconds), even if replies are
        missing."""
        self._rounds = rounds
        self._evidence = evidence
        self._fan = fan
        self._raised = False
        self._timed = False
        self._until = until
        self.end = until  #: when the round ends, in seconds; sooner once a majority has replied
        # requests of this claim that another thread has sent, and whose replies it reads
        self._elsewhere = [view for view in evidence.views if view.pending and view.lane not in fan.lanes]

    def said(self) -> Granted | RoundState | None:
        """Return the result of the round, or None while a missing reply can still decide it.

        If a majority votes with several stamps, ask the servers once to raise them to one stamp.
        """
        rounds, evidence = self._rounds, self._evidence
        with evidence.lock:
            now = rounds.now()
            if self._elsewhere:
                # checked under the same lock as the replies below, so that the wait after this misses no reply
                self._elsewhere = [view for view in self._elsewhere if view.pending]
            over = now >= self.end
            if not over and evidence.pending() >= rounds.need:
                return None  # the replies that can make a majority are missing
            said = rounds.verdict(evidence, over=over)
            if said is SPLIT and not self._raised:
                # raising the stamps takes a second round trip
                self._raised, self._timed, self.end = True, False, self._until
                evidence.round_at = now
                rounds.raise_stamps(evidence, self._fan, Joins.NO)
                said = rounds.verdict(evidence, over=over)
            if isinstance(said, Granted):
                self._replied(now)
                return said
            answers, pending = evidence.answers(int(now * 1e6)), evidence.pending()
        if not pending:
            return BUSY if said is SPLIT else said
        if answers >= rounds.need:
            self._replied(now)
        if now < self.end:
            return None
        return BUSY if answers >= rounds.need else SHORT

    def left(self, now: float) -> float:
        """Return for how many seconds the caller may wait for replies on its fan before it calls `said` again."""
        left = max(0.0, self.end - now)
        return min(left, BETWEEN) if self._elsewhere else left

    def _replied(self, now: float) -> None:
        """Shorten the round, because a majority has replied, and the other replies usually arrive soon after that."""
        if not self._timed:
            self._timed = True
            took = now - self._evidence.round_at
            self._rounds.timed(took)
            self.end = min(self.end, now + 3 * max(LEAST_GRACE / 3, took))


class Rounds:
    """The claims of one client, and the requests that are sent for them."""

    def __init__(self, scheme: str, endpoints: Sequence[Guarded], keys: Keyspace, notices: Notices) -> None:
        """Do no I/O. A forked child makes a new object."""
        self._process = system.pid()
        self.now = notices.now
        self.pushes = MajorityNotices(self, notices)
        self.servers = Servers(scheme, endpoints, keys, notices, self.pushes)
        self.need = self.servers.need
        self._keys = keys
        self._notices = notices
        self._scheme = scheme
        self.pool = Pool(self.servers.links, notices.now)
        self.clerk = Clerk(self, self.pool, notices.now)
        # Seconds of a round trip without load: a first guess, which `timed` corrects. It grows slowly there, because a
        # longer round trip usually means that this machine is busy.
        self.rtt = 0.005
        self.claims: dict[str, Evidence] = {}  #: by claim id
        self._lock = system.Lock()  # guards `_left`
        self._left: OrderedDict[str, float] = OrderedDict()  # cancelled claims, with the time of the cancel

    # ---- claims

    def _new(self, claim: Claim) -> Evidence:
        evidence = Evidence(claim, self.servers.endpoints)
        evidence.born = self.now()
        evidence.age = max(0, system.wall() - claim.arrived) if claim.arrived else 0
        return evidence

    def enter(self, claim: Claim) -> Evidence | None:
        """Return the record of the claim. Returns None if the claim was given up before this attempt began."""
        evidence = self.claims.get(claim.id)
        if evidence is None:
            evidence = self.claims.setdefault(claim.id, self._new(claim))
        # `_leave` writes `_left` and then looks for the record. This thread makes the record and then reads `_left`. So
        # at least one of the two threads sees the other's change.
        return None if claim.id in self._left else evidence

    def _leave(self, claim: Claim, unsure: bool) -> Evidence:
        """Note that the claim is given up, and return its record. ``unsure`` is True if an attempt of the claim may
        still begin later.

        If the claim has no record here, assume that any server may have an entry of it.
        """
        now = self.now()
        with self._lock:
            for claim_id in list(self._left)[:2]:
                if now - self._left[claim_id] > LATE_REQUEST:
                    del self._left[claim_id]
            if unsure:
                self._left[claim.id] = now
        evidence = self.claims.get(claim.id)
        if evidence is None:
            evidence = self.claims[claim.id] = self._new(claim)
            for view in evidence.views:
                view.kept, view.unsure, view.asked = True, unsure, int(now * 1e6)
        return evidence

    # ---- requests

    def ask(self, evidence: Evidence, fan: Fan, modes: Mapping[int, bytes], joins: Joins) -> None:
        """Send one request to each server in ``modes``. The caller holds the claim's lock."""
        if evidence.leaving:
            return
        now = self.now()
        at = int(now * 1e6)
        proposal = max(system.wall(), evidence.newest_stamp + 1)  # one stamp for all servers, so that their votes agree
        made: dict[tuple[bytes, bool], tuple[bytes, Callable[[], bytes]]] = {}
        for which, mode in modes.items():
            node, lane = self.servers.nodes[which], fan.lanes[which]
            told = joins is Joins.YES and node.listener.listening and node.recipe.told
            if (mode, told) not in made:
                request = self._to_ask(evidence, mode, joins, at, told, proposal)
                made[mode, told] = request, partial(self._wanted, evidence, request)
            request, again = made[mode, told]
            before = evidence.asks(which, at, lane, gives_way=mode is GIVE_WAY)
            owed = Owed(partial(self._answered, evidence, which, at, mode, joins), now + LATEST, again)
            if not lane.send(request, [owed], now):
                evidence.unasked(which, before, lane.link.why)

    def _to_ask(self, evidence: Evidence, mode: bytes, joins: Joins, at: int, told: bool, proposal: int) -> bytes:
        claim, keys = evidence.claim, self._keys.of(evidence.claim.name)
        wait, echo = round(liveness(claim.ttl) * 1000), b""
        if told and claim.renew and claim.ttl >= liveness(claim.ttl):
            # Without an echo, the push that hands the name over is only a hint. If the ttl is shorter than the
            # liveness, a confirmed lease would end before the lease of the handover.
            echo = b"%d/%d" % (at, wait)
        if joins is not Joins.YES:
            wait = QUIET if joins is Joins.QUIETLY else 0
        if mode is RAISE:
            proposal = evidence.newest_stamp + 1
        elif mode is TOP_UP:
            proposal = evidence.token
        age = evidence.age + int((self.now() - evidence.born) * 1e6)
        how = bulks(
            b"%d" % round(claim.ttl * 1000),
            b"%d" % (wait if told else -wait),
            mode,
            echo,
            b"%d" % (claim.arrived or system.wall() - age),
            b"%d" % age,
            b"%d" % proposal,
        )
        return b"".join((STAND.head, keys.common, keys.own(claim), how))

    def _wanted(self, evidence: Evidence, request: bytes) -> bytes:
        """Return the request for a server that did not know the script, or b"" if the claim was given up."""
        with evidence.lock:
            return b"" if evidence.leaving else STAND.load + request

    def _answered(self, evidence: Evidence, which: int, at: int, mode: bytes, joins: Joins, answer: Any) -> None:
        with evidence.lock:
            now = int(self.now() * 1e6)
            gives_way = mode is GIVE_WAY
            evidence.answered(which, at, answer, now, gives_way=gives_way, joins=joins is not Joins.NO)
            again = evidence.held and evidence.watched and evidence.views[which].state is VOTES
        if again:
            self.pushes.watch_at(which, [evidence])
        if not evidence.asking:
            self.evaluate(evidence)

    # ---- an attempt

    def attempt(self, claim: Claim, join: bool, within: float) -> Granted | Busy:
        """Ask all servers for the name, as `Backend.attempt` promises."""
        deadline = self.now() + within
        evidence = self.enter(claim)
        if evidence is None:
            return Busy(heartbeat(claim.ttl), spent=True)
        if evidence.spent():
            return Busy(AT_ONCE, spent=True)
        fan = self.pool.take(evidence.fan)
        try:
            fan.ready(min(deadline, self.now() + max(CONNECT_WITHIN, limit(claim, within))))
            said = self._attempted(evidence, fan, join, deadline)
            evidence.asking = False
            return self.outcome(evidence, said, join)
        except (BackendUnavailable, BackendRejected) as error:
            self.failed(evidence, error)
            raise
        finally:
            evidence.asking = False
            self.give(fan)

    def failed(self, evidence: Evidence, error: BackendUnavailable | BackendRejected) -> None:
        """Record in this error of an attempt whether the claim needs a release. If it needs none, forget the claim."""
        if evidence.anywhere():
            vars(error)["unknown"] = True  # after a refusal too: other servers may have voted
        else:
            self.claims.pop(evidence.claim.id, None)

    def give(self, fan: Fan) -> None:
        """Return the fan to the pool. If replies are missing, the clerk reads them later."""
        self.pool.give(fan)
        if fan.owes():
            self.clerk.mind(fan)

    def _attempted(self, evidence: Evidence, fan: Fan, join: bool, deadline: float) -> Granted | RoundState:
        claim = evidence.claim
        # A free lock needs no subscription. But a server skips a waiter that is not subscribed, so without a
        # subscription the claim does not join the queues.
        joins = Joins.YES if join and self.servers.listening() else Joins.NO
        self.begin(evidence, fan, join, joins)
        said = self._round(evidence, fan, min(deadline, self.now() + limit(claim, deadline - self.now())))
        if isinstance(said, Granted):
            return said
        if not join:
            return self._settle(evidence, fan, deadline) if said is BUSY else said
        if joins is Joins.YES:
            self.servers.listen()
        elif said is not SHORT:
            self.clerk.start()
            self.servers.listen(max(0.0, deadline - self.now()) / 2)
            self.begin(evidence, fan, join, Joins.YES)
            return self._round(evidence, fan, min(deadline, self.now() + limit(claim, deadline - self.now())))
        return said

    def begin(self, evidence: Evidence, fan: Fan, join: bool, joins: Joins) -> None:
        """Ask every server that has no request of this claim under way.

        With two requests under way, the server could execute them in either order. A request to give way that got no
        reply counts as under way until the release.
        """
        with evidence.lock:
            evidence.asking, evidence.held, evidence.look = True, False, False
            evidence.fan = fan
            evidence.round_at = now = self.now()
            us = int(now * 1e6)
            mode = ASK if join or evidence.claim.fair else PAST
            if len(evidence.votes(us)) >= self.need and evidence.proof(us) is None:
                mode = RAISE
            asked = [i for i, view in enumerate(evidence.views) if not view.pending and view.state is not YIELDS]
            self.ask(evidence, fan, dict.fromkeys(asked, mode), joins)

    def verdict(self, evidence: Evidence, *, over: bool = False) -> Granted | RoundState:
        """Return the grant, or the state of the round. The caller holds the claim's lock.

        If ``over`` is True, the round no longer waits for missing replies.
        """
        pending = evidence.pending()
        now = int(self.now() * 1e6)
        proof = evidence.proof(now)
        # If the majority includes a vote from before this round, wait for newer replies.
        if proof and (over or not pending or proof.sent_at >= int(evidence.round_at * 1e6)):
            return self._granted(evidence, proof)
        possible = {id(vote) for vote in evidence.votes(now)} | {id(view) for view in evidence.views if view.pending}
        if len(possible) >= self.need:
            return OPEN if pending else SPLIT
        return BUSY if evidence.answers(now) + pending >= self.need else SHORT

    def raise_stamps(self, evidence: Evidence, fan: Fan, joins: Joins) -> None:
        """Ask the servers that vote for the claim to raise their stamps to one value. The caller holds the claim's
        lock."""
        votes = [i for i, view in enumerate(evidence.views) if view.state is VOTES and not view.pending]
        self.ask(evidence, fan, dict.fromkeys(votes, RAISE), joins)

    def _round(self, evidence: Evidence, fan: Fan, until: float) -> Granted | RoundState:
        """Read replies until the round is decided, or ``until`` has come."""
        asked = Round(self, evidence, fan, until)
        while (said := asked.said()) is None:
            fan.look(asked.left(self.now()))
        return said

    def timed(self, took: float) -> None:
        self.rtt = max(0.0002, min(took, 1.1 * self.rtt))

    def _settle(self, evidence: Evidence, fan: Fan, deadline: float) -> Granted | RoundState:
        """Repeat a single try while its votes are split.

        Each round gives way to earlier claims, so that the first of the competing claims gets the name.
        """
        for _ in range(TRIES):
            with evidence.lock:
                if not self.is_split(evidence) or self.now() >= deadline:
                    return BUSY
                evidence.round_at = self.now()
                self.ask(evidence, fan, self._to_give_way(evidence, again=True), Joins.QUIETLY)
            said = self._round(evidence, fan, min(deadline, self.now() + limit(evidence.claim, math.inf)))
            if said is not BUSY:
                return said
            system.sleep(max(LEAST_PATIENCE, self.rtt * system.uniform(0.5, 1.0)))
        return BUSY

    def is_split(self, evidence: Evidence) -> bool:
        """Return whether the claim has votes, and no other claim is seen to have a majority."""
        return bool(evidence.votes(int(self.now() * 1e6))) and not evidence.taken() and not evidence.spent()

    def _to_give_way(self, evidence: Evidence, *, again: bool = False) -> dict[int, bytes]:
        """Return the next request to each server: to give way if the server votes for the claim, else to ask.

        A server at which the claim already waits is left out, unless ``again`` is True. A server that has not replied
        to a request is left out, because it may execute that request at any time.
        """
        modes: dict[int, bytes] = {}
        for which, view in enumerate(evidence.views):
            if not view.pending and not view.unsure and (again or view.state in (VOTES, OUT)):
                modes[which] = GIVE_WAY if view.state is VOTES else ASK
        return modes

    def outcome(self, evidence: Evidence, said: Granted | RoundState, join: bool) -> Granted | Busy:
        """Return the result of an attempt for the kernel. Raises if too few servers replied."""
        if isinstance(said, Granted):
            return said
        if said is SHORT:
            silences = [view.silent for view in evidence.views if view.silent is not None]
            raise self.servers.silence(silences, "answer", counts=True)
        claim = evidence.claim
        if not join:
            spent = evidence.anywhere()
            if not spent:
                self.claims.pop(claim.id, None)
            return Busy(heartbeat(claim.ttl), spent=spent)
        if evidence.spent():
            return Busy(AT_ONCE, spent=True)
        self.evaluate(evidence)
        return Busy(heartbeat(claim.ttl), self._free_in(evidence))

    def _free_in(self, evidence: Evidence) -> float | None:
        """Return the seconds after which the name may be free at a majority of servers, according to their replies.
        Returns None if that is unknown."""
        now, ends = self.now(), list[float]()
        for which, view in enumerate(evidence.views):
            end = 0.0 if view.state is VOTES else math.inf if view.ends is None else view.ends / 1e6
            ends.append(max(end, self.servers.endpoints[which].counts_from))
        end = sorted(ends)[self.need - 1]
        return None if end == math.inf or end <= now else end - now

    def _granted(self, evidence: Evidence, proof: Proof) -> Granted:
        """Record that the claim holds a majority, and return the grant for the kernel."""
        claim = evidence.claim
        short = proof.valid_for < evidence.ttl
        valid_for = proof.valid_for / 1e6 if short else claim.ttl
        granted = Granted(
            proof.token, valid_for, proof.sent_at / 1e6, valid_for, valid_for / RENEWALS, GROUP, claim.owner, short
        )
        evidence.held, evidence.token, evidence.told_lost, evidence.granted = True, proof.token, False, granted
        return granted

    # ---- replies and pushes that arrive between two attempts

    def evaluate(self, evidence: Evidence) -> None:
        """Check a waiting claim: report a grant, or plan when the clerk raises its stamps, asks again or gives way."""
        with evidence.lock:
            if evidence.held or evidence.asking or evidence.leaving:
                return
            now = self.now()
            us = int(now * 1e6)
            if proof := evidence.proof(us):
                if proof.is_fresh(us):
                    self._notices.granted(evidence.claim.id, self._granted(evidence, proof))
                else:
                    self._notices.wake(evidence.claim.id)
                return
            votes = len(evidence.votes(us))
            if evidence.look or (votes >= self.need and not evidence.pending()):
                self.clerk.soon(evidence, now)
            elif not votes and not evidence.spent():
                evidence.due = evidence.patience = 0.0
            else:
                self._later(evidence, now)

    def _later(self, evidence: Evidence, now: float) -> None:
        if not evidence.due:
            patience = max(LEAST_PATIENCE, 2 * self.rtt, 2 * evidence.patience)
            evidence.patience = min(patience, MOST_PATIENCE)
            self.clerk.soon(evidence, now + evidence.patience)

    def act(self, evidence: Evidence, fan: Fan) -> None:
        """Send the request that is due for this claim, or notify the kernel. The clerk calls this."""
        with evidence.lock:
            if evidence.asking or evidence.leaving:
                return
            now = self.now()
            us = int(now * 1e6)
            if evidence.held:
                lacking = self._to_top_up(evidence)
                self.ask(evidence, fan, lacking, Joins.YES)
                if any(not evidence.views[i].pending and not fan.lanes[i].link.down for i in lacking):
                    self._later(evidence, now)  # a connection is still being made
                return
            if evidence.spent():
                self._notices.wake(evidence.claim.id)  # the kernel's next attempt then returns Busy(spent=True)
                return
            if evidence.proof(us):
                self.evaluate(evidence)
                return
            look, evidence.look = evidence.look, False
            out: list[int] = []
            if look:
                out = [i for i, view in enumerate(evidence.views) if view.state is OUT and not view.pending]
                self.ask(evidence, fan, dict.fromkeys(out, ASK), Joins.YES)
            elif len(evidence.votes(us)) >= self.need:
                self.raise_stamps(evidence, fan, Joins.YES)
            elif evidence.votes(us):
                self.ask(evidence, fan, self._to_give_way(evidence), Joins.YES)
            if not evidence.pending() and (out or evidence.votes(us)):
                evidence.look = bool(out)  # if no request was sent, ask again later
                self._later(evidence, now)

    def _to_top_up(self, evidence: Evidence) -> dict[int, bytes]:
        """Return the servers that do not vote for the holder, so that the holder can request spare votes from them.

        These votes do not extend the lease. If fewer than a majority vote, return none: perhaps an operator has
        released the name everywhere, and these requests would take it again. The next renewal shows whether it is lost.
        """
        if len(evidence.votes(int(self.now() * 1e6))) < self.need:
            return {}
        return {i: TOP_UP for i, view in enumerate(evidence.views) if not view.pending and view.state in (OUT, WAITS)}

    def is_lost(self, evidence: Evidence) -> bool:
        """Return whether the claim was held and has lost its majority. The caller holds the claim's lock."""
        window = int(limit(evidence.claim, math.inf) * 1e6)
        return evidence.held and evidence.lacks_majority(int(self.now() * 1e6), window)

    # ---- release

    def release(self, claim: Claim, unsure: bool, within: float, rest: float | None = None) -> Returned:
        """Release the name at all servers, or let the name rest for ``rest`` seconds."""
        # If a server has not replied by then, the clerk repeats the release.
        until = self.now() + limit(claim, within)
        known = self.claims.get(claim.id)
        fan = self.pool.take(known.fan if known else None)
        try:
            fan.ready(until)
            waiting: set[int] = set()
            evidence = self.begin_release(claim, unsure, fan, waiting, rest)
            while waiting and evidence.was_ours() is None and (left := until - self.now()) > 0:
                fan.look(left)
        finally:
            self.give(fan)
        return self.returned(evidence, rests=rest is not None)

    def begin_release(
        self, claim: Claim, unsure: bool, fan: Fan, waiting: set[int], rest: float | None = None
    ) -> Evidence:
        """Send the release to every server that may have an entry of the claim and has not confirmed its release.

        Each server that was sent the release is added to ``waiting``, until its reply arrives. The background thread
        repeats the release at servers that do not reply.
        """
        evidence = self._leave(claim, unsure)
        now = self.now()
        if evidence.watched:
            for node in self.servers.nodes:
                # before the release is sent, so that the release does not look like a loss
                node.listener.unwatch(claim.id)
        with evidence.lock:
            evidence.proposal = max(system.wall(), evidence.newest_stamp + 1)  # one stamp for all servers
            if not evidence.leaving:
                evidence.leaving = True
                evidence.rests_until = None if rest is None else now + rest
            made: dict[bool, tuple[Script, bytes]] = {}
            for which, lane in enumerate(fan.lanes):
                if evidence.stays(which, int(now * 1e6)):
                    waiting.add(which)
                    self._tell(evidence, which, lane, waiting, LATEST, made)
            if not waiting:
                self._forget_if_done(evidence)
        return evidence

    def tell_late(self, evidence: Evidence, which: int, lane: Lane) -> None:
        """Repeat the release at a server that has not confirmed it and may still have an entry of the claim.

        The clerk calls this.
        """
        with evidence.lock:
            if evidence.stays(which, int(self.now() * 1e6)):
                self._tell(evidence, which, lane, set(), CONFIRMED_WITHIN, {})
                return
            self.clerk.confirmed(evidence, which)
            self._forget_if_done(evidence)

    def _tell(
        self,
        evidence: Evidence,
        which: int,
        lane: Lane,
        waiting: set[int],
        within: float,
        made: dict[bool, tuple[Script, bytes]],
    ) -> None:
        """Send the release to one server. The caller holds the claim's lock.

        ``made`` caches the requests, because most servers get the same one.
        """
        view, now = evidence.views[which], self.now()
        # A request under way on this same connection is executed before the release, and needs no tombstone.
        last = view.unsure or (view.pending > 0 and view.lane is not lane)
        script, request = made[last] = made.get(last) or self._to_tell(evidence, now, TOMBSTONE if last else 0)
        handle = partial(self._told, evidence, which, waiting)
        owed = Owed(handle, now + within, partial(bytes.__add__, script.load, request))
        if not lane.send(request, [owed], now):
            waiting.discard(which)
            self.clerk.not_confirmed(evidence, which)

    def _to_tell(self, evidence: Evidence, now: float, tombstone: int) -> tuple[Script, bytes]:
        claim, keys = evidence.claim, self._keys.of(evidence.claim.name)
        if evidence.rests_until is not None and (rest := evidence.rests_until - now) > 0:
            script, how = REST, bulks(b"%d" % tombstone, b"%d" % max(1, math.ceil(rest * 1000)), RESTS)
        else:
            script, how = GIVE, bulks(b"%d" % tombstone, b"%d" % evidence.proposal)
        return script, b"".join((script.head, keys.common, keys.own(claim), how))

    def _told(self, evidence: Evidence, which: int, waiting: set[int], answer: Any) -> None:
        with evidence.lock:
            waiting.discard(which)
            view = evidence.views[which]
            if isinstance(answer, Exception):
                view.lost_release |= getattr(answer, "unknown", True)
            elif view.released is None:
                view.released = bool(answer)
            if evidence.stays(which, int(self.now() * 1e6)):
                self.clerk.not_confirmed(evidence, which)
            else:
                self.clerk.confirmed(evidence, which)
            if not waiting:
                self._forget_if_done(evidence)

    def _forget_if_done(self, evidence: Evidence) -> None:
        now = int(self.now() * 1e6)
        if not any(evidence.stays(which, now) for which in range(len(evidence.views))):
            self.claims.pop(evidence.claim.id, None)

    def returned(self, evidence: Evidence, *, rests: bool = False) -> Returned:
        """Return the result of the release for the kernel. Raises if too few servers have confirmed the release."""
        was_ours = evidence.was_ours()
        if was_ours is None:
            raise BackendUnavailable("too few servers have confirmed the release", unknown=True, backend=self._scheme)
        first, evidence.returned = not evidence.returned, True
        return Returned(was_ours and (first or rests))  # a repeated release ends nothing

    def close(self) -> None:
        self.clerk.close()
        self.pool.close()
        self.servers.close()

    def drop(self) -> None:
        """Close this object before a new `Rounds` replaces it. In a forked child, this uses nothing of the parent."""
        if self._process == system.pid():
            self.close()
            return
        self.pool.drop()
        self.clerk.drop()
