"""The requests of operators: find the holder of a name by majority, and check every server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from multilock import BackendRejected, system
from multilock.backend import Finding, LockInfo
from multilock_redis.diagnosis import diagnose
from multilock_redis.node import Node
from multilock_redis.redlock.restarts import SameServer
from multilock_redis.redlock.servers import Servers
from multilock_redis.transactions import CLOCKS_WITHIN
from multilock_redis.wire import pack

__all__ = ["Inspection"]


class Inspection:
    """The requests of operators. A majority of the servers decides each reply."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._now = servers.now
        self._need = servers.need
        self._nodes = len(servers.nodes)

    def inspect(self, name: str, within: float) -> LockInfo | None:
        def inspect(node: Node, within: float) -> LockInfo | None:
            return node.inspection.inspect(name, within)

        infos: list[LockInfo | None] = []
        silences: list[Exception] = []
        for which, said in self._servers.ask(inspect, self._now() + within):
            if isinstance(said, Exception):
                silences.append(said)
            elif self._servers.counts(which):  # a restarted server may report a waiter as the holder
                infos.append(said)
            if (owner := self._owner(infos)) == "" or (owner and self._agreed(infos, owner) is not None):
                break
        return self._told(infos, silences)

    def inspect_all(self, prefix: str, within: float) -> Iterator[LockInfo]:
        def inspect_all(node: Node, within: float) -> list[LockInfo]:
            return list(node.inspection.inspect_all(prefix, within))

        found: dict[str, list[LockInfo | None]] = {}
        silences: list[Exception] = []
        answered = 0
        for which, said in self._servers.ask(inspect_all, self._now() + within, brief=True):
            if isinstance(said, Exception):
                silences.append(said)
            elif self._servers.counts(which):
                answered += 1
                for info in said:
                    found.setdefault(info.name, []).append(info)
        if answered < self._need:
            raise self._servers.silence(silences, "say who holds what", counts=True)
        for name, infos in found.items():
            infos += [None] * (answered - len(infos))
            # If the servers disagree, the holder may have changed between their replies. So ask again for this name.
            told = self.inspect(name, within) if self._owner(infos) is None else self._by_majority(infos)
            if told:
                yield told

    def _told(self, infos: Sequence[LockInfo | None], silences: Sequence[Exception]) -> LockInfo | None:
        """Return the holder that a majority reports. Raises if the other servers could still complete a majority.

        The other servers are those that did not reply, and those that do not count.
        """
        most = max(Counter(info.owner if info else "" for info in infos).values(), default=0)
        if most < self._need <= most + self._nodes - len(infos):
            raise self._servers.silence(silences, "say who holds what", counts=True)
        return self._by_majority(infos)

    def _owner(self, infos: Sequence[LockInfo | None]) -> str | None:
        """Return the owner that a majority reports, or an empty text if a majority reports that nobody holds the name.

        Returns None if no majority agrees.
        """
        found = Counter(info.owner if info else "" for info in infos).most_common(1)
        return found[0][0] or "" if found and found[0][1] >= self._need else None

    def _agreed(self, infos: Sequence[LockInfo | None], owner: str) -> int | None:
        """Return the token that most servers have stored together with this owner.

        Returns None if no two servers have the same token, because a single server may have the token of another lease.
        """
        tokens = Counter(info.token for info in infos if info and info.owner == owner and info.token is not None)
        token, keep = next(iter(tokens.most_common(1)), (None, 0))
        return token if keep >= min(2, self._need) else None

    def _by_majority(self, infos: Sequence[LockInfo | None]) -> LockInfo | None:
        owner = self._owner(infos)
        if not owner:
            return None
        ours = [info for info in infos if info and info.owner == owner]
        token = self._agreed(infos, owner)
        first = next((info for info in ours if info.resting_until is not None), ours[0])
        since = next((info.since for info in ours if info.token == token and token is not None), None)
        # Compute for how long a majority keeps the lease. None means that the lease has no end at a majority.
        left = sorted((info.remaining for info in ours if info.remaining is not None), reverse=True)
        endless = len(ours) - len(left)
        remaining = left[self._need - 1 - endless] if endless < self._need else None
        waiting = max(info.waiting or 0 for info in infos if info)
        return replace(first, token=token, since=since, waiting=waiting, remaining=remaining)

    def force_release(self, name: str, within: float) -> bool:
        def force(node: Node, within: float) -> bool:
            # a tombstone would refuse the claim even if no majority was released
            return node.inspection.force_release(name, within, tombstone=0)

        forced = 0
        silences: list[Exception] = []
        for _, said in self._servers.ask(force, self._now() + within, brief=True):
            if isinstance(said, Exception):
                silences.append(said)
            else:
                forced += said
        if forced < self._need <= forced + len(silences):
            failure = self._servers.silence(silences, "release it")
            if forced:
                vars(failure)["unknown"] = True
            raise failure
        return forced >= self._need

    def diagnose(self, within: float) -> list[Finding]:
        nodes, findings = self._nodes, list[Finding]()
        if nodes % 2 == 0:
            spare = nodes - self._need
            bears = f"{nodes} servers tolerate {spare} failure{'s' * (spare != 1)}, the same as {nodes - 1}"
            findings.append(Finding("even", "warning", bears, f"use {nodes - 1} or {nodes + 1} servers"))

        def look(node: Node, within: float) -> list[Finding]:
            found = diagnose(node.connections, within)
            (seconds, micros), sent_at = node.connections.call(pack("TIME"), within)
            ahead = system.wall() / 1e6 - (self._now() - sent_at) / 2 - (int(seconds) + int(micros) / 1e6)
            if abs(ahead) > CLOCKS_WITHIN:
                what = f"its clock and that of this host differ by {abs(ahead):.1f} s"
                found.append(Finding("clock", "warning", what, "synchronize them: each lock takes one more round"))
            return found

        told = sorted(self._servers.ask(look, self._now() + within), key=lambda each: each[0])
        silences = [said for _, said in told if isinstance(said, Exception)]
        if len(silences) > nodes - self._need:
            raise self._servers.silence(silences, "answer")
        for which, said in told:
            endpoint = self._servers.endpoints[which]
            if isinstance(said, SameServer):
                said = [Finding("one-server", "error", str(said), "name another server, or none")]
            elif isinstance(said, BackendRejected):
                said = [Finding("refused", "error", str(said), "until then the others tolerate fewer failures")]
            elif isinstance(said, Exception):
                said = [Finding("down", "warning", str(said), "start it: the others tolerate fewer failures")]
            if not self._servers.counts(which):
                left = endpoint.counts_from - self._now()
                again = f"it counts again in {left:.0f} s (restart_guard={endpoint.guard:g})"
                what = f"this server has restarted: {again}"
                said.append(Finding("restarted", "warning", what, "wait: what it granted before may be in use"))
            # With a guard a server may lose its data in a restart, so no finding about persistence is needed.
            kept = [finding for finding in said if finding.code != "persistence" or not endpoint.guard]
            findings += [replace(finding, message=f"{endpoint.name}: {finding.message}") for finding in kept]
        return findings
