"""One claim at every server: the newest statement of each server, and what the statements amount to. No I/O, no clock.

A server states that it keeps the name for this claim (a vote), that another has it, or that the claim lost it. The
newest statement counts, yes or no. Statements are ordered by when their request was sent; a push bears the sending time
of the request that joined the queue, and comes after that request's answer. Whatever is older is dropped.

A claim holds the name when a majority of servers vote for it with one stamp, which is its token. A claim that holds has
lost the name as soon as fewer than a majority vote for it: a server that never voted lacks it like one that forgot it.

Times are whole microseconds of the client's own clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple

from multilock import BackendRejected, system
from multilock.backend import Claim, Granted

__all__ = ["OUT", "VOTES", "WAITS", "YIELDS", "Ballot", "Evidence", "Proof", "State", "majority_of"]

At = tuple[int, int]
"""When the request was sent that a statement answers; 1 for a push, which comes after the answer of that request."""

LONG_AGO = -(10**18)
ENDS_WITHIN = 6_000_000  # µs after its ttl: by then a server has deleted what nobody keeps alive there


def majority_of(servers: int) -> int:
    """Two majorities have one server in common."""
    return servers // 2 + 1


class State(Enum):
    OUT = "out"  #: nothing that counts: not asked, forgotten, or refused without a place in the queue
    WAITS = "waits"  #: another has the name, and the claim stands in the queue
    VOTES = "votes"  #: the server lets in nobody else until the vote ends
    YIELDS = "yields"  #: a request that may give the name away is under way, or was never answered


OUT, WAITS, VOTES, YIELDS = State


class Proof(NamedTuple):
    """A majority that votes for the claim with one stamp."""

    token: int
    sent_at: int
    valid_for: int

    def is_fresh(self, now: int) -> bool:
        """Less than half of its time is over."""
        return 2 * (now - self.sent_at) < self.valid_for


class Ballot:
    """What one server has said of one claim."""

    state = OUT
    at: At = (0, 0)  #: of the newest statement
    until = 0  #: when its vote ends
    stamp = 0  #: of its vote, or the newest there
    pending = 0  #: requests under way that may take or keep the name
    lane: object = None  #: the connection by which they went
    unsure = False  #: some such request has no answer, and may be executed at any time
    kept = False  #: the claim has held or waited there
    doubted = False  #: the server hinted at a change while a request was under way
    asked = LONG_AGO  #: when the last request was sent that may take, keep or prolong the name
    silent: Exception | None = None  #: why the newest request has no answer
    ends: int | None = None  #: when the lease that keeps the claim waiting can end by itself
    lost_at = LONG_AGO  #: when the server last pushed that the claim does not hold the name
    watched = False  #: the server reports when the claim loses the name
    released: bool | None = None  #: whether it was ours, once the release is confirmed
    lost_release = False  #: a release has no answer: that a later one finds nothing says nothing

    @property
    def touched(self) -> bool:
        """Something of the claim may be there."""
        return self.kept or self.unsure or self.pending > 0

    @property
    def stuck(self) -> bool:
        """A request to give way has no answer: nothing that this server says counts until it is told of the release."""
        return self.state is YIELDS and not self.pending


class Evidence:
    """A claim, from its first request until nothing of it can be anywhere. Each event is told under `lock`."""

    newest_stamp = 0  #: of this name, as far as any server has said
    proposal = 0  #: for the stamp of the claim that comes after it
    token = 0  #: of the lease
    asking = False  #: an attempt is under way, and counts for itself
    held = False  #: the kernel was told that it holds, or is told now
    short = False  #: held for less than its ttl yet
    leaving = False  #: nothing more is asked for it
    returned = False  #: the kernel was told what came of the release
    watched = False  #: each server is to report when the claim loses the name
    told_lost = False
    look = False  #: some server has hinted that it is to be asked again
    due = 0.0  #: when the clerk gives way or raises its stamp, in seconds; 0: not at all
    patience = 0.0  #: seconds that it waited last for a majority
    born = 0.0  #: when its first request was made, in seconds …
    age = 0  #: … and how old the call was then
    round_at = 0.0  #: when its round began
    fan: object = None  #: the connections that its last attempt used
    granted: Granted | None = None  #: what the kernel was told
    rests_until: float | None = None  #: it was given back, and the name rests until then, in seconds

    def __init__(self, claim: Claim, servers: int, counts: Callable[[int], bool], *, token: bool) -> None:
        """``counts``: whether a server's vote counts (`Guarded`)."""
        self.claim = claim
        self.need = majority_of(servers)
        self.lock = system.RLock()
        self.ballots = [Ballot() for _ in range(servers)]
        self._counts = counts
        self._token = token
        self.ttl = round(claim.ttl * 1e6)

    # ---- events

    def asks(self, which: int, at: int, lane: object, *, gives_way: bool) -> tuple[State, At]:
        """A request goes out. Returns what `unasked` needs if it does not."""
        ballot = self.ballots[which]
        before = ballot.state, ballot.at
        ballot.pending += 1
        ballot.lane = lane
        ballot.asked = max(ballot.asked, at)
        if gives_way:
            ballot.state, ballot.at = YIELDS, (at, 0)
        return before

    def unasked(self, which: int, before: tuple[State, At], why: Exception) -> None:
        """The request did not leave: nothing has changed, a vote goes on counting."""
        ballot = self.ballots[which]
        ballot.pending -= 1
        ballot.state, ballot.at = before
        ballot.silent = why

    def answered(
        self, which: int, at: int, answer: int | Sequence[int] | Exception, now: int, *, gives_way: bool, joins: bool
    ) -> None:
        """The request that was sent at ``at`` is answered with a stamp or a refusal, or is known not to be."""
        ballot = self.ballots[which]
        ballot.pending -= 1
        if isinstance(answer, Exception):
            self._is_silent(ballot, at, answer, gives_way)
            return
        ballot.silent = None
        doubted, ballot.doubted = ballot.doubted, False
        ballot.kept |= joins or isinstance(answer, int)
        self.newest_stamp = max(self.newest_stamp, answer if isinstance(answer, int) else answer[2])
        if (at, 0) < ballot.at or (ballot.state is YIELDS and not gives_way):
            return  # a newer statement is known, or nothing counts
        ballot.at = (at, 0)
        if isinstance(answer, int):
            self._votes(ballot, at + self.ttl, answer)
            if doubted:
                self.hinted(which)
                self.look = True
            return
        left, rank, ballot.stamp = answer
        ballot.state = WAITS if joins else OUT
        # Waiters look one after the other when a lease ends by itself: its end is pushed late, or never.
        ballot.ends = now + 1000 * left + 2000 + 20_000 * rank if left >= 0 and 0 <= rank < 3 else None

    def _is_silent(self, ballot: Ballot, at: int, answer: Exception, gives_way: bool) -> None:
        ballot.silent = answer
        if not isinstance(answer, BackendRejected) and getattr(answer, "unknown", True):
            ballot.unsure = True  # what gave way stays so: it may be executed at any time
        elif gives_way and ballot.at == (at, 0):
            ballot.state = OUT  # it was not executed; the next answer says where the claim is

    def pushed(self, which: int, at: int, valid_for: int, stamp: int) -> bool:
        """The server has handed the name to the claim. False: that is older than what is known."""
        ballot = self.ballots[which]
        if (at, 1) <= ballot.at or not ballot.touched or self.leaving or valid_for > self.ttl:
            return False
        ballot.at, ballot.kept = (at, 1), True
        self.newest_stamp = max(self.newest_stamp, stamp)
        self._votes(ballot, at + valid_for, stamp)
        return True

    def hinted(self, which: int) -> None:
        """The server has asked the claim to look again: what it had may have been taken since."""
        ballot = self.ballots[which]
        ballot.doubted = ballot.pending > 0  # nobody knows whether the answer under way is older
        if ballot.state in (VOTES, WAITS):
            ballot.state = OUT

    def gone(self, which: int, now: int) -> None:
        """The server has reported that the claim does not hold the name there."""
        ballot = self.ballots[which]
        ballot.watched = False
        ballot.lost_at = now
        self.hinted(which)

    def renews(self, which: int, at: int) -> None:
        """A renewal goes out. If the server executes it, the claim lives there for another ttl."""
        ballot = self.ballots[which]
        ballot.asked = max(ballot.asked, at)

    def renewed(self, which: int, at: int, ours: bool) -> bool:
        """A renewal that was sent at ``at`` is answered. Returns whether the server votes for that long: an answer that
        a newer one has overtaken is a vote if that is one too."""
        ballot = self.ballots[which]
        if (at, 0) >= ballot.at and ballot.state is not YIELDS:
            ballot.at = (at, 0)
            if ours:
                self._votes(ballot, at + self.ttl, ballot.stamp if ballot.state is VOTES else 0)
            elif ballot.state is VOTES:
                ballot.state = OUT
        return ours and ballot.state is VOTES and ballot.until >= at + self.ttl

    def _votes(self, ballot: Ballot, until: int, stamp: int) -> None:
        ballot.state, ballot.until, ballot.stamp = VOTES, until, stamp

    # ---- what they amount to

    def votes(self, now: int) -> list[Ballot]:
        """The votes that count."""
        return [
            ballot
            for which, ballot in enumerate(self.ballots)
            if ballot.state is VOTES and now < ballot.until and self._counts(which)
        ]

    def proof(self, now: int) -> Proof | None:
        """None: no majority votes for the claim with one stamp."""
        votes = self.votes(now)
        if len(votes) < self.need:
            return None
        stamps = [vote.stamp for vote in votes]
        stamp = max(stamps, key=stamps.count if self._token else None)
        if self._token:
            votes = [vote for vote in votes if vote.stamp == stamp]
            if len(votes) < self.need:
                return None
        # Until the one of a majority ends that ends first, a majority lets in nobody else.
        votes.sort(key=lambda vote: vote.until, reverse=True)
        least = votes[self.need - 1]
        return Proof(stamp, least.at[0], least.until - least.at[0])

    def lacks_majority(self, now: int, window: int) -> bool:
        """Whether a claim that holds has lost the name. An operator takes it from one server after the other: what a
        server gave back within ``window`` of its loss does not count yet."""
        keep = sum(b.state is VOTES and now < b.until and now - b.lost_at >= window for b in self.ballots)
        return keep < self.need

    def spent(self) -> bool:
        """Whether the claim must go on as another: what has no answer can be undone only by ending the claim, and a
        minority that cannot give way would keep everybody waiting."""
        return any(ballot.unsure and ballot.state in (VOTES, YIELDS) for ballot in self.ballots)

    def anywhere(self) -> bool:
        """Whether something of the claim may be at a server."""
        return any(ballot.touched for ballot in self.ballots)

    def pending(self) -> int:
        return sum(ballot.pending > 0 for ballot in self.ballots)

    def answers(self) -> int:
        """How many servers have answered their newest request, and count."""
        return sum(
            not ballot.pending and ballot.silent is None and ballot.at != (0, 0) and self._counts(which)
            for which, ballot in enumerate(self.ballots)
        )

    def taken(self) -> bool:
        """Whether a majority of refusals name one stamp: then somebody holds the name."""
        named = Counter(b.stamp for b in self.ballots if b.state in (OUT, WAITS) and b.silent is None and b.at[0])
        return max(named.values(), default=0) >= self.need

    def stays(self, which: int, now: int) -> bool:
        """Whether something of a claim that was given up may be at this server, and it has not confirmed the release.
        What nobody keeps alive ends by itself; a request without an answer may be executed at any time."""
        ballot = self.ballots[which]
        if ballot.released is not None:
            return False
        if ballot.unsure or ballot.pending:
            return now < ballot.asked + max(120_000_000, 2 * self.ttl + 60_000_000)
        return ballot.touched and now < ballot.asked + self.ttl + ENDS_WITHIN

    def was_ours(self) -> bool | None:
        """Whether a majority has confirmed that it held the name for the claim; None: that is open."""
        yes = sum(ballot.released is True for ballot in self.ballots)
        no = sum((b.released is False and not b.lost_release) or not b.touched for b in self.ballots)
        if yes >= self.need:
            return True
        return False if no > len(self.ballots) - self.need else None
