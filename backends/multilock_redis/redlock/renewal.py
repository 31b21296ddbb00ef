"""One renewal of all that is held: one request to each server, and for each lease what a majority says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from multilock import BackendUnavailable, system
from multilock.backend import Granted, Held
from multilock_redis.node import Node
from multilock_redis.redlock.places import Places
from multilock_redis.redlock.quorum import Verdict
from multilock_redis.redlock.servers import Answers, Servers, limit
from multilock_redis.redlock.standing import GROUP, Standing
from multilock_redis.redlock.watching import Watching

__all__ = ["Renewal"]


class Renewal:
    """``top_up`` has a server asked that has lost what a majority keeps."""

    def __init__(
        self,
        servers: Servers,
        places: Places,
        watching: Watching,
        held: Sequence[Held],
        top_up: Callable[[Standing, int], None],
    ) -> None:
        self._servers = servers
        self._places = places
        self._watching = watching
        self._held = held
        self._top_up = top_up
        self._answers = Answers()
        self._lock = system.Lock()
        self._since = servers.now()
        self._kept: set[int] | None = None  # of what is held, once that is decided

    def ask(self, within: float) -> list[Granted | BackendUnavailable | None]:
        shortest = min(self._held, key=lambda each: each[0].ttl)[0]
        until = self._servers.now() + limit(shortest, within)
        for which, crew in enumerate(self._servers.keepers):
            crew.ask(partial(_renew, self._held), until, partial(self._told, which))
        return self._decided(until)

    def _told(self, which: int, said: Any) -> None:
        """Also when nobody waits for it any more."""
        with self._lock:
            kept = self._kept
            if kept is None:
                self._answers.tell(which, said)
        if isinstance(said, BackendUnavailable) and said.unknown:
            for claim, _ in self._held:
                if standing := self._places.get(claim.id):
                    standing.may_keep(which, self._servers.now())
        if kept is not None and not isinstance(said, Exception):
            self._look_after(which, said, kept)

    def _decided(self, until: float) -> list[Granted | BackendUnavailable | None]:
        servers, quorum = self._servers, self._servers.quorum
        votes: list[list[Granted]] = [[] for _ in self._held]
        gone = [0] * len(self._held)
        silent = [0] * len(self._held)
        silences: list[Exception] = []
        answered: list[tuple[int, Sequence[Granted | None]]] = []

        def is_open(i: int) -> bool:
            return quorum.kept(len(votes[i]), gone[i], silent[i]) is Verdict.OPEN

        while any(map(is_open, range(len(self._held)))):
            answer = self._answers.get(until - servers.now())
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
                elif self._proves(i, which, each):
                    votes[i].append(each)
                else:
                    silent[i] += 1
                    uncounted = True
            if uncounted:
                silences.append(BackendUnavailable(f"what {servers.name_of(which)} says does not count yet"))
        renewed: list[Granted | BackendUnavailable | None] = []
        for i in range(len(self._held)):
            proof = self._proof(i, votes[i])
            if proof is not None or quorum.lost(gone[i] + self._lacking(i, {which for which, _ in answered})):
                renewed.append(proof)
            else:  # a server that refuses now may have kept it
                failure = servers.silence(silences, "renew it")
                silence = BackendUnavailable(str(failure), backend=failure.backend)
                silence.__cause__ = failure
                renewed.append(silence)
        kept = {i for i, each in enumerate(renewed) if isinstance(each, Granted)}
        with self._lock:
            self._kept = kept
        while answer := self._answers.get(0):
            if not isinstance(answer[2], Exception):
                answered.append((answer[0], answer[2]))
        for which, said in answered:
            self._look_after(which, said, kept)
        return renewed

    def _proves(self, i: int, which: int, renewed: Granted) -> bool:
        """Whether this server's renewal counts."""
        standing = self._places.get(self._held[i][0].id)
        return self._servers.counts(which) and (standing is None or standing.at[which].vouches(renewed.sent_at))

    def _lacking(self, i: int, answered: set[int]) -> int:
        """How many of the servers that have not answered do not keep this lease, as far as is known."""
        standing, now = self._places.get(self._held[i][0].id), self._servers.now()
        if standing is None:
            return 0
        with standing.lock:
            return sum(which not in answered and at.lacks(now, 0.0) for which, at in enumerate(standing.at))

    def _proof(self, i: int, votes: Sequence[Granted]) -> Granted | None:
        claim, granted = self._held[i]
        proof = self._servers.quorum.proof(votes)
        if proof is None:
            return None
        if standing := self._places.get(claim.id):
            standing.short = False
        return proof._replace(token=granted.token, group=GROUP, key=claim.owner)

    def _look_after(self, which: int, said: Sequence[Granted | None], kept: set[int]) -> None:
        for i, each in enumerate(said):
            if standing := self._places.get(self._held[i][0].id):
                standing.is_told(which, each, self._since, self._servers.now())
                if standing.at[which].gone and i in kept:
                    self._top_up(standing, which)
        self._watching.again(which, [self._held[i] for i, each in enumerate(said) if each is not None])


def _renew(held: Sequence[Held], node: Node, within: float) -> Sequence[Granted | None]:
    answers: list[Granted | None] = []
    for answer in node.listener.renew(held, within):
        if isinstance(answer, BackendUnavailable):
            raise answer
        answers.append(answer)
    return answers
