"""What holds a name alone is a mutex: the suites of the lock, on a writer and on the only permit, on ``consul://``."""

from __future__ import annotations

from multilock import Client
from multilock.testing import conformance
from multilock.testing.conformance.faces import Face
from tests.conformance.consul import Consul
from tests.conformance.test_alone import disguised


class Writer(Consul):
    quick_ttl = 3.0  # each permit is a session of its own, and renewed by itself
    kind = "writer"

    def connect(self, face: Face, **options: object) -> Client:
        return disguised(super().connect(face, **options), self.kind)

    def bystander(self, face: Face, **options: object) -> Client:
        return disguised(super().bystander(face, **options), self.kind)


class Permit(Writer):
    kind = "permit"


class TestLockByAWriter(conformance.LockConformance):
    backend = Writer


class TestLossByAWriter(conformance.LossConformance):
    backend = Writer


class TestCancelByAWriter(conformance.CancelConformance):
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
