"""A claim asks all servers at once until a majority votes for it with one stamp; then releases, and what is pushed.

`place` says what the statements of the servers amount to. The fan of the asking thread carries the requests; what comes
later is read by the `clerk`, which also acts for claims that wait.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import Any

from multilock import BackendRejected, BackendUnavailable, LossReason, system
from multilock.backend import Busy, Claim, Granted, Held, Notices, Returned
from multilock_redis.keys import Keyspace
from multilock_redis.node import Node
from multilock_redis.recipe import RESTS, TOMBSTONE, liveness
from multilock_redis.redlock.clerk import CONFIRMED_WITHIN, Clerk
from multilock_redis.redlock.fan import CONNECT_WITHIN, Fan, Lane, Owed, Pool
from multilock_redis.redlock.place import OUT, VOTES, WAITS, Evidence, Proof
from multilock_redis.redlock.servers import Servers, limit, silence
from multilock_redis.transactions import GIVE, REST, STAND, Script
from multilock_redis.wire import bulks

__all__ = ["GROUP", "Joins", "Outcome", "Rounds"]

GROUP = "redlock"  # all that is held is renewed together, by one request to each server
ASK, PAST, GIVE_WAY, RAISE, TOP_UP = b"0", b"1", b"2", b"3", b"4"  # modes of stand.lua
REMEMBERED = 60.0  # seconds for which a claim that was given up is known: a thread may not have come to ask for it yet
LEAST_PATIENCE, MOST_PATIENCE = 0.001, 0.25  # seconds for which a minority waits for more, before it gives way
LEAST_GRACE = 0.003  # seconds at least for the answers that come after a majority's
TRIES = 10  # rounds of a single try where nobody is seen to have the name
AT_ONCE = 0.01  # seconds until a claim goes on as another
LATEST = 1.0  # seconds after which an answer is too late at the latest, and its connection is ended
QUIET = 1000  # ms for which a single try keeps its place
BETWEEN = 0.005  # seconds between two looks at what another thread reads


class Joins(Enum):
    """Whether a request takes a place in the queue."""

    NO = 0
    YES = 1
    QUIETLY = 2  #: for a moment, and without being told of a hand-over


class Outcome(Enum):
    OPEN = "open"  #: the answers that are missing can still decide it
    SPLIT = "split"  #: a majority votes for the claim, with several stamps
    BUSY = "busy"  #: no majority can come of this round
    SHORT = "short"  #: too few servers answer, or count


OPEN, SPLIT, BUSY, SHORT = Outcome


class Rounds:
    def __init__(
        self,
        servers: Callable[[Rounds], Servers],
        keys: Keyspace,
        notices: Notices,
        scheme: str,
        *,
        token: bool,
    ) -> None:
        """No I/O. Made anew in a forked child."""
        self._process = system.pid()
        self.now = notices.now
        self.servers = servers(self)
        self.need = self.servers.need
        self._keys = keys
        self._notices = notices
        self._scheme = scheme
        self._token = token
        self.pool = Pool(self.servers.links, notices.now)
        self.clerk = Clerk(self, self.pool, notices.now)
        self.rtt = 0.005  # seconds; the least of late: what is longer is as a rule our own scheduling
        self.claims: dict[str, Evidence] = {}  #: by claim id
        self._lock = system.Lock()  # for changes of what follows
        self._left: OrderedDict[str, float] = OrderedDict()  # claims that were given up, and since when

    # ---- claims

    def get(self, claim_id: str) -> Evidence | None:
        return self.claims.get(claim_id)

    def _new(self, claim: Claim) -> Evidence:
        evidence = Evidence(claim, len(self.servers.nodes), self.servers.counts, token=self._token)
        evidence.born = self.now()
        evidence.age = max(0, system.wall() - claim.arrived) if claim.arrived else 0
        return evidence

    def enter(self, claim: Claim) -> Evidence | None:
        """None: it was given up, and this very attempt comes late."""
        evidence = self.claims.get(claim.id)
        if evidence is None:
            evidence = self.claims.setdefault(claim.id, self._new(claim))
        # Looked at second: whoever gives it up notes that first, and looks for its evidence second.
        return None if claim.id in self._left else evidence

    def _leave(self, claim: Claim, unsure: bool) -> Evidence:
        """It is given up; if ``unsure``, an attempt may come late. One that is unknown here may be anywhere."""
        now = self.now()
        with self._lock:
            for claim_id in list(self._left)[:2]:
                if now - self._left[claim_id] > REMEMBERED:
                    del self._left[claim_id]
            if unsure:
                self._left[claim.id] = now
        evidence = self.claims.get(claim.id)
        if evidence is None:
            evidence = self.claims[claim.id] = self._new(claim)
            for ballot in evidence.ballots:
                ballot.kept, ballot.unsure, ballot.asked = True, unsure, int(now * 1e6)
        return evidence

    # ---- requests

    def ask(self, evidence: Evidence, fan: Fan, modes: Mapping[int, bytes], joins: Joins) -> None:
        """One request to each of these servers. Under the claim's lock."""
        if evidence.leaving:
            return
        now = self.now()
        at, claim = int(now * 1e6), evidence.claim
        until = now + min(limit(claim, math.inf), LATEST)
        proposal = max(system.wall(), evidence.newest_stamp + 1)  # the same for all, so that the stamps are
        made: dict[tuple[bytes, bool], bytes] = {}
        for which, mode in modes.items():
            node, lane = self.servers.nodes[which], fan.lanes[which]
            told = joins is Joins.YES and node.listener.listening and node.recipe.told
            request = made.get((mode, told)) or self._to_ask(evidence, mode, joins, at, told, proposal)
            made[mode, told] = request
            before = evidence.asks(which, at, lane, gives_way=mode is GIVE_WAY)
            handle = partial(self._answered, evidence, which, at, mode, joins)
            owed = Owed(handle, until, partial(self._wanted, evidence, request))
            if not lane.send(request, [owed], now):
                evidence.unasked(which, before, lane.link.why)

    def _to_ask(self, evidence: Evidence, mode: bytes, joins: Joins, at: int, told: bool, proposal: int) -> bytes:
        claim, keys = evidence.claim, self._keys.of(evidence.claim.name)
        wait, echo = round(liveness(claim.ttl) * 1000), b""
        if told and claim.renew and claim.ttl >= liveness(claim.ttl):
            echo = b"%d/%d" % (at, wait)  # a confirmation for a ttl below that would end earlier than the hand-over
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
        """What is sent again to a server that did not know the script."""
        with evidence.lock:
            return b"" if evidence.leaving else STAND.load + request

    def _answered(self, evidence: Evidence, which: int, at: int, mode: bytes, joins: Joins, answer: Any) -> None:
        with evidence.lock:
            now = int(self.now() * 1e6)
            gives_way = mode is GIVE_WAY
            evidence.answered(which, at, answer, now, gives_way=gives_way, joins=joins is not Joins.NO)
            ballot = evidence.ballots[which]
            again = ballot.state is VOTES and evidence.held and evidence.watched and not ballot.watched
        if again:
            self.watch_at(which, [evidence])
        if not evidence.asking:
            self.evaluate(evidence)

    # ---- an attempt

    def attempt(self, claim: Claim, join: bool, within: float) -> Granted | Busy:
        deadline = self.now() + within
        evidence = self.enter(claim)
        if evidence is None:
            return Busy(liveness(claim.ttl) / 3, spent=True)
        if evidence.spent():
            return Busy(AT_ONCE, spent=True)
        fan = self.pool.take(evidence.fan)
        try:
            fan.ready(min(deadline, self.now() + max(CONNECT_WITHIN, limit(claim, within))))
            said = self._attempted(evidence, fan, join, deadline)
            evidence.asking = False
            return self.outcome(evidence, said, join)
        except (BackendUnavailable, BackendRejected) as error:
            if evidence.anywhere():
                vars(error)["unknown"] = True  # also of one that refuses: what the others have taken is given back
            else:
                self.claims.pop(claim.id, None)
            raise
        finally:
            evidence.asking = False
            self.give(fan)

    def give(self, fan: Fan) -> None:
        self.pool.give(fan)
        if fan.owes():
            self.clerk.mind(fan)

    def _attempted(self, evidence: Evidence, fan: Fan, join: bool, deadline: float) -> Granted | Outcome:
        claim = evidence.claim
        # A free lock needs no subscription. But a waiter that nobody can tell is passed over.
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
        """Ask every server that owes the claim no answer: of two requests nobody knows which is executed first."""
        with evidence.lock:
            evidence.asking, evidence.held, evidence.look = True, False, False
            evidence.fan = fan
            evidence.round_at = now = self.now()
            us = int(now * 1e6)
            mode = ASK if join or evidence.claim.fair else PAST
            if len(evidence.votes(us)) >= self.need and evidence.proof(us) is None:
                mode = RAISE
            asked = [i for i, ballot in enumerate(evidence.ballots) if not ballot.pending and not ballot.stuck]
            self.ask(evidence, fan, dict.fromkeys(asked, mode), joins)

    def verdict(self, evidence: Evidence, *, over: bool = False) -> Granted | Outcome:
        """What the round has come to; ``over``: no answer is waited for any longer. Under the claim's lock."""
        pending = evidence.pending()
        if pending >= self.need and not over:
            return OPEN  # without a look: what makes a majority is under way
        now = int(self.now() * 1e6)
        proof = evidence.proof(now)
        # Older votes are refreshed by the answers that are under way.
        if proof and (over or not pending or proof.sent_at >= int(evidence.round_at * 1e6)):
            return self._granted(evidence, proof)
        possible = {id(vote) for vote in evidence.votes(now)} | {id(b) for b in evidence.ballots if b.pending}
        if len(possible) >= self.need:
            return OPEN if pending else SPLIT
        return BUSY if evidence.answers() + pending >= self.need else SHORT

    def raise_stamps(self, evidence: Evidence, fan: Fan, joins: Joins) -> None:
        """Have the servers that vote for the claim give it one stamp. Under its lock."""
        votes = [i for i, ballot in enumerate(evidence.ballots) if ballot.state is VOTES and not ballot.pending]
        self.ask(evidence, fan, dict.fromkeys(votes, RAISE), joins)

    def _round(self, evidence: Evidence, fan: Fan, until: float) -> Granted | Outcome:
        raised, end = False, until
        while True:
            with evidence.lock:
                said = self.verdict(evidence, over=self.now() >= end)
                if said is SPLIT and not raised:
                    raised = True
                    self.raise_stamps(evidence, fan, Joins.NO)
                    continue
                answers, pending = evidence.answers(), evidence.pending()
                elsewhere = any(b.pending and b.lane not in fan.lanes for b in evidence.ballots)
            now = self.now()
            if isinstance(said, Granted):
                self.timed(now - evidence.round_at)
                return said
            if said is SPLIT or not pending:
                return BUSY if said is SPLIT else said
            if end == until and answers >= self.need:  # the others as a rule answer just after
                self.timed(now - evidence.round_at)
                end = min(until, now + self.grace(evidence))
            if now >= end:
                return BUSY if answers >= self.need else SHORT
            fan.look(min(end - now, BETWEEN) if elsewhere else end - now)

    def grace(self, evidence: Evidence) -> float:
        """Seconds for the answers that come after a majority's."""
        return 3 * max(LEAST_GRACE / 3, self.now() - evidence.round_at)

    def timed(self, took: float) -> None:
        self.rtt = max(0.0002, min(took, 1.1 * self.rtt))

    def _settle(self, evidence: Evidence, fan: Fan, deadline: float) -> Granted | Outcome:
        """A single try with some votes, where nobody is seen to have a majority: the first in order is to get it."""
        for _ in range(TRIES):
            with evidence.lock:
                if not self.is_split(evidence) or self.now() >= deadline:
                    return BUSY
                evidence.round_at = self.now()
                self.ask(evidence, fan, self._to_give_way(evidence), Joins.QUIETLY)
            said = self._round(evidence, fan, min(deadline, self.now() + limit(evidence.claim, math.inf)))
            if said is not BUSY:
                return said
            system.sleep(max(LEAST_PATIENCE, self.rtt * system.uniform(0.5, 1.0)))
        return BUSY

    def is_split(self, evidence: Evidence) -> bool:
        """Whether the claim has votes, and nobody is seen to have a majority."""
        return bool(evidence.votes(int(self.now() * 1e6))) and not evidence.taken() and not evidence.spent()

    def _to_give_way(self, evidence: Evidence) -> dict[int, bytes]:
        """Give way where it has a vote, and ask where nothing is known. Only a claim without unanswered requests there
        gives way: nobody knows when such a request is executed."""
        modes: dict[int, bytes] = {}
        for which, ballot in enumerate(evidence.ballots):
            if not ballot.pending and not ballot.unsure and ballot.state in (VOTES, OUT):
                modes[which] = GIVE_WAY if ballot.state is VOTES else ASK
        return modes

    def outcome(self, evidence: Evidence, said: Granted | Outcome, join: bool) -> Granted | Busy:
        if isinstance(said, Granted):
            return said
        if said is SHORT:
            raise self._silence(evidence)
        claim = evidence.claim
        heartbeat = liveness(claim.ttl) / 3
        if not join:
            spent = evidence.anywhere()
            if not spent:
                self.claims.pop(claim.id, None)
            return Busy(heartbeat, spent=spent)
        if evidence.spent():
            return Busy(AT_ONCE, spent=True)
        self.evaluate(evidence)
        return Busy(heartbeat, self._free_in(evidence))

    def _free_in(self, evidence: Evidence) -> float | None:
        """Seconds until a majority of servers can be free, as far as they know."""
        now, ends = self.now(), list[float]()
        for which, ballot in enumerate(evidence.ballots):
            end = 0.0 if ballot.state is VOTES else math.inf if ballot.ends is None else ballot.ends / 1e6
            ends.append(max(end, self.servers.endpoints[which].counts_from))
        end = sorted(ends)[self.need - 1]
        return None if end == math.inf or end <= now else end - now

    def _silence(self, evidence: Evidence) -> BackendUnavailable | BackendRejected:
        if restarted := self.servers.restarted():
            return BackendUnavailable(restarted, unknown=evidence.anywhere(), backend=self._scheme)
        late = BackendUnavailable("the others did not answer in time", unknown=True)
        silences = [ballot.silent for ballot in evidence.ballots if ballot.silent is not None]
        return silence(self._scheme, len(evidence.ballots), silences or [late], "answer")

    def _granted(self, evidence: Evidence, proof: Proof) -> Granted:
        """Record that the claim holds a majority, and return the grant for the kernel."""
        claim = evidence.claim
        short = proof.valid_for < evidence.ttl
        valid_for = proof.valid_for / 1e6 if short else claim.ttl
        token = proof.token if self._token else None
        granted = Granted(token, valid_for, proof.sent_at / 1e6, valid_for, valid_for / 3, GROUP, claim.owner, short)
        evidence.held, evidence.short, evidence.token, evidence.told_lost = True, short, proof.token, False
        evidence.granted = granted
        return granted

    # ---- what is learnt while no attempt is under way

    def evaluate(self, evidence: Evidence) -> None:
        """A claim that waits: is it granted, is its stamp to be raised, does it have a minority?"""
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
        """By the clerk, when the claim is due."""
        with evidence.lock:
            if evidence.asking or evidence.leaving:
                return
            now = self.now()
            us = int(now * 1e6)
            if evidence.held:
                lacking = self._to_top_up(evidence)
                self.ask(evidence, fan, lacking, Joins.YES)
                if any(not evidence.ballots[i].pending and not fan.lanes[i].link.down for i in lacking):
                    self._later(evidence, now)  # the connection is being made
                return
            if evidence.spent():
                self._notices.wake(evidence.claim.id)  # the next attempt says so, and it goes on as another
                return
            if evidence.proof(us):
                self.evaluate(evidence)
                return
            look, evidence.look = evidence.look, False
            out: list[int] = []
            if look:
                out = [i for i, b in enumerate(evidence.ballots) if b.state is OUT and not b.pending]
                self.ask(evidence, fan, dict.fromkeys(out, ASK), Joins.YES)
            elif len(evidence.votes(us)) >= self.need:
                self.raise_stamps(evidence, fan, Joins.YES)
            elif evidence.votes(us):
                self.ask(evidence, fan, self._to_give_way(evidence), Joins.YES)
            if not evidence.pending() and (out or evidence.votes(us)):
                evidence.look = bool(out)  # nothing left the machine
                self._later(evidence, now)

    def _to_top_up(self, evidence: Evidence) -> dict[int, bytes]:
        """A holder asks the servers that it lacks, so that it has more than it needs: that proves nothing. And one that
        handed the name over just now keeps it for less than a ttl."""
        return {
            which: TOP_UP
            for which, ballot in enumerate(evidence.ballots)
            if not ballot.pending and (ballot.state in (OUT, WAITS) or (ballot.state is VOTES and ballot.at[1]))
        }

    # What the servers push: see `Hears`

    def pushed(self, which: int, claim_id: str, granted: Granted) -> None:
        if evidence := self.claims.get(claim_id):
            at, valid_for = round(granted.sent_at * 1e6), round(granted.valid_for * 1e6)
            with evidence.lock:
                if not evidence.pushed(which, at, valid_for, granted.token or 0):
                    return
                if evidence.held:
                    if not evidence.short:
                        self.clerk.soon(evidence, self.now())
                    return
            if not evidence.asking:
                self.evaluate(evidence)

    def hinted(self, which: int, claim_id: str) -> None:
        if evidence := self.claims.get(claim_id):
            with evidence.lock:
                if evidence.leaving:
                    return
                evidence.hinted(which)
                if evidence.held:  # the kernel drops a grant that it has not looked at
                    self._notices.wake(claim_id)
                else:
                    evidence.look = True
                    self.clerk.soon(evidence, self.now())

    def gone(self, which: int, claim_id: str, reason: LossReason, message: str) -> None:
        if evidence := self.claims.get(claim_id):
            with evidence.lock:
                if evidence.leaving:  # what a release ends is no loss
                    return
                evidence.gone(which, int(self.now() * 1e6))
                lost = self.is_lost(evidence) and not evidence.told_lost
                evidence.told_lost |= lost
            if lost:
                self._notices.gone(claim_id, reason, f"{message}, and no majority keeps it")

    def is_lost(self, evidence: Evidence) -> bool:
        """Under the claim's lock."""
        window = int(limit(evidence.claim, math.inf) * 1e6)
        return evidence.held and evidence.lacks_majority(int(self.now() * 1e6), window)

    # ---- watches

    def watch(self, held: Sequence[Held], within: float) -> None:
        """Have a majority report losses, and the others as soon as they can."""
        claims = [evidence for claim, _ in held if (evidence := self.claims.get(claim.id))]
        for evidence in claims:
            evidence.watched = True

        def watch(node: Node, within: float) -> None:
            self._watch(self.servers.nodes.index(node), claims, node, within)

        self.servers.ask_most(watch, within, "watch it")

    def watch_at(self, which: int, claims: list[Evidence]) -> None:
        """Where this server has these and does not report their loss: it lacked them, or could not be asked. Nobody
        waits for it; what fails is tried again after the next renewal."""
        if missing := [each for each in claims if each.watched and not each.ballots[which].watched]:

            def watch(node: Node, within: float) -> None:
                self._watch(which, missing, node, within)

            self.servers.on(which, watch)

    def _watch(self, which: int, claims: list[Evidence], node: Node, within: float) -> None:
        wanted: list[tuple[Evidence, Held]] = []
        for each in claims:
            if each.granted and not each.leaving:
                each.ballots[which].watched = True  # before the server is asked: it may report at once
                wanted.append((each, (each.claim, each.granted)))
        if not wanted:
            return
        try:
            node.listener.watch([held for _, held in wanted], within)
        except BaseException:
            for each, _ in wanted:
                each.ballots[which].watched = False
            raise

    # ---- release

    def release(self, claim: Claim, unsure: bool, within: float, rest: float | None = None) -> Returned:
        until = self.now() + limit(claim, within)  # what is not told by then is told by the clerk
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
        """Tell every server where something of the claim may be, and that has not confirmed it yet; the clerk tells
        those that do not answer. ``waiting``: the servers whose answer is under way."""
        evidence = self._leave(claim, unsure)
        now = self.now()
        for node in self.servers.nodes:
            node.listener.unwatch(claim.id)  # before it is sent: what follows is no loss
        with evidence.lock:
            evidence.proposal = max(system.wall(), evidence.newest_stamp + 1)  # the same for all servers
            if not evidence.leaving:
                evidence.leaving = True
                evidence.rests_until = None if rest is None else now + rest
            made: dict[bool, tuple[Script, bytes]] = {}
            for which, lane in enumerate(fan.lanes):
                if evidence.stays(which, int(now * 1e6)):
                    waiting.add(which)
                    self._tell(evidence, which, lane, waiting, min(limit(claim, math.inf), LATEST), made)
            if not waiting:
                self._forget_if_done(evidence)
        return evidence

    def tell_late(self, evidence: Evidence, which: int, lane: Lane) -> None:
        """The clerk tells a server of a release that it has not confirmed, if something of the claim may be there."""
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
        """Under the claim's lock. ``made``: the requests that others were told with just now."""
        ballot, now = evidence.ballots[which], self.now()
        # What is under way on this very connection is executed before the release.
        last = ballot.unsure or (ballot.pending > 0 and ballot.lane is not lane)
        script, request = made[last] = made.get(last) or self._to_tell(evidence, now, TOMBSTONE if last else 0)
        handle = partial(self._told, evidence, which, waiting)
        owed = Owed(handle, now + within, lambda: script.load + request)
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
            ballot = evidence.ballots[which]
            if isinstance(answer, Exception):
                ballot.lost_release |= getattr(answer, "unknown", True)
            elif ballot.released is None:
                ballot.released = bool(answer)
            if evidence.stays(which, int(self.now() * 1e6)):
                self.clerk.not_confirmed(evidence, which)
            else:
                self.clerk.confirmed(evidence, which)
            self._forget_if_done(evidence)

    def _forget_if_done(self, evidence: Evidence) -> None:
        now = int(self.now() * 1e6)
        if not any(evidence.stays(which, now) for which in range(len(evidence.ballots))):
            self.claims.pop(evidence.claim.id, None)

    def returned(self, evidence: Evidence, *, rests: bool = False) -> Returned:
        was_ours = evidence.was_ours()
        if was_ours is None:
            raise BackendUnavailable("too few servers have confirmed the release", unknown=True, backend=self._scheme)
        first, evidence.returned = not evidence.returned, True
        return Returned(was_ours and (first or rests))  # a release that is told again ended nothing

    def close(self) -> None:
        self.clerk.close()
        self.pool.close()
        self.servers.close()

    def drop(self) -> None:
        """Another takes its place. In a forked child nothing of the parent is used."""
        if self._process == system.pid():
            self.close()
            return
        self.pool.drop()
        self.clerk.drop()
