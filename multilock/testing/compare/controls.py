"""Locks that are known to be weak. If they show no failure, the comparison has proved nothing, and its report says so.

`Naive`, `Flag`, `Kazoo` and `Advisory` declare the scenarios in which they must fail. `RedisPy` need not fail: it never
renews its lock, and asks the server at each check.

The controls use the login, the TLS settings and the prefix of the URL, as our locks do, because a login may have no
other permissions.
"""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import multilock
from multilock.config import open_configured, resolve
from multilock.options import LOGIN
from multilock.testing.compare.contestants import AdapterClient, AdapterHolding, AdapterLock, Blocking, close_kazoo

__all__ = ["CONTROLS", "Advisory", "Flag", "Kazoo", "Naive", "RedisPy"]

WEAK = frozenset({"pause", "partition", "taken", "session"})
SOCKET_TIMEOUT = 1.0
START_WITHIN = 15.0  # seconds until kazoo must have a session
CONTAINER = 4  # ZooKeeper's flag for a node that the server removes once it is empty after use


class Flag(Blocking):
    """multilock, with a user that checks once and then believes the reply until the release."""

    control = WEAK

    @staticmethod
    def open(url: str, ttl: float) -> AdapterClient:
        """Return a client."""
        return _FlagClient(Blocking.open(url, ttl))


class _FlagClient:
    def __init__(self, client: AdapterClient) -> None:
        self._client = client

    def lock(self, name: str) -> AdapterLock:
        return _FlagLock(self._client.lock(name))

    def end_session(self) -> bool:
        return bool(self._client.end_session())  # type: ignore[attr-defined]  # Blocking has it

    def close(self) -> None:
        self._client.close()


class _FlagLock:
    def __init__(self, lock: AdapterLock) -> None:
        self._lock = lock

    def acquire(self, timeout: float) -> AdapterHolding | None:
        holding = self._lock.acquire(timeout)
        return None if holding is None else _FlagHolding(holding)


class _FlagHolding:
    def __init__(self, holding: AdapterHolding) -> None:
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
    """A common home-made lock: SET NX with a ttl, a flag, and a timer that extends the key even if another process
    holds it."""

    control = WEAK

    @staticmethod
    def open(url: str, ttl: float) -> AdapterClient:
        """Return a client."""
        return _NaiveClient(_redis(url), ttl, _prefix(url))

    @staticmethod
    def take(url: str, name: str) -> bool:
        """Delete the key, as an operator would."""
        return _delete(url, name)

    @staticmethod
    def sweep(url: str, begin: str) -> list[str]:
        """Delete all keys whose names begin with ``begin``."""
        return _sweep(url, begin)


class _NaiveClient:
    def __init__(self, client: Any, ttl: float, prefix: str) -> None:
        self._client, self._ttl, self._prefix = client, ttl, prefix

    def lock(self, name: str) -> AdapterLock:
        return _NaiveLock(self._client, self._prefix + name, self._ttl)

    def close(self) -> None:
        self._client.close()


class _NaiveLock:
    def __init__(self, client: Any, name: str, ttl: float) -> None:
        self._client, self._name, self._ttl = client, name, ttl

    def acquire(self, timeout: float) -> AdapterHolding | None:
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
        except redis.RedisError:  # the server may be stopped for now: try again
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
    """``redis.lock.Lock``, checked with its ``owned()``. An error counts as False."""

    control: frozenset[str] = frozenset()

    @staticmethod
    def open(url: str, ttl: float) -> AdapterClient:
        """Return a client."""
        return _RedisPyClient(_redis(url), ttl, _prefix(url))

    @staticmethod
    def take(url: str, name: str) -> bool:
        """Delete the key, as an operator would."""
        return _delete(url, name)

    @staticmethod
    def sweep(url: str, begin: str) -> list[str]:
        """Delete all keys whose names begin with ``begin``."""
        return _sweep(url, begin)


