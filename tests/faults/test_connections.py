"""Connections that come late, break, or are cut by the server."""

from __future__ import annotations

import threading

import pytest
from redis.connection import Connection

from multilock import BackendUnavailable, now
from multilock_redis.transport import Endpoint


def test_a_connection_that_is_made_too_late_is_closed(redis_url: str) -> None:
    go_on = threading.Event()
    made: list[Connection] = []

    class Slow(Connection):
        def connect(self) -> None:
            assert go_on.wait(5)
            super().connect()  # type: ignore[no-untyped-call]
            made.append(self)

    port = int(redis_url.rpartition(":")[2].partition("/")[0])
    with pytest.raises(BackendUnavailable, match="within"):
        Endpoint("redis", Slow, {"port": port}).connect(0.05, now)
    dial = next(thread for thread in threading.enumerate() if thread.name == "multilock-redis-connect")
    go_on.set()
    dial.join(5)
    assert made[0]._sock is None
