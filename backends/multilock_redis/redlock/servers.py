"""The servers, as what blocks knows them: subscriptions, watches, and what operators ask.

Each server is asked on a thread of its own, so that several are asked at once. Locks are not taken this way (`fan`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from multilock import BackendRejected, BackendUnavailable, LossReason, MultilockError, system
from multilock.backend import Claim, Granted, Notices, start_worker
from multilock.telling import logger
from multilock_redis.keys import Keyspace
from multilock_redis.node import Node
from multilock_redis.redlock.fan import Link
from multilock_redis.redlock.guard import Guarded
from multilock_redis.redlock.place import majority_of

__all__ = ["LEAST_LIMIT", "Ear", "Servers", "limit", "silence"]

Said = TypeVar("Said")

LEAST_LIMIT = 0.25  # seconds for one request to one server, however short the lease
BRIEFLY = 0.5  # seconds at least for the answers that come after a majority's, of what operators ask
LISTEN_WITHIN = 3.0  # seconds for one subscription, connecting included
LISTEN_AGAIN = 1.0  # seconds between subscriptions to a server that could not be subscribed to


def limit(claim: Claim, within: float) -> float:
    """Seconds for one request to one server: one that is silent must not use up the time of the others' votes."""
    return min(within, max(LEAST_LIMIT, claim.ttl / 10))


def silence(
    scheme: str, servers: int, silences: Sequence[Exception], what: str
) -> BackendUnavailable | BackendRejected:
    """What is raised where no majority answers: refused, if so many refuse that asking again cannot help."""
    said = "; ".join(dict.fromkeys(map(str, silences))) or "no answer in time"
    message = f"too few of {servers} servers {what}: {said}"
    for each in silences:
        if not isinstance(each, (BackendUnavailable, BackendRejected)):
            logger.error("%s: %s", scheme, each, exc_info=each)
    failure: BackendUnavailable | BackendRejected
    refusals = [each for each in silences if isinstance(each, BackendRejected)]
    if len(refusals) > servers - majority_of(servers):
        failure = BackendRejected(message, backend=scheme)
    else:
        unknown = any(getattr(each, "unknown", True) for each in silences if each not in refusals)
        failure = BackendUnavailable(message, unknown=unknown, backend=scheme)
    causes = (each.__cause__ if isinstance(each, MultilockError) else each for each in silences)
    failure.__cause__ = next(filter(None, causes), None)  # what the message says need not be told twice
    return failure


class Hears(Protocol):
    """Who counts what the servers push: `Rounds`."""

    def pushed(self, which: int, claim_id: str, granted: Granted) -> None: ...

    def hinted(self, which: int, claim_id: str) -> None: ...

    def gone(self, which: int, claim_id: str, reason: LossReason, message: str) -> None: ...


class Ear:
    """The kernel's `Notices`, as one server's listener sees them: what it pushes is counted before the kernel hears."""

    def __init__(self, which: int, notices: Notices, hears: Hears) -> None:
        self._which = which
        self._notices = notices
        self._hears = hears
        self.client = notices.client
        self.now = notices.now

    def wake(self, claim_id: str | None) -> None:
        if claim_id is None:
            self._notices.wake(None)
        else:
            self._hears.hinted(self._which, claim_id)

    def granted(self, claim_id: str, granted: Granted) -> None:
        self._hears.pushed(self._which, claim_id, granted)

    def gone(self, claim_id: str, reason: LossReason, message: str) -> None:
        self._hears.gone(self._which, claim_id, reason, message)

    def changed(self, name: str | None) -> None:
        self._notices.changed(name)  # each: the last of a majority is not known to be the last

    def pushes(self, connection: str, trouble: str | None, *, refused: bool = False) -> None:
        self._notices.pushes(connection, trouble, refused=refused)

    # No server of this kind has sessions.

    def group(self, group: Hashable, ttl: float, renew_every: float) -> None:
        raise NotImplementedError

    def shortened(self, group: Hashable, ttl: float, valid_until: float, renew_every: float) -> None:
        raise NotImplementedError

    def group_gone(self, group: Hashable, message: str) -> None:
        raise NotImplementedError

    def silent(self, group: Hashable) -> None:
        raise NotImplementedError


