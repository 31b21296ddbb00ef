"""The backends of this distribution as places under test, each hurt by its own means."""

from __future__ import annotations

import atexit
import contextlib
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import lru_cache
from typing import TypeVar

import redis

import multilock
import multilock_memory
from multilock.names import escape
from multilock.testing import Fault, FaultProxy
from multilock.testing.conformance import Call, Mishap, Place
from tests.servers import address

__all__ = ["Memory", "Redis", "Sqlite"]

T = TypeVar("T")


class Memory(Place):
    scheme = "memory"

    @property
    def url(self) -> str:
        return f"memory://{self.prefix.strip('/')}"

    def delete(self, name: str) -> None:
        # Nothing but the store itself can take a key away.
        store = multilock_memory._stores[self.prefix.strip("/")]
        with store.mutex:
            store.force(self.prefix + escape(name), multilock.now())
        store.deliver()

    def leftovers(self) -> list[str]:
        store = multilock_memory._stores.get(self.prefix.strip("/"))
        return sorted(store.names) if store else []


class Sqlite(Place):
    """A file of its own; keys are taken away by SQL, as an operator would."""

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
        """Every row but tombstones, which have an end."""
        with contextlib.closing(sqlite3.connect(self._path, timeout=5)) as file:
            endless = file.execute("SELECT id FROM cancelled WHERE until > ?", (multilock.now() + 120,))
            rows = [*file.execute("SELECT key FROM locks"), *file.execute("SELECT key FROM queue"), *endless]
        return sorted(key for (key,) in rows)

    def close(self) -> None:
        self._folder.cleanup()


class Redis(Place):
    """One server for all tests; a proxy of its own for each, which makes the faults with real connections."""

    scheme = "redis"

    def __init__(self) -> None:
        super().__init__()
        self._proxy = FaultProxy.before(_redis_url())

    @property
    def url(self) -> str:
        return self._proxy.url

    @property
    def clean_url(self) -> str:
        return _redis_url()

    def delete(self, name: str) -> None:
        assert self._ask("DEL", self.prefix + escape(name)) == 1

    def leftovers(self) -> list[str]:
        """Every key of ours but those that are meant to stay for a while, and do have an end."""
        keys = self._keys(f"*{self.prefix}*")
        return sorted(key for key in keys if not (key.endswith(":token") or ":gone:" in key) or not self._ends(key))

    def drop_reply(self, call: Call) -> Mishap:
        return self._when(call, self._proxy.drop_reply)

    def hold_request(self, call: Call) -> Mishap:
        return self._when(call, self._proxy.hold_request)

    @contextlib.contextmanager
    def silence(self) -> Iterator[None]:
        self._proxy.black_hole()
        try:
            yield
        finally:
            self._proxy.heal()

    @contextlib.contextmanager
    def down(self) -> Iterator[None]:
        self._proxy.refuse()
        self._proxy.cut()
        try:
            yield
        finally:
            self._proxy.accept()

    def close(self) -> None:
        self._proxy.close()

    def _when(self, call: Call, plan: Callable[[bytes], Fault]) -> Mishap:
        mishap = _OnTheWire(plan)
        self.faults.plan(call, mishap)
        return mishap

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
        return redis.Redis.from_url(_redis_url(), single_connection_client=True)


class _OnTheWire:
    """A request that goes wrong between its client and the server; it is known by the id of its claim."""

    def __init__(self, plan: Callable[[bytes], Fault]) -> None:
        self._plan = plan
        self._planned: Future[Fault] = Future()

    def strike(self, ids: Sequence[str], within: float, request: Callable[[], T]) -> T:
        self._planned.set_result(self._plan(ids[0].encode()))
        return request()

    def wait(self, within: float) -> None:
        self._planned.result(within).wait(within)

    def release(self) -> None:
        self._planned.result(0).release()


@lru_cache
def _redis_url() -> str:
    """Of the one server that all these tests share; it knows the scripts already."""
    server = contextlib.ExitStack()
    url = server.enter_context(address("redis"))
    atexit.register(server.close)
    with multilock.connect(url) as client, client.lock("warm-up") as lease:
        lease.renew()
    return url
