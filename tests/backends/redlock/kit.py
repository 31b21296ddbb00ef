"""Helpers for tests that call the Redlock backend directly: claims, a recorder of the backend's reports, and a proxy in
front of each server."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import redis

from multilock import BackendUnavailable, now
from multilock.backend import Claim, Granted
from multilock.model import owner_text
from multilock.testing import FaultProxy
from multilock_redis import open_backend
from multilock_redis.redlock import RedlockBackend
from multilock_redis.redlock.votes import Evidence
from tests.backends.redis.kit import Ear, eventually
from tests.servers_redlock import RedisServers

__all__ = ["Contender", "holders"]

WITHIN = 10.0


class Contender:
    """One client that can be cut off from single servers, which other clients still reach."""

    def __init__(self, servers: RedisServers, *, guard: float = 0.0, **options: object) -> None:
        self.servers = len({member.url for member in servers.members})
        self.cut: set[int] = set()
        self.proxies = [FaultProxy.before(member.url) for member in servers.members]
        hosts = ",".join(f"{proxy.host}:{proxy.port}" for proxy in self.proxies)
        backend = open_backend(f"redlock://{hosts}", {"restart_guard": guard, "ttl": 30.0, **options})
        assert isinstance(backend, RedlockBackend)
        self.backend = backend
        self.ear = Ear()
        backend.open(self.ear)
        if not guard:
            self.connect()

    def connect(self) -> None:
        """Connect to each server that is not cut off, so that the first request reaches all of them."""
        fan = self.backend.rounds.pool.take()
        until = now() + WITHIN
        reached = min(self.servers, len(self.proxies) - len(self.cut))
        fan.look(0)  # find connections that have ended
        while fan.connected() < reached and now() < until:
            fan.look(0.005)
        self.backend.rounds.give(fan)

    def claim(self, name: str = "a", ttl: float = 30.0, *, arrived: int = 0, renew: bool = True) -> Claim:
        claim_id = f"{self.ear.client}.{os.urandom(16).hex()}"
        owner = owner_text(claim_id, "lock", "h", 1, "me", ttl)
        return Claim(name, "lock", claim_id, owner, ttl, renew, True, "me", 0, arrived)

    def attempt(self, claim: Claim, *, join: bool = False, within: float = WITHIN) -> Any:
        return self.backend.attempt(claim, join, within)

    def take(self, claim: Claim | None = None, *, join: bool = False) -> tuple[Claim, Granted]:
        claim = claim or self.claim()
        granted = self.attempt(claim, join=join)
        assert isinstance(granted, Granted), granted
        return claim, granted

    def teach(self) -> None:
        """Load the scripts into each server, so that no later reply reports a missing script."""
        held = self.take(self.claim("taught"))
        self.settle(held[0])
        self.renew(held)
        self.give_back(held[0])

    def listen(self) -> None:
        """Subscribe at each server, so that a claim can join each queue by one request."""

        def listens() -> bool:
            self.backend.servers.listen()
            return all(node.listener.listening for node in self.backend.servers.nodes)

        eventually(listens, within=WITHIN)

    def evidence(self, claim: Claim) -> Evidence:
        evidence = self.backend.rounds.claims.get(claim.id)
        assert evidence is not None
        return evidence

    def states(self, claim: Claim) -> list[str]:
        return [view.state.value for view in self.evidence(claim).views]

    def settle(self, claim: Claim) -> None:
        """Wait for the replies to all requests of this claim, because a call returns once a majority has replied."""
        evidence = self.evidence(claim)
        eventually(lambda: not evidence.pending(), within=WITHIN)

    def keep_its_votes(self) -> None:
        """Keep a waiter with a minority from giving its votes up. On an overloaded machine, the waiter could give them
        up before the next server's notification arrives."""
        self.backend.rounds._later = lambda evidence, now: None  # type: ignore[method-assign]

    def release(self, claim: Claim, *, unsure: bool = False) -> Any:
        return self.backend.release(claim, None, unsure, WITHIN)

    def give_back(self, claim: Claim, *, unsure: bool = False) -> None:
        """Repeat the release until there is a reply, as the kernel does. Then wait until each server has confirmed
        it."""

        def given_back() -> bool:
            try:
                self.release(claim, unsure=unsure)
            except BackendUnavailable:
                return False
            return True

        eventually(given_back, within=WITHIN)
        eventually(lambda: claim.id not in self.backend.rounds.claims, within=WITHIN)

    def renew(self, *held: tuple[Claim, Granted]) -> list[Any]:
        return list(self.backend.renew("redlock", held, WITHIN))

    def cut_off(self, *which: int) -> None:
        self.cut.update(which)
        for each in which:
            self.proxies[each].refuse()
            self.proxies[each].cut()

    def reach(self, *which: int) -> None:
        """Undo `cut_off` for these servers, and let the client use them again at once."""
        self.cut.difference_update(which)
        for each in which:
            self.proxies[each].accept()
            self.backend.servers.links[each]._again_at = self.backend.servers.links[each]._pause = 0.0
        self.connect()

    def close(self) -> None:
        self.backend.close()
        for proxy in self.proxies:
            with contextlib.suppress(RuntimeError):
                proxy.close()


def holders(servers: RedisServers, name: str = "a") -> list[str]:
    """Return for each server the id of the holder, or an empty text."""
    found = []
    for member in servers.members:
        with redis.Redis(port=member.port) as bare:
            text: Any = bare.get(f"multilock/{name}")
            found.append(text.decode().partition("@")[0] if text else "")
    return found
