"""Open each backend in a simulated process, and replace those parts of the library that would reach the real world."""

from __future__ import annotations

import gc
import os
import re
import socket
import sys
import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import multilock_consul
import multilock_consul.notices
import multilock_consul.transport
import multilock_etcd
import multilock_memory
import multilock_postgresql
import multilock_redis
import multilock_sqlite
import multilock_zookeeper
from multilock import log_thread
from multilock.config import settings_for
from multilock.kernel import living_clients, worker
from multilock.kernel.inside_backend import inside
from multilock_etcd import transport as etcd_transport
from multilock_postgresql import transport
from multilock_redis.acquire_release import Replicas
from multilock_redis.keys import Keyspace
from multilock_redis.redlock import RedlockBackend
from multilock_redis.sentinel import Sentinel, SentinelEndpoint
from multilock_redis.slot_table import Address, key_slot
from multilock_redis.transport import Endpoint
from tests.simulation.consul_server import ConsulServer, Dialer
from tests.simulation.etcd_server import Channel, EtcdServer
from tests.simulation.plan import ProcessPlan
from tests.simulation.postgresql_server import Libpq, PostgresqlServer
from tests.simulation.redis_cluster import ClusterNode
from tests.simulation.redis_replicas import NAME, PORT, Guarded, Replicating
from tests.simulation.redis_server import Connection, RedisServer
from tests.simulation.scheduler import Over, Process, simulation
from tests.simulation.server import Server
from tests.simulation.threads import InOrder
from tests.simulation.zookeeper_client import connect_through
from tests.simulation.zookeeper_server import ZooKeeperServer

if TYPE_CHECKING:
    from tests.simulation.world import World

__all__ = ["FOLDER", "PREFIX", "SERVERS", "forget_everything", "open_backend"]

PREFIX = "ml/"
GUARD = 10.0  # seconds: `restart_guard`, as long as the longest ttl of a plan
FOLDER = "/dev/shm" if os.path.isdir("/dev/shm") else None  # the folder for the files of the SQLite backend


def open_backend(world: World, process: Process, plan: ProcessPlan) -> tuple[Any, Any]:
    """Return a backend for this process, and the settings of its client."""
    settings = settings_for("redis", {"ttl": plan.ttl, "outage_timeout": plan.outage})
    return OPENERS[world.plan.backend](world, plan.ttl), settings


def _memory(world: World, ttl: float) -> Any:
    return multilock_memory.open_backend("memory://simulation", {"prefix": PREFIX})


def _sqlite(world: World, ttl: float) -> Any:
    return multilock_sqlite.open_backend(f"sqlite:///{world.folder}/locks", {"prefix": PREFIX})


def _postgresql(world: World, ttl: float) -> Any:
    server = world.servers[0]
    assert isinstance(server, PostgresqlServer)
    backend: Any = multilock_postgresql.open_backend("postgresql://simulation", {"prefix": PREFIX, "ttl": ttl})
    backend._endpoint._connect_start = lambda conninfo: Libpq(world.network, server)
    return backend


def _settings(world: World) -> dict[str, Any]:
    return {"network": world.network, "servers": {server.name: server for server in world.servers}}


def _endpoints(world: World) -> list[Endpoint]:
    settings = _settings(world)
    return [
        Endpoint(f"redis://{server.name}", Connection, {**settings, "host": server.name}) for server in world.servers
    ]


def _redis(world: World, ttl: float) -> Any:
    return multilock_redis.RedisBackend("redis", _endpoints(world)[0], Keyspace(PREFIX), ttl=ttl)


def _sentinel(world: World, ttl: float) -> Any:
    group, settings, wanted = world.group, _settings(world), abs(world.plan.replicas)
    assert isinstance(group, Guarded)
    places = [{**settings, "host": each.name, "port": PORT} for each in group.sentinels]
    sentinels = [Sentinel("redis+sentinel", Connection, place) for place in places]
    endpoint = SentinelEndpoint("redis+sentinel", sentinels, NAME, Connection, settings)
    replicas = Replicas(wanted, wanted if world.plan.replicas < 0 else 0)
    return multilock_redis.RedisBackend("redis+sentinel", endpoint, Keyspace(PREFIX), replicas, ttl=ttl)


def _cluster(world: World, ttl: float) -> Any:
    settings, wanted = _settings(world), abs(world.plan.replicas)

    def endpoint_at(address: Address) -> Endpoint:
        return Endpoint(f"redis+cluster://{address}", Connection, {**settings, "host": address.host})

    replicas = Replicas(wanted, wanted if world.plan.replicas < 0 else 0)
    keys, capabilities = Keyspace(PREFIX, key_slot), multilock_redis._capabilities(ttl, replicas)
    seeds = [Address(server.name, PORT) for server in world.servers[:2]]
    return multilock_redis.ClusterBackend("redis+cluster", seeds, endpoint_at, keys, capabilities, replicas)


