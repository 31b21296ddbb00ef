"""The suites on ``redlock://``, on three real servers, in which requests go wrong; the others are in `more_redlock`."""

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
