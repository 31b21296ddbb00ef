"""Redlock without a kernel: claims, an ear that remembers what it was told, and a proxy before each server."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Any

import redis

from multilock import BackendUnavailable
from multilock.backend import Busy, Claim, Granted
from multilock.model import owner_text
from multilock.testing import FaultProxy
from multilock_redis import open_backend
from multilock_redis.redlock import RedlockBackend
from tests.backends.redis.kit import Ear, eventually
from tests.servers_redlock import RedisServers

__all__ = ["Contender", "holders"]

WITHIN = 10.0


class Contender:
    """One client, whose way to each server can be cut without the others' being so."""

    def __init__(self, servers: RedisServers, *, guard: float = 0.0, **options: object) -> None:
        self.proxies = [FaultProxy.before(member.url) for member in servers.members]
        hosts = ",".join(f"{proxy.host}:{proxy.port}" for proxy in self.proxies)
        backend = open_backend(f"redlock://{hosts}", {"restart_guard": guard, "ttl": 30.0, **options})
        assert isinstance(backend, RedlockBackend)
        self.backend = backend
        self.ear = Ear()
        backend.open(self.ear)

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
        """From now on each server knows the scripts: no answer is that it does not."""
        claim = self.claim("taught")
        for node in self.backend.servers.nodes:
            granted = node.stand(claim, False, False, WITHIN)
            assert isinstance(granted, Granted), granted
            node.listener.renew([(claim, granted)], WITHIN)
            node.recipe.agree("taught", 1, WITHIN)
            node.release(claim, False, WITHIN)

    def keep_tokens_at(self, only: int) -> None:
        """The other servers are silent where they are asked for one, and that is known after this one has answered."""
        answered = threading.Event()
        crew = self.backend.servers.crews[only]
        ask: Any = crew.ask

        def first(question: Any, deadline: float, tell: Any) -> None:
            def told(said: Any) -> None:
                tell(said)
                if isinstance(said, tuple) and not isinstance(said, (Granted, Busy)):
                    answered.set()

            ask(question, deadline, told)

        def silent(name: str, token: int, within: float) -> Any:
            answered.wait(WITHIN)
            raise BackendUnavailable("nothing was read")

        crew.ask = first  # type: ignore[method-assign]
        for which, node in enumerate(self.backend.servers.nodes):
            if which != only:
                node.recipe.agree = silent  # type: ignore[method-assign]

    def settle(self, claim: Claim) -> None:
        """Until all that was asked for it has an answer: one is decided by a majority."""
        standing = self.backend.places.standings[claim.id]
        eventually(lambda: not any(at.under_way for at in standing.at), within=WITHIN)

    def release(self, claim: Claim, *, unsure: bool = False) -> Any:
        return self.backend.release(claim, None, unsure, WITHIN)

    def give_back(self, claim: Claim, *, unsure: bool = False) -> None:
        """As the kernel does: told again until no server has anything of it."""

        def given_back() -> bool:
            try:
                return not self.release(claim, unsure=unsure).again
            except BackendUnavailable:
                return False

        eventually(given_back, within=WITHIN)

    def renew(self, *held: tuple[Claim, Granted]) -> list[Any]:
        return list(self.backend.renew("redlock", held, WITHIN))

    def cut_off(self, *which: int) -> None:
        for each in which:
            self.proxies[each].refuse()
            self.proxies[each].cut()

    def reach(self, *which: int) -> None:
        """As before; a server that was cut off is asked at once."""
        for each in which:
            self.proxies[each].accept()
            for crew in (self.backend.servers.crews[each], self.backend.servers.keepers[each]):
                crew._pause = 0.0

    def close(self) -> None:
        self.backend.close()
        for proxy in self.proxies:
            with contextlib.suppress(RuntimeError):
                proxy.close()


def holders(servers: RedisServers, name: str = "a") -> list[str]:
    """The ids that the servers hold the name for; empty where it is free."""
    found = []
    for member in servers.members:
        with redis.Redis(port=member.port) as bare:
            text: Any = bare.get(f"multilock/{name}")
            found.append(text.decode().partition("@")[0] if text else "")
    return found