class _RedisPyClient:
    def __init__(self, client: Any, ttl: float, prefix: str) -> None:
        self._client, self._ttl, self._prefix = client, ttl, prefix

    def lock(self, name: str) -> AdapterLock:
        return _RedisPyLock(self._client.lock(self._prefix + name, timeout=self._ttl, thread_local=False), self._ttl)

    def close(self) -> None:
        self._client.close()


class _RedisPyLock:
    def __init__(self, lock: Any, ttl: float) -> None:
        self._lock, self._ttl = lock, ttl

    def acquire(self, timeout: float) -> AdapterHolding | None:
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
    """``kazoo.recipe.lock.Lock``, checked with its ``is_acquired``."""

    control = frozenset({"pause", "partition", "session"})

    @staticmethod
    def open(url: str, ttl: float) -> AdapterClient:
        """Return a client."""
        return _KazooClient(url, ttl)

    @staticmethod
    def bound(url: str, ttl: float) -> float:
        """Return the seconds until another client can get the lock of a holder that vanished."""
        return 2 * ttl + 5.0

    @staticmethod
    def has_sessions(url: str) -> bool:
        """Return True."""
        return True

    @staticmethod
    def sweep(url: str, begin: str) -> list[str]:
        """Delete all nodes whose names begin with ``begin``. The server would remove empty parents only after a
        minute."""
        from kazoo.exceptions import KazooException, NoNodeError

        directory, _, first = _ours(url)._nodes.parent(begin).rpartition("/")
        with _kazoo(url, START_WITHIN) as client:
            for child in client.get_children(directory or "/"):
                if child.startswith(first):
                    with suppress(KazooException):
                        client.delete(f"{directory}/{child}", recursive=True)
            with suppress(NoNodeError):
                return sorted(child for child in client.get_children(directory or "/") if child.startswith(first))
        return []


class _KazooClient:
    def __init__(self, url: str, ttl: float) -> None:
        self._nodes = _ours(url)._nodes
        self._tls = _ours(url)._ensemble.tls
        self._client = _kazoo_client(url, ttl)
        self._client.start(timeout=START_WITHIN)
        self._ttl = ttl

    def lock(self, name: str) -> AdapterLock:
        return _KazooLock(self._client, self._nodes.parent(name), self._ttl)

    def end_session(self) -> bool:
        return close_kazoo(self._client, self._tls)

    def close(self) -> None:
        self._client.stop()
        self._client.close()


class _KazooLock:
    def __init__(self, client: Any, path: str, ttl: float) -> None:
        self._client, self._path, self._ttl = client, path, ttl
        self._lock = self._made()

    def _made(self) -> Any:
        """Return kazoo's lock below a container node. kazoo itself would make a parent node that stays forever."""
        _make_container(self._client, self._path)
        return self._client.Lock(self._path)

    def acquire(self, timeout: float) -> AdapterHolding | None:
        from kazoo.exceptions import LockTimeout, NoNodeError

        try:
            taken = self._lock.acquire(timeout=timeout)
        except LockTimeout:
            return None
        except NoNodeError:  # the server removed the parent, which was empty for a moment
            self._lock = self._made()
            return self.acquire(timeout)
        return _KazooHolding(self._lock, self._ttl) if taken else None


class _KazooHolding:
    token: int | None = None

    def __init__(self, lock: Any, ttl: float) -> None:
        self._lock, self.ttl = lock, ttl

    def believes(self) -> bool:
        return bool(self._lock.is_acquired)

    def release(self) -> object:
        return self._lock.release()


