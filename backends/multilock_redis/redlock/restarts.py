"""The restart guard: votes of a restarted server do not count until all leases that it may have forgotten have expired.

This module also refuses two addresses of one server, which would have two votes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from multilock import BackendRejected, BackendUnavailable, system
from multilock_redis.transport import Endpoint, Wire
from multilock_redis.wire import pack

__all__ = ["Guarded", "SameServer"]

INFO = pack("INFO", "server")


class SameServer(BackendRejected):
    """Two of the addresses lead to one server, which would have two votes."""


class Guarded(Endpoint):
    """The address of a server. On each new connection the client asks for the server's run_id and its uptime."""

    counts_from = 0.0  #: when the votes of the server count again, on our clock
    run = b""  #: run_id of the server at this address, which changes with each start
    others: Sequence[Guarded] = ()
    _meeting = system.Lock()  # guards `run` of all servers of one client

    @classmethod
    def around(cls, endpoint: Endpoint, guard: float) -> Guarded:
        guarded = cls(endpoint.name, endpoint._class, endpoint._settings)
        guarded.guard = guard
        return guarded

    guard: float

    @staticmethod
    def introduce(all_of_them: Sequence[Guarded]) -> None:
        """Give the servers of one client a common lock, and a list of the other servers.

        A forked child calls this again, because a thread of the parent may have held the old lock.
        """
        meeting = system.Lock()
        for one in all_of_them:
            one._meeting = meeting
            one.others = [other for other in all_of_them if other is not one]

    def _dial(self, within: float, now: Callable[[], float]) -> Wire:
        deadline = now() + within
        wire = super()._dial(within, now)
        try:
            told = wire.call(INFO, deadline - now())
        except BackendUnavailable as silence:
            wire.close()
            raise BackendUnavailable(str(silence), unknown=False, backend="redis") from silence
        except BackendRejected as refused:
            if not self.guard and "NOAUTH" not in str(refused):
                return wire
            wire.close()
            if "NOAUTH" in str(refused):
                raise
            raise BackendRejected(
                f"{refused}: allow this user INFO, or give restart_guard=0: multilock must notice a restart"
            ) from refused
        facts = dict(line.split(b":", 1) for line in told.splitlines() if b":" in line)
        try:
            self._meet(facts.get(b"run_id", b""))
            if self.guard:
                self._wait_for_those_before(facts.get(b"uptime_in_seconds"), now())
        except BackendRejected:
            wire.close()
            raise
        return wire

    def _meet(self, run: bytes) -> None:
        with self._meeting:
            if twin := next((other for other in self.others if run and other.run == run), None):
                raise SameServer(f"{self.name} is the server that {twin.name} is: it has one vote, name it once")
            self.run = run

    def _wait_for_those_before(self, up: bytes | None, now: float) -> None:
        if up is None:
            raise BackendRejected(f"{self.name} does not say for how long it has been up: give restart_guard=0")
        # The server started at least ``up`` seconds before now. Every lease that it forgot began before that start. One
        # second is added for differences between the clocks.
        counts_from = now - int(up) + self.guard + 1
        if counts_from > now:
            self.counts_from = max(self.counts_from, counts_from)
