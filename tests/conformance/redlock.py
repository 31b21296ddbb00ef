"""Redlock on three Redis servers under test. All tests share the servers, and each test has its own proxies."""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, ClassVar

import redis

from multilock.backend import Backend
from multilock.names import escape
from multilock.testing import FaultProxy
from multilock.testing.conformance import Place
from tests.servers_redlock import RedisServers, url_of

__all__ = ["Redlock"]


class Redlock(Place):
    """Each fault hits all three servers. Faults of one or two servers are tested in tests/backends/redlock."""

    scheme = "redlock"
    options: ClassVar[dict[str, object]] = {"restart_guard": 0}

    def __init__(self) -> None:
        super().__init__()
        self._members = _servers().members
        self._proxies = [FaultProxy.before(member.url) for member in self._members]

    @property
    def url(self) -> str:
        return url_of([f"{proxy.host}:{proxy.port}" for proxy in self._proxies])

    @property
    def clean_url(self) -> str:
        return _servers().url

    def delete(self, name: str) -> None:
        for connection in self._connections():
            connection.delete(self.prefix + escape(name))

    def leftovers(self) -> list[str]:
        """Return every key of multilock, except keys that may stay until they expire."""
        left = []
        for connection in self._connections():
            for key in connection.scan_iter(f"*{self.prefix}*", count=1000):
                stays = key.endswith(b":token") or b":gone:" in key
                if not stays or connection.pttl(key) <= 0:
                    left.append(key.decode())
        return sorted(left)

    @contextlib.contextmanager
    def slow_answers(self, seconds: float) -> Iterator[Backend]:
        for proxy in self._proxies:
            proxy.delay(seconds, "down")
        try:
            yield self._open(self.url, {})
        finally:
            for proxy in self._proxies:
                proxy.heal()

    @contextlib.contextmanager
    def silence(self) -> Iterator[None]:
        for proxy in self._proxies:
            proxy.black_hole()
        try:
            yield
        finally:
            for proxy in self._proxies:
                proxy.heal()

    @contextlib.contextmanager
    def down(self) -> Iterator[None]:
        for proxy in self._proxies:
            proxy.refuse()
            proxy.cut()
        try:
            yield
        finally:
            for proxy in self._proxies:
                proxy.accept()

    def close(self) -> None:
        for proxy in self._proxies:
            proxy.close()

    def _open(self, url: str, options: dict[str, Any]) -> Backend:
        bare, _, _ = url.partition("?")
        return super()._open(bare, options)

    def _connections(self) -> Iterator[redis.Redis]:
        for member in self._members:
            with redis.Redis.from_url(member.url, single_connection_client=True) as connection:
                yield connection


@lru_cache
def _servers() -> RedisServers:
    """Return the servers that all these tests share."""
    servers = RedisServers()
    servers.start()
    atexit.register(servers.stop)
    return servers
