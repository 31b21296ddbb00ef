"""A process of the chaos on several servers: a contender that tells too what it has undone, in lines::

undone TIME ID                   a release of the claim of this id said that nothing of it is left
"""

from __future__ import annotations

from multilock import now
from multilock.model import Claim, Granted, Returned
from multilock.testing.beliefs import note
from multilock_redis.redlock import RedlockBackend
from tests.faults import contender

__all__ = ["contend"]

PATIENT = 0.4  # the share of questions that are waited with for as long as anybody should have to


def contend(*arguments: str) -> None:
    """See `tests.faults.contender.contend`."""
    proven = RedlockBackend.release

    def release(self: RedlockBackend, claim: Claim, granted: Granted | None, unsure: bool, within: float) -> Returned:
        returned = proven(self, claim, granted, unsure, within)
        if not returned.again:
            note("undone", now(), claim.id)
        return returned

    RedlockBackend.release = release  # type: ignore[method-assign]
    contender.PATIENT = PATIENT
    contender.contend(*arguments)
