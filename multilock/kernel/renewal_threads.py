"""The threads that send renewals: a separate set for each group of leases, made when the group is first renewed.

The leases of one group (a server or a session) are renewed in one request. A renewal that hangs occupies a thread of
its group only, so a dead server does not delay the renewals at other servers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from multilock.kernel.runtime import Runtime, Workers

__all__ = ["RenewalThreads"]

CARRIERS = 4  # renewing threads for each group, so that a renewal that hangs does not stop the next one


class RenewalThreads:
    """The renewing threads of one client."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._carriers: dict[Hashable, Workers] = {}

    def carry(self, group: Hashable, job: Callable[[], None]) -> None:
        """Run a renewal on the threads of its group. Called by the ticking thread.

        If the operating system refuses all of these threads, the ticking thread itself sends the renewal. If the
        backend hangs, the ticking thread then checks other deadlines late.
        """
        carriers = self._carriers.get(group)
        if carriers is None:
            carriers = self._runtime.workers("multilock-renew", CARRIERS, or_here=True)
            self._carriers[group] = carriers
        carriers.submit(job)

    def dismiss(self, group: Hashable) -> None:
        """End the renewing threads of this group. Renewals under way are still finished."""
        if carriers := self._carriers.pop(group, None):
            carriers.close()

    def close(self) -> None:
        """End the renewing threads of all groups."""
        for carriers in list(self._carriers.values()):
            carriers.close()
