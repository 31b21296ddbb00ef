"""The conformance suite on ``redis+sentinel://``, on a real server and a real Sentinel."""

from __future__ import annotations

from multilock.testing import conformance
from tests.conformance.places import Guarded


class TestLock(conformance.LockConformance):
    backend = Guarded


class TestThreading(conformance.ThreadingConformance):
    backend = Guarded


class TestLease(conformance.LeaseConformance):
    backend = Guarded


class TestOption(conformance.OptionConformance):
    backend = Guarded


class TestLoss(conformance.LossConformance):
    backend = Guarded


class TestWith(conformance.WithConformance):
    backend = Guarded


class TestCancel(conformance.CancelConformance):
    backend = Guarded


class TestOutage(conformance.OutageConformance):
    backend = Guarded


class TestClient(conformance.ClientConformance):
    backend = Guarded


class TestClose(conformance.CloseConformance):
    backend = Guarded


class TestElection(conformance.ElectionConformance):
    backend = Guarded


class TestRest(conformance.RestConformance):
    backend = Guarded


class TestReadWrite(conformance.ReadWriteConformance):
    backend = Guarded


class TestSemaphore(conformance.SemaphoreConformance):
    backend = Guarded


class TestLockAll(conformance.LockAllConformance):
    backend = Guarded


class TestBackend(conformance.BackendConformance):
    backend = Guarded


class TestProcess(conformance.ProcessConformance):
    backend = Guarded


class TestDescriptors(conformance.DescriptorConformance):
    backend = Guarded
