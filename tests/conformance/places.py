"""The places under test of several backends. A place is one backend with its server, and the means to inject faults."""

from __future__ import annotations

import atexit
import contextlib
import sqlite3
import tempfile
from functools import lru_cache
from urllib.parse import urlsplit

import redis

import multilock
import multilock_memory
from multilock.names import escape
from multilock.testing.conformance import Call, Mishap, Place
from tests.conformance.proxied import OnTheWire, Proxied
from tests.servers import address
from tests.servers_sentinel import SentinelServer

__all__ = ["Guarded", "Memory", "Redis", "Sqlite"]


class Memory(Place):
    scheme = "memory"

    @property
    def url(self) -> str:
        return f"memory://{self.prefix.strip('/')}"

    def delete(self, name: str) -> None:
        # No client can delete a key of this store, so the test uses the store directly.
        store = multilock_memory._stores[self.prefix.strip("/")]
        with store.mutex:
            store.force(self.prefix + escape(name), multilock.now())
        store.outbox.deliver()

    def leftovers(self) -> list[str]:
        store = multilock_memory._stores.get(self.prefix.strip("/"))
        return sorted(store.names) if store else []


class Sqlite(Place):
    """A database file for each test. Keys are deleted by SQL, as an operator would."""

    scheme = "sqlite"

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory(prefix="multilock-test-")
        self._path = f"{self._folder.name}/locks.db"

    @property
    def url(self) -> str:
        return f"sqlite://{self._path}"

    def delete(self, name: str) -> None:
        with contextlib.closing(sqlite3.connect(self._path, timeout=5)) as file, file:
            assert file.execute("DELETE FROM locks WHERE key = ?", (self.prefix + escape(name),)).rowcount == 1

    def leftovers(self) -> list[str]:
        """Return every row, except tombstones that expire by themselves."""
        with contextlib.closing(sqlite3.connect(self._path, timeout=5)) as file:
            endless = file.execute("SELECT id FROM cancelled WHERE until > ?", (multilock.now() + 120,))
            rows = [*file.execute("SELECT key FROM locks"), *file.execute("SELECT key FROM queue"), *endless]
        return sorted(key for (key,) in rows)

    def close(self) -> None:
        self._folder.cleanup()


class Redis(Proxied):
    """All faults use real connections."""

    scheme = "redis"

    def __init__(self) -> None:
        super().__init__(_redis_url())

    def delete(self, name: str) -> None:
        assert self._ask("DEL", self.prefix + escape(name)) == 1

    def leftovers(self) -> list[str]:
        """Return every key of multilock, except keys that may stay until they expire."""
        keys = self._keys(f"*{self.prefix}*")
        return sorted(key for key in keys if not (key.endswith(":token") or ":gone:" in key) or not self._ends(key))

    def drop_reply(self, call: Call) -> Mishap:
        return self.faults.plan(call, OnTheWire(lambda ids: self.proxy.drop_reply(ids[0].encode())))

    def hold_request(self, call: Call) -> Mishap:
        return self.faults.plan(call, OnTheWire(lambda ids: self.proxy.hold_request(ids[0].encode())))

    def _ends(self, key: str) -> bool:
        return self._ask("PTTL", key) > 0

    def _keys(self, pattern: str) -> list[str]:
        with self._connection() as connection:
            return [key.decode() for key in connection.scan_iter(pattern, count=1000)]

    def _ask(self, *words: str) -> int:
        with self._connection() as connection:
            answer: int = connection.execute_command(*words)
            return answer

    def _connection(self) -> redis.Redis:
        return redis.Redis.from_url(self._clean_url, single_connection_client=True)


class Guarded(Redis):
    """The shared Redis server, found through a Sentinel. The Sentinel lists the server under two names: one with the
    address of this test's proxy, the other with the address of the server.

    This Sentinel is alone and starts no failover.
    """

    scheme = "redis+sentinel"

    def __init__(self) -> None:
        super().__init__()
        self._guard = _guard()
        with self._guard.client() as guard:
            guard.execute_command("SENTINEL", "MONITOR", self._name, self.proxy.host, self.proxy.port, 2)

    @property
    def url(self) -> str:
        return f"redis+sentinel://{self._guard.endpoint}/{self._name}/0"

    @property
    def clean_url(self) -> str:
        return f"redis+sentinel://{self._guard.endpoint}/clean/0"

    def close(self) -> None:
        with self._guard.client() as guard:
            guard.execute_command("SENTINEL", "REMOVE", self._name)
        super().close()

    @property
    def _name(self) -> str:
        return f"by-{self.proxy.port}"


@lru_cache
def _guard() -> SentinelServer:
    """Return the Sentinel that all these tests share."""
    place = urlsplit(_redis_url())
    guard = SentinelServer(lambda: [f"sentinel monitor clean {place.hostname} {place.port} 2"])
    guard.start()
    atexit.register(guard.stop)
    return guard


@lru_cache
def _redis_url() -> str:
    """Return the URL of the server that all these tests share. The server has already loaded multilock's scripts."""
    server = contextlib.ExitStack()
    url = server.enter_context(address("redis"))
    atexit.register(server.close)
    with multilock.connect(url) as client, client.lock("warm-up") as lease:
        lease.renew()
    return url
