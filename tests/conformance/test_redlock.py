"""The conformance suite on ``redlock://``, on three real servers."""

from __future__ import annotations

from multilock.testing import conformance
from tests.conformance.redlock import Redlock


class TestLock(conformance.LockConformance):
    backend = Redlock


class TestThreading(conformance.ThreadingConformance):
    backend = Redlock


class TestLease(conformance.LeaseConformance):
    backend = Redlock


class TestOption(conformance.OptionConformance):
    backend = Redlock


class TestLoss(conformance.LossConformance):
    backend = Redlock


class TestWith(conformance.WithConformance):
    backend = Redlock


class TestCancel(conformance.CancelConformance):
    backend = Redlock


class TestOutage(conformance.OutageConformance):
    backend = Redlock


class TestClient(conformance.ClientConformance):
    backend = Redlock


class TestClose(conformance.CloseConformance):
    backend = Redlock


class TestElection(conformance.ElectionConformance):
    backend = Redlock


class TestRest(conformance.RestConformance):
    backend = Redlock


class TestReadWrite(conformance.ReadWriteConformance):
    backend = Redlock


class TestSemaphore(conformance.SemaphoreConformance):
    backend = Redlock


class TestLockAll(conformance.LockAllConformance):
    backend = Redlock


class TestBackend(conformance.BackendConformance):
    backend = Redlock


class TestProcess(conformance.ProcessConformance):
    backend = Redlock


class TestDescriptors(conformance.DescriptorConformance):
    backend = Redlock
