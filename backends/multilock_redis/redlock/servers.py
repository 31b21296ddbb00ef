"""Several servers, all asked at once: by threads of their own, so that nobody waits for one that is silent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from multilock import BackendRejected, BackendUnavailable, system
from multilock.backend import Claim, Notices
from multilock.telling import logger
from multilock_redis.keys import Keyspace
from multilock_redis.node import Node
from multilock_redis.redlock.crew import Crew
from multilock_redis.redlock.guard import Guarded
from multilock_redis.redlock.quorum import Quorum

__all__ = ["LEAST_LIMIT", "Answers", "Servers", "limit"]

Said = TypeVar("Said")

LEAST_LIMIT = 0.25  # seconds for one request to one server, connecting included, however short the lease


def limit(claim: Claim, within: float) -> float:
    """Seconds for one request to one server: one that is silent must not use up the time of the others' votes."""
    return min(within, max(LEAST_LIMIT, claim.ttl / 10))


class Answers:
    """What the crews tell, for the one who waits: which server, to its how manieth question, what."""

    def __init__(self) -> None:
        self._queue: system.SimpleQueue[tuple[int, int, Any]] = system.SimpleQueue()

    def put(self, which: int, number: int, said: Any) -> None:
        self._queue.put((which, number, said))

    def tell(self, which: int, said: Any) -> None:
        self.put(which, 0, said)

    def get(self, within: float) -> tuple[int, int, Any] | None:
        try:
            return self._queue.get(timeout=max(0.0, within))
        except system.Empty:
            return None


class Servers:
    def __init__(
        self,
        scheme: str,
        endpoints: Sequence[Guarded],
        keys: Keyspace,
        now: Callable[[], float],
        ear_of: Callable[[int], Notices],
        back: Callable[[], None],
    ) -> None:
        """No I/O. Made anew in a forked child. ``ear_of``: who is told what that server pushes; ``back`` is called when
        one that was down has answered."""
        self._scheme = scheme
        self.endpoints = endpoints
        self.now = now
        self.quorum = Quorum(len(endpoints))
        self.nodes = [Node(endpoint, keys, ear_of(which)) for which, endpoint in enumerate(endpoints)]

        def is_back(which: int) -> None:
            self.crews[which].is_up()
            self.keepers[which].is_up()
            back()

        named = list(zip(self.nodes, endpoints, strict=True))
        self.crews = [Crew(node, each.name, now, partial(is_back, which)) for which, (node, each) in enumerate(named)]
        # What is held is kept and given back, however many wait: their questions are not before these.
        self.keepers = [Crew(node, each.name, now, partial(is_back, which)) for which, (node, each) in enumerate(named)]

    def counts(self, which: int) -> bool:
        """Whether its word counts: see `Guarded`."""
        return self.now() >= self.endpoints[which].counts_from

    def name_of(self, which: int) -> str:
        return self.endpoints[which].name

    def ask(self, question: Callable[[Node, float], Said], until: float) -> Iterator[tuple[int, Said | Exception]]:
        """All at once; what each said, as it comes. One that is late is BackendUnavailable."""
        answers = Answers()
        missing = dict.fromkeys(range(self.quorum.nodes))
        for which, crew in enumerate(self.crews):
            crew.ask(question, until, partial(answers.tell, which))
        while missing:
            answer = answers.get(until - self.now())
            if answer is None:
                break
            which, _, said = answer
            missing.pop(which)
            yield which, said
        for which in missing:
            yield which, BackendUnavailable(f"{self.name_of(which)} did not answer in time", unknown=True)

    def ask_most(
        self, question: Callable[[Node, float], Said], within: float, what: str, *, everybody: bool = False
    ) -> dict[int, Said]:
        """What a majority says, at least; with ``everybody`` each that answers."""
        said: dict[int, Said] = {}
        silences: list[Exception] = []
        for which, answer in self.ask(question, self.now() + within):
            if isinstance(answer, Exception):
                silences.append(answer)
            else:
                said[which] = answer
            if not everybody and len(said) >= self.quorum.needed:
                break
        if len(silences) > self.quorum.spare:
            raise self.silence(silences, what)
        return said

    def silence(self, silences: Sequence[Exception], what: str) -> BackendUnavailable | BackendRejected:
        """What is raised where no majority answers: refused, if so many refuse that asking again cannot help."""
        said = "; ".join(str(silence) for silence in silences) or "no answer in time"
        message = f"too few of {self.quorum.nodes} servers {what}: {said}"
        refusals = [silence for silence in silences if isinstance(silence, BackendRejected)]
        for silence in silences:
            if not isinstance(silence, (BackendUnavailable, BackendRejected)):
                logger.error("%s: %s", self._scheme, silence, exc_info=silence)
        failure: BackendUnavailable | BackendRejected
        if len(refusals) > self.quorum.spare:
            failure = BackendRejected(message, backend=self._scheme)
        else:
            unknown = any(getattr(silence, "unknown", True) for silence in silences if silence not in refusals)
            failure = BackendUnavailable(message, unknown=unknown, backend=self._scheme)
        failure.__cause__ = next(iter(silences), None)
        return failure

    def close(self) -> None:
        for crew in [*self.crews, *self.keepers]:
            crew.close()
        for node in self.nodes:
            node.close()
