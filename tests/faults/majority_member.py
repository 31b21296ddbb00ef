"""A process of the chaos on several servers. It contends like other contenders and also records each undone claim, in
lines::

undone TIME ID                   each server has confirmed the release of this claim
"""

from __future__ import annotations

from multilock import now
from multilock.testing.beliefs import note
from multilock_redis.redlock.acquire_release import Rounds
from multilock_redis.redlock.votes import Evidence
from tests.faults import contender

__all__ = ["contend"]

PATIENT = 0.4  # the share of requests that wait until the waiter counts as starved


def contend(*arguments: str) -> None:
    """Contend as `tests.faults.contender.contend` does, and record each claim that was undone."""
    proven = Rounds._forget_if_done

    def forget(self: Rounds, evidence: Evidence) -> None:
        known = evidence.claim.id in self.claims
        proven(self, evidence)
        if known and evidence.claim.id not in self.claims:
            note("undone", now(), evidence.claim.id)

    Rounds._forget_if_done = forget  # type: ignore[method-assign]
    contender.PATIENT = PATIENT
    contender.contend(*arguments)
