"""A claim asks all servers, round after round, until a majority has voted for it.

What a server said is a vote: it lets in nobody else for as long, counted from the sending of the request. Who has votes
and no majority gives way, where it has them, to who came before it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from multilock import BackendRejected, BackendUnavailable, system
from multilock.backend import Busy, Claim, Granted, Notices
from multilock_redis.node import Node
from multilock_redis.recipe import liveness
from multilock_redis.redlock.agreement import Agreement, agree
from multilock_redis.redlock.crew import NotAsked
from multilock_redis.redlock.places import Places
from multilock_redis.redlock.quorum import Verdict
from multilock_redis.redlock.servers import Servers, limit
from multilock_redis.redlock.standing import FIRST_PAUSE, Standing
from multilock_redis.redlock.watching import Watching

__all__ = ["Rounds"]

ROUGHLY = 1 / 3, 1.0  # of the pause before a minority gives way: so much, at random


class Rounds:
    def __init__(self, servers: Servers, places: Places, watching: Watching, notices: Notices, *, token: bool) -> None:
        self._servers = servers
        self._watching = watching
        self._quorum = servers.quorum
        self._places = places
        self._notices = notices
        self._token = token
        self._now = servers.now

    def attempt(self, claim: Claim, join: bool, within: float) -> Granted | Busy:
        deadline = self._now() + within
        standing = self._places.enter(claim)
        if standing is None:
            return Busy(liveness(claim.ttl) / 3, spent=True)
        with standing.lock:
            # Who was told just now that it holds, and asks because it has not heard, will hear: it gives way later.
            may_give_way = join and not standing.held
            standing.asking, standing.held = True, False
        try:
            answer = self._attempted(standing, join, may_give_way, deadline)
        except (BackendUnavailable, BackendRejected) as error:
            if standing.anywhere():
                vars(error)["unknown"] = True  # also of one that refuses: what the others have taken is given back
            else:
                self._places.forget(claim)
            raise
        finally:
            standing.asking = False
        if isinstance(answer, Busy):
            self._tell_if_held(standing)  # it came just now
        return answer

    def _attempted(self, standing: Standing, join: bool, may_give_way: bool, deadline: float) -> Granted | Busy:
        silences = self._round(standing, join, may_give_way, deadline)
        proof = self._quorum.proof(standing.votes(self._now()))
        if proof is not None and self._token:
            proof = agree(self._servers, standing, deadline)
        if proof is None:
            return self._refused(standing, join, silences)
        return self._holds(standing, proof)

    def _holds(self, standing: Standing, proof: Granted) -> Granted:
        return standing.holds(proof, proof.token if self._token else None)

    def _round(self, standing: Standing, join: bool, may_give_way: bool, deadline: float) -> list[Exception]:
        """Ask every server, until it is decided. Returns what was no answer."""
        now = self._now()
        votes = standing.votes(now)
        gives_way = may_give_way and bool(votes) and len(votes) < self._quorum.needed
        standing.woken.clear()
        until = min(deadline, now + limit(standing.claim, deadline - now))
        for which in range(self._quorum.nodes):
            self._ask(standing, which, join, gives_way, until, standing.answers.put)
        said: dict[int, Any] = {}
        while True:
            silences = [each for each in said.values() if isinstance(each, Exception)]
            yes = sum(isinstance(each, Granted) and standing.at[which].vote is not None for which, each in said.items())
            verdict = self._quorum.asked(yes, len(said) - len(silences) - yes, len(silences))
            if verdict is not Verdict.OPEN:
                return silences if verdict is Verdict.SILENCE else []
            answer = standing.answers.get(until - self._now())
            if answer is None:
                late = BackendUnavailable("the others did not answer in time", unknown=True)
                no = len(said) - len(silences) - yes
                answered = self._quorum.asked(yes, no, self._quorum.nodes - yes - no)
                return [*silences, late] if answered is Verdict.SILENCE else []
            which, number, what = answer
            if number == standing.at[which].number:
                said[which] = what

    def _refused(self, standing: Standing, join: bool, silences: list[Exception]) -> Busy:
        """No majority is ours: when to look again."""
        if silences:
            raise self._servers.silence(silences, "answer")
        claim, now = standing.claim, self._now()
        heartbeat = liveness(claim.ttl) / 3
        if not join:
            spent = standing.anywhere()
            if not spent:
                self._places.forget(claim)
            return Busy(heartbeat, spent=spent)
        if standing.votes(now):
            pause = min(standing.pause * system.uniform(*ROUGHLY), heartbeat)
            standing.pause = min(2 * standing.pause, heartbeat)
        else:
            pause = heartbeat
            standing.pause = FIRST_PAUSE
        ends = self._quorum.soonest(
            None if at.ends is None else max(at.ends, endpoint.counts_from)
            for at, endpoint in zip(standing.at, self._servers.endpoints, strict=True)
        )
        expires_in = None if ends is None or ends <= now else ends - now
        return Busy(pause, expires_in, spent=any(at.spends() for at in standing.at))

    # ---- one server

    def _ask(
        self,
        standing: Standing,
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
            gives_way = gives_way and not at.unsure
            at.is_asked(gives_way)
            number = at.number

        def stand(node: Node, within: float) -> Granted | Busy:
            if standing.leaving:
                raise NotAsked("the claim was given up")
            return node.stand(standing.claim, join, gives_way, within)

        def told(said: Granted | Busy | Exception) -> None:
            """On a thread of the crew, whoever still waits for it."""
            with standing.lock:
                counts = self._servers.counts(which)
                at.answers(said, self._now(), join=join, gave_way=gives_way, counts=counts)
            if isinstance(said, Granted):
                self._watching.again(which, [(standing.claim, said)])
            if at.vote:
                self._tell_if_held(standing)
            tell(which, number, said)

        self._servers.crews[which].ask(stand, until, told)

    def top_up(self, standing: Standing, which: int) -> None:
        """Ask a server that a holder does not have for it: so that it has more than it needs. It proves nothing."""
        claim, now = standing.claim, self._now()
        self._ask(standing, which, True, False, now + limit(claim, claim.ttl), _nobody)

    # ---- hand-overs

    def pushed(self, standing: Standing, which: int, granted: Granted) -> None:
        """A hand-over by one server."""
        at = standing.at[which]
        with standing.lock:
            if standing.leaving or granted.sent_at <= at.floor or granted.valid_for > standing.claim.ttl:
                return
            at.touched = True
            at.is_granted(granted)
            tops_up = standing.held and not standing.short and not at.under_way
            if at.under_way:
                at.push = granted
            elif not standing.held:
                at.vote = granted if self._servers.counts(which) else None
        if standing.held:
            if tops_up:
                self.top_up(standing, which)
        else:
            self._tell_if_held(standing)

    def _tell_if_held(self, standing: Standing) -> None:
        """A majority has it, without an attempt under way that would see so."""
        votes = standing.votes(self._now(), fresh=True)
        proof = self._quorum.proof(votes)
        with standing.lock:
            if proof is None or standing.asking or standing.held or standing.agreeing or standing.leaving:
                return
            if not proof.short:  # the answer came late: it is asked again, for the whole ttl
                self._notices.wake(standing.claim.id)
                return
            standing.agreeing = self._token
        if self._token:
            token = 1 + max(vote.token or 0 for vote in votes)
            Agreement(self._servers, standing, proof._replace(token=token), self._tell).ask()
        else:
            self._tell(standing, proof)

    def _tell(self, standing: Standing, proof: Granted | None) -> None:
        """What pushes have proved; None: an attempt is to find out. Or where that is not so any more: since then a
        server may have forgotten it, so that others were given away. Under the lock until the kernel has it: the next
        attempt may find that out, and the one after that gives away what was granted."""
        with standing.lock:
            standing.agreeing = False
            if standing.asking or standing.leaving:
                return
            now = self._now()
            if proof is not None:
                votes = standing.votes_of(proof.token or 0, now) if self._token else standing.votes(now)
                if (proves := self._quorum.proof(votes)) is not None:
                    granted = self._holds(standing, proves._replace(token=proof.token))
                    self._notices.granted(standing.claim.id, granted)
                    return
        self._notices.wake(standing.claim.id)


def _nobody(which: int, number: int, said: object) -> None:
    """Nobody waits for a top-up."""
