"""For operators: who holds what on a majority, and what is wrong with each server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from multilock import BackendRejected, BackendUnavailable, system
from multilock.backend import Finding, LockInfo
from multilock_redis.diagnosis import diagnose
from multilock_redis.node import Node
from multilock_redis.redlock.guard import SameServer
from multilock_redis.redlock.servers import LEAST_LIMIT, Servers

__all__ = ["Inspection"]

FIRST_PAUSE = 0.002  # seconds before a name is asked for again; each is twice the last


class Inspection:
    def __init__(self, servers: Servers, *, token: bool) -> None:
        self._servers = servers
        self._quorum = servers.quorum
        self._now = servers.now
        self._token = token

    def inspect(self, name: str, within: float) -> LockInfo | None:
        """Between its votes and its token a holder is told of nobody: whoever reads just then would keep what it read,
        since nothing pushes a token. So it is asked again for a moment."""
        deadline = self._now() + within
        settled = self._now() + min(within / 2, LEAST_LIMIT)
        pause = FIRST_PAUSE
        while True:
            info = self._inspected(name, deadline)
            agreed = info is None or info.kind is None or info.token is not None or not self._token
            if agreed or self._now() >= settled:
                return info
            system.sleep(pause)
            pause *= 2

    def _inspected(self, name: str, deadline: float) -> LockInfo | None:
        def inspect(node: Node, within: float) -> LockInfo | None:
            return node.inspection.inspect(name, within)

        infos: list[LockInfo | None] = []
        silences: list[Exception] = []
        for _, said in self._servers.ask(inspect, deadline):
            if isinstance(said, Exception):
                silences.append(said)
            else:
                infos.append(said)
            if (
                self._quorum.named((info.owner, self._token and info.token) if info else () for info in infos)
                is not None
            ):
                return self._by_majority(infos)
        if self._hides(len(silences), infos, 0):
            raise self._servers.silence(silences, "tell who holds it")
        return self._by_majority(infos)

    def _hides(self, silent: int, infos: Sequence[LockInfo | None], free: int) -> bool:
        """Whether those that are silent can make a majority of what others say."""
        found = Counter(info.owner if info else None for info in infos)
        found[None] += free
        return max(found.values()) < self._quorum.needed <= max(found.values()) + silent

    def inspect_all(self, prefix: str, within: float) -> Iterator[LockInfo]:
        found: dict[str, list[LockInfo | None]] = {}
        silences: list[Exception] = []
        for node in self._servers.nodes:
            try:
                for info in node.inspection.inspect_all(prefix, within):
                    found.setdefault(info.name, []).append(info)
            except (BackendUnavailable, BackendRejected) as silence:
                silences.append(silence)
        if len(silences) > self._quorum.spare:
            raise self._servers.silence(silences, "tell what is held")
        for name, infos in found.items():
            if self._hides(len(silences), infos, self._quorum.nodes - len(silences) - len(infos)):
                told = self.inspect(name, within)  # one may have been asked before it changed: not so, all at once
            else:
                told = self._by_majority(infos)
            if told:
                yield told

    def _by_majority(self, infos: Sequence[LockInfo | None]) -> LockInfo | None:
        owner = self._quorum.named(info.owner if info else None for info in infos)
        ours = [info for info in infos if info and info.owner == owner]
        if owner is None or not ours:
            return None
        token = self._quorum.named(info.token for info in ours) if self._token else None  # servers alone differ
        waiting = max(info.waiting or 0 for info in infos if info)
        first = next((info for info in ours if info.resting_until is not None), ours[0])
        return replace(first, token=token, waiting=waiting)

    def force_release(self, name: str, within: float) -> bool:
        def force(node: Node, within: float) -> bool:
            return node.inspection.force_release(name, within)

        forced = 0
        silences: list[Exception] = []
        for _, said in self._servers.ask(force, self._now() + within):
            if isinstance(said, Exception):
                silences.append(said)
            else:
                forced += said
        if forced < self._quorum.needed <= forced + len(silences):
            failure = self._servers.silence(silences, "release it")
            if forced:
                vars(failure)["unknown"] = True
            raise failure
        return forced >= self._quorum.needed

    def diagnose(self, within: float) -> list[Finding]:
        nodes, findings = self._quorum.nodes, list[Finding]()
        if nodes % 2 == 0:
            bears = f"{nodes} servers bear the loss of no more than {nodes - 1} do"
            findings.append(Finding("even", "warning", bears, f"use {nodes - 1} or {nodes + 1} servers"))

        def look(node: Node, within: float) -> list[Finding]:
            return diagnose(node.connections, within)

        told = sorted(self._servers.ask(look, self._now() + within), key=lambda each: each[0])
        silences = [said for _, said in told if isinstance(said, Exception)]
        if len(silences) > self._quorum.spare:
            raise self._servers.silence(silences, "answer")
        for which, said in told:
            endpoint = self._servers.endpoints[which]
            if isinstance(said, SameServer):
                said = [Finding("one-server", "error", str(said), "name another server, or none")]
            elif isinstance(said, Exception):
                said = [Finding("down", "warning", str(said), "start it: the others bear the loss of few")]
            if not self._servers.counts(which):
                left = endpoint.counts_from - self._now()
                again = f"it counts again in {left:.0f} s (restart_guard={endpoint.guard:g})"
                what = f"this server has restarted: {again}"
                said.append(Finding("restarted", "warning", what, "wait: what it granted before may be in use"))
            # Its restart is what the guard is for.
            kept = [finding for finding in said if finding.code != "persistence" or not endpoint.guard]
            findings += [replace(finding, message=f"{endpoint.name}: {finding.message}") for finding in kept]
        return findings
