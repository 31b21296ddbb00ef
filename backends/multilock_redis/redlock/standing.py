"""Where one claim stands: what is known of it at each server, and what that amounts to."""

from __future__ import annotations

import math

from multilock import BackendRejected, system
from multilock.backend import Busy, Claim, Granted
from multilock_redis.redlock.servers import Answers

__all__ = ["FIRST_PAUSE", "GROUP", "At", "Standing"]

GROUP = "redlock"  # all that is held is renewed together, by one request to each server
FIRST_PAUSE = 0.012  # seconds at most for which a minority is kept, before it gives way


class At:
    """What is known of one claim at one server. Changed under the claim's lock."""

    __slots__ = (
        "asked",
        "cleared",
        "ends",
        "floor",
        "given",
        "gone",
        "keeps",
        "number",
        "push",
        "released",
        "taken",
        "touched",
        "under_way",
        "unsure",
        "void",
        "vote",
        "watched",
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
        self.given = -math.inf  # when the last request was sent that it granted
        self.keeps = -math.inf  # until then it keeps the name for this claim, by its newest statement
        self.gone = False  # it has said that this claim does not hold the name
        self.taken = -math.inf  # when it pushed that: an operator comes to one server after the other
        self.watched = False  # it tells when it does not hold the name for this claim any more
        self.released: bool | None = None  # whether it was ours; None: not told, or no answer

    def vouches(self, sent_at: float) -> bool:
        """Whether what it said of a request sent then still is so: nothing can have given it away since."""
        return not self.void and sent_at > self.cleared

    def lacks(self, now: float, operator: float) -> bool:
        """Return True if the server does not keep the name for this claim, or did not within the last ``operator``
        seconds. A server that never granted it lacks it as well. An operator takes a name from one server after the
        other, so a renewal between two of them must not hide what the first one lost."""
        return now >= self.keeps or now - self.taken < operator

    def is_granted(self, granted: Granted) -> None:
        """The server has said that it keeps the name for this claim."""
        self.gone = False
        self.keeps = granted.sent_at + granted.valid_for

    def is_gone(self) -> None:
        """The server has said that it does not keep the name for this claim."""
        self.gone = True
        self.keeps = -math.inf

    def is_hinted(self) -> None:
        """The server has told the claim to look again: what it vouched for before may have been taken since."""
        self.vote = self.push = None

    def spends(self) -> bool:
        """Whether the claim has to go on as another: nothing else undoes a request without an answer. Nor can it give
        way where there is one, and whoever keeps a minority for good may keep everybody waiting."""
        return self.unsure and (self.void or self.vote is not None)

    def is_asked(self, gives_way: bool) -> None:
        """A request goes out now."""
        self.under_way = True
        self.number += 1
        if gives_way:
            self.vote = self.push = None
            self.floor = self.asked
            self.void = True  # from now on it may be executed

    def answers(
        self, said: Granted | Busy | Exception, now: float, *, join: bool, gave_way: bool, counts: bool
    ) -> None:
        """The request that went out is answered, or is known not to be."""
        self.under_way = False
        self.asked = now
        if isinstance(said, Exception):
            unknown = not isinstance(said, BackendRejected) and getattr(said, "unknown", True)
            self.unsure |= unknown
            self.touched |= unknown
            if self.push:  # the next answer is newer, and may contradict it
                self.vote, self.push = self.push if counts else None, None
        else:
            unknown = False
            self.touched |= join or isinstance(said, Granted)
            push, self.push = self.push, None
            if isinstance(said, Granted):
                self.given = said.sent_at
                self.is_granted(said)
            elif push is None:
                self.keeps = -math.inf
            vote = said if isinstance(said, Granted) else push
            self.vote = vote if vote and counts else None
            ends = said.expires_in if isinstance(said, Busy) else 0.0
            self.ends = None if ends is None else self.asked + ends
        if gave_way and not unknown:
            self.void, self.cleared = False, self.asked


class Standing:
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
        "watched",
        "woken",
    )

    def __init__(self, claim: Claim, nodes: int) -> None:
        self.claim = claim
        self.lock = system.RLock()
        self.at = [At() for _ in range(nodes)]
        self.answers = Answers()
        self.agreeing = False  # on the token of what pushes have proved
        self.token: int | None = None  # as it was granted …
        self.until = 0.0  # … and until when a majority certainly is its
        self.asking = False  # an attempt is under way, and counts for itself
        self.held = False  # the kernel was told so, or is told now
        self.short = False  # held for less than its ttl yet: renewed soon
        self.leaving = False  # nothing more is asked for it
        self.watched = False  # each server is to tell when it loses it
        self.told_gone = False
        self.pause = FIRST_PAUSE
        self.woken: set[int] = set()

    def votes(self, now: float, fresh: bool = False) -> list[Granted]:
        with self.lock:
            votes = [at.vote for at in self.at if at.vote and not at.void]
        share = 0.5 if fresh else 1.0
        return [vote for vote in votes if now - vote.sent_at < vote.valid_for * share]

    def votes_of(self, token: int, now: float) -> list[Granted]:
        """Those that came with no greater token. A server counts each time that it lets somebody in: where it has not,
        the name was its all the time."""
        return [vote for vote in self.votes(now) if (vote.token or 0) <= token]

    def anywhere(self) -> bool:
        return any(at.touched or at.under_way for at in self.at)

    def holds(self, proof: Granted, token: int | None) -> Granted:
        """From now on a majority is its, as is proved: what the kernel is told of that."""
        claim, short = self.claim, proof.valid_for < self.claim.ttl
        self.held, self.short, self.token = True, short, proof.token
        self.until = proof.sent_at + 0.99 * proof.valid_for - 0.002  # clocks may differ in speed by 1 %
        return proof._replace(token=token, group=GROUP, key=claim.owner, short=short)

    def may_keep(self, which: int, now: float) -> None:
        """A renewal has no answer: that server may have executed it."""
        at = self.at[which]
        with self.lock:
            at.asked = max(at.asked, now)

    def is_told(self, which: int, answer: Granted | None, since: float, now: float) -> None:
        """By a renewal sent after ``since``, what that server says of it, which may have given it meanwhile."""
        at = self.at[which]
        with self.lock:
            at.asked = max(at.asked, now)
            if answer is not None and answer.sent_at > at.taken:
                at.is_granted(answer)
            elif answer is None and at.given < since:
                at.is_gone()

    def lacking(self, now: float, operator: float) -> int:
        """How many servers do not keep the name for this claim."""
        with self.lock:
            return sum(at.lacks(now, operator) for at in self.at)
