"""The conformance suite on ``postgresql://``, on a real server."""

from __future__ import annotations

from multilock.testing import conformance
from tests.conformance.postgresql import Postgresql


class TestLock(conformance.LockConformance):
    backend = Postgresql


class TestThreading(conformance.ThreadingConformance):
    backend = Postgresql


class TestLease(conformance.LeaseConformance):
    backend = Postgresql


class TestOption(conformance.OptionConformance):
    backend = Postgresql


class TestLoss(conformance.LossConformance):
    backend = Postgresql


class TestWith(conformance.WithConformance):
    backend = Postgresql


class TestCancel(conformance.CancelConformance):
    backend = Postgresql


class TestOutage(conformance.OutageConformance):
    backend = Postgresql


class TestClient(conformance.ClientConformance):
    backend = Postgresql


class TestClose(conformance.CloseConformance):
    backend = Postgresql


class TestElection(conformance.ElectionConformance):
    backend = Postgresql


class TestRest(conformance.RestConformance):
    backend = Postgresql


class TestReadWrite(conformance.ReadWriteConformance):
    backend = Postgresql


class TestSemaphore(conformance.SemaphoreConformance):
    backend = Postgresql


class TestLockAll(conformance.LockAllConformance):
    backend = Postgresql


class TestBackend(conformance.BackendConformance):
    backend = Postgresql


class TestProcess(conformance.ProcessConformance):
    backend = Postgresql


class TestDescriptors(conformance.DescriptorConformance):
    backend = Postgresql
