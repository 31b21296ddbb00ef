"""Helpers for tests that call the backend directly: claims, and a recorder of the backend's reports."""

from __future__ import annotations

import os
from typing import Any

import pytest

from multilock import BackendUnavailable
from multilock.backend import Busy, Claim, Granted, LossReason
from multilock.model import owner_text
from multilock.testing.conformance.spi import Ear
from multilock_etcd import open_backend
from multilock_etcd.transport import EtcdTransport, Method

__all__ = ["WITHIN", "Mishap", "Ours"]

WITHIN = 5.0
TTL = 60.0  # seconds; no lease expires during a test


class Ours:
    """One client with claims for one name."""

    def __init__(self, url: str, prefix: str) -> None:
        self.ear = Ear()
        self.backend = open_backend(url, {"prefix": prefix})
        self.backend.open(self.ear)

    def claim(self, kind: str = "lock", permits: int = 0) -> Claim:
        claim_id = f"{self.ear.client}.{os.urandom(16).hex()}"
        owner = owner_text(claim_id, kind, "host", os.getpid(), "me", TTL)
        return Claim("job", kind, claim_id, owner, TTL, True, True, "me", permits)

    def reader(self) -> Claim:
        return self.claim("read")

    def writer(self) -> Claim:
        return self.claim("write")

    def permit(self, permits: int) -> Claim:
        return self.claim("permit", permits)

    def attempt(self, claim: Claim, *, join: bool = False) -> Granted | Busy:
        return self.backend.attempt(claim, join, WITHIN)

    def take(self, claim: Claim, *, join: bool = False) -> Granted:
        granted = self.attempt(claim, join=join)
        assert isinstance(granted, Granted), granted
        return granted

    def wait(self, claim: Claim) -> Claim:
        """Join the queue of a name that is held."""
        assert isinstance(self.attempt(claim, join=True), Busy)
        return claim

    def release(self, claim: Claim, *, unsure: bool = False) -> bool:
        return self.backend.release(claim, None, unsure, WITHIN).ours

    def renew(self, *held: tuple[Claim, Granted]) -> list[bool]:
        return [answer is not None for answer in self.backend.renew(held[0][1].group, held, WITHIN)]

    def watch(self, *held: tuple[Claim, Granted]) -> None:
        self.backend.watch(held[0][1].group, held, WITHIN)

    def woken(self) -> set[str]:
        """Return the claim ids of the waiters that were woken since the last call."""
        wakes, self.ear.wakes = self.ear.wakes, []
        return {claim_id for claim_id in wakes if claim_id}

    def hears_a_wake_for(self, claim: Claim) -> None:
        assert self.ear.wait(lambda: claim.id in self.ear.wakes, WITHIN)

    def hears_of_the_loss_of(self, claim: Claim) -> None:
        assert self.ear.wait(lambda: (claim.id, LossReason.TAKEN) in self.ear.losses, WITHIN)


class Mishap:
    """Let the next request of one kind fail: its reply is lost, or it is delayed until the test calls `send`."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, method: Method, mark: bytes = b"", *, executed: bool = True
    ) -> None:
        self._really = EtcdTransport.call
        self._wanted = method, mark
        self._executed = executed
        self.kept: list[tuple[EtcdTransport, Any]] = []
        monkeypatch.setattr(EtcdTransport, "call", lambda *args: self._call(*args))

    def _call(self, transport: EtcdTransport, method: Method, request: Any, within: float) -> Any:
        wanted, mark = self._wanted
        if method is wanted and not self.kept and mark in request.SerializeToString():
            self.kept.append((transport, request))
            if self._executed:
                self._really(transport, method, request, within)
            raise BackendUnavailable("the test lost it", unknown=True)
        return self._really(transport, method, request, within)

    def send(self) -> Any:
        """Send the delayed request, so that the server executes it."""
        [(transport, request)] = self.kept
        return self._really(transport, self._wanted[0], request, WITHIN)[0]
