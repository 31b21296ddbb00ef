"""The locks of other programs in docs/interoperability.md, with the same methods for each lock."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol, cast

import redis
from kazoo.client import KazooClient
from kazoo.exceptions import LockTimeout

from tests.backends.zookeeper.curator import Curator
from tests.servers import RedisServer
from tests.servers_consul import ConsulServer, program
from tests.servers_etcd import EtcdServer
from tests.servers_zookeeper import ZooKeeperServer

__all__ = ["BACKENDS", "Refused", "Their"]


class Refused(Exception):
    """The other program refuses at once, because the present lock is not one of its own."""


class Their(Protocol):
    """One lock of another program, for one name."""

    def acquire(self, within: float) -> bool:
        """Acquire the lock. Return True if the program holds it now. Raises Refused."""

    def release(self) -> None: ...


class RedisPy:
    def __init__(self, server: RedisServer, name: str, stack: ExitStack) -> None:
        client = stack.enter_context(redis.Redis(port=server.port))
        self._lock = client.lock(f"multilock/{name}", timeout=60)

    def acquire(self, within: float) -> bool:
        return bool(self._lock.acquire(blocking_timeout=within))

    def release(self) -> None:
        self._lock.release()


class Tool:
    """A command that prints a line once it holds the lock, and holds it until the test ends the command."""

    def __init__(self, words: list[str], environment: dict[str, str], stack: ExitStack) -> None:
        self._words = words
        self._environment = {**os.environ, **environment}
        self._process: subprocess.Popen[bytes] | None = None
        stack.callback(self._close)

    def acquire(self, within: float) -> bool:
        process = self._process = subprocess.Popen(
            self._words, env=self._environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert process.stdout
        ready, _, _ = select.select([process.stdout], [], [], within)
        if ready and process.stdout.readline():
            return True
        if ready:
            assert process.stderr
            raise Refused(process.stderr.read().decode())
        self.release()
        return False

    def release(self) -> None:
        assert self._process
        self._process.terminate()
        self._process.wait(20)
        self._close()

    def _close(self) -> None:
        if self._process:
            self._process.kill()
            self._process.communicate()
            self._process = None


class Kazoo:
    """A recipe of kazoo, chosen by its name."""

    def __init__(self, recipe: str, server: ZooKeeperServer, name: str, stack: ExitStack) -> None:
        client = KazooClient(server.endpoint)
        client.start()
        stack.callback(client.close)
        stack.callback(client.stop)
        words = {"max_leases": 3} if recipe == "Semaphore" else {}
        self._lock = getattr(client, recipe)(f"/multilock/{name}", **words)

    def acquire(self, within: float) -> bool:
        try:
            return bool(self._lock.acquire(timeout=within))
        except LockTimeout:
            return False
        except ValueError as error:
            raise Refused(str(error)) from error

    def release(self) -> None:
        self._lock.release()


class Curators:
    """A recipe of Curator: "mutex" (InterProcessMutex), or the "read" or "write" lock of an
    InterProcessReadWriteLock."""

    def __init__(self, recipe: str, server: ZooKeeperServer, name: str, stack: ExitStack) -> None:
        self._recipe = recipe
        self._curator = Curator(server, f"/multilock/{name}")
        stack.callback(self._curator.close)

    def acquire(self, within: float) -> bool:
        return self._tell("try") == "held" or (within > 1 and self._tell("acquire") == "held")

    def release(self) -> None:
        self._tell("release")

    def _tell(self, word: str) -> str:
        return self._curator.tell(word, self._recipe).result()


def _etcdctl(*words: str) -> Make:
    def make(server: Any, name: str, stack: ExitStack) -> Their:
        verb, *value = words
        arguments = ["etcdctl", "--endpoints", cast("EtcdServer", server).endpoint, verb, f"multilock/{name}", *value]
        return Tool(arguments, {"ETCDCTL_API": "3"}, stack)

    return make


def _consul_lock(*words: str) -> Make:
    def make(server: Any, name: str, stack: ExitStack) -> Their:
        arguments = [program(), "lock", "-pass-stdin", *words, f"multilock/{name}", "echo held; read end"]
        return Tool(arguments, cast("ConsulServer", server).environment, stack)

    return make


def _recipe(kind: Callable[[str, Any, str, ExitStack], Their], recipe: str) -> Make:
    return lambda server, name, stack: kind(recipe, server, name, stack)


Make = Callable[[Any, str, ExitStack], Their]

BACKENDS: dict[str, tuple[Callable[[], contextlib.AbstractContextManager[Any]], dict[str, Make]]] = {
    "redis": (RedisServer, {"redis-py `Lock`": RedisPy}),
    "etcd": (EtcdServer, {"`etcdctl lock`": _etcdctl("lock"), "`etcdctl elect`": _etcdctl("elect", "node-7")}),
    "zookeeper": (
        ZooKeeperServer,
        {f"kazoo `{recipe}`": _recipe(Kazoo, recipe) for recipe in ("Lock", "ReadLock", "WriteLock", "Semaphore")},
    ),
    "zookeeper?node_style=curator": (
        ZooKeeperServer,
        {
            "Curator `InterProcessMutex`": _recipe(Curators, "mutex"),
            "Curator read lock": _recipe(Curators, "read"),
            "Curator write lock": _recipe(Curators, "write"),
        },
    ),
    "consul": (ConsulServer, {"`consul lock`": _consul_lock(), "`consul lock -n=3`": _consul_lock("-n=3")}),
}
"""By what stands behind the scheme in a URL: how its server is started, and what other programs lock there."""
