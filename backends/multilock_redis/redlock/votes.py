"""The record of one claim: the newest statement of each server about it, and the conclusions from these statements.
This module does no I/O and reads no clock.

A server states that it keeps the name for this claim (a vote), that another claim has the name, or that this claim lost
it. Only the newest statement of each server counts. Statements are ordered by the time at which their request was sent.
A push contains the sending time of the request that joined the queue, and counts as newer than the reply to that
request. A *hint* is a notification without a statement: the claim must ask the server again.

A claim holds the name when a majority of servers vote for it with one stamp, which is its token. A holder has lost the
name as soon as fewer than a majority vote for it.

A `ServerView` has the statements of one server. The `Evidence` of a claim has one view for each server.

Times are whole microseconds of the client's own clock, unless a comment says seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, Protocol

from multilock import BackendRejected, system
from multilock.backend import Claim, Granted
from multilock.timing import LATE_REQUEST, LIVENESS_MAX

__all__ = ["OUT", "VOTES", "WAITS", "YIELDS", "Evidence", "Proof", "ServerView", "Statement", "majority_of"]

At = tuple[int, int]
"""The order of a statement: when its request was sent, then 0 for the reply and 1 for a push, which comes later."""

LONG_AGO = -(10**18)
LATE = round(1e6 * LATE_REQUEST)  # µs
# µs. A server has deleted all its entries of a claim once the claim's ttl and this time have passed since its last
# request.
ENDS_WITHIN = round(1e6 * LIVENESS_MAX)


def majority_of(servers: int) -> int:
    """Return how many servers are a majority. Any two majorities have a server in common."""
    return servers // 2 + 1


class Statement(Enum):
    """The meaning of the newest statement of a server about a claim."""

    OUT = "out"  #: no vote and no place in the queue
    WAITS = "waits"  #: another claim has the name, and this claim waits in the queue
    VOTES = "votes"  #: the server admits no other claim until the vote ends
    YIELDS = "yields"  #: a request that may give the name away is under way, or got no reply


OUT, WAITS, VOTES, YIELDS = Statement


class Counted(Protocol):
    """A server whose statements count after the time ``counts_from`` on our clock, in seconds (see `Guarded`)."""

    counts_from: float


class Proof(NamedTuple):
    """A majority that votes for the claim with one stamp. The majority is valid for ``valid_for`` µs from
    ``sent_at``."""

    token: int
    sent_at: int
    valid_for: int

    def is_fresh(self, now: int) -> bool:
        """Return whether less than half of the validity has passed."""
        return 2 * (now - self.sent_at) < self.valid_for


class ServerView:
    """The statements of one server about one claim, and the requests to that server."""

    state = OUT
    at: At = (0, 0)  #: the `At` of the newest statement
    until = 0  #: when the vote ends
    stamp = 0  #: stamp of the vote, or the newest stamp that a refusal reported
    pending = 0  #: number of requests under way that may take or keep the name
    lane: object = None  #: the connection over which the last of these requests was sent
    unsure = False  #: a request that may take or keep the name got no reply, so the server may still execute it
    kept = False  #: the claim has held the name or waited at this server
    doubted = False  #: the server sent a hint while a request was under way
    hinted_at: At | None = None  #: the `At` of the vote after which the server sent a hint
    asked = LONG_AGO  #: when the newest request that may take, keep or extend the name was sent
    silent: Exception | None = None  #: the error of the newest request, if it had no usable reply
    ends: int | None = None  #: when the claim may ask again because the present lease may have expired by itself
    lost_at = LONG_AGO  #: when the server last reported that the claim does not hold the name
    watched = False  #: the server will report when the claim loses the name
    released: bool | None = None  #: whether the claim had the name at this server; None until the release is confirmed
    #: a release got no reply, so if a later release finds nothing, the claim may still have held the name
    lost_release = False

    @property
    def touched(self) -> bool:
        """Whether the server may still have an entry of the claim."""
        return self.kept or self.unsure or self.pending > 0

    @property
    def keeps(self) -> bool:
        """Whether the server keeps the name for the claim, as far as we know.

        A hint that arrives after a vote may have been sent before it. So a hint prevents a grant, but is not counted as
        a loss.
        """
        return self.state is VOTES or self.hinted_at == self.at


class Evidence:
    """The record of one claim, from its first request until no server can have an entry of it.

    The caller of the methods under "events" holds `lock`.
    """

    newest_stamp = 0  #: the greatest stamp of this name that any server has reported
    proposal = 0  #: the stamp that the release proposes for the next claim
    token = 0  #: the fencing token of the lease
    asking = False  #: an attempt is under way, and its thread evaluates the replies
    held = False  #: the kernel has received the grant, or receives it now
    leaving = False  #: the claim is given up, and sends only its release
    returned = False  #: the kernel has received the result of the release
    watched = False  #: the kernel wants every server to report when the claim loses the name
    told_lost = False
    look = False  #: a server sent a hint, so the claim must ask again
    due = 0.0  #: when the clerk next acts for the claim, in seconds; 0: never
    #: how long the claim last waited for a majority, in seconds; each wait is longer than the one before
    patience = 0.0
    born = 0.0  #: when this record was made, in seconds
    age = 0  #: the age of the acquire() call when this record was made, in µs
    round_at = 0.0  #: when the newest round of requests began, in seconds
    fan: object = None  #: the `Fan` of the last attempt, which has one connection to each server
    granted: Granted | None = None  #: the newest grant that the kernel received
    #: after a release that keeps the name taken for a while: when that time ends, in seconds
    rests_until: float | None = None

    def __init__(self, claim: Claim, servers: Sequence[Counted]) -> None:
        self.claim = claim
        self.need = majority_of(len(servers))
        self.lock = system.RLock()
        self.views = [ServerView() for _ in servers]
        self._servers = servers
        self.ttl = round(claim.ttl * 1e6)

    # ---- events

    def asks(self, which: int, at: int, lane: object, *, gives_way: bool) -> tuple[Statement, At]:
        """Record that a request is being sent. Returns the former state, for `unasked`."""
        view = self.views[which]
        before = view.state, view.at
        view.pending += 1
        view.lane = lane
        view.asked = max(view.asked, at)
        if gives_way:
            view.state, view.at = YIELDS, (at, 0)
        return before

    def unasked(self, which: int, before: tuple[Statement, At], why: Exception) -> None:
        """Record that the request was not sent, and restore the former state, so that a vote still counts."""
        view = self.views[which]
        view.pending -= 1
        view.state, view.at = before
        view.silent = why

    def answered(
        self, which: int, at: int, answer: int | Sequence[int] | Exception, now: int, *, gives_way: bool, joins: bool
    ) -> None:
        """Record the reply to the request that was sent at ``at``.

        ``answer`` is a stamp (a vote), a refusal, or an exception if no usable reply came.
        """
        view = self.views[which]
        view.pending -= 1
        if isinstance(answer, Exception):
            self._is_silent(view, at, answer, gives_way)
            return
        view.silent = None
        doubted, view.doubted = view.doubted, False
        view.kept |= joins or isinstance(answer, int)
        self.newest_stamp = max(self.newest_stamp, answer if isinstance(answer, int) else answer[2])
        if (at, 0) < view.at or (view.state is YIELDS and not gives_way):
            return  # a newer statement is known, or the server may still execute a request to give way
        view.at = (at, 0)
        if isinstance(answer, int):
            self._votes(view, at + self.ttl, answer)
            if doubted:
                self.hinted(which)
                self.look = True
            return
        left, rank, view.stamp = answer
        view.state = WAITS if joins else OUT
        # Nothing is pushed when a lease expires. So the first three waiters ask again after that time, 20 ms apart.
        view.ends = now + 1000 * left + 2000 + 20_000 * rank if left >= 0 and 0 <= rank < 3 else None

    def _is_silent(self, view: ServerView, at: int, answer: Exception, gives_way: bool) -> None:
        view.silent = answer
        if not isinstance(answer, BackendRejected) and getattr(answer, "unknown", True):
            view.unsure = True  # the server may still execute the request, so YIELDS remains until the release
        elif gives_way and view.at == (at, 0):
            view.state = OUT  # the request was not executed; the next reply shows the claim's state

    def pushed(self, which: int, at: int, valid_for: int, stamp: int) -> bool:
        """Record the push by which the server handed the name to the claim.

        Returns False if the push does not count, for example because a newer statement of the server is known.
        """
        view = self.views[which]
        if (at, 1) <= view.at or not view.touched or self.leaving or valid_for > self.ttl:
            return False
        view.at, view.kept = (at, 1), True
        self.newest_stamp = max(self.newest_stamp, stamp)
        self._votes(view, at + valid_for, stamp)
        return True

    def hinted(self, which: int) -> None:
        """Record a hint of this server. Another claim may have taken the name there."""
        view = self.views[which]
        view.doubted = view.pending > 0  # the reply under way may be older or newer than the hint
        if view.state is VOTES:
            view.hinted_at = view.at
        if view.state in (VOTES, WAITS):
            view.state = OUT

    def gone(self, which: int, now: int) -> None:
        """Record the server's report that the claim does not hold the name there."""
        view = self.views[which]
        view.watched = False
        view.lost_at = now
        self.hinted(which)
        view.hinted_at = None

    def renews(self, which: int, at: int) -> None:
        """Record that a renewal is being sent. The server may then keep the lease for another ttl."""
        view = self.views[which]
        view.asked = max(view.asked, at)

    def renewed(self, which: int, at: int, ours: bool) -> bool:
        """Record the reply to the renewal that was sent at ``at``. Return whether the server's vote lasts at least one
        ttl, counted from ``at``.

        If a newer reply has overtaken this one, the renewal counts if both confirm the lease.
        """
        view = self.views[which]
        if (at, 0) >= view.at and view.state is not YIELDS:
            view.at = (at, 0)
            if ours:
                self._votes(view, at + self.ttl, view.stamp if view.state is VOTES else 0)
            elif view.state is VOTES:
                view.state = OUT
        return ours and view.state is VOTES and view.until >= at + self.ttl

    def _votes(self, view: ServerView, until: int, stamp: int) -> None:
        view.state, view.until, view.stamp = VOTES, until, stamp

    # ---- conclusions

    def votes(self, now: int) -> list[ServerView]:
        """Return the votes that count at this time."""
        return [
            view
            for view, server in zip(self.views, self._servers, strict=True)
            if view.state is VOTES and now < view.until and now >= 1e6 * server.counts_from
        ]

    def proof(self, now: int) -> Proof | None:
        """Return the majority that votes for the claim with one stamp, or None."""
        votes = self.votes(now)
        if len(votes) < self.need:
            return None
        stamps = [vote.stamp for vote in votes]
        stamp = max(stamps, key=stamps.count)
        # A majority is valid until the first of its votes ends. So choose the votes that end last.
        ends = sorted([(vote.until, vote.at[0]) for vote in votes if vote.stamp == stamp], reverse=True)
        if len(ends) < self.need:
            return None
        until, sent_at = ends[self.need - 1]
        return Proof(stamp, sent_at, until - sent_at)

    def lacks_majority(self, now: int, window: int) -> bool:
        """Return whether a holder has lost the name.

        When an operator takes the name away from one server after the other, a server may meanwhile vote for the claim
        again. So no vote counts for ``window`` µs after its server has reported the loss.
        """
        keep = sum(view.keeps and now < view.until and now - view.lost_at >= window for view in self.views)
        return keep < self.need

    def spent(self) -> bool:
        """Return whether the kernel must end this claim and continue with a new one.

        A request without a reply can be cancelled only together with the claim. Until then the claim cannot give way at
        that server, and all claims might wait for each other.
        """
        return any(view.unsure and view.state in (VOTES, YIELDS) for view in self.views)

    def anywhere(self) -> bool:
        """Return whether any server may have an entry of the claim."""
        return any(view.touched for view in self.views)

    def pending(self) -> int:
        """Return how many servers have a request under way."""
        return sum([view.pending > 0 for view in self.views])

    def answers(self, now: int) -> int:
        """Return how many servers have replied to their newest request, without those that do not count (see
        `Guarded`)."""
        return sum(
            not view.pending and view.silent is None and view.at != (0, 0) and now >= 1e6 * server.counts_from
            for view, server in zip(self.views, self._servers, strict=True)
        )

    def taken(self) -> bool:
        """Return whether a majority of servers refused with the same stamp. Then another claim holds the name."""
        named = Counter(
            view.stamp for view in self.views if view.state in (OUT, WAITS) and view.silent is None and view.at[0]
        )
        return max(named.values(), default=0) >= self.need

    def stays(self, which: int, now: int) -> bool:
        """Return whether this server may still have an entry of a claim that was given up.

        A server that has confirmed the release has no entry. Without a confirmation, the server's entries end with the
        ttl, because nobody renews the claim. A request without a reply needs more time, because the server may execute
        it late.
        """
        view = self.views[which]
        if view.released is not None:
            return False
        if view.unsure or view.pending:
            return now < view.asked + max(LATE, 2 * self.ttl) + LATE
        return view.touched and now < view.asked + self.ttl + ENDS_WITHIN

    def was_ours(self) -> bool | None:
        """Return whether a majority confirmed that it kept the name for the claim until the release.

        Returns None until enough servers have replied to decide.
        """
        if sum([view.released is True for view in self.views]) >= self.need:
            return True
        no = [(view.released is False and not view.lost_release) or not view.touched for view in self.views]
        return False if sum(no) > len(self.views) - self.need else None