class Advisory:
    """PostgreSQL's ``pg_advisory_lock``. Each lock takes a connection from psycopg's pool, and returns it after the
    unlock.

    This control follows psycopg's documentation: the pool checks each connection that it hands out, autocommit leaves
    no transaction open, and ``SET LOCAL`` leaves no setting behind. It prepares no statement, because the server may be
    behind a pooler.
    """

    control = frozenset({"reset", "half-open", "taken"})

    @staticmethod
    def open(url: str, ttl: float) -> AdapterClient:
        """Return a client."""
        return _AdvisoryClient(url, ttl)

    @staticmethod
    def bound(url: str, ttl: float) -> float:
        """Return the seconds until the server has noticed that the holder's process has ended. The lock itself never
        expires."""
        return ttl

    @staticmethod
    def take(url: str, name: str) -> bool:
        """End the session that has the lock. An operator has no other way."""
        with _postgresql(url) as connection:
            return bool(_end_holders(connection, _advisory_key(url, name)))

    @staticmethod
    def sweep(url: str, begin: str) -> list[str]:
        """End all sessions that still have advisory locks of this contestant. The sessions of our clients have ended,
        so these belong to a pooler."""
        key = {**_advisory_key(url, begin), "name": None}
        until = multilock.now() + START_WITHIN
        with _postgresql(url) as connection:
            while (left := _end_holders(connection, key)) and multilock.now() < until:
                threading.Event().wait(0.05)
        return left


class _AdvisoryClient:
    def __init__(self, url: str, ttl: float) -> None:
        from psycopg_pool import ConnectionPool

        self._url, self._ttl = url, ttl
        self._pool = ConnectionPool(
            _conninfo(url), kwargs={"autocommit": True, "prepare_threshold": None}, min_size=1, max_size=8,
            check=ConnectionPool.check_connection, open=True,
        )  # fmt: skip

    def lock(self, name: str) -> AdapterLock:
        return _AdvisoryLock(self._pool, _advisory_key(self._url, name), self._ttl)

    def close(self) -> None:
        self._pool.close()


class _AdvisoryLock:
    def __init__(self, pool: Any, key: dict[str, str | None], ttl: float) -> None:
        self._pool, self._key, self._ttl = pool, key, ttl

    def acquire(self, timeout: float) -> AdapterHolding | None:
        import psycopg

        until = multilock.now() + timeout
        while (left := until - multilock.now()) > 0:
            with suppress(psycopg.OperationalError):  # the lock was not free in time, or the connection is lost
                connection = self._pool.getconn(left)
                try:
                    with connection.transaction():
                        connection.execute(f"SET LOCAL lock_timeout = {int(left * 1000) + 1}")
                        connection.execute(f"SELECT pg_advisory_lock({ADVISORY})", self._key)
                except BaseException:
                    self._pool.putconn(connection)
                    raise
                return _AdvisoryHolding(self._pool, connection, self._key, self._ttl)
        return None


class _AdvisoryHolding:
    token: int | None = None

    def __init__(self, pool: Any, connection: Any, key: dict[str, str | None], ttl: float) -> None:
        self._pool, self._connection, self._key, self.ttl = pool, connection, key, ttl

    def believes(self) -> bool:
        return not self._connection.closed

    def release(self) -> object:
        try:
            return self._connection.execute(f"SELECT pg_advisory_unlock({ADVISORY})", self._key).fetchone()[0]
        finally:
            self._pool.putconn(self._connection)


CONTROLS: dict[str, dict[str, type[Naive | RedisPy | Kazoo | Advisory]]] = {
    "redis": {"naive": Naive, "redis-py": RedisPy},
    "zookeeper": {"kazoo": Kazoo},
    "zk": {"kazoo": Kazoo},
    "postgresql": {"advisory": Advisory},
    "postgres": {"advisory": Advisory},
}
"""By scheme of a URL: the controls that run beside ours. `Flag` is used if none of them must fail in a pause."""


def _prefix(url: str) -> str:
    return resolve(url).prefix


def _redis(url: str) -> Any:
    import redis

    settings = resolve(url)
    client = redis.Redis.from_url(settings.url, socket_timeout=SOCKET_TIMEOUT, socket_connect_timeout=SOCKET_TIMEOUT)
    own = {name: value for name, value in settings.options.items() if name in (*LOGIN, "db")}
    client.connection_pool.connection_kwargs.update(own)  # as in multilock, options override the user info of the URL
    return client


