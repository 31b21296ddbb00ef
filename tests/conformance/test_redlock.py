"""The suites on ``redlock://`` in which requests fail, on three real servers. The others are in `more_redlock`."""

from __future__ import annotations

from multilock.testing import conformance
from tests.conformance.redlock import Redlock


class TestLock(conformance.LockConformance):
    backend = Redlock


class TestCancel(conformance.CancelConformance):
    backend = Redlock


class TestOutage(conformance.OutageConformance):
    backend = Redlock


class TestBackend(conformance.BackendConformance):
    backend = Redlock
