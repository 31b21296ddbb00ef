"""One renewal of all held leases: one request to each server. A majority decides about each lease."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from multilock import BackendUnavailable, system
from multilock.backend import Granted, Held
from multilock.timing import RENEWALS
from multilock_redis.redlock.acquire_release import GROUP, Rounds
from multilock_redis.redlock.connections import Lane, Owed
from multilock_redis.redlock.servers import limit
from multilock_redis.redlock.votes import OUT, WAITS, Evidence
from multilock_redis.transactions import Script

__all__ = ["Renewal"]


class Renewal:
    """One round of requests that renew the leases in ``held``."""

    def __init__(self, rounds: Rounds, held: Sequence[Held]) -> None:
        self._rounds = rounds
        self._held = held
        self._claims = [rounds.claims.get(claim.id) for claim, _ in held]
        self._lock = system.Lock()
        self._at = 0  # when the requests were sent, in µs
        self._yes = [0] * len(held)  # votes for each lease
        self._open = [0] * len(held)  # missing replies for each lease
        self._silences: list[Exception] = []
        self._decided = False

    def ask(self, within: float) -> list[Granted | BackendUnavailable | None]:
        """Send the renewals, and return one result for each lease in the order of ``held`` (see `Backend.renew`)."""
        rounds, now = self._rounds, self._rounds.now
        shortest = min(self._held, key=lambda each: each[0].ttl)[0]
        deadline = now() + within
        until = now() + limit(shortest, within)
        fan = rounds.pool.take()
        try:
            fan.ready(until)
            until = min(deadline, now() + limit(shortest, within))
            chunks = rounds.servers.nodes[0].recipe.to_renew(self._held)
            self._at = int(now() * 1e6)
            with self._lock:
                self._open = [len(fan.lanes)] * len(self._held)
            for which, lane in enumerate(fan.lanes):
                self._send(which, lane, chunks, until)
            while any(map(self._undecided, range(len(self._held)))) and (left := until - now()) > 0:
                fan.look(left)
        finally:
            rounds.give(fan)
        self._decided = True
        renewed = [self._outcome(i) for i in range(len(self._held))]
        for i, evidence in enumerate(self._claims):
            if evidence and isinstance(renewed[i], Granted):
                self._look_after(evidence)
        return renewed

    def _send(self, which: int, lane: Lane, chunks: Sequence[tuple[Script, list[int], bytes]], until: float) -> None:
        for script, places, request in chunks:
            for i in places:
                if evidence := self._claims[i]:
                    with evidence.lock:
                        evidence.renews(which, self._at)
            handle = partial(self._told, which, places)
            owed = Owed(handle, until, partial(bytes.__add__, script.load, request))
            if not lane.send(request, [owed], self._rounds.now(), max(0.0, until - self._rounds.now()) / 4):
                handle(lane.link.why)

    def _told(self, which: int, places: Sequence[int], said: Any) -> None:
        """Handle the reply of one server. The thread that reads the reply calls this, possibly after `ask` has
        returned."""
        late: list[Evidence] = []
        with self._lock:
            if isinstance(said, Exception):
                self._silences.append(said)
            for i in places:
                self._open[i] -= 1
            flags = [] if isinstance(said, Exception) else list(zip(places, said, strict=True))
        for i, flag in flags:
            if (evidence := self._claims[i]) is None:
                continue
            with evidence.lock:
                vote = evidence.renewed(which, self._at, bool(flag))
                if vote and self._rounds.servers.counts(which):
                    with self._lock:
                        self._yes[i] += 1
                if self._decided:
                    late.append(evidence)
        for evidence in late:
            self._look_after(evidence)
        if flags:
            self._rounds.pushes.watch_at(which, [e for i, flag in flags if flag and (e := self._claims[i])])

    def _undecided(self, i: int) -> bool:
        return self._yes[i] < self._rounds.need and self._open[i] > 0 and not self._is_lost(i)

    def _is_lost(self, i: int) -> bool:
        if (evidence := self._claims[i]) is None:
            return True
        with evidence.lock:
            return evidence.leaving or self._rounds.is_lost(evidence)

    def _outcome(self, i: int) -> Granted | BackendUnavailable | None:
        rounds = self._rounds
        claim, granted = self._held[i]
        evidence = self._claims[i]
        if evidence and self._yes[i] >= rounds.need:
            ttl = claim.ttl
            renewed = Granted(granted.token, ttl, self._at / 1e6, ttl, ttl / RENEWALS, GROUP, claim.owner)
            with evidence.lock:
                evidence.granted = renewed
            return renewed
        if self._is_lost(i):
            return None
        failure = rounds.servers.silence(self._silences, "renew it", counts=True)
        # A server that rejects this renewal may still hold the lease from before, so the outcome is unknown.
        answer = BackendUnavailable(str(failure), backend=failure.backend)
        answer.__cause__ = failure
        return answer

    def _look_after(self, evidence: Evidence) -> None:
        """Let the clerk ask the servers that do not vote for the holder, so that the lease has spare votes."""
        with evidence.lock:
            lacking = any(view.state in (OUT, WAITS) for view in evidence.views)
            if lacking and evidence.held and not evidence.leaving:
                self._rounds.clerk.soon(evidence, self._rounds.now())
