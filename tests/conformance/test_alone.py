"""What holds a name alone is a mutex: the suites of the lock, on a writer and on the only permit, on ``memory://``."""

from __future__ import annotations

from typing import Any

from multilock import Client
from multilock.testing import conformance
from multilock.testing.conformance.faces import Face
from tests.conformance.places import Memory


def disguised(client: Client, kind: str) -> Client:
    """Its ``lock()`` makes another kind of lock. Of an asyncio client the suites have a mirror."""
    target: Any = getattr(client, "_target", client)

    def lock(name: str, **options: Any) -> Any:
        if kind == "writer":
            return target.read_write_lock(name, **{"fair": False, **options}).writer()  # at the gate, as a mutex is
        return target.semaphore(name, 1, **options)

    target.lock = lock
    return client


class Writer(Memory):
    kind = "writer"

    def connect(self, face: Face, **options: Any) -> Client:
        return disguised(super().connect(face, **options), self.kind)

    def bystander(self, face: Face, **options: Any) -> Client:
        return disguised(super().bystander(face, **options), self.kind)


class Permit(Writer):
    kind = "permit"


class TestLockByAWriter(conformance.LockConformance):
    backend = Writer


class TestWithByAWriter(conformance.WithConformance):
    backend = Writer


class TestLockByAPermit(conformance.LockConformance):
    backend = Permit

    test_one_of_many_waiters_at_a_time_stands_at_the_backend = None  # type: ignore[assignment]  # each permit waits there


class TestLossByAPermit(conformance.LossConformance):
    backend = Permit


class TestWithByAPermit(conformance.WithConformance):
    backend = Permit


class TestCancelByAPermit(conformance.CancelConformance):
    backend = Permit
