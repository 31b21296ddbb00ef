"""The conformance suite on ``redis+cluster://``, with three real shards."""

from __future__ import annotations

from multilock.testing import conformance
from tests.conformance.cluster import RedisClusters


class TestLock(conformance.LockConformance):
    backend = RedisClusters


class TestThreading(conformance.ThreadingConformance):
    backend = RedisClusters


class TestLease(conformance.LeaseConformance):
    backend = RedisClusters


class TestOption(conformance.OptionConformance):
    backend = RedisClusters


class TestLoss(conformance.LossConformance):
    backend = RedisClusters


class TestWith(conformance.WithConformance):
    backend = RedisClusters


class TestCancel(conformance.CancelConformance):
    backend = RedisClusters


class TestOutage(conformance.OutageConformance):
    backend = RedisClusters


class TestClient(conformance.ClientConformance):
    backend = RedisClusters


class TestClose(conformance.CloseConformance):
    backend = RedisClusters


class TestElection(conformance.ElectionConformance):
    backend = RedisClusters


class TestRest(conformance.RestConformance):
    backend = RedisClusters


class TestReadWrite(conformance.ReadWriteConformance):
    backend = RedisClusters


class TestSemaphore(conformance.SemaphoreConformance):
    backend = RedisClusters


class TestLockAll(conformance.LockAllConformance):
    backend = RedisClusters


class TestBackend(conformance.BackendConformance):
    backend = RedisClusters


class TestProcess(conformance.ProcessConformance):
    backend = RedisClusters


class TestDescriptors(conformance.DescriptorConformance):
    backend = RedisClusters
