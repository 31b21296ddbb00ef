"""A client that calls a local backend directly, on a clock that the test sets.

This module does not import pytest, so that the helper processes start quickly.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Hashable
from typing import Any, cast

from multilock import LossReason
from multilock.backend import Backend
from multilock.model import Busy, Claim, Granted, owner_text

__all__ = ["WITHIN", "Asker", "Clock"]

WITHIN = 5.0
# Numbers for the ids of claims. They begin at the present time, so that no earlier process has used them.
_numbers = itertools.count(time.time_ns())


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class Ear:
    """`multilock.backend.Notices` that records every call."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.client = f"{next(_numbers):016x}"
        self.now = now
        self.told: list[tuple[Any, ...]] = []
        self.on_wake: Callable[[], object] = lambda: None

    def wake(self, claim_id: str | None) -> None:
        self.told.append(("wake", claim_id))
        self.on_wake()

    def gone(self, claim_id: str, reason: LossReason, message: str) -> None:
        self.told.append(("gone", claim_id, reason))

    def pushes(self, connection: str, trouble: str | None, *, refused: bool = False) -> None:
        raise AssertionError("a local backend has no push connections")

    def group(self, group: Hashable, ttl: float, renew_every: float) -> None:
        raise AssertionError("a local backend has no sessions")

    def shortened(self, group: Hashable, ttl: float, valid_until: float, renew_every: float) -> None: ...

    def group_gone(self, group: Hashable, message: str) -> None:
        raise AssertionError("a local backend has no sessions")

    def granted(self, claim_id: str, granted: Granted) -> None:
        raise AssertionError("what is in this process needs no push")

    def silent(self, group: Hashable) -> None:
        self.told.append(("silent", group))

    def changed(self, name: str | None) -> None:
        self.told.append(("changed", name))


class Asker:
    """One client: its backend, its claims, and a recorder of the backend's reports."""

    def __init__(self, backend: Backend, now: Callable[[], float]) -> None:
        self.backend = backend
        self.ear = Ear(now)
        backend.open(self.ear)

    def claim(
        self, name: str = "n", *, ttl: float = 30.0, fair: bool = False, renew: bool = True, kind: str = "lock"
    ) -> Claim:
        id_ = f"{self.ear.client}.{next(_numbers):032x}"
        return Claim(name, kind, id_, owner_text(id_, kind, "host", 1, "me", ttl), ttl, renew, fair, "me")

    def reader(self, name: str = "n", *, ttl: float = 30.0, kind: str = "read") -> Claim:
        """Make the claim of a reader. The claim is fair, like the claims of readers that the kernel makes."""
        return self.claim(name, ttl=ttl, fair=True, kind=kind)

    def writer(self, name: str = "n", *, ttl: float = 30.0) -> Claim:
        return self.reader(name, ttl=ttl, kind="write")

    def permit(self, permits: int, name: str = "n", *, ttl: float = 30.0) -> Claim:
        return self.reader(name, ttl=ttl, kind="permit")._replace(permits=permits)

    def attempt(self, claim: Claim, *, join: bool = True) -> Granted | Busy:
        return self.backend.attempt(claim, join, WITHIN)

    def hold(self, claim: Claim) -> Granted:
        answer = self.attempt(claim)
        assert isinstance(answer, Granted), answer
        return answer

    def wait(self, claim: Claim) -> Busy:
        answer = self.attempt(claim)
        assert isinstance(answer, Busy), answer
        return answer

    def release(self, claim: Claim, granted: Granted | None = None, *, unsure: bool = False) -> bool:
        return self.backend.release(claim, granted, unsure, WITHIN).ours

    def renew(self, *held: tuple[Claim, Granted]) -> list[Granted | None]:
        return cast("list[Granted | None]", self.backend.renew(held[0][1].group, held, WITHIN))
