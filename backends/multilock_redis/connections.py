"""The connections of a client to one Redis server. A request takes an idle connection, or makes a new one."""

from __future__ import annotations

import ssl
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from multilock import BackendUnavailable, system
from multilock.backend import start_worker
from multilock_redis.transport import Answer, Endpoint, Wire

__all__ = ["Connections"]

# SPARE idle connections are kept without a time limit. Further idle connections are kept for SPARE_FOR seconds.
SPARE = 4
SPARE_FOR = 60.0
TEND_EVERY = 5.0  # seconds between two checks for idle connections that must be closed


class Connections:
    """The connections of one client to one server. The most recently used connection is taken first. Any thread may use
    this object."""

    def __init__(self, endpoint: Endpoint, now: Callable[[], float]) -> None:
        self._endpoint = endpoint
        self._now = now
        self._idle: deque[Wire] = deque()  # used without a lock, since its methods are atomic
        self._closed = system.Event()
        self._tended = False  # whether the thread runs that closes idle connections
        self.tls: ssl.SSLContext | None = None  #: the TLS settings of the newest connection, or None without TLS

    def call(self, request: bytes, within: float) -> Answer:
        """Send one request over an idle or a new connection. Returns its reply, and when it was sent."""
        wire, left = self._take(within)
        try:
            return wire.call(request, left), wire.used
        finally:
            self._give(wire)

    def exchange(self, requests: Sequence[bytes], within: float) -> list[Answer]:
        """Send a pipeline over an idle or a new connection; see `Wire.exchange`."""
        wire, left = self._take(within)
        try:
            return wire.exchange(requests, left)
        finally:
            self._give(wire)

    @property
    def where(self) -> str:
        """The server's name in messages."""
        return self._endpoint.name

    def channel(self, within: float) -> Wire | None:
        """Return a non-blocking connection that only the caller uses, or None if the server uses TLS."""
        wire = self._endpoint.connect(within, self._now)
        if wire.never_block():
            return wire
        self._give(wire)
        return None

    def close(self) -> None:
        """Close the idle connections. A connection in use is closed when its request ends."""
        self._closed.set()
        self._endpoint.close()
        self._trim()

    def _take(self, within: float) -> tuple[Wire, float]:
        """Return a connection, and the seconds that are left of ``within``.

        If this process was paused, no time may be left. Then the request must not be sent, since the servers may have
        forgotten that its claim was cancelled. So this raises.
        """
        start = self._now()
        while self._idle:
            try:
                wire = self._idle.pop()
            except IndexError:  # another thread has taken the connection
                continue
            if not wire.stale():
                break
            wire.close()
        else:
            wire = self._endpoint.connect(within, self._now)
            self.tls = wire.tls
        left = start + within - self._now()
        if left <= 0:
            self._give(wire)
            raise BackendUnavailable(f"{wire.where}: no time was left to ask it", unknown=False, backend="redis")
        return wire, left

    def _give(self, wire: Wire) -> None:
        if wire.alive:
            self._idle.append(wire)
            if self._closed.is_set():
                self._trim()
            elif len(self._idle) > SPARE and not self._tended:
                self._tended = True
                start_worker(self._tend, "multilock-redis-idle")

    def _tend(self) -> None:
        """Close old connections until at most `SPARE` are idle. A separate thread runs this."""
        while len(self._idle) > SPARE and not self._closed.wait(TEND_EVERY):
            self._trim()
        self._tended = False

    def _trim(self) -> None:
        """Close the idle connections that are old, or that the server has closed. After `close`, this closes all of
        them."""
        with suppress(IndexError):  # another thread may just have taken the last connection
            for _ in range(len(self._idle)):
                wire = self._idle.popleft()
                old = len(self._idle) >= SPARE and wire.used < self._now() - SPARE_FOR
                if self._closed.is_set() or old or wire.stale():
                    wire.close()
                else:
                    self._idle.append(wire)
