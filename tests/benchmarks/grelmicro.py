"""The lock of grelmicro on Redis and PostgreSQL.

The library is imported where it is used, because most processes of a benchmark do not need it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

__all__ = ["GRELMICRO", "locks_of_grelmicro"]

GRELMICRO = "grelmicro, asyncio"


@asynccontextmanager
async def locks_of_grelmicro(
    url: str, name: str, ttl: float
) -> AsyncIterator[Callable[[], AbstractAsyncContextManager[object]]]:
    """Yield a function that returns a new lock with this name."""
    from grelmicro.sync import Lock  # type: ignore[import-not-found, unused-ignore]
    from grelmicro.sync.postgres import PostgresSyncBackend  # type: ignore[import-not-found, unused-ignore]
    from grelmicro.sync.redis import RedisSyncBackend  # type: ignore[import-not-found, unused-ignore]

    kind = RedisSyncBackend if url.startswith("redis:") else PostgresSyncBackend
    async with kind(url) as backend:
        yield lambda: Lock(name, backend=backend, lease_duration=ttl)
