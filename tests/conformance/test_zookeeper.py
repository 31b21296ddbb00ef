"""The conformance suite on ``zookeeper://``, on a real server."""

from __future__ import annotations

from multilock.testing import conformance
from tests.conformance.zookeeper import ZooKeeper


class TestLock(conformance.LockConformance):
    backend = ZooKeeper


class TestThreading(conformance.ThreadingConformance):
    backend = ZooKeeper


class TestLease(conformance.LeaseConformance):
    backend = ZooKeeper


class TestOption(conformance.OptionConformance):
    backend = ZooKeeper


class TestLoss(conformance.LossConformance):
    backend = ZooKeeper


class TestWith(conformance.WithConformance):
    backend = ZooKeeper


class TestCancel(conformance.CancelConformance):
    backend = ZooKeeper


class TestOutage(conformance.OutageConformance):
    backend = ZooKeeper


class TestClient(conformance.ClientConformance):
    backend = ZooKeeper


class TestClose(conformance.CloseConformance):
    backend = ZooKeeper


class TestElection(conformance.ElectionConformance):
    backend = ZooKeeper


class TestRest(conformance.RestConformance):
    backend = ZooKeeper


class TestReadWrite(conformance.ReadWriteConformance):
    backend = ZooKeeper


class TestSemaphore(conformance.SemaphoreConformance):
    backend = ZooKeeper


class TestLockAll(conformance.LockAllConformance):
    backend = ZooKeeper


class TestBackend(conformance.BackendConformance):
    backend = ZooKeeper


class TestProcess(conformance.ProcessConformance):
    backend = ZooKeeper


class TestDescriptors(conformance.DescriptorConformance):
    backend = ZooKeeper
