"""The suites on ``redis+sentinel://`` that `test_sentinel` leaves out: ``make conformance``."""

from __future__ import annotations

from multilock.testing import conformance
from tests.conformance.places import Guarded


class TestLock(conformance.LockConformance):
    backend = Guarded


class TestOutage(conformance.OutageConformance):
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


class TestProcess(conformance.ProcessConformance):
    backend = Guarded


class TestDescriptors(conformance.DescriptorConformance):
    backend = Guarded
