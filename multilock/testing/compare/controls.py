"""Locks that are known to be weak. A comparison in which they come out well has shown nothing, and says so.

`Naive`, `Flag` and `Kazoo` name the scenarios in which they must fail. `RedisPy` is there to be seen: it renews
nothing, and asks the server whenever it is asked.
"""

from __future__ import annotations

import secrets
import threading
from typing import Any
from urllib.parse import urlsplit

import multilock
from multilock.testing.compare.contestants import Blocking, Holding, Lock, Place
from multilock.testing.compare.sessions import close_kazoo

__all__ = ["CONTROLS", "Flag", "Kazoo", "Naive", "RedisPy"]

WEAK = frozenset({"pause", "partition", "taken", "session"})
SOCKET_TIMEOUT = 1.0


class Flag(Blocking):
    """multilock, by a user who asks once and believes it until his own release."""

    control = WEAK

    @staticmethod
    def open(url: str, ttl: float) -> Place:
        return _FlagPlace(Blocking.open(url, ttl))


class _FlagPlace:
    def __init__(self, place: Place) -> None:
        self._place = place

    def lock(self, name: str) -> Lock:
        return _FlagLock(self._place.lock(name))

    def end_session(self) -> bool:
        return bool(self._place.end_session())  # type: ignore[attr-defined]  # Blocking has it

    def close(self) -> None:
        self._place.close()


class _FlagLock:
    def __init__(self, lock: Lock) -> None:
        self._lock = lock

    def acquire(self, timeout: float) -> Holding | None:
        holding = self._lock.acquire(timeout)
        return None if holding is None else _FlagHolding(holding)


class _FlagHolding:
    def __init__(self, holding: Holding) -> None:
        self._holding = holding
        self._locked = True
        self.token = holding.token
        self.ttl: float = holding.ttl  # type: ignore[attr-defined]  # as above

    def believes(self) -> bool:
        return self._locked

    def release(self) -> object:
        self._locked = False
        return self._holding.release()


class Naive:
    """What many write by themselves: SET NX with a ttl, a flag, and a timer that extends the key, whoever has it."""

    control = WEAK

    @staticmethod
    def open(url: str, ttl: float) -> Place:
        return _NaivePlace(_redis(url), ttl)

    @staticmethod
    def take(url: str, name: str) -> bool:
        return _delete(url, name)


class _NaivePlace:
    def __init__(self, client: Any, ttl: float) -> None:
        self._client, self._ttl = client, ttl

    def lock(self, name: str) -> Lock:
        return _NaiveLock(self._client, name, self._ttl)

    def close(self) -> None:
        self._client.close()


class _NaiveLock:
    def __init__(self, client: Any, name: str, ttl: float) -> None:
        self._client, self._name, self._ttl = client, name, ttl

    def acquire(self, timeout: float) -> Holding | None:
        milliseconds = int(self._ttl * 1000)
        owner = secrets.token_hex(8)
        until = multilock.now() + timeout
        while not self._set(owner, milliseconds):
            if multilock.now() > until:
                return None
            threading.Event().wait(0.02)
        return _NaiveHolding(self._client, self._name, owner, self._ttl)

    def _set(self, owner: str, milliseconds: int) -> bool:
        import redis

        try:
            return bool(self._client.set(self._name, owner, nx=True, px=milliseconds))
        except redis.RedisError:  # a server that is stopped goes on some time
            return False


class _NaiveHolding:
    token: int | None = None

    def __init__(self, client: Any, name: str, owner: str, ttl: float) -> None:
        self._client, self._name, self._owner, self.ttl = client, name, owner, ttl
        self._locked = True
        self._done = threading.Event()
        threading.Thread(target=self._extend, name="naive-timer", daemon=True).start()

    def believes(self) -> bool:
        return self._locked

    def release(self) -> object:
        self._locked = False
        self._done.set()
        if self._client.get(self._name) == self._owner.encode():
            self._client.delete(self._name)
        return True

    def _extend(self) -> None:
        import redis

        while not self._done.wait(self.ttl / 3):
            try:
                self._client.pexpire(self._name, int(self.ttl * 1000))
            except redis.RedisError:
                continue


