"""The conformance suite on ``consul://``, on a real server."""

from __future__ import annotations

from multilock.testing import conformance
from tests.conformance.consul import Consul


class TestLock(conformance.LockConformance):
    backend = Consul


class TestThreading(conformance.ThreadingConformance):
    backend = Consul


class TestLease(conformance.LeaseConformance):
    backend = Consul


class TestOption(conformance.OptionConformance):
    backend = Consul


class TestLoss(conformance.LossConformance):
    backend = Consul


class TestWith(conformance.WithConformance):
    backend = Consul


class TestCancel(conformance.CancelConformance):
    backend = Consul


class TestOutage(conformance.OutageConformance):
    backend = Consul


class TestClient(conformance.ClientConformance):
    backend = Consul


class TestClose(conformance.CloseConformance):
    backend = Consul


class TestElection(conformance.ElectionConformance):
    backend = Consul


class TestRest(conformance.RestConformance):
    backend = Consul


class TestReadWrite(conformance.ReadWriteConformance):
    backend = Consul


class TestSemaphore(conformance.SemaphoreConformance):
    backend = Consul


class TestLockAll(conformance.LockAllConformance):
    backend = Consul


class TestBackend(conformance.BackendConformance):
    backend = Consul


class TestProcess(conformance.ProcessConformance):
    backend = Consul


class TestDescriptors(conformance.DescriptorConformance):
    backend = Consul
