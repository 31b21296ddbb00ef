"""The token of a lease: one more than those that came with the votes, kept by a majority before anybody sees it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from multilock import BackendUnavailable, system
from multilock.backend import Granted
from multilock_redis.node import Node
from multilock_redis.redlock.quorum import Verdict
from multilock_redis.redlock.servers import Answers, Servers, limit
from multilock_redis.redlock.standing import Standing

__all__ = ["Agreement", "agree"]


def agree(servers: Servers, standing: Standing, deadline: float) -> Granted | None:
    """The proof, with a token that a majority keeps. None: it took longer than the votes are good for."""
    now, quorum = servers.now, servers.quorum
    votes = standing.votes(now())
    if standing.token and now() < standing.until:
        proof = quorum.proof(standing.votes_of(standing.token, now()))
        if proof is not None:  # the name was ours all the time
            return proof._replace(token=standing.token)
    highest = max(vote.token or 0 for vote in votes)
    while (proof := quorum.proof(standing.votes(now()))) is not None:
        token = highest + 1
        yes, no = 0, 0
        silences: list[Exception] = []
        start = now()
        until = min(deadline, start + limit(standing.claim, deadline - start))
        answers = Answers()
        _ask(servers, token, standing.claim.name, answers.tell, until)
        while quorum.asked(yes, no, len(silences)) is Verdict.OPEN:
            answer = answers.get(until - now())
            said = answer[2] if answer else BackendUnavailable("no answer in time", unknown=True)
            if isinstance(said, Exception):
                silences.append(said)
            else:
                kept_it, present = said
                highest = max(highest, present)
                yes, no = yes + kept_it, no + (not kept_it)
        if yes >= quorum.needed:
            return proof._replace(token=token)
        if not no or now() >= deadline:
            raise servers.silence(silences, "keep its token")
    return None


class Agreement:
    """The token of what pushes have proved: nobody waits for it."""

    def __init__(
        self, servers: Servers, standing: Standing, proof: Granted, tell: Callable[[Standing, Granted | None], None]
    ) -> None:
        """``tell`` gets the proof, on a thread of a crew; None: no majority has kept its token."""
        self._servers = servers
        self._standing = standing
        self._proof = proof
        self._tell = tell
        self._lock = system.Lock()
        self._yes = self._no = self._silent = 0
        self._over = False

    def ask(self) -> None:
        proof = self._proof
        until = proof.sent_at + proof.valid_for
        _ask(self._servers, proof.token or 0, self._standing.claim.name, self._told, until)

    def _told(self, which: int, said: Any) -> None:
        with self._lock:
            if isinstance(said, Exception):
                self._silent += 1
            elif said[0]:
                self._yes += 1
            else:
                self._no += 1
            verdict = self._servers.quorum.asked(self._yes, self._no, self._silent)
            if self._over or verdict is Verdict.OPEN:
                return
            self._over = True
        self._tell(self._standing, self._proof if verdict is Verdict.YES else None)


def _ask(servers: Servers, token: int, name: str, tell: Callable[[int, Any], None], until: float) -> None:
    """Have every server keep this token; one that does not count says nothing."""

    def question(node: Node, within: float) -> tuple[bool, int]:
        return node.recipe.agree(name, token, within)

    def told(which: int, said: Any) -> None:
        if not isinstance(said, Exception) and not servers.counts(which):
            said = BackendUnavailable(f"{servers.name_of(which)} has restarted just now")
        tell(which, said)

    for which, crew in enumerate(servers.crews):
        crew.ask(question, until, partial(told, which))
