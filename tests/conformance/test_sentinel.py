"""The suites on ``redis+sentinel://`` in which connections open and break, on a real server and a real Sentinel.

The others are in `more_sentinel`: once connected, the backend behaves like ``redis://``.
"""

from __future__ import annotations

from multilock.testing import conformance
from tests.conformance.places import Guarded


class TestCancel(conformance.CancelConformance):
    backend = Guarded


class TestClient(conformance.ClientConformance):
    backend = Guarded


class TestBackend(conformance.BackendConformance):
    backend = Guarded