class Servers:
    def __init__(
        self, scheme: str, endpoints: Sequence[Guarded], keys: Keyspace, notices: Notices, hears: Hears
    ) -> None:
        """No I/O. Made anew in a forked child."""
        self.scheme = scheme
        self.endpoints = endpoints
        self.now = notices.now
        self.need = majority_of(len(endpoints))
        self.nodes = [Node(each, keys, Ear(which, notices, hears)) for which, each in enumerate(endpoints)]
        self.links = [Link(each, notices.now, self._back) for each in endpoints]
        self._notices = notices
        self._changed = system.Condition()  # more servers push
        self._listen_at = [0.0] * len(endpoints)

    def _back(self) -> None:
        self._notices.wake(None)  # whoever had no answer asks at once

    def counts(self, which: int) -> bool:
        """Whether its word counts: see `Guarded`."""
        return self.now() >= self.endpoints[which].counts_from

    def restarted(self) -> str:
        """Which servers have restarted, if a majority does not count; else empty."""
        now = self.now()
        left = sorted(each.counts_from - now for each in self.endpoints if each.counts_from > now)
        if len(left) <= len(self.nodes) - self.need:
            return ""
        enough = left[len(left) - (len(self.nodes) - self.need) - 1]
        return (
            f"{len(left)} of {len(self.nodes)} servers have restarted and may have forgotten whom they let in: "
            f"a majority counts again in {math.ceil(enough)} s (restart_guard={self.endpoints[0].guard:g})"
        )

    def ask(
        self, question: Callable[[Node, float], Said], until: float, *, brief: bool = False
    ) -> Iterator[tuple[int, Said | Exception]]:
        """Ask all servers at once, and yield what each says as it comes: BackendUnavailable if it is late.

        With ``brief``, a majority that has answered waits for the others only for a moment.
        """
        began, answered = self.now(), 0
        answers: system.SimpleQueue[tuple[int, Any]] = system.SimpleQueue()
        missing = dict.fromkeys(range(len(self.nodes)))
        for which in missing:
            self.on(which, question, until, answers)
        while missing:
            try:
                which, said = answers.get(timeout=max(0.0, until - self.now()))
            except system.Empty:
                break
            missing.pop(which)
            yield which, said
            answered += not isinstance(said, Exception)
            if brief and answered == self.need:
                now = self.now()
                until = min(until, now + max(BRIEFLY, 3 * (now - began)))
        for which in missing:
            yield which, BackendUnavailable(f"{self.endpoints[which].name} did not answer in time", unknown=True)

    def ask_most(
        self, question: Callable[[Node, float], Said], within: float, what: str, *, everybody: bool = False
    ) -> dict[int, Said]:
        """Return what a majority says, at least; with ``everybody``, what each server says that answers."""
        said: dict[int, Said] = {}
        silences: list[Exception] = []
        for which, answer in self.ask(question, self.now() + within, brief=True):
            if isinstance(answer, Exception):
                silences.append(answer)
            else:
                said[which] = answer
            if not everybody and len(said) >= self.need:
                break
        if len(silences) > len(self.nodes) - self.need:
            raise silence(self.scheme, len(self.nodes), silences, what)
        return said

    def on(
        self,
        which: int,
        question: Callable[[Node, float], Any],
        until: float | None = None,
        answers: system.SimpleQueue[tuple[int, Any]] | None = None,
    ) -> None:
        """Ask one server on a thread of its own; nobody need wait for the answer."""
        until = self.now() + LISTEN_WITHIN if until is None else until
        node = self.nodes[which]

        def ask() -> None:
            try:
                said: Any = question(node, max(0.001, until - self.now()))
            except Exception as error:
                said = error
            if answers is not None:
                answers.put((which, said))

        start_worker(ask, "multilock-redlock-ask", once=True, or_here=True)

    # ---- subscriptions

    def listening(self) -> bool:
        """Whether a majority can push, or has refused a subscription."""
        return sum(node.listener.listening for node in self.nodes) >= self.need

    def listen(self, within: float = 0.0) -> None:
        """Subscribe to the servers that do not push yet, and wait for a majority. A subscription has its own time,
        since the caller may have little left: a waiter that cannot be told in time asks by its timer."""
        now = self.now()
        for which, node in enumerate(self.nodes):
            with self._changed:
                again = not node.listener.listening and now >= self._listen_at[which]
                if again:
                    self._listen_at[which] = now + LISTEN_WITHIN + LISTEN_AGAIN
            if again:
                self.on(which, self._listen, now + LISTEN_WITHIN)
        with self._changed:
            self._changed.wait_for(self.listening, within)

    def _listen(self, node: Node, within: float) -> None:
        node.listener.listen(within)
        with self._changed:
            self._changed.notify_all()
        self._notices.wake(None)  # whoever joined meanwhile was not told to be listening

    def close(self) -> None:
        for link in self.links:
            link.close()
        for node in self.nodes:
            node.close()
