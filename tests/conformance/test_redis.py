"""The conformance suite on ``redis://``, on a real server."""

from __future__ import annotations

from multilock.testing import conformance
from tests.conformance.places import Redis


class TestLock(conformance.LockConformance):
    backend = Redis


class TestThreading(conformance.ThreadingConformance):
    backend = Redis


class TestLease(conformance.LeaseConformance):
    backend = Redis


class TestOption(conformance.OptionConformance):
    backend = Redis


class TestLoss(conformance.LossConformance):
    backend = Redis


class TestWith(conformance.WithConformance):
    backend = Redis


class TestCancel(conformance.CancelConformance):
    backend = Redis


class TestOutage(conformance.OutageConformance):
    backend = Redis


class TestClient(conformance.ClientConformance):
    backend = Redis


class TestClose(conformance.CloseConformance):
    backend = Redis


class TestElection(conformance.ElectionConformance):
    backend = Redis


class TestRest(conformance.RestConformance):
    backend = Redis


class TestReadWrite(conformance.ReadWriteConformance):
    backend = Redis


class TestSemaphore(conformance.SemaphoreConformance):
    backend = Redis


class TestLockAll(conformance.LockAllConformance):
    backend = Redis


class TestBackend(conformance.BackendConformance):
    backend = Redis


class TestProcess(conformance.ProcessConformance):
    backend = Redis


class TestDescriptors(conformance.DescriptorConformance):
    backend = Redis
