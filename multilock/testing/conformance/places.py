"""The suite's access to a backend under test, and the faults that the suite causes.

A `Place` is one backend under test. By default it causes faults with a `FaultyBackend`, which stands between the kernel
and the backend. A place that has a real server to stop, or a proxy, overrides the methods that cause faults.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from typing import Any, ClassVar

from multilock import Client
from multilock.backend import Backend
from multilock.registry import open_backend
from multilock.testing.conformance.faces import Face
from multilock.testing.conformance.faulty_backend import (
    Call,
    Delayed,
    Dropped,
    Faults,
    FaultyBackend,
    HeldBack,
    Mishap,
    Slow,
)

__all__ = ["Place"]


class Place:
    """One backend under test, new for each test. Subclass it and define at least `url` and `delete`.

    A place that can read the server's data, stop it or lose its replies should override more methods, so that the tests
    check more. All names of a test are below `prefix`, which no other test uses.
    """

    #: A module that calls `register_backend`. The helper processes of ProcessConformance import it to register the
    #: backend. A backend with an entry point does not need it.
    registered_in: ClassVar[str | None] = None
    quick_ttl: float = 1.2  #: seconds; the shortest ttl whose timing is right even on a busy machine
    calm_ttl: float = 2.0  #: seconds; the shortest ttl whose last tenth gives the lost callback time to start

    rest: float = 1.0  #: seconds; the shortest ``hold_at_least`` that the server keeps
    rest_at_most: float = 1.0  #: seconds; the name stays taken at most this long with a ``hold_at_least`` of ``rest``

    #: The backend's own options for the clients of the suite.
    options: ClassVar[dict[str, object]] = {}

    def __init__(self) -> None:
        self.prefix = f"conformance-{uuid.uuid4().hex[:12]}/"
        self.faults = Faults()

    @property
    def url(self) -> str:
        """The URL for clients whose requests may be disturbed."""
        raise NotImplementedError

    @property
    def steady_ttl(self) -> float:
        """The ttl in seconds of a lease that must survive half a second in which the machine does not run."""
        return max(self.quick_ttl, self.calm_ttl)

    @property
    def clean_url(self) -> str:
        """The URL for clients whose requests are never disturbed."""
        return self.url

    def delete(self, name: str) -> None:
        """Remove the lock's key from the server without using multilock."""
        raise NotImplementedError

    def leftovers(self) -> list[str]:
        """Return the entries of this test at the server that do not end by themselves.

        The default asks the backend for held names. A place that reads the server directly can also return entries that
        the backend does not list, such as waiters.
        """
        with Client(self.backend()) as client:
            return [info.name for info in client.inspect_all()]

    def connect(self, face: Face, **options: Any) -> Client:
        """Return a client whose requests may be disturbed."""
        return face.client(FaultyBackend(self._open(self.url, options), self.faults), **_for_client(options))

    def bystander(self, face: Face, **options: Any) -> Client:
        """Return a client of the same locks whose requests are never disturbed."""
        return face.client(self._open(self.clean_url, options), **_for_client(options))

    def backend(self, **options: Any) -> Backend:
        """Return the backend itself, for tests of the SPI."""
        return self._open(self.clean_url, options)

    def drop_reply(self, call: Call) -> Mishap:
        """Let the next request of this kind be executed, but drop its reply."""
        return self.faults.plan(call, Dropped())

    def delay_reply(self, call: Call) -> Mishap:
        """Let the next request of this kind be executed, but hold back its reply until the test releases it."""
        return self.faults.plan(call, Delayed())

    def hold_request(self, call: Call) -> Mishap:
        """Hold the next request of this kind back. The request gets no reply in time, and is executed when the test
        releases it."""
        return self.faults.plan(call, HeldBack())

    def slow_request(self, call: Call, seconds: float) -> Mishap:
        """Delay the next request of this kind by ``seconds`` on its way to the backend. The request is then executed
        and gets its reply."""
        return self.faults.plan(call, Slow(seconds))

    def slow_answers(self, seconds: float) -> contextlib.AbstractContextManager[Backend] | None:
        """Yield a backend whose replies come ``seconds`` late inside this context. Its requests are executed at once.

        This shows whether a backend reads ``Granted.sent_at`` only after it sent its request. The default returns None,
        which is right if replies cannot be late. With a server, use `multilock.testing.FaultProxy.delay`.
        """
        return None

    @contextlib.contextmanager
    def silence(self) -> Iterator[None]:
        """Let requests have no reply inside this context, except those of undisturbed clients."""
        self.faults.silent.set()
        try:
            yield
        finally:
            self.faults.silent.clear()

    @contextlib.contextmanager
    def down(self) -> Iterator[None]:
        """Take the server down inside this context: requests fail at once, except those of undisturbed clients."""
        self.faults.down.set()
        try:
            yield
        finally:
            self.faults.down.clear()

    def close(self) -> None:
        """Remove everything that would disturb the next test."""

    def _open(self, url: str, options: dict[str, Any]) -> Backend:
        ttl = options.get("ttl", 10.0)
        shared = {"ttl": ttl, "prefix": self.prefix, "identity": "conformance", "request_timeout": None}
        return open_backend(url.partition(":")[0], url, {**shared, **self.options})


def _for_client(options: dict[str, Any]) -> dict[str, Any]:
    return {"ttl": 10.0, **options}
