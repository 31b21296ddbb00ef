"""The renewal of held locks: the reply to one write proves that their session lives.

A ``renew=False`` lock is in the same session, which outlives the ttl of the lock. So this module also deletes the node
of such a lock at the end of its ttl, and computes how long its grant is valid.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from itertools import islice

from multilock import BackendRejected, BackendUnavailable, LossReason
from multilock.backend import Claim, Granted, Held, Notices
from multilock.values import encode_value
from multilock_zookeeper.claims import ZkWaiter, ZkWaiters
from multilock_zookeeper.keys import Nodes
from multilock_zookeeper.notices import AT_ONCE, ENDED, Watcher
from multilock_zookeeper.session_validity import Session
from multilock_zookeeper.transport import Answer, Transport

__all__ = ["ZkRenewal", "granted_once"]

END_WITHIN = 1.0  # seconds that the deletion of a node may take at the end of its ttl
END_AGAIN = 1.0  # seconds until a failed deletion at the end of a ttl is repeated


class ZkRenewal:
    """The renewals of one client's locks, and the ends of the locks that are not renewed."""

    def __init__(
        self, nodes: Nodes, transport: Transport, watcher: Watcher, notices: Notices, waiters: ZkWaiters
    ) -> None:
        self._nodes = nodes
        self._transport = transport
        self._watcher = watcher
        self._notices = notices
        self._now = notices.now
        self._waiters = waiters

    def renew(self, group: Hashable, held: Sequence[Held], within: float) -> Sequence[Granted | None]:
        """Send one write to the node of one of these claims. The reply proves that the session of all these claims
        lives. Also ask for the nodes that no watch covers yet, because they may have been deleted."""
        deadline = self._now() + within
        session = self._transport.present()
        if session is None or session.number != group:
            return self._all_lost(group, held)
        self._transport.connect(deadline)
        path = str(held[0][1].key) if held else self._nodes.directory.rstrip("/") + "/!alive"
        value = encode_value(held[0][0]) if held else b""
        written = self._transport.put(path, value)
        uncovered = (str(granted.key) for _, granted in held[1:] if not self._watcher.covers(str(granted.key)))
        doubtful = [(key, self._transport.exists(key)) for key in islice(uncovered, AT_ONCE)]
        missing = set() if self._transport.ordered(written, deadline) else {path}
        if session.over:  # the write was executed in the next session
            return self._all_lost(group, held)
        session.prove(written.sent_at)
        missing |= {key for key, answer in doubtful if self._is_missing(answer, deadline)}
        return [None if granted.key in missing else self._renewed(claim, granted, session) for claim, granted in held]

    def _renewed(self, claim: Claim, granted: Granted, session: Session) -> Granted:
        if not claim.renew:
            self._lengthen(claim, granted.sent_at, session)
            return granted_once(claim, granted.sent_at, granted.token, granted.key, session)
        proof = session.validity()
        return granted._replace(
            ttl=proof.ttl, sent_at=proof.sent_at, valid_for=proof.valid_for, renew_every=proof.renew_every
        )

    def _is_missing(self, answer: Answer, deadline: float) -> bool:
        """Return whether a node that `renew` has asked for is gone.

        If no reply comes in time, the node does not count as gone, because the session lives. If the node was deleted,
        its watch finds that once it is set.
        """
        try:
            return self._transport.wait(answer, deadline) is None
        except (BackendUnavailable, BackendRejected):
            return False

    def _all_lost(self, group: Hashable, held: Sequence[Held]) -> Sequence[None]:
        self._notices.group_gone(group, ENDED)
        for claim, _ in held:
            self._notices.gone(claim.id, LossReason.SESSION_LOST, ENDED)
        return [None] * len(held)

    # ---- the deletion of a `renew=False` claim's node at the end of its ttl

    def plan_end(self, claim: Claim, waiter: ZkWaiter, when: float) -> None:
        """Plan to delete a node of a claim that is not renewed, at the end of the claim's ttl. The server would keep
        the node as long as the session."""
        with self._waiters.lock:
            if not waiter.cancelled:
                waiter.end = self._watcher.at(when, partial(self._end, claim, waiter))

    def _lengthen(self, claim: Claim, first_at: float, session: Session) -> None:
        """Restart the ttl of a ``renew=False`` lease that its holder has renewed by hand."""
        with self._waiters.lock:
            waiter = self._waiters.of.get(claim.id)
            if waiter is None or waiter.cancelled or waiter.first_at is None or first_at <= waiter.first_at:
                return
            waiter.first_at, end = first_at, waiter.end
        if end is not None:
            self._watcher.not_at(end)
        self.plan_end(claim, waiter, first_at + min(claim.ttl, session.ttl))

    def _end(self, claim: Claim, waiter: ZkWaiter) -> None:
        if waiter.cancelled or waiter.path is None or not self._transport.is_present(waiter.session):
            return
        try:
            self._transport.deleted(waiter.path, self._now() + END_WITHIN)
        except BackendUnavailable:
            self.plan_end(claim, waiter, self._now() + END_AGAIN)


def granted_once(claim: Claim, first_at: float, token: int | None, path: Hashable, session: Session) -> Granted:
    """Return the grant of a ``renew=False`` claim.

    The ttl of the claim counts from the time at which it became a holder or was renewed by hand, not from the time at
    which it joined. The grant ends no later than the session's proof.
    """
    proof = session.validity()
    ttl = min(claim.ttl, proof.ttl)
    left = min(ttl, proof.until - first_at)
    return Granted(token, ttl, first_at, left, proof.renew_every, session.number, path)
