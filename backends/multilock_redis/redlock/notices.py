"""Count the grants, hints and losses that the servers push for each claim, and ask the servers to report losses.

A hint is a notification that is not a grant. A watch is a request to a server to report the loss of a lease. The kernel
is notified of a loss once a majority no longer keeps the lease.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from multilock import LossReason
from multilock.backend import Granted, Held, Notices
from multilock_redis.node import Node
from multilock_redis.redlock.votes import Evidence

if TYPE_CHECKING:
    from multilock_redis.redlock.acquire_release import Rounds

__all__ = ["MajorityNotices", "ServerNotices"]


class MajorityNotices:
    """The pushes of all servers about the claims of one client, and the requests for them."""

    def __init__(self, rounds: Rounds, notices: Notices) -> None:
        self._rounds = rounds
        self._notices = notices

    # ---- pushes: see `ServerNotices`

    def pushed(self, which: int, claim_id: str, granted: Granted) -> None:
        """Count the push by which a server handed the name to this claim."""
        if evidence := self._rounds.claims.get(claim_id):
            at, valid_for = round(granted.sent_at * 1e6), round(granted.valid_for * 1e6)
            with evidence.lock:
                if not evidence.pushed(which, at, valid_for, granted.token or 0):
                    return
            if not evidence.asking:
                self._rounds.evaluate(evidence)

    def hinted(self, which: int, claim_id: str) -> None:
        """Let the claim ask again, because a server has sent it a hint."""
        if evidence := self._rounds.claims.get(claim_id):
            with evidence.lock:
                if evidence.leaving:
                    return
                evidence.hinted(which)
                if evidence.held:  # the kernel then drops a grant that it has not used yet
                    self._notices.wake(claim_id)
                else:
                    evidence.look = True
                    self._rounds.clerk.soon(evidence, self._rounds.now())

    def gone(self, which: int, claim_id: str, reason: LossReason, message: str) -> None:
        """Count a server's report of a loss, and notify the kernel if the claim has lost its majority."""
        if evidence := self._rounds.claims.get(claim_id):
            with evidence.lock:
                if evidence.leaving:  # the claim's own release ended the lease
                    return
                evidence.gone(which, int(self._rounds.now() * 1e6))
                lost = self._rounds.is_lost(evidence) and not evidence.told_lost
                evidence.told_lost |= lost
            if lost:
                self._notices.gone(claim_id, reason, f"{message}, and no majority keeps it")

    # ---- watches

    def watch(self, held: Sequence[Held], within: float) -> None:
        """Ask all servers to report the loss of these leases. Return as soon as a majority has replied."""
        claims = [evidence for claim, _ in held if (evidence := self._rounds.claims.get(claim.id))]
        for evidence in claims:
            evidence.watched = True

        def watch(node: Node, within: float) -> None:
            self._watch(self._rounds.servers.nodes.index(node), claims, node, within)

        self._rounds.servers.ask_most(watch, within, "watch it")

    def watch_at(self, which: int, claims: list[Evidence]) -> None:
        """Ask this server to report the loss of the claims that it does not watch yet, without waiting for the reply.

        If the request fails, the next renewal repeats it.
        """
        if missing := [each for each in claims if each.watched and not each.views[which].watched]:

            def watch(node: Node, within: float) -> None:
                self._watch(which, missing, node, within)

            self._rounds.servers.on(which, watch)

    def _watch(self, which: int, claims: list[Evidence], node: Node, within: float) -> None:
        wanted: list[tuple[Evidence, Held]] = []
        for each in claims:
            if each.granted and not each.leaving:
                each.views[which].watched = True  # set before the request, because the server may report a loss at once
                wanted.append((each, (each.claim, each.granted)))
        if not wanted:
            return
        try:
            node.listener.watch([held for _, held in wanted], within)
        except BaseException:
            for each, _ in wanted:
                each.views[which].watched = False
            raise


class ServerNotices:
    """The kernel's `Notices` for one server's listener. `MajorityNotices` counts each push before it notifies the
    kernel."""

    def __init__(self, which: int, notices: Notices, pushes: MajorityNotices) -> None:
        self._which = which
        self._notices = notices
        self._pushes = pushes
        self.client = notices.client
        self.now = notices.now

    def wake(self, claim_id: str | None) -> None:
        if claim_id is None:
            self._notices.wake(None)
        else:
            self._pushes.hinted(self._which, claim_id)

    def granted(self, claim_id: str, granted: Granted) -> None:
        self._pushes.pushed(self._which, claim_id, granted)

    def gone(self, claim_id: str, reason: LossReason, message: str) -> None:
        self._pushes.gone(self._which, claim_id, reason, message)

    def changed(self, name: str | None) -> None:
        self._notices.changed(name)  # any server's change may complete a majority

    def pushes(self, connection: str, trouble: str | None, *, refused: bool = False) -> None:
        self._notices.pushes(connection, trouble, refused=refused)

    # Redis has no sessions, so the listener never calls these.

    def group(self, group: Hashable, ttl: float, renew_every: float) -> None:
        raise NotImplementedError

    def shortened(self, group: Hashable, ttl: float, valid_until: float, renew_every: float) -> None:
        raise NotImplementedError

    def group_gone(self, group: Hashable, message: str) -> None:
        raise NotImplementedError

    def silent(self, group: Hashable) -> None:
        raise NotImplementedError
