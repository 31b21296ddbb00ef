"""The conformance suite on ``etcd://``, on a real server."""

from __future__ import annotations

from multilock.testing import conformance
from tests.conformance.etcd import Etcd


class TestLock(conformance.LockConformance):
    backend = Etcd


class TestThreading(conformance.ThreadingConformance):
    backend = Etcd


class TestLease(conformance.LeaseConformance):
    backend = Etcd


class TestOption(conformance.OptionConformance):
    backend = Etcd


class TestLoss(conformance.LossConformance):
    backend = Etcd


class TestWith(conformance.WithConformance):
    backend = Etcd


class TestCancel(conformance.CancelConformance):
    backend = Etcd


class TestOutage(conformance.OutageConformance):
    backend = Etcd


class TestClient(conformance.ClientConformance):
    backend = Etcd


class TestClose(conformance.CloseConformance):
    backend = Etcd


class TestElection(conformance.ElectionConformance):
    backend = Etcd


class TestRest(conformance.RestConformance):
    backend = Etcd


class TestReadWrite(conformance.ReadWriteConformance):
    backend = Etcd


class TestSemaphore(conformance.SemaphoreConformance):
    backend = Etcd


class TestLockAll(conformance.LockAllConformance):
    backend = Etcd


class TestBackend(conformance.BackendConformance):
    backend = Etcd


class TestProcess(conformance.ProcessConformance):
    backend = Etcd


class TestDescriptors(conformance.DescriptorConformance):
    backend = Etcd