class RedisPy:
    """``redis.lock.Lock``, asked by its ``owned()``; no answer counts as no."""

    control: frozenset[str] = frozenset()

    @staticmethod
    def open(url: str, ttl: float) -> Place:
        return _RedisPyPlace(_redis(url), ttl)

    @staticmethod
    def take(url: str, name: str) -> bool:
        return _delete(url, name)


class _RedisPyPlace:
    def __init__(self, client: Any, ttl: float) -> None:
        self._client, self._ttl = client, ttl

    def lock(self, name: str) -> Lock:
        return _RedisPyLock(self._client.lock(name, timeout=self._ttl, thread_local=False), self._ttl)

    def close(self) -> None:
        self._client.close()


class _RedisPyLock:
    def __init__(self, lock: Any, ttl: float) -> None:
        self._lock, self._ttl = lock, ttl

    def acquire(self, timeout: float) -> Holding | None:
        taken = self._lock.acquire(blocking_timeout=timeout)
        return _RedisPyHolding(self._lock, self._ttl) if taken else None


class _RedisPyHolding:
    token: int | None = None

    def __init__(self, lock: Any, ttl: float) -> None:
        self._lock, self.ttl = lock, ttl

    def believes(self) -> bool:
        import redis

        try:
            return bool(self._lock.owned())
        except redis.RedisError:
            return False

    def release(self) -> object:
        self._lock.release()
        return True


class Kazoo:
    """``kazoo.recipe.lock.Lock``, asked by its ``is_acquired``."""

    control = frozenset({"pause", "partition", "session"})

    @staticmethod
    def open(url: str, ttl: float) -> Place:
        return _KazooPlace(url, ttl)

    @staticmethod
    def bound(url: str, ttl: float) -> float:
        return 2 * ttl + 5.0

    @staticmethod
    def has_sessions(url: str) -> bool:
        return True


class _KazooPlace:
    def __init__(self, url: str, ttl: float) -> None:
        from kazoo.client import KazooClient

        parts = urlsplit(url)
        retry = {"max_tries": -1, "delay": 0.05, "max_delay": 0.5}
        hosts = parts.netloc.rpartition("@")[2] + parts.path.rstrip("/")
        self._client = KazooClient(hosts, timeout=ttl, connection_retry=retry)
        self._client.start(timeout=15)
        self._ttl = ttl

    def lock(self, name: str) -> Lock:
        return _KazooLock(self._client.Lock(f"/{name}"), self._ttl)

    def end_session(self) -> bool:
        return close_kazoo(self._client)

    def close(self) -> None:
        self._client.stop()
        self._client.close()


class _KazooLock:
    def __init__(self, lock: Any, ttl: float) -> None:
        self._lock, self._ttl = lock, ttl

    def acquire(self, timeout: float) -> Holding | None:
        from kazoo.exceptions import LockTimeout

        try:
            taken = self._lock.acquire(timeout=timeout)
        except LockTimeout:
            return None
        return _KazooHolding(self._lock, self._ttl) if taken else None


class _KazooHolding:
    token: int | None = None

    def __init__(self, lock: Any, ttl: float) -> None:
        self._lock, self.ttl = lock, ttl

    def believes(self) -> bool:
        return bool(self._lock.is_acquired)

    def release(self) -> object:
        return self._lock.release()


CONTROLS: dict[str, dict[str, type[Naive | RedisPy | Kazoo]]] = {
    "redis": {"naive": Naive, "redis-py": RedisPy},
    "zookeeper": {"kazoo": Kazoo},
    "zk": {"kazoo": Kazoo},
}
"""By the scheme of a URL, what is run beside ours; `Flag` where there is nothing else."""


def _redis(url: str) -> Any:
    import redis

    bare = url.partition("?")[0]
    return redis.Redis.from_url(bare, socket_timeout=SOCKET_TIMEOUT, socket_connect_timeout=SOCKET_TIMEOUT)


def _delete(url: str, name: str) -> bool:
    with _redis(url) as client:
        return bool(client.delete(name))
