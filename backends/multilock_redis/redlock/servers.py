"""The requests to the servers that may block a thread: subscriptions, watches, and the requests of operators.

Each server is asked on its own thread, so that all are asked at once. Requests for locks use `connections` instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from multilock import BackendRejected, BackendUnavailable, MultilockError, system
from multilock.backend import Claim, Notices, start_worker
from multilock.log_thread import logger
from multilock_redis.keys import Keyspace
from multilock_redis.node import Node
from multilock_redis.redlock.connections import Link
from multilock_redis.redlock.notices import MajorityNotices, ServerNotices
from multilock_redis.redlock.restarts import Guarded
from multilock_redis.redlock.votes import majority_of

__all__ = ["LEAST_LIMIT", "Servers", "limit"]

Said = TypeVar("Said")

LEAST_LIMIT = 0.25  # the least number of seconds that a server gets for one request, even if the lease is short
# The least number of seconds to wait for the other servers after a majority has replied to an operator's request.
BRIEFLY = 0.5
LISTEN_WITHIN = 3.0  # seconds that one subscription may take, connecting included
LISTEN_AGAIN = 1.0  # seconds from the end of a failed subscription to the next one


def limit(claim: Claim, within: float) -> float:
    """Return how many seconds one request to one server may take.

    A server that does not reply must not use up the validity of the other servers' votes.
    """
    return min(within, max(LEAST_LIMIT, claim.ttl / 10))


class Servers:
    """All servers of one client."""

    def __init__(
        self, scheme: str, endpoints: Sequence[Guarded], keys: Keyspace, notices: Notices, pushes: MajorityNotices
    ) -> None:
        """Do no I/O. A forked child makes a new object."""
        self.scheme = scheme
        self.endpoints = endpoints
        self.now = notices.now
        self.need = majority_of(len(endpoints))
        self.nodes = [Node(each, keys, ServerNotices(which, notices, pushes)) for which, each in enumerate(endpoints)]
        self.links = [Link(each, notices.now, self._back) for each in endpoints]
        self._notices = notices
        self._changed = system.Condition()  # notified after each successful subscription
        self._listen_at = [0.0] * len(endpoints)

    def _back(self) -> None:
        self._notices.wake(None)  # every waiter asks again, since it may lack this server's vote

    def counts(self, which: int) -> bool:
        """Return whether the replies of this server count (see `Guarded`)."""
        return self.now() >= self.endpoints[which].counts_from

    def restarted(self) -> str:
        """Return a message about restarted servers if fewer than a majority count, else an empty string."""
        now = self.now()
        left = sorted(each.counts_from - now for each in self.endpoints if each.counts_from > now)
        if len(left) <= len(self.nodes) - self.need:
            return ""
        enough = left[len(left) - (len(self.nodes) - self.need) - 1]
        return (
            f"{len(left)} of {len(self.nodes)} servers have restarted and may have forgotten whom they let in: "
            f"a majority counts again in {math.ceil(enough)} s (restart_guard={self.endpoints[0].guard:g})"
        )

    def silence(
        self, silences: Sequence[Exception], what: str, *, counts: bool = False
    ) -> BackendUnavailable | BackendRejected:
        """Return the error to raise if no majority replies, or with ``counts`` if too few servers count.

        The error is BackendRejected if so many servers refuse that asking again cannot help.
        """
        if counts and (restarted := self.restarted()):
            return BackendUnavailable(restarted, unknown=False, backend=self.scheme)
        silences = silences or [BackendUnavailable("the others did not answer in time", unknown=True)]
        message = f"too few of {len(self.nodes)} servers {what}: {'; '.join(dict.fromkeys(map(str, silences)))}"
        for each in silences:
            if not isinstance(each, (BackendUnavailable, BackendRejected)):
                logger.error("%s: %s", self.scheme, each, exc_info=each)
        failure: BackendUnavailable | BackendRejected
        refusals = [each for each in silences if isinstance(each, BackendRejected)]
        if len(refusals) > len(self.nodes) - self.need:
            failure = BackendRejected(message, backend=self.scheme)
        else:
            unknown = any(getattr(each, "unknown", True) for each in silences if each not in refusals)
            failure = BackendUnavailable(message, unknown=unknown, backend=self.scheme)
        causes = (each.__cause__ if isinstance(each, MultilockError) else each for each in silences)
        failure.__cause__ = next(filter(None, causes), None)  # the message already quotes all errors
        return failure

    def ask(
        self, question: Callable[[Node, float], Said], until: float, *, brief: bool = False
    ) -> Iterator[tuple[int, Said | Exception]]:
        """Ask all servers at once, and yield each reply when it arrives.

        For a late server, BackendUnavailable is yielded. If ``brief`` is True, this waits only for a moment after a
        majority has replied.
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
        """Return the replies of a majority, each under the number of its server. Raises if no majority replies.

        If ``everybody`` is True, return the replies of all servers that reply in time.
        """
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
            raise self.silence(silences, what)
        return said

    def on(
        self,
        which: int,
        question: Callable[[Node, float], Any],
        until: float | None = None,
        answers: system.SimpleQueue[tuple[int, Any]] | None = None,
    ) -> None:
        """Ask one server on its own thread. The caller need not wait for the reply."""
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
        """Return whether a majority has accepted or refused a subscription."""
        return sum([node.listener.listening for node in self.nodes]) >= self.need

    def listen(self, within: float = 0.0) -> None:
        """Subscribe to the servers that do not push yet, and wait up to ``within`` seconds for a majority.

        The subscriptions may continue for `LISTEN_WITHIN` seconds after this call.
        """
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
        # claims that joined before the subscription must ask again, because nothing notifies them
        self._notices.wake(None)

    def close(self) -> None:
        for link in self.links:
            link.close()
        for node in self.nodes:
            node.close()
