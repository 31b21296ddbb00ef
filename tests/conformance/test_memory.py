"""The conformance suite on ``memory://``."""

from __future__ import annotations

from multilock.testing import conformance
from tests.conformance.places import Memory


class TestLock(conformance.LockConformance):
    backend = Memory


class TestThreading(conformance.ThreadingConformance):
    backend = Memory


class TestLease(conformance.LeaseConformance):
    backend = Memory


class TestOption(conformance.OptionConformance):
    backend = Memory


class TestLoss(conformance.LossConformance):
    backend = Memory


class TestWith(conformance.WithConformance):
    backend = Memory


class TestCancel(conformance.CancelConformance):
    backend = Memory


class TestOutage(conformance.OutageConformance):
    backend = Memory


class TestClient(conformance.ClientConformance):
    backend = Memory


class TestClose(conformance.CloseConformance):
    backend = Memory


class TestElection(conformance.ElectionConformance):
    backend = Memory


class TestRest(conformance.RestConformance):
    backend = Memory


class TestReadWrite(conformance.ReadWriteConformance):
    backend = Memory


class TestSemaphore(conformance.SemaphoreConformance):
    backend = Memory


class TestLockAll(conformance.LockAllConformance):
    backend = Memory


class TestBackend(conformance.BackendConformance):
    backend = Memory


class TestDescriptors(conformance.DescriptorConformance):
    backend = Memory