def _delete(url: str, name: str) -> bool:
    with _redis(url) as client:
        return bool(client.delete(_prefix(url) + name))


def _sweep(url: str, begin: str) -> list[str]:
    with _redis(url) as client:
        keys = [*client.scan_iter(f"{_prefix(url)}{begin}*", count=1000)]
        for key in keys:
            client.delete(key)
        return sorted(key.decode() for key in keys if client.exists(key))


def _ours(url: str) -> Any:
    """Parse ``url``, and return multilock's backend for it, not yet connected."""
    return open_configured(resolve(url))


def _kazoo_client(url: str, ttl: float) -> Any:
    from kazoo.client import KazooClient

    ensemble = _ours(url)._ensemble
    retry = {"max_tries": -1, "delay": 0.05, "max_delay": 0.5}
    return KazooClient(
        ensemble.hosts + ensemble.chroot, timeout=ttl, connection_retry=retry, auth_data=[*ensemble.auth],
        default_acl=ensemble.acl, **ensemble.tls,
    )  # fmt: skip


@contextmanager
def _kazoo(url: str, ttl: float) -> Iterator[Any]:
    client = _kazoo_client(url, ttl)
    client.start(timeout=START_WITHIN)
    try:
        yield client
    finally:
        client.stop()
        client.close()


ADVISORY = "hashtext(%(begin)s), hashtext(%(name)s)"  # the two numbers that identify an advisory lock


def _advisory_key(url: str, name: str) -> dict[str, str | None]:
    """Return the two texts whose hashes are the key of an advisory lock. All names of the contestant begin with the
    first text."""
    begin = "".join(re.findall("[^-]*-", name)[:3])
    return {"begin": _prefix(url) + begin, "name": _prefix(url) + name}


def _conninfo(url: str) -> str:
    from psycopg.conninfo import make_conninfo

    endpoint = _ours(url)._endpoint
    hosts, ports = zip(*endpoint._hosts, strict=True)
    within = {"connect_timeout": int(START_WITHIN)}
    return make_conninfo("", host=",".join(hosts), port=",".join(ports), **within, **endpoint._settings)


@contextmanager
def _postgresql(url: str) -> Iterator[Any]:
    import psycopg

    with psycopg.connect(_conninfo(url), autocommit=True, prepare_threshold=None) as connection:
        yield connection


def _end_holders(connection: Any, key: dict[str, str | None]) -> list[str]:
    """End each session that holds this lock, and return the locks. If ``name`` is None, end the sessions that hold any
    lock whose name begins with ``begin``.

    If a pooler has given this connection the very session that holds the lock, this function unlocks instead.
    """
    rows = connection.execute(
        """SELECT objid, CASE pid WHEN pg_backend_pid() THEN pg_advisory_unlock(classid::int, objid::int)
             ELSE pg_terminate_backend(pid) END
           FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 2 AND granted
             AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
             AND classid = hashtext(%(begin)s)::oid
             AND (%(name)s::text IS NULL OR objid = hashtext(%(name)s)::oid)""",
        key,
    ).fetchall()
    return sorted(f"advisory lock {number}" for number, _ in rows)


def _make_container(client: Any, path: str) -> None:
    """Make a container node, and the directories above it."""
    from kazoo.exceptions import NodeExistsError
    from kazoo.protocol.serialization import Create2

    class CreateContainer(Create2):  # type: ignore[misc]  # kazoo does not have this request
        type = 19

    client.ensure_path(path.rpartition("/")[0] or "/")
    made = client.handler.async_result()
    client._call(CreateContainer(client.chroot + path, b"", client.default_acl, CONTAINER), made)
    with suppress(NodeExistsError):
        made.get(timeout=START_WITHIN)