def _redlock(world: World, ttl: float) -> Any:
    return RedlockBackend("redlock", _endpoints(world), Keyspace(PREFIX), ttl=ttl, guard=GUARD)


def _consul(world: World, ttl: float) -> Any:
    server = world.servers[0]
    assert isinstance(server, ConsulServer)
    server.ttl_min = 10.0 if ttl >= 10 else 1.0
    for module in (multilock_consul.transport, multilock_consul.notices):
        vars(module)["socket"] = Dialer(world.network, server)
    options: dict[str, object] = {"prefix": PREFIX, "ttl": ttl}
    # A lock delay hides errors of less than a second. Only the removal of an agent needs it.
    if world.plan.seed % 3 and all(each.kind != "remove_agent" for each in world.plan.faults):
        options["lock_delay"] = 0
    return multilock_consul.open_backend("consul://simulation", options)


def _etcd(world: World, ttl: float) -> Any:
    server, process = world.servers[0], simulation().running().process
    vars(etcd_transport)["_channel"] = lambda cluster, target: Channel(world.network, server)
    # The transport remembers for the whole interpreter which hosts were silent, so each process has its own names.
    hosts = ",".join(f"host{number}.{process}" for number in range(world.plan.seed % 2 * 2 + 1))
    return multilock_etcd.open_backend(f"etcd://{hosts}", {"prefix": PREFIX, "ttl": ttl})


def _zookeeper(world: World, ttl: float) -> Any:
    server = world.servers[0]
    assert isinstance(server, ZooKeeperServer)
    server.shortest = ttl / 2  # the stalls of a plan are shorter than that
    connect_through(world.network, server)
    return multilock_zookeeper.open_backend("zookeeper://simulation", {"prefix": PREFIX, "ttl": ttl})


#: For each backend, the function that opens it. It gets the ttl of the client.
OPENERS: dict[str, Callable[[World, float], Any]] = {
    "memory": _memory,
    "sqlite": _sqlite,
    "redis": _redis,
    "redis+sentinel": _sentinel,
    "redis+cluster": _cluster,
    "redlock": _redlock,
    "postgresql": _postgresql,
    "etcd": _etcd,
    "consul": _consul,
    "zookeeper": _zookeeper,
}
#: For each backend that has simulated servers, the class and the number of them.
SERVERS: dict[str, tuple[type[Server], int]] = {
    "redis": (RedisServer, 1),
    "redis+sentinel": (Replicating, 3),
    "redis+cluster": (ClusterNode, 4),
    "redlock": (RedisServer, 3),
    "postgresql": (PostgresqlServer, 1),
    "etcd": (EtcdServer, 1),
    "consul": (ConsulServer, 1),
    "zookeeper": (ZooKeeperServer, 1),
}


def _say(
    self: object, level: int, message: str, args: tuple[object, ...], exc_info: object = None, extra: object = None
) -> None:
    """Log into the trace. A logged exception counts as an error of the run, unless it is `Over`, which ends tasks."""
    sim = simulation()
    if sim.over or sim.current is None:
        return
    error = exc_info if isinstance(exc_info, BaseException) else sys.exc_info()[1] if exc_info else None
    if error is not None and not isinstance(error, Over):
        trace = "".join(traceback.format_exception(error))[-2000:]
        sim.errors.append(f"{sim.current.process} logged {message % args}: {trace}")
    if sim.trace is not None and level > 10:
        text = re.sub(r" at 0x[0-9a-f]+", "", message % args)  # memory addresses would differ from run to run
        sim.note(sim.current.process, f"LOG {text}")


_caches: list[Callable[[], None]] = [
    value.cache_clear
    for name, module in sorted(sys.modules.items())
    if name.startswith("multilock")
    for value in vars(module).values()
    if hasattr(value, "cache_clear")
]


def forget_everything() -> None:
    """Forget what an earlier run has left in the modules of the library, so that each run begins alike."""
    for clear in _caches:
        clear()
    multilock_memory._stores.clear()
    living_clients._kernels.clear()
    worker.forget()
    etcd_transport._silent_at.clear()
    inside.clear()


log_thread.QueuedLogger._say = _say  # type: ignore[method-assign]
vars(log_thread)["defer"] = lambda call: None
vars(log_thread)["flush"] = lambda seconds: True
vars(transport)["os"] = SimpleNamespace(dup=lambda sock: sock)
vars(transport)["socket"] = SimpleNamespace(**{**vars(socket), "socket": lambda fileno: fileno})
for _name, _module in sorted(sys.modules.items()):
    if _name.startswith("multilock"):
        vars(_module)["set"] = InOrder
gc.disable()  # garbage is collected only between two runs, because a finalizer during a run would change it
gc.freeze()
