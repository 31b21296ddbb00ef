"""Several independent Redis servers, for ``redlock://``."""

from __future__ import annotations

from collections.abc import Sequence

from tests.servers import RedisServer, Service

__all__ = ["RedisServers"]


class RedisServers(Service):
    def __init__(self, count: int = 3) -> None:
        self.members = [RedisServer() for _ in range(count)]

    @property
    def url(self) -> str:
        """Return the URL without the restart guard, which would delay the first lock because the servers have just
        started."""
        return url_of([member.endpoint for member in self.members])

    def start(self) -> None:
        for member in self.members:
            member.start()

    def stop(self) -> None:
        for member in self.members:
            member.stop()


def url_of(endpoints: Sequence[str], guard: float = 0) -> str:
    return f"redlock://{','.join(endpoints)}/0?restart_guard={guard:g}"
