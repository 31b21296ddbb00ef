"""The conformance suite on ``sqlite://``."""

from __future__ import annotations

from multilock.testing import conformance
from tests.conformance.places import Sqlite


class TestLock(conformance.LockConformance):
    backend = Sqlite


class TestThreading(conformance.ThreadingConformance):
    backend = Sqlite


class TestLease(conformance.LeaseConformance):
    backend = Sqlite


class TestOption(conformance.OptionConformance):
    backend = Sqlite


class TestLoss(conformance.LossConformance):
    backend = Sqlite


class TestWith(conformance.WithConformance):
    backend = Sqlite


class TestCancel(conformance.CancelConformance):
    backend = Sqlite


class TestOutage(conformance.OutageConformance):
    backend = Sqlite


class TestClient(conformance.ClientConformance):
    backend = Sqlite


class TestClose(conformance.CloseConformance):
    backend = Sqlite


class TestElection(conformance.ElectionConformance):
    backend = Sqlite


class TestRest(conformance.RestConformance):
    backend = Sqlite


class TestReadWrite(conformance.ReadWriteConformance):
    backend = Sqlite


class TestSemaphore(conformance.SemaphoreConformance):
    backend = Sqlite


class TestLockAll(conformance.LockAllConformance):
    backend = Sqlite


class TestBackend(conformance.BackendConformance):
    backend = Sqlite


class TestProcess(conformance.ProcessConformance):
    backend = Sqlite


class TestDescriptors(conformance.DescriptorConformance):
    backend = Sqlite
