"""A server that restarted may have forgotten whom it let in: until every such lease is over its votes do not count."""

from __future__ import annotations

from collections.abc import Callable

from multilock import BackendRejected
from multilock_redis.transport import Endpoint, Wire
from multilock_redis.wire import pack

__all__ = ["Guarded"]

INFO = pack("INFO", "server")


class Guarded(Endpoint):
    """A server that is asked, on each new connection, for how long it has been up."""

    counts_from = 0.0  #: on our clock; before that it may have forgotten what it granted

    @classmethod
    def around(cls, endpoint: Endpoint, guard: float) -> Guarded:
        guarded = cls(endpoint.name, endpoint._class, endpoint._settings)
        guarded.guard = guard
        return guarded

    guard: float

    def _dial(self, within: float, now: Callable[[], float]) -> Wire:
        deadline = now() + within
        wire = super()._dial(within, now)
        try:
            told = wire.call(INFO, deadline - now())
        except BackendRejected as refused:
            if not self.guard:
                return wire
            wire.close()
            raise BackendRejected(
                f"{refused}: allow this user INFO, or give restart_guard=0: a server that restarted has to be known"
            ) from refused
        if self.guard:
            up = next((line for line in told.splitlines() if line.startswith(b"uptime_in_seconds:")), b"")
            if not up:
                wire.close()
                raise BackendRejected(f"{self.name} does not say for how long it has been up: give restart_guard=0")
            # It was up for so long at least when it said so, and no later than now. A second, since both clocks differ.
            counts_from = now() - int(up.partition(b":")[2]) + self.guard + 1
            if counts_from > now():
                self.counts_from = max(self.counts_from, counts_from)
        return wire
